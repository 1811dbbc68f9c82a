"""Matrix product with a bias row."""

import jax
import jax.numpy as jnp

from .._op import Precision
from ..numerics import product_precision, wide, wide_dtype
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats


def examples():
    """A plain product, a batch of them, and a single element."""
    for batch, m, k, n in (((), 8, 16, 4), ((2,), 5, 7, 3), ((), 1, 1, 1)):
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        yield {"a": f32(*batch, m, k), "b": f32(*batch, k, n), "bias": f32(n)}


@fused_op(
    OpKind.FusedLinear,
    id=FusedOps.FUSED_LINEAR,
    family="Forward",
    precision=Precision(float32=3e-6),
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
    sums = jnp.matmul(a, b, precision=product_precision(), preferred_element_type=wide_dtype(a))
    return (sums + wide(bias)).astype(a.dtype)
