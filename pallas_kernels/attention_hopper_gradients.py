"""The gradients of attention on Hopper's own units, compiled by Mosaic.

grid      blocks of rows × heads × sequences, rows fastest: neighbours read the same keys
bound by  tensor cores, three products of each score, and arithmetic, as much

These are the queries'; :mod:`.attention_hopper_keys` has the keys'.  As in :mod:`.attention_hopper`
two groups of four warps have 64 rows each, and a third one copies keys and values for both.  The
last keys come first: the first block is always masked, and under causality the last one is anyway.
A group skips a block of keys that only the other one's rows meet.

What rounding the result did to the slopes of a row is known when they are summed up, and the keys'
gradients are without it, as in :mod:`.attention_gradients`; but no row of a product can look up the
key it weighs most here.  Blocks of rows to which it matters are computed again by that module's
kernels, and so are those that hidden values spoiled.  It matters where what was done at the key of
largest weight is more than rounding slopes does to an average row of the gradient: where nearly all
weight is on one key, in most rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._attention import Rules, Sizes, Span, Tile, base_of, length_of
from ._hopper import (
    GROUPS,
    REGISTERS,
    Copies,
    barriers,
    matrices,
    numbers_of,
    pass_by,
    products,
    slope_of,
    slots,
    spread,
    zeros,
)
from ._launch import cdiv, dynamic_slice, exp2, fma, like, mosaic, warpgroups
from .attention_gradients import Launch, bent, delta_of
from .attention_hopper_keys import along, bounded, key_gradients_kernel, real, seen, unmasked

# What slopes may add up to, times the largest weight and how long keys are, in how long rows of the
# gradient are.  Rounding slopes does 0.6 of half a unit in the last place of 1 to those.
LOST = {"bfloat16": 2.5 * 2.0**-8, "float16": 2.5 * 2.0**-11}
SOME = 256  # keys of a head tell how long they are
APART = 8  # columns; a thread has two in eight


class Sums(NamedTuple):
    """Over the keys of each row; until all are met, over each eighth: no thread asks another."""

    slopes: Any  # Σ ds, 0 but for rounding
    largest: Any  # of the weights
    bent: Any  # Σ ds · distance, if distance has a slope
    reach: Any  # Σ p · distance

    def plus(self, more: Sums) -> Sums:
        """Both."""
        add = lambda x, y: x if y is None else x + y
        sums = Sums(*map(add, self, more))
        return sums._replace(largest=jnp.maximum(self.largest, more.largest))

    def by_row(self) -> Sums:
        """One number a row."""
        sums = Sums(*(None if x is None else jnp.sum(x, axis=1) for x in self))
        return sums._replace(largest=jnp.max(self.largest, axis=1))


def eighths(add: Callable[[Any, Any], Any], x: jax.Array) -> jax.Array:
    """Each eighth column of a block added to one, or what ``add`` does."""
    return functools.reduce(add, (x[:, i : i + APART] for i in range(0, x.shape[1], APART)))


class Queries(NamedTuple):
    """The rows of a group of warps."""

    q: Any
    g: Any
    level: Any  # log-sum-exp, in powers of 2
    less: Any  # − Σ p · dp, which the products for slopes start at
    position: Any  # of the first one among the keys
    slope: Any
    length: Any
    keys: Copies
    values: Copies
    rules: Rules
    tile: Tile

    @property
    def shape(self) -> tuple[int, int]:
        """Of a block of scores."""
        return self.tile.rows, self.tile.keys

    def start(self, scores: Any, slopes: Any, slot: Any) -> tuple[Any, Any]:
        """Start q kᵀ and g vᵀ − Σ p · dp, once keys and values are there."""
        k, v = self.keys.wait(slot), self.values.wait(slot)
        slopes[...] = spread(self.less, self.shape)
        mosaic().wgmma(scores, self.q, k.transpose((1, 0)))
        mosaic().wgmma(slopes, self.g, v.transpose((1, 0)))
        return scores, slopes

    def bend(self, s: Any, dp: Callable[[], Any], j: Any, masked: bool) -> tuple[Any, Sums]:
        """Slopes of the products of block ``j``, the first key of which is 0, and their sums."""
        far, away, offset = None, None, self.position - j * self.tile.keys
        if self.slope is not None:
            at, key = real(along(self.shape, 0) + offset), real(along(self.shape, 1))
            far = spread(at, self.shape) - spread(key, self.shape, 1)
            far = far if self.rules.right == 0 else jnp.abs(far)  # no key that counts is ahead
            away = self.slope * far
        x = unmasked(s, self.rules)
        power = fma(x.s, x.unit, x.shift - spread(self.level, self.shape))
        p, counts = exp2(power if away is None else power - away), None
        if masked:
            at = spread(along(self.shape, 0) + offset, self.shape) if bounded(self.rules) else None
            key = spread(along(self.shape, 1), self.shape, 1)
            counts = seen(at, key, self.length - j * self.tile.keys, self.rules)
        only = lambda x: x if counts is None else jnp.where(counts, x, 0.0)
        p = only(p)
        ds = only(p * dp())
        total = functools.partial(eighths, jnp.add)
        reach = (None, None) if far is None else (total(ds * far), total(p * far))
        return bent(ds, x), Sums(total(ds), eighths(jnp.maximum, p), *reach)

    def skip(self, slot: Any) -> None:
        """A block of keys that only the other group's rows meet."""
        for copies in (self.keys, self.values):
            copies.wait(slot)
            copies.release(slot)

    def first(self, j: Any, slot: Any, masked: bool) -> tuple[Any, Any, Sums]:
        """dq so far, which is 0, the first block's slopes in halves, and their sums."""

        def both(scores: Any, slopes: Any) -> tuple[Any, Sums]:
            self.start(scores, slopes, slot)
            s = mosaic().wgmma_accumulator_load(scores, wait_n=1)
            dp = lambda: mosaic().wgmma_accumulator_load(slopes, wait_n=0)
            return self.bend(s, dp, j, masked)

        ds, sums = products(both, self.shape, self.shape)
        self.values.release(slot)
        return zeros(self.tile.rows, self.q.shape[-1]), ds.astype(self.q.dtype), sums

    def step(self, j: Any, slot: Any, before: Any, carry: Any, masked: bool) -> Any:
        """The slopes of block ``j``, while those of the block before meet its keys."""
        gpu, (dq, ds, sums) = mosaic(), carry
        old = self.keys.blocks.at[before]

        def three(scores: Any, slopes: Any, result: Any) -> Any:
            result[...] = dq
            self.start(scores, slopes, slot)
            gpu.wgmma(result, ds, old)
            s = gpu.wgmma_accumulator_load(scores, wait_n=2)
            dp = lambda: gpu.wgmma_accumulator_load(slopes, wait_n=1)
            # The compiler moves nothing across a loop, and to wait is one: this stays above.
            new, more = lax.optimization_barrier(self.bend(s, dp, j, masked))
            self.values.release(slot)
            total = gpu.wgmma_accumulator_load(result, wait_n=0)
            self.keys.release(before)
            return total, new.astype(self.q.dtype), sums.plus(more)

        return products(three, self.shape, self.shape, dq.shape)

    def last(self, carry: Any, slot: Any) -> tuple[Any, Any, Sums]:
        """dq, the squares of its rows, and the sums."""
        from jax.experimental import pallas

        dq, ds, sums = carry
        keys = self.keys.blocks.at[slot]
        multiply = lambda result: mosaic().wgmma(result, ds, keys)
        dq = pallas.run_state(multiply)(mosaic().ACC.init(dq)) * self.rules.scale
        self.keys.release(slot)
        return dq, jnp.sum(dq * dq, axis=1), sums.by_row()


def keys_met(
    low: Any, rows: int, length: Any, sizes: Sizes, keys: int, rules: Rules, ragged: bool
) -> Span:
    """Blocks of keys that rows from position ``low`` on meet: one, though nobody see it."""
    high = jnp.minimum(low + rows, length) - 1
    span = Span.seen(low, high, length, sizes.sk, keys, rules, ragged)
    first = jnp.minimum(span.first, (sizes.sk - 1) // keys)
    return span._replace(first=first, last=jnp.maximum(span.last, first + 1))


def steps_of(span: Span, every: Span) -> tuple[Any, Span]:
    """The first step of a group, and those after it, where step 0 is the last block of ``every``.

    It has one, whatever it sees.
    """
    low = jnp.minimum(span.first, every.last - 1)
    high = jnp.clip(span.last, low + 1, every.last)
    first, last = every.last - high, every.last - low
    step = lambda x: jnp.clip(every.last - x, first + 1, last)
    return first, Span(first + 1, step(span.edge), step(span.whole), last, span.after, span.before)


def query_gradients_kernel(*refs: Any, sizes: Sizes, tile: Tile, rules: Rules) -> None:
    """Blocks of rows: what the keys they see say of them, and of the slope of distance."""
    from jax.experimental import pallas

    q_ref, k_ref, v_ref, g_ref, level_ref, less_ref, slopes, lengths, dq_ref, *sum_refs = refs
    gpu, per_program = mosaic(), GROUPS * tile.rows
    sequence, head, i, me = (lax.axis_index(x) for x in ("sequence", "head", "rows", "group"))
    start = (cdiv(sizes.sq, per_program) - 1 - i) * per_program  # under causality the last do most
    length, _ = length_of(lengths, sequence, sizes)
    low = start + length - sizes.sq
    how = {"length": length, "sizes": sizes, "keys": tile.keys, "rules": rules}
    met = functools.partial(keys_met, ragged=lengths is not None, **how)
    every = met(low, per_program)
    none, count = jnp.int32(0), every.last - every.first
    block = lambda t: every.last - 1 - t
    slot_of = lambda t: lax.rem(t, jnp.int32(tile.stages))

    def compute(rows: Any, numbers: Any, arrived: Any, keys: Copies, values: Copies) -> None:
        gpu.set_max_registers(REGISTERS[0], action="increase")
        q, g = rows.at[0, me], rows.at[1, me]
        at = sequence, head, dynamic_slice(start + me * tile.rows, tile.rows)
        operands = (
            (q_ref, q),
            (g_ref, g),
            (level_ref, numbers.at[me, 0]),
            (less_ref, numbers.at[me, 1]),
        )
        for source, target in operands:
            gpu.copy_gmem_to_smem(source.at[at], target, arrived.at[me])
            gpu.barrier_wait(arrived.at[me])
        level, less = (numbers_of(numbers.at[me, n], 1) for n in (0, 1))
        mine = low + me * tile.rows
        place = mine, slope_of(slopes, head), length
        group = Queries(q, g, level, less, *place, keys, values, rules, tile)
        first, span = steps_of(met(mine, tile.rows), every)

        def over(masked: bool) -> Callable[..., Any]:
            return lambda t, carry: group.step(block(t), slot_of(t), slot_of(t - 1), carry, masked)

        skip = lambda t, _: group.skip(slot_of(t))
        lax.fori_loop(none, first, skip, None)
        carry = group.first(block(first), slot_of(first), span.before or span.after)
        dq, squares, sums = group.last(span.over(over, carry), slot_of(span.last - 1))
        lax.fori_loop(span.last, count, skip, None)
        q[...] = dq.astype(q.dtype)
        for n, x in enumerate((squares, *sums)):
            if x is not None:
                numbers.at[me, n][...] = x
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q, dq_ref.at[at])
        for n, ref in enumerate(sum_refs):
            if ref is not None:
                gpu.copy_smem_to_gmem(numbers.at[me, n], ref.at[at])
        gpu.wait_smem_to_gmem(0)

    def copy(keys: Copies, values: Copies) -> None:
        key_head = lax.div(head, jnp.int32(sizes.group))
        at = lambda t: (sequence, key_head, dynamic_slice(block(t) * tile.keys, tile.keys))
        pass_by(((values, v_ref), (keys, k_ref)), at, none, count, tile.stages)

    def run(rows: Any, numbers: Any, arrived: Any, k: Any, v: Any) -> None:
        keys, values = Copies(*k), Copies(*v)
        work = lambda: compute(rows, numbers, arrived, keys, values)
        lax.cond(me < GROUPS, work, lambda: copy(keys, values))

    width, memory = q_ref.shape[-1], functools.partial(matrices, q_ref.dtype)
    blocks = slots(tile.stages, memory, tile.keys, width)
    rows, numbers = memory(2, GROUPS, tile.rows, width), (GROUPS, len(sum_refs), tile.rows)
    scratch = rows, gpu.SMEM(numbers, jnp.float32), barriers(1, GROUPS), blocks, blocks
    pallas.run_scoped(run, *scratch, collective_axes="group")


def marks_of(rows: jax.Array, size: int) -> jax.Array:
    """Which blocks of ``size`` hold a row that is marked."""
    n = rows.shape[-1]
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -n % size)))
    return rows.reshape(*rows.shape[:2], -1, size).any(-1).astype(jnp.int32)


def square_of(k: jax.Array) -> jax.Array:
    """How long keys are, squared, on average; of some of each head."""
    some = k[:, :, :: cdiv(k.shape[2], SOME)].astype(jnp.float32)
    return jnp.sum(jnp.mean(jnp.where(jnp.isfinite(some), some * some, 0), axis=(0, 1, 2)))


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
    mending: tuple[Tile, Tile],
    whole: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """What :func:`.attention_gradients.gradients` computes, for heads whose width is 64 or 128.

    Values are as wide as keys.  A group has 64 keys, or rows; ``mending`` are the tiles of that
    function's kernels, of keys and of queries, which compute some blocks again.
    """
    sizes, delta = Sizes.of(q, k), delta_of(o, g, dlse)
    task = {"sizes": sizes, "rules": rules}

    def run(kernel: Any, name: str, operands: Any, out: Any, tile: Tile, **grid: int) -> Any:
        kernel = functools.partial(kernel, tile=tile, **task)
        grid = {"sequence": sizes.b} | grid
        return warpgroups(kernel, name, out=out, grid=grid, groups=GROUPS + 1)(*operands)

    n = cdiv(sizes.sq, GROUPS * of_queries.rows)
    numbers = like(lse, (sizes.b, sizes.h, n * GROUPS * of_queries.rows))
    some = None if slopes is None else numbers
    level, out = base_of(lse), (like(q), *(numbers,) * 3, *(some,) * 2)
    operands = q, k, v, g, level, -delta, slopes, lengths
    name, cut = "attention_hopper_query_gradients", lambda x: x[..., : sizes.sq]
    dq, squares, *sums = run(
        query_gradients_kernel, name, operands, out, of_queries, head=sizes.h, rows=n
    )
    sums = Sums(*(None if x is None else cut(x) for x in sums))
    squares, again = cut(squares), Launch(sizes, rules)
    sound = jnp.isfinite(squares)
    marked, (of_columns, of_rows) = ~sound, mending
    dslopes = None if slopes is None else -sums.bent
    if whole:
        lost = sums.slopes if dlse is None else sums.slopes - dlse
        delta = delta + lost
        typical = jnp.sqrt(jnp.mean(jnp.where(sound, squares, 0)))
        key = jnp.sqrt(square_of(k)) * abs(rules.scale)
        marked |= jnp.abs(lost) * sums.largest * key > typical * LOST[q.dtype.name]
        if dslopes is not None:
            dslopes += jnp.where(sums.reach == 0, 0, lost * sums.reach)
    operands = q, k, v, g, lse, delta, None, slopes, lengths
    marks = marks_of(marked, of_rows.rows)
    dq, dslopes, _ = again.of_queries(operands, of_rows, out=(dq, dslopes, None), marks=marks)
    n = cdiv(sizes.sk, GROUPS * of_keys.keys)
    leaks = rules.left is not None or rules.right is not None or lengths is not None
    numbers = like(lse, (sizes.b, sizes.hk, n * GROUPS * of_keys.keys)) if leaks else None
    name, out = "attention_hopper_key_gradients", (like(k), like(v), numbers)
    operands = q, k, v, g, level, -delta, slopes, lengths
    dk, dv, wrong = run(key_gradients_kernel, name, operands, out, of_keys, head=sizes.hk, keys=n)
    if wrong is not None:
        operands = q, k, v, g, lse, delta, slopes, lengths
        marks = marks_of(jnp.isnan(wrong[..., : sizes.sk]), of_columns.keys)
        dk, dv = again.of_keys(operands, of_columns, out=(dk, dv), marks=marks)
    return dq, dk, dv, dslopes
