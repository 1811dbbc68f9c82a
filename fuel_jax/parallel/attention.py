"""Attention over a sequence that is split: keys and values go round, queries stay.

Each device holds one part of the queries and one of the keys and values.  Parts of keys visit all
devices in turn; what a device finds in each is combined by log-sum-exp.  No device holds the whole
sequence, nor scores of more than its own queries with one part of the keys; forward or backward.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._choose import server
from ..errors import ArgumentError
from ..fused import _attention as maths
from ..fused._attention import Rules
from ..fused._attention_triton import OF_MORE
from ..fused.flash_attn import flash_attn, flash_attn_backward
from ..numerics import check, vary_alike, wide
from ..types import Array
from ._placed import Layout, Pair

Order = Literal["zigzag", "contiguous"]
Block = Callable[..., tuple[Array, Array]]  # q, k, v -> o, lse
READ_LSE = ("mosaic", "triton")  # kernels of the gradient that take lse as given


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
    """The inverse of :func:`zigzag`, whose arguments it takes."""
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


@overload
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None = None,
    k_len: Array | int | None = None,
    *,
    axis: str,
    order: Order = "zigzag",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None = None,
    k_len: Array | int | None = None,
    *,
    axis: str,
    order: Order = "zigzag",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    alibi: Array | None = None,
    k_len: Array | int | None = None,
    *,
    axis: str,
    order: Order = "zigzag",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """:func:`fuel_jax.flash_attn` with sq and sk split over a mesh axis of n devices.

    n − 1 times each device passes its part of k and v on, while it computes with what has come
    before; the gradient goes the same way back from the part that came last, which is kept, and
    carries dk and dv home.  Of a causal mask, parts that see nothing are skipped.  What each step
    finds is rounded to the dtype of ``q`` before it is combined in float32 (float64 for float64).

    Without a mask, or with ``causal`` alone on as many keys as queries, the op's kernels serve.
    Windows, ``alibi``, ``k_len`` and causal masks on other lengths are computed in ``jax.numpy``, a
    block of queries at a time.  A causal window in contiguous order sends parts only as far as it
    reaches: 1 + ⌈window / (s/n)⌉ rounds instead of n.

    Args:
        q: this device's queries, ``[b, h, sq/n, d]``.
        k: its keys, ``[b, hk, sk/n, d]``.
        v: its values, ``[b, hk, sk/n, dv]``.
        alibi: slope of each query head, ``[h]``, the same on all devices; or None.
        k_len: keys in use of the whole sequence, one number or ``[b]``, the same on all devices;
            None is all.
        axis: name of the mesh axis that splits the sequence.
        order: of the parts: as :func:`zigzag` puts them, or one after the other.  It matters where
            positions do.  For a causal mask zigzag takes half the time: the last of contiguous
            parts waits for nobody and is waited for.
        softmax_scale: as in the op.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most; None is all.
        window_size_right: keys seen after the query, at most; None is all.
        softcap: as in the op.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        This device's ``[b, h, sq/n, dv]``; with ``return_lse`` also ``[b, h, sq/n]``.

    Raises:
        ArgumentError: an unknown order; an odd number of queries or keys on each device in zigzag
            order, where it matters; what the op refuses.

    Source: Liu et al. 2023, arXiv:2310.01889; the order: Brandon et al. 2023, arXiv:2311.09431,
    after https://github.com/zhuzilin/ring-flash-attention.
    """
    if order not in ("zigzag", "contiguous"):
        raise ArgumentError(
            f"ring_attention: 'order' is {order!r}; it must be 'zigzag' or 'contiguous'."
        )
    options = {"softmax_scale": softmax_scale, "softcap": softcap}
    masks: dict[str, Any] = {
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
    }
    masks["causal"] = causal
    k_len = None if k_len is None else jnp.asarray(k_len)
    flash_attn.out(q, k, v, alibi, k_len, **options, **masks)  # which refuses what is not right
    n, (sq, sk) = lax.axis_size(axis), (x.shape[2] * lax.axis_size(axis) for x in (q, k))
    rules = Rules.of(sq, sk, **masks, softcap=softcap)
    plain = alibi is None and k_len is None and rules.left is None
    everywhere = plain and rules.right is None  # no position matters
    if order == "zigzag" and not everywhere and (q.shape[2] % 2 or k.shape[2] % 2):
        raise ArgumentError(
            f"ring_attention: 'q' has {q.shape[2]} steps on each device and 'k' {k.shape[2]}; in "
            f"zigzag order they must be even where positions matter. Pad the sequence, or pass "
            f"order='contiguous'."
        )
    length, valid = maths.keys_in_use(k_len, sk)
    check(valid)
    if everywhere or (plain and rules.right == 0 and sq == sk):
        blocks = Blocks.of("all" if everywhere else order, options)
    else:
        scale = maths.scale_of(q, softmax_scale)
        blocks = Layout(order == "zigzag", n, sq, sk, rules, scale)
    slopes = maths.slopes_of(alibi, k.shape[1])
    *given, slopes, length = vary_alike(vary_over(axis, q, k, v, slopes, length))
    found: Any = ring(axis, blocks, *given, (slopes, length))
    o, lse = (maths.nan_unless(valid, x) for x in found)
    return (o, lse) if return_lse else o


def vary_over(axis: str, *arrays: Array | None) -> list[Any]:
    """Arrays that differ from device to device, also where they happen not to."""
    varies = lambda x: x is None or axis in jax.typeof(x).manual_axis_type.varying
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

    def own(self, q: Array, k: Array, v: Array, *rows: Array) -> tuple[Array, Array]:
        """Positions ascend in either order, so the mask is the plain one."""
        return self.all(q, k, v, *rows, causal=self[0] != "all")

    def all(
        self, q: Array, k: Array, v: Array, *rows: Array, causal: bool = False
    ) -> tuple[Array, Array]:
        """Every query sees every key.

        ``rows``, the result and the log-sum-exp over the keys of all devices, are there for the
        gradient, and are all that is returned then.
        """
        if rows:
            return part((("causal", causal), *self[1:]), q, k, v, *rows)
        return flash_attn(q, k, v, causal=causal, return_lse=True, **self.options)

    def earlier(self, q: Array, k: Array, v: Array, *rows: Array) -> tuple[Array, Array]:
        """Of a device before this one both pieces of queries see the early piece of keys."""
        if self[0] != "zigzag":
            return self.all(q, k, v, *rows)
        half = k.shape[2] // 2
        return self.all(q, k[:, :, :half], v[:, :, :half], *rows)

    def later(self, q: Array, k: Array, v: Array, *rows: Array) -> tuple[Array, Array]:
        """Of a device after this one the late piece of queries sees both pieces of keys."""
        if self[0] == "all":
            return self.all(q, k, v, *rows)
        half = 0 if self[0] == "contiguous" else q.shape[2] // 2
        blind = q.shape[2] - half
        o, lse = jax.eval_shape(self.all, q, k, v, *rows)
        none = jnp.zeros((*o.shape[:2], blind, o.shape[3]), o.dtype)
        no_lse = jnp.full((*o.shape[:2], blind), -jnp.inf, lse.dtype)
        none, no_lse, _ = vary_alike([none, no_lse, q])
        if not half:
            return none, no_lse
        o, lse = self.all(q[:, :, half:], k, v, *(x[:, :, half:] for x in rows))
        return jnp.concatenate([none, o], 2), jnp.concatenate([no_lse, lse], 2)


def passed_on(axis: str, *arrays: Array, by: int = 1) -> tuple[Array, ...]:
    """To the next device; what comes is from the one before.  By −1: the other way.

    Side by side in one array: of several transfers XLA lets one at a time go on during a kernel.
    """
    n = lax.axis_size(axis)
    came = lax.ppermute(jnp.concatenate(arrays, -1), axis, [(i, (i + by) % n) for i in range(n)])
    return tuple(jnp.split(came, np.cumsum([x.shape[-1] for x in arrays])[:-1], -1))


def meanwhile(came: Any, found: Any) -> Any:
    """Both, and what came is waited for only when the other is found; XLA may wait at once."""
    return lax.optimization_barrier((came, found))


def of_part(axis: str, blocks: Any, rest: Any, step: Any, f: Callable[[Block], Any]) -> Any:
    """``f`` of what is to be done with the keys that have come in so many steps."""
    me, own = lax.axis_index(axis), isinstance(step, int) and step == 0
    if isinstance(blocks, Layout):
        return f(Pair(blocks, me, me if own else (me - step) % blocks.devices, *rest))
    if own or blocks[0] == "all":
        return f(blocks.own if own else blocks.all)
    return lax.cond(step <= me, lambda: f(blocks.earlier), lambda: f(blocks.later))


def rounds(axis: str, blocks: Any) -> int:
    """Parts of keys that a device meets."""
    return blocks.rounds if isinstance(blocks, Layout) else lax.axis_size(axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring(axis: str, blocks: Any, q: Array, k: Array, v: Array, rest: Any) -> tuple[Array, Array]:
    """The result, like ``q``, and the log-sum-exp; ``rest`` are slopes and lengths."""
    o, lse = round_trip(axis, blocks, q, k, v, rest)[2:]
    return o.astype(q.dtype), lse


def round_trip(axis: str, blocks: Any, q: Array, k: Array, v: Array, rest: Any) -> Any:
    """The keys and values that come last, the result in the dtype of sums, the log-sum-exp.

    What a step needs is sent during the step before: neither waits for the other.
    """
    n = rounds(axis, blocks)

    def step(carry: Any, t: Any, last: bool = False) -> Any:
        k, v, o, lse = carry
        following = (k, v) if last else passed_on(axis, k, v)
        found = of_part(axis, blocks, rest, t, lambda block: block(q, k, v))
        following, found = meanwhile(following, found)
        return (*following, *combined((o, lse), found))

    following = (k, v) if n == 1 else passed_on(axis, k, v)
    own = of_part(axis, blocks, rest, 0, lambda block: block(q, k, v))
    following, (o, lse) = meanwhile(following, own)
    carry = *following, wide(o), lse
    if n > 2:
        steps = jnp.arange(1, n - 1, dtype=jnp.int32)
        carry, _ = lax.scan(lambda carry, t: (step(carry, t), None), carry, steps)
    return carry if n == 1 else step(carry, n - 1, last=True)


def combined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to two sets of keys from that to each: their mean by the sums of exponentials."""
    (o, lse), (o_b, lse_b) = a, b
    largest = jnp.maximum(lse, lse_b)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # neither sees a key
    w, w_b = jnp.exp(lse - largest), jnp.exp(lse_b - largest)
    total = w + w_b
    share, share_b = (jnp.where(total == 0, 0, x / total)[..., None] for x in (w, w_b))
    return share * o + share_b * wide(o_b), largest + jnp.log(total)


def save(axis: str, blocks: Any, q: Array, k: Array, v: Array, rest: Any) -> Any:
    """This device's own, and the keys and values to begin the way back with."""
    *held, o, lse = round_trip(axis, blocks, q, k, v, rest)
    result = o.astype(q.dtype)
    # Kernels read halves; only where positions matter the part's own result is not rounded either.
    return (result, lse), (q, k, v, rest, *held, o if isinstance(blocks, Layout) else result, lse)


def pull_back(axis: str, blocks: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """The same way back: dk and dv gather what each device says of them, and end at home."""
    q, k_own, v_own, rest, k, v, o, lse = saved
    n = rounds(axis, blocks)

    def gradients(block: Any, k: Array, v: Array) -> tuple[Array, ...]:
        """dq, dk, dv and, where positions matter, that of the slopes."""
        if isinstance(block, Pair):
            return block.gradients(q, k, v, o, lse, *cotangents)
        return jax.vjp(lambda q, k, v: block(q, k, v, o, lse), q, k, v)[1](cotangents)

    def found(k: Array, v: Array, t: Any) -> tuple[Array, ...]:
        return of_part(axis, blocks, rest, t, lambda block: gradients(block, k, v))

    def added(sums: Any, own: tuple[Array, ...], *coming: Array) -> Any:
        """dk and dv have been on their way while their next share was found; and what comes."""
        came = passed_on(axis, *sums[1:3], by=-1)
        (came, coming), own = meanwhile((came, coming), own)
        sums = sums[0], *came, *sums[3:]
        return *coming, *(wide(a) + wide(b) for a, b in zip(sums, own, strict=True))

    def step(carry: Any, t: Any) -> tuple[Any, None]:
        k, v, *sums = carry
        return added(sums, found(k, v, t), *passed_on(axis, k, v, by=-1)), None

    if n == 1:
        sums = found(k_own, v_own, 0)
    else:
        following = passed_on(axis, k, v, by=-1) if n > 2 else (k, v)
        following, sums = meanwhile(following, found(k, v, n - 1))
        if n > 2:
            steps = jnp.arange(n - 2, 0, -1, dtype=jnp.int32)
            (_, _, *sums), _ = lax.scan(step, (*following, *map(wide, sums)), steps)
        sums = added(sums, found(k_own, v_own, 0))
    grads = (x.astype(given.dtype) for x, given in zip(sums, (q, k, v), strict=False))
    return *grads, (None if rest[0] is None else sums[3], None)


ring.defvjp(save, pull_back)


# -- the gradient of a part of the keys --------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def part(options: Any, q: Array, k: Array, v: Array, o: Array, lse: Array) -> tuple[Array, Array]:
    """The result of all parts, as it is; its gradient is that by way of these keys and values."""
    return o, lse


def save_part(options: Any, *arrays: Array) -> Any:
    """Everything."""
    return part(options, *arrays), arrays


def pull_part(options: Any, saved: tuple[Array, ...], cotangents: Any) -> tuple[Any, ...]:
    """By a kernel that weighs keys by the log-sum-exp it is given, or from the part's own."""
    q, k, v, o, lse = saved
    params = dict(options)
    its: Any = flash_attn_backward
    operands = q, k, v, o, lse, *cotangents
    serves = server(its.explain(*operands, **params).forward, "cuda")
    again = functools.partial(by_own_lse, params)
    if serves is None or serves.kernel.name not in READ_LSE:
        return (*again(*saved, *cotangents), None, None)
    given = jax.custom_jvp(functools.partial(by_given_lse, params))
    # A kernel's derivative is the op's, which holds for the op's own log-sum-exp.
    given.defjvp(functools.partial(jax.jvp, again))
    return (*lax.platform_dependent(*saved, *cotangents, cuda=given, default=again), None, None)


def by_given_lse(
    params: Any, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dlse: Array
) -> tuple[Any, ...]:
    """Weights exp(s − lse) are those among the keys of all parts."""
    with OF_MORE(True):
        return tuple(flash_attn_backward(q, k, v, o, lse, do, dlse, **params)[:3])


def by_own_lse(
    params: Any, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dlse: Array
) -> Any:
    """o = Σ wᵢ oᵢ with wᵢ = exp(lseᵢ − lse), over the parts of the keys."""
    attend = functools.partial(flash_attn, **params, return_lse=True)
    (o_i, lse_i), pull = jax.vjp(attend, q, k, v)
    w = jnp.where(lse_i == -jnp.inf, 0, jnp.exp(lse_i - lse))
    dlse_i = w * (jnp.sum(wide(do) * (wide(o_i) - wide(o)), -1) + dlse)
    return pull(((w[..., None] * wide(do)).astype(o_i.dtype), dlse_i.astype(lse_i.dtype)))


part.defvjp(save_part, pull_part)
