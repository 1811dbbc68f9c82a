"""Margins around an array, and their gradient."""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._choose import describe
from .._op import Precision
from .._rules import beside_margins
from ..numerics import is_float, wide
from ..op_kind import OpKind as K
from ..registry import op
from ..types import Anything, Array, Floats, Pairs
from .layout import EXACT, Number, example, filling, misfit

Mode = Literal["constant", "reflect", "replicate"]


def margins(name: str, x: Any, shape: Any, padding: Pairs, mode: str) -> str | None:
    """Margins that an array of ``shape`` cannot have; ``x``, called ``name``, was given."""
    arrived = f"parameter 'padding' is {padding} and {name!r} is {describe(x)}"
    if len(padding) != x.ndim:
        return f"{arrived}; it must be {x.ndim} pairs (before, after), one for each axis."
    if any(p < 0 for pair in padding for p in pair):
        return f"{arrived}; none may be negative. Slice instead."
    for axis, (n, pair) in enumerate(zip(shape, padding, strict=True)):
        if n < 0:
            return f"{arrived}; axis {axis} is shorter than its margins. Pass the padded array."
        if mode == "reflect" and max(pair) > max(n - 1, 0):
            return (
                f"{arrived}; to reflect, a margin must be smaller than the extent, {n} along axis "
                f"{axis}. Pad less, or with mode='replicate'."
            )
        if mode == "replicate" and n == 0 < max(pair):
            return f"{arrived}; axis {axis} is empty, and has no edge. Pad with mode='constant'."
    return None


def pad_rejects(x: Any, *, padding: Pairs, mode: Any, value: Number) -> Any:
    """Margins that do not fit, or a value that does not."""
    return margins("x", x, x.shape, padding, mode) or (
        misfit(x, value) if mode == "constant" else None
    )


def inner(shape: Any, padding: Pairs) -> tuple[int, ...]:
    """Extents without the margins."""
    return tuple(n - before - after for n, (before, after) in zip(shape, padding, strict=False))


def pad_backward_rejects(upstream: Any, *, padding: Pairs, mode: Any) -> Any:
    """Margins that do not fit into the array."""
    return margins("upstream", upstream, inner(upstream.shape, padding), padding, mode)


def pad_examples() -> Iterator[dict[str, Any]]:
    """A constant, a reflection, a repeated edge beside an axis without margins."""
    yield {"x": example(2, 3), "padding": ((1, 0), (2, 1)), "mode": "constant", "value": -1.5}
    yield {"x": example(3, 4), "padding": ((2, 1), (0, 3)), "mode": "reflect"}
    yield {"x": example(1, 2, 4), "padding": ((2, 0), (0, 0), (1, 2)), "mode": "replicate"}


def pad_backward_examples() -> Iterator[dict[str, Any]]:
    """Margins cut off, folded back, summed."""
    for padding, mode in (
        (((2, 1), (0, 3)), "reflect"),
        (((2, 1), (0, 0)), "constant"),
        (((4, 1), (1, 2)), "replicate"),
    ):
        yield {"upstream": example(6, 7), "padding": padding, "mode": mode}


def padded(x: Array, *, padding: Pairs, mode: str, value: Number) -> Array:
    """``x`` with its margins."""
    if mode == "constant":
        config = [(before, after, 0) for before, after in padding]
        return lax.pad(x, filling(x, value), config)
    y = wide(x) if is_float(x) else x  # so that its transpose sums in float32, and rounds once
    for axis, (before, after) in enumerate(padding):
        if not before + after:
            continue
        n = y.shape[axis]
        cut = lambda start, end, y=y, axis=axis: lax.slice_in_dim(y, start, end, axis=axis)
        if mode == "reflect":
            left, right = (
                lax.rev(part, (axis,)) for part in (cut(1, 1 + before), cut(n - 1 - after, n - 1))
            )
        else:
            edge = lambda part, width, y=y, axis=axis: jnp.broadcast_to(
                part, (*y.shape[:axis], width, *y.shape[axis + 1 :])
            )
            left, right = edge(cut(0, 1), before), edge(cut(n - 1, n), after)
        y = lax.concatenate([left, y, right], axis)
    return y.astype(x.dtype)


@op(
    K.Pad,
    precision=EXACT,
    rejects=pad_rejects,
    splits=beside_margins,
    examples=pad_examples,
)
def pad(
    x: Anything[Array, "*shape"], *, padding: Pairs, mode: Mode = "constant", value: Number = 0
) -> Anything[Array, "*padded"]:
    """Margins around an array: a constant, or x continued.

    ``reflect`` mirrors at the edge element, which is not repeated; ``replicate`` repeats it.  Axes
    are treated one after the other, so a corner is a reflection of a reflection.

    Args:
        x: any shape.
        padding: ``((before, after), …)``, elements added at each end of every axis.
        mode: ``"constant"``, ``"reflect"`` or ``"replicate"``.
        value: the constant; it must fit the dtype of ``x``.

    Returns:
        An array of extents ``before + n + after``.

    Raises:
        ArgumentError: a margin to reflect is not smaller than its axis; an empty axis to replicate.
    """
    return padded(x, padding=padding, mode=mode, value=value)


@op(
    K.PadBackward,
    precision=Precision(float32=2e-6),
    rejects=pad_backward_rejects,
    splits=beside_margins,
    examples=pad_backward_examples,
)
def pad_backward(
    upstream: Floats[Array, "*padded"], *, padding: Pairs, mode: Mode = "constant"
) -> Floats[Array, "*shape"]:
    """Gradient of :func:`pad`:  every element goes to where it was copied from, and is added there.

    Sums in float32 (float64 for float64 operands), rounded once.

    Args:
        upstream: the cotangent of the padded array.
        padding: the forward's ``((before, after), …)``.
        mode: the forward's; ``"constant"`` drops the margins.

    Returns:
        The cotangent of the array before padding: extents ``n − before − after``.
    """
    ends = [n - after for n, (_, after) in zip(upstream.shape, padding, strict=True)]
    like = lax.slice(upstream, [before for before, _ in padding], ends)  # laid out alike
    (dx,) = jax.linear_transpose(lambda x: padded(x, padding=padding, mode=mode, value=0), like)(
        upstream
    )
    return dx
