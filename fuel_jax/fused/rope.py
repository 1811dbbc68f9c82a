"""Rotary position embedding."""

import jax
import jax.numpy as jnp

from .._op import Precision
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats


def examples():
    """Heads that share tables, a table per sequence, and the narrowest head."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    yield {"x": f32(2, 3, 5, 8), "cos": f32(5, 8), "sin": f32(5, 8)}
    yield {"x": f32(2, 3, 4, 6), "cos": f32(2, 1, 4, 6), "sin": f32(2, 1, 4, 6)}
    yield {"x": f32(1, 2), "cos": f32(1, 2), "sin": f32(1, 2)}


def rejects(x, cos, sin) -> str | None:
    """Sizes the annotations cannot express."""
    if x.shape[-1] % 2:
        return f"'x' has rows of {x.shape[-1]}; rotary halves need an even width. Pad the head."
    leading, given = x.shape[:-2], cos.shape[:-2]
    if len(given) > len(leading) or any(
        g not in (1, n) for g, n in zip(given[::-1], leading[::-1], strict=False)
    ):
        return (
            f"'cos' has leading axes {given}, which do not broadcast to {leading} of 'x'. "
            f"Give each of them the extent of x, or 1."
        )
    return None


@fused_op(
    OpKind.Rope,
    id=FusedOps.ROPE,
    family="Forward",
    precision=Precision(float32=2e-6),
    rejects=rejects,
    examples=examples,
)
def rope(
    x: Floats[Array, "... s d"],
    cos: Floats[Array, "*tables s d"],
    sin: Floats[Array, "*tables s d"],
) -> Floats[Array, "... s d"]:
    """Rotate pairs (xᵢ, xᵢ₊ₕ), h = d/2, by the angle of their position:  x·cos + (−x_hi, x_lo)·sin.

    The halves are split in the middle (NeoX, Llama), not interleaved.  In float32 (float64 for
    float64 operands), rounded once.  The tables span the whole width and have gradients too.

    Args:
        x: ``[..., s, d]``, d even.
        cos: ``[s, d]``, or with leading axes that broadcast to those of ``x``.
        sin: like ``cos``.

    Returns:
        An array like ``x``.

    Raises:
        ArgumentError: ``d`` is odd, or leading axes of the tables do not fit.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with halves for pairs.
    """
    v, c, s = wide(x), wide(cos), wide(sin)
    lo, hi = jnp.split(v, 2, axis=-1)
    return (v * c + jnp.concatenate([-hi, lo], axis=-1) * s).astype(x.dtype)
