"""A few rows of activations times a packed weight: y = x Wᵀ, decoded in registers.

grid      pairs of rows of activations within blocks of rows of the weight
reads     the weight for each pair, which meets it in the cache; the activations, from there too,
          for each program
writes    the product once
bound by  memory; with several rows of activations by instructions

A program is one warp.  It asks for several tiles of its rows before it decodes the first.  More
than two rows of activations at once would need more registers than there are, and a minute of the
compiler.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, cdiv, fma, launch, like, power_of_two, program_id, write
from ._rows import counted
from ._tiles import around, varied
from .quantised import ONE, Packing, Part, Tile, load


class Cut(NamedTuple):
    """Rows of a program, units of each row at a time, and how many such tiles it asks for.

    To compile takes a time that grows with the cube of what is written out: Triton looks from each
    load for all that depend on the same indices, operation by operation.  Of Q3K two tiles and two
    of the exact form did not end within minutes; rolled it takes 3 s.
    """

    rows: int
    units: int
    ahead: int
    rolled: bool = False
    """A tile in a loop's body, and the next ones on their way; else as many as are asked for."""


TOGETHER = 2  # rows of activations


def plus(total: Any, a: Tile, b: Tile) -> Tile:
    """total + a · b, where there is a total."""
    return a * b if total is None else fma(a, b, total)


def kernel(*refs: Any, packing: Packing, cut: Cut) -> None:
    """Some rows of the weight."""
    *weight, x_ref, y_ref = refs
    m, n = y_ref.shape
    pairs = cdiv(m, TOGETHER)
    first_row = program_id(0) % pairs * TOGETHER
    mine = [jnp.minimum(first_row + i, m - 1) for i in range(min(m, TOGETHER))]  # the last, twice
    rows = program_id(0) // pairs * cut.rows + counted(cut.rows)
    row = jnp.minimum(rows, n - 1) if n % cut.rows else rows
    shape = packing.shape(cut.units)
    unit = counted(cut.units).reshape(shape)
    tiles = cdiv(packing.units, cut.units)
    parts, codes = packing.powers.shape
    worth = 1 / ONE if packing.subnormal and not INTERPRETED.value else 1.0

    def activations(i, plane, first):
        at = first + unit
        # Words that are put together are one to a thread.  Activations side by side would be four,
        # and every tile change hands: this is the same, and Triton does not see that they are.
        return load(x_ref, mine[i], plane, at if packing.whole else at * 4 >> 2)[None]

    def read(tile):
        return packing.read(weight, row, tile * cut.units, cut.units)

    def fast(p: int, part: Part, x, total: list[Any]):
        """Codes times activations, summed over those of a unit; then times their scale."""
        sums: list[Any] = [None] * len(mine)
        for j, code in enumerate(part.codes):
            values = code.fast()
            for i in range(len(mine)):
                sums[i] = plus(sums[i], values, x(i, p * codes + j))
        scale = part.scale * worth
        for i in range(len(mine)):
            total[i] = plus(total[i], sums[i], scale)
        if packing.offset:
            minimum = -(part.less * part.scale)
            minimum = minimum if part.minimum is None else minimum + part.minimum
            minimum = jnp.broadcast_to(minimum, (cut.rows, *shape))
            for i in range(len(mine)):
                total[i] = plus(total[i], minimum, x(i, parts * codes + p))

    def exact(found: tuple[Part, ...], x, total):
        """Weights times one row of activations, as the op says it."""
        plain = parts * codes + parts * packing.offset
        for p, part in enumerate(found):
            for j, code in enumerate(part.codes):
                weights = part.weights(code)
                of_code = jnp.broadcast_to(x(plain + p * codes + j), weights.shape)
                total = fma(weights, of_code, total)
        return total

    def add(raw, tile, total):
        total = list(total)
        x = lambda i, plane: activations(i, plane, tile * cut.units)
        for p, part in enumerate(packing.parts(raw)):
            fast(p, part, x, total)
        return total

    def several(tile, total, count):
        raws = [read(tile + i) for i in range(count)]
        for i, raw in enumerate(raws):
            total = add(raw, tile + i, total)
        return total

    def prefetching(tile, carry):
        total, now, *later = carry
        following = read(jnp.minimum(tile + cut.ahead, tiles - 1))
        return add(now, tile, total), *later, following

    def summed(x):
        return x.reshape(cut.rows, -1).sum(1)

    total = [jnp.zeros((cut.rows, *shape), jnp.float32)] * len(mine)
    if cut.rolled:
        raws = [read(min(i, tiles - 1)) for i in range(cut.ahead)]
        total, *_ = lax.fori_loop(np.int32(0), np.int32(tiles), prefetching, (total, *raws))
    else:
        # The last tiles apart, in sight of the compiler: all of them, if they are not many.
        steps = (tiles - 1) // cut.ahead
        if steps:
            body = lambda j, total: several(j * cut.ahead, total, cut.ahead)
            total = lax.fori_loop(np.int32(0), np.int32(steps), body, total)
        total = several(steps * cut.ahead, total, tiles - steps * cut.ahead)
    y = [summed(x) for x in total]
    inside = rows < n if n % cut.rows else None
    for i, at in enumerate(mine):
        write(y_ref, (at, rows), y[i], inside)

    # Again, exactly, what is not finite: code · inf + minimum · inf is not weight · inf, and codes
    # may overflow where weights do not.  And what is so small that subnormal products may be lost.
    def again(i, none):
        at = jnp.minimum(first_row + i, m - 1)

        def tile(j, total):
            x = lambda plane: load(x_ref, at, plane, j * cut.units + unit)[None]
            return exact(packing.parts(read(j)), x, total)

        nothing = jnp.zeros((cut.rows, *shape), jnp.float32)
        total = lax.fori_loop(np.int32(0), np.int32(tiles), tile, nothing)
        write(y_ref, (at, rows), summed(total), inside)
        return none

    sound = lambda x: (jnp.abs(x) < jnp.inf) & (jnp.abs(x) > SMALL * packing.subnormal)
    lost = sum(jnp.sum(jnp.where(sound(x), 0.0, 1.0)) for x in y)
    times = jnp.where(lost > 0, np.int32(len(mine)), np.int32(0))
    lax.fori_loop(np.int32(0), times, again, np.int32(0))


SMALL = 2.0**-40


def most(dtype: Any) -> int:
    """Rows of activations for which this is faster than tensor cores."""
    return 4 if dtype.itemsize == 2 else 8


def cut(packing: Packing) -> Cut:
    """As measured on an H200; what is rolled was not."""
    units = min(max(power_of_two(packing.units), 32), 128 if packing.whole else 64)
    return Cut(2, units, 1, True) if packing.long else Cut(2, units, 2 if packing.whole else 4)


def cuts(packing: Packing) -> list[Cut]:
    """More or less at a time; that of :func:`cut` first."""
    first = cut(packing)
    units = around(first.units, 32, max(first.units, power_of_two(packing.units)))
    ways = {"rows": (1, 4), "units": units, "ahead": around(first.ahead, 1, 8)}
    ways |= {} if packing.long else {"rolled": (True,)}
    return [first, *varied(first, **ways)]


def ordered(x: jax.Array, packing: Packing, units: int) -> jax.Array:
    """``f32[m, k]`` as the kernel reads it: for fast codes; their sums; for exact ones."""
    x = packing.planes(x.astype(jnp.float32))
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -packing.units % units)))
    flat = lambda x: x.reshape(len(x), -1, x.shape[-1])
    sums = [x.sum(2)] * packing.offset
    return jnp.concatenate([flat(x * packing.powers[..., None]), *sums, flat(x)], 1)


def times_transposed(
    x: jax.Array,
    weight: tuple[jax.Array, ...],
    n: int,
    *,
    packing: Packing,
    name: str,
    interpret: bool,
    cut: Cut,
) -> jax.Array:
    """``[m, k]`` times ``[n, k]`` transposed, in the dtype of x.

    Args:
        x: activations ``[m, k]``; every sum is in float32.
        weight: what the packing reads.
        n: rows of the weight.
        packing: how they are packed.
        name: as profiles show it.
        interpret: run without a GPU.
        cut: how the work is divided.
    """
    return launch(
        functools.partial(kernel, packing=packing, cut=cut),
        name,
        out=like(x, (len(x), n)),
        grid=(cdiv(len(x), TOGETHER) * cdiv(n, cut.rows),),
        warps=1,
        interpret=interpret,
    )(*weight, ordered(x, packing, cut.units))
