"""How a PyTorch user would write each op, in eager mode.  Absent: what PyTorch has no word for."""

from __future__ import annotations

import os
from typing import Any

# PyTorch's threads would spin for 10 ms when it is done, on the cores of the program whose turn is
# next.  This is 0.1 ms: enough from one of its own runs to the next.  Read when libgomp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import jax
import numpy as np
import torch
import torch.nn.functional as F

aten = torch.ops.aten


def mask(f):
    """A comparison as a mask."""
    return lambda a, b: f(a, b).to(torch.uint8)


def pulled(f):
    """The gradient of a function of its first operand, given the cotangent."""

    def gradient(x, g, **params):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = f(x, **params)
        return torch.autograd.grad(y, x, g)[0]

    return gradient


def rms_norm(x, *, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def layer_norm(x, *, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def rope(x, cos, sin):
    lo, hi = x.chunk(2, -1)
    return x * cos + torch.cat([-hi, lo], -1) * sin


def attention(q, k, v, *, causal=False):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def paged(q, k_cache, v_cache, table, lengths):
    k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    ends = lengths[:, None] - torch.arange(q.shape[2]).flip(0)
    seen = torch.arange(k.shape[2]) < ends[..., None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], enable_gqa=q.shape[1] != k.shape[1]
    )


def written(dest, src, where):
    """A copy of dest with rows replaced."""
    return dest.index_copy(0, where, src)


def pad(x, *, padding):
    return F.pad(x, [width for pair in reversed(padding) for width in pair])


def write_slice(dest, src, *, ranges):
    dest = dest.clone()
    dest[tuple(slice(*r) for r in ranges)] = src
    return dest


def causal_conv1d(x, w, bias, *, use_silu=False):
    y = F.conv1d(x, w, bias, groups=x.shape[1])
    return F.silu(y) if use_silu else y


TORCH: dict[str, Any] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "sqr": torch.square,
    "sqrt": torch.sqrt,
    "recip": torch.reciprocal,
    "abs": torch.abs,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "step": lambda x: (x > 0).to(x.dtype),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "sign": torch.sign,
    "erf": torch.erf,
    "rsqrt": torch.rsqrt,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "rem": torch.remainder,
    "eq": mask(torch.eq),
    "ne": mask(torch.ne),
    "lt": mask(torch.lt),
    "le": mask(torch.le),
    "gt": mask(torch.gt),
    "ge": mask(torch.ge),
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "affine": lambda x, *, mul, add: x * mul + add,
    "inplace_affine": lambda x, *, mul, add: x * mul + add,
    "clamp": lambda x, *, min, max: torch.clamp(x, min, max),
    "powi": lambda x, *, exp: x**exp,
    "powi_backward": lambda x, g, *, exp: exp * x ** (exp - 1) * g,
    "cast": lambda x, *, dtype: x.to(getattr(torch, dtype)),
    "masked_fill": lambda x, m, *, value: x.masked_fill(m != 0, value),
    "copy": torch.clone,
    "sum_reduce": lambda x, *, dims: x.sum(dims),
    "max_reduce": lambda x, *, dims: x.amax(dims),
    "min_reduce": lambda x, *, dims: x.amin(dims),
    "mean_reduce": lambda x, *, dims: x.mean(dims),
    "reduce_sum_to": lambda x, *, shape: x.sum(0, keepdim=True),
    "reduce_max_to": lambda x, *, shape: x.amax(1, keepdim=True),
    "reduce_max_to_backward": pulled(lambda x: x.amax(1, keepdim=True)),
    "argmax_dim": torch.argmax,
    "argmin_dim": torch.argmin,
    "cumsum": torch.cumsum,
    "flip": lambda x, *, dim: torch.flip(x, (dim,)),
    "roll": lambda x, *, dim, shift: torch.roll(x, shift, dim),
    "pad": pad,
    "pad_backward": lambda g, *, padding: g[1:-2, 3:-4].clone(),
    "triu": torch.triu,
    "tril": torch.tril,
    "concat": lambda *xs, dim: torch.cat(xs, dim),
    "index_select": lambda x, i, *, dim: torch.index_select(x, dim, i),
    "gather": lambda x, i, *, dim: torch.gather(x, dim, i),
    "index_add": lambda x, i, s, *, dim: torch.index_add(x, dim, i, s),
    "scatter_add": lambda x, i, s, *, dim: torch.scatter_add(x, dim, i, s),
    "nonzero_indices": torch.nonzero,
    "write_slice": write_slice,
    "write_slice_doff": lambda d, s, o, *, axis: written(d, s, o + torch.arange(len(s))),
    "write_slice_rotating": lambda d, s, p, *, axis, modulus: written(
        d, s, (p + torch.arange(len(s))) % modulus
    ),
    "matmul": torch.matmul,
    "fused_linear": lambda a, b, bias: torch.addmm(bias, a, b),
    "conv2d": F.conv2d,
    "conv_transpose2d": F.conv_transpose2d,
    "causal_conv1d": causal_conv1d,
    "softmax_last_dim": lambda x: torch.softmax(x, -1),
    "softmax_last_dim_backward": lambda y, g: aten._softmax_backward_data(g, y, -1, y.dtype),
    "log_softmax_last_dim": lambda x: torch.log_softmax(x, -1),
    "log_softmax_last_dim_backward": lambda y, g: aten._log_softmax_backward_data(
        g, y, -1, y.dtype
    ),
    "rms_norm_last_dim": rms_norm,
    "rms_norm_last_dim_backward": pulled(rms_norm),
    "layer_norm_last_dim": layer_norm,
    "layer_norm_last_dim_backward": pulled(layer_norm),
    "rope": rope,
    "flash_attn": attention,
    "paged_attn": paged,
    "fused_softmax_cross_entropy": lambda logits, targets: F.cross_entropy(logits, targets),
}

# Eager PyTorch has no product with these weights on the CPU.  Its peer is one token through a layer
# of float32 weights [n, k], which is what the quantised one replaces.
DENSE = frozenset({"qmatmul", "nf4_matmul", "awq_matmul"})

# Autograd keeps no graph through the backward functions, nor through a comparison.
FORWARD_ONLY = frozenset({"step", *(op for op in TORCH if op.endswith("_backward"))}) | DENSE


def tensor(x) -> torch.Tensor:
    """A copy of a JAX array; indices as PyTorch wants them."""
    x = np.asarray(x)
    if x.dtype == np.uint32:
        return torch.tensor(x.astype(np.int64))
    if x.dtype.name == "bfloat16":
        return torch.tensor(x.astype(np.float32)).bfloat16()
    return torch.tensor(x)


def program(case):
    """What runs the case in PyTorch, or None."""
    torch.set_num_threads(os.cpu_count() or 1)
    op = case.label.split()[0]
    if op not in TORCH or (case.at and op in FORWARD_ONLY):
        return None
    f = case.given(TORCH[op])
    tensors = [tensor(x) for x in case.arrays]
    if op in DENSE:
        x = tensors[0]
        if x.shape[0] > 1:
            return None
        n = jax.eval_shape(case.given(case.op), *case.arrays).shape[-1]
        f, tensors = F.linear, [x, torch.randn(n, x.shape[1])]
    if not case.at:

        def forward():
            with torch.inference_mode():
                return f(*tensors)

        return forward
    wrt = [tensors[i].requires_grad_() for i in case.at]
    cotangent = tensor(case.cotangents)

    def gradient():
        value = f(*tensors)
        return value, torch.autograd.grad(value, wrt, cotangent)

    return gradient
