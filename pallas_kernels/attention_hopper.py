"""Attention in one pass over the keys on Hopper's own units, compiled by Mosaic.

grid      as many programs as multiprocessors, each with its list of blocks of rows
bound by  tensor cores, two products of each score

Two groups of four warps have 64 rows each; a third one copies queries, keys and values for both.  A
block's softmax runs under the products of the next block's scores and of the block before with its
values.  While a result leaves, the next rows' queries and keys arrive.

Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._attention import Rules, Sizes, Tile, level_of, scored
from ._hopper import (
    GROUPS,
    REGISTERS,
    Copies,
    barriers,
    matrices,
    slope_of,
    slots,
    spread,
)
from ._hopper_order import AROUND, Block, Kind, met, one_after_another, shares, together
from ._launch import LOG2_E, cdiv, dynamic_slice, exp2, like, mosaic, warpgroups
from .attention import LN_2, mended, width_of

MOST = 32  # of a cap: the least weight is then e⁻⁶⁴, 2⁻⁹², and no bfloat16 is below 2⁻¹²⁶
ROOM = 192 * 1024  # bytes for queries, keys, values and results


class Scratch(NamedTuple):
    """What a program has on the chip."""

    rows: Any  # queries
    results: Any
    numbers: Any  # two a row: log-sum-exp, and NaN where the result is not finite
    arrived: Any  # queries
    given: Any  # up: there is place for other queries
    turns: Any  # whose turn it is to start products
    keys: Copies
    values: Copies

    @property
    def apart(self) -> bool:
        """Whether queries may arrive while results leave."""
        return self.results is not self.rows


def with_scratch(run: Callable[[Scratch], None], q_ref: Any, tile: Tile) -> None:
    """Run with memory and barriers that the groups share."""
    from jax.experimental import pallas

    width, memory = q_ref.shape[-1], functools.partial(matrices, q_ref.dtype)
    rows, blocks = memory(GROUPS, tile.rows, width), slots(tile.stages, memory, tile.keys, width)
    apart = room(tile, width) <= ROOM

    def named(rows: Any, numbers: Any, arrived: Any, given: Any, turns: Any, *rest: Any) -> None:
        k, v, *results = rest
        waits = arrived, given, turns
        run(Scratch(rows, results[0] if apart else rows, numbers, *waits, Copies(*k), Copies(*v)))

    pallas.run_scoped(
        named,
        rows,
        mosaic().SMEM((GROUPS, 2, tile.rows), jnp.float32),
        *(barriers(1, GROUPS) for _ in range(3)),
        *(blocks, blocks),
        *((rows,) if apart else ()),
        collective_axes="group",
    )


def room(tile: Tile, width: int) -> int:
    """Bytes on the chip if results lie apart from queries."""
    return 2 * width * (2 * GROUPS * tile.rows + 2 * tile.stages * tile.keys)


def take_turns(rules: Rules) -> bool:
    """Whether groups start products in turns, so that one's softmax is under the other's.

    Measured: causal, with slopes or a window it helps; where all see all it costs 1 %.
    """
    return rules.right is not None and rules.softcap is None


def begin(scratch: Scratch, me: Any, rules: Rules, tile: Tile) -> None:
    """There is place for all that is copied, and the first turn is group 0's."""
    arrive = mosaic().barrier_arrive
    arrive(scratch.given.at[me])
    for slot in range(tile.stages):
        scratch.keys.release(slot)
        scratch.values.release(slot)
    if take_turns(rules):
        lax.cond(me == 1, lambda: arrive(scratch.turns.at[0]), lambda: None)


class State(NamedTuple):
    """Of a group's rows: weights not yet multiplied, running maximum and sums."""

    o: jax.Array
    weights: jax.Array
    top: jax.Array
    total: jax.Array


class Places(NamedTuple):
    """Of a block of scores."""

    at: Any  # of rows
    key: Any
    far: Any  # distance, but for what is the same along a row
    more: Any  # that, times the slope, for scores


class Group(NamedTuple):
    """The rows of a group of warps."""

    me: Any
    position: Any  # of its first row among the keys
    slope: Any
    length: Any
    scratch: Scratch
    rules: Rules
    tile: Tile

    @property
    def most(self) -> float | None:
        """What no score exceeds, in powers of 2, if a weight of the least is still above 0."""
        cap = self.rules.softcap
        if cap is None or cap > MOST or self.slope is not None:
            return None
        return cap * LOG2_E if self.scratch.rows.dtype == jnp.dtype("bfloat16") else None

    def my_turn(self) -> None:
        """Wait for it."""
        if take_turns(self.rules):
            mosaic().barrier_wait(self.scratch.turns.at[self.me])

    def your_turn(self) -> None:
        """The other group's."""
        if take_turns(self.rules):
            mosaic().barrier_arrive(self.scratch.turns.at[1 - self.me])

    def scores(self, into: Any, keys: Any) -> None:
        """Start q kᵀ."""
        mosaic().wgmma(into, self.scratch.rows.at[self.me], keys.transpose((1, 0)))

    def places(self, shape: tuple[int, ...], j: Any, kind: Kind) -> Places:
        """Of the rows and of block ``j`` of the keys, whose first key is 0.

        So a key's number is its column's, the same in every block, and distance is exact.  Only
        what is asked for: the compiler finds no registers for anything else.
        """
        gpu, number = mosaic(), lambda x: x.astype(jnp.float32)
        count = lambda axis: gpu.broadcasted_iota(
            jnp.int32, (shape[axis],), 0, layout=gpu.Layout.WGMMA.reduce(1 - axis)
        )
        if not kind.masked and self.slope is None:
            return Places(None, None, None, 0.0)
        column = count(1)
        key = spread(column, shape, 1)
        if self.slope is None and self.rules.left is None and self.rules.right is None:
            return Places(None, key, None, 0.0)
        row = count(0) + (self.position - j * self.tile.keys)
        at = spread(row, shape)
        if self.slope is None:
            return Places(at, key, None, 0.0)
        if kind.side != AROUND:  # distance is row − column, or column − row
            far, more = (kind.side * number(x) for x in (column, row))
            return Places(at, key, -spread(far, shape, 1), -self.slope * more)
        return Places(at, key, jnp.abs(number(at) - number(key)), 0.0)

    def weigh(self, s: jax.Array, j: Any, top: jax.Array, kind: Kind) -> tuple[Any, ...]:
        """Weights of block ``j``, what the older ones shrink by if any, and the new maximum."""
        at, key, far, more = self.places(s.shape, j, kind)
        length = self.length - j * self.tile.keys
        x = scored(s, at, key, self.slope, length, self.rules, kind.masked, far)
        if self.most is not None:  # nothing has to be found, nor does anything shrink
            return x.weights(self.most), None, top
        new = jnp.maximum(top, jnp.max(x.s, axis=1) * x.unit + (x.shift + more))
        level = level_of(new) if kind.masked else new
        return x.weights(spread(level - more, s.shape)), exp2(top - level), new

    def start(self, j: Any, slot: Any, kind: Kind) -> State:
        """The first block's weights."""
        from jax.experimental import pallas

        gpu, tile, scratch = mosaic(), self.tile, self.scratch
        keys = scratch.keys.wait(slot)

        def scores(into: Any) -> jax.Array:
            self.scores(into, keys)
            self.your_turn()
            return into[...]

        self.my_turn()
        s = pallas.run_scoped(scores, gpu.ACC((tile.rows, tile.keys), jnp.float32))
        scratch.keys.release(slot)
        by_row = gpu.Layout.WGMMA.reduce(1)
        none = gpu.layout_cast(jnp.full(tile.rows, -jnp.inf, jnp.float32), by_row)
        p, _, top = self.weigh(s, j, none, kind)
        scratch.values.wait(slot)
        width = scratch.values.blocks.shape[-1]
        o = gpu.layout_cast(jnp.zeros((tile.rows, width), jnp.float32), gpu.Layout.WGMMA)
        return State(o, p.astype(scratch.rows.dtype), top, jnp.sum(p, axis=1))

    def step(self, j: Any, slot: Any, before: Any, state: State, kind: Kind) -> State:
        """The scores of block ``j`` and their weights, while those of the block before work."""
        from jax.experimental import pallas

        gpu, tile, scratch = mosaic(), self.tile, self.scratch
        keys, values = scratch.keys.wait(slot), scratch.values.blocks.at[before]

        def both(scores: Any, result: Any) -> State:
            result[...] = state.o
            self.scores(scores, keys)
            gpu.wgmma(result, state.weights, values)
            self.your_turn()
            s = gpu.wgmma_accumulator_load(scores, wait_n=1)
            scratch.keys.release(slot)
            p, keep, top = self.weigh(s, j, state.top, kind)
            total = state.total if keep is None else state.total * keep
            total = total + jnp.sum(p, axis=1)
            # Weights are in float32 until the product is done: its halves lie where new ones go.
            # The compiler moves nothing across a loop, and to wait is one: the softmax stays above.
            p, keep, top, total = lax.optimization_barrier((p, keep, top, total))
            scratch.values.wait(slot)
            o = gpu.wgmma_accumulator_load(result, wait_n=0)
            scratch.values.release(before)
            o = o if keep is None else o * spread(keep, o.shape)
            return State(o, p.astype(scratch.rows.dtype), top, total)

        shapes = ((tile.rows, tile.keys), state.o.shape)
        self.my_turn()
        return pallas.run_scoped(both, *(gpu.ACC(shape, jnp.float32) for shape in shapes))

    def finish(self, state: State, slot: Any) -> tuple[jax.Array, jax.Array]:
        """The result and its log-sum-exp; queries and values are done with."""
        from jax.experimental import pallas

        gpu, values = mosaic(), self.scratch.values.blocks.at[slot]
        if self.scratch.apart:
            gpu.barrier_arrive(self.scratch.given.at[self.me])
        last = lambda result: gpu.wgmma(result, state.weights, values)
        o = pallas.run_state(last)(gpu.ACC.init(state.o))
        self.scratch.values.release(slot)
        divisor = jnp.where(state.total == 0, 1.0, state.total)
        o = o * spread(1 / divisor, o.shape)
        top = state.top
        if self.most is not None:
            top = jnp.where(state.total == 0, -jnp.inf, self.most)
        return o, top * LN_2 + jnp.log(divisor)


def attend_kernel(*refs: Any, sizes: Sizes, tile: Tile, rules: Rules) -> None:
    """Two groups of a program compute, one copies."""
    q_ref, k_ref, v_ref, slopes, lengths, table, o_ref, lse_ref, spoiled_ref = refs
    gpu, me = mosaic(), lax.axis_index("group")
    sloped = slopes is not None

    def compute(scratch: Scratch, block: Block) -> None:
        walk, slot, position = block.walk, block.slot, block.position + me * tile.rows
        its = position, slope_of(slopes, block.head), block.length
        group = Group(me, *its, scratch, rules, tile)

        def over(kind: Kind) -> Callable[[Any, State], State]:
            return lambda t, state: group.step(walk.top - t, slot(t), slot(t - 1), state, kind)

        gpu.barrier_wait(scratch.arrived.at[me])
        state = walk.over(over, group.start(walk.top, slot(jnp.int32(0)), walk.begin))
        o, lse = group.finish(state, slot(walk.steps - 1))
        result, numbers, rows = scratch.results.at[me], scratch.numbers.at[me], block.rows(me)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is read may be written again
        if spoiled_ref is not None:
            numbers.at[1][...] = jnp.sum(o - o, axis=1)  # 0 for what is finite, else NaN
        if block.valid is not None:
            wrong = jnp.where(block.valid, 0.0, jnp.nan)
            o, lse = o + wrong, lse + wrong
        result[...] = o.astype(result.dtype)
        numbers.at[0][...] = lse
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(result, o_ref.at[rows])
        gpu.copy_smem_to_gmem(numbers.at[0], lse_ref.at[rows])
        if spoiled_ref is not None:
            gpu.copy_smem_to_gmem(numbers.at[1], spoiled_ref.at[rows])
        if not scratch.apart:
            gpu.wait_smem_to_gmem(0, wait_read_only=True)
            gpu.barrier_arrive(scratch.given.at[me])

    def copy(scratch: Scratch, block: Block) -> None:
        for group in range(GROUPS):
            gpu.barrier_wait(scratch.given.at[group])
            queries = q_ref.at[block.rows(group)]
            gpu.copy_gmem_to_smem(queries, scratch.rows.at[group], scratch.arrived.at[group])
        head = lax.div(block.head, jnp.int32(sizes.group))

        def go_on(t: Any, _: None) -> None:
            at = block.sequence, head, dynamic_slice((block.walk.top - t) * tile.keys, tile.keys)
            scratch.keys.replace(k_ref, at, block.slot(t))
            scratch.values.replace(v_ref, at, block.slot(t))

        lax.fori_loop(jnp.int32(0), block.walk.steps, go_on, None)

    def run(scratch: Scratch) -> None:
        def every(work: Callable[[Scratch, Block], None]) -> None:
            def one(number: Any, base: Any) -> Any:
                block = Block.of(number, base, lengths, sizes, tile, rules, sloped)
                work(scratch, block)
                return base + block.walk.steps

            one_after_another(one, table, lax.axis_index("program"))

        def computes() -> None:
            gpu.set_max_registers(REGISTERS[0], action="increase")
            begin(scratch, me, rules, tile)
            every(compute)
            gpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is read may be given up

        def copies() -> None:
            gpu.set_max_registers(REGISTERS[1], action="decrease")
            every(copy)

        lax.cond(me < GROUPS, computes, copies)

    with_scratch(run, q_ref, tile)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array | None,
    lengths: jax.Array | None,
    *,
    rules: Rules,
    tile: Tile,
    mending: Tile,
    programs: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What :func:`.attention.attend` computes, for heads whose width is a multiple of 64.

    Values are as wide as keys.  ``tile.rows`` is 64, a group's; ``mending`` is the tile of
    :func:`.attention.mended`, which minds what hidden values must not touch.  So many ``programs``
    share the work; None: there is one for each block of rows.
    """
    sizes = Sizes.of(q, k)
    n, heads = cdiv(sizes.sq, GROUPS * tile.rows), sizes.b * sizes.h
    counts = met(sizes, GROUPS * tile.rows, tile.keys, rules)
    table = shares(counts, heads, together(k), programs or heads * n)
    leaks = rules.left is not None or rules.right is not None or lengths is not None
    numbers = like(q, (sizes.b, sizes.h, n * GROUPS * tile.rows), jnp.float32)
    run = functools.partial(attend_kernel, sizes=sizes, tile=tile, rules=rules)
    operands = q, k, v, slopes, lengths
    o, lse, spoiled = warpgroups(
        run,
        "attention_hopper",
        out=(like(q), numbers, numbers if leaks else None),
        grid={"program": len(table)},
        groups=GROUPS + 1,
    )(*operands, jnp.asarray(table))
    lse = lse[:, :, : sizes.sq]
    if leaks:
        blocks = cdiv(sizes.sq, mending.rows)
        spoiled = jnp.isnan(spoiled[:, :, : sizes.sq])
        spoiled = jnp.pad(spoiled, ((0, 0), (0, 0), (0, blocks * mending.rows - sizes.sq)))
        spoiled = spoiled.reshape(sizes.b, sizes.h, blocks, mending.rows).any(-1)
        task = {"sizes": sizes, "tile": mending, "rules": rules, "parts": 1}
        how = {"grid": (blocks, sizes.h, sizes.b), "warps": mending.warps}
        how |= {"stages": mending.stages, "interpret": False}
        task |= {"width": width_of(v)}
        every = (*operands, None)  # no pages
        o = mended(every, o, lse, spoiled.astype(jnp.int32), task=task, how=how)
    return o, lse
