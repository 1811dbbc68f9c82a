"""Reading and adding as rows of a matrix: faster on the CPU, in a fixed order on CUDA.

Slices on axis 1 of ``[a, n, b, c]`` are rows of ``[a·n, b, c]``, single elements are rows of
``[a·n·b·c]``.  XLA reads and writes rows whole, where it would walk a column element by element.

On CUDA XLA adds with atomics, in the order in which they happen to arrive: the last bits differ
from run to run.  In order means: sorted by row, summed over runs of equal rows by a scan whose
order is fixed, and then written once for each row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._parts import linear
from .._rules import at_indices
from ..numerics import is_float, zeros
from ..types import Array
from .reduce import lifted

LIMIT = 2**31  # rows, and indices beyond them, are counted in I32
AS_THEY_ARE: dict[str, Any] = {"wrap_negative_indices": False}  # no index is negative once located


def located(indices: Array, extent: int) -> Array:
    """Indices as I32; one outside [0, extent) at ``extent``: gathers fill, scatters drop there."""
    i = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
    return jnp.where((i < 0) | (i >= extent), extent, i).astype(jnp.int32)


def nothing(dtype: Any) -> Any:
    """What is read where there is nothing."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0


# -- which rows ----------------------------------------------------------------------------

Shape = tuple[int, ...]
Rows = Callable[[Shape, Array, int], tuple[Shape, Array]]


def of_slices(shape: tuple[int, ...], indices: Array, dim: int) -> tuple[tuple[int, ...], Array]:
    """``shape`` as rows, and the row of each slice; out of range it is the number of rows."""
    outer, extent = math.prod(shape[:dim]), shape[dim]
    index = located(indices, extent)
    rows = lax.broadcasted_iota(jnp.int32, (outer, index.size), 0) * extent + index
    rows = jnp.where(index < extent, rows, outer * extent)
    return (outer * extent, *shape[dim + 1 :]), rows.ravel()


def of_points(shape: tuple[int, ...], indices: Array, dim: int) -> tuple[tuple[int, ...], Array]:
    """``shape`` flat, and the place of each point in it; out of range it is the size."""
    index = located(indices, shape[dim])
    place = jnp.zeros_like(index)
    for axis, extent in enumerate(shape):
        at = index if axis == dim else lax.broadcasted_iota(jnp.int32, index.shape, axis)
        place = place * extent + at
    place = jnp.where(index < shape[dim], place, math.prod(shape))
    return (math.prod(shape),), place.ravel()


def refuses(x: Any, indices: Any, *src: Any, dim: int) -> str | None:
    """More rows than I32 counts, or none."""
    if x.size == 0 or indices.size == 0:
        return "there is nothing to read or write"
    if x.size + math.prod((*x.shape[: dim % x.ndim], indices.size)) < LIMIT:
        return None
    return "elements and indices together are 2^31 or more"


def is_first_axis(x: Any, indices: Any, *src: Any, dim: int) -> str | None:
    """Slices on the first axis are rows already."""
    return "they are rows already" if dim % x.ndim == 0 else None


def is_exact(x: Any, indices: Any, *src: Any, dim: int) -> str | None:
    """Sums that come out the same in any order."""
    return None if is_float(x) else f"{x.dtype.name} is summed exactly, in any order"


# -- reading and adding --------------------------------------------------------------------


class Form(NamedTuple):
    """How reading and adding are spelled: which rows, on which axis, and in what order; hashable.

    Reading and adding to zeros are transposes of each other.
    """

    rows_of: Rows
    dim: int
    in_order: bool

    def shape(self, x: Array, indices: Array) -> tuple[int, ...]:
        """That of what is read of x."""
        if self.rows_of is of_points:
            return indices.shape
        return (*x.shape[: self.dim], indices.size, *x.shape[self.dim + 1 :])

    def read(self, x: Array, indices: Array, *, beyond: Any = 0) -> Array:
        """x at the indices, ``beyond`` where there is nothing."""
        matrix, rows = self.rows_of(x.shape, indices, self.dim)
        at = x.reshape(matrix).at[rows]
        found = at.get(mode="fill", fill_value=beyond, **AS_THEY_ARE)
        return found.reshape(self.shape(x, indices))

    def add(self, base: Array, indices: Array, src: Array) -> Array:
        """base, and src added at the indices."""
        matrix, rows = self.rows_of(base.shape, indices, self.dim)
        v, s = base.reshape(matrix), src.reshape(rows.size, *matrix[1:])
        if self.in_order:
            return (v + sum_in_order(s, rows, len(v))).reshape(base.shape)
        return v.at[rows].add(s, mode="drop", **AS_THEY_ARE).reshape(base.shape)

    def linear(self, t: Array, indices: Array, base: Shape, src: Shape, adds: bool) -> Array:
        """What is added to zeros, or read, of a tangent; either is the transpose of the other.

        ``base`` and ``src`` are the shapes of the whole; axes on which they agree may be split.
        """
        kept = {i: n for i, (n, m) in enumerate(zip(base, src, strict=True)) if n != m}
        kept[self.dim] = base[self.dim]

        def add(s: Array, indices: Array) -> Array:
            own = tuple(kept.get(i, n) for i, n in enumerate(s.shape))
            return self.add(zeros(own, s), indices, s)

        reads = lambda arrays, y: at_indices({"dim": self.dim}, arrays, (y,))
        if adds:
            rule = lambda arrays, y: reads((y, arrays[1]), arrays[0]).transposed
            return linear(add, self.read, rule, t, indices)
        return linear(self.read, add, reads, t, indices)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def read(x: Array, indices: Array, form: Form) -> Array:
    """x at the indices.  The transpose adds in float32, and in order if the form does."""
    return form.read(x, indices, beyond=nothing(x.dtype))


@read.defjvp
def read_jvp(form, primals, tangents):
    """Linear in x; 0 where nothing is read."""
    (x, indices), (t, _) = primals, tangents
    y = read(x, indices, form)
    return y, form.linear(lifted(t), indices, x.shape, y.shape, adds=False).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def added(base: Array, indices: Array, src: Array, form: Form) -> Array:
    """base, and src added at the indices, in float32."""
    return form.add(lifted(base), indices, lifted(src)).astype(base.dtype)


@added.defjvp
def added_jvp(form, primals, tangents):
    """Linear in both."""
    (base, indices, src), (t, _, s) = primals, tangents
    more = form.linear(lifted(s), indices, base.shape, src.shape, adds=True)
    return added(base, indices, src, form), (lifted(t) + more).astype(base.dtype)


def sum_in_order(src: Array, rows: Array, count: int) -> Array:
    """``[count, …]`` sums of what goes to each row, always added up in one order."""
    order = jnp.argsort(rows, stable=True)
    row = rows[order]
    changes = row[1:] != row[:-1]
    edge = jnp.ones((1,), bool)
    first, last = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])

    def join(left, right):
        (begins_left, a), (begins, b) = left, right
        fresh = lax.expand_dims(begins, range(1, b.ndim))
        return begins_left | begins, jnp.where(fresh, b, a + b)

    sorted_src = src.at[order].get(unique_indices=True, mode="promise_in_bounds")
    _, sums = lax.associative_scan(join, (first, sorted_src))
    beyond = count + jnp.arange(row.size, dtype=jnp.int32)  # each its own, so that all are unique
    place = jnp.where(last, row, beyond)
    none = zeros((count, *src.shape[1:]), src)
    return none.at[place].add(sums, mode="drop", unique_indices=True, **AS_THEY_ARE)


# -- the ops -------------------------------------------------------------------------------


def reading(rows_of: Rows, in_order: bool) -> Callable[..., Array]:
    """``index_select`` or ``gather`` by rows.  (Interpreting it is no different.)"""

    def by_rows(x: Array, indices: Array, *, dim: int, interpret: bool = False) -> Array:
        return read(x, indices, Form(rows_of, dim % x.ndim, in_order))

    return by_rows


def adding(rows_of: Rows, in_order: bool) -> Callable[..., Array]:
    """``index_add`` or ``scatter_add`` by rows.  (Interpreting it is no different.)"""

    def by_rows(
        base: Array, indices: Array, src: Array, *, dim: int, interpret: bool = False
    ) -> Array:
        return added(base, indices, src, Form(rows_of, dim % base.ndim, in_order))

    return by_rows
