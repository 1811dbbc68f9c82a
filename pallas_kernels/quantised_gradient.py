"""Cotangents times a packed weight, on tensor cores: dx = g W.

grid      units of the weight × rows of cotangents × parts of the weight's rows
reads     the weight once for each block of cotangents; these once for each block of units
writes    a float32 sum for each part, which XLA adds in order and rounds once
bound by  decoding, and the products of float32 by the tensor cores

The transpose of ``quantised_dot.py``: a tile of the weight is decoded in registers and rounded to
the dtype of the cotangents, code by code, and each code of a unit has its own sum.  Few units side
by side make few programs, so the rows of the weight are cut into parts as well.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, cdiv, fma, launch, like, power_of_two, program_id, write
from ._rows import counted
from ._tiles import varied
from .quantised import Packing, load


class Cut(NamedTuple):
    """Of a program: rows of the weight at a time, of cotangents, units; of its launch."""

    rows: int
    columns: int
    units: int
    parts: int
    warps: int
    stages: int


PROGRAMS = 256  # two for each multiprocessor of an H200
SUMS = 2**13  # of four warps: 64 registers of each thread


def cut(m: int, n: int, dtype: Any, packing: Packing) -> Cut:
    """By the registers that the sums take, of codes times units times cotangents.

    Measured on an H200 for NF4 and AWQ in halves, 1 to 2048 rows, and for Q4K in float32.
    """
    codes, wide = packing.powers.size, dtype == jnp.float32
    columns = min(max(power_of_two(m), 16), 64 if wide else 128)
    units = max((128 if wide and columns > 16 else 256) // codes, 16)
    rows = (16 if columns == 16 else 32) if wide else max(columns, 64)
    programs = cdiv(packing.units, units) * cdiv(m, columns)
    most = min(16, 1024 // rows)
    parts = min(power_of_two(cdiv(PROGRAMS, programs)), most, power_of_two(cdiv(n, rows)))
    warps = 4 if columns * codes * units <= SUMS else 8
    return Cut(rows, columns, units, parts, warps, 2)


def cuts(m: int, n: int, dtype: Any, packing: Packing) -> list[Cut]:
    """More or less at a time; that of :func:`cut` first."""
    first = cut(m, n, dtype, packing)
    ways = {"rows": (32, 64), "units": (16, 32), "parts": (1, 4, 8, 16), "warps": (4, 8)}
    return [first, *varied(first, **ways, stages=(1, 2, 3))]


def kernel(*refs: Any, n: int, steps: int, packing: Packing, cut: Cut) -> None:
    """A block of one part's sums."""
    *weight, g_ref, y_ref = refs
    first = program_id(0) * cut.units
    unit = first + counted(cut.units)
    column = program_id(1) * cut.columns + counted(cut.columns)
    part_of = program_id(2)
    wide = g_ref.dtype == jnp.float32
    precision = None
    if wide:  # tensor cores multiply 11 bits: high parts, and each with the other's low part
        thrice = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if INTERPRETED.value else thrice
    ragged = n % (steps * cut.rows * cut.parts) > 0

    def step(j, totals):
        rows = (part_of * steps + j) * cut.rows + counted(cut.rows)
        g = load(g_ref, column[:, None], rows[None, :])
        raw = packing.read(weight, jnp.minimum(rows, n - 1) if ragged else rows, first, cut.units)
        found = ((part, code) for part in packing.parts(raw) for code in part.codes)
        added = []
        for total, (part, code) in zip(totals, found, strict=True):
            w = part.weights(code).reshape(cut.rows, cut.units)
            if ragged:  # the last row again, which may be infinite
                w = jnp.where((rows < n)[:, None], w, 0.0)
            # Tensor cores cut sums off rather than round them: those of a tile stay apart.
            y = jnp.dot(
                g, w.astype(g.dtype), precision=precision, preferred_element_type=jnp.float32
            )
            added.append(fma(y, 1.0, total) if wide else total + y)
        return tuple(added)

    nothing = jnp.zeros((cut.columns, cut.units), jnp.float32)
    totals = (nothing,) * packing.powers.size
    totals = lax.fori_loop(np.int32(0), np.int32(steps), step, totals)
    inside = (unit < packing.units)[None, :] & (column < y_ref.shape[1])[:, None]
    for i, total in enumerate(totals):
        write(y_ref, (part_of, column[:, None], np.int32(i), unit[None, :]), total, inside)


def times(
    g: jax.Array,
    weight: tuple[jax.Array, ...],
    *,
    packing: Packing,
    name: str,
    interpret: bool,
    cut: Cut,
) -> jax.Array:
    """``[m, n]`` times ``[n, k]``, in the dtype of g.

    Args:
        g: cotangents ``[m, n]``; the weight is rounded to their dtype, sums are in float32.
        weight: what the packing reads.
        packing: how its rows are packed.
        name: as profiles show it.
        interpret: run without a GPU.
        cut: how the work is divided.
    """
    (m, n), codes = g.shape, packing.powers.size
    steps = cdiv(n, cut.rows * cut.parts)
    padded = jnp.pad(g, ((0, -m % cut.columns), (0, steps * cut.rows * cut.parts - n)))
    sums = launch(
        functools.partial(kernel, n=n, steps=steps, packing=packing, cut=cut),
        name,
        out=like(g, (cut.parts, m, codes, packing.units), jnp.float32),
        grid=(cdiv(packing.units, cut.units), cdiv(m, cut.columns), cut.parts),
        warps=cut.warps,
        stages=cut.stages,
        interpret=interpret,
    )(*packing.views(*weight), padded)
    y = functools.reduce(jnp.add, sums).reshape(m, *packing.powers.shape, packing.units)
    x = like(g, (m, codes * packing.units), jnp.float32)
    (y,) = jax.linear_transpose(packing.planes, x)(y)  # their order, undone
    return y.astype(g.dtype)
