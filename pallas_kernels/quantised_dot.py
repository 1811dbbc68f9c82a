"""Rows of activations times a packed weight, on tensor cores: y = x Wᵀ.

grid      blocks of rows of the weight × blocks of rows of activations
reads     the weight once for each block of activations; these once for each block of the weight
writes    the product once
bound by  decoding, and the products of float32 by the tensor cores

A tile of the weight is decoded in registers and rounded to the dtype of the activations, code by
code: a product for each field of a word.
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
    """Of a program: rows of the weight and of activations, units at a time; of its launch."""

    rows: int
    columns: int
    units: int
    warps: int
    stages: int


MOST = 128  # rows of activations; for more, the weight is worth writing down


def cut(m: int, dtype: Any) -> Cut:
    """As measured on an H200."""
    columns = min(max(power_of_two(m), 16), 128)
    if dtype == jnp.float32:  # registers for two parts of everything
        return Cut(64, min(columns, 64), 32, 4, 2 if columns == 16 else 1)
    return Cut(64, 16, 64, 4, 2) if columns == 16 else Cut(128, columns, 32, 4, 2)


def cuts(m: int, dtype: Any) -> list[Cut]:
    """More or less at a time; that of :func:`cut` first."""
    first = cut(m, dtype)
    ways = {"rows": (64, 128), "units": (32, 64), "warps": (4, 8), "stages": (1, 2, 3)}
    return [first, *varied(first, **ways)]


def kernel(*refs: Any, packing: Packing, cut: Cut) -> None:
    """A block of the product."""
    *weight, x_ref, y_ref = refs
    m, n = y_ref.shape
    rows = program_id(0) * cut.rows + counted(cut.rows)
    row = jnp.minimum(rows, n - 1) if n % cut.rows else rows
    column = program_id(1) * cut.columns + counted(cut.columns)
    codes = packing.powers.shape[1]
    wide = x_ref.dtype == jnp.float32
    precision = None
    if wide:  # tensor cores multiply 11 bits: high parts, and each with the other's low part
        thrice = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if INTERPRETED.value else thrice

    def tile(j, total):
        unit = j * cut.units + counted(cut.units)
        raw = packing.read(weight, row, j * cut.units, cut.units)
        for p, part in enumerate(packing.parts(raw)):
            for i, code in enumerate(part.codes):
                w = part.weights(code).reshape(cut.rows, cut.units).astype(x_ref.dtype)
                x = load(x_ref, p * codes + i, column[None, :], unit[:, None])
                total += jnp.dot(w, x, precision=precision, preferred_element_type=jnp.float32)
        return total

    def step(j, total):
        # Tensor cores cut sums off rather than round them: in float32 those of a tile stay apart.
        return fma(tile(j, nothing), 1.0, total) if wide else tile(j, total)

    nothing = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    full, rest = divmod(packing.units, cut.units)
    total = lax.fori_loop(np.int32(0), np.int32(full), step, nothing)
    if rest:
        total = step(full, total)
    inside = (rows < n)[:, None] & (column < m)[None, :]
    write(y_ref, (column[None, :], rows[:, None]), total, inside)


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
        x: activations ``[m, k]``; the weight is rounded to their dtype, sums are in float32.
        weight: what the packing reads.
        n: rows of the weight.
        packing: how they are packed.
        name: as profiles show it.
        interpret: run without a GPU.
        cut: how the work is divided.
    """
    m = len(x)
    planes = packing.planes(x).reshape(m, -1, packing.units).swapaxes(0, 1)
    planes = jnp.pad(planes, ((0, 0), (0, -m % cut.columns), (0, -packing.units % cut.units)))
    return launch(
        functools.partial(kernel, packing=packing, cut=cut),
        name,
        out=like(x, (m, n)),
        grid=(cdiv(n, cut.rows), cdiv(m, cut.columns)),
        warps=cut.warps,
        stages=cut.stages,
        interpret=interpret,
    )(*weight, planes)
