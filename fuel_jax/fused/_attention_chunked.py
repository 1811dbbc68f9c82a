"""Attention in bounded memory: head by head, a block of queries against the keys it can see.

holds     a few blocks of scores: ROWS · sk numbers each (ROWS · window under a window)
skips     keys that causality or a window hides from every query of a block; where only one side is
          bounded, up to an eighth of the queries share the range of keys
bound by  compute: as many products as the dense forms have, less what is skipped

A block's scores stay in cache: on the CPU this is several times faster than whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..numerics import wide, zeros
from ..types import Array
from . import _attention as maths
from ._attention import Places, Rules

ROWS = 256  # queries of a block, over all heads that share a key head
SPANS = 8  # ranges of keys; the program grows with their number
DENSE_BYTES = 4 << 20  # scores up to this size are left to the dense form


def refuses(q, k, v, *operands, **params) -> str | None:
    """Nothing to cut."""
    return "an operand is empty" if 0 in (*q.shape, *k.shape, *v.shape) else None


def declines(q, k, v, *operands, **params) -> str | None:
    """Why the dense form will do."""
    b, h, sq, d = q.shape
    if h * sq <= k.shape[1] * (d + v.shape[-1]):
        return "the scores take no more memory than keys and values"
    size = b * h * sq * k.shape[2] * 4
    if size > DENSE_BYTES:
        return None
    return f"the scores take {size / 2**20:.2g} MiB; chunks begin at {DENSE_BYTES >> 20} MiB"


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
    def of(cls, g: int, sq: int, sk: int, rules: Rules, whole: bool) -> Plan:
        """``whole``: all keys are in use."""
        n = -(-sq * g // ROWS)
        rows = -(-sq // n)
        return cls(sq, sk, rows, rules, tuple(spans(-(-sq // rows), rows, sq, sk, rules, whole)))

    def cut(self, x: Array) -> Array:
        """``[g, sq, ...]`` as ``[blocks, g, rows, ...]``, padded with zeros."""
        g, sq, *rest = x.shape
        padding = [(0, 0), (0, -sq % self.rows), *[(0, 0) for _ in rest]]
        return jnp.moveaxis(jnp.pad(x, padding).reshape(g, -1, self.rows, *rest), 1, 0)

    def join(self, parts: list[Array]) -> Array:
        """The inverse of :meth:`cut`, of the blocks of every span."""
        x = jnp.moveaxis(jnp.concatenate(parts), 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.sq]

    def keys(self, span: Span, start: Array, length: Array | None) -> tuple[Array, Places]:
        """The first key that the block of queries from ``start`` on reads, and the places."""
        shift = start + (self.sk if length is None else length) - self.sq
        if span.width == span.high - span.low:
            first = jnp.int32(span.low)
        else:
            assert self.rules.left is not None
            first = jnp.clip(shift - self.rules.left, span.low, span.high - span.width)
        q = maths.count(self.rows)[:, None] + shift
        return first, Places(q, maths.count(span.width) + first, length)


def spans(n: int, rows: int, sq: int, sk: int, rules: Rules, whole: bool) -> Iterator[Span]:
    """The ``n`` blocks of a head, by the keys they can see whatever ``k_len`` is."""
    left, right = rules.left, rules.right
    if left is not None and right is not None:
        yield Span(slice(0, n), 0, sk, min(sk, rows + left + right))
        return
    hides = right is not None or (left is not None and whole)
    each = -(-n // SPANS) if hides else n
    for i in range(0, n, each):
        first, end = i * rows, min(sq, (i + each) * rows)  # queries
        high = sk if right is None else min(sk, max(1, end + sk - sq + right))
        low = 0 if left is None or not whole else min(high - 1, max(0, first + sk - sq - left))
        yield Span(slice(i, min(n, i + each)), low, high, high - low)


def by_head(f: Callable[..., Any], xs: dict[str, Any], b: int, hk: int) -> Any:
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


def forward(q, k, v, alibi, k_len, *, softmax_scale, softcap, return_lse, **windows):
    """Each block of queries against all the keys it sees."""
    (b, h, sq, _), (_, hk, sk, _) = q.shape, k.shape
    scale = maths.scale_of(q, softmax_scale)
    rules = Rules.of(sq, sk, softcap=softcap, **windows)
    plan = Plan.of(h // hk, sq, sk, rules, k_len is None)
    xs, valid = heads(q, k, v, alibi, k_len)

    def head(q, k, v, slopes, length):
        dtype, q, k, v = q.dtype, plan.cut(wide(q) * scale), wide(k), wide(v)
        parts = []
        for span in plan.spans:

            def block(x, span=span):
                start, q = x
                first, at = plan.keys(span, start, length)
                ks, vs = (lax.dynamic_slice_in_dim(x, first, span.width) for x in (k, v))
                o, lse = maths.normalised(*maths.attend(q, ks, vs, slopes, at, rules))
                return o.astype(dtype), lse

            starts = maths.count(len(q)) * plan.rows
            parts.append(lax.map(block, (starts[span.blocks], q[span.blocks])))
        return [plan.join(list(part)) for part in zip(*parts, strict=True)]

    o, lse = by_head(head, xs, b, hk)
    o, lse = o.reshape(b, h, sq, -1), lse.reshape(b, h, sq)
    o, lse = maths.nan_unless(valid, o), maths.nan_unless(valid, lse)
    return (o, lse) if return_lse else o


def backward(q, k, v, o, lse, do, dlse, alibi, k_len, *, softmax_scale, softcap, **windows):
    """Recompute a block's probabilities; add what it says of its keys to the head's."""
    (b, h, sq, _), (_, hk, sk, _) = q.shape, k.shape
    scale = maths.scale_of(q, softmax_scale)
    rules = Rules.of(sq, sk, softcap=softcap, **windows)
    plan = Plan.of(h // hk, sq, sk, rules, k_len is None)
    xs, _ = heads(q, k, v, alibi, k_len)
    xs["do"], xs["dlse"] = (x if x is None else maths.grouped(x, hk) for x in (do, dlse))

    def head(q, k, v, slopes, length, do, dlse):
        dtype, k, v = q.dtype, wide(k), wide(v)
        queries = {"q": plan.cut(wide(q) * scale), "g": plan.cut(wide(do))}
        if dlse is not None:
            queries["dlse"] = plan.cut(dlse)
        sums = zeros(k.shape, k), zeros(v.shape, v), zeros(q.shape[:1], k)
        parts = []
        for span in plan.spans:

            def block(sums, x, span=span):
                start, x = x
                first, at = plan.keys(span, start, length)
                ks, vs = (lax.dynamic_slice_in_dim(x, first, span.width) for x in (k, v))
                given = x["q"], ks, vs, x["g"], x.get("dlse"), slopes, at, rules
                dq, dk, dv, dslopes = maths.gradients(*given)
                dks, dvs, total = sums
                total = total if dslopes is None else total + dslopes
                sums = added(dks, dk, first), added(dvs, dv, first), total
                return sums, (dq * scale).astype(dtype)

            starts = maths.count(len(queries["q"])) * plan.rows
            mine = jax.tree.map(lambda x, span=span: x[span.blocks], (starts, queries))
            sums, dq = lax.scan(block, sums, mine)
            parts.append(dq)
        dk, dv, dslopes = sums
        return plan.join(parts), dk.astype(dtype), dv.astype(dtype), dslopes

    dq, dk, dv, dslopes = by_head(head, xs, b, hk)
    dalibi = None if alibi is None else dslopes.reshape(b, h).sum(0).astype(alibi.dtype)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), dalibi


def added(total: Array, part: Array, first: Array) -> Array:
    """``total`` with ``part`` added to its rows from ``first`` on."""
    old = lax.dynamic_slice_in_dim(total, first, len(part))
    return lax.dynamic_update_slice_in_dim(total, old + part, first, 0)
