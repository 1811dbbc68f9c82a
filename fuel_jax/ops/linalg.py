"""The matrix product."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._op import Precision
from .._rules import aligned
from ..numerics import is_float, product_precision
from ..op_kind import OpKind as K
from ..registry import op
from ..types import Array, Products


def examples() -> Iterator[dict[str, Any]]:
    """Plain; leading axes that broadcast; a row by a matrix; bytes."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    yield {"a": f32(5, 7), "b": f32(7, 3)}
    yield {"a": f32(2, 1, 3, 4), "b": f32(5, 4, 2)}
    yield {"a": f32(1, 16), "b": f32(16, 9)}
    codes = np.arange(-128, 128, dtype=np.int8).reshape(4, 64)
    yield {"a": codes, "b": codes.T.copy()}


def rejects(a: Any, b: Any) -> str | None:
    """Leading axes that do not broadcast, which annotations cannot say."""
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        return (
            f"'b' has leading axes {b.shape[:-2]}, which do not broadcast with {a.shape[:-2]} of "
            f"'a'. Give each the other's extent, or 1."
        )
    return None


@op(
    K.MatMul,
    precision=Precision(float32=2e-6),
    rejects=rejects,
    splits=aligned("m k", "k n", "m n", free="m n"),
    examples=examples,
)
def matmul(
    a: Products[Array, "... m k"], b: Products[Array, "... k n"]
) -> Products[Array, "... m n"]:
    """Matrix product:  Σₖ a[…, m, k] · b[…, k, n].

    Sums in float32 (float64 for float64 operands), rounded once; I8 and U8 sum in I32 and saturate.
    Leading axes broadcast as NumPy's do, in this op alone.

    Args:
        a: ``[..., m, k]``; floats, I8 or U8.
        b: ``[..., k, n]``, dtype of ``a``.

    Returns:
        ``[..., m, n]`` in the dtype of ``a``.

    Raises:
        ShapeError: the two ``k`` differ, or an operand has fewer than two axes.
        ArgumentError: leading axes do not broadcast.
    """
    if is_float(a):
        # Of half operands XLA sums in float32 and rounds once, on CPU and GPU.  A float32 result
        # would say so, but its cotangent would be float32 beside half operands: products without
        # tensor cores, fifteen times slower on an H200.
        return jnp.matmul(a, b, precision=product_precision(a))
    return saturated(jnp.matmul(a, b, preferred_element_type=jnp.int32), a.dtype)


def saturated(sums: Array, dtype: np.dtype) -> Array:
    """I32 sums as bytes."""
    limits = jnp.iinfo(dtype)
    return jnp.clip(sums, limits.min, limits.max).astype(dtype)


# -- kernels -------------------------------------------------------------------------------


def not_bytes(a: Any, b: Any) -> str | None:
    """Operands that are summed as they are."""
    return f"operands are {a.dtype.name}, not bytes" if is_float(a) else None


@matmul.kernel("float_sums", platforms=("cuda",), refuses=not_bytes)
def by_float_sums(a: Array, b: Array, *, interpret: bool = False) -> Array:
    """Bytes by way of float32, in sums short enough to be exact.

    XLA's own I8 product is twice the right one on an H200 for some shapes, [2, 3] @ [3, 2] among
    them (JAX 0.11.2; which, depends on the algorithm that autotuning picks).
    """
    largest = 2**14 if a.dtype == jnp.int8 else 2**16
    exact = 2**24 // largest  # float32 counts to 2^24
    k = a.shape[-1]
    shape = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    sums = jnp.zeros((*shape, a.shape[-2], b.shape[-1]), jnp.int32)
    for first in range(0, k, exact):
        part = slice(first, first + exact)
        some = jnp.matmul(
            a[..., part].astype(jnp.float32),
            b[..., part, :].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,  # whatever the user set: integers are exact
        )
        sums = sums + some.astype(jnp.int32)
    return saturated(sums, a.dtype)
