"""Attention over a sequence that is split: keys and values go round, queries stay.

Each device holds one part of the queries and one of the keys and values.  Parts of keys visit all
devices in turn; what a device finds in each is combined by log-sum-exp.  No device holds the whole
sequence, nor scores of more than its own queries with one part of the keys; forward or backward.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ArgumentError
from ..fused.flash_attn import flash_attn
from ..numerics import vary_alike, wide
from ..types import Array

Order = Literal["zigzag", "contiguous"]
Block = Callable[[Array, Array, Array], tuple[Array, Array]]  # q, k, v -> o, lse


def zigzag(x: Array, devices: int, axis: int) -> Array:
    """The sequence in the order in which equal parts of it are equal work under a causal mask.

    Of 2n pieces device i of n gets the i-th from the front and the i-th from the back: its early
    queries see little, its late ones much.

    Args:
        x: any shape.
        devices: number of parts n.
        axis: the sequence; a multiple of 2n long.

    Returns:
        An array like ``x``, to be split in n along ``axis``.
    """
    return jnp.take(x, order(x.shape[axis], devices), axis)


def unzigzag(x: Array, devices: int, axis: int) -> Array:
    """The inverse of :func:`zigzag`."""
    return jnp.take(x, np.argsort(order(x.shape[axis], devices)), axis)


def order(length: int, devices: int) -> np.ndarray:
    """Where each element of the reordered sequence comes from."""
    if length % (2 * devices):
        raise ArgumentError(
            f"zigzag: the sequence has {length} steps and {devices} devices take two pieces each; "
            f"its length must be a multiple of {2 * devices}. Pad it."
        )
    pieces = np.arange(length).reshape(2 * devices, -1)
    both = np.stack([pieces[:devices], pieces[: devices - 1 : -1]], 1)
    return both.reshape(-1)


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis: str,
    order: Order = "zigzag",
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """:func:`fuel_jax.flash_attn` with sq and sk split over a mesh axis of n devices.

    n − 1 times each device passes its part of k and v on; the gradient goes round once more, and
    carries dk and dv along.  Of a causal mask, parts that see nothing are skipped.  What each step
    finds is rounded to the dtype of ``q`` before it is combined in float32 (float64 for float64).

    Args:
        q: this device's queries, ``[b, h, s/n, d]``.
        k: its keys, ``[b, hk, s/n, d]``.
        v: its values, ``[b, hk, s/n, dv]``.
        axis: name of the mesh axis that splits the sequence.
        order: of the parts: as :func:`zigzag` puts them, or one after the other.  It matters for a
            causal mask only, and then zigzag takes half the time: the last of contiguous parts
            waits for nobody and is waited for.
        softmax_scale: as in the op.
        causal: hide keys after the query.
        softcap: as in the op.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        This device's ``[b, h, s/n, dv]``; with ``return_lse`` also ``[b, h, s/n]``.

    Raises:
        ArgumentError: an unknown order; queries and keys of different lengths under a causal mask,
            or of an odd number of them in zigzag order.

    Source: Liu et al. 2023, arXiv:2310.01889; the order: Brandon et al. 2023, arXiv:2311.09431,
    after https://github.com/zhuzilin/ring-flash-attention.
    """
    if order not in ("zigzag", "contiguous"):
        raise ArgumentError(
            f"ring_attention: 'order' is {order!r}; it must be 'zigzag' or 'contiguous'."
        )
    steps, kept = q.shape[2], k.shape[2]
    if causal and (steps != kept or (order == "zigzag" and steps % 2)):
        raise ArgumentError(
            f"ring_attention: 'q' has {steps} steps on each device and 'k' {kept}; under a causal "
            f"mask they must agree, and be even in zigzag order. Pad the sequence, or pass "
            f"order='contiguous'."
        )
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "return_lse": True}
    blocks = Blocks.of(order if causal else "all", options)
    given = vary_alike(vary_over(axis, q, k, v))
    found: Any = ring(axis, blocks, *given)
    o, lse = found
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def vary_over(axis: str, *arrays: Array) -> list[Array]:
    """Arrays that differ from device to device, also where they happen not to."""
    varies = lambda x: axis in jax.typeof(x).manual_axis_type.varying
    return [x if varies(x) else lax.pcast(x, (axis,), to="varying") for x in arrays]


class Blocks(tuple):
    """What a device does with its own keys, with those before them, with those after; hashable."""

    @classmethod
    def of(cls, order: str, options: dict[str, Any]) -> "Blocks":
        """For an order of the parts; ``"all"`` where no key is hidden."""
        return cls((order, *options.items()))

    @property
    def options(self) -> dict[str, Any]:
        """Of ``flash_attn``."""
        return dict(self[1:])

    def own(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Positions ascend in either order, so the mask is the plain one."""
        return flash_attn(q, k, v, causal=self[0] != "all", **self.options)

    def all(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Every query sees every key."""
        return flash_attn(q, k, v, **self.options)

    def earlier(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Of a device before this one both pieces of queries see the early piece of keys."""
        if self[0] != "zigzag":
            return self.all(q, k, v)
        half = k.shape[2] // 2
        return self.all(q, k[:, :, :half], v[:, :, :half])

    def later(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Of a device after this one the late piece of queries sees both pieces of keys."""
        if self[0] == "all":
            return self.all(q, k, v)
        half = 0 if self[0] == "contiguous" else q.shape[2] // 2
        blind = q.shape[2] - half
        o, lse = jax.eval_shape(self.all, q, k, v)
        none = jnp.zeros((*o.shape[:2], blind, o.shape[3]), o.dtype)
        no_lse = jnp.full((*o.shape[:2], blind), -jnp.inf, lse.dtype)
        none, no_lse, _ = vary_alike([none, no_lse, q])
        if not half:
            return none, no_lse
        o, lse = self.all(q[:, :, half:], k, v)
        return jnp.concatenate([none, o], 2), jnp.concatenate([no_lse, lse], 2)


def passed_on(axis: str, *arrays: Array) -> tuple[Array, ...]:
    """To the next device; what comes is from the one before."""
    n = lax.axis_size(axis)
    return tuple(lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]) for x in arrays)


def of_part(axis: str, blocks: Blocks, step: Array, f: Callable[[Block], Any]) -> Any:
    """``f`` of what is to be done with the keys that have come in so many steps."""
    if blocks[0] == "all":
        return f(blocks.all)
    me = lax.axis_index(axis)
    return lax.cond(step <= me, lambda: f(blocks.earlier), lambda: f(blocks.later))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(axis: str, blocks: Blocks, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The result in the dtype of sums, and the log-sum-exp."""
    o, lse = blocks.own(q, k, v)

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        k, v, o, lse = carry
        k, v = passed_on(axis, k, v)
        found = of_part(axis, blocks, t, lambda block: block(q, k, v))
        return (k, v, *combined((o, lse), found)), None

    steps = jnp.arange(1, lax.axis_size(axis), dtype=jnp.int32)
    (_, _, o, lse), _ = lax.scan(step, (k, v, wide(o), lse), steps)
    return o, lse


def combined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to two sets of keys from that to each: their mean by the sums of exponentials."""
    (o, lse), (o_b, lse_b) = a, b
    largest = jnp.maximum(lse, lse_b)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # neither sees a key
    w, w_b = jnp.exp(lse - largest), jnp.exp(lse_b - largest)
    total = w + w_b
    share, share_b = (jnp.where(total == 0, 0, x / total)[..., None] for x in (w, w_b))
    return share * o + share_b * wide(o_b), largest + jnp.log(total)


def save(axis: str, blocks: Blocks, q: Array, k: Array, v: Array) -> Any:
    """Nothing but this device's own."""
    found: Any = ring(axis, blocks, q, k, v)
    return found, (q, k, v, *found)


def pull_back(axis: str, blocks: Blocks, saved: Any, cotangents: Any) -> tuple[Array, ...]:
    """Round once more: o = Σ wᵢ oᵢ with wᵢ = exp(lseᵢ − lse), over the parts of the keys."""
    q, k, v, o, lse = saved
    do, dlse = cotangents
    rest = dlse - jnp.sum(do * o, -1)

    def gradients(block: Block, k: Array, v: Array) -> tuple[Array, Array, Array]:
        (o_i, lse_i), pull = jax.vjp(block, q, k, v)
        w = jnp.where(lse_i == -jnp.inf, 0, jnp.exp(lse_i - lse))
        dlse_i = w * (jnp.sum(do * wide(o_i), -1) + rest)
        dq, dk, dv = pull(((w[..., None] * do).astype(o_i.dtype), dlse_i.astype(lse_i.dtype)))
        return wide(dq), wide(dk), wide(dv)

    def step(carry: Any, t: Array) -> tuple[Any, None]:
        k, v, dk, dv, dq = carry
        k, v, dk, dv = passed_on(axis, k, v, dk, dv)
        found = of_part(axis, blocks, t, lambda block: gradients(block, k, v))
        return (k, v, dk + found[1], dv + found[2], dq + found[0]), None

    dq, dk, dv = gradients(blocks.own, k, v)
    steps = jnp.arange(1, lax.axis_size(axis), dtype=jnp.int32)
    (_, _, dk, dv, dq), _ = lax.scan(step, (k, v, dk, dv, dq), steps)
    dk, dv = passed_on(axis, dk, dv)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


ring.defvjp(save, pull_back)
