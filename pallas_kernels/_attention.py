"""What attention's kernels share: blocks of memory, products, scores, and who sees whom.

Where all rows of a block see all keys of another there is no mask.  Elsewhere a hidden key may hold
anything, and 0 · NaN is NaN: what is not finite counts as 0 in products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._launch import LOG2_E, cdiv, exp2, fma, logistic, power_of_two, triton
from ._rows import counted

LEAST_WIDTH = 16  # of an operand of a product on tensor cores


class Rules(NamedTuple):
    """Which keys a query at position p sees, p − left to p + right; what its scores are."""

    scale: float
    left: int | None
    right: int | None
    softcap: float | None


class Tile(NamedTuple):
    """How many rows meet how many keys at a time, in some warps; blocks on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """Of the operands.  Rows are the queries of a head, or ``packed``, those of a whole group."""

    b: int
    h: int
    hk: int
    sq: int
    sk: int
    packed: bool

    @classmethod
    def of(cls, q: Any, k: Any, packed: bool = False) -> Sizes:
        """Of ``q [b, h, sq, d]`` and ``k [b, hk, sk, d]``."""
        (b, h, sq, _), (_, hk, sk, _) = q.shape, k.shape
        return cls(b, h, hk, sq, sk, packed)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.h // self.hk

    @property
    def heads(self) -> int:
        """Heads of rows."""
        return self.hk if self.packed else self.h

    @property
    def rows(self) -> int:
        """Rows of a head."""
        return self.sq * self.group if self.packed else self.sq

    def by_rows(self, x: jax.Array) -> jax.Array:
        """``[b, h, sq, ...]`` as ``[b, heads, rows, ...]``."""
        return x.reshape(self.b, self.heads, self.rows, *x.shape[3:])


# -- blocks of memory ------------------------------------------------------------------------


def block(ref: Any, at: tuple[Any, ...], rows: jax.Array, end: Any = None) -> jax.Array:
    """Rows of the matrix at an index, all columns; 0 beyond either, and from row ``end`` on."""
    inside = rows[:, None] < ref.shape[-2] if ref.shape[-2] % len(rows) else None
    if end is not None:
        inside = rows[:, None] < end
    return columns_of(ref, (*at, rows[:, None]), inside)


def columns_of(ref: Any, at: tuple[Any, ...], inside: Any) -> jax.Array:
    """All columns of rows that are ``inside``, None for all; 0 for the others."""
    width = ref.shape[-1]
    columns = counted(power_of_two(max(width, LEAST_WIDTH)))[None, :]
    if width != columns.size:
        inside = columns < width if inside is None else inside & (columns < width)
    return triton().load(ref.at[(*at, columns)], mask=inside, other=None if inside is None else 0)


def read(ref: Any, sequence: Any, head: Any, keys: jax.Array, end: Any, table: Any) -> jax.Array:
    """Keys or values of a head; with a table, from the pages it names.

    From ``end`` on, if given, they are 0, and no page is looked up.
    """
    if table is None:
        return block(ref, (sequence, head), keys, end)
    size = ref.shape[1]
    inside = None if end is None else keys < end
    page = triton().load(
        table.at[sequence, keys // size], mask=inside, other=None if end is None else 0
    )
    inside = None if inside is None else inside[:, None]
    return columns_of(ref, (page[:, None], (keys % size)[:, None], head), inside)


def put(ref: Any, at: tuple[Any, ...], rows: jax.Array, x: jax.Array) -> None:
    """Write what :func:`block` would read."""
    *_, end, width = ref.shape
    columns = counted(x.shape[1])
    mask = (rows[:, None] < end) & (columns[None, :] < width)
    triton().store(ref.at[(*at, rows[:, None], columns[None, :])], x.astype(ref.dtype), mask=mask)


def numbers(ref: Any, at: tuple[Any, ...], rows: jax.Array, other: float) -> jax.Array:
    """One number a row; ``other`` beyond the last."""
    return triton().load(ref.at[(*at, rows)], mask=rows < ref.shape[-1], other=other)


def put_numbers(ref: Any, at: tuple[Any, ...], rows: jax.Array, x: jax.Array) -> None:
    """Write what :func:`numbers` would read."""
    triton().store(ref.at[(*at, rows)], x, mask=rows < ref.shape[-1])


# -- products and what they may not touch ----------------------------------------------------


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a · b``, summed in float32."""
    return product(a, b, 0)


def dot_turned(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a · bᵀ``, summed in float32."""
    return product(a, b, 1)


def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Over the last axis of ``a`` and one of ``b``; float32 in three products of its parts."""
    exact = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if a.dtype == jnp.float32 else None
    over = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, over, precision=exact, preferred_element_type=jnp.float32)


def is_finite(x: jax.Array) -> jax.Array:
    """Neither NaN nor infinite."""
    return jnp.abs(x.astype(jnp.float32)) < jnp.inf


def finite(x: jax.Array) -> jax.Array:
    """``x`` with 0 for NaN and infinity."""
    return jnp.where(is_finite(x), x, jnp.zeros_like(x))


def weigh_seen(p: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """``p · v``, in which a row is not touched by the values of keys that it does not see."""
    o = dot(p.astype(v.dtype), finite(v))
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        is_it = v != v if value != value else v == value
        hit = dot(seen.astype(v.dtype), is_it.astype(v.dtype)) > 0
        o = o + jnp.where(hit, value, 0)
    return o


# -- scores ----------------------------------------------------------------------------------


class Score(NamedTuple):
    """``s · unit + shift`` are scores by powers of 2; the slope of the cap; which of them count."""

    s: jax.Array
    unit: float
    shift: float
    bend: Any  # None: no cap
    seen: Any  # None: all of them

    def weights(self, m: jax.Array | float) -> jax.Array:
        """``2^(score − m)``."""
        level = m - self.shift
        return exp2(self.s - level if self.unit == 1 else fma(self.s, self.unit, -level))


def scored(
    s: jax.Array,
    at: jax.Array,
    key: jax.Array,
    slope: Any,
    length: Any,
    rules: Rules,
    masked: bool,
    far: Any = None,
) -> Score:
    """Products of queries at some positions and keys as scores; −inf where hidden.

    ``far`` is distance, if the caller has it, up to a number a row that is left to the caller.
    """
    unit, shift, bend, seen = rules.scale * LOG2_E, 0.0, None, None
    if rules.softcap is not None:
        # cap · tanh(x) is 2 cap / (1 + e⁻²ˣ) − cap.  The chip's own tanh is right to 5e-4.
        s = logistic(s * (2 * unit / rules.softcap))
        cap = rules.softcap * LOG2_E
        unit, shift, bend = 2 * cap, -cap, 4 * (s - s * s)
    elif unit < 0:
        s, unit = s * unit, 1.0
    if slope is not None:
        far = jnp.abs(at - key).astype(jnp.float32) if far is None else far
        s, unit = fma(s, unit, -slope * far), 1.0
    if masked:
        last = length - 1 if rules.right is None else jnp.minimum(at + rules.right, length - 1)
        seen = key <= last
        if rules.left is not None:
            seen = seen & (key >= at - rules.left)
        s = jnp.where(seen, s, -jnp.inf)
        bend = None if bend is None else jnp.where(seen, bend, 0)
    return Score(s, unit, shift, bend, seen)


class Span(NamedTuple):
    """Numbers of blocks: some rows see some keys from ``first`` on, all see all from ``whole``."""

    first: Any
    whole: Any
    edge: Any  # not any more
    last: Any
    before: bool  # whether there may be any from first to whole
    after: bool  # and from edge to last

    @classmethod
    def of(
        cls, some: tuple[Any, Any], every: tuple[Any, Any], size: int, before: bool, after: bool
    ) -> Span:
        """Blocks of a size, of what some and what all see, from … to, that not included."""
        low, high, start, end = (jnp.maximum(x, jnp.int32(0)) for x in (*some, *every))
        down = lambda x: lax.div(x, jnp.int32(size))
        up = lambda x: down(x + (size - 1))
        within = lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high)
        first = down(low)
        last = jnp.maximum(up(high), first)
        whole = within(up(start), first, last) if before else first
        edge = within(down(end), whole, last) if after else last
        return cls(first, whole, edge, last, before, after)

    @classmethod
    def seen(
        cls, low: Any, high: Any, length: Any, sk: int, size: int, rules: Rules, ragged: bool
    ) -> Span:
        """Of keys, seen from positions ``low`` to ``high``; ``ragged``: lengths differ."""
        some, every = [0, length], [0, length]
        if rules.left is not None:
            some[0], every[0] = low - rules.left, high - rules.left
        if rules.right is not None:
            some[1] = jnp.minimum(length, high + rules.right + 1)
            every[1] = jnp.minimum(length, low + rules.right + 1)
        before = rules.left is not None
        after = ragged or rules.right is not None or sk % size != 0
        return cls.of(tuple(some), tuple(every), size, before, after)

    def part(self, i: Any, parts: int) -> Span:
        """One of so many parts."""
        each = cdiv(self.last - self.first, parts)
        low = self.first + i * each
        high = jnp.minimum(low + each, self.last)
        first, whole, edge, last = (jnp.clip(x, low, high) for x in self[:4])
        return Span(first, whole, edge, last, self.before, self.after)

    def over(self, step: Callable[..., Any], carry: Any) -> Any:
        """``carry`` through ``step(masked)`` of every block."""
        if self.before:
            carry = lax.fori_loop(self.first, self.whole, step(True), carry)
        carry = lax.fori_loop(self.whole, self.edge, step(False), carry)
        return lax.fori_loop(self.edge, self.last, step(True), carry) if self.after else carry


class Rows(NamedTuple):
    """The rows of a program: their numbers, positions among the keys, slopes, and what they see."""

    number: jax.Array
    at: jax.Array
    slope: Any
    keys: Span

    @classmethod
    def of(
        cls,
        i: Any,
        head: Any,
        length: Any,
        slopes: Any,
        sizes: Sizes,
        tile: Tile,
        rules: Rules,
        ragged: bool,
    ) -> Rows:
        """Those of block ``i`` of a head; ``ragged``: lengths differ."""
        start = i * tile.rows
        index, shift = start + counted(tile.rows), length - sizes.sq
        if sizes.packed:
            at, low, high = index % sizes.sq + shift, shift, length - 1
        else:
            at, low = index + shift, start + shift
            high = jnp.minimum(low + tile.rows, length) - 1
        span = Span.seen(low, high, length, sizes.sk, tile.keys, rules, ragged)
        return cls(index, at, slopes_of(slopes, head, index, sizes), span)


def slopes_of(slopes: Any, head: Any, index: jax.Array, sizes: Sizes) -> Any:
    """Of distance, in powers of 2: one for each row if packed, else one."""
    if slopes is None:
        return None
    if sizes.packed:
        head = jnp.minimum(head * sizes.group + index // sizes.sq, sizes.h - 1)
        return (triton().load(slopes.at[head]).astype(jnp.float32) * LOG2_E)[:, None]
    return slopes[head].astype(jnp.float32) * LOG2_E


def length_of(lengths: Any, sequence: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Keys in use, and whether that is a number of keys at all; it is negative if not."""
    if lengths is None:
        return jnp.int32(sizes.sk), None
    length = lengths[sequence]
    return jnp.maximum(length, 0), length >= 0


def level_of(m: jax.Array) -> jax.Array:
    """What to subtract from scores up to ``m``."""
    return jnp.where(m == -jnp.inf, 0, m)


def base_of(lse: jax.Array) -> jax.Array:
    """In powers of 2; a row that sees nothing weighs nothing."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
