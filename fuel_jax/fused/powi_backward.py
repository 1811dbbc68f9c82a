"""Gradient of an integer power."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._op import Precision
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats


def examples() -> Iterator[dict[str, Any]]:
    """A cube, a reciprocal square, and the exponent whose power is constant."""
    x = np.linspace(0.8, 2.0, 33, dtype=np.float32).reshape(3, 11)
    for exponent in (3, -2, 0):
        yield {"x": x, "upstream": x[::-1].copy(), "exp": exponent}


def rejects(x: Any, upstream: Any, *, exp: int) -> str | None:
    """Exponents beyond I32."""
    if not -(2**31) <= exp < 2**31:
        return f"parameter 'exp' is {exp}; it must fit in I32."
    return None


@fused_op(
    OpKind.PowIElementwiseBackward,
    id=FusedOps.POWI_BACKWARD,
    family="Backward",
    precision=Precision(float32=2e-6),
    outputs=("dx",),
    splits="*shape",
    matchable=False,
    rejects=rejects,
    examples=examples,
)
def powi_backward(
    x: Floats[Array, "*shape"], upstream: Floats[Array, "*shape"], *, exp: int
) -> Floats[Array, "*shape"]:
    """Gradient of :func:`powi`:  upstream · n · xⁿ⁻¹;  0 for n = 0, also at x = 0.

    In float32 (float64 for float64 operands), rounded once.

    Args:
        x: the forward's operand, any shape.
        upstream: the cotangent of the result, like ``x``.
        exp: the exponent n, I32.

    Returns:
        The cotangent of ``x``, like ``x``.
    """
    if exp == 0:
        return jnp.zeros_like(x)
    v, g = wide(x), wide(upstream)
    return (g * (float(exp) * lax.integer_pow(v, exp - 1))).astype(x.dtype)
