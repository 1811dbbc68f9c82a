"""Matrix products whose inner axis is split."""

import jax.numpy as jnp
from jax import lax

from ..fused.linear import fused_linear
from ..numerics import wide
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
    none = jnp.zeros(bias.shape, wide(a).dtype)
    sums = lax.psum(fused_linear(wide(a), wide(b), none), axis)
    return (sums + wide(bias)).astype(a.dtype)
