"""What a measured case is made of: the data, our op, its peers, and what float64 says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[..., Any]
Index = Any  # of an array; numpy.s_[:16] and its like
WHOLE = ...


class Spec(NamedTuple):
    """An operand: shape, dtype, and what it is filled with."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    kind: str = "normal"  # "positive", "negative", "below N", a block format, "permutation"


class Peer(NamedTuple):
    """Another way to the same result; in its own layout, if it has one.

    ``arrange`` makes its operands from ours, outside the time; ``restore`` our outputs from its.
    """

    run: Function
    arrange: Function | None = None
    restore: Function | None = None


@dataclass(frozen=True)
class Work:
    """An op on operands of given shapes.

    The error is measured on part of the outputs: what ``outputs`` cuts from them depends only on
    what ``cuts`` leaves of the operands, so that float64 need not compute the rest.
    """

    op: Any
    specs: tuple[Spec, ...]
    params: dict[str, Any] = field(default_factory=dict)
    cuts: tuple[Index, ...] = ()  # of each operand
    outputs: tuple[Index, ...] = (WHOLE,)
    summed: tuple[int, ...] = ()  # operands whose gradient sums over what was cut away
    peers: dict[str, Peer] = field(default_factory=dict)
    exact: Function | None = None  # the float64 result, where cutting is not enough

    @property
    def wrt(self) -> tuple[int, ...]:
        """Places of the operands with a gradient."""
        places = {name: i for i, name in enumerate(self.op.inputs[: len(self.specs)])}
        return tuple(places[name] for name in self.op.wrt if name in places)


def directed(f: Function, direction: str, wrt: Sequence[int]) -> Function:
    """``f`` in a direction, as a function of its operands and of its outputs' cotangents."""
    if direction == "forward":
        return lambda operands, cotangents: f(*operands)

    def pulled(operands, cotangents):
        value, pull = jax.vjp(of(f, operands, wrt), *(operands[i] for i in wrt))
        gradient = pull(cotangents)
        return gradient if direction == "gradient" else (value, gradient)

    return pulled


def pull_of(f: Function, operands: Sequence[Any], wrt: Sequence[int]) -> Function:
    """From the cotangents of ``f`` to its gradient, with all that the forward call keeps for it."""
    return jax.vjp(of(f, operands, wrt), *(operands[i] for i in wrt))[1]


def of(f: Function, operands: Sequence[Any], wrt: Sequence[int]) -> Function:
    """``f`` as a function of some of its operands."""

    def chosen(*values):
        merged = dict(enumerate(operands)) | dict(zip(wrt, values, strict=True))
        return f(*merged.values())

    return chosen


# Of a block: bytes, weights, and the high bytes of its scales, which are little-endian halves.
HALVES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Q4_0": (18, 32, (1,)),
    "Q4_1": (20, 32, (1, 3)),
    "Q5_0": (22, 32, (1,)),
    "Q5_1": (24, 32, (1, 3)),
    "Q8_0": (34, 32, (1,)),
    "Q8_1": (36, 32, (1, 3)),
    "Q2K": (84, 256, (81, 83)),
    "Q3K": (110, 256, (109,)),
    "Q4K": (144, 256, (1, 3)),
    "Q5K": (176, 256, (1, 3)),
    "Q6K": (210, 256, (209,)),
}


def filled(spec: Spec, key: Any) -> jax.Array:
    """Random data for an operand, made on the device."""
    word, _, below = spec.kind.partition(" ")
    dtype = jnp.dtype(spec.dtype)
    if word in HALVES:  # random codes under scales between 2⁻⁷ and 2⁻⁶
        size, weights, high = HALVES[word]
        blocks = jax.random.bits(key, (spec.shape[0] // weights, size), jnp.uint8)
        for at in high:
            blocks = blocks.at[:, at].set(0x20 | blocks[:, at] & 3)
        return lax.bitcast_convert_type(blocks.reshape(-1, 4), jnp.uint32)
    if word == "below":
        return jax.random.randint(key, spec.shape, 0, int(below)).astype(dtype)
    if word == "permutation":
        total = jnp.arange(spec.shape[0] * spec.shape[1], dtype=dtype)
        return jax.random.permutation(key, total).reshape(spec.shape)
    if word == "value":
        return jnp.full(spec.shape, int(below), dtype)
    if dtype.kind == "u":
        return jax.random.bits(key, spec.shape, dtype)
    x = jax.random.normal(key, spec.shape, dtype)
    if word == "normal":
        return x
    return (0.05 + jnp.abs(x) / 10).astype(dtype) * (1 if word == "positive" else -1)
