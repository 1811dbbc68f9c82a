"""Rotary position embedding."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._op import Precision
from .._rules import aligned
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats

PRECISION = Precision(float32=2e-6)


def examples() -> Iterator[dict[str, Any]]:
    """Heads that share tables, a table per sequence, and the narrowest head."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    yield {"x": f32(2, 3, 5, 8), "cos": f32(5, 8), "sin": f32(5, 8)}
    yield {"x": f32(2, 3, 4, 6), "cos": f32(2, 1, 4, 6), "sin": f32(2, 1, 4, 6)}
    yield {"x": f32(1, 2), "cos": f32(1, 2), "sin": f32(1, 2)}


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent."""
    for example in examples():
        yield example | {"upstream": example["x"]}


def rejects(x: Any, cos: Any, *rest: Any) -> str | None:
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


def swapped(v: Array, sign: int) -> Array:
    """The halves exchanged: (−hi, lo) for sign −1, its transpose (hi, −lo) for sign 1."""
    lo, hi = jnp.split(v, 2, axis=-1)
    return jnp.concatenate([sign * hi, -sign * lo], axis=-1)


def summed(y: Array, table: Array) -> Array:
    """``y`` summed over the axes along which ``table`` was repeated."""
    new = y.ndim - table.ndim
    repeated = [new + i for i, n in enumerate(table.shape) if n != y.shape[new + i]]
    return jnp.sum(y, axis=(*range(new), *repeated)).reshape(table.shape).astype(table.dtype)


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dx", "dcos", "dsin"),
    rejects=rejects,
    splits=aligned("s d", free="s"),
    matchable=False,
    examples=backward_examples,
)
def rope_backward(
    x: Floats[Array, "*shape s d"],
    cos: Floats[Array, "*tables s d"],
    sin: Floats[Array, "*tables s d"],
    upstream: Floats[Array, "*shape s d"],
) -> tuple[
    Floats[Array, "*shape s d"],
    Floats[Array, "*tables s d"],
    Floats[Array, "*tables s d"],
]:
    """Gradient of :func:`rope`:  g·cos + ((g·sin)_hi, −(g·sin)_lo),  Σ g·x,  Σ g·(−x_hi, x_lo).

    Also where the halves of a table differ.  In float32 (float64 for float64 operands), rounded
    once; the sums are over the axes along which a table is repeated.

    Args:
        x: the forward's operand, ``[..., s, d]``.
        cos: the forward's table.
        sin: the forward's table.
        upstream: the cotangent ``g`` of the result, like ``x``.

    Returns:
        The cotangents of ``x``, ``cos`` and ``sin``.
    """
    v, c, s, g = wide(x), wide(cos), wide(sin), wide(upstream)
    dx = g * c + swapped(g * s, 1)
    return dx.astype(x.dtype), summed(g * v, cos), summed(g * swapped(v, -1), sin)


@fused_op(
    OpKind.Rope,
    id=FusedOps.ROPE,
    family="Forward",
    precision=PRECISION,
    backward=rope_backward,
    rejects=rejects,
    splits=aligned("s d", free="s"),
    matchable=False,  # rotate_half below is the body, with tables as people have them
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
    return (v * c + swapped(v, -1) * s).astype(x.dtype)


# -- as people write it --------------------------------------------------------------------

ROTATED = ("concatenate",)


@rope.spelling(axes={"x": "*batch s d", "cos": "s d", "sin": "s d"}, last="d", needs=ROTATED)
def rotate_half(x, cos, sin):
    """As GPT-NeoX and Llama: x·cos + (−second half, first half)·sin."""
    lo, hi = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-hi, lo], -1) * sin


def full_width(x: Any, cos: Any, sin: Any) -> Any:
    """Tables of half the width, whole; ``[b, s, d]`` for ``[b, h, s, d]``."""
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = (jnp.concatenate([t, t], -1) for t in (cos, sin))
    if cos.ndim > 2:
        cos, sin = cos[:, None], sin[:, None]
    return rope(x, cos, sin)


@rope.spelling(
    axes={"x": "b h s d", "cos": "b s d", "sin": "b s d"},
    last="d",
    call=full_width,
    needs=ROTATED,
)
def with_a_table_for_each_sequence(x, cos, sin):
    """Positions that differ from sequence to sequence."""
    return rotate_half(x, cos[:, None], sin[:, None])


@rope.spelling(
    axes={"x": "*batch s d", "cos": "s d/2", "sin": "s d/2"},
    last="d",
    call=full_width,
    needs=ROTATED,
)
def half_by_half(x, cos, sin):
    """With tables of half the width."""
    lo, hi = jnp.split(x, 2, -1)
    return jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], -1)


@rope.spelling(
    axes={"x": "b h s d", "cos": "b s d/2", "sin": "b s d/2"},
    last="d",
    call=full_width,
    needs=ROTATED,
)
def half_by_half_for_each_sequence(x, cos, sin):
    """With tables of half the width, and positions that differ from sequence to sequence."""
    return half_by_half(x, cos[:, None], sin[:, None])
