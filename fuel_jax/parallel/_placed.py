"""Attention between queries and keys that stand anywhere in a sequence that is split.

A kernel puts the last query at the last key.  Under a window, ALiBi or a number of keys in use it
matters where the parts stand, which only the device knows: plain ``jax.numpy``, with positions as
arrays.  A head at a time, some queries at a time; keys none of them sees are skipped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..fused import _attention as maths
from ..fused._attention import Places, Rules
from ..fused._attention_chunked import by_key_head
from ..numerics import vary_alike, wide, zeros
from ..types import Array

ROWS = 256  # queries at a time, over all heads that share a key head


class Layout(NamedTuple):
    """How whole sequences lie on the devices, and which keys a query sees; hashable."""

    zigzag: bool
    devices: int
    sq: int  # of the whole
    sk: int
    rules: Rules
    scale: float

    @property
    def rounds(self) -> int:
        """Parts of keys that come to a device, its own included.

        Where nothing after a query is seen, and before it a window only, the nearest will do.
        """
        left, right, _ = self.rules
        if self.zigzag or left is None or right != 0 or self.sq != self.sk:
            return self.devices
        return min(self.devices, 1 + -(-left // (self.sk // self.devices)))

    def positions(self, device: Array, size: int) -> Array:
        """Of the elements of a device's part, ``[size]``."""
        if not self.zigzag:
            return device * size + maths.count(size)
        half, late = maths.count(size // 2), 2 * self.devices - 1 - device
        return jnp.concatenate([device * len(half) + half, late * len(half) + half])


class Pair(NamedTuple):
    """The queries of one device and the keys of another."""

    layout: Layout
    queries: Array  # device
    keys: Array
    slopes: Array | None  # [hk, g, 1, 1]
    length: Array | None  # keys in use of the whole, [] or [b]

    def over(self, f: Callable[..., Any], q: Array, k: Array, v: Array, **rows: Array) -> Any:
        """``f(queries, k, v, slopes, at)`` for every head, what it does with its queries."""
        b, hk, sq = *k.shape[:2], q.shape[2]
        xs: dict[str, Any] = {n: maths.grouped(wide(x), hk) for n, x in rows.items()}
        xs |= {"q": maths.grouped(wide(q) * self.layout.scale, hk), "k": wide(k), "v": wide(v)}
        xs |= {"slopes": None, "length": None}
        if self.slopes is not None:
            xs["slopes"] = jnp.broadcast_to(self.slopes, (b, *self.slopes.shape))
        if self.length is not None:
            xs["length"] = jnp.broadcast_to(self.length.reshape(-1, 1), (b, hk))
        mine = self.layout.positions(self.queries, sq)
        theirs = self.layout.positions(self.keys, k.shape[2])

        def head(k: Array, v: Array, slopes: Any, length: Any, **queries: Array) -> Any:
            shift = (self.layout.sk if length is None else length) - self.layout.sq
            at = Places((mine + shift)[:, None], theirs, length)
            return f(queries, k, v, slopes, at)

        names = [n for n, x in xs.items() if x is not None]
        operands = dict(zip(names, vary_alike([xs[n] for n in names]), strict=True))
        return by_key_head(head, dict.fromkeys(xs) | operands, b, hk)

    def __call__(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Result in the dtype of sums, log-sum-exp."""
        rules, pieces = self.layout.rules, 1 + self.layout.zigzag

        def head(queries: Any, k: Array, v: Array, slopes: Any, at: Places) -> Any:
            def block(x: Any) -> Any:
                q, places = x["q"], x["at"]
                parts: Any = None
                for piece in range(pieces):
                    ks, vs, its = cut_keys(k, v, at._replace(q=places), piece, pieces)
                    run = lambda ks=ks, vs=vs, its=its: maths.attend(q, ks, vs, slopes, its, rules)
                    part = where_seen(its, rules, run, blind=(0, 0, -jnp.inf), like=q)
                    parts = part if parts is None else maths.merged(parts, part)
                return maths.normalised(*parts)

            return by_rows(block, queries | {"at": at.q[None]})

        o, lse = self.over(head, q, k, v)
        return o.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])

    def gradients(
        self, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array, dlse: Array
    ) -> tuple[Array, Array, Array, Array]:
        """(dq, dk, dv, dslopes) by way of these keys, in the dtype of sums.

        o = Σ wᵢ oᵢ with wᵢ = exp(lseᵢ − lse), over the parts of the keys.
        """
        rules, pieces = self.layout.rules, 1 + self.layout.zigzag

        def of_keys(x: Any, k: Array, v: Array, slopes: Any, its: Places) -> Any:
            o, lse = maths.normalised(*maths.attend(x["q"], k, v, slopes, its, rules))
            w = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - x["lse"]))
            dlse = w * (jnp.sum(x["do"] * (o - x["o"]), -1) + x["dlse"])
            given = x["q"], k, v, w[..., None] * x["do"], dlse, slopes, its, rules
            *found, dslopes = maths.gradients(*given)
            return *found, zeros(lse.shape[:1], lse) if dslopes is None else dslopes

        def head(queries: Any, k: Array, v: Array, slopes: Any, at: Places) -> Any:
            def block(sums: Any, x: Any) -> Any:
                dq, dks, dvs = zeros(x["q"].shape, x["q"]), [], []
                for piece in range(pieces):
                    ks, vs, its = cut_keys(k, v, at._replace(q=x["at"]), piece, pieces)
                    run = lambda ks=ks, vs=vs, its=its: of_keys(x, ks, vs, slopes, its)
                    own, dk, dv, dslopes = where_seen(its, rules, run, (0, 0, 0, 0), x["q"])
                    dq, sums = dq + own, (*sums[:2], sums[2] + dslopes)
                    dks.append(dk)
                    dvs.append(dv)
                dk, dv = jnp.concatenate(dks), jnp.concatenate(dvs)
                return (sums[0] + dk, sums[1] + dv, sums[2]), dq

            g = queries["q"].shape[0]
            sums = tuple(zeros(shape, queries["q"]) for shape in (k.shape, v.shape, (g,)))
            return by_rows(block, queries | {"at": at.q[None]}, sums)

        rows = {"o": o, "lse": lse, "do": do, "dlse": dlse}
        (dk, dv, dslopes), dq = self.over(head, q, k, v, **rows)
        b, hk = k.shape[:2]
        dslopes = dslopes.reshape(b, hk, -1, 1, 1).sum(0)
        dq = dq.reshape(q.shape) * self.layout.scale
        return dq, dk.reshape(k.shape), dv.reshape(v.shape), dslopes


def cut_keys(k: Array, v: Array, at: Places, piece: int, pieces: int) -> tuple[Any, ...]:
    """One of the pieces of a part that lie together in the sequence."""
    size = k.shape[0] // pieces
    mine = slice(piece * size, (piece + 1) * size)
    return k[mine], v[mine], at._replace(k=at.k[mine])


def where_seen(at: Places, rules: Rules, run: Callable[[], Any], blind: Any, like: Array) -> Any:
    """``run()``, unless no query sees a key: then all of these numbers."""
    seen = at.seen(rules)
    if seen is None:
        return run()
    filled = zip(jax.eval_shape(run), blind, strict=True)
    none = [vary_alike([jnp.full(y.shape, x, y.dtype), like])[0] for y, x in filled]
    return lax.cond(jnp.any(seen), lambda: tuple(run()), lambda: tuple(none))


def by_rows(block: Callable[..., Any], queries: dict[str, Array], sums: Any = None) -> Any:
    """``block`` of so many queries at a time; with ``sums``, which it is given and adds to.

    The queries are ``[g, sq, ...]``.  Those that fill the last block stand where the last one does
    and have no cotangent.
    """
    g, sq = queries["q"].shape[:2]
    n = -(-sq * g // ROWS)
    rows = -(-sq // n)

    def cut(x: Array) -> Array:
        padding = [(0, 0), (0, -sq % rows), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding, mode="edge" if x.dtype == jnp.int32 else "constant")
        return jnp.moveaxis(x.reshape(len(x), -1, rows, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :sq]

    def plain(x: Any) -> dict[str, Array]:
        return x | {"at": x["at"][0]}

    parts = {name: cut(x) for name, x in queries.items()}
    if sums is None:
        return jax.tree.map(join, lax.map(lambda x: block(plain(x)), parts))
    sums, found = lax.scan(lambda sums, x: block(sums, plain(x)), sums, parts)
    return sums, jax.tree.map(join, found)
