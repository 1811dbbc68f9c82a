"""ONNX's nodes in terms of our ops: elementwise, along axes, by indices, losses.

An adapter takes our op, then a node's inputs and attributes under ONNX's own names and defaults;
what ours spells another way (keepdims, a negative index, several axes) it spells out around the
call.  An attribute that it does not name is an error, not ignored.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

import fuel_jax as fj
from fuel_jax.types import ANYTHING

from .onnx_cases import on_host

# -- elementwise ---------------------------------------------------------------------------


def alone(op, *inputs):
    return op(*inputs)


def gelu(op, x, *, approximate="none"):
    return op(x)


def exact(x, *, approximate="none"):
    return approximate == "none"


def by_tanh(x, *, approximate="none"):
    return approximate == "tanh"


def pairs(op, a, b):
    return op(*np.broadcast_arrays(a, b))


def compared(op, a, b):
    return pairs(op, a, b).astype(bool)


def summed(op, *xs):
    return functools.reduce(op, xs, np.zeros_like(xs[0]))


def extreme(op, x, *others):
    """One alone is compared with itself."""
    return functools.reduce(op, others or (x,), x)


def power(op, a, b):
    """A mixed pair is computed in the base's dtype, integers in float64."""
    dtype = a.dtype if a.dtype.kind == "f" else np.float64
    return pairs(op, a.astype(dtype), b.astype(dtype)).astype(a.dtype)


def clipped(op, x, low=None, high=None):
    low, high = (
        b if given is None else given.item() for b, given in ((-math.inf, low), (math.inf, high))
    )
    return op(x, min=low, max=high)


def cast(op, x, *, to, **saturation):
    return cast_like(op, x, np.empty(0, tensor_dtype_to_np_dtype(to)), **saturation)


def cast_like(op, x, like, *, saturate=1, round_mode="up"):
    """ONNX saturates on the way to 8-bit floats, and wraps to integers, as ours do from I32.

    round_mode is for a dtype that we do not have.
    """
    dtype = jnp.dtype(like.dtype)
    if dtype.name in ("int4", "uint4"):
        x = op(x, dtype="I32")
    if saturate and dtype.name.startswith("float8"):
        x = fj.clamp(x, min=float(jnp.finfo(dtype).min), max=float(jnp.finfo(dtype).max))
    return op(x, dtype=dtype)


def swish(op, x, *, alpha=1.0):
    """x · σ(αx) = silu(αx) / α."""
    alpha = x.dtype.type(alpha)
    return op(alpha * x) / alpha


def swiglu(op, a, b, *, alpha=1.0):
    return swish(op, a, alpha=alpha) * b


def crossed(x, low=None, high=None):
    if low is None or high is None or low <= high:
        return None
    return "a minimum above the maximum: an error in ours"


def by_integer(op, x, exponent):
    return op(x, exp=int(exponent))


def one_integer(x, exponent):
    return exponent.ndim == 0 and exponent == np.round(exponent)


def remainder(op, a, b, *, fmod=0):
    return pairs(op, a, b)


def truncated(a, b, *, fmod=0):
    return "fmod=1: the sign of the dividend, ours has that of the divisor" if fmod else None


def strings(a, b):
    return "strings" if a.dtype == object else None


def sequence(x, *_):
    return "a sequence of arrays" if isinstance(x, list) else None


def other_dtypes(x, like=None, *, to=None, **_):
    dtypes = (x.dtype, like.dtype if to is None else tensor_dtype_to_np_dtype(to))
    others = [d.name for d in dtypes if d.name not in ANYTHING]
    return f"{others[0]}, no dtype of ours" if others else None


# -- along axes ----------------------------------------------------------------------------


def axes_of(x, axes, noop):
    if axes is None or (axes.size == 0 and not noop):
        return tuple(range(x.ndim))
    return tuple(sorted(a % x.ndim for a in axes.tolist()))


def kept(x, dims):
    return tuple(1 if a in dims else n for a, n in enumerate(x.shape))


def reduced(op, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    dims = axes_of(x, axes, noop_with_empty_axes)
    y = op(x.astype(np.uint8) if x.dtype == bool else x, dims=dims).astype(x.dtype)
    return y.reshape(kept(x, dims)) if keepdims else y


def reduced_to(op, x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    dims = axes_of(x, axes, noop_with_empty_axes)
    y = op(x.astype(np.uint8) if x.dtype == bool else x, shape=kept(x, dims)).astype(x.dtype)
    return y if keepdims else np.squeeze(y, dims)


def position(op, x, *, axis=0, keepdims=1, select_last_index=0):
    if select_last_index:
        y = x.shape[axis] - 1 - op(np.flip(x, axis), dim=axis).astype(np.int64)
    else:
        y = op(x, dim=axis).astype(np.int64)
    return np.expand_dims(y, axis) if keepdims else y


def running(op, x, axis, *, exclusive=0, reverse=0):
    axis = axis.item()
    turned = (lambda v: np.flip(v, axis)) if reverse else (lambda v: v)
    y = turned(op(turned(x), dim=axis))
    return y - x if exclusive else y


def along(op, x, *, axis=-1):
    return np.moveaxis(op(np.moveaxis(x, axis, -1)), -1, axis)


def averaged(op, *xs):
    return op(np.stack(xs), dims=0)


def normed(op, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Over all axes from one on; gain and bias are ours to add."""
    rows = x.reshape(*x.shape[: axis % x.ndim], -1)
    y = op(rows, eps=epsilon).reshape(x.shape) * scale
    return y if bias is None else y + bias


def layer_normed(op, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    dims = tuple(range(axis % x.ndim, x.ndim))
    average = lambda v: on_host(fj.mean_reduce)(v, dims=dims).reshape(kept(x, dims))
    mean = average(x)
    deviation = np.sqrt(average((x - mean) ** 2) + np.float32(epsilon))
    return normed(op, x, scale, bias, axis=axis, epsilon=epsilon), mean, 1 / deviation


def over_axes(op, x, *, axes=(0, 2, 3)):
    last = tuple(range(-len(axes), 0))
    moved = np.moveaxis(x, axes, last)
    y = op(moved.reshape(*moved.shape[: -len(axes)], -1), eps=1e-9)
    return np.moveaxis(y.reshape(moved.shape), last, axes)


def over_groups(op, x, scale, bias, *, num_groups=None, epsilon=1e-5, stash_type=1):
    """Over a group of channels, or without groups over each channel, of one sample."""
    y = op(x.reshape(len(x), num_groups or x.shape[1], -1), eps=epsilon).reshape(x.shape)
    by_channel = lambda v: v.reshape(-1, *[1] * (x.ndim - 2))
    return y * by_channel(scale) + by_channel(bias)


# -- layout and indices --------------------------------------------------------------------


def joined(op, *xs, axis):
    return op(*xs, dim=axis)


def padded(op, x, pads, value=None, axes=None, *, mode="constant"):
    margins = np.zeros((x.ndim, 2), int)
    margins[slice(None) if axes is None else axes] = pads.reshape(2, -1).T
    mode = {"edge": "replicate"}.get(mode, mode)
    return op(x, padding=margins.tolist(), mode=mode, value=0 if value is None else value.item())


def wrapped(*_, mode="constant"):
    return "mode 'wrap'" if mode == "wrap" else None


def triangle(op, x, diagonal=None, *, upper=1):
    return op(x, diagonal=0 if diagonal is None else diagonal.item())


def upper(*_, upper=1):
    return upper == 1


def lower(*_, upper=1):
    return upper == 0


def from_the_front(indices, n):
    return np.where(indices < 0, indices + n, indices)


def taken(op, x, indices, *, axis=0):
    y = op(x, from_the_front(indices, x.shape[axis]).ravel(), dim=axis)
    return y.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def as_rows(x, indices):
    """x with the axes that the last one of indices counts along made one, and indices into it."""
    counted = x.shape[: indices.shape[-1]]
    strides = np.array([math.prod(counted[i + 1 :]) for i in range(len(counted))])
    return x.reshape(-1, *x.shape[len(counted) :]), (indices * strides).sum(-1)


def taken_at(op, x, indices, *, batch_dims=0):
    if batch_dims:
        return jax.vmap(functools.partial(taken_at, op, batch_dims=batch_dims - 1))(x, indices)
    rows, at = as_rows(x, indices)
    return op(rows, at.ravel(), dim=0).reshape(*at.shape, *rows.shape[1:])


def picked(op, x, indices, *, axis=0):
    return op(x, from_the_front(indices, x.shape[axis]), dim=axis)


def added_at(op, base, indices, src, *, axis=0, reduction="none"):
    return op(base, from_the_front(indices, base.shape[axis]), src, dim=axis)


def rows_added(op, base, indices, src, *, reduction="none"):
    rows, at = as_rows(base, indices)
    return op(rows, at.ravel(), src.reshape(-1, *rows.shape[1:]), dim=0).reshape(base.shape)


def another_reduction(*_, reduction="none", axis=0):
    return None if reduction == "add" else f"reduction {reduction!r}: ours adds"


def not_zero(op, x):
    positions, count = op(x.astype(np.uint8))
    return np.stack(np.unravel_index(positions[: int(count[0])], x.shape)).astype(np.int64)


def each_written(write):
    """A cache of each sequence, written where that sequence ends."""

    def adapt(op, cache, update, start, *, axis=-2, mode="linear"):
        return jax.vmap(functools.partial(write, op, axis=axis))(cache, update, start)

    return adapt


@each_written
def slab(op, cache, update, start, *, axis):
    ranges = tuple((0, n) for n in update.shape)
    return op(cache, update, ranges=ranges, dyn_offset=(axis, start))


@each_written
def appended(op, cache, update, start, *, axis):
    return op(cache, update, start, axis=axis)


@each_written
def ring(op, cache, update, start, *, axis):
    return op(cache, update, start, axis=axis, modulus=cache.shape[axis])


def linear(*_, axis=-2, mode="linear"):
    return mode == "linear"


def circular(*_, **attributes):
    return not linear(**attributes)


# -- loss ----------------------------------------------------------------------------------


def class_weights(targets, weights, ignored):
    """The weight of each target, 0 where it is ignored."""
    counts = targets != ignored
    return np.where(counts, weights[np.where(counts, targets, 0)], np.zeros((), weights.dtype))


def total(each, w, reduction):
    each = each * w
    return each if reduction == "none" else each.sum() / (w.sum() if reduction == "mean" else 1)


def cross_entropy(op, x, targets, weights=None, *, reduction="mean", ignore_index=-100):
    """Classes are on axis 1; with weights of classes the mean is over their sum."""
    rows = np.moveaxis(x, 1, -1)
    if weights is None:
        loss = op(rows, targets, reduction=reduction, ignore_index=ignore_index)
    else:
        w = class_weights(targets, weights, ignore_index)
        loss = total(op(rows, targets, reduction="none", ignore_index=ignore_index), w, reduction)
    return loss, lambda: along(on_host(fj.log_softmax_last_dim), x, axis=1)


def likelihood(op, x, targets, weights=None, *, reduction="mean", ignore_index=-100):
    weights = np.ones(x.shape[1], x.dtype) if weights is None else weights
    at = np.where(targets == ignore_index, 0, targets)[:, None]
    each = -op(x, at, dim=1)[:, 0]
    return total(each, class_weights(targets, weights, ignore_index), reduction)
