"""One result per row of a matrix and element: what softmax and the norms have in common.

They read a row, reduce it to a few numbers, and compute each element of the result from those and
the elements of the row.  ``RowMaths`` says both, for a block of rows in registers:

    one pass     a row fits on chip: read it, reduce it, write the result
    two passes   it does not: reduce it block by block, merging what was found; then read it again,
                 mostly from the cache, and write

grid      ceil(rows / rows of a program)
reads     every operand once, or twice where rows are long        writes   the result once
bound by  memory
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import WARP, cdiv, launch, like, power_of_two, program_id, read, unavailable, write
from ._tiles import FULL, Tiles, around, varied

Block = jax.Array  # f32[rows, columns]
Found = tuple[jax.Array, ...]  # each f32[rows, 1]

ON_CHIP = 2**15  # elements of a program's rows, over all operands, that stay in registers
SMALL = 2**11  # elements that a program reads at least, if there are as many
EACH = 32  # elements of a thread
MULTIPROCESSORS = 132  # of an H200
SHORT = 768  # columns; between 512 and 1000, which were measured
DIVIDED = 8192  # columns of one row that a program reads as fast as XLA's several do


class RowMaths(NamedTuple):
    """What a row is reduced to, and the result."""

    name: str
    fill: float
    """Stands in for the elements after the end of a row."""
    reduce: Callable[..., Found]
    """``(*blocks, count, inside)``: what is found in a block, ``count`` of its columns inside."""
    merge: Callable[..., Found]
    """``(found, count, found, count)``: what is found in two blocks together."""
    result: Callable[..., Block]
    """``(found, *blocks, n)`` for rows of n elements."""


class Blocks(NamedTuple):
    """How rows are cut: of a program, its columns at a time, and warps."""

    rows: int
    columns: int
    warps: int


def blocks(rows: int, n: int, operands: int) -> Blocks:
    """Rows whole while they fit on chip; several at a time while they are short."""
    columns = power_of_two(n)
    if columns * operands > ON_CHIP:
        columns = ON_CHIP // 4 // operands
    together = min(power_of_two(rows), max(1, SMALL // columns))
    warps = together * columns // (WARP * EACH // operands)
    most = (
        8 if columns <= 8192 else 32
    )  # measured: 16 take 1.2 times as long for a layer's gradient
    return Blocks(together, columns, min(max(warps, 1), most))


def tiles(*arrays: Any, **params: Any) -> Tiles:
    """More or fewer warps; rows, or of long ones columns."""
    n, operands = arrays[0].shape[-1], len(arrays)
    rows = math.prod(arrays[0].shape[:-1])
    first = blocks(rows, n, operands)
    ways = {"warps": around(first.warps, 1, 32)}
    if is_long(arrays[0], operands):
        ways |= {"columns": around(first.columns)}
    else:
        most = min(power_of_two(rows), ON_CHIP // operands // first.columns)
        ways |= {"rows": around(first.rows, 1, most)}
    extents = {"rows": min(rows, FULL), "columns": n}
    return Tiles.of(extents, first, *varied(first, **ways))


def refuses(*arrays: Any, **params: Any) -> str | None:
    """Why these kernels cannot serve the arrays, or None."""
    return unavailable(*arrays)


def is_long(x: Any, operands: int) -> bool:
    """Whether a row has to be read twice."""
    return power_of_two(x.shape[-1]) * operands > ON_CHIP


def is_unaligned(x: Any, operands: int) -> str | None:
    """Rows that cannot be read 16 bytes at a time: measured, XLA is 1.03 to 1.15 times faster.

    Not where rows are read twice: there it takes 1.35 to 1.9 times as long.
    """
    if x.shape[-1] * x.dtype.itemsize % 16 == 0 or is_long(x, operands):
        return None
    return (
        f"rows of {x.shape[-1]} {x.dtype.name} begin between 16-byte words; XLA reads them as fast"
    )


def is_short(x: Any) -> str | None:
    """Rows that XLA handles as fast: measured, it is up to 1.7 times faster where there are few."""
    return f"rows of less than {SHORT} are as fast in XLA" if x.shape[-1] < SHORT else None


def are_few(x: Any, operands: int) -> str | None:
    """Rows that leave most of the chip idle: XLA divides long ones, a program does not."""
    rows = x.size // x.shape[-1]
    if rows < (MULTIPROCESSORS if is_long(x, operands) else 8) and x.shape[-1] > DIVIDED:
        return f"{rows} long rows leave most of the chip idle; XLA divides them"
    return None


def declines_gradient(x: Any, *rest: Any, **params: Any) -> str | None:
    """Where the gradient of two operands is as fast in XLA, which takes two or three kernels."""
    if is_long(x, 2):
        return "a row and its cotangent do not fit on chip, and XLA reads them twice as well"
    return is_unaligned(x, 2) or are_few(x, 2)


def kernel(*refs: Any, maths: RowMaths, cut: Blocks, params: dict[str, Any]) -> None:
    """The rows of one program."""
    *operands, y_ref = refs
    rows, n = y_ref.shape
    row = (program_id(0) * cut.rows + counted(cut.rows))[:, None]
    columns = counted(cut.columns)[None, :]
    full, rest = divmod(n, cut.columns)

    def at(j, count):
        """Where block j stands, and the mask of what is in it: None if all is."""
        column = j * cut.columns + columns
        masks = [row < rows] * (rows % cut.rows > 0) + [column < n] * (count < cut.columns)
        mask = functools.reduce(jnp.logical_and, masks) if masks else None
        shape = (cut.rows, cut.columns)
        return (row, column), None if mask is None else jnp.broadcast_to(mask, shape)

    def load(j, count):
        index, mask = at(j, count)
        fill = None if mask is None else maths.fill
        return [read(ref, index, mask, fill) for ref in operands]

    def found(j, count):
        within = columns < count if count < cut.columns else None
        return maths.reduce(*load(j, count), count=count, inside=within)

    def store(j, count, numbers, tiles):
        index, mask = at(j, count)
        write(y_ref, index, maths.result(numbers, *tiles, n=n, **params), mask)

    if full + (rest > 0) == 1:
        tiles = load(0, n)
        within = columns < n if rest else None
        store(0, n, maths.reduce(*tiles, count=n, inside=within), tiles)
        return

    def step(j, numbers):
        seen = j * cut.columns
        return maths.merge(numbers, seen, found(j, cut.columns), cut.columns)

    numbers = lax.fori_loop(np.int32(1), np.int32(full), step, found(0, cut.columns))
    if rest:
        numbers = maths.merge(numbers, full * cut.columns, found(full, rest), rest)
        store(full, rest, numbers, load(full, rest))
    # Backwards: what was read last is in the cache still.
    again = lambda i: store(i, cut.columns, numbers, load(i, cut.columns))
    lax.fori_loop(np.int32(0), np.int32(full), lambda i, _: again(full - 1 - i), None)


def by_rows(
    maths: RowMaths, *arrays: jax.Array, interpret: bool, tile: Blocks | None = None, **params: Any
) -> jax.Array:
    """The result for arrays ``[..., n]`` of one shape and dtype."""
    shape = arrays[0].shape
    n, rows = shape[-1], math.prod(shape[:-1])
    cut = tile or blocks(rows, n, len(arrays))
    flat = [x.reshape(rows, n) for x in arrays]
    y = launch(
        functools.partial(kernel, maths=maths, cut=cut, params=params),
        maths.name,
        out=like(flat[0]),
        grid=(cdiv(rows, cut.rows),),
        warps=cut.warps,
        interpret=interpret,
    )(*flat)
    return y.reshape(shape)


def counted(n: int) -> jax.Array:
    """0 … n − 1 in 32 bits, also where JAX counts in 64."""
    return jnp.arange(n, dtype=jnp.int32)


def total(x: Block) -> jax.Array:
    """Sum over each row."""
    return jnp.sum(x, axis=1, keepdims=True)


def added(a: Found, _: Any, b: Found, __: Any) -> Found:
    """What is found in two blocks, where that is sums."""
    return tuple(x + y for x, y in zip(a, b, strict=True))
