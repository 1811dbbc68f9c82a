"""A few rows of activations times a packed weight: y = x Wᵀ, decoded in registers.

grid      groups of rows of activations within blocks of rows of the weight
reads     the weight for each group, which meets it in the cache; the activations, from there too,
          for each program
writes    the product once
bound by  memory; with several rows of activations by instructions

A program is one warp that asks for some tiles, then decodes them; other programs fill the wait.
Each lane holds what it uses: nothing changes hands before the last sum.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, WARP, cdiv, fma, launch, like, power_of_two, program_id, write
from ._rows import counted
from .quantised import ONE, Cut, Packing, Part, Tile, load

WRITTEN_OUT = 2  # steps; more are a loop, which compiles in a fraction of the time
ACTIVATIONS = 32  # in registers of a thread
PROGRAMS = 2048  # half as many leave too much of the chip idle: measured of NF4, a quarter longer
Plane = Callable[[int, int], Tile]  # of a row of activations: what meets a code, or their sum


def fast(part: Part, p: int, packing: Packing, x: Plane, total: list[Tile]) -> None:
    """Adds codes of a part times activations, summed over those of a unit, times their scale."""
    parts, codes = packing.powers.shape
    values = [code.fast() for code in part.codes]
    less, minimum = part.less, part.minimum
    if not isinstance(less, float | int):
        less, minimum = 0, -(less * part.scale) + (0.0 if minimum is None else minimum)
    for i in range(len(total)):
        of_unit = x(i, parts * codes + p) if packing.offset else 0.0
        of_unit = jnp.broadcast_to(of_unit, total[i].shape)
        sums = values[0] * x(i, p * codes)
        if less:
            sums = fma(values[0], x(i, p * codes), -less * of_unit)
        for j in range(1, codes):
            sums = fma(values[j], x(i, p * codes + j), sums)
        total[i] = fma(sums, part.scale, total[i])
        if minimum is not None:
            total[i] = fma(of_unit, minimum, total[i])


def exact(found: tuple[Part, ...], packing: Packing, x: Callable[[int], Tile], total: Tile) -> Tile:
    """Weights times one row of activations, as the op says it."""
    parts, codes = packing.powers.shape
    plain = parts * codes + parts * packing.offset
    for p, part in enumerate(found):
        for j, code in enumerate(part.codes):
            weights = part.weights(code)
            of_code = jnp.broadcast_to(x(plain + p * codes + j), weights.shape)
            total = fma(weights, of_code, total)
    return total


def kernel(*refs: Any, packing: Packing, cut: Cut) -> None:
    """Some rows of the weight."""
    *weight, x_ref, y_ref = refs
    m, n = y_ref.shape
    count = together(packing, m)
    groups = cdiv(m, count)
    first_of_x = program_id(0) % groups * count
    mine = [jnp.minimum(first_of_x + i, m - 1) for i in range(count)]  # the last ones again
    first = program_id(0) // groups * cut.rows
    first = jnp.minimum(first, n - cut.rows) if n % cut.rows else first  # some rows twice
    first = first & np.int32(power_of_two(n) - 1) if cut.bounded else first
    side = cut.rows if cut.beside else 1
    rows = [first + i + counted(side) for i in range(0, cut.rows, side)]
    shape = packing.shape(cut.units)
    unit = counted(cut.units).reshape(shape)
    tiles = cdiv(packing.units, cut.units)
    one = worth(packing, INTERPRETED.value)

    def activations(row, plane, tile):
        return load(x_ref, row, np.int32(plane), tile * cut.units + unit)[None]

    def read(row, tile):
        if cut.bounded and not isinstance(tile, int):
            tile = tile & np.int32(power_of_two(tiles) - 1)
        return packing.read(weight, row, tile * cut.units, cut.units)

    def several(tile, count):
        return tuple(tuple(read(row, tile + i) for row in rows) for i in range(count))

    def add(raws, tile, totals):
        totals = [list(of_row) for of_row in totals]
        for u, of_rows in enumerate(raws):
            x = functools.cache(lambda i, plane, at=tile + u: activations(mine[i], plane, at))
            for raw, total in zip(of_rows, totals, strict=True):
                for p, part in enumerate(packing.parts(raw)):
                    fast(part, p, packing, x, total)
        return tuple(map(tuple, totals))

    def step(j, totals):
        return add(several(j * cut.ahead, cut.ahead), j * cut.ahead, totals)

    def early(j, carry):
        totals, now = carry
        following = several((j + 1) * cut.ahead, cut.ahead)
        return add(now, j * cut.ahead, totals), following

    totals = ((jnp.zeros((side, *shape), jnp.float32),) * len(mine),) * len(rows)
    steps, rest = divmod(tiles, cut.ahead)
    end = steps * cut.ahead
    if steps and cut.early:
        carry = totals, several(0, cut.ahead)
        if steps > 1:
            carry = lax.fori_loop(np.int32(0), np.int32(steps - 1), early, carry)
        totals = add(carry[1], end - cut.ahead, carry[0])
    elif steps > WRITTEN_OUT:
        totals = lax.fori_loop(np.int32(0), np.int32(steps), step, totals)
    else:
        for j in range(steps):
            totals = step(j, totals)
    totals = add(several(end, rest), end, totals)
    y = [[jnp.sum(total.reshape(side, -1), 1) / one for total in of_row] for of_row in totals]
    for row, of_row in zip(rows, y, strict=True):
        for at, value in zip(mine, of_row, strict=True):
            write(y_ref, (at, row), value)

    # Again, exactly, what is not finite: code · inf + minimum · inf is not weight · inf, and codes
    # may overflow where weights do not.  And what is so small that subnormal products may be lost.
    def again(i, none):
        row, at = first + i // len(mine), jnp.minimum(first_of_x + i % len(mine), m - 1)

        def tile(j, total):
            x = lambda plane: activations(at, plane, j)
            return exact(packing.parts(read(row[None], j)), packing, x, total)

        nothing = jnp.zeros((1, *shape), jnp.float32)
        total = lax.fori_loop(np.int32(0), np.int32(tiles), tile, nothing)
        write(y_ref, (at, row), jnp.sum(total))
        return none

    sound = lambda x: (jnp.abs(x) < jnp.inf) & (jnp.abs(x) > SMALL * packing.subnormal)
    every = functools.reduce(jnp.logical_and, [sound(x) for of_row in y for x in of_row])
    lost = jnp.sum(jnp.where(every, 0.0, 1.0)) > 0
    times = jnp.where(lost, np.int32(cut.rows * len(mine)), np.int32(0))
    lax.fori_loop(np.int32(0), times, again, np.int32(0))


SMALL = 2.0**-40


def most(dtype: Any) -> int:
    """Rows of activations for which this is faster than tensor cores."""
    return 4 if dtype.itemsize == 2 else 8


def cut(packing: Packing, n: int) -> Cut:
    """As measured on an H200 for one row and a weight of 14336; of fewer, two rows a program."""
    first = (packing.in_order or packing).cut
    return first if n >= first.rows * PROGRAMS else first._replace(rows=min(first.rows, 2))


def cuts(packing: Packing, n: int) -> list[Cut]:
    """More or less at a time; that of :func:`cut` first."""
    first = cut(packing, n)
    units = [WARP * each for each in (1, 2, 4) if WARP * each <= first.units]
    sizes = itertools.product((2, 4, 8), units, (1, 2, 3))
    every = [first._replace(rows=r, units=u, ahead=a, early=False) for r, u, a in sizes]
    every += [size._replace(early=True) for size in every if size.ahead == 1]
    return [first, *(other for other in every if other != first)]


def worth(packing: Packing, interpret: bool) -> float:
    """What a fast code of 1 times an activation of 1 is."""
    return ONE if packing.subnormal and not interpret else 1.0


def ordered(x: jax.Array, packing: Packing, units: int, one: float) -> jax.Array:
    """``f32[m, k]`` as the kernel reads it: for fast codes; their sums; for exact ones."""
    x = packing.planes(x.astype(jnp.float32))
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -packing.units % units)))
    flat = lambda x: x.reshape(len(x), -1, x.shape[-1])
    sums = [x.sum(2) * one] * packing.offset
    return jnp.concatenate([flat(x * packing.powers[..., None]), *sums, flat(x)], 1)


def together(packing: Packing, m: int) -> int:
    """Rows of activations that a program multiplies."""
    return min(m, 4, ACTIVATIONS // packing.powers.size)


def fitting(cut: Cut, packing: Packing, m: int, n: int) -> Cut:
    """At most what there is, and as many units as a thread has registers for activations of.

    Of fewer units than four a thread, lanes would share those of rows that are side by side.
    """
    count = power_of_two(together(packing, m))
    each = ACTIVATIONS // (packing.powers.size * count)
    units = min(cut.units, WARP * each)
    beside = cut.beside and units == 4 * WARP
    return cut._replace(rows=min(cut.rows, n), units=units, beside=beside)


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
    packing = packing.in_order or packing
    cut = fitting(cut, packing, len(x), n)
    planes = ordered(x, packing, cut.units, worth(packing, interpret))
    views = packing.views(*weight)
    return launch(
        functools.partial(kernel, packing=packing, cut=cut),
        name,
        out=like(x, (len(x), n)),
        grid=(cdiv(len(x), together(packing, len(x))) * cdiv(n, cut.rows),),
        warps=1,
        interpret=interpret,
    )(*views, planes)
