"""PyTorch's functions, answered by ops of ours: how ``test_torch.py`` calls them.

An adapter has the signature of the PyTorch function, and takes arrays where that takes tensors.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import fuel_jax as F

# What is judged here is the maths, and good code for it costs three quarters of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 12):  # which has no such option
    QUICKLY["xla_cpu_use_fusion_emitters"] = False


class OutOfReach(Exception):
    """A sample that asks for what our op does not have."""


# -- adapters ------------------------------------------------------------------------------


def broadcasting(op):
    """Our ops broadcast nothing."""
    return lambda a, b: op(*jnp.broadcast_arrays(a, b))


def scaled(op):
    return lambda a, b, alpha=1: broadcasting(op)(a, F.affine(b, mul=float(alpha), add=0.0))


def axes(x, dim):
    """PyTorch's ``dim`` as our ``dims``: a scalar has an axis 0, and () is all of them."""
    if dim in (None, ()) or x.ndim == 0:
        return tuple(range(x.ndim))
    return tuple(sorted(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)))


def reducing(op):
    def reduce(x, dim=None, keepdim=False):
        dims = axes(x, dim)
        y = op(x, dims=dims)
        return jnp.expand_dims(y, dims) if keepdim and x.ndim else y

    return reduce


def position(op):
    def arg(x, dim=None, keepdim=False):
        flat = x.reshape(-1) if dim is None or x.ndim == 0 else x
        y = op(flat, dim=0 if dim is None else dim)
        if x.ndim == 0:
            return y
        return jnp.expand_dims(y, axes(x, dim)) if keepdim else y

    return arg


def extreme(reduce, arg):
    def both(x, dim=None, keepdim=False):
        y = reducing(reduce)(x, dim, keepdim)
        return y if dim is None else (y, position(arg)(x, dim, keepdim))

    return both


def sum_to_size(x, *shape):
    return F.reduce_sum_to(x, shape=shape if isinstance(shape[0], int) else tuple(shape[0]))


def vectors(f):
    """A function that needs an axis, of a scalar too."""
    return lambda x, *args, **kwargs: f(jnp.atleast_1d(x), *args, **kwargs).reshape(x.shape)


def along(op):
    """An op over the last axis, over any."""

    @vectors
    def over(x, dim):
        return jnp.moveaxis(op(jnp.moveaxis(x, dim, -1)), -1, dim)

    return over


def softmax_backward(g, y, dim, dtype):
    last = lambda x: jnp.moveaxis(x, dim, -1)
    return jnp.moveaxis(F.softmax_last_dim_backward(last(y), last(g)), -1, dim)


@vectors
def cumsum(x, dim, dtype=None):
    return F.cumsum(x, dim=dim)


def clamp(x, min=None, max=None):
    """Bounds for each element: our ``clamp`` has two numbers."""
    for op, bound in ((F.maximum, min), (F.minimum, max)):
        if bound is not None:
            x = broadcasting(op)(x, F.cast(bound, dtype=x.dtype))
    return x


def hardtanh(x, min_val=-1.0, max_val=1.0):
    return F.clamp(x, min=min_val, max=max_val)


def gelu(x, approximate):
    return (F.gelu_tanh if approximate == "tanh" else F.gelu)(x)


def heaviside(x, at_zero):
    x, at_zero = jnp.broadcast_arrays(x, at_zero)
    return F.where(F.eq(x, jnp.zeros_like(x)), at_zero, F.step(x))


def where(a, cond, b):
    """OpInfo has the method's order."""
    return F.where(*jnp.broadcast_arrays(cond, a, b))


def masked_fill(x, mask, value):
    x, mask = jnp.broadcast_arrays(x, mask)
    if isinstance(value, int):
        return F.masked_fill(x, mask, value=value)
    return F.where(mask, jnp.broadcast_to(value, x.shape), x)


def flip(x, dims):
    for dim in dims:
        x = F.flip(x, dim=dim)
    return x


def roll(x, shifts, dims=None):
    if dims is None:
        return F.roll(x.reshape(-1), dim=0, shift=shifts).reshape(x.shape)
    pairs = zip(shifts, dims, strict=True) if isinstance(dims, tuple) else [(shifts, dims)]
    for shift, dim in pairs:
        x = F.roll(x, dim=dim, shift=shift)
    return x


def cat(arrays, dim=0):
    if any(x.ndim != arrays[0].ndim for x in arrays):
        raise OutOfReach("an empty vector beside matrices")
    return F.concat(*arrays, dim=dim)


def pad(x, pad, mode="constant", value=None):
    """Margins from the last axis on; negative ones cut off what would be there."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode == "circular":
        raise OutOfReach("mode 'circular'")
    margins = tuple((max(a, 0), max(b, 0)) for a, b in pairs)
    y = F.pad(x, padding=margins, mode=mode, **({} if value is None else {"value": value}))
    cut = (slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pairs, y.shape, strict=True))
    return y[tuple(cut)]


@vectors
def index_add(x, dim, index, src, alpha):
    return F.index_add(x, index, F.affine(jnp.atleast_1d(src), mul=float(alpha), add=0.0), dim=dim)


@vectors
def scatter_add(x, dim, index, src):
    return F.scatter_add(x, jnp.atleast_1d(index), jnp.atleast_1d(src), dim=dim)


def index_select(x, dim, index):
    y = F.index_select(jnp.atleast_1d(x), index, dim=dim)
    return y.reshape(()) if x.ndim == 0 else y


def gather(x, dim, index):
    if x.ndim and index.ndim != x.ndim:
        raise OutOfReach("indices of another rank")
    return F.gather(jnp.atleast_1d(x), jnp.atleast_1d(index), dim=dim).reshape(index.shape)


def take_along_dim(x, index, dim=None):
    """Negative indices are out of range here: PyTorch's count from the end."""
    index = jnp.where(index < 0, index + (x.size if dim is None else x.shape[dim]), index)
    if dim is None:
        x, index, dim = x.reshape(-1), index.reshape(-1), 0
    shape = np.broadcast_shapes(*(np.delete(a.shape, dim) for a in (x, index)))
    whole = lambda a: jnp.broadcast_to(a, (*shape[:dim], a.shape[dim], *shape[dim:]))
    return F.gather(whole(x), whole(index), dim=dim)


def embedding(table, index):
    return F.index_select(table, index.reshape(-1), dim=0).reshape(*index.shape, -1)


def nonzero(x, as_tuple=False):
    flat, count = F.nonzero_indices(x)
    found = np.unravel_index(np.asarray(flat)[: int(count[0])], x.shape or (1,))
    found = found if x.ndim or as_tuple else ()
    return tuple(found) if as_tuple else np.stack(found, 1) if found else np.zeros((count[0], 0))


def matmul(a, b):
    """Vectors as PyTorch has them: a row on the left, a column on the right."""
    y = F.matmul(jnp.atleast_2d(a), b[:, None] if b.ndim == 1 else b)
    dropped = [axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1]
    return jnp.squeeze(y, tuple(dropped))


def linear(x, w, bias=None):
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = F.matmul(rows, w.T) if bias is None else F.fused_linear(rows, w.T, bias)
    return y.reshape(*x.shape[:-1], w.shape[0])


def convolution(op, rank):
    """Of one or two axes, with or without a batch."""

    def convolve(x, w, bias=None, stride=1, padding=0, dilation=1, **rest):
        every = lambda v: (v,) * rank if isinstance(v, int) else v
        lift = lambda v, neutral: (neutral,) * (2 - rank) + every(v)
        if padding == "valid":
            padding = 0
        stride, dilation = lift(stride, 1), lift(dilation, 1)
        batched = x if x.ndim == rank + 2 else x[None]
        if rank == 1:
            batched, w = batched[:, :, None], w[:, :, None]
        if padding == "same":  # more at the end where the sum is odd
            spans = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
            margins = tuple((s // 2, s - s // 2) for s in spans)
            batched, padding = F.pad(batched, padding=((0, 0), (0, 0), *margins)), 0
        if "output_padding" in rest:
            rest["output_padding"] = lift(rest["output_padding"], 0)
        y = op(batched, w, bias, stride=stride, padding=lift(padding, 0), dilation=dilation, **rest)
        y = y[:, :, 0] if rank == 1 else y
        return y if x.ndim == rank + 2 else y[0]

    return convolve


def norm(op):
    """Over several axes, with gain and bias."""

    def normalise(x, shape, gain=None, bias=None, eps=None):
        eps = {None: {}}.get(eps, {"eps": eps})
        if op is F.rms_norm_last_dim and not eps:
            eps = {"eps": float(jnp.finfo(x.dtype).eps)}  # PyTorch's default
        if eps and eps["eps"] < 0:
            raise OutOfReach("a negative eps")
        y = op(x.reshape(*x.shape[: x.ndim - len(shape)], math.prod(shape)), **eps).reshape(x.shape)
        y = y if gain is None else y * gain
        return y if bias is None else y + bias

    return normalise


def native_layer_norm(x, shape, gain, bias, eps):
    return norm(F.layer_norm_last_dim)(x, shape, gain, bias, eps)


def cross_entropy(x, target, weight=None, ignore_index=-100, reduction="mean"):
    """Classes on axis 1; weights multiply the losses of each row."""
    if jnp.issubdtype(target.dtype, jnp.floating):
        raise OutOfReach("targets that are probabilities")
    call = functools.partial(
        F.fused_softmax_cross_entropy, jnp.moveaxis(x, 1, -1), target, ignore_index=ignore_index
    )
    if weight is None:
        return call(reduction=reduction)
    share = F.index_select(weight, target.reshape(-1), dim=0).reshape(target.shape)
    losses = call(reduction="none").astype(share.dtype) * share
    if reduction == "none":
        return losses
    return losses.sum() / (share.sum() if reduction == "mean" else 1)


def attention(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0):
    """PyTorch's causal mask starts at the top left, ours ends at the bottom right.

    Of fewer queries than keys it shows only the first keys, which a ``k_len`` says as well.
    """
    if dropout_p:
        raise OutOfReach("dropout")
    if attn_mask is not None:
        raise OutOfReach("a bias on the scores")
    heads = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (jnp.broadcast_to(x, heads + x.shape[-2:]) for x in (q, k, v))
    single = q.ndim == 3
    q, k, v = (x[None] if single else x for x in (q, k, v))
    k_len = q.shape[2] if is_causal else None
    y = F.flash_attn(q, k, v, None, k_len, causal=is_causal)
    return y[0] if single else y


def casting(dtype):
    def to(x, memory_format=None):
        if dtype == "U8":  # negative numbers saturate in one step, and wrap in two
            x = F.cast(x, dtype="I64")
        return F.cast(x, dtype=dtype)

    return to


# -- the table -----------------------------------------------------------------------------

# OpInfo's name -> the op under test, whose precision is the bound, and how to call it.
ADAPTERS = {
    name: (op, op)
    for name, op in {
        "abs": F.abs, "neg": F.neg, "square": F.sqr, "sqrt": F.sqrt, "reciprocal": F.recip,
        "tanh": F.tanh, "exp": F.exp, "log": F.log, "sin": F.sin, "cos": F.cos, "erf": F.erf,
        "sigmoid": F.sigmoid, "rsqrt": F.rsqrt, "floor": F.floor, "ceil": F.ceil,
        "round": F.round, "sign": F.sign, "clone": F.copy,
        "nn.functional.relu": F.relu, "nn.functional.silu": F.silu,
    }.items()
}  # fmt: skip
ADAPTERS |= {
    name: (op, broadcasting(op))
    for name, op in {
        "mul": F.mul, "div.no_rounding_mode": F.div, "pow": F.pow, "remainder": F.rem,
        "maximum": F.maximum, "minimum": F.minimum, "clamp_min": F.maximum, "clamp_max": F.minimum,
        "eq": F.eq, "ne": F.ne, "lt": F.lt, "le": F.le, "gt": F.gt, "ge": F.ge,
    }.items()
}  # fmt: skip
ADAPTERS |= {
    "add": (F.add, scaled(F.add)),
    "sub": (F.sub, scaled(F.sub)),
    "round.decimals_0": (F.round, lambda x, decimals: F.round(x)),
    "nn.functional.gelu": (F.gelu, gelu),
    "nn.functional.hardtanh": (F.clamp, hardtanh),
    "nn.functional.relu6": (F.clamp, lambda x: F.clamp(x, min=0.0, max=6.0)),
    "clamp": (F.maximum, clamp),
    "heaviside": (F.step, heaviside),
    "where": (F.where, where),
    "masked_fill": (F.masked_fill, masked_fill),
    "sum": (F.sum_reduce, reducing(F.sum_reduce)),
    "mean": (F.mean_reduce, reducing(F.mean_reduce)),
    "amax": (F.max_reduce, reducing(F.max_reduce)),
    "amin": (F.min_reduce, reducing(F.min_reduce)),
    "max.reduction_no_dim": (F.max_reduce, reducing(F.max_reduce)),
    "min.reduction_no_dim": (F.min_reduce, reducing(F.min_reduce)),
    "max.reduction_with_dim": (F.max_reduce, extreme(F.max_reduce, F.argmax_dim)),
    "min.reduction_with_dim": (F.min_reduce, extreme(F.min_reduce, F.argmin_dim)),
    "sum_to_size": (F.reduce_sum_to, sum_to_size),
    "argmax": (F.argmax_dim, position(F.argmax_dim)),
    "argmin": (F.argmin_dim, position(F.argmin_dim)),
    "cumsum": (F.cumsum, cumsum),
    "softmax": (F.softmax_last_dim, along(F.softmax_last_dim)),
    "log_softmax": (F.log_softmax_last_dim, along(F.log_softmax_last_dim)),
    "_softmax_backward_data": (F.softmax_last_dim_backward, softmax_backward),
    "nn.functional.layer_norm": (F.layer_norm_last_dim, norm(F.layer_norm_last_dim)),
    "native_layer_norm": (F.layer_norm_last_dim, native_layer_norm),
    "nn.functional.rms_norm": (F.rms_norm_last_dim, norm(F.rms_norm_last_dim)),
    "nn.functional.cross_entropy": (F.fused_softmax_cross_entropy, cross_entropy),
    "nn.functional.scaled_dot_product_attention": (F.flash_attn, attention),
    "nn.functional.linear": (F.fused_linear, linear),
    "matmul": (F.matmul, matmul),
    "mm": (F.matmul, F.matmul),
    "bmm": (F.matmul, F.matmul),
    "nn.functional.conv1d": (F.conv2d, convolution(F.conv2d, 1)),
    "nn.functional.conv2d": (F.conv2d, convolution(F.conv2d, 2)),
    "nn.functional.conv_transpose1d": (F.conv_transpose2d, convolution(F.conv_transpose2d, 1)),
    "nn.functional.conv_transpose2d": (F.conv_transpose2d, convolution(F.conv_transpose2d, 2)),
    "nn.functional.pad.constant": (F.pad, pad),
    "nn.functional.pad.reflect": (F.pad, pad),
    "nn.functional.pad.replicate": (F.pad, pad),
    "nn.functional.pad.replicate_negative": (F.pad, pad),
    "nn.functional.pad.circular": (F.pad, pad),
    "triu": (F.triu, lambda x, diagonal=0: F.triu(x, diagonal=diagonal)),
    "tril": (F.tril, lambda x, diagonal=0: F.tril(x, diagonal=diagonal)),
    "cat": (F.concat, cat),
    "flip": (F.flip, flip),
    "roll": (F.roll, roll),
    "index_select": (F.index_select, index_select),
    "nn.functional.embedding": (F.index_select, embedding),
    "gather": (F.gather, gather),
    "take_along_dim": (F.gather, take_along_dim),
    "index_add": (F.index_add, index_add),
    "scatter_add": (F.scatter_add, scatter_add),
    "nonzero": (F.nonzero_indices, nonzero),
    "argwhere": (F.nonzero_indices, nonzero),
}
ADAPTERS |= {
    name: (F.cast, casting(dtype))
    for name, dtype in {
        "bfloat16": "BF16", "half": "F16", "float": "F32", "double": "F64", "char": "I8",
        "byte": "U8", "short": "I16", "int": "I32", "long": "I64", "bool": "bool",
    }.items()
}  # fmt: skip
