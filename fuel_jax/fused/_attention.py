"""The maths every attention op shares: which keys count, scores, softmax, gradients of a block.

Axes: b batch, h query heads, hk key heads, g = h / hk queries per key head, sq queries, sk keys,
d width of q and k, dv width of v.  A block is ``q [..., g, sq, d]``, ``k [..., sk, d]``,
``v [..., sk, dv]``; its scores are ``[..., g, sq, sk]``.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..numerics import product_precision, uncontracted, wide
from ..types import Array

SCORES = "...gqd,...kd->...gqk"  # queries times keys
VALUES = "...gqk,...kd->...gqd"  # weights times values
KEYS = "...gqk,...gqd->...kd"  # what every query of a group says of a key


class Rules(NamedTuple):
    """Which keys a query at position p sees, p − left to p + right; the bound on its scores."""

    left: int | None
    right: int | None
    softcap: float | None

    @classmethod
    def of(
        cls,
        sq: int,
        sk: int,
        *,
        causal: bool,
        window_size_left: int | None,
        window_size_right: int | None,
        softcap: float | None,
    ) -> Rules:
        """Without the bounds that hide nothing, whatever ``k_len`` is."""
        left = sk if window_size_left is None else window_size_left
        right = 0 if causal else sq if window_size_right is None else window_size_right
        return cls(left if left < sk - 1 else None, right if right < sq - 1 else None, softcap)


class Places(NamedTuple):
    """Where the queries and keys of a block stand, and how many keys are in use."""

    q: Array  # [..., 1, sq, 1]
    k: Array  # [sk]
    length: Array | None  # [..., 1, 1, 1]; None: all of them

    @classmethod
    def of(cls, sq: int, sk: int, length: Array | None) -> Places:
        """Those of whole operands: the last query at the last key in use.  ``length`` [] or [b]."""
        if length is not None:
            length = length.reshape(-1, 1, 1, 1, 1)
        first = (sk if length is None else length) - sq
        return cls(count(sq)[:, None] + first, count(sk), length)

    def seen(self, rules: Rules) -> Array | None:
        """Which scores count; None if all do."""
        parts = [] if self.length is None else [self.k < self.length]
        if rules.left is not None:
            parts.append(self.k >= self.q - rules.left)
        if rules.right is not None:
            parts.append(self.k <= self.q + rules.right)
        return functools.reduce(operator.and_, parts) if parts else None


def count(n: int) -> Array:
    """0, 1, … n − 1 in I32."""
    return jnp.arange(n, dtype=jnp.int32)


def within(x: Array, end: int) -> tuple[Array, Array]:
    """``x`` in I32, 0 where it is not from 0 to ``end`` − 1; and where it is.

    Compared as what it is: U32 0xFFFFFFFF is large, not −1.
    """
    x = jnp.asarray(x)
    valid = x >= 0
    if end <= jnp.iinfo(x.dtype).max:
        valid &= x < jnp.asarray(end, x.dtype)
    return jnp.where(valid, x, jnp.zeros_like(x)).astype(jnp.int32), valid


def keys_in_use(k_len: Any, sk: int) -> tuple[Array | None, Array | None]:
    """``k_len`` in I32 and where it is from 0 to ``sk``; None and None if all keys are in use."""
    return (None, None) if k_len is None else within(k_len, sk + 1)


def rejects(q, k, v, alibi=None, *rest, softmax_scale, softcap, **windows) -> str | None:
    """Sizes and parameters the annotations cannot express."""
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        return (
            f"'q' has {q.shape[1]} heads; it must be a multiple of the {k.shape[1]} of 'k'. "
            f"Query head i reads key head i // (heads of q / heads of k)."
        )
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        return f"parameter 'softmax_scale' is {softmax_scale}; it must be finite, or None for 1/√d."
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        return f"parameter 'softcap' is {softcap}; it must be positive. None turns it off."
    for name in ("window_size_left", "window_size_right"):
        size = windows.get(name)
        if size is not None and size < 0:
            return f"parameter {name!r} is {size}; it must be at least 0. None is unbounded."
    return None


# -- operands ------------------------------------------------------------------------------


def scale_of(q: Any, softmax_scale: float | None) -> float:
    """1/√d where none is given.  It goes on the queries: there are fewer of them than scores."""
    return max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale


def grouped(x: Array, hk: int) -> Array:
    """``[b, h, ...]`` as ``[b, hk, g, ...]``."""
    b, h, *rest = x.shape
    return x.reshape(b, hk, h // max(hk, 1), *rest)


def ungrouped(x: Array) -> Array:
    """The inverse of :func:`grouped`."""
    b, hk, g, *rest = x.shape
    return x.reshape(b, hk * g, *rest)


def slopes_of(alibi: Array | None, hk: int) -> Array | None:
    """``[hk, g, 1, 1]``."""
    return None if alibi is None else wide(alibi).reshape(hk, len(alibi) // max(hk, 1), 1, 1)


# -- products in which nothing leaks -------------------------------------------------------
#
# 0 · NaN is NaN.  A masked score is selected away, so the product that made it may hold anything;
# in a sum over keys a weight of 0 is not enough.


def einsum(spec: str, a: Array, b: Array) -> Array:
    """Sums of products, in IEEE arithmetic unless the user wants it otherwise."""
    return jnp.einsum(spec, a, b, precision=product_precision())


def finite(x: Array) -> Array:
    """``x`` with 0 for NaN and inf, for sums whose weights are NaN wherever it matters."""
    return jnp.where(jnp.isfinite(x), x, 0)


@jax.custom_jvp
def product(a: Array, b: Array) -> Array:
    """Queries times keys."""
    return einsum(SCORES, a, b)


@product.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (a, b), (da, db) = primals, tangents
    return product(a, b), einsum(SCORES, da, finite(b)) + einsum(SCORES, finite(a), db)


@custom_vmap
def all_finite(x: Array) -> Array:
    """Whether there is no NaN or inf in ``x``; under ``vmap``, in the whole batch."""
    return jnp.all(jnp.isfinite(x))


@all_finite.def_vmap
def _(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    return all_finite(x), False  # not batched: a cond on it stays a cond


@jax.custom_jvp
def weigh(e: Array, v: Array, seen: Array | None) -> Array:
    """``e @ v``, in which the values of keys not ``seen`` are not multiplied.

    The plain product is right if it comes out finite.  Else the rows that see nothing wrong are
    those of the finite values, and the others are summed as they are, with a select, one column of
    v after the other.
    """
    o = einsum(VALUES, e, v)
    if seen is None:
        return o

    def exact() -> Array:
        column = lambda v: jnp.sum(jnp.where(seen, e * v[..., None, None, :], 0), -1)
        sums = jnp.moveaxis(lax.map(column, jnp.moveaxis(v, -1, 0)), 0, -1)
        return jnp.where(jnp.isfinite(sums), einsum(VALUES, e, finite(v)), sums)

    return lax.cond(all_finite(lax.stop_gradient(o)), lambda: o, exact)


@weigh.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (e, v, seen), (de, dv, _) = primals, tangents
    return weigh(e, v, seen), einsum(VALUES, de, finite(v)) + einsum(VALUES, e, dv)


# -- a block -------------------------------------------------------------------------------


def scores(
    q: Array, k: Array, slopes: Array | None, at: Places, rules: Rules
) -> tuple[Array, Array | None, Array | None]:
    """Scores, −inf where masked; the derivative of the cap; which of them count."""
    s, bend, seen = product(q, k), None, at.seen(rules)
    if rules.softcap is not None:
        s = s if seen is None else jnp.where(seen, s, 0)
        capped = jnp.tanh(s / rules.softcap)
        s, bend = rules.softcap * capped, 1 - jnp.square(capped)
    if slopes is not None:
        s = s - slopes * distance(at, s)
    return (s if seen is None else jnp.where(seen, s, -jnp.inf)), bend, seen


def distance(at: Places, like: Array) -> Array:
    """Between each query and each key."""
    return jnp.abs(at.q - at.k).astype(like.dtype)


def softmax_parts(s: Array) -> tuple[Array, Array, Array]:
    """``exp(s − m)``, its row sums, and the row maximum ``m`` (constant to autodiff).

    A score that overflowed to +inf counts as the largest finite one.  A row of −inf alone, which
    sees nothing, has sum 0 and maximum −inf.
    """
    s = uncontracted(s)
    m = lax.stop_gradient(jnp.max(s, -1, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(s - level(m))
    return e, jnp.sum(e, -1, keepdims=True), m


def level(m: Array) -> Array:
    """What to subtract from scores up to ``m``."""
    return jnp.where(jnp.isneginf(m), 0, m)


def attend(
    q: Array, k: Array, v: Array, slopes: Array | None, at: Places, rules: Rules
) -> tuple[Array, Array, Array]:
    """One block: the weighted values, the weights' sum, the highest score."""
    s, _, seen = scores(q, k, slopes, at, rules)
    e, total, m = softmax_parts(s)
    return weigh(e, v, seen), total, m


def normalised(o: Array, total: Array, m: Array) -> tuple[Array, Array]:
    """Result and log-sum-exp; 0 and −inf where nothing was seen."""
    divisor = jnp.where(total == 0, 1, total)
    return o / divisor, (m + jnp.log(divisor))[..., 0]


def merged(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """What :func:`attend` would say of the keys of both."""
    (o, total, m), (o_b, total_b, m_b) = a, b
    highest = jnp.maximum(m, m_b)
    keep, add = jnp.exp(m - level(highest)), jnp.exp(m_b - level(highest))
    return keep * o + add * o_b, keep * total + add * total_b, highest


def gradients(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    dlse: Array | None,
    slopes: Array | None,
    at: Places,
    rules: Rules,
) -> tuple[Array, Array, Array, Array | None]:
    """One block's (dq, dk, dv, dslopes); every query must meet all of its keys in it.

    p = softmax(s),  dp = g·vᵀ,  ds = p ∘ (dp − Σ p∘dp + dlse).

    Nothing of the forward's result is read: where scores are so large that ``lse`` has no digits
    left for the sum, exp(s − lse) is no probability, and Σ g∘o need not be Σ p∘dp.
    """
    s, bend, seen = scores(q, k, slopes, at, rules)
    e, total, _ = softmax_parts(s)
    nothing = total == 0
    p = e * jnp.where(nothing, 0, 1 / jnp.where(nothing, 1, total))
    dp = product(g, v)
    if seen is not None:
        g, dp = jnp.where(nothing, 0, g), jnp.where(seen, dp, 0)
    pdp = p * dp
    mean = jnp.sum(pdp, -1, keepdims=True)
    if dlse is not None:
        mean = mean - jnp.where(nothing, 0, dlse[..., None])
    ds = pdp - p * mean
    dslopes = None if slopes is None else -jnp.sum(ds * distance(at, ds), (-2, -1))
    if bend is not None:
        ds = ds * bend
    if seen is not None:  # where ds is 0 they may hold anything
        q, k = finite(q), finite(k)
    return einsum(VALUES, ds, k), einsum(KEYS, ds, q), einsum(KEYS, p, g), dslopes


def nan_unless(valid: Array | None, x: Array) -> Array:
    """``x [b, ...]``, NaN for the sequences whose ``k_len`` is none."""
    if valid is None:
        return x
    return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)
