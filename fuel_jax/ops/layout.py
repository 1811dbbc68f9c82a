"""Ops that move elements, or change their dtype, and compute nothing."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from .._choose import describe
from .._op import Op, P, Precision, R
from .._rules import along
from .._signature import shorten
from ..numerics import is_float, wide
from ..op_kind import OpKind as K
from ..registry import enter, op
from ..types import ANYTHING, Anything, Array, DType, Mask

EXACT = Precision(float32=0.0)
Number = int | float


def example(*shape: int) -> jax.ShapeDtypeStruct:
    """Data of a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def no_such_axis(x: Any, dim: int, name: str = "x") -> str | None:
    """An axis that ``x`` does not have."""
    if -x.ndim <= dim < x.ndim:
        return None
    range_ = f"it must be from {-x.ndim} to {x.ndim - 1}" if x.ndim else "a scalar has no axis"
    return f"parameter 'dim' is {dim} and {name!r} is {describe(x)}; {range_}. Choose another axis."


def misfit(x: Any, value: Number) -> str | None:
    """A fill value that the dtype of ``x`` cannot hold."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        if holds(x.dtype, value):
            return None
        end = float(jnp.finfo(x.dtype).max)
        wanted = f"its numbers end at {end:g}. Choose a smaller one, or float('-inf')"
    else:
        is_bool = x.dtype == jnp.bool_
        low, high = (0, 1) if is_bool else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
        if math.isfinite(value) and value == int(value) and low <= value <= high:
            return None
        wanted = f"it must be an integer from {low} to {high}. Choose such a one"
    return (
        f"parameter 'value' is {shorten(value)} and 'x' is {x.dtype.name}; {wanted}, "
        f"or cast x first."
    )


def holds(dtype: Any, value: Number) -> bool:
    """Whether a float dtype has a number near ``value``: it doesn't overflow."""
    try:
        number = float(value)
    except OverflowError:
        return False
    with np.errstate(over="ignore"):
        stored = complex(np.float64(number).astype(dtype)).real
    return (math.isnan(stored), math.isinf(stored)) == (math.isnan(number), math.isinf(number))


def filling(x: Array, value: Number) -> Array:
    """The value in the dtype of ``x``; a Python int may be longer than any of JAX's."""
    return jnp.asarray(float(value) if is_float(x) else value, x.dtype)


# -- dtype ---------------------------------------------------------------------------------


def cast_rejects(x: Any, *, dtype: Any) -> Any:
    """Complex numbers, and dtypes that no array here has."""
    if dtype not in ANYTHING or "complex" in dtype:
        return f"parameter 'dtype' is {dtype}; it must be a float, an integer or bool."
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return f"'x' is {x.dtype.name}; it must be real. Take its real or imaginary part first."
    return None


def cast_examples() -> Iterator[dict[str, Any]]:
    """To a float, to a narrow one, to integers."""
    yield {"x": example(3, 5), "dtype": "F32"}
    yield {"x": example(7), "dtype": "BF16"}
    yield {"x": np.array([-300.5, -0.75, 3.99, 500]), "dtype": "I8"}


def truncated(x: Array, to: np.dtype) -> Array:
    """Floats to integers, toward zero and no further than the integers go; NaN to 0."""
    v, limits = wide(x), jnp.iinfo(to)
    # Powers of two, exact in any float dtype, where the largest integer is not.
    inside = (v >= float(limits.min)) & (v < float(int(limits.max) + 1))
    least, most = (jnp.asarray(limit, to) for limit in (limits.min, limits.max))
    beyond = jnp.where(v > 0, most, jnp.where(v < 0, least, jnp.zeros((), to)))
    return jnp.where(inside, jnp.where(inside, v, 0).astype(to), beyond)


def rounded(x: Array, to: np.dtype) -> Array:
    """Floats in a narrower dtype, for good.

    XLA on GPUs drops a rounding that is undone at once: a float32 array cast to F16 and back would
    come out of ``jit`` as it went in.  It keeps what ``reduce_precision`` rounds, and what passes a
    barrier; the former can be fused there, but flushes the subnormal numbers of a narrower
    exponent.  On the CPU the barrier costs nothing, and rounding twice would.
    """
    narrow = lambda x: lax.optimization_barrier(x.astype(to))
    if x.dtype != jnp.float32 or to != jnp.bfloat16:
        return narrow(x)
    reduced = lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(to)
    return lax.platform_dependent(x, cpu=narrow, default=reduced)


@op(K.Cast, precision=EXACT, rejects=cast_rejects, splits="*shape", examples=cast_examples)
def cast(x: Anything[Array, "*shape"], *, dtype: DType) -> Anything[Array, "*shape"]:
    """x in another dtype.

    Float to integer truncates toward zero and saturates, NaN becomes 0, on every device alike.
    Integer to integer wraps.  To a float rounds to nearest even; to a half type or F8E4M3 through
    F32.  F8E4M3 has no infinity: beyond ±464 it is NaN.  The gradient is cast back.

    Args:
        x: any shape, real.
        dtype: a dtype, its name, or Fuel's name for it (``"BF16"``).

    Returns:
        An array of the shape of ``x``.

    Raises:
        X64Required: a 64-bit dtype while ``jax_enable_x64`` is off.
        UnknownName: no such dtype.
    """
    to = jnp.dtype(dtype)
    if to == jnp.bool_:
        return x != jnp.zeros((), x.dtype)
    if is_float(x) and jnp.issubdtype(to, jnp.integer):
        return truncated(x, to)
    if x.dtype != to and jnp.issubdtype(to, jnp.floating) and to.itemsize < 4:
        return rounded(x.astype(jnp.float32), to)
    if x.dtype == jnp.float64 and to == jnp.float32:
        return rounded(x, to)
    return x.astype(to)


# -- position ------------------------------------------------------------------------------


@op(
    K.Flip,
    precision=EXACT,
    rejects=no_such_axis,
    splits=along("dim"),
    examples=lambda: ({"x": example(2, 3, 5), "dim": 1}, {"x": example(3), "dim": -1}),
)
def flip(x: Anything[Array, "*shape"], *, dim: int) -> Anything[Array, "*shape"]:
    """y[…, i, …] = x[…, n − 1 − i, …].

    Args:
        x: any shape but a scalar.
        dim: the axis to reverse; a negative one counts from the end.

    Returns:
        An array like ``x``.
    """
    return jnp.flip(x, dim)


@op(
    K.Roll,
    precision=EXACT,
    rejects=lambda x, *, dim, shift: no_such_axis(x, dim),
    splits=along("dim"),
    examples=lambda: (
        {"x": example(2, 5, 3), "dim": 1, "shift": -7},
        {"x": example(4), "dim": 0, "shift": 1},
    ),
)
def roll(x: Anything[Array, "*shape"], *, dim: int, shift: int) -> Anything[Array, "*shape"]:
    """y[…, (i + shift) mod n, …] = x[…, i, …].

    Args:
        x: any shape but a scalar.
        dim: the axis along which elements move; a negative one counts from the end.
        shift: places to move by, of any sign and size.

    Returns:
        An array like ``x``.
    """
    if not (n := x.shape[dim]) or not (shift := shift % n):
        return x
    axis = dim % x.ndim
    head = lax.slice_in_dim(x, 0, n - shift, axis=axis)
    tail = lax.slice_in_dim(x, n - shift, n, axis=axis)
    return lax.concatenate([tail, head], axis)


def concat_rejects(*arrays: Any, dim: int) -> Any:
    """Nothing, or arrays that differ off the joined axis."""
    if not arrays:
        return "'arrays' is empty; pass one array or more."
    first = arrays[0]
    if reason := no_such_axis(first, dim, "arrays[0]"):
        return reason
    off = [axis for axis in range(first.ndim) if axis != dim % first.ndim]
    for i, x in enumerate(arrays):
        if x.ndim != first.ndim or any(x.shape[axis] != first.shape[axis] for axis in off):
            return (
                f"'arrays[{i}]' is {describe(x)} and 'arrays[0]' is {describe(first)}; they must "
                f"agree on every axis but {dim}. Reshape or broadcast one of them."
            )
    return None


def concat_examples() -> Iterator[dict[str, Any]]:
    """Three, unequal; one alone."""
    yield {"arrays": [example(2, 3, 2), example(2, 1, 2), example(2, 4, 2)], "dim": 1}
    yield {"arrays": [example(3)], "dim": -1}


@op(
    K.Concat,
    precision=EXACT,
    rejects=concat_rejects,
    splits=along("dim"),
    examples=concat_examples,
)
def concat(*arrays: Anything[Array, "..."], dim: int) -> Anything[Array, "..."]:
    """Arrays one after the other along an axis.

    Args:
        arrays: one or more, of one dtype, and of one shape but for the axis ``dim``.
        dim: the axis to join; a negative one counts from the end.

    Returns:
        An array whose extent along ``dim`` is the sum of theirs.
    """
    return lax.concatenate(arrays, dim % arrays[0].ndim)


# -- selection -----------------------------------------------------------------------------


def triangle_examples() -> Iterator[dict[str, Any]]:
    """Wide and batched; tall."""
    yield {"x": example(2, 3, 5), "diagonal": -1}
    yield {"x": example(4, 2), "diagonal": 1}


def above(x: Array, diagonal: int) -> Array:
    """Where column − row ≥ ``diagonal``, over the last two axes of ``x``."""
    row, column = (
        lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (x.ndim - 2, x.ndim - 1)
    )
    rows, columns = x.shape[-2:]
    return column - row >= min(max(diagonal, -rows), columns)


@op(K.Triu, precision=EXACT, splits="*batch", examples=triangle_examples)
def triu(
    x: Anything[Array, "*batch rows cols"], *, diagonal: int = 0
) -> Anything[Array, "*batch rows cols"]:
    """x where column ≥ row + diagonal, else 0.

    What is dropped is never looked at, nor its cotangent: NaN there does not leak.

    Args:
        x: ``[*batch, rows, cols]``.
        diagonal: the lowest diagonal kept; 0 is the main one, above it they count up.

    Returns:
        An array like ``x``.
    """
    return jnp.where(above(x, diagonal), x, jnp.zeros((), x.dtype))


@op(K.Tril, precision=EXACT, splits="*batch", examples=triangle_examples)
def tril(
    x: Anything[Array, "*batch rows cols"], *, diagonal: int = 0
) -> Anything[Array, "*batch rows cols"]:
    """x where column ≤ row + diagonal, else 0.

    What is dropped is never looked at, nor its cotangent: NaN there does not leak.

    Args:
        x: ``[*batch, rows, cols]``.
        diagonal: the highest diagonal kept; 0 is the main one, above it they count up.

    Returns:
        An array like ``x``.
    """
    return jnp.where(above(x, diagonal + 1), jnp.zeros((), x.dtype), x)


def masked_fill_examples() -> Iterator[dict[str, Any]]:
    """Zeros, ones and another truth value; a scalar."""
    mask = np.array([[0, 1, 2], [255, 0, 0]], np.uint8)
    yield {"x": example(2, 3), "mask": mask, "value": -2.5}
    yield {"x": example(), "mask": np.array(False), "value": 1}


@op(
    K.MaskedFill,
    precision=EXACT,
    rejects=lambda x, mask, *, value: misfit(x, value),
    splits="*shape",
    examples=masked_fill_examples,
)
def masked_fill(
    x: Anything[Array, "*shape"], mask: Mask[Array, "*shape"], *, value: Number
) -> Anything[Array, "*shape"]:
    """value where mask is not 0, else x.

    What is filled is never looked at, nor its cotangent: NaN there does not leak.

    Args:
        x: any shape.
        mask: U8 (any nonzero is true) or bool, of the shape of ``x``.
        value: what to fill with; it must fit the dtype of ``x``.

    Returns:
        An array like ``x``.

    Raises:
        ArgumentError: the dtype of ``x`` cannot hold ``value``, as float16 cannot hold −1e9.
    """
    return jnp.where(mask.astype(bool), filling(x, value), x)


# -- place ---------------------------------------------------------------------------------


class Placing(Op[P, R]):
    """An op that runs where it is called, not compiled: one program has one set of devices."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Move the data, or trace the move."""
        return self.decompose(*args, **kwargs)


def copy_rejects(x: Any, *, device: Any) -> Any:
    """Something that is no place."""
    if device is None or isinstance(device, (jax.Device, Sharding)):
        return None
    return (
        f"parameter 'device' is {device!r}; it must be a device, such as jax.devices()[0], or a "
        f"jax.sharding.Sharding, or None for where 'x' is."
    )


def copy(x: Anything[Array, "*shape"], *, device: Any = None) -> Anything[Array, "*shape"]:
    """x in a buffer of its own, here or on another device.

    Under ``jit`` a sharding is a constraint, a device is where the whole program must run, and a
    copy without either is the identity.  The gradient passes, and goes back to where ``x`` is.

    Args:
        x: any shape.
        device: a device or a sharding; None for the one ``x`` has.

    Returns:
        An array like ``x``.
    """
    if device is None:
        return jnp.copy(x)
    # Inside jit a bare device would be ignored, and a sharding of automatic axes forgotten.
    place = device if isinstance(device, Sharding) else SingleDeviceSharding(device)
    y = jax.device_put(x, place, may_alias=False)
    constrains = isinstance(place, NamedSharding) and place.mesh.are_all_axes_auto
    return lax.with_sharding_constraint(y, place) if constrains else y


copy = enter(
    Placing(
        copy,
        kind=K.Copy,
        precision=EXACT,
        rejects=copy_rejects,
        examples=lambda: ({"x": example(2, 3)},),
    )
)
