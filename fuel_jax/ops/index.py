"""Reading and adding at indices, and the indices of what is not zero.

Indices are compared as they come, in their own dtype.  One outside the axis reads NaN (0 for
integers, false for bool) and adds nothing: U32 0xFFFFFFFF is not −1, and −1 is not the last
element.  Under ``checkify`` it is an error.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._op import Precision
from .._parts import split
from .._rules import at_indices
from ..op_kind import OpKind
from ..registry import op
from ..types import Anything, Array, Indices, Numbers
from . import _rows
from ._rows import AS_THEY_ARE, located, nothing
from .reduce import lifted, no_axis

PRECISION = Precision(float32=2e-6)
INDEXABLE = 2**31 - 1  # extents an I32 index can tell from out of range


def slices(index: Array, dim: int, ndim: int) -> tuple[Any, ...]:
    """``x[slices(...)]`` is x at ``index`` on axis ``dim``, all of the other axes."""
    return (*(slice(None),) * dim, index, *(slice(None),) * (ndim - dim - 1))


def points(index: Array, dim: int, ndim: int) -> tuple[Array, ...]:
    """``x[points(...)]`` is x at ``index`` on axis ``dim``, where it stands on the others.

    (Batching dimensions say the same; ``checkify`` cannot read a scatter that has them.)
    """
    grid = [lax.broadcasted_iota(jnp.int32, index.shape, a) for a in range(ndim)]
    grid[dim] = index
    return tuple(grid)


Where = Callable[[Array, int, int], tuple[Any, ...]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def read(x: Array, index: Array, dim: int, where: Where) -> Array:
    """x at ``where``, :func:`slices` or :func:`points`.  Its transpose adds in float32."""
    if where is points:
        return jnp.take_along_axis(x, index, dim, mode="fill", fill_value=nothing(x.dtype))
    at = x.at[where(index, dim, x.ndim)]
    return at.get(mode="fill", fill_value=nothing(x.dtype), **AS_THEY_ARE)


@read.defjvp
def read_jvp(dim, where, primals, tangents):
    """Linear in x; 0 where nothing is read."""
    (x, index), (t, _) = primals, tangents
    at = lifted(t).at[where(index, dim, x.ndim)]
    t = at.get(mode="fill", fill_value=0, **AS_THEY_ARE).astype(x.dtype)
    return read(x, index, dim, where), t


def added(base: Array, index: Array, src: Array, dim: int, where: Where) -> Array:
    """base and src added at ``where``."""
    at = lifted(base).at[where(index, dim, base.ndim)]
    return at.add(lifted(src), mode="drop", **AS_THEY_ARE).astype(base.dtype)


# -- what is refused -----------------------------------------------------------------------


def axis_rejects(operand: str, x: Any, dim: int) -> str | None:
    """An axis that the operand does not have, or too long a one."""
    if reason := no_axis("dim", dim, operand, x.ndim):
        return reason
    if x.shape[dim] < INDEXABLE:
        return None
    return (
        f"{operand!r} has {x.shape[dim]} elements on axis {dim}; indices reach {INDEXABLE - 1}. "
        f"Split the axis."
    )


def points_reject(operand: str, x: Any, indices: Any, dim: int) -> str | None:
    """Indices of another rank than the operand, or that stand outside it."""
    if reason := axis_rejects(operand, x, dim):
        return reason
    if indices.ndim != x.ndim:
        whole = "index_select" if operand == "x" else "index_add"
        return (
            f"'indices' has {indices.ndim} axes and {operand!r} has {x.ndim}; it must have as "
            f"many. For whole slices use {whole}."
        )
    others = [a for a in range(x.ndim) if a != dim % x.ndim]
    if all(indices.shape[a] <= x.shape[a] for a in others):
        return None
    return (
        f"'indices' is {indices.shape} and {operand!r} is {x.shape}; on axes other than "
        f"{dim % x.ndim} it must not be longer. Nothing is broadcast."
    )


def select_rejects(x: Any, indices: Any, *, dim: int) -> str | None:
    """An axis that x does not have."""
    return axis_rejects("x", x, dim)


def gather_rejects(x: Any, indices: Any, *, dim: int) -> str | None:
    """Points outside x."""
    return points_reject("x", x, indices, dim)


def index_add_rejects(base: Any, indices: Any, src: Any, *, dim: int) -> str | None:
    """Slices that are not slices of base, or not one per index."""
    if reason := axis_rejects("base", base, dim):
        return reason
    dim %= base.ndim
    wanted = (*base.shape[:dim], indices.shape[0], *base.shape[dim + 1 :])
    if src.shape == wanted:
        return None
    return (
        f"'src' is {src.shape}; with 'base' {base.shape} and {indices.shape[0]} indices on axis "
        f"{dim} it must be {wanted}. Nothing is broadcast."
    )


def scatter_add_rejects(base: Any, indices: Any, src: Any, *, dim: int) -> str | None:
    """Points outside base."""
    return points_reject("base", base, indices, dim)


def capacity_rejects(x: Any, *, capacity: int | None) -> str | None:
    """No capacity at all, or more elements than I32 counts."""
    if math.prod(x.shape) >= INDEXABLE:
        return f"'x' is {x.shape}; it must have fewer than {INDEXABLE} elements. Split it."
    if capacity is None or 0 <= capacity < INDEXABLE:
        return None
    return f"parameter 'capacity' is {capacity}; it must be None or from 0 to {INDEXABLE - 1}."


# -- what is expected of values ------------------------------------------------------------


def expects(x: Any, indices: Any, *rest: Any, dim: int) -> Any:
    """Indices into the axis."""
    return located(indices, x.shape[dim]) < x.shape[dim]


# -- examples ------------------------------------------------------------------------------


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """An example's array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def select_examples() -> Iterator[dict[str, Any]]:
    """Repeats on an inner axis, the first axis in another integer type, one element."""
    yield {"x": f32(3, 7, 2), "indices": np.array([6, 0, 3, 3, 1], np.uint32), "dim": 1}
    yield {"x": f32(5, 3), "indices": np.array([4, 4], np.int8), "dim": 0}
    yield {"x": f32(1), "indices": np.array([0], np.int32), "dim": -1}


def add_examples() -> Iterator[dict[str, Any]]:
    """As for selecting, with something to add."""
    for shape, example in zip(((3, 5, 2), (2, 3), (1,)), select_examples(), strict=True):
        yield {"base": example.pop("x"), "src": f32(*shape), **example}


def gather_examples() -> Iterator[dict[str, Any]]:
    """Repeats, fewer points than x has on the other axes, one element."""
    where = np.array([[3, 0, 3], [1, 1, 0]], np.uint32)
    yield {"x": f32(2, 4), "indices": where, "dim": 1}
    yield {"x": f32(4, 5), "indices": where, "dim": 0}
    yield {"x": f32(1), "indices": np.array([0], np.int64), "dim": 0}


def scatter_examples() -> Iterator[dict[str, Any]]:
    """As for gathering, with something to add."""
    for example in gather_examples():
        yield {"base": example.pop("x"), "src": f32(*example["indices"].shape), **example}


def nonzero_examples() -> Iterator[dict[str, Any]]:
    """Zeros of both signs among others, room to spare, too little."""
    x = np.array([[0, 1.5, -0.0], [-2, 0, 3]], np.float32)
    for capacity in (None, 9, 2):
        yield {"x": x, "capacity": capacity}


# -- reading -------------------------------------------------------------------------------


@op(
    OpKind.IndexSelect,
    precision=PRECISION,
    rejects=select_rejects,
    expects=expects,
    splits=at_indices,
    examples=select_examples,
)
def index_select(x: Anything[Array, "*shape"], indices: Indices[Array, " n"], *, dim: int) -> Array:
    """yᵢ = x at indices[i] on an axis, all of the other axes.

    Args:
        x: any shape with that axis, any dtype.
        indices: ``[n]``, any integer dtype; repeats are allowed.  Where one is outside the axis the
            result is NaN, for integers 0.
        dim: the axis; a negative one counts from the end.

    Returns:
        ``x`` with n elements on the axis.  The gradient adds up over repeats, half types in
        float32.
    """
    dim %= x.ndim
    if not x.shape[dim]:
        shape = (*x.shape[:dim], indices.size, *x.shape[dim + 1 :])
        return jnp.full(shape, nothing(x.dtype), x.dtype)
    return read(x, located(indices, x.shape[dim]), dim, slices)


@op(
    OpKind.Gather,
    precision=PRECISION,
    rejects=gather_rejects,
    expects=expects,
    splits=at_indices,
    examples=gather_examples,
)
def gather(x: Anything[Array, "*shape"], indices: Indices[Array, "*points"], *, dim: int) -> Array:
    """y[…, i, …] = x[…, indices[…, i, …], …]: one index for each element of the result.

    Args:
        x: any shape with that axis, any dtype.
        indices: of the rank of ``x``, any integer dtype; on axes other than ``dim`` not longer than
            ``x``, of which the first elements are then meant.  Where one is outside the axis the
            result is NaN, for integers 0.
        dim: the axis that indices select on; a negative one counts from the end.

    Returns:
        An array of the shape of ``indices`` and the dtype of ``x``.  The gradient adds up over
        repeats, half types in float32.
    """
    dim %= x.ndim
    if not x.shape[dim]:
        return jnp.full(indices.shape, nothing(x.dtype), x.dtype)
    within = (slice(None) if a == dim else slice(n) for a, n in enumerate(indices.shape))
    return read(x[tuple(within)], located(indices, x.shape[dim]), dim, points)


# -- adding --------------------------------------------------------------------------------


@op(
    OpKind.IndexAdd,
    precision=PRECISION,
    rejects=index_add_rejects,
    expects=expects,
    splits=at_indices,
    examples=add_examples,
)
def index_add(
    base: Numbers[Array, "*shape"],
    indices: Indices[Array, " n"],
    src: Numbers[Array, "*slices"],
    *,
    dim: int,
) -> Array:
    """base, and src[i] added at indices[i] on an axis, for each i.

    Half types are summed in float32 and rounded once; integers wrap.  The same bits on every run.

    Args:
        base: any shape with that axis; floats or integers.
        indices: ``[n]``, any integer dtype; where repeated, all are added.  One outside the axis
            adds nothing.
        src: as ``base``, but n on the axis.
        dim: the axis; a negative one counts from the end.

    Returns:
        An array like ``base``.
    """
    dim %= base.ndim
    return added(base, located(indices, base.shape[dim]), src, dim, slices)


@op(
    OpKind.ScatterAdd,
    precision=PRECISION,
    rejects=scatter_add_rejects,
    expects=expects,
    splits=at_indices,
    examples=scatter_examples,
)
def scatter_add(
    base: Numbers[Array, "*shape"],
    indices: Indices[Array, "*points"],
    src: Numbers[Array, "*points"],
    *,
    dim: int,
) -> Array:
    """base, and src[…, i, …] added at […, indices[…, i, …], …]: one index for each element of src.

    Half types are summed in float32 and rounded once; integers wrap.  The same bits on every run.

    Args:
        base: any shape with that axis; floats or integers.
        indices: of the rank of ``base``, any integer dtype; on axes other than ``dim`` not longer
            than ``base``.  Where repeated, all are added.  One outside the axis adds nothing.
        src: one element for each index.
        dim: the axis that indices select on; a negative one counts from the end.

    Returns:
        An array like ``base``.
    """
    dim %= base.ndim
    add = lambda base, indices, src: added(
        base, located(indices, base.shape[dim]), src, dim, points
    )
    rule = lambda arrays, y: at_indices({"dim": dim}, arrays, (y,))
    return split(add, add, rule)(base, indices, src)  # XLA would gather where it adds elements


# -- as rows -------------------------------------------------------------------------------

for by_slices, read_or_add in ((index_select, _rows.reading), (index_add, _rows.adding)):
    by_slices.kernel(
        "rows", platforms=("cpu",), refuses=_rows.refuses, declines=_rows.is_first_axis
    )(read_or_add(_rows.of_slices, in_order=False))
    by_slices.kernel(
        "in_order", platforms=("cuda",), refuses=_rows.refuses, declines=_rows.is_exact
    )(read_or_add(_rows.of_slices, in_order=True))

for by_points, read_or_add in ((gather, _rows.reading), (scatter_add, _rows.adding)):
    by_points.kernel("rows", platforms=("cpu",), refuses=_rows.refuses)(
        read_or_add(_rows.of_points, in_order=False)
    )
    by_points.kernel(
        "in_order", platforms=("cuda",), refuses=_rows.refuses, declines=_rows.is_exact
    )(read_or_add(_rows.of_points, in_order=True))


# -- what is not zero ----------------------------------------------------------------------


@op(
    OpKind.NonZeroIndices,
    precision=PRECISION,
    outputs=("indices", "count"),
    rejects=capacity_rejects,
    examples=nonzero_examples,
)
def nonzero_indices(
    x: Numbers[Array, "*shape"], *, capacity: int | None = None
) -> tuple[Array, Array]:
    """Flat positions of the elements that are not 0, ascending, and how many there are.

    NaN is not 0, −0 is.  Shapes do not depend on values, so it works under ``jit``.

    Args:
        x: any shape; floats or integers.
        capacity: how many positions to return; None is the size of ``x``.

    Returns:
        Positions U32 ``[capacity]`` in row-major order; entries beyond the count hold the size of
        ``x``, out of range, so that gathers fill and scatters drop there.  And the count, U32
        ``[1]``: the true one, also where it exceeds the capacity.
    """
    there = x.ravel() != 0
    capacity = x.size if capacity is None else capacity
    rank = lax.cumsum(there.astype(jnp.int32), 0) - 1
    place = jnp.where(there, jnp.minimum(rank, capacity), capacity)  # a last slot, thrown away
    slots = jnp.full((capacity + 1,), x.size, jnp.uint32)
    slots = slots.at[place].set(jnp.arange(x.size, dtype=jnp.uint32), mode="promise_in_bounds")
    return slots[:capacity], jnp.sum(there, dtype=jnp.uint32).reshape(1)
