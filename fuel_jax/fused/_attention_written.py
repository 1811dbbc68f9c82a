"""Attention as people write it, for ``fuse`` to recognise; layouts and mask spellings apart.

Axes: b batch, hk key heads, g queries' heads per key head, sq queries, sk keys, d width of q and k,
dv width of v.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from .._fused import FusedOp
from ..types import Array

GROUPED = {"q": "b hk g sq d", "k": "b hk sk d", "v": "b hk sk dv"}
REPEATED = {"q": "b h sq d", "k": "b h/2 sk d", "v": "b h/2 sk dv"}
NEEDS = ("exp", "maximum", "total")


def variants() -> list[dict[str, Any]]:
    """Which options a spelling has; those whose values are found in the program stay open."""
    found = []
    for mask, softcap, padded in itertools.product(("", "causal", "window"), (0, 1), (0, 1)):
        if mask and padded:
            continue  # programs count queries from the first key, the op from the last in use
        fixed: dict[str, Any] = {"causal": bool(mask)}
        fixed |= {} if mask == "window" else {"window_size_left": None}
        fixed |= {} if softcap else {"softcap": None}
        fixed |= {} if padded else {"k_len": None}
        found.append(fixed)
    return found


def textbook(
    q: Array,
    k: Array,
    v: Array,
    k_len: Array | None = None,
    *,
    softmax_scale: float,
    softcap: float,
    window_size_left: int,
    causal: bool,
) -> Array:
    """softmax(mask(cap(scale · q·kᵀ)))·v, with heads in groups."""
    s = softmax_scale * jnp.einsum("bhgqd,bhkd->bhgqk", q, k)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    p = jax.nn.softmax(masked(s, k_len, causal, window_size_left))
    return jnp.einsum("bhgqk,bhkd->bhgqd", p, v)


def repeated(
    q: Array,
    k: Array,
    v: Array,
    k_len: Array | None = None,
    *,
    softmax_scale: float,
    softcap: float,
    window_size_left: int,
    causal: bool,
) -> Array:
    """The same, keys and values repeated for every query head."""
    times = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, times, axis=1) for x in (k, v))
    options = {"softcap": softcap, "window_size_left": window_size_left, "causal": causal}
    o = textbook(q[:, :, None], k, v, k_len, softmax_scale=softmax_scale, **options)
    return o[:, :, 0]


def masked(s: Array, k_len: Array | None, causal: bool, window: int | None) -> Array:
    """−inf where a key is not seen; windows as programs with as many queries as keys write them."""
    sq, sk = s.shape[-2:]
    query, key = jnp.arange(sq)[:, None], jnp.arange(sk)
    seen = []
    if causal:
        seen.append(key <= query + (sk - sq))
    if window is not None:
        seen.append(key >= query - window)
    if k_len is not None:
        seen.append(key < k_len[:, None, None, None, None])
    for mask in seen[1:]:
        seen[0] = seen[0] & mask
    return jnp.where(seen[0], s, -jnp.inf) if seen else s


MASKED = {"q": "b hk g sq d", "k": "b hk sk d", "v": "b hk sk dv", "mask": "b sq sk"}


def with_a_mask(q: Array, k: Array, v: Array, mask: Array, *, softmax_scale: float) -> Array:
    """A mask that is an array."""
    s = softmax_scale * jnp.einsum("bhgqd,bhkd->bhgqk", q, k)
    p = jax.nn.softmax(jnp.where(mask[:, None, None], s, -jnp.inf))
    return jnp.einsum("bhgqk,bhkd->bhgqd", p, v)


def with_a_bias(q: Array, k: Array, v: Array, mask: Array, *, softmax_scale: float) -> Array:
    """A bias on the scores that is an array."""
    s = softmax_scale * jnp.einsum("bhgqd,bhkd->bhgqk", q, k) + mask[:, None, None]
    return jnp.einsum("bhgqk,bhkd->bhgqd", jax.nn.softmax(s), v)


# -- telling fuse --------------------------------------------------------------------------


def register(flash_attn: FusedOp) -> None:
    """Declare all of these as spellings of the op."""

    def by_flash(q, k, v, k_len=None, *, window_size_left, **params):
        """The textbook's heads and window as the op's."""
        heads = q.reshape(q.shape[0], -1, *q.shape[-2:])
        if window_size_left is not None:
            window_size_left += k.shape[2] - q.shape[-2]
        params["window_size_left"] = window_size_left
        o = flash_attn(heads, k, v, None, k_len, **params)
        return o.reshape(*q.shape[:-1], o.shape[-1])

    for fixed in variants():
        lengths = {} if "k_len" in fixed else {"k_len": "b"}
        needs = NEEDS if "softcap" in fixed else (*NEEDS, "tanh")
        needs = (*needs, "select") if lengths or fixed["causal"] else needs
        options = {"call": by_flash, "variants": [fixed], "dtypes": {"k_len": jnp.int32}}
        flash_attn.spelling(axes=GROUPED | lengths, needs=needs, **options)(textbook)
        flash_attn.spelling(axes=REPEATED | lengths, needs=(*needs, "merge"), **options)(repeated)
    why_not = "the {} is an array; the op takes causal masks, windows and lengths (k_len)"
    near = {"axes": MASKED, "needs": NEEDS}
    flash_attn.spelling(**near, why_not=why_not.format("bias"))(with_a_bias)
    near["dtypes"] = {"mask": jnp.bool_}
    flash_attn.spelling(**near, why_not=why_not.format("mask"))(with_a_mask)
