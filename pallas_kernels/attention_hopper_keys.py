"""The gradients of attention's keys and values on Hopper's own units, compiled by Mosaic.

grid      blocks of keys × key heads × sequences, keys fastest: neighbours read the same rows
bound by  tensor cores, four products of each score

Two groups of four warps have 64 keys each; a third one copies the rows that see them for both.
Nothing is added up by two programs, so the bits are always the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ._attention import Rules, Sizes, Tile, base_of, length_of, scored
from ._hopper import (
    GROUPS,
    REGISTERS,
    Copies,
    barriers,
    matrices,
    numbers_of,
    pass_by,
    places,
    products,
    slope_of,
    slots,
    spread,
    zeros,
)
from ._launch import dynamic_slice, mosaic
from .attention_gradients import bent, span_of_rows


class Passing(NamedTuple):
    """What comes by the keys of a group of warps: blocks of rows, and two numbers of each row."""

    q: Copies
    g: Copies
    lse: Copies
    less: Copies


class Keys(NamedTuple):
    """The keys of a group of warps."""

    k: Any
    v: Any
    start: Any
    shift: Any  # from the number of a query to its position
    length: Any
    rows: Passing
    rules: Rules
    tile: Tile

    @property
    def shape(self) -> tuple[int, int]:
        """Of a block of scores, turned."""
        return self.tile.keys, self.tile.rows

    def step(self, i: Any, slot: Any, carry: Any, slope: Any, masked: bool) -> Any:
        """Gradients with what block ``i`` of the rows of a head says."""
        from jax.experimental import pallas

        gpu, (dk, dv) = mosaic(), carry
        q, lse = self.rows.q.wait(slot), numbers_of(self.rows.lse.wait(slot), 0)
        g, less = self.rows.g.wait(slot), numbers_of(self.rows.less.wait(slot), 0)

        def both(scores: Any, slopes: Any) -> tuple[Any, Any]:
            slopes[...] = spread(less, self.shape, 1)
            gpu.wgmma(scores, self.k, q.transpose((1, 0)))
            gpu.wgmma(slopes, self.v, g.transpose((1, 0)))
            s = gpu.wgmma_accumulator_load(scores, wait_n=1)
            at, key = places(self.shape, i * self.tile.rows + self.shift, self.start, 0)
            x = scored(s, at, key, slope, self.length, self.rules, masked)
            p = x.weights(spread(base_of(lse), self.shape, 1))
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

    q_ref, k_ref, v_ref, g_ref, lse_ref, less_ref, slopes, lengths, dk_ref, dv_ref, wrong = refs
    gpu, per_program = mosaic(), GROUPS * tile.keys
    sequence, key_head, j, me = (lax.axis_index(x) for x in ("sequence", "head", "keys", "group"))
    length, _ = length_of(lengths, sequence, sizes)
    start, shift = j * per_program, length - sizes.sq
    span = span_of_rows(start, per_program, length, sizes, tile.rows, rules, lengths is not None)
    count = span.last - span.first  # of blocks of rows, the same for each head
    slot_of = lambda t: lax.rem(t, jnp.int32(tile.stages))

    def compute(mine: Any, numbers: Any, arrived: Any, rows: Passing) -> None:
        gpu.set_max_registers(REGISTERS[0], action="increase")
        k, v = mine.at[0, me], mine.at[1, me]
        at = sequence, key_head, dynamic_slice(start + me * tile.keys, tile.keys)
        for source, target in ((k_ref, k), (v_ref, v)):
            gpu.copy_gmem_to_smem(source.at[at], target, arrived.at[me])
            gpu.barrier_wait(arrived.at[me])
        group = Keys(k, v, start + me * tile.keys, shift, length, rows, rules, tile)

        def of_head(n: Any, carry: Any) -> Any:
            slope = slope_of(slopes, key_head * sizes.group + n)
            slot = lambda i: slot_of(n * count + i - span.first)
            over = lambda masked: lambda i, carry: group.step(i, slot(i), carry, slope, masked)
            return span.over(over, carry)

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
        four = tuple(zip(rows, (q_ref, g_ref, lse_ref, less_ref), strict=True))

        def at(t: Any) -> tuple[Any, ...]:
            head = key_head * sizes.group + lax.div(t, count)
            i = span.first + lax.rem(t, count)
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
