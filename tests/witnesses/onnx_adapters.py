"""ONNX's nodes in terms of our ops.

An adapter takes our op, then a node's inputs and attributes under ONNX's own names and defaults;
what ours spells another way (keepdims, a negative index, several axes) it spells out around the
call.  An attribute that it does not name is an error, not ignored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

import fuel_jax as fj
from fuel_jax.types import ANYTHING

from . import onnx_attention as sequences
from .onnx_cases import on_host


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our ops, a type of node, and how the one makes the other."""

    op: str
    node: str
    adapt: Callable[..., Any]
    when: Callable[..., bool] = lambda *inputs, **attributes: True  # else it is another op's case
    beyond: Callable[..., str | None] = lambda *inputs, **attributes: None  # why ours cannot


# -- elementwise ---------------------------------------------------------------------------


def alone(op, *inputs):
    return op(*inputs)


def gelu(op, x, *, approximate="none"):
    return op(x)


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


def slab(op, cache, update, start, *, axis):
    ranges = tuple((0, n) for n in update.shape)
    return op(cache, update, ranges=ranges, dyn_offset=(axis, start))


def appended(op, cache, update, start, *, axis):
    return op(cache, update, start, axis=axis)


def ring(op, cache, update, start, *, axis):
    return op(cache, update, start, axis=axis, modulus=cache.shape[axis])


def linear(*_, axis=-2, mode="linear"):
    return mode == "linear"


def circular(*_, **attributes):
    return not linear(**attributes)


# -- products ------------------------------------------------------------------------------


def product(op, a, b):
    y = op(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
    y = y[..., 0] if b.ndim == 1 else y
    return y[..., 0] if a.ndim == b.ndim == 1 else y[..., 0, :] if a.ndim == 1 else y


def gemm(op, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    y = alpha * op(a.T if transA else a, b.T if transB else b)
    return y if c is None else y + beta * c


def gemm_with_bias(op, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    a, b = alpha * (a.T if transA else a), b.T if transB else b
    bias = np.zeros(1, a.dtype) if c is None else beta * np.asarray(c)
    if bias.ndim == 2 and len(bias) > 1:  # one for each row
        return jax.vmap(op, (0, None, 0))(a[:, None], b, bias)[:, 0]
    return op(a, b, np.broadcast_to(bias.reshape(-1), b.shape[1:]))


def same(total, auto_pad):
    """Margins before and after of a given sum; the odd one at the side that the mode names."""
    few, many = total // 2, total - total // 2
    return (many, few) if auto_pad == "SAME_LOWER" else (few, many)


def conv(
    op,
    x,
    w,
    *,
    pads=(0, 0, 0, 0),
    strides=(1, 1),
    auto_pad="NOTSET",
    kernel_shape=None,
):
    if auto_pad != "NOTSET":
        sizes = zip(x.shape[2:], w.shape[2:], strides, strict=True)
        margins = [same(max(0, (-(-n // s) - 1) * s + k - n), auto_pad) for n, k, s in sizes]
        pads = [before for before, _ in margins] + [after for _, after in margins]
    before, after = tuple(pads[:2]), tuple(pads[2:])
    if before == after:
        return op(x, w, stride=strides, padding=before)
    margins = ((0, 0), (0, 0), *zip(before, after, strict=True))
    return op(np.pad(x, margins), w, stride=strides)


def conv_transpose(
    op,
    x,
    w,
    *,
    strides=(1, 1),
    dilations=(1, 1),
    group=1,
    pads=(0, 0, 0, 0),
    output_padding=(0, 0),
    output_shape=None,
    auto_pad="NOTSET",
    kernel_shape=None,
):
    if x.ndim == 3:  # one spatial axis: another of extent 1 beside it
        return conv_transpose(op, x[..., None], w[..., None])[..., 0]
    params = {"stride": strides, "dilation": dilations, "groups": group}
    if auto_pad != "NOTSET":
        output_shape = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if output_shape is None:
        before, after = tuple(pads[:2]), tuple(pads[2:])
        assert before == after
        return op(x, w, **params, padding=before, output_padding=output_padding)
    sizes = zip(x.shape[2:], w.shape[2:], strides, output_shape, strict=True)
    more = tuple(max(0, out - (n - 1) * s - k) for n, k, s, out in sizes)
    y = op(x, w, **params, output_padding=more)  # then what is too much is cut off
    (top, _), (left, _) = (
        same(n - out, auto_pad) for n, out in zip(y.shape[2:], output_shape, strict=True)
    )
    return y[:, :, top : top + output_shape[0], left : left + output_shape[1]]


def in_space(x, w, **_):
    return "three spatial axes: ours has two" if x.ndim == 5 else None


def causal_conv(op, x, w, bias=None, past=None, *, activation="none"):
    taps = w.shape[-1]
    past = np.zeros((*x.shape[:2], taps - 1), x.dtype) if past is None else past
    bias = np.zeros(len(w), x.dtype) if bias is None else bias
    whole = np.concatenate([past, x], -1)
    return op(whole, w, bias, use_silu=activation != "none"), whole[..., x.shape[-1] :]


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


# -- the table -----------------------------------------------------------------------------

ALONE = {
    **{"relu": "Relu", "neg": "Neg", "abs": "Abs", "sign": "Sign", "erf": "Erf", "sqrt": "Sqrt"},
    **{"recip": "Reciprocal", "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos"},
    **{"tanh": "Tanh", "sigmoid": "Sigmoid", "floor": "Floor", "ceil": "Ceil", "round": "Round"},
    **{"where": "Where", "copy": "Identity"},
}
PAIRS = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
COMPARED = {
    **{"eq": "Equal", "lt": "Less", "le": "LessOrEqual"},
    **{"gt": "Greater", "ge": "GreaterOrEqual"},
}

TABLE = [
    *(Row(op, node, alone, beyond=sequence) for op, node in ALONE.items()),
    Row("gelu", "Gelu", gelu, when=lambda x, *, approximate="none": approximate == "none"),
    Row("gelu_tanh", "Gelu", gelu, when=lambda x, *, approximate="none": approximate == "tanh"),
    Row("silu", "Swish", swish),
    Row("silu", "SwiGLU", swiglu),
    Row("clamp", "Clip", clipped, beyond=crossed),
    Row("powi", "Pow", by_integer, when=one_integer),
    *(Row(op, node, pairs) for op, node in PAIRS.items()),
    Row("add", "Sum", summed),
    Row("maximum", "Max", extreme),
    Row("minimum", "Min", extreme),
    Row("pow", "Pow", power),
    Row("rem", "Mod", remainder, beyond=truncated),
    *(Row(op, node, compared, beyond=strings) for op, node in COMPARED.items()),
    Row("cast", "Cast", cast, beyond=other_dtypes),
    Row("cast", "CastLike", cast_like, beyond=other_dtypes),
    Row("sum_reduce", "ReduceSum", reduced),
    Row("mean_reduce", "ReduceMean", reduced),
    Row("max_reduce", "ReduceMax", reduced),
    Row("min_reduce", "ReduceMin", reduced),
    Row("reduce_sum_to", "ReduceSum", reduced_to),
    Row("reduce_max_to", "ReduceMax", reduced_to),
    Row("mean_reduce", "Mean", averaged),
    Row("argmax_dim", "ArgMax", position),
    Row("argmin_dim", "ArgMin", position),
    Row("cumsum", "CumSum", running),
    Row("softmax_last_dim", "Softmax", along),
    Row("log_softmax_last_dim", "LogSoftmax", along),
    Row("rms_norm_last_dim", "RMSNormalization", normed),
    Row("layer_norm_last_dim", "LayerNormalization", layer_normed),
    Row("layer_norm_last_dim", "MeanVarianceNormalization", over_axes),
    Row("layer_norm_last_dim", "InstanceNormalization", over_groups),
    Row("layer_norm_last_dim", "GroupNormalization", over_groups),
    Row("concat", "Concat", joined),
    Row("pad", "Pad", padded, beyond=wrapped),
    Row("triu", "Trilu", triangle, when=lambda *_, upper=1: upper == 1),
    Row("tril", "Trilu", triangle, when=lambda *_, upper=1: upper == 0),
    Row("index_select", "Gather", taken),
    Row("index_select", "GatherND", taken_at),
    Row("gather", "GatherElements", picked),
    Row("gather", "NegativeLogLikelihoodLoss", likelihood),
    Row("scatter_add", "ScatterElements", added_at, beyond=another_reduction),
    Row("index_add", "ScatterND", rows_added, beyond=another_reduction),
    Row("nonzero_indices", "NonZero", not_zero),
    Row("write_slice", "TensorScatter", each_written(slab), when=linear),
    Row("write_slice_doff", "TensorScatter", each_written(appended), when=linear),
    Row("write_slice_rotating", "TensorScatter", each_written(ring), when=circular),
    Row("matmul", "MatMul", product),
    Row("matmul", "Gemm", gemm),
    Row("fused_linear", "Gemm", gemm_with_bias),
    Row("conv2d", "Conv", conv),
    Row("conv_transpose2d", "ConvTranspose", conv_transpose, beyond=in_space),
    Row("causal_conv1d", "CausalConvWithState", causal_conv),
    Row("fused_softmax_cross_entropy", "SoftmaxCrossEntropyLoss", cross_entropy),
    Row("rope", "RotaryEmbedding", sequences.rotary),
    Row("flash_attn", "Attention", sequences.attention, beyond=sequences.beyond_attention),
    Row("flash_attn", "FlexAttention", sequences.flex, beyond=sequences.beyond_flex),
    Row(
        "ssd_chunk_scan",
        "LinearAttention",
        sequences.linear_attention,
        when=sequences.decays_by_head,
        beyond=sequences.beyond_scan,
    ),
    Row(
        "selective_scan",
        "LinearAttention",
        sequences.linear_attention_by_key,
        when=sequences.decays_by_key,
    ),
]
TABLE += [
    dataclasses.replace(row, op=f"{row.op}_inplace")
    for row in TABLE
    if hasattr(fj, f"{row.op}_inplace")
]
