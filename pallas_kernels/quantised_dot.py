"""Many rows of activations times a packed weight, on tensor cores: y = x Wᵀ.

grid      blocks of rows of the weight × blocks of rows of activations × parts of k
reads     the weight once for each block of activations; these once for each block of the weight
writes    the product, once for each part of k
bound by  decoding, then by the tensor cores

A tile of the weight is decoded in registers and rounded to the dtype of the activations, code by
code: a product for each field of a word.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, cdiv, launch, like, program_id, write
from ._rows import counted
from .quantised import Packing, load


class Cut(NamedTuple):
    """Of a program: rows of the weight and of activations, units at a time; parts of k; launch."""

    rows: int
    columns: int
    units: int
    parts: int
    warps: int
    stages: int


def kernel(*refs: Any, packing: Packing, cut: Cut) -> None:
    """A block of the product, or of a part of it."""
    *weight, x_ref, y_ref = refs
    _, m, n = y_ref.shape
    rows = program_id(0) * cut.rows + counted(cut.rows)
    row = jnp.minimum(rows, n - 1) if n % cut.rows else rows
    column = program_id(1) * cut.columns + counted(cut.columns)
    part_of_k = program_id(2)
    tiles = cdiv(packing.units, cut.units * cut.parts)
    codes = packing.powers.shape[1]
    precision = None
    if x_ref.dtype == jnp.float32:
        thrice = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if INTERPRETED.value else thrice

    def step(j, total):
        first = (part_of_k * tiles + j) * cut.units
        unit = first + counted(cut.units)
        raw = packing.read(weight, row, first, cut.units)
        for p, part in enumerate(packing.parts(raw)):
            for i, code in enumerate(part.codes):
                w = (code.exact() - part.less) * part.scale
                w = w if part.minimum is None else w + part.minimum
                w = w.reshape(cut.rows, cut.units).astype(x_ref.dtype)
                x = load(x_ref, p * codes + i, column[None, :], unit[:, None])
                total += jnp.dot(w, x, precision=precision, preferred_element_type=jnp.float32)
        return total

    nothing = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    total = lax.fori_loop(np.int32(0), np.int32(tiles), step, nothing)
    inside = (rows < n)[:, None] & (column < m)[None, :]
    at = (part_of_k, column[None, :], rows[:, None])
    write(y_ref, at, total, inside)


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
    """``[m, k]`` times ``[n, k]`` transposed, in the dtype of x."""
    m = len(x)
    planes = packing.planes(x).reshape(m, -1, packing.units).swapaxes(0, 1)
    planes = jnp.pad(planes, ((0, 0), (0, -m % cut.columns), (0, 0)))
    y = launch(
        functools.partial(kernel, packing=packing, cut=cut),
        name,
        out=like(x, (cut.parts, m, n), jnp.float32 if cut.parts > 1 else x.dtype),
        grid=(cdiv(n, cut.rows), cdiv(m, cut.columns), cut.parts),
        warps=cut.warps,
        stages=cut.stages,
        interpret=interpret,
    )(*weight, planes)
    return y.sum(0).astype(x.dtype)
