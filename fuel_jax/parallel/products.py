"""Matrix products whose inner axis is split."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fused.linear import fused_linear_backward
from ..numerics import product_precision, vary_alike, wide, wide_dtype
from ..types import Array


def row_linear(a: Array, b: Array, bias: Array, *, axis: str) -> Array:
    """:func:`fuel_jax.fused_linear` with k split over a mesh axis:  Σ over devices a·b, + bias.

    The second product of a layer whose first one was split by columns: that one is
    ``fused_linear`` itself, on its own columns of ``b`` and of the bias.  One all-reduce, in
    float32 (float64 for float64 operands); rounded once.  A quantised product is split likewise:
    ``lax.psum`` of the op on whole blocks.

    Args:
        a: this device's part, ``[*batch, m, k/devices]``.
        b: its rows of the weights, ``[*batch, k/devices, n]``.
        bias: ``[n]``, the same on all devices.
        axis: name of the mesh axis that splits k.

    Returns:
        ``[*batch, m, n]`` in the dtype of ``a``, the same on all devices.
    """
    sums = lax.psum(wide_product(*vary_alike([a, b])), axis)
    return (sums + wide(bias)).astype(a.dtype)


@jax.custom_vjp
def wide_product(a: Array, b: Array) -> Array:
    """a @ b in the dtype of sums, from tensor cores where the operands are halves."""
    return jnp.matmul(a, b, precision=product_precision(a), preferred_element_type=wide_dtype(a))


def save(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    """The operands."""
    return wide_product(a, b), (a, b)


def pull_back(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """The op's; the cotangent of a result in halves is one of halves."""
    a, b = saved
    da, db, _ = fused_linear_backward(a, b, g.astype(a.dtype))
    return da, db


wide_product.defvjp(save, pull_back)
