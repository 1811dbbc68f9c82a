"""Largest and smallest elements: NaN kept, ties counted; and where they stand."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._parts import split
from .._rules import along
from ..numerics import is_float, wide
from ..types import Array

SLICES = 16  # folded at a time: each reads its part of memory in order
LEAST, PARTS = 512, 8  # elements of a last axis that are reduced one by one; slices until then


def attained(x: Array, y: Array, axes: tuple[int, ...], largest: bool) -> tuple[Array, Array]:
    """Where x attains the extreme y of its window, and how many elements share it.

    A window holding NaN has y = NaN: all of it attains that, and the count is NaN, which makes NaN
    of every gradient there.  An empty window counts 1.
    """
    y = lax.expand_dims(y, axes)
    hit = ~(x < y) if largest else ~(x > y)
    count = jnp.sum(hit, axes, dtype=jnp.int32, keepdims=True)
    count = jnp.maximum(count, 1).astype(wide(y).dtype)
    return hit, jnp.where(y == y, count, jnp.nan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def extreme(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    """Largest or smallest element over axes; NaN wins.  Ties share the gradient equally.

    JAX's own rule counts ties in the operand's dtype (in bfloat16 to 256), multiplies the
    cotangent with a mask (inf · 0) and divides 0 by 0 where a window is empty.
    """
    plain = lambda x: (lax.reduce_max if largest else lax.reduce_min)(x, axes)
    if not axes:
        return x
    # XLA refuses to compile its reductions along an axis that is split over devices.
    on_cpu = functools.partial(keeping_nan, axes=axes, largest=largest)
    rule = lambda arrays, y: along("axes")({"axes": axes}, arrays, (y,))
    return lax.platform_dependent(x, cpu=split(on_cpu, on_cpu, rule), default=plain)


@extreme.defjvp
def extreme_jvp(axes, largest, primals, tangents):
    """The mean tangent of the elements that attain the extreme."""
    (x,), (t,) = primals, tangents
    y = extreme(x, axes, largest)
    hit, count = attained(x, y, axes, largest)
    total = lax.reduce_sum(jnp.where(hit, wide(t), 0), axes)
    return y, (total / lax.squeeze(count, axes)).astype(x.dtype)


def keeping_nan(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    """The extreme on the CPU, where XLA's reductions lose NaN, and are slow for integers.

    (``jnp.max`` loses it with JAX 0.10 to 0.12.)  The elementwise maximum keeps it and is
    vectorised: an axis is folded, slice onto slice.  What is left of the last one, where slices are
    short, is reduced together with a flag.  Half types are folded as integers.
    """
    pick, reduce = (lax.max, lax.reduce_max) if largest else (lax.min, lax.reduce_min)
    if not x.size:
        return reduce(x, axes)
    half = is_float(x) and x.dtype.itemsize == 2
    v, reduced = merged(ordered(x, largest) if half else x, axes)
    of_last = (LEAST, PARTS) if is_float(v) else (SLICES, SLICES)
    for axis in reversed(reduced):
        last = axis == v.ndim - 1
        v = folded(v, axis, pick, *of_last if last else (2, SLICES))
        # XLA computes a reduction once, an elementwise maximum again wherever it is broadcast.
        if not is_float(v):
            v = reduce(v, (axis,))
        else:
            v = (reduced_with_flag if last else reduced_by_selecting)(v, axis, largest)
    v = v.reshape([n for a, n in enumerate(x.shape) if a not in axes])
    return unordered(v, x.dtype) if half else v


def reduced_with_flag(v: Array, axis: int, largest: bool) -> Array:
    """Extremes along the last axis, and whether it holds NaN: vectorised."""
    pick = lax.max if largest else lax.min
    join = lambda left, right: (pick(left[0], right[0]), left[1] | right[1])
    start = jnp.asarray(-jnp.inf if largest else jnp.inf, v.dtype), jnp.zeros((), jnp.int32)
    y, flag = lax.reduce((v, (v != v).astype(jnp.int32)), start, join, (axis,))
    return jnp.where(flag > 0, jnp.nan, y)


def reduced_by_selecting(v: Array, axis: int, largest: bool) -> Array:
    """Extremes along another axis."""
    wins = lax.ge if largest else lax.le
    join = lambda a, b: jnp.where(wins(a, b) | (a != a), a, b)
    start = jnp.asarray(-jnp.inf if largest else jnp.inf, v.dtype)
    return lax.reduce(v, start, join, (axis,))


def ordered(x: Array, largest: bool) -> Array:
    """Half floats as integers of the same order, NaN beyond the extreme."""
    bits = lax.bitcast_convert_type(x, jnp.int16)
    key = bits ^ ((bits >> 15) & 0x7FFF)
    return jnp.where(x != x, jnp.asarray(0x7FFF if largest else -0x8000, jnp.int16), key)


def unordered(key: Array, dtype: Any) -> Array:
    """The floats that :func:`ordered` made integers of; both its ends are NaN."""
    return lax.bitcast_convert_type(key ^ ((key >> 15) & 0x7FFF), dtype)


def merged(x: Array, axes: Sequence[int]) -> tuple[Array, list[int]]:
    """x with neighbouring axes made one where all or none of them are reduced; and which are."""
    shape, reduced = [], []
    for axis, n in enumerate(x.shape):
        if n == 1:
            continue
        if shape and reduced[-1] == (axis in axes):
            shape[-1] *= n
        else:
            shape.append(n)
            reduced.append(axis in axes)
    return x.reshape(shape or (1,)), [i for i, r in enumerate(reduced) if r]


def folded(
    v: Array, axis: int, pick: Callable[[Array, Array], Array], least: int, slices: int = SLICES
) -> Array:
    """v, slices of one axis folded onto each other until there are at most ``least``, 2 or more."""
    while (n := v.shape[axis]) > least:
        each = max(2, math.ceil(n / slices))
        starts = [min(i, n - each) for i in range(0, n, each)]  # the last ones may overlap
        v = functools.reduce(pick, [lax.slice_in_dim(v, s, s + each, axis=axis) for s in starts])
    return v


def position(x: Array, axis: int, largest: bool) -> Array:
    """Index of the first NaN, else of the first extreme.  Compares in the dtype of x."""
    return (lax.argmax if largest else lax.argmin)(x, axis, np.uint32)


def position_by_folding(x: Array, axis: int, largest: bool) -> Array:
    """:func:`position`: the extreme, then the least index of what equals it.

    XLA's search compares element by element on the CPU.  Both of these are folds of slices, which
    are vectorised, and reading x twice costs less.
    """
    y = lax.expand_dims(extreme(x, (axis,), largest), (axis,))
    n = x.shape[axis]
    count = min(n, SLICES)
    each = math.ceil(n / count)
    within = lax.broadcasted_iota(jnp.int32, (*x.shape[:axis], each, *x.shape[axis + 1 :]), axis)
    parts = []
    for i in range(count):
        start = min(i * each, n - each)
        part = lax.slice_in_dim(x, start, start + each, axis=axis)
        # NaN is the extreme where there is any, and equals nothing.
        parts.append(jnp.where((part == y) | (part != part), within + start, n))
    found = functools.reduce(lax.min, parts)
    found = folded(found, axis, lax.min, SLICES if axis == x.ndim - 1 else 2)
    return lax.reduce_min(found, (axis,)).astype(jnp.uint32)
