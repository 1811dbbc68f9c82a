"""Rows of activations times a packed weight, on tensor cores: y = x Wᵀ.

grid      blocks of rows of the weight × blocks of rows of activations × parts of the rows
reads     the weight once for each block of activations; these once for each block of the weight
writes    the product once, or a float32 sum for each part, which XLA adds in order and rounds once
bound by  the tensor cores, and by what a step waits for; memory where activations are few

Codes of the weight become halves in registers and are multiplied as they are; a run's sum is
scaled.  Activations in float32 are three bfloat16, which add up to them: a product for each.  For
these, and where there are minima, a second launch looks for what is not finite, and computes that
anew, as the op says it.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import cdiv, fma, launch, like, power_of_two, program_id, triton, write
from ._rows import counted
from ._tiles import varied
from .quantised import load
from .quantised_runs import Run, Runs


class Cut(NamedTuple):
    """Of a program: rows of the weight and of activations, steps at a time; of its launch."""

    rows: int
    columns: int
    steps: int
    parts: int
    warps: int
    stages: int


PROGRAMS = 224  # of 128 rows: most of two for each multiprocessor of an H200
LEAST = 4  # steps of a part
PARTS = 3  # bfloat16 that add up to a float32


def cut(m: int, n: int, dtype: Any, runs: Runs) -> Cut:
    """As measured on an H200, 16 to 256 rows of halves, 16 and 128 of float32.

    Programs of 64 rows read the activations twice as often, and are as fast only where loads
    between words (16 columns), or scales of 16 weights, keep them busy.
    """
    columns, wide = min(max(power_of_two(m), 16), 64), dtype == jnp.float32
    rows, stages = 128, 2 if wide and columns > 16 else 3
    if wide and columns == 16 and not runs.aligned:
        rows = 64
    if wide and columns > 16 and runs.of_step > 2:
        rows, columns = 64, min(power_of_two(m), 128)
    enough = 2 * PROGRAMS * 128 // rows if columns == 16 else PROGRAMS
    parts = power_of_two(cdiv(enough, cdiv(n, rows) * cdiv(m, columns)))
    most = power_of_two(runs.steps // LEAST + 1) // 2
    return Cut(rows, columns, 1, max(min(parts, most), 1), 4, stages)


def cuts(m: int, n: int, dtype: Any, runs: Runs) -> list[Cut]:
    """More or less at a time; that of :func:`cut` first."""
    first = cut(m, n, dtype, runs)
    ways = {"rows": (64, 128), "steps": (1, 2), "parts": (1, 2, 4, 8), "warps": (4, 8)}
    return [first, *varied(first, **ways, stages=(2, 3, 4))]


class Block:
    """A program's block of the weight and of activations, as far as both kernels are alike."""

    def __init__(self, refs: Any, runs: Runs, cut: Cut, n: int, m: int, terms: Any) -> None:
        *self.weight, self.x = refs
        self.runs, self.cut, self.dtype = runs, cut, self.x.dtype
        rows = program_id(0) * cut.rows + counted(cut.rows)
        self.row = jnp.minimum(rows, n - 1) if n % cut.rows else rows
        self.column = program_id(1) * cut.columns + counted(cut.columns)
        self.each, self.ragged = steps_of_part(runs, cut)
        self.begin = program_id(2) * self.each
        self.parts = 1 + max(terms)[0]
        self.at = (program_id(2), self.column[None, :], rows[:, None])
        self.inside = (rows < n)[:, None] & (self.column < m)[None, :]

    def read(self, step: Any) -> tuple[Any, ...]:
        """What is to be on its way while another step is multiplied; aligned tiles are anyhow."""
        step = jnp.minimum(step, np.int32(self.runs.steps - 1))
        scales = self.runs.scales(self.weight, self.row, step)
        aligned = self.runs.aligned
        return (scales,) if aligned else (scales, self.runs.tiles(self.weight, self.row, step))

    def found(self, step: Any, scales: Any, tiles: Any = None) -> Iterator[tuple[int, Run, Any]]:
        """The runs of a step, and where their activations begin; those after the last are 0."""
        runs, last = self.runs, np.int32(self.runs.steps - 1)
        if tiles is None:
            tiles = runs.tiles(
                self.weight, self.row, jnp.minimum(step, last) if self.ragged else step
            )
        for i, run in enumerate(runs.runs(tiles, scales, self.dtype, self.parts)):
            if self.ragged:
                zero = lambda x: None if x is None else jnp.where(step <= last, x, 0.0)
                run = run._replace(scale=zero(run.scale), minimum=zero(run.minimum))
            yield i, run, step * runs.weights + i * len(run.pieces) * runs.elements % runs.weights

    def activations(self, plane: int, first: Any, piece: int) -> jax.Array:
        """Those that one piece meets, of one of the planes."""
        elements = self.runs.elements
        at = first + piece * elements + counted(elements)
        return load(self.x, np.int32(plane), self.column[None, :], at[:, None])

    @property
    def nothing(self) -> jax.Array:
        """To begin a sum with."""
        return jnp.zeros((self.cut.rows, self.cut.columns), jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of halves; the sum is cut off rather than rounded, so that those of runs stay apart."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def kernel(*refs: Any, runs: Runs, cut: Cut, n: int, m: int, terms: Any) -> None:
    """A block of one part's sums, by products of these parts of codes and activations."""
    operands, (*sums_ref, y_ref) = refs[: -1 - runs.offset], refs[-1 - runs.offset :]
    block = Block(operands, runs, cut, n, m, terms)

    def product(run, first):
        places = [(j, p) for j in sorted({j for _, j in terms}) for p in range(len(run.pieces))]
        x = {(j, p): block.activations(j, first, p) for j, p in places}
        y = block.nothing
        for i, j in terms:
            for p, piece in enumerate(run.pieces):
                y += dot(piece[i], x[j, p])
        return y

    def add(step, now, total):
        for i, run, first in block.found(step, *now):
            total = fma(product(run, first), run.scale[:, None], total)
            if run.minimum is not None:
                sums = load(*sums_ref, step * runs.of_step + i, block.column)
                minimum = jnp.broadcast_to(run.minimum[:, None], total.shape)
                total = fma(minimum, sums[None, :], total)
        return total

    def some(j, carry):
        total, now = carry
        first = block.begin + j * cut.steps
        following = tuple(block.read(first + cut.steps + i) for i in range(cut.steps))
        for i in range(cut.steps):
            total = add(first + i, now[i], total)
        return total, following

    now = tuple(block.read(block.begin + i) for i in range(cut.steps))
    times = np.int32(block.each // cut.steps)
    total, _ = lax.fori_loop(np.int32(0), times, some, (block.nothing, now))
    write(y_ref, block.at, total, block.inside)


def again(*refs: Any, runs: Runs, cut: Cut, n: int, m: int, terms: Any) -> None:
    """What is not finite: minimum · inf + code · inf is not weight · inf, and codes may overflow.

    Weights are multiplied in as many parts as activations, of which the lower ones are finite.
    """
    *operands, was_ref, y_ref = refs
    block = Block(operands, runs, cut, n, m, terms)
    was = triton().load(was_ref.at[block.at], mask=block.inside, other=0.0)
    sound = jnp.abs(was.astype(jnp.float32)) < jnp.inf
    parts = 1 + max(j for _, j in terms)

    def step(j, total):
        for _, run, first in block.found(block.begin + j, *block.read(block.begin + j)):
            for p, piece in enumerate(run.pieces):
                w = sum(x.astype(jnp.float32) for x in piece) * run.scale[:, None]
                w = w if run.minimum is None else w + run.minimum[:, None]
                for i in range(parts):
                    part = w.astype(block.dtype)
                    for plane in range(parts - i):
                        x = block.activations(plane, first, p)
                        zero = block.dtype.type(0)
                        total += dot(part, jnp.where(jnp.abs(x) < jnp.inf, x, zero) if i else x)
                    w = jnp.where(jnp.abs(w) < jnp.inf, w - part.astype(jnp.float32), 0.0)
        return total

    lost = jnp.sum(jnp.where(sound, 0.0, 1.0))
    times = jnp.where(lost > 0, np.int32(block.each), np.int32(0))
    total = lax.fori_loop(np.int32(0), times, step, block.nothing)
    write(y_ref, block.at, total, block.inside & ~sound)


def steps_of_part(runs: Runs, cut: Cut) -> tuple[int, bool]:
    """How many, and whether there are too many for all parts together."""
    each = cdiv(cdiv(runs.steps, cut.parts), cut.steps) * cut.steps
    return each, each * cut.parts > runs.steps


def in_three(x: jax.Array) -> jax.Array:
    """bfloat16 that add up to float32, the largest first: cut off, for rounded up it may be inf."""
    found = []
    for _ in range(PARTS):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(bits, jnp.float32), x)
        found.append(part.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(x), x - part, 0.0)
    return jnp.stack(found)


def times_transposed(
    x: jax.Array,
    weight: tuple[jax.Array, ...],
    n: int,
    *,
    runs: Runs,
    name: str,
    interpret: bool,
    cut: Cut,
) -> jax.Array:
    """``[m, k]`` times ``[n, k]`` transposed, in the dtype of x.

    Args:
        x: activations ``[m, k]``; every sum is in float32.
        weight: what the packing reads.
        n: rows of the weight.
        runs: how they are packed.
        name: as profiles show it.
        interpret: run without a GPU.
        cut: how the work is divided.
    """
    m, wide = len(x), x.dtype == jnp.float32
    each, _ = steps_of_part(runs, cut)
    x = runs.ordered(x)
    x = jnp.pad(x, ((0, -m % cut.columns), (0, each * cut.parts * runs.weights - x.shape[1])))
    planes, terms = x[None], [(0, 0)]
    if wide:
        ways = range(PARTS if runs.levels else 1)
        products = ((i, j) for i in ways for j in range(PARTS - i))
        planes, terms = in_three(x), sorted(products, key=sum, reverse=True)  # the least first
    of_run = runs.weights // runs.of_step
    sums = [x.reshape(len(x), -1, of_run).sum(-1, dtype=jnp.float32).T] * runs.offset
    start = functools.partial(
        launch,
        name=name,
        out=like(x, (cut.parts, m, n), x.dtype if cut.parts == 1 else jnp.float32),
        grid=(cdiv(n, cut.rows), cdiv(m, cut.columns), cut.parts),
        warps=cut.warps,
        stages=cut.stages,
        interpret=interpret,
    )
    how = {"runs": runs, "cut": cut, "n": n, "m": m, "terms": terms}
    operands = (*runs.views(*weight), planes)
    y = start(functools.partial(kernel, **how))(*operands, *sums)
    if wide or runs.offset:
        place = {len(operands): 0}
        y = start(functools.partial(again, **how), aliases=place)(*operands, y)
    return functools.reduce(jnp.add, y).astype(x.dtype)
