"""RMS normalisation over the last axis, and its backward."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import norms as kernels

from .._op import Precision
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats

PRECISION = Precision(float32=2e-6)


def examples() -> Iterator[dict[str, Any]]:
    """A model's width, an awkward one, and a single element."""
    for shape in ((4, 512), (2, 3, 40), (1, 1)):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "eps": 1e-6}


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent.  (Of a single element the gradient all but cancels.)"""
    for shape in ((4, 512), (2, 3, 40)):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        yield {"x": x, "upstream": x, "eps": 1e-6}


def rejects(x: Any, *rest: Any, eps: float) -> str | None:
    """A negative or absent eps."""
    return None if eps >= 0 else f"parameter 'eps' is {eps}; it must be at least 0."


@fused_op(
    OpKind.RmsNormLastDimBackward,
    id=FusedOps.RMS_NORM_LAST_DIM_BACKWARD,
    family="Backward",
    splits="*batch",
    precision=PRECISION,
    outputs=("dx",),
    rejects=rejects,
    matchable=False,
    examples=backward_examples,
)
def rms_norm_last_dim_backward(
    x: Floats[Array, "*batch d"], upstream: Floats[Array, "*batch d"], *, eps: float = 1e-6
) -> Floats[Array, "*batch d"]:
    """Gradient of :func:`rms_norm_last_dim`:  r · (g − x · r² · mean(x·g)).

    r = 1/√(mean(x²) + eps).  Sums in float32 (float64 for float64 operands), rounded once.

    Args:
        x: the forward's operand, ``[*batch, d]``.
        upstream: the cotangent ``g`` of the result, like ``x``.
        eps: the forward's ``eps``.

    Returns:
        The cotangent of ``x``, like ``x``.
    """
    v, g = wide(x), wide(upstream)
    r = lax.rsqrt(jnp.mean(jnp.square(v), -1, keepdims=True) + eps)
    dx = r * (g - v * (jnp.square(r) * jnp.mean(v * g, -1, keepdims=True)))
    return dx.astype(x.dtype)


@fused_op(
    OpKind.RmsNormLastDim,
    id=FusedOps.RMS_NORM_LAST_DIM,
    family="Norm",
    splits="*batch",
    precision=PRECISION,
    backward=rms_norm_last_dim_backward,
    seed_backward="Fused(rms_norm_last_dim_backward)",
    rejects=rejects,
    examples=examples,
)
def rms_norm_last_dim(
    x: Floats[Array, "*batch d"], *, eps: float = 1e-6
) -> Floats[Array, "*batch d"]:
    """Divide each row by its root mean square:  x / √(mean(x²) + eps).

    Sums in float32 (float64 for float64 operands), rounded once.  No gain: multiply the result.

    Args:
        x: ``[*batch, d]``.
        eps: added to the mean square, at least 0.

    Returns:
        An array like ``x``.

    Raises:
        ShapeError: ``x`` is a scalar, or not of floats.
        ArgumentError: ``eps`` is negative.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4, without the gain.
    """
    v = wide(x)
    r = lax.rsqrt(jnp.mean(jnp.square(v), -1, keepdims=True) + eps)
    return (v * r).astype(x.dtype)


@rms_norm_last_dim.spelling(axes={"x": "*batch d"}, last="d")
def over_root_mean_square(x, *, eps: float):
    """``x / √(mean(x²) + eps)``; the gain, and whatever is cast in between, stays outside."""
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": kernels.refuses}
cuda |= {"tiles": kernels.tiles}
rms_norm_last_dim.kernel("triton", **cuda, declines=kernels.declines)(kernels.rms_norm)
rms_norm_last_dim_backward.kernel("triton", **cuda, declines=kernels.declines_gradient)(
    kernels.rms_norm_backward
)
