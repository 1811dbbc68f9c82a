"""Layer normalisation over the last axis, and its backward."""

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
    """A model's width, and an awkward one."""
    for shape in ((4, 512), (2, 3, 40)):
        yield {"x": jax.ShapeDtypeStruct(shape, jnp.float32), "eps": 1e-5}


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent."""
    for example in examples():
        yield example | {"upstream": example["x"]}


def rejects(x: Any, *rest: Any, eps: float) -> str | None:
    """A negative eps, or one that is no number."""
    return None if eps >= 0 else f"parameter 'eps' is {eps}; it must be at least 0. Pass 1e-5."


def centred(x: Array, eps: float) -> tuple[Array, Array]:
    """x − mean, and 1/√(variance + eps), of each row; the variance in a second pass.

    Of sums and products only, each used where XLA's CPU backend can put it into one fusion: an
    array of the size of x in between costs more than both passes.
    """
    d = wide(x)
    d = d - jnp.mean(d, -1, keepdims=True)
    d = d - jnp.mean(d, -1, keepdims=True)  # a mean of 1e4 was rounded by 1e-3
    return d, lax.rsqrt(jnp.mean(jnp.square(d), -1, keepdims=True) + eps)


def slope(d: Array, r: Array, g: Array) -> Array:
    """The gradient, of what ``centred`` returns and a cotangent."""
    g = g - jnp.mean(g, -1, keepdims=True)
    return r * (g - d * (jnp.square(r) * jnp.mean(g * d, -1, keepdims=True)))


@fused_op(
    OpKind.LayerNormLastDimBackward,
    id=FusedOps.LAYER_NORM_LAST_DIM_BACKWARD,
    family="Backward",
    splits="*batch",
    precision=PRECISION,
    outputs=("dx",),
    rejects=rejects,
    matchable=False,
    examples=backward_examples,
)
def layer_norm_last_dim_backward(
    x: Floats[Array, "*batch d"], upstream: Floats[Array, "*batch d"], *, eps: float = 1e-5
) -> Floats[Array, "*batch d"]:
    """Gradient of :func:`layer_norm_last_dim`:  r · (g − mean(g) − y · mean(g·y)).

    y is the forward's result, r = 1/√(variance + eps).  Sums in float32 (float64 for float64
    operands), rounded once.

    Args:
        x: the forward's operand, ``[*batch, d]``.
        upstream: the cotangent ``g`` of the result, like ``x``.
        eps: the forward's ``eps``.

    Returns:
        The cotangent of ``x``, like ``x``.
    """
    return slope(*centred(x, eps), wide(upstream)).astype(x.dtype)


@fused_op(
    OpKind.LayerNormLastDim,
    id=FusedOps.LAYER_NORM_LAST_DIM,
    family="Norm",
    splits="*batch",
    precision=PRECISION,
    backward=layer_norm_last_dim_backward,
    seed_backward="Fused(layer_norm_last_dim_backward)",
    rejects=rejects,
    examples=examples,
)
def layer_norm_last_dim(
    x: Floats[Array, "*batch d"], *, eps: float = 1e-5
) -> Floats[Array, "*batch d"]:
    """Subtract each row's mean, divide by its deviation:  (x − mean(x)) / √(variance + eps).

    The variance is mean((x − mean(x))²), in a second pass over the row: rows like 10⁴ + noise keep
    theirs.  Sums in float32 (float64 for float64 operands), rounded once.  No gain or bias: apply
    them to the result.

    Args:
        x: ``[*batch, d]``.
        eps: added to the variance, at least 0.

    Returns:
        An array like ``x``.

    Raises:
        ShapeError: ``x`` is a scalar, or not of floats.
        ArgumentError: ``eps`` is negative.

    Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 3, without gain and bias.
    """
    d, r = centred(x, eps)
    return (d * r).astype(x.dtype)


@layer_norm_last_dim.spelling(axes={"x": "*batch d"}, last="d")
def in_two_passes(x, *, eps: float):
    """With the variance of what is left when the mean is gone, as ``jnp.var``."""
    d = x - jnp.mean(x, -1, keepdims=True)
    return d / jnp.sqrt(jnp.mean(jnp.square(d), -1, keepdims=True) + eps)


@layer_norm_last_dim.spelling(
    axes={"x": "*batch d"},
    last="d",
    variants=({"clipped": True}, {"clipped": False}),
    call=lambda x, eps, clipped: layer_norm_last_dim(x, eps=eps),
)
def in_one_pass(x, *, eps: float, clipped):
    """With mean(x²) − mean(x)², as Flax and ``jax.nn.standardize``."""
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean)
    if clipped:
        variance = jnp.maximum(variance, 0)
    return (x - mean) / jnp.sqrt(variance + eps)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": kernels.refuses}
cuda |= {"tiles": kernels.tiles}
layer_norm_last_dim.kernel("triton", **cuda, declines=kernels.declines_layer)(kernels.layer_norm)
layer_norm_last_dim_backward.kernel("triton", **cuda, declines=kernels.declines_layer_gradient)(
    kernels.layer_norm_backward
)


def centred_together(x: Array, eps: float) -> tuple[Array, Array]:
    """As ``centred``, with what the mean lost and the variance in one pass.

    So XLA makes one kernel of three passes and not of four: 138 µs, not 159, on an H200 at
    [16384, 8192] bfloat16, and 147, not 168, with a gain and a bias; on a CPU 0.82 of the time at
    [2, 50257] float32.
    """
    v = wide(x)
    d = v - jnp.mean(v, -1, keepdims=True)
    left = jnp.mean(d, -1, keepdims=True)
    square = jnp.mean(jnp.square(d), -1, keepdims=True)
    # Below inf, for the mean square may be that; and in a row of one number what is left is a
    # rounding error, which may be negative.  XLA's CPU backend fuses what reads ``square`` once.
    variance = square - jnp.minimum(jnp.square(left), jnp.finfo(v.dtype).max)
    return d - left, lax.rsqrt(jnp.maximum(variance, 0) + eps)


@layer_norm_last_dim.kernel("three_passes", platforms=("cuda", "cpu"))
def in_three_passes(x, *, eps, interpret=False):
    """By ``centred_together``."""
    d, r = centred_together(x, eps)
    return (d * r).astype(x.dtype)


@layer_norm_last_dim_backward.kernel("three_passes", platforms=("cuda",))
def backward_in_three_passes(x, upstream, *, eps, interpret=False):
    """By ``centred_together``."""
    return slope(*centred_together(x, eps), wide(upstream)).astype(x.dtype)
