"""Softmax and log-softmax over the last axis, and their backwards."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import softmax as kernels

from .._op import Precision
from ..numerics import exp_below_max, uncontracted, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats
from ._rows import TOGETHER, Rows, Some, sums, taken_together, tiles

PRECISION = Precision(float32=2e-6)


def examples() -> Iterator[dict[str, Any]]:
    """A vocabulary row, attention scores, and a single element."""
    for shape in ((2, 300), (2, 3, 5, 8), (1, 1)):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}


def backward_examples() -> Iterator[dict[str, Any]]:
    """A result and its cotangent."""
    for shape in ((2, 3, 5, 8), (1, 1)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        yield {"y": x, "upstream": x}


@fused_op(
    OpKind.SoftmaxLastDimBackward,
    id=FusedOps.SOFTMAX_LAST_DIM_BACKWARD,
    family="Backward",
    precision=PRECISION,
    outputs=("dx",),
    splits="*batch",
    matchable=False,
    examples=backward_examples,
)
def softmax_last_dim_backward(
    y: Floats[Array, "*batch n"], upstream: Floats[Array, "*batch n"]
) -> Floats[Array, "*batch n"]:
    """Gradient of :func:`softmax_last_dim`:  y · (g − Σ y·g).

    Sums in float32 (float64 for float64 operands), rounded once.

    Args:
        y: the forward's result, ``[*batch, n]``.
        upstream: the cotangent ``g`` of ``y``, like ``y``.

    Returns:
        The cotangent of ``x``, like ``y``.
    """
    p, g = wide(y), wide(upstream)
    return (p * (g - jnp.sum(p * g, -1, keepdims=True))).astype(y.dtype)


@fused_op(
    OpKind.SoftmaxLastDim,
    id=FusedOps.SOFTMAX_LAST_DIM,
    family="Forward",
    precision=PRECISION,
    backward=softmax_last_dim_backward,
    splits="*batch",
    seed_backward="Fused(softmax_last_dim_backward)",
    examples=examples,
)
def softmax_last_dim(x: Floats[Array, "*batch n"]) -> Floats[Array, "*batch n"]:
    """Exponentials normalised over the last axis:  eˣ / Σ eˣ.

    In float32 (float64 for float64 operands), rounded once.  A finite row sums to 1 however large
    its elements, under ``jit`` as well; a row of −inf, or one holding inf or NaN, is NaN.

    Args:
        x: ``[*batch, n]``.

    Returns:
        An array like ``x``.
    """
    e, _ = exp_below_max(wide(x))
    return (e * (1 / jnp.sum(e, -1, keepdims=True))).astype(x.dtype)


@softmax_last_dim.spelling(axes={"x": "*batch n"}, last="n")
def below_the_maximum(x):
    """As in every textbook, and in ``jax.nn.softmax``."""
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


@softmax_last_dim.spelling(
    axes={"x": "*batch n"}, why_not="no maximum is subtracted: it overflows where the op does not"
)
def without_the_maximum(x):
    """Means the same for small x only."""
    e = jnp.exp(x)
    return e / jnp.sum(e, -1, keepdims=True)


@softmax_last_dim.spelling(axes={"x": "*batch n"}, last="n")
def by_log_softmax(x):
    """``exp(log_softmax(x))``."""
    return jnp.exp(jax.nn.log_softmax(x))


@softmax_last_dim.spelling(axes={"x": "*batch n"}, last="n")
def by_logsumexp(x):
    """``exp(x − logsumexp(x))``."""
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))


@fused_op(
    OpKind.LogSoftmaxLastDimBackward,
    family="Backward",
    precision=PRECISION,
    outputs=("dx",),
    splits="*batch",
    matchable=False,
    examples=backward_examples,
)
def log_softmax_last_dim_backward(
    y: Floats[Array, "*batch n"], upstream: Floats[Array, "*batch n"]
) -> Floats[Array, "*batch n"]:
    """Gradient of :func:`log_softmax_last_dim`:  g − eʸ · Σ g.

    Sums in float32 (float64 for float64 operands), rounded once.

    Args:
        y: the forward's result, ``[*batch, n]``.
        upstream: the cotangent ``g`` of ``y``, like ``y``.

    Returns:
        The cotangent of ``x``, like ``y``.
    """
    g = wide(upstream)
    return (g - jnp.exp(wide(y)) * jnp.sum(g, -1, keepdims=True)).astype(y.dtype)


# Its gradient is the body's, from x: XLA shares the exponential with the forward, which it cannot
# when only y is kept (measured 1.2 to 1.4 times slower), and a half-precision y has lost digits.
@fused_op(
    OpKind.LogSoftmaxLastDim,
    family="Forward",
    precision=PRECISION,
    backward="decompose",
    splits="*batch",
    examples=examples,
)
def log_softmax_last_dim(x: Floats[Array, "*batch n"]) -> Floats[Array, "*batch n"]:
    """Logarithm of the softmax over the last axis:  x − max − ln Σ exp(x − max).

    In float32 (float64 for float64 operands), rounded once.  A row of −inf, or one holding inf or
    NaN, is NaN.

    Args:
        x: ``[*batch, n]``.

    Returns:
        An array like ``x``.
    """
    v = wide(x)
    e, m = exp_below_max(v)
    return (uncontracted(v) - m - jnp.log(jnp.sum(e, -1, keepdims=True))).astype(x.dtype)


@log_softmax_last_dim.kernel("rows", platforms=("cpu",), declines=taken_together, tiles=tiles)
def log_softmax_by_rows(x, *, tile=Some(TOGETHER)):
    """A few rows at a time, then the differences: no exponential is stored."""
    if x.size == 0:
        return x
    m, total = (y.reshape(*x.shape[:-1], 1) for y in Rows(x, *tile).map(sums))
    return (uncontracted(wide(x)) - m - jnp.log(total)).astype(x.dtype)


@log_softmax_last_dim.spelling(axes={"x": "*batch n"}, last="n")
def shifted(x):
    """As in ``jax.nn.log_softmax``: what is exponentiated is kept."""
    return jax.nn.log_softmax(x)


@log_softmax_last_dim.spelling(axes={"x": "*batch n"}, last="n")
def less_logsumexp(x):
    """``x − logsumexp(x)``."""
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": kernels.refuses}
cuda |= {"tiles": kernels.tiles}
softmax_last_dim.kernel("triton", **cuda, declines=kernels.declines)(kernels.softmax)
softmax_last_dim_backward.kernel("triton", **cuda, declines=kernels.declines_gradient)(
    kernels.softmax_backward
)
log_softmax_last_dim.kernel("triton", **cuda, declines=kernels.declines)(kernels.log_softmax)
log_softmax_last_dim_backward.kernel("triton", **cuda, declines=kernels.declines_gradient)(
    kernels.log_softmax_backward
)
