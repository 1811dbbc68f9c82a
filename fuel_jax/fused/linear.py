"""Matrix product with a bias row."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._op import Precision
from ..numerics import product_precision, wide, wide_dtype
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats

PRECISION = Precision(float32=3e-6)


def examples() -> Iterator[dict[str, Any]]:
    """A plain product, a batch of them, and a single element."""
    for batch, m, k, n in (((), 8, 16, 4), ((2,), 5, 7, 3), ((), 1, 1, 1)):
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        yield {"a": f32(*batch, m, k), "b": f32(*batch, k, n), "bias": f32(n)}


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent for the bias."""
    for example in examples():
        a, b = example["a"], example["b"]
        g = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), a.dtype)
        yield {"a": a, "b": b, "upstream": g}


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("da", "db", "dbias"),
    splits="*batch m n",
    matchable=False,
    examples=backward_examples,
)
def fused_linear_backward(
    a: Floats[Array, "*batch m k"],
    b: Floats[Array, "*batch k n"],
    upstream: Floats[Array, "*batch m n"],
) -> tuple[
    Floats[Array, "*batch m k"],
    Floats[Array, "*batch k n"],
    Floats[Array, " n"],
]:
    """Gradient of :func:`fused_linear`:  g @ bᵀ,  aᵀ @ g,  Σ g over the rows.

    Sums in float32 (float64 for float64 operands), each rounded once.

    Args:
        a: the forward's operand, ``[*batch, m, k]``.
        b: the forward's operand, ``[*batch, k, n]``.
        upstream: the cotangent ``g`` of the result, ``[*batch, m, n]``.

    Returns:
        The cotangents of ``a``, ``b`` and ``bias``.
    """
    # Products of half operands, not of a widened g: those would run without tensor cores.
    da = jnp.matmul(upstream, b.mT, precision=product_precision(a))
    db = jnp.matmul(a.mT, upstream, precision=product_precision(a))
    dbias = jnp.sum(wide(upstream), axis=tuple(range(upstream.ndim - 1)))
    return da, db, dbias.astype(a.dtype)


@fused_op(
    OpKind.FusedLinear,
    id=FusedOps.FUSED_LINEAR,
    family="Forward",
    precision=PRECISION,
    backward=fused_linear_backward,
    splits="*batch m n",
    examples=examples,
)
def fused_linear(
    a: Floats[Array, "*batch m k"], b: Floats[Array, "*batch k n"], bias: Floats[Array, " n"]
) -> Floats[Array, "*batch m n"]:
    """Matrix product and a bias added to every row:  a @ b + bias.

    Sums in float32 (float64 for float64 operands), rounded once after the bias is added.

    Args:
        a: ``[*batch, m, k]``.
        b: ``[*batch, k, n]``; the same leading axes, nothing is broadcast.
        bias: ``[n]``.

    Returns:
        ``[*batch, m, n]`` in the dtype of ``a``.
    """
    sums = jnp.matmul(a, b, precision=product_precision(a), preferred_element_type=wide_dtype(a))
    return (sums + wide(bias)).astype(a.dtype)


def with_one_inner_axis(a: Any, b: Any, bias: Any) -> Any:
    """The op, on operands whose inner axes are several."""
    return fused_linear(a.reshape(a.shape[0], -1), b.reshape(-1, b.shape[-1]), bias)


@fused_linear.spelling(
    axes={"a": "m *k", "b": "*k n", "bias": "n"}, call=with_one_inner_axis, needs=("total",)
)
def product_plus_bias(a, b, bias):
    """The weights in any layout, the axes of ``m``, ``k`` and ``n`` any number."""
    return jnp.tensordot(a, b, b.ndim - 1) + bias
