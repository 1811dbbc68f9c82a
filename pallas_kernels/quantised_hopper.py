"""Rows of halves times a packed weight on Hopper's own units, compiled by Mosaic: y = x Wᵀ.

grid      parts of the rows × blocks of activations × blocks of rows of the weight, these fastest
reads     the weight once for each block of activations; these once for each block of the weight
writes    the product once, or a float32 sum for each part, which XLA adds in order and rounds once
bound by  what a step waits for; from 128 rows of activations on, what they move through the cache

The weight stands first, y is its transpose: a group of four warps decodes 64 rows in registers, and
tensor cores take them from there, so that a weight is decoded once for up to 128 activations.
Another group copies.  Of few activations groups share the rows too, each with steps of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._fragments import BYTES, LANES, ROWS, Packed, operands
from ._hopper import barriers, products, spread, zeros
from ._launch import cdiv, dynamic_slice, like, mosaic, power_of_two, warpgroups

COLUMNS = 128  # of activations: its sums and those of a step take half a thread's registers
STEP = 128  # weights, the least
LEAST = 4  # steps of a part
MEMORY = 232_448  # bytes of a program
ALIGNED = 1024  # what arrays there begin at multiples of
PROGRAMS = 132  # as many as an H200 has multiprocessors
COPIES = 24  # registers of a thread that copies
COMPUTES = {1: 240, 2: 240, 4: 112}  # of one that computes, by the number of groups


class Cut(NamedTuple):
    """How the work is divided."""

    groups: int
    """Of a program, with rows of their own."""
    shares: int
    """Groups that have the same rows, and each some steps of these; they divide ``stages``."""
    columns: int
    """Activations of a program."""
    step: int
    """Weights of a row at a time."""
    stages: int
    """Steps on their way at once."""
    parts: int
    """Of the rows, each a program's."""
    ahead: bool
    """Whether a step is decoded while the one before is multiplied; takes three stages a share."""


def cut(m: int, n: int, k: int, packed: Packed) -> Cut:
    """As measured on an H200, 16 to 256 rows of halves.

    Where a table decodes, reading it is what takes long: nothing is gained ahead of time, and of 64
    activations there are no registers for groups that share rows.
    """
    columns, by_table = min(max(power_of_two(m), 16), COLUMNS), packed.table is not None
    step = STEP if columns > (16 if by_table else 32) or k % (2 * STEP) else 2 * STEP
    programs = cdiv(n, 2 * ROWS) * cdiv(m, columns)
    steps = k // step
    parts = max(min(PROGRAMS // programs, steps // LEAST), 1)
    parts = cdiv(steps, cdiv(steps, parts))  # none is empty
    shares = 1 if columns > (32 if by_table else 64) else 2
    ahead = columns == COLUMNS and not by_table
    stages = 3 + ahead if columns == COLUMNS else 4 if step > STEP else 6
    return Cut(2, shares, columns, step, stages, parts, ahead)


def bytes_of(cut: Cut, by_table: int) -> int:
    """Of memory on the chip, with so many copies of a table, 0 for none."""
    rows, numbers = cut.groups * ROWS, 2 if cut.parts == 1 else 4
    arrays = (
        cut.stages * rows * cut.step // 2,
        cut.stages * cut.columns * cut.step * 2,
        rows * cut.columns * numbers,
        max(rows * (cut.shares - 1) * cut.columns * 4, 4 * LANES),
        BYTES * by_table * 4 if by_table else 4 * LANES,
    )
    barriers = 2 * cut.stages + cut.groups + 1
    return sum(cdiv(size, ALIGNED) * ALIGNED for size in arrays) + 8 * barriers


def copies(cut: Cut) -> int:
    """Of a table: twice as many as there are lanes, if they fit."""
    return 2 * LANES if bytes_of(cut, 2 * LANES) <= MEMORY else LANES


class Scratch(NamedTuple):
    """What a program has on the chip."""

    words: Any
    x: Any
    y: Any
    sums: Any  # of groups that share rows, but the first
    table: Any
    ready: Any  # words and activations of a step
    free: Any  # all groups are done with them
    summed: Any
    arrived: Any  # the table


def memory(dtype: Any, *shape: int) -> Any:
    """What copies fill and products read: rows in tiles that keep to banks of their own."""
    gpu, width = mosaic(), min(shape[-1], 64)
    transforms = gpu.TilingTransform((8, width)), gpu.SwizzleTransform(2 * width)
    return gpu.SMEM(shape, dtype, transforms=transforms)


def turned(cut: Cut, m: Any, n: Any) -> tuple[Any, Any]:
    """How a block is written: sums of parts as they are computed, which is transposed."""
    return (m, n) if cut.parts == 1 else (n, m)


def with_scratch(
    run: Callable[[Scratch], None], packed: Packed, cut: Cut, dtype: Any, result: Any
) -> None:
    """Run with memory and barriers that the groups share."""
    from jax.experimental import pallas

    gpu = mosaic()
    shared = (cut.groups * (cut.shares - 1), ROWS, cut.columns) if cut.shares > 1 else (1, LANES)
    pallas.run_scoped(
        lambda *scratch: run(Scratch(*scratch)),
        memory(jnp.uint16, cut.stages, cut.groups * ROWS, cut.step // 4),
        memory(dtype, cut.stages, cut.columns, cut.step),
        gpu.SMEM((cut.groups, *turned(cut, cut.columns, ROWS)), result),
        gpu.SMEM(shared, jnp.float32),
        gpu.SMEM((1, LANES) if packed.table is None else (BYTES, copies(cut)), jnp.int32),
        barriers(2, cut.stages),
        barriers(cut.groups, cut.stages),
        barriers(max(cut.shares - 1, 1), cut.groups),
        barriers(1, 1),
        collective_axes="group",
    )


class Program(NamedTuple):
    """A block of the product, and where its operands are."""

    refs: tuple[Any, ...]  # words, what else is read of the weight, its table if any, x, y
    scratch: Scratch
    packed: Packed
    cut: Cut
    row: Any  # the first
    column: Any
    last: int  # row from which a group may begin
    begin: Any  # step
    end: Any

    @property
    def columns(self) -> Any:
        """Of the result, as an index."""
        return dynamic_slice(self.column, self.cut.columns)

    def slot(self, step: Any) -> Any:
        """Where a step lies on the chip."""
        return lax.rem(step - self.begin, jnp.int32(self.cut.stages))

    def fetch(self, step: Any) -> None:
        """Start to copy a step."""
        gpu, cut, slot = mosaic(), self.cut, self.slot(step)
        ready, words = self.scratch.ready.at[slot], cut.step // 4
        rows = dynamic_slice(self.row, cut.groups * ROWS)
        source = self.refs[0].at[rows, dynamic_slice(step * words, words)]
        gpu.copy_gmem_to_smem(source, self.scratch.words.at[slot], ready)
        source = self.refs[-2].at[self.columns, dynamic_slice(step * cut.step, cut.step)]
        gpu.copy_gmem_to_smem(source, self.scratch.x.at[slot], ready)

    def copy(self) -> None:
        """What one group does: a step is fetched when one that lies there has been used."""
        gpu, scratch = mosaic(), self.scratch
        gpu.set_max_registers(COPIES, action="decrease")

        def replace(step: Any, _: None) -> None:
            gpu.barrier_wait(scratch.free.at[self.slot(step)])
            self.fetch(step)

        first = jnp.minimum(self.begin + self.cut.stages, self.end)
        lax.fori_loop(self.begin, first, lambda step, _: self.fetch(step), None)
        if self.packed.table is not None:
            gpu.copy_gmem_to_smem(self.refs[-3], scratch.table, scratch.arrived.at[0])
        lax.fori_loop(first, self.end, replace, None)

    def meet(self, step: Any) -> None:
        """Wait until a step is there, if there is one."""
        ready = self.scratch.ready.at[self.slot(step)]
        lax.cond(step < self.end, lambda: mosaic().barrier_wait(ready), lambda: None)

    def scales(self, step: Any, rows: Any) -> tuple[Any, ...]:
        """Of the groups of a step, or of the last one, and which these are."""
        step, group = jnp.minimum(step, self.end - 1), self.packed.group
        several = max(self.cut.step // group, 1)
        first = step * several if group <= self.cut.step else step // (group // self.cut.step)
        refs = self.refs[1:-2] if self.packed.table is None else self.refs[1:-3]
        groups = [first + i for i in range(several)]
        return tuple((i, self.packed.scales(refs, rows, i)) for i in groups)

    def fields(self, step: Any, mine: Any) -> tuple[Any, ...]:
        """What the words of a step, or of the last one, hold: for each group."""
        gpu, scratch, packed = mosaic(), self.scratch, self.packed
        slot = self.slot(jnp.minimum(step, self.end - 1))
        words = gpu.load(scratch.words.at[slot, mine], layout=gpu.Layout.WGMMA)
        parts = max(self.cut.step // packed.group, 1)
        table = None if packed.table is None else scratch.table
        return operands(words, parts, scratch.x.dtype, table)

    def multiplied(
        self, total: Any, step: Any, fields: Any, scales: Any, meanwhile: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """With the sums of a step; and what is done while the last ones are summed."""
        gpu, width = mosaic(), self.cut.step // len(scales)
        more = None
        for i, (codes, (group, numbers)) in enumerate(zip(fields, scales, strict=True)):
            weights = self.packed.halves(codes, numbers, group)
            at = self.slot(step), slice(None), dynamic_slice(i * width, width)
            x = self.scratch.x.at[at].transpose((1, 0))
            last = i == len(scales) - 1

            def product(into: Any, weights: Any = weights, x: Any = x, last: bool = last) -> Any:
                gpu.wgmma(into, weights, x)
                more = meanwhile() if last else None
                return gpu.wgmma_accumulator_load(into, wait_n=0), more

            y, more = products(product, total.shape)
            total = total + y * spread(numbers[0].astype(jnp.float32), y.shape)
        return total, more

    def compute(self, me: Any) -> None:
        """What the other groups do."""
        gpu, cut, scratch = mosaic(), self.cut, self.scratch
        gpu.set_max_registers(COMPUTES[cut.groups * cut.shares], action="increase")
        part, share = lax.rem(me, jnp.int32(cut.groups)), lax.div(me, jnp.int32(cut.groups))
        row = self.row + part * ROWS
        rows = dynamic_slice(jnp.minimum(row, self.last), ROWS)  # what is beyond is not written
        mine = dynamic_slice(part * ROWS, ROWS)
        first = self.begin + share
        if self.packed.table is not None:
            gpu.barrier_wait(scratch.arrived.at[0])

        def step(j: Any, carry: Any) -> Any:
            total, fields, now, following = carry
            step = first + j * cut.shares
            after = self.scales(step + 2 * cut.shares, rows)

            def meanwhile() -> Any:
                if not cut.ahead:
                    return None
                more = lax.optimization_barrier(self.fields(step + cut.shares, mine))
                self.meet(step + 2 * cut.shares)  # nothing is moved across: to wait is a loop
                return more

            if not cut.ahead:
                gpu.barrier_wait(scratch.ready.at[self.slot(step)])
                fields = self.fields(step, mine)
            total, more = self.multiplied(total, step, fields, now, meanwhile)
            gpu.barrier_arrive(scratch.free.at[self.slot(step)])
            return total, more, following, after

        fields = None
        if cut.ahead:
            self.meet(first)
            self.meet(first + cut.shares)
            fields = self.fields(first, mine)
        scales = self.scales(first, rows), self.scales(first + cut.shares, rows)
        start = zeros(ROWS, cut.columns), fields, *scales
        times = lax.div(self.end - first + (cut.shares - 1), jnp.int32(cut.shares))
        total, *_ = lax.fori_loop(jnp.int32(0), times, step, start)
        if cut.shares == 1:
            self.finish(total, part, row)
        else:
            give = functools.partial(self.give, total, me - cut.groups, part)
            lax.cond(share > 0, give, functools.partial(self.take, total, part, row))

    def give(self, total: Any, place: Any, part: Any) -> None:
        """Sums to the first group that has the same rows."""
        gpu = mosaic()
        self.scratch.sums.at[place][...] = total
        gpu.commit_smem()
        gpu.barrier_arrive(self.scratch.summed.at[part])

    def take(self, total: Any, part: Any, row: Any) -> None:
        """Those of the others, in order."""
        gpu, cut = mosaic(), self.cut
        gpu.barrier_wait(self.scratch.summed.at[part])
        for i in range(cut.shares - 1):
            more = self.scratch.sums.at[i * cut.groups + part]
            total = total + gpu.load(more, layout=gpu.Layout.WGMMA, optimized=False)
        self.finish(total, part, row)

    def finish(self, total: Any, part: Any, row: Any) -> None:
        """Write the sums."""
        gpu, mine = mosaic(), self.scratch.y.at[part]
        if self.cut.parts == 1:
            mine.transpose((1, 0))[...] = total.astype(mine.dtype)
        else:
            mine[...] = total
        gpu.commit_smem()
        at = lax.axis_index("part"), *turned(self.cut, self.columns, dynamic_slice(row, ROWS))
        gpu.copy_smem_to_gmem(mine, self.refs[-1].at[at])
        gpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is read may be given up


def kernel(*refs: Any, packed: Packed, cut: Cut, n: int, k: int) -> None:
    """Some groups of a program compute, one copies."""
    part, columns, rows, me = (lax.axis_index(x) for x in ("part", "columns", "rows", "group"))
    steps, each = k // cut.step, cdiv(k // cut.step, cut.parts)
    begin = part * jnp.int32(each)
    end = jnp.minimum(begin + each, steps)

    def run(scratch: Scratch) -> None:
        at = rows * (cut.groups * ROWS), columns * cut.columns
        program = Program(refs, scratch, packed, cut, *at, n - ROWS, begin, end)
        last = cut.groups * cut.shares
        lax.cond(me < last, functools.partial(program.compute, me), program.copy)

    with_scratch(run, packed, cut, refs[-2].dtype, refs[-1].dtype)


def times_transposed(
    x: jax.Array, weight: tuple[jax.Array, ...], n: int, *, packed: Packed, name: str, cut: Cut
) -> jax.Array:
    """``[m, k]`` times ``[n, k]`` transposed, in the dtype of x, which are halves.

    Args:
        x: activations ``[m, k]``; every sum is in float32.
        weight: what the packing reads.
        n: rows of the weight, a multiple of 64.
        packed: how they are packed.
        name: as profiles show it.
        cut: how the work is divided.
    """
    m, k = x.shape
    x = jnp.pad(x, ((0, -m % cut.columns), (0, 0)))  # tiles are copied whole
    words, *more = packed.views(*weight)
    if packed.table is not None:
        more.append(jnp.asarray(np.repeat(packed.table[:, None], copies(cut), 1)))
    whole = cut.parts == 1
    (y,) = warpgroups(
        functools.partial(kernel, packed=packed, cut=cut, n=n, k=k),
        name,
        out=(like(x, (cut.parts, *turned(cut, len(x), n)), x.dtype if whole else jnp.float32),),
        grid={
            "part": cut.parts,
            "columns": cdiv(m, cut.columns),
            "rows": cdiv(n, cut.groups * ROWS),
        },
        groups=cut.groups * cut.shares + 1,
    )(words, *more, packed.ordered(x, min(packed.group, cut.step)))
    y = functools.reduce(jnp.add, y)
    return (y if whole else y.T.astype(x.dtype))[:m]
