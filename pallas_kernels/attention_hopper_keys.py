"""The gradients of attention's keys and values on Hopper's own units, compiled by Mosaic.

grid      blocks of keys × key heads × sequences, keys fastest: neighbours read the same rows
bound by  tensor cores, four products of each score

Two groups of four warps have 64 keys each; a third one copies the rows that see them for both.  A
group skips a block of rows that see nothing but the other's keys.
Nothing is added up by two programs, so the bits are always the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._attention import Rules, Score, Sizes, Span, Tile, length_of, scored
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
from ._launch import dynamic_slice, mosaic
from .attention_gradients import bent, span_of_rows


def along(shape: tuple[int, int], axis: int) -> jax.Array:
    """Numbers of the rows of a block, or for axis 1 of its columns, from 0 on.

    So a column's number is the same in every block, and distance is exact.  Only where it is read:
    the compiler finds no registers for what is not.
    """
    gpu = mosaic()
    layout = gpu.Layout.WGMMA.reduce(1 - axis)
    return gpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=layout)


def real(x: jax.Array) -> jax.Array:
    """Numbers in float32."""
    return x.astype(jnp.float32)


def unmasked(s: jax.Array, rules: Rules, slope: Any = None, far: Any = None) -> Score:
    """Scores where nothing is hidden: nobody asks for places then."""
    nowhere: Any = None
    return scored(s, nowhere, nowhere, slope, None, rules, False, far)


def bounded(rules: Rules) -> bool:
    """Whether it depends on positions who sees whom."""
    return rules.left is not None or rules.right is not None


def seen(at: Any, key: jax.Array, length: Any, rules: Rules) -> jax.Array:
    """Which of some keys the queries at some positions see.

    Args:
        at: positions, or None if they do not matter.
        key: numbers of the keys.
        length: of the keys in use, or None if what others say does not matter.
        rules: of which one bounds, if there is no length.
    """
    last = None if rules.right is None else at + rules.right
    if rules.right != 0 and length is not None:  # no query is beyond the end itself
        last = length - 1 if last is None else jnp.minimum(last, length - 1)
    if last is None:
        return key >= at - rules.left
    return key <= last if rules.left is None else (key <= last) & (key >= at - rules.left)


def within(span: Span, every: Span) -> Span:
    """As much of ``span`` as is in the other."""
    places = (jnp.clip(x, every.first, every.last) for x in span[:4])
    return span._make((*places, span.before, span.after))


class Passing(NamedTuple):
    """What comes by the keys of a group of warps: blocks of rows, and two numbers of each row."""

    q: Copies
    g: Copies
    level: Copies  # log-sum-exp, in powers of 2
    less: Copies  # − Σ p · dp, which the products for slopes start at


class Keys(NamedTuple):
    """The keys of a group of warps."""

    k: Any
    v: Any
    start: Any
    shift: Any  # from the number of a query to its position
    length: Any  # None: all are in use
    rows: Passing
    rules: Rules
    tile: Tile

    @property
    def shape(self) -> tuple[int, int]:
        """Of a block of scores, turned."""
        return self.tile.keys, self.tile.rows

    def weigh(self, s: Any, i: Any, level: Any, slope: Any, masked: bool) -> tuple[Any, Score]:
        """Weights of block ``i`` of the rows, the first of which is 0, and their scores."""
        far, offset = None, self.start - self.shift - i * self.tile.rows
        if slope is not None:
            at, key = real(along(self.shape, 1)), real(along(self.shape, 0) + offset)
            if self.rules.right == 0:  # no key that counts is ahead
                far, level = -spread(key, self.shape), level + slope * at
            else:
                far = jnp.abs(spread(at, self.shape, 1) - spread(key, self.shape))
        x = unmasked(s, self.rules, slope, far)
        p = x.weights(spread(level, self.shape, 1))
        if masked and (bounded(self.rules) or self.length is not None):
            at = spread(along(self.shape, 1), self.shape, 1) if bounded(self.rules) else None
            key = spread(along(self.shape, 0) + offset, self.shape)
            length = None if self.length is None else self.length - self.start + offset
            p = jnp.where(seen(at, key, length, self.rules), p, 0.0)
        return p, x

    def skip(self, slot: Any) -> None:
        """A block of rows that see nothing but the other group's keys."""
        for copies in self.rows:
            copies.wait(slot)
            copies.release(slot)

    def step(self, i: Any, slot: Any, carry: Any, slope: Any, masked: bool) -> Any:
        """Gradients with what block ``i`` of the rows of a head says."""
        from jax.experimental import pallas

        gpu, (dk, dv) = mosaic(), carry
        q, level = self.rows.q.wait(slot), numbers_of(self.rows.level.wait(slot), 0)
        g, less = self.rows.g.wait(slot), numbers_of(self.rows.less.wait(slot), 0)

        def both(scores: Any, slopes: Any) -> tuple[Any, Any]:
            slopes[...] = spread(less, self.shape, 1)
            gpu.wgmma(scores, self.k, q.transpose((1, 0)))
            gpu.wgmma(slopes, self.v, g.transpose((1, 0)))
            s = gpu.wgmma_accumulator_load(scores, wait_n=1)
            p, x = self.weigh(s, i, level, slope, masked)
            (p,) = lax.optimization_barrier((p,))  # above the wait, as in Queries
            ds = bent(p * gpu.wgmma_accumulator_load(slopes, wait_n=0), x)
            return p.astype(q.dtype), ds.astype(q.dtype)

        p, ds = products(both, self.shape, self.shape)

        def add(sums: tuple[Any, Any]) -> None:
            gpu.wgmma(sums[1], p, g)
            gpu.wgmma(sums[0], ds, q)

        carry = pallas.run_state(add)((gpu.ACC.init(dk), gpu.ACC.init(dv)))
        for copies in self.rows:
            copies.release(slot)
        return carry


def key_gradients_kernel(*refs: Any, sizes: Sizes, tile: Tile, rules: Rules) -> None:
    """Blocks of keys: what all rows that see them say of keys and values."""
    from jax.experimental import pallas

    q_ref, k_ref, v_ref, g_ref, level_ref, less_ref, slopes, lengths, dk_ref, dv_ref, wrong = refs
    gpu, per_program = mosaic(), GROUPS * tile.keys
    sequence, key_head, j, me = (lax.axis_index(x) for x in ("sequence", "head", "keys", "group"))
    length, _ = length_of(lengths, sequence, sizes)
    start, shift = j * per_program, length - sizes.sq
    how = {"length": length, "sizes": sizes, "size": tile.rows, "rules": rules}
    rows_of = functools.partial(span_of_rows, ragged=lengths is not None, **how)
    every = rows_of(start, per_program)
    count = every.last - every.first  # of blocks of rows, the same for each head
    slot_of = lambda t: lax.rem(t, jnp.int32(tile.stages))

    def compute(mine: Any, numbers: Any, arrived: Any, rows: Passing) -> None:
        gpu.set_max_registers(REGISTERS[0], action="increase")
        k, v = mine.at[0, me], mine.at[1, me]
        at = sequence, key_head, dynamic_slice(start + me * tile.keys, tile.keys)
        for source, target in ((k_ref, k), (v_ref, v)):
            gpu.copy_gmem_to_smem(source.at[at], target, arrived.at[me])
            gpu.barrier_wait(arrived.at[me])
        # Keys beyond the end are nobody's, and what is said of them is not written.
        end, low = None if lengths is None else length, start + me * tile.keys
        group = Keys(k, v, low, shift, end, rows, rules, tile)
        span = within(rows_of(low, tile.keys), every)

        def of_head(n: Any, carry: Any) -> Any:
            slope = slope_of(slopes, key_head * sizes.group + n)
            slot = lambda i: slot_of(n * count + i - every.first)
            over = lambda masked: lambda i, carry: group.step(i, slot(i), carry, slope, masked)
            skip = lambda i, _: group.skip(slot(i))
            lax.fori_loop(every.first, span.first, skip, None)
            carry = span.over(over, carry)
            lax.fori_loop(span.last, every.last, skip, None)
            return carry

        carry = zeros(tile.keys, k_ref.shape[-1]), zeros(tile.keys, k_ref.shape[-1])
        if sizes.group == 1:
            dk, dv = of_head(jnp.int32(0), carry)
        else:
            dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(sizes.group), of_head, carry)
        dk = dk * rules.scale
        k[...], v[...] = dk.astype(k.dtype), dv.astype(v.dtype)
        if wrong is not None:
            numbers.at[me][...] = jnp.sum(dk - dk, axis=1) + jnp.sum(dv - dv, axis=1)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(k, dk_ref.at[at])
        gpu.copy_smem_to_gmem(v, dv_ref.at[at])
        if wrong is not None:
            gpu.copy_smem_to_gmem(numbers.at[me], wrong.at[at])
        gpu.wait_smem_to_gmem(0)

    def copy(rows: Passing) -> None:
        four = tuple(zip(rows, (q_ref, g_ref, level_ref, less_ref), strict=True))

        def at(t: Any) -> tuple[Any, ...]:
            head = key_head * sizes.group + lax.div(t, count)
            i = every.first + lax.rem(t, count)
            return sequence, head, dynamic_slice(i * tile.rows, tile.rows)

        pass_by(four, at, jnp.int32(0), count * sizes.group, tile.stages)

    def run(mine: Any, numbers: Any, arrived: Any, *passing: Any) -> None:
        rows = Passing(*(Copies(*x) for x in passing))
        lax.cond(me < GROUPS, lambda: compute(mine, numbers, arrived, rows), lambda: copy(rows))

    width, memory = k_ref.shape[-1], functools.partial(matrices, k_ref.dtype)
    single = lambda *shape: gpu.SMEM(shape, jnp.float32)
    blocks, numbers = (
        slots(tile.stages, memory, tile.rows, width),
        slots(tile.stages, single, tile.rows),
    )
    mine = memory(2, GROUPS, tile.keys, width), single(GROUPS, tile.keys), barriers(1, GROUPS)
    pallas.run_scoped(run, *mine, blocks, blocks, numbers, numbers, collective_axes="group")
