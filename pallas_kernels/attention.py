"""Attention in one pass over the keys, and its gradients; the scores never reach memory.

attend
    grid      blocks of rows × heads × (sequences × parts of the keys)
    reads     the keys and values that some row of a block sees
key_gradients
    grid      blocks of keys × key heads × sequences
    reads     the queries that see some key of a block, of all heads of its group
query_gradients
    grid      blocks of rows × heads × sequences
    reads     as attend
bound by  tensor cores: two products of each score forward, four and three backward (every score is
          made twice there, so that no two programs add to one number: the bits are always the same)

Where all rows of a block see all keys of another there is no mask.  Elsewhere a hidden key may hold
anything: 0 · NaN is NaN, so what is not finite counts as 0 in products, and what it means for rows
that do see it is added.

Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._launch import (
    LOG2_E,
    cdiv,
    exp2,
    fma,
    launch,
    like,
    power_of_two,
    program_id,
    reciprocal,
    triton,
)
from ._rows import counted

LN_2 = 0.6931471805599453
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
        return cls(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], packed)

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
    """``s · unit`` are scores by powers of 2; the slope of the cap; which of them count."""

    s: jax.Array
    unit: float
    bend: jax.Array | None
    seen: jax.Array | None

    def weights(self, m: jax.Array) -> jax.Array:
        """``2^(score − m)``."""
        return exp2(self.s - m if self.unit == 1 else fma(self.s, self.unit, -m))


def tanh(x: jax.Array) -> jax.Array:
    """By e²ˣ, to 1e-7; the chip's own is right to 5e-4."""
    return 1 - 2 * reciprocal(exp2(x * (2 * LOG2_E)) + 1)


def scored(
    s: jax.Array, at: jax.Array, key: jax.Array, slope: Any, length: Any, rules: Rules, masked: bool
) -> Score:
    """Products of queries at some positions and keys as scores; −inf where hidden."""
    unit, bend, seen = rules.scale * LOG2_E, None, None
    if rules.softcap is not None:
        capped = tanh(s * (rules.scale / rules.softcap))
        s, unit, bend = capped * (rules.softcap * LOG2_E), 1.0, 1 - capped * capped
    elif unit < 0 or slope is not None:
        s, unit = s * unit, 1.0
    if slope is not None:
        s = s - slope * jnp.abs(at - key).astype(jnp.float32)
    if masked:
        seen = key < length
        if rules.left is not None:
            seen &= key >= at - rules.left
        if rules.right is not None:
            seen &= key <= at + rules.right
        s = jnp.where(seen, s, -jnp.inf)
        bend = None if bend is None else jnp.where(seen, bend, 0)
    return Score(s, unit, bend, seen)


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
        low, high = (jnp.maximum(x, 0) for x in some)
        first = low // size
        last = jnp.maximum(cdiv(high, size), first)
        whole = jnp.clip(cdiv(jnp.maximum(every[0], 0), size), first, last) if before else first
        edge = jnp.clip(jnp.maximum(every[1], 0) // size, whole, last) if after else last
        return cls(first, whole, edge, last, before, after)

    def part(self, i: Any, parts: int) -> Span:
        """One of so many parts."""
        each = cdiv(self.last - self.first, parts)
        low = self.first + i * each
        bounds = (jnp.clip(x, low, jnp.minimum(low + each, self.last)) for x in self[:4])
        return Span(*bounds, self.before, self.after)

    def over(self, step: Callable[..., Any], carry: Any) -> Any:
        """``carry`` through ``step(masked)`` of every block."""
        if self.before:
            carry = lax.fori_loop(self.first, self.whole, step(True), carry)
        carry = lax.fori_loop(self.whole, self.edge, step(False), carry)
        return lax.fori_loop(self.edge, self.last, step(True), carry) if self.after else carry


class Rows(NamedTuple):
    """The rows of a program: their numbers, positions among the keys, slopes, and what they see."""

    index: jax.Array
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
        some, every = [0, length], [0, length]
        if rules.left is not None:
            some[0], every[0] = low - rules.left, high - rules.left
        if rules.right is not None:
            some[1] = jnp.minimum(length, high + rules.right + 1)
            every[1] = jnp.minimum(length, low + rules.right + 1)
        before = rules.left is not None
        after = ragged or rules.right is not None or sizes.sk % tile.keys != 0
        span = Span.of(tuple(some), tuple(every), tile.keys, before, after)
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


# -- forward ---------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a program of the forward pass works on."""

    at: tuple[Any, ...]  # its place among the results
    rows: Rows
    span: Span
    met: Callable[[Any, bool], tuple[Score, jax.Array]]  # scores and values of a block of keys
    valid: Any  # None: nothing else is possible

    @classmethod
    def of(
        cls,
        operands: Sequence[Any],
        *,
        sizes: Sizes,
        tile: Tile,
        rules: Rules,
        parts: int,
    ) -> Task:
        """This program's."""
        q_ref, k_ref, v_ref, slopes, lengths, table = operands
        i = cdiv(sizes.rows, tile.rows) - 1 - program_id(0)  # under causality the last do most
        head, sequence, part = program_id(1), program_id(2) // parts, program_id(2) % parts
        key_head = head if sizes.packed else head // sizes.group
        length, valid = length_of(lengths, sequence, sizes)
        rows = Rows.of(i, head, length, slopes, sizes, tile, rules, lengths is not None)
        q = block(q_ref, (sequence, head), rows.index)

        def met(j: Any, masked: bool) -> tuple[Score, jax.Array]:
            keys = j * tile.keys + counted(tile.keys)
            end = length if masked else None
            k, v = (read(ref, sequence, key_head, keys, end, table) for ref in (k_ref, v_ref))
            at, key = rows.at[:, None], keys[None, :]
            return scored(dot_turned(q, k), at, key, rows.slope, length, rules, masked), v

        at = (sequence, head) if parts == 1 else (part, sequence, head)
        span = rows.keys if parts == 1 else rows.keys.part(part, parts)
        return cls(at, rows, span, met, valid)


def attend_kernel(*refs: Any, width: int, leaks: bool, **task: Any) -> None:
    """One block of rows against the keys they see: a running maximum, sum and weighted sum."""
    *operands, o_ref, lse_ref, spoiled_ref = refs
    its = Task.of(operands, **task)

    def step(masked: bool) -> Callable[..., Any]:
        def over(j: Any, carry: Any) -> Any:
            m, total, o = carry
            x, v = its.met(j, masked)
            top = jnp.maximum(m, jnp.max(x.s, axis=1) * x.unit)
            p, keep = x.weights(level_of(top)[:, None]), exp2(m - level_of(top))
            o = o * keep[:, None] + dot(p.astype(v.dtype), v)
            return top, total * keep + jnp.sum(p, axis=1), o

        return over

    rows = task["tile"].rows
    none = jnp.full(rows, -jnp.inf, jnp.float32)
    start = none, jnp.zeros(rows, jnp.float32), jnp.zeros((rows, width), jnp.float32)
    m, total, o = its.span.over(step, start)
    divisor = jnp.where(total == 0, 1, total)
    o, lse = o * (1 / divisor)[:, None], m * LN_2 + jnp.log(divisor)
    if leaks:
        # To mend it in this kernel would take registers from the loop: it took four times as long.
        spoiled = jnp.max(jnp.max(jnp.where(is_finite(o), 0, 1), axis=1), axis=0)
        spoiled_ref[(*its.at, program_id(0))] = spoiled
    if its.valid is not None:
        o, lse = jnp.where(its.valid, o, jnp.nan), jnp.where(its.valid, lse, jnp.nan)
    put(o_ref, its.at, its.rows.index, o)
    put_numbers(lse_ref, its.at, its.rows.index, lse)


def mend_kernel(*refs: Any, width: int, **task: Any) -> None:
    """Where something came out as NaN or infinite: again, and no hidden value touches a row."""
    *operands, _, lse_ref, spoiled_ref, o_ref = refs
    its = Task.of(operands, **task)

    def mend() -> None:
        level = base_of(numbers(lse_ref, its.at, its.rows.index, jnp.inf))[:, None]

        def over(j: Any, o: jax.Array) -> jax.Array:
            x, v = its.met(j, True)
            return o + weigh_seen(x.weights(level), v, x.seen)

        start = jnp.zeros((task["tile"].rows, width), jnp.float32)
        put(
            o_ref, its.at, its.rows.index, lax.fori_loop(its.span.first, its.span.last, over, start)
        )

    lax.cond(spoiled_ref[(*its.at, program_id(0))] > 0, mend, lambda: None)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array | None,
    lengths: jax.Array | None,
    *,
    rules: Rules,
    tile: Tile,
    table: jax.Array | None = None,
    parts: int = 1,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Result ``[b, h, sq, dv]`` like ``q``, and log-sum-exp ``[b, h, sq]`` in float32.

    Args:
        q: ``[b, h, sq, d]``, float16 or bfloat16, like k and v.
        k: ``[b, hk, sk, d]``; query head i reads key head i // (h / hk).
        v: ``[b, hk, sk, dv]``.
        slopes: of distance, ``[h]``, or None.
        lengths: keys in use, int32 ``[b]``; None is all.  A negative one gives NaN.
        rules: what a row sees.
        tile: what a program works on.
        table: pages of each sequence in order, int32 ``[b, m]``, all of them pages that are there;
            k and v are then ``[pages, size, hk, ...]``, and the keys of a sequence its pages'.
        parts: programs that share the keys of a block of rows.
        packed: one block of rows takes queries of all heads of a group.
        interpret: run without a GPU.
    """
    sizes = Sizes.of(q, k, packed)
    if table is not None:
        sizes = sizes._replace(hk=k.shape[2], sk=table.shape[1] * k.shape[1])
    lead = () if parts == 1 else (parts,)
    of_rows = (*lead, sizes.b, sizes.heads, sizes.rows)
    n = cdiv(sizes.rows, tile.rows)
    leaks = rules.left is not None or rules.right is not None
    results = (
        like(q, (*of_rows, v.shape[-1]), q.dtype if parts == 1 else jnp.float32),
        like(q, of_rows, jnp.float32),
        like(q, (*of_rows[:-1], n), jnp.int32) if leaks else None,
    )
    width = power_of_two(max(v.shape[-1], LEAST_WIDTH))
    task = {"sizes": sizes, "tile": tile, "rules": rules, "parts": parts, "width": width}
    how: dict[str, Any] = {"grid": (n, sizes.heads, sizes.b * parts), "warps": tile.warps}
    how |= {"stages": tile.stages, "interpret": interpret}
    operands = (sizes.by_rows(q), k, v, slopes, lengths, table)
    run = functools.partial(attend_kernel, **task, leaks=leaks)
    o, lse, spoiled = launch(run, "attention", out=results, **how)(*operands)
    if leaks:
        run = functools.partial(mend_kernel, **task)
        place = sum(x is not None for x in operands)
        o = launch(run, "attention_mend", out=results[0], aliases={place: 0}, **how)(
            *operands, o, lse, spoiled
        )
    if parts > 1:
        o, lse = combined(o, lse)
    return o.reshape(*q.shape[:3], -1).astype(q.dtype), lse.reshape(q.shape[:3])


def combined(o: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The results of parts of the keys, ``[parts, ...]``, as one."""
    top = jnp.max(lse, axis=0)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(share, axis=0)
    divisor = jnp.where(total == 0, 1, total)
    return jnp.sum(o * (share / divisor)[..., None], axis=0), top + jnp.log(divisor)


# -- backward --------------------------------------------------------------------------------


def key_gradients_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    slopes: Any,
    lengths: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    sizes: Sizes,
    tile: Tile,
    rules: Rules,
) -> None:
    """One block of keys: what all rows that see it say of its keys and values."""
    start, key_head, sequence = program_id(0) * tile.keys, program_id(1), program_id(2)
    length, _ = length_of(lengths, sequence, sizes)
    keys, shift = start + counted(tile.keys), length - sizes.sq
    k, v = (block(ref, (sequence, key_head), keys) for ref in (k_ref, v_ref))
    end = start + tile.keys
    none, all_rows = jnp.int32(0), jnp.int32(sizes.sq)
    some, every = [none, jnp.where(start < length, all_rows, 0)], [none, all_rows]
    if rules.right is not None:
        some[0], every[0] = start - rules.right - shift, end - 1 - rules.right - shift
    if rules.left is not None:
        some[1] = jnp.minimum(some[1], end + rules.left - shift)
        every[1] = jnp.minimum(all_rows, start + rules.left - shift + 1)
    every[1] = jnp.where(end <= length, every[1], 0)
    # Rows beyond the last weigh nothing: a block that holds some is whole if all others see it.
    whole_to = jnp.where(every[1] == sizes.sq, cdiv(sizes.sq, tile.rows) * tile.rows, every[1])
    after = lengths is not None or rules.left is not None or sizes.sk % tile.keys != 0
    every[1] = whole_to
    span = Span.of(tuple(some), tuple(every), tile.rows, rules.right is not None, after)

    def step(masked: bool, head: Any, slope: Any) -> Callable[..., Any]:
        def over(i: Any, carry: Any) -> Any:
            dk, dv = carry
            index = i * tile.rows + counted(tile.rows)
            q, g = (block(ref, (sequence, head), index) for ref in (q_ref, g_ref))
            lse = numbers(lse_ref, (sequence, head), index, jnp.inf)
            delta = numbers(delta_ref, (sequence, head), index, 0)
            at = (index + shift)[None, :]
            x = scored(dot_turned(k, q), at, keys[:, None], slope, length, rules, masked)
            p = x.weights(base_of(lse)[None, :])
            if masked:
                q, g = finite(q), jnp.where((lse == -jnp.inf)[:, None], jnp.zeros_like(g), g)
                p = jnp.where(x.seen, p, 0)
            ds = p * (dot_turned(v, g) - delta[None, :])
            ds = bent(ds if x.seen is None else jnp.where(x.seen, ds, 0), x)
            return dk + dot(ds.astype(q.dtype), q), dv + dot(p.astype(g.dtype), g)

        return over

    def of_head(i: Any, carry: Any) -> Any:
        head = key_head * sizes.group + i
        slope = slopes_of(slopes, head, keys, sizes)
        return span.over(functools.partial(step, head=head, slope=slope), carry)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    if sizes.group == 1:
        dk, dv = of_head(0, zeros)
    else:
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(sizes.group), of_head, zeros)
    put(dk_ref, (sequence, key_head), keys, dk * rules.scale)
    put(dv_ref, (sequence, key_head), keys, dv)


def query_gradients_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    g_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    slopes: Any,
    lengths: Any,
    dq_ref: Any,
    dslope_ref: Any,
    *,
    sizes: Sizes,
    tile: Tile,
    rules: Rules,
) -> None:
    """One block of rows: what the keys they see say of them, and of the slope of distance."""
    i = cdiv(sizes.rows, tile.rows) - 1 - program_id(0)
    head, sequence = program_id(1), program_id(2)
    length, _ = length_of(lengths, sequence, sizes)
    rows = Rows.of(i, head, length, slopes, sizes, tile, rules, lengths is not None)
    q, g = (block(ref, (sequence, head), rows.index) for ref in (q_ref, g_ref))
    lse = numbers(lse_ref, (sequence, head), rows.index, jnp.inf)
    delta = numbers(delta_ref, (sequence, head), rows.index, 0)
    level = base_of(lse)[:, None]

    def step(masked: bool) -> Callable[..., Any]:
        def over(j: Any, carry: Any) -> Any:
            dq, dslope = carry
            keys = j * tile.keys + counted(tile.keys)
            k, v = (block(ref, (sequence, head // sizes.group), keys) for ref in (k_ref, v_ref))
            at, key = rows.at[:, None], keys[None, :]
            x = scored(dot_turned(q, k), at, key, rows.slope, length, rules, masked)
            ds = x.weights(level) * (dot_turned(g, v) - delta[:, None])
            if masked:
                ds, k = jnp.where(x.seen, ds, 0), finite(k)
            if dslope is not None:
                dslope += jnp.sum(ds * jnp.abs(at - key).astype(jnp.float32), axis=1)
            return dq + dot(bent(ds, x).astype(k.dtype), k), dslope

        return over

    dslope = None if slopes is None else jnp.zeros(tile.rows, jnp.float32)
    dq, dslope = rows.keys.over(step, (jnp.zeros(q.shape, jnp.float32), dslope))
    put(dq_ref, (sequence, head), rows.index, dq * rules.scale)
    if dslope is not None:
        put_numbers(dslope_ref, (sequence, head), rows.index, -dslope)


def base_of(lse: jax.Array) -> jax.Array:
    """In powers of 2; a row that sees nothing weighs nothing."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)


def bent(ds: jax.Array, x: Score) -> jax.Array:
    """Through the cap."""
    return ds if x.bend is None else ds * x.bend


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    g: jax.Array,
    dlse: jax.Array | None,
    slopes: jax.Array | None,
    lengths: jax.Array | None,
    *,
    rules: Rules,
    of_keys: Tile,
    of_queries: Tile,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(dq, dk, dv, dslopes), the last ``[b, h, sq]`` in float32: what each query says of its slope.

    Args:
        q: as in :func:`attend`, like k, v, slopes, lengths, rules and interpret.
        k: the same.
        v: the same.
        o: the result.
        lse: its log-sum-exp.
        g: cotangent of the result.
        dlse: cotangent of ``lse``, or None.
        slopes: the same.
        lengths: the same.
        rules: the same.
        of_keys: what a program of the gradient of k and v works on.
        of_queries: what one of the gradient of q works on.
        interpret: run without a GPU.
    """
    sizes = Sizes.of(q, k)
    # Σ p · dp over the keys of a row: the sum over columns of what they made.
    delta = jnp.sum(o.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    if dlse is not None:
        delta = delta - dlse
    operands = (q, k, v, g, lse, delta, slopes, lengths)

    def run(kernel: Callable[..., None], name: str, out: Any, tile: Tile, *grid: int) -> Any:
        return launch(
            functools.partial(kernel, sizes=sizes, tile=tile, rules=rules),
            name,
            out=out,
            grid=(*grid, sizes.b),
            warps=tile.warps,
            stages=tile.stages,
            interpret=interpret,
        )(*operands)

    n_keys, n_rows = cdiv(sizes.sk, of_keys.keys), cdiv(sizes.sq, of_queries.rows)
    out = like(k), like(v)
    dk, dv = run(key_gradients_kernel, "attention_key_gradients", out, of_keys, n_keys, sizes.hk)
    out = like(q), None if slopes is None else like(lse)
    dq, dslopes = run(
        query_gradients_kernel, "attention_query_gradients", out, of_queries, n_rows, sizes.h
    )
    return dq, dk, dv, dslopes
