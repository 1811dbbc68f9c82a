"""Running sums along an axis."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cumsum as kernels
from pallas_kernels._tiles import FULL, Tiles

from .._parts import split
from .._rules import along
from ..numerics import is_float, lifted, zeros
from ..op_kind import OpKind
from ..registry import op
from ..types import Array, Numbers
from ._running import LANES, Block, running_sum
from .reduce import PRECISION, arg_examples, dim_rejects


@op(
    OpKind.CumSum,
    precision=PRECISION,
    rejects=dim_rejects,
    splits=along("dim"),
    examples=arg_examples,
)
def cumsum(x: Numbers[Array, "*shape"], *, dim: int) -> Array:
    """Running sum along an axis, inclusive:  yᵢ = Σⱼ≤ᵢ xⱼ.

    Half types are accumulated in float32 and each result is rounded once.  Integers are summed in
    their own dtype and wrap.  The gradient is the same sum from the other end.

    Args:
        x: any shape; floats or integers.
        dim: the axis; a negative one counts from the end.

    Returns:
        An array like ``x``.
    """
    return lax.cumsum(lifted(x), dim % x.ndim).astype(x.dtype)


def no_row(x: Any, *, dim: int) -> str | None:
    """Another axis than the last, or no floats, or too few of them."""
    if not is_float(x):
        return f"{x.dtype.name} is summed one by one"
    if dim % x.ndim < x.ndim - 1:
        return f"axis {dim} is not the last"
    return None if x.shape[dim] > LANES else f"axis {dim} has at most {LANES} elements"


def lanes(x: Any, *, dim: int) -> Tiles:
    """Shorter or longer blocks."""
    n = x.shape[dim]
    extents: dict[str, int | str] = {"rows": min(x.size // max(n, 1), FULL), "columns": n}
    return Tiles.of(extents, *(Block(count) for count in (LANES, 8, 32)))


@cumsum.kernel("blocks", platforms=("cpu",), refuses=no_row, tiles=lanes)
def cumsum_in_blocks(x: Array, *, dim: int, tile: Block | None = None) -> Array:
    """Of the last axis: blocks as long as a vector register."""
    return running_sum(lifted(x), tile=tile or Block(LANES)).astype(x.dtype)


def is_last(x: Any, *, dim: int) -> str | None:
    """Steps along the last axis add single elements, and many of them lose digits."""
    if dim % x.ndim == x.ndim - 1:
        return f"axis {dim} is the last: a step would add elements far apart"
    if x.shape[dim] <= LANES:
        return f"axis {dim} has at most {LANES} elements: steps are not worth their loop"
    return None if x.shape[dim] <= 2**16 else f"axis {dim} has more than 2^16 elements"


@cumsum.kernel("steps", platforms=("cpu",), declines=is_last)
def cumsum_in_steps(x: Array, *, dim: int) -> Array:
    """One slice after the other, read once: on the CPU faster than XLA's windows of windows.

    Two sums are carried, that of the full blocks and that of the block begun, each of about √n
    terms: plainly carried on, 4096 terms would be off by more than promised.
    """
    v = jnp.moveaxis(lifted(x), dim, 0)
    block = math.isqrt(len(v)) + 1
    ends = np.arange(1, len(v) + 1) % block == 0

    def step(sums, term):
        (full, begun), (value, end) = sums, term
        begun += value
        total = full + begun
        return (jnp.where(end, total, full), jnp.where(end, 0, begun)), total

    none = zeros(v.shape[1:], v)
    _, totals = lax.scan(step, (none, none), (v, ends))
    return jnp.moveaxis(totals, 0, dim).astype(x.dtype)


def over_rows(solve: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Rows stay with their devices in the derivative, too, which is not the op's."""
    rule = lambda arrays, y: along("dim")({"dim": 1}, arrays, (y,))
    return split(solve, solve, rule)


on_cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": kernels.refuses}
on_cuda |= {"declines": kernels.declines, "tiles": kernels.tiles}


@cumsum.kernel("triton", **on_cuda)
def cumsum_on_gpu(x: Array, *, dim: int, tile: Any = None, interpret: bool = False) -> Array:
    """One pass over memory."""
    how: dict[str, Any] = {"tile": tile, "interpret": interpret, "over_devices": over_rows}
    return kernels.cumsum(x, dim=dim, **how)
