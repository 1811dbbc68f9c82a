"""Reductions to fewer axes or to a shape, arg-reductions and the running sum."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import arg_extreme

from .._op import Precision
from .._rules import along, to_shape
from ..numerics import lifted, wide
from ..op_kind import OpKind
from ..registry import op
from ..types import Array, Floats, Ints, Numbers
from ._extremes import SLICES, extreme, position, position_by_folding

PRECISION = Precision(float32=2e-6)
Dims = Ints | int | None
Shape = Ints


# -- which axes ----------------------------------------------------------------------------


def no_axis(name: str, dim: int, operand: str, ndim: int) -> str | None:
    """Why ``operand`` has no axis ``dim``."""
    if -ndim <= dim < ndim:
        return None
    if ndim == 0:
        return f"parameter {name!r} is {dim} and {operand!r} has no axes. Reshape it first."
    return (
        f"parameter {name!r} is {dim} and {operand!r} has {ndim} axes; it must be from {-ndim} "
        f"to {ndim - 1}."
    )


def axes_of(ndim: int, dims: Dims) -> tuple[int, ...]:
    """``dims`` as axes counted from the front; None is all of them."""
    if dims is None:
        return tuple(range(ndim))
    return tuple(d % ndim for d in ((dims,) if isinstance(dims, int) else dims))


def dims_rejects(x: Any, *, dims: Dims) -> str | None:
    """Axes that x does not have, or not in ascending order."""
    for dim in (dims,) if isinstance(dims, int) else dims or ():
        if reason := no_axis("dims", dim, "x", x.ndim):
            return reason
    axes = axes_of(x.ndim, dims)
    if all(a < b for a, b in itertools.pairwise(axes)):
        return None
    return (
        f"parameter 'dims' is {dims}, axes {axes} of 'x'; they must ascend, none twice. "
        f"Pass {tuple(sorted(set(axes)))}."
    )


def mean_rejects(x: Any, *, dims: Dims) -> str | None:
    """As other reductions; and a mean of no elements."""
    if reason := dims_rejects(x, dims=dims):
        return reason
    if math.prod(x.shape[a] for a in axes_of(x.ndim, dims)):
        return None
    return (
        f"'x' is {x.shape} and parameter 'dims' is {dims}; a mean needs at least one element. "
        f"Reduce axes that are not empty, or use sum_reduce, which gives 0."
    )


def dim_rejects(x: Any, *, dim: int) -> str | None:
    """An axis that x does not have."""
    return no_axis("dim", dim, "x", x.ndim)


def arg_rejects(x: Any, *, dim: int) -> str | None:
    """An axis that x does not have, or that holds nothing to choose from."""
    if reason := dim_rejects(x, dim=dim):
        return reason
    if x.shape[dim]:
        return None
    return f"'x' is {x.shape}; its axis {dim} is empty and has no extreme. Choose another axis."


def collapsed(shape: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Axes to reduce so that ``shape`` becomes ``target``, whose missing leading axes are 1."""
    padded = (1,) * (len(shape) - len(target)) + tuple(target)
    leading = len(shape) - len(target)
    return tuple(
        i for i, (n, m) in enumerate(zip(shape, padded, strict=True)) if i < leading or n != m
    )


def shape_rejects(x: Any, *, shape: Shape) -> str | None:
    """A target that does not broadcast to the shape of x."""
    padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
    if len(shape) <= x.ndim and all(m in (1, n) for n, m in zip(x.shape, padded, strict=True)):
        return None
    return (
        f"parameter 'shape' is {shape} and 'x' is {x.shape}; aligned at the last axis, each extent "
        f"must be that of x or 1. Reduce to a shape that broadcasts to {x.shape}."
    )


# -- examples ------------------------------------------------------------------------------


def examples() -> Iterator[dict[str, Any]]:
    """Every axis, one from the end, two around a third, a leading one, and a scalar."""
    for shape, dims in (((3, 37), None), ((2, 3, 5), (0, -1)), ((4, 17), 0), ((), None)):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "dims": dims}


def shape_examples() -> Iterator[dict[str, Any]]:
    """One axis dropped and one kept as 1, a leading one, and all of them."""
    for shape, target in (((2, 3, 5), (3, 1)), ((4, 17), (17,)), ((3,), ())):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "shape": target}


def arg_examples() -> Iterator[dict[str, Any]]:
    """A row long enough for every implementation, an inner axis, a single element."""
    for shape, dim in (((2, 131), -1), ((3, 5, 2), 1), ((1,), 0)):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "dim": dim}


OVER_DIMS: dict[str, Any] = {"precision": PRECISION, "splits": along("dims"), "examples": examples}
TO_SHAPE: dict[str, Any] = {"precision": PRECISION, "splits": to_shape, "examples": shape_examples}


# -- sums ----------------------------------------------------------------------------------


@op(OpKind.SumReduce, rejects=dims_rejects, **OVER_DIMS)
def sum_reduce(x: Numbers[Array, "*shape"], *, dims: Dims = None) -> Array:
    """Σ x over axes.

    Half types are summed in float32 and rounded once.  Integers are summed in their own dtype and
    wrap: cast them to a wider one first.

    Args:
        x: any shape; floats or integers.
        dims: axes to reduce, ascending, none twice; negative ones count from the end.  None is all
            of them, an empty tuple none.

    Returns:
        ``x`` without these axes, in its dtype; 0 where they are empty.
    """
    return lax.reduce_sum(lifted(x), axes_of(x.ndim, dims)).astype(x.dtype)


@op(OpKind.MeanReduce, rejects=mean_rejects, **OVER_DIMS)
def mean_reduce(x: Floats[Array, "*shape"], *, dims: Dims = None) -> Array:
    """Σ x / n over the n elements of axes.

    In float32 (float64 for float64), rounded once.

    Args:
        x: any shape; floats.
        dims: axes to reduce, ascending, none twice; negative ones count from the end.  None is all
            of them, an empty tuple none.

    Returns:
        ``x`` without these axes, in its dtype.

    Raises:
        ShapeError: ``x`` holds integers, whose mean is none: cast it first.
        ArgumentError: there is nothing to take the mean of.
    """
    axes = axes_of(x.ndim, dims)
    n = math.prod(x.shape[a] for a in axes)
    return (lax.reduce_sum(wide(x), axes) / n).astype(x.dtype)


@op(OpKind.ReduceSumTo, rejects=shape_rejects, **TO_SHAPE)
def reduce_sum_to(x: Numbers[Array, "*shape"], *, shape: Shape) -> Array:
    """Σ x over the axes along which ``shape`` would be broadcast to x: the gradient of that.

    Half types are summed in float32 and rounded once; integers wrap, as in :func:`sum_reduce`.

    Args:
        x: any shape; floats or integers.
        shape: the result's; aligned with x at the last axis, each extent that of x or 1.

    Returns:
        An array of exactly ``shape``, in the dtype of ``x``.
    """
    total = lax.reduce_sum(lifted(x), collapsed(x.shape, shape))
    return lax.reshape(total.astype(x.dtype), shape)


# -- sums over leading axes on the CPU -----------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def folded_sum(x: Array, axes: tuple[int, ...]) -> Array:
    """Σ x over leading axes, slice onto slice.  JAX would transpose a slice into a padding."""
    kept = x.shape[len(axes) :]
    v, left = x.reshape(-1, math.prod(kept)), []
    if len(v) <= 3:
        return functools.reduce(lax.add, [v[i] for i in range(len(v))]).reshape(kept)
    while (n := len(v)) > 3:
        count = min(n // 2, SLICES)
        each = n // count
        left += [v[i : i + 1] for i in range(count * each, n)]
        v = functools.reduce(lax.add, [v[i * each : (i + 1) * each] for i in range(count)])
    if left:
        v = lax.concatenate([functools.reduce(lax.add, left, v[:1]), v[1:]], 0)
    # XLA computes a reduction once, and additions again wherever they are broadcast.
    return lax.reduce_sum(v, (0,)).reshape(kept)


@folded_sum.defjvp
def folded_sum_jvp(axes, primals, tangents):
    """Linear."""
    return folded_sum(primals[0], axes), lax.reduce_sum(tangents[0], axes)


def in_the_way(x: Any, axes: tuple[int, ...]) -> str | None:
    """Why the sum over ``axes`` of x is not one of slices that lie one after the other."""
    if not x.size or not axes:
        return "there is nothing to add up"
    if axes != tuple(range(len(axes))):
        return "an axis before those summed is kept: slices would be short"
    if math.prod(x.shape[len(axes) :]) < SLICES:
        return "the last axis is summed, which XLA vectorises"
    return None if x.dtype.itemsize >= 4 else f"{x.dtype.name} is converted before it is summed"


def sum_is_no_fold(x: Any, *, dims: Dims) -> str | None:
    """Other axes than the leading ones."""
    return in_the_way(x, axes_of(x.ndim, dims))


def sum_to_is_no_fold(x: Any, *, shape: Shape) -> str | None:
    """Other axes than the leading ones."""
    return in_the_way(x, collapsed(x.shape, shape))


@sum_reduce.kernel("folded", platforms=("cpu",), refuses=sum_is_no_fold)
def sum_by_folding(x: Array, *, dims: Dims) -> Array:
    """Slice onto slice."""
    return folded_sum(x, axes_of(x.ndim, dims))


@mean_reduce.kernel("folded", platforms=("cpu",), refuses=sum_is_no_fold)
def mean_by_folding(x: Array, *, dims: Dims) -> Array:
    """Slice onto slice."""
    axes = axes_of(x.ndim, dims)
    return folded_sum(x, axes) / math.prod(x.shape[: len(axes)])


@reduce_sum_to.kernel("folded", platforms=("cpu",), refuses=sum_to_is_no_fold)
def sum_to_by_folding(x: Array, *, shape: Shape) -> Array:
    """Slice onto slice."""
    return folded_sum(x, collapsed(x.shape, shape)).reshape(shape)


# -- extremes ------------------------------------------------------------------------------


@op(OpKind.MaxReduce, rejects=dims_rejects, **OVER_DIMS)
def max_reduce(x: Numbers[Array, "*shape"], *, dims: Dims = None) -> Array:
    """max x over axes; NaN if any element is.

    Exact.  Elements that tie share the gradient equally; it is NaN in all of a window that holds
    NaN, where the maximum has no derivative.

    Args:
        x: any shape; floats or integers.
        dims: axes to reduce, ascending, none twice; negative ones count from the end.  None is all
            of them, an empty tuple none.

    Returns:
        ``x`` without these axes, in its dtype.  Where they are empty −inf, for integers the
        smallest of their dtype: the maximum with anything else is that.
    """
    return extreme(x, axes_of(x.ndim, dims), True)


@op(OpKind.MinReduce, rejects=dims_rejects, **OVER_DIMS)
def min_reduce(x: Numbers[Array, "*shape"], *, dims: Dims = None) -> Array:
    """min x over axes; NaN if any element is.

    Exact.  Elements that tie share the gradient equally; it is NaN in all of a window that holds
    NaN, where the minimum has no derivative.

    Args:
        x: any shape; floats or integers.
        dims: axes to reduce, ascending, none twice; negative ones count from the end.  None is all
            of them, an empty tuple none.

    Returns:
        ``x`` without these axes, in its dtype.  Where they are empty +inf, for integers the
        largest of their dtype: the minimum with anything else is that.
    """
    return extreme(x, axes_of(x.ndim, dims), False)


@op(OpKind.ReduceMaxTo, rejects=shape_rejects, **TO_SHAPE)
def reduce_max_to(x: Numbers[Array, "*shape"], *, shape: Shape) -> Array:
    """max x over the axes along which ``shape`` would be broadcast to x.

    Exact; NaN if any element is, −inf of nothing.  Its gradient is
    :func:`~fuel_jax.reduce_max_to_backward`.

    Args:
        x: any shape; floats or integers.
        shape: the result's; aligned with x at the last axis, each extent that of x or 1.

    Returns:
        An array of exactly ``shape``, in the dtype of ``x``.
    """
    return lax.reshape(extreme(x, collapsed(x.shape, shape), True), shape)


# -- arg-reductions ------------------------------------------------------------------------


@op(
    OpKind.ArgMaxDim,
    precision=PRECISION,
    rejects=arg_rejects,
    splits=along("dim"),
    examples=arg_examples,
)
def argmax_dim(x: Numbers[Array, "*shape"], *, dim: int) -> Array:
    """Index of the largest element along an axis: of the first NaN, else of the first to tie.

    Compared in the dtype of ``x``, F64 in float64.  ``max_reduce`` is the element it points to.

    Args:
        x: any shape; floats or integers.
        dim: the axis; a negative one counts from the end.

    Returns:
        U32 indices, ``x`` without that axis.

    Raises:
        ArgumentError: the axis is empty.
    """
    return position(x, dim % x.ndim, True)


@op(
    OpKind.ArgMinDim,
    precision=PRECISION,
    rejects=arg_rejects,
    splits=along("dim"),
    examples=arg_examples,
)
def argmin_dim(x: Numbers[Array, "*shape"], *, dim: int) -> Array:
    """Index of the smallest element along an axis: of the first NaN, else of the first to tie.

    Compared in the dtype of ``x``, F64 in float64.  ``min_reduce`` is the element it points to.

    Args:
        x: any shape; floats or integers.
        dim: the axis; a negative one counts from the end.

    Returns:
        U32 indices, ``x`` without that axis.

    Raises:
        ArgumentError: the axis is empty.
    """
    return position(x, dim % x.ndim, False)


def is_soon_searched(x: Any, *, dim: int) -> str | None:
    """A short last axis, of which there is nothing to fold."""
    if dim % x.ndim < x.ndim - 1 or x.shape[dim] >= 2 * SLICES:
        return None
    return f"axis {dim} is the last and has fewer than {2 * SLICES} elements"


@argmax_dim.kernel("folded", platforms=("cpu",), declines=is_soon_searched)
def argmax_by_folding(x: Array, *, dim: int) -> Array:
    """Slice onto slice."""
    return position_by_folding(x, dim % x.ndim, True)


@argmin_dim.kernel("folded", platforms=("cpu",), declines=is_soon_searched)
def argmin_by_folding(x: Array, *, dim: int) -> Array:
    """Slice onto slice."""
    return position_by_folding(x, dim % x.ndim, False)


on_cuda: dict[str, Any] = {
    "platforms": ("cuda",),
    "refuses": arg_extreme.refuses,
    "declines": arg_extreme.declines,
    "tiles": arg_extreme.tiles,
}
argmax_dim.kernel("triton", **on_cuda)(arg_extreme.argmax)
argmin_dim.kernel("triton", **on_cuda)(arg_extreme.argmin)
