"""Backward of the maximum over broadcast axes."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._op import Precision
from .._rules import aligned
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..ops._extremes import attained, extreme
from ..ops.reduce import collapsed
from ..registry import fused_op
from ..types import Array, Floats


def examples() -> Iterator[dict[str, Any]]:
    """One axis kept as 1, leading axes dropped, and a scalar."""
    for shape, target in (((3, 37), (3, 1)), ((2, 3, 4), (4,)), ((), ())):
        yield {
            "x": jax.ShapeDtypeStruct(shape, jnp.float32),
            "upstream": jax.ShapeDtypeStruct(target, jnp.float32),
        }


def rejects(x: Any, upstream: Any) -> str | None:
    """A cotangent of something that x cannot be reduced to."""
    padded = (1,) * (x.ndim - upstream.ndim) + upstream.shape
    if upstream.ndim <= x.ndim and all(m in (1, n) for n, m in zip(x.shape, padded, strict=True)):
        return None
    return (
        f"'upstream' is {upstream.shape} and 'x' is {x.shape}; aligned at the last axis, each "
        f"extent must be that of x or 1. Pass the cotangent of reduce_max_to(x, shape=...)."
    )


@fused_op(
    OpKind.ReduceMaxToBackward,
    id=FusedOps.REDUCE_MAX_TO_BACKWARD,
    family="Backward",
    precision=Precision(float32=2e-6),
    outputs=("dx",),
    splits=aligned("", everywhere=True),
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def reduce_max_to_backward(
    x: Floats[Array, "*shape"], upstream: Floats[Array, "*target"]
) -> Floats[Array, "*shape"]:
    """Gradient of :func:`reduce_max_to`:  g / n where x is its window's maximum, else 0.

    The n elements that tie share the cotangent g equally; −0 and 0 tie.  In a window that holds
    NaN the maximum has no derivative, and all of it is NaN.  (Fuel gives 0 there if NaN comes
    first, and looks past it otherwise.)  Ties are counted exactly; the quotient is taken in float32
    (float64 for float64) and rounded once.

    Differentiable in ``upstream``; as a function of ``x`` it is constant between ties.

    Args:
        x: the forward's operand, any shape.
        upstream: the cotangent ``g``; its shape is the forward's ``shape``.

    Returns:
        The cotangent of ``x``, like ``x``.

    Raises:
        ArgumentError: ``x`` cannot be reduced to the shape of ``upstream``.
    """
    x = lax.stop_gradient(x)
    axes = collapsed(x.shape, upstream.shape)
    hit, count = attained(x, extreme(x, axes, True), axes, True)
    share = wide(upstream).reshape(count.shape) / count
    return jnp.where(hit, share, 0).astype(x.dtype)
