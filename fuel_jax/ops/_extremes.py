"""Largest and smallest elements: NaN kept, ties counted; and where they stand, in blocks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import is_float, wide
from ..types import Array

SLICES = 8  # more gain little in float32, and XLA's code for them is poor in bfloat16
BLOCK = 64  # about √n for the rows of usual length


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
    if not is_float(x) or not axes:
        return plain(x)
    return lax.platform_dependent(x, cpu=lambda x: keeping_nan(x, axes, largest), default=plain)


@extreme.defjvp
def extreme_jvp(axes, largest, primals, tangents):
    """The mean tangent of the elements that attain the extreme."""
    (x,), (t,) = primals, tangents
    y = extreme(x, axes, largest)
    hit, count = attained(x, y, axes, largest)
    total = lax.reduce_sum(jnp.where(hit, wide(t), 0), axes)
    return y, (total / lax.squeeze(count, axes)).astype(x.dtype)


def keeping_nan(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    """The extreme on the CPU, where XLA's reductions lose NaN.

    (``jnp.max`` of more than 4096 elements does, with JAX 0.10 to 0.12.)  The elementwise maximum
    keeps it: slices of the longest axis are folded with that, and what is left is searched for NaN.
    """
    v = wide(x)
    axis = max(axes, key=lambda a: x.shape[a])
    n = x.shape[axis]
    if n >= SLICES**2:
        each = math.ceil(n / SLICES)
        starts = [min(i * each, n - each) for i in range(SLICES)]  # the last ones may overlap
        slices = [lax.slice_in_dim(v, s, s + each, axis=axis) for s in starts]
        v = functools.reduce(lax.max if largest else lax.min, slices)
    y = (lax.reduce_max if largest else lax.reduce_min)(v, axes)
    return jnp.where(jnp.any(v != v, axes), jnp.nan, y).astype(x.dtype)


def position(x: Array, axis: int, largest: bool) -> Array:
    """Index of the first NaN, else of the first extreme.  Compares in the dtype of x."""
    return (lax.argmax if largest else lax.argmin)(x, axis, np.uint32)


def position_in_blocks(x: Array, axis: int, largest: bool) -> Array:
    """:func:`position`, of the first block that attains the extreme, then in that block.

    XLA's search compares element by element on the CPU; its maximum is vectorised.  The last block
    reaches back where n is no multiple: what it shares with the one before, that one has first.
    """
    n, inner = x.shape[axis], x.shape[axis + 1 :]
    full = n // BLOCK
    head = lax.slice_in_dim(x, 0, full * BLOCK, axis=axis)
    blocks = head.reshape(*x.shape[:axis], full, BLOCK, *inner)
    tops = extreme(blocks, (axis + 1,), largest)
    if n % BLOCK:
        tail = lax.slice_in_dim(x, n - BLOCK, n, axis=axis)
        last = lax.expand_dims(extreme(tail, (axis,), largest), (axis,))
        tops = lax.concatenate([tops, last], axis)
    block = lax.expand_dims(position(tops, axis, largest).astype(jnp.int32), (axis,))
    start = jnp.minimum(block * BLOCK, n - BLOCK)
    within = lax.broadcasted_iota(jnp.int32, (*x.shape[:axis], BLOCK, *inner), axis)
    candidates = jnp.take_along_axis(x, start + within, axis, mode="promise_in_bounds")
    found = position(candidates, axis, largest)
    return lax.squeeze(start, (axis,)).astype(jnp.uint32) + found
