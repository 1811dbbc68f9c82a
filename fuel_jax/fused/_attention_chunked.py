"""Attention in bounded memory: head by head, a block of queries against the keys it can see.

holds     a few blocks of scores: ROWS · sk numbers each (ROWS · window under a window)
skips     keys that causality or a window hides from every query of a block; where only one side is
          bounded, an eighth of the queries share a range of keys, in the gradient a quarter
bound by  compute: as many products as the dense forms have, less what is skipped

A block's scores stay in cache: on the CPU this is several times faster than whole matrices.  XLA's
kernels for the CPU take a product, the maximum of its rows, the difference and the exponential in
one piece if there is nothing else in between, and read weights row by row.  So rows that see no key
see all of them here, until their result is set to 0; and hidden keys are multiplied, by 0.  If that
comes out as NaN, the careful forms of ``_attention`` do all of it again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._tiles import Tiles, around, varied

from ..numerics import uncontracted, wide, zeros
from ..types import Array
from . import _attention as maths
from ._attention import Places, Rules

ROWS = 256  # queries of a block, over all heads that share a key head
ROWS_SEEING_ALL = 512  # the same where no range of keys depends on the block
SPANS = 8  # ranges of keys; the program grows with their number,
SPANS_BACK = 4  # and that of a backward pass is twice as long; of a forward pass before it, too
DENSE_BYTES = 4 << 20  # scores up to this size are left to the dense form
DENSE_BYTES_CPU = 256 << 10  # [2, 4, 128, 32], causal: 0.85 of the dense form's time


class Rows(NamedTuple):
    """Queries of a block, over all heads that share a key head."""

    rows: int

    @classmethod
    def of(cls, rules: Rules) -> Rows:
        """By rule."""
        return cls(ROWS_SEEING_ALL if rules.left is None and rules.right is None else ROWS)


def tiles(q, k, v, *operands, softmax_scale, return_lse=False, **params) -> Tiles:
    """More or fewer queries."""
    (_, h, sq, d), (_, hk, sk, dv) = q.shape, v.shape
    first = Rows.of(maths.Rules.of(sq, sk, **params))
    rows = sq * (h // hk)
    ways = varied(first, rows=around(first.rows, most=max(first.rows, rows)))
    return Tiles.of({"rows": rows, "keys": sk, "width": max(d, dv)}, first, *ways)


def refuses(q, k, v, *operands, **params) -> str | None:
    """Nothing to cut."""
    return "an operand is empty" if 0 in (*q.shape, *k.shape, *v.shape) else None


def declines_up_to(dense: int) -> Callable[..., str | None]:
    """Why the dense form will do, where it does up to so many bytes of scores."""

    def declines(q, k, v, *operands, **params) -> str | None:
        b, h, sq, d = q.shape
        if h * sq <= k.shape[1] * (d + v.shape[-1]):
            return "the scores take no more memory than keys and values"
        size = b * h * sq * k.shape[2] * 4
        if size > dense:
            return None
        return f"the scores take {size / 2**20:.2g} MiB; chunks begin at {dense / 2**20:g} MiB"

    return declines


declines = declines_up_to(DENSE_BYTES)


def declines_on_cpu(*operands, return_lse, **params) -> str | None:
    """Sooner than elsewhere, unless a gradient wants lse: dense forms share what both compute."""
    return declines_up_to(DENSE_BYTES if return_lse else DENSE_BYTES_CPU)(*operands)


# -- which keys a block reads --------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive blocks of queries; each reads ``width`` of the keys from ``low`` to ``high``."""

    blocks: slice
    low: int
    high: int
    width: int


class Plan(NamedTuple):
    """How the queries of a head are cut."""

    sq: int
    sk: int
    rows: int
    rules: Rules
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        g: int,
        sq: int,
        sk: int,
        rules: Rules,
        whole: bool,
        most: int = SPANS,
        tile: Rows | None = None,
    ) -> Plan:
        """``whole``: all keys are in use; at ``most`` so many spans."""
        n = -(-sq * g // (tile or Rows.of(rules)).rows)
        rows = -(-sq // n)
        n = -(-sq // rows)
        return cls(sq, sk, rows, rules, tuple(spans(n, rows, sq, sk, rules, whole, most)))

    def cut(self, x: Array) -> Array:
        """``[g, sq, ...]`` as ``[blocks, g · rows, ...]``, padded with zeros."""
        g, sq, *rest = x.shape
        padding = [(0, 0), (0, -sq % self.rows), *[(0, 0) for _ in rest]]
        x = jnp.pad(x, padding).reshape(g, -1, self.rows, *rest)
        return jnp.moveaxis(x, 1, 0).reshape(-1, g * self.rows, *rest)

    def join(self, parts: list[Array]) -> Array:
        """The inverse of :meth:`cut`, of the blocks of every span."""
        x = jnp.concatenate(parts)
        x = jnp.moveaxis(x.reshape(len(x), -1, self.rows, *x.shape[2:]), 1, 0)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.sq]

    def keys(self, span: Span, start: Array, length: Array | None) -> tuple[Any, Block]:
        """The first key that the block of queries from ``start`` on reads, and the block."""
        left, right = self.rules.left, self.rules.right
        shift = start + (self.sk if length is None else length) - self.sq
        if span.width == span.high - span.low:
            first = span.low
        else:
            assert left is not None
            first = jnp.clip(shift - left, span.low, span.high - span.width)
        q = maths.count(self.rows)[:, None] + shift
        empty = None
        if length is not None:
            last = length - 1 if right is None else jnp.minimum(length - 1, q + right)
            low = 0 if left is None else jnp.maximum(0, q - left)
            empty = jnp.broadcast_to(low > last, q.shape)
        elif right is not None and self.sk - self.sq + right < 0:
            empty = q + right < 0
        return first, Block(Places(q, maths.count(span.width) + first, length), self.rules, empty)


def spans(
    n: int, rows: int, sq: int, sk: int, rules: Rules, whole: bool, most: int
) -> Iterator[Span]:
    """The ``n`` blocks of a head, by the keys they can see whatever ``k_len`` is."""
    left, right = rules.left, rules.right
    if left is not None and right is not None:
        yield Span(slice(0, n), 0, sk, min(sk, rows + left + right))
        return
    hides = right is not None or (left is not None and whole)
    each = -(-n // most) if hides else n
    for i in range(0, n, each):
        first, end = i * rows, min(sq, (i + each) * rows)  # queries
        high = sk if right is None else min(sk, max(1, end + sk - sq + right))
        low = 0 if left is None or not whole else min(high - 1, max(0, first + sk - sq - left))
        yield Span(slice(i, min(n, i + each)), low, high, high - low)


def over(blocks: Callable[..., Any], state: Any, xs: Any) -> tuple[Any, Any]:
    """``lax.scan``, without a loop for a single block."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.scan(blocks, state, xs)
    state, y = blocks(state, jax.tree.map(lambda x: x[0], xs))
    return state, jax.tree.map(lambda y: y[None], y)


# -- a block -------------------------------------------------------------------------------
#
# Queries are [g · rows, d]: scores in two axes, which XLA's kernels want.


class Block(NamedTuple):
    """Where the queries and keys of a block stand, and which of its rows see nothing."""

    at: Places
    rules: Rules
    empty: Array | None  # [rows, 1]; None: every row sees a key

    def by_head(self, x: Array) -> Array:
        """``[g · rows, ...]`` as ``[g, rows, ...]``."""
        return x.reshape(-1, len(self.at.q), *x.shape[1:])

    def with_empty(self, value: float, x: Array) -> Array:
        """``x [g · rows, n]`` with ``value`` in the empty rows."""
        if self.empty is None:
            return x
        return jnp.where(self.empty, value, self.by_head(x)).reshape(x.shape)


def weights(
    q: Array, k: Array, slopes: Array | None, block: Block
) -> tuple[Array, Array, Array, Array | None]:
    """``exp(s − m)``, its row sums, the row maxima m, the derivative of the cap.

    Empty rows get those of rows that see everything, so that nothing becomes NaN.
    """
    at, rules, empty = block
    s, bend, seen = maths.einsum("qd,kd->qk", q, k), None, at.seen(rules)
    if rules.softcap is not None:
        capped = jnp.tanh(s / rules.softcap)
        s, bend = rules.softcap * capped, 1 - jnp.square(capped)
    if slopes is not None:
        s = (block.by_head(s) - slopes * maths.distance(at, s)).reshape(s.shape)
    if seen is not None:
        seen = seen if empty is None else seen | empty
        s = jnp.where(seen, block.by_head(s), -jnp.inf).reshape(s.shape)
    s = uncontracted(s)
    m = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - m)
    return e, jnp.sum(e, -1, keepdims=True), m, bend


def attend(q: Array, k: Array, v: Array, slopes: Array | None, block: Block) -> tuple[Array, Array]:
    """Result and log-sum-exp."""
    e, total, m, _ = weights(q, k, slopes, block)
    o = block.with_empty(0, maths.einsum("qk,kd->qd", e, v) / total)
    return o, block.with_empty(-jnp.inf, m + jnp.log(total))[:, 0]


def carefully_attend(
    q: Array, k: Array, v: Array, slopes: Array | None, block: Block
) -> tuple[Array, Array]:
    """The same; nothing leaks."""
    q = block.by_head(q)
    o, lse = maths.normalised(*maths.attend(q, k, v, slopes, block.at, block.rules))
    return o.reshape(-1, o.shape[-1]), lse.reshape(-1)


def gradients(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    dlse: Array | None,
    slopes: Array | None,
    block: Block,
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dkᵀ, dvᵀ, dslopes): ``maths.gradients``, with 1/Σe on the small operands.

    Transposed, because ``dsᵀ·q`` would copy ds to transpose it; behind a barrier, because XLA would
    rather leave the transposition of q and g to a slower product.
    """
    e, total, _, bend = weights(q, k, slopes, block)
    share, g = block.with_empty(0, 1 / total), block.with_empty(0, g)
    dp = maths.einsum("qd,kd->qk", g, v)
    mean = jnp.sum(e * dp, -1, keepdims=True) * share
    if dlse is not None:
        mean = mean - block.with_empty(0, dlse[:, None])
    ds = e * (dp - mean)
    dslopes = None
    if slopes is not None:
        along = jnp.sum(block.by_head(ds) * maths.distance(block.at, ds), -1)
        dslopes = -jnp.sum(along * share.reshape(along.shape), -1)
    if bend is not None:
        ds = ds * bend
    dq = maths.einsum("qk,kd->qd", ds, k) * share
    q, g = (lax.optimization_barrier((x * share).T) for x in (q, g))
    return dq, maths.einsum("dq,qk->dk", q, ds), maths.einsum("dq,qk->dk", g, e), dslopes


def careful_gradients(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    dlse: Array | None,
    slopes: Array | None,
    block: Block,
) -> tuple[Array, Array, Array, Array | None]:
    """The same; nothing leaks."""
    q, g = block.by_head(q), block.by_head(g)
    dlse = None if dlse is None else block.by_head(dlse)
    parts = maths.gradients(q, k, v, g, dlse, slopes, block.at, block.rules)
    dq, dk, dv, dslopes = parts
    return dq.reshape(-1, dq.shape[-1]), dk.T, dv.T, dslopes


def unless_leaking(run: Callable[..., Any], fast: Any, careful: Any, most: int) -> Any:
    """``run(fast, most)``, but ``run(careful, 1)`` if that is not finite.

    Once for all heads, and as one small program: it is hardly ever needed.
    """
    result, telling = run(fast, most)
    finite = functools.reduce(operator.and_, map(maths.all_finite, telling))
    return lax.cond(finite, lambda: result, lambda: run(careful, 1)[0])


# -- all of them ---------------------------------------------------------------------------


def by_key_head(f: Callable[..., Any], xs: dict[str, Any], b: int, hk: int) -> Any:
    """``f(**x)`` for every key head of every sequence, one after the other; results stacked."""
    present = {n: x.reshape(b * hk, *x.shape[2:]) for n, x in xs.items() if x is not None}
    return lax.map(lambda x: f(**(dict.fromkeys(xs) | x)), present)


def heads(q, k, v, alibi, k_len) -> tuple[dict[str, Any], Array | None]:
    """The operands ``[b, hk, ...]``, and which ``k_len`` are valid."""
    b, hk, sk = k.shape[:3]
    length, valid = maths.keys_in_use(k_len, sk)
    slopes = maths.slopes_of(alibi, hk)
    xs = {"q": maths.grouped(q, hk), "k": k, "v": v, "slopes": None, "length": None}
    if slopes is not None:
        xs["slopes"] = jnp.broadcast_to(slopes, (b, *slopes.shape))
    if length is not None:
        xs["length"] = jnp.broadcast_to(length.reshape(-1, 1), (b, hk))
    return xs, valid


def seen_by(span: Span, first: Any, *arrays: Array) -> list[Array]:
    """The keys that a block of a span reads."""
    return [lax.dynamic_slice_in_dim(x, first, span.width) for x in arrays]


def forward(q, k, v, alibi, k_len, *, softmax_scale, softcap, return_lse, tile=None, **windows):
    """Each block of queries against all the keys it sees."""
    (b, h, sq, _), (_, hk, sk, _) = q.shape, k.shape
    scale = maths.scale_of(q, softmax_scale)
    rules = Rules.of(sq, sk, softcap=softcap, **windows)
    xs, valid = heads(q, k, v, alibi, k_len)

    def run(attend, most):
        plan = Plan.of(h // hk, sq, sk, rules, k_len is None, most, tile)

        def head(q, k, v, slopes, length):
            dtype, q, k, v = q.dtype, plan.cut(wide(q) * scale), wide(k), wide(v)
            parts = []
            for span in plan.spans:

                def block(_, x, span=span):
                    start, q = x
                    first, where = plan.keys(span, start, length)
                    o, lse = attend(q, *seen_by(span, first, k, v), slopes, where)
                    return None, (o.astype(dtype), lse)

                starts = maths.count(len(q)) * plan.rows
                parts.append(over(block, None, (starts[span.blocks], q[span.blocks]))[1])
            return [plan.join(list(part)) for part in zip(*parts, strict=True)]

        o, lse = by_key_head(head, xs, b, hk)
        o, lse = o.reshape(b, h, sq, -1), lse.reshape(b, h, sq)
        return (o, lse), (o,)

    most = SPANS_BACK if return_lse else SPANS
    o, lse = unless_leaking(run, attend, carefully_attend, most)
    o, lse = maths.nan_unless(valid, o), maths.nan_unless(valid, lse)
    return (o, lse) if return_lse else o


def backward(
    q, k, v, o, lse, do, dlse, alibi, k_len, *, softmax_scale, softcap, tile=None, **windows
):
    """Recompute a block's probabilities; add what it says of its keys to the head's."""
    (b, h, sq, _), (_, hk, sk, _) = q.shape, k.shape
    scale = maths.scale_of(q, softmax_scale)
    rules = Rules.of(sq, sk, softcap=softcap, **windows)
    xs, _ = heads(q, k, v, alibi, k_len)
    xs["do"], xs["dlse"] = (x if x is None else maths.grouped(x, hk) for x in (do, dlse))

    def run(gradients, most):
        plan = Plan.of(h // hk, sq, sk, rules, k_len is None, most, tile)

        def head(q, k, v, slopes, length, do, dlse):
            dtype, k, v = q.dtype, wide(k), wide(v)
            queries = {"q": plan.cut(wide(q) * scale), "g": plan.cut(wide(do))}
            if dlse is not None:
                queries["dlse"] = plan.cut(dlse)
            sums = zeros(k.shape[::-1], k), zeros(v.shape[::-1], v), zeros(q.shape[:1], k)
            parts = []
            for span in plan.spans:

                def block(sums, x, span=span):
                    start, x = x
                    first, where = plan.keys(span, start, length)
                    ks, vs = seen_by(span, first, k, v)
                    given = x["q"], ks, vs, x["g"], x.get("dlse"), slopes, where
                    dq, dk, dv, dslopes = gradients(*given)
                    dks, dvs, total = sums
                    total = total if dslopes is None else total + dslopes
                    sums = added(dks, dk, first), added(dvs, dv, first), total
                    return sums, (dq * scale).astype(dtype)

                starts = maths.count(len(queries["q"])) * plan.rows
                mine = jax.tree.map(lambda x, span=span: x[span.blocks], (starts, queries))
                sums, dq = over(block, sums, mine)
                parts.append(dq)
            dk, dv, dslopes = sums
            return plan.join(parts), dk.T.astype(dtype), dv.T.astype(dtype), dslopes

        found = by_key_head(head, xs, b, hk)
        return found, found[:3]

    dq, dk, dv, dslopes = unless_leaking(run, gradients, careful_gradients, SPANS_BACK)
    dalibi = None if alibi is None else dslopes.reshape(b, h).sum(0).astype(alibi.dtype)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dalibi


def added(total: Array, part: Array, first: Any) -> Array:
    """``total [d, sk]`` with ``part`` added to its columns from ``first`` on."""
    old = lax.dynamic_slice_in_dim(total, first, part.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total, old + part, first, 1)
