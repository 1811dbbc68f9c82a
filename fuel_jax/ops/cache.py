"""Writes of a slab into a larger array: what a decoding step does to its cache.

JAX arrays are immutable, so a write returns the array written.  Called eagerly, it gives up the
array passed, which is deleted, and its buffer is written in place; inside ``jit`` XLA does so where
the array is not used again, and ``donate_argnums`` on the outer ``jit`` makes argument and result
one buffer.  Then a write costs what the slab costs, however large the array.

Rows that would fall outside are dropped.  They never move onto other rows, as they would with
``lax.dynamic_update_slice``, which overwrites the newest tokens of a cache that is full.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._choose import describe
from .._op import Precision
from .._rules import of_slab
from .._signature import shorten
from ..errors import ArgumentError
from ..op_kind import OpKind as K
from ..registry import op
from ..types import Anything, Array, Indices, Pairs

EXACT = Precision(float32=0.0)
Ranges = Pairs  # (start, end) per axis


def example(*shape: int) -> jax.ShapeDtypeStruct:
    """Data of a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# -- checks --------------------------------------------------------------------------------


def no_slab(dest: Any, src: Any, ranges: Ranges, axis: int | None, name: str) -> str | None:
    """Ranges or an axis that ``dest`` does not have, or a ``src`` of another shape."""
    if not dest.ndim:
        return f"'dest' is {describe(dest)}; a scalar has no slab. Use jnp.where."
    if axis is not None and not -dest.ndim <= axis < dest.ndim:
        return (
            f"parameter {name!r} is {axis} and 'dest' is {describe(dest)}; the axis must be from "
            f"{-dest.ndim} to {dest.ndim - 1}. Choose another one."
        )
    arrived = f"parameter 'ranges' is {ranges} and 'dest' is {describe(dest)}"
    if len(ranges) != dest.ndim:
        return f"{arrived}; it must be {dest.ndim} pairs (start, end), one for each axis."
    for i, ((start, end), n) in enumerate(zip(ranges, dest.shape, strict=True)):
        if not 0 <= start <= end <= n:
            return f"{arrived}; along axis {i} it must be 0 ≤ start ≤ end ≤ {n}. Correct it."
    slab = tuple(end - start for start, end in ranges)
    if src.shape != slab:
        return (
            f"'src' is {describe(src)} and the slab is {list(slab)}; they must be equal in shape."
        )
    return None


def whole(dest: Any, src: Any, axis: int, ranges: Ranges | None) -> Ranges:
    """``ranges``; where there are none, all of the other axes, and as many rows as ``src`` has."""
    if ranges is not None:
        return ranges
    extents = list(dest.shape)
    if -dest.ndim <= axis < dest.ndim and src.ndim == dest.ndim:
        extents[axis] = src.shape[axis]
    return tuple((0, n) for n in extents)


def clipped(index: Array, low: int, high: int) -> Array:
    """An index between two bounds, compared as what it is: U32 0xFFFFFFFF is large, not −1."""
    limits = jnp.iinfo(index.dtype)
    bounds = (max(low, int(limits.min)), min(high, int(limits.max)))
    return jnp.clip(index, *(jnp.asarray(b, index.dtype) for b in bounds)).astype(int)


# -- the write -----------------------------------------------------------------------------


def written(
    dest: Array, src: Array, start: Any, axis: int, ranges: Ranges, ring: int | None = None
) -> Array:
    """``dest``, its rows ``start + r`` along ``axis`` replaced by row r of ``src``.

    As far as they lie within ``dest``, or within its first ``ring`` rows; along the other axes the
    slab is that of ``ranges``.
    """
    if not src.size:
        return dest
    width, end = src.shape[axis], ring or dest.shape[axis]
    start = clipped(start, -width, end)
    # The nearest slab that lies inside, with the rows of src moved back to where they belong.
    inside = jnp.clip(start, 0, end - width)
    row = inside - start + jnp.arange(width)
    at = [jnp.asarray(first) for first, _ in ranges]
    # Reading clamps as well, and checkify reports what is clamped: a check that costs nothing,
    # where ``debug_check`` would cost every call of the program around it 150 µs.
    at[axis] = start if ring is None else inside
    old = lax.dynamic_slice(dest, at, src.shape, allow_negative_indices=False)
    if width > 1:
        src = jnp.take(src, jnp.clip(row, 0, width - 1), axis, mode="clip", indices_are_sorted=True)
    is_new = jnp.expand_dims((row >= 0) & (row < width), [i for i in range(src.ndim) if i != axis])
    at[axis] = inside
    return lax.dynamic_update_slice(dest, jnp.where(is_new, src, old), at)


# -- write_slice ---------------------------------------------------------------------------


def write_slice_call(
    dest: Array,
    src: Array,
    *,
    ranges: Ranges,
    dyn_offset: tuple[int, Array | int] | None = None,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The scalar is an operand, the axis a parameter: another scalar does not recompile."""
    if dyn_offset is None:
        return (dest, src), {"ranges": ranges}
    if not isinstance(dyn_offset, (tuple, list)) or len(dyn_offset) != 2:
        raise ArgumentError(
            f"write_slice: parameter 'dyn_offset' is {shorten(dyn_offset)}; it must be "
            f"(axis, offset) or None. Pass the axis and an integer scalar."
        )
    axis, start = dyn_offset
    return (dest, src, start), {"ranges": ranges, "dyn_axis": axis}


def write_slice_rejects(
    dest: Any, src: Any, start: Any, *, ranges: Any, dyn_axis: int | None
) -> str | None:
    """A slab that is not there."""
    return no_slab(dest, src, ranges, dyn_axis, "dyn_offset")


def write_slice_examples() -> Iterator[dict[str, Any]]:
    """A static slab; one that starts where a scalar says."""
    dest, src, ranges = example(4, 3, 5), example(2, 3, 2), ((1, 3), (0, 3), (2, 4))
    yield {"dest": dest, "src": src, "ranges": ranges, "dyn_offset": (0, 2)}
    yield {"dest": dest, "src": src, "ranges": ranges}


@op(
    K.WriteSlice,
    precision=EXACT,
    adapt=write_slice_call,
    rejects=write_slice_rejects,
    destructive_input=0,
    splits=of_slab("dyn_axis"),
    examples=write_slice_examples,
)
def write_slice(
    dest: Anything[Array, "*shape"],
    src: Anything[Array, "*slab"],
    start: Indices[Array, ""] | int | None = None,
    *,
    ranges: Ranges,
    dyn_axis: int | None = None,
) -> Anything[Array, "*shape"]:
    """dest with the slab that ``ranges`` describe replaced by src.

    Args:
        dest: any shape but a scalar.  An eager call deletes it.
        src: of the slab's shape.
        ranges: ``((start, end), …)``, half-open, one for each axis; checked when traced.
        dyn_offset: ``(axis, start)``: along this axis the slab starts at ``start``, an integer
            scalar of any dtype, and has the width that ``ranges`` give.  Another value does not
            recompile.  Rows outside are dropped; under checkify they are an error.

    Returns:
        An array like ``dest``.

    Raises:
        ArgumentError: a range that is not in ``dest``, or not of the extent of ``src``.
    """
    if start is None or dyn_axis is None:
        return lax.dynamic_update_slice(dest, src, [first for first, _ in ranges])
    axis = dyn_axis % dest.ndim
    return written(dest, src, start, axis, ranges)


# -- write_slice_doff ----------------------------------------------------------------------


def write_slice_doff_rejects(
    dest: Any, src: Any, offset: Any, *, axis: Any, ranges: Any
) -> str | None:
    """A slab that is not there."""
    return no_slab(dest, src, whole(dest, src, axis, ranges), axis, "axis")


def write_slice_doff_examples() -> Iterator[dict[str, Any]]:
    """Appending to a cache; a part of the other axes."""
    yield {"dest": example(2, 5, 3), "src": example(2, 2, 3), "offset": 3, "axis": 1}
    yield {
        **{"dest": example(4, 3), "src": example(1, 2), "offset": np.uint32(2)},
        **{"axis": 0, "ranges": ((0, 1), (1, 3))},
    }


@op(
    K.WriteSliceDoff,
    precision=EXACT,
    rejects=write_slice_doff_rejects,
    destructive_input=0,
    splits=of_slab("axis"),
    examples=write_slice_doff_examples,
)
def write_slice_doff(
    dest: Anything[Array, "*shape"],
    src: Anything[Array, "*slab"],
    offset: Indices[Array, ""] | int,
    *,
    axis: int,
    ranges: Ranges | None = None,
) -> Anything[Array, "*shape"]:
    """dest with its rows from ``offset`` on, along ``axis``, replaced by src.

    Args:
        dest: any shape but a scalar.  An eager call deletes it.
        src: of the slab's shape.
        offset: where it starts along ``axis``; an integer scalar of any dtype.  Another value does
            not recompile.  Rows outside are dropped; under checkify they are an error.
        axis: the axis of the offset; a negative one counts from the end.
        ranges: ``((start, end), …)``, one for each axis; along ``axis`` only their distance counts.
            None for all of the other axes.

    Returns:
        An array like ``dest``.

    Raises:
        ArgumentError: a range that is not in ``dest``, or not of the extent of ``src``.
    """
    along = axis % dest.ndim
    return written(dest, src, offset, along, whole(dest, src, axis, ranges))


# -- write_slice_rotating ------------------------------------------------------------------


def write_slice_rotating_rejects(
    dest: Any, src: Any, position: Any, *, axis: Any, modulus: int, ranges: Any
) -> str | None:
    """A slab or a ring that is not there."""
    if reason := no_slab(dest, src, whole(dest, src, axis, ranges), axis, "axis"):
        return reason
    if not 1 <= modulus <= dest.shape[axis]:
        return (
            f"parameter 'modulus' is {modulus} and 'dest' is {describe(dest)}; it must be from 1 "
            f"to {dest.shape[axis]}, the extent of axis {axis}. Choose another one."
        )
    if src.shape[axis] > modulus:
        return (
            f"'src' is {describe(src)} and 'modulus' is {modulus}; {src.shape[axis]} rows would "
            f"overwrite each other. Write the last {modulus} of them."
        )
    return None


def write_slice_rotating_examples() -> Iterator[dict[str, Any]]:
    """A ring of which a row stays out, written past its end; a single row."""
    yield {
        **{"dest": example(2, 6, 3), "src": example(2, 3, 3), "position": 8},
        **{"axis": 1, "modulus": 5},
    }
    yield {
        **{"dest": example(4, 3), "src": example(1, 2), "position": 3},
        **{"axis": 0, "modulus": 4, "ranges": ((0, 1), (1, 3))},
    }


@op(
    K.WriteSliceRotating,
    precision=EXACT,
    rejects=write_slice_rotating_rejects,
    destructive_input=0,
    splits=of_slab("axis"),
    examples=write_slice_rotating_examples,
)
def write_slice_rotating(
    dest: Anything[Array, "*shape"],
    src: Anything[Array, "*slab"],
    position: Indices[Array, ""] | int,
    *,
    axis: int,
    modulus: int,
    ranges: Ranges | None = None,
) -> Anything[Array, "*shape"]:
    """dest with its row (position + r) mod modulus, along ``axis``, replaced by row r of src.

    A ring buffer: the cache of a sliding window.  Rows from ``modulus`` on stay as they are.

    Args:
        dest: any shape but a scalar.  An eager call deletes it.
        src: of the slab's shape; at most ``modulus`` rows.
        position: of row 0, counted from the beginning of the stream; an integer scalar of any
            dtype.  Another value does not recompile.
        axis: the axis that rotates; a negative one counts from the end.
        modulus: rows in the ring, from 1 to the extent of ``axis``.
        ranges: ``((start, end), …)``, one for each axis; along ``axis`` only their distance counts.
            None for all of the other axes.

    Returns:
        An array like ``dest``.

    Raises:
        ArgumentError: a range that is not in ``dest``, or not of the extent of ``src``; a modulus
            that is out of range, or fewer rows than ``src`` has.
    """
    along, ranges = axis % dest.ndim, whole(dest, src, axis, ranges)
    at = jnp.asarray(position)
    if at.dtype.itemsize < 4:
        at = at.astype(jnp.int32)
    first = jnp.remainder(at, jnp.asarray(modulus, at.dtype)).astype(int)
    y = written(dest, src, first, along, ranges, modulus)
    if src.shape[along] > 1:  # the rows that went past the end, seen from the beginning
        y = written(y, src, first - modulus, along, ranges, modulus)
    return y
