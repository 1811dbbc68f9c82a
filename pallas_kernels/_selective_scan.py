"""What the kernels of Mamba's recurrence share: what a thread holds, what it reads, its maths.

A thread holds some states of some channels.  More channels share what is read of b and c; more
states of a channel leave less to be summed between threads.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import (
    LOG2_E,
    WARP,
    cdiv,
    exp2,
    fma,
    launch,
    like,
    power_of_two,
    program_id,
    read,
    reciprocal,
    write,
)
from ._rows import counted

PerChannel = list[jax.Array]  # f32[across], of each channel of a thread
PerState = list[jax.Array]  # f32[1, wide], or f32[wide], of each piece
States = list[list[jax.Array]]  # f32[across, wide], of each channel and piece
Activation = Callable[[jax.Array], jax.Array]

OF_THREAD = 4  # neighbouring states of a piece that a thread holds, as Triton lays blocks out


PORTION = 4  # steps whose operands are in registers at once


class Tile(NamedTuple):
    """What a program, one warp, holds in registers."""

    channels: int
    """Of a thread; not neighbours, so that threads are."""
    pieces: int
    """In which the states of a channel are cut."""
    steps: int
    """Written out in a loop's body.  Forward, the input of as many is on its way meanwhile."""

    def across(self, states: int) -> int:
        """Threads side by side that hold different channels."""
        return WARP // max(states // self.pieces // OF_THREAD, 1)

    def blocks(self, d: int, states: int) -> int:
        """Programs of a sequence."""
        return cdiv(d, self.channels * self.across(states))


class Size(NamedTuple):
    """Of the arrays."""

    rows: int
    """Steps of all sequences."""
    length: int
    d: int
    n: int
    """States, those included that were added."""
    states: int


# -- what a program does -------------------------------------------------------------------


def bounded(x: jax.Array, below: int) -> jax.Array:
    """``x``, which is less than ``below``; so that the compiler knows.

    A sum of it and a constant cannot overflow then, and becomes part of a load or a store: measured
    in machine code, a third of the instructions of a step were sums of 32 bits that had to wrap.
    """
    return x & np.int32(power_of_two(below) - 1)


class Program:
    """One program's part of the arrays, which have names; [batch, l, …] are flat."""

    def __init__(self, refs: dict[str, Any], size: Size, tile: Tile) -> None:
        """The first program has the first channels of the first sequence."""
        self.refs, self.size, self.tile = refs, size, tile
        self.across, self.wide = tile.across(size.n), size.n // tile.pieces
        blocks, together = tile.blocks(size.d, size.n), self.across * tile.channels
        self.sequence, self.block = program_id(0) // blocks, program_id(0) % blocks
        self.first = bounded(self.block, blocks) * together
        self.channels = [
            self.first + i * self.across + counted(self.across) for i in range(tile.channels)
        ]
        self.states = [i * self.wide + counted(self.wide) for i in range(tile.pieces)]
        cut = size.d % together > 0
        self.inside = [x < size.d if cut else None for x in self.channels]
        self.exist = [x < size.states if size.states < size.n else None for x in self.states]
        self.shape = (self.across, self.wide)

    def row(self, step: Any) -> jax.Array:
        """Where a step of the sequence is among those of all."""
        return bounded(self.sequence * self.size.length + step, self.size.rows)

    def per_channel(self, name: str, row: Any, k: int) -> PerChannel:
        """A number for each channel, k steps on; 0 beyond the last."""
        return [
            read(self.refs[name], (at,), mask, None if mask is None else 0.0)
            for at, mask in zip(self.of_channels(row, k), self.inside, strict=True)
        ]

    def write_per_channel(self, name: str, row: Any, k: int, values: PerChannel) -> None:
        """The other way."""
        places = self.of_channels(row, k)
        for value, at, mask in zip(values, places, self.inside, strict=True):
            write(self.refs[name], (at,), value, mask)

    def of_channels(self, row: Any, k: int) -> list[jax.Array]:
        """Where they are."""
        at = row * self.size.d + self.first + counted(self.across)
        return [at + (k * self.size.d + i * self.across) for i in range(self.tile.channels)]

    def per_state(self, name: str, row: Any, k: int) -> PerState:
        """A number for each state, the same for all channels."""
        return [read(self.refs[name], (at,))[None, :] for at in self.of_states(row, k)]

    def write_per_state(self, name: str, row: Any, k: int, values: PerState) -> None:
        """One for this block of channels; every thread that has it writes the same.

        As a vector it would be dealt out between the threads again, with a barrier.
        """
        blocks, rows = self.tile.blocks(self.size.d, self.size.n), self.size.rows
        row = bounded(self.block * rows + row, blocks * rows)
        spread = lambda x: jnp.broadcast_to(x, self.shape)
        for value, at in zip(values, self.of_states(row, k), strict=True):
            write(self.refs[name], (spread(at[None, :]),), spread(value[None, :]))

    def of_states(self, row: Any, k: int) -> list[jax.Array]:
        """Where they are."""
        at = row * self.size.n + counted(self.wide)
        return [at + (k * self.size.n + i * self.wide) for i in range(self.tile.pieces)]

    def matrix(self, name: str, *first: Any) -> States:
        """A number for each state of each channel."""
        return [
            [
                read(self.refs[name], (*first, *where), mask, None if mask is None else 0.0)
                for where, mask in row
            ]
            for row in self.places()
        ]

    def write_matrix(self, name: str, values: States, *first: Any) -> None:
        """The other way."""
        for row, places in zip(values, self.places(), strict=True):
            for value, (where, mask) in zip(row, places, strict=True):
                write(self.refs[name], (*first, *where), value, mask)

    def places(self) -> list[list[tuple[Any, Any]]]:
        """Of each channel and piece: indices into a matrix, and the mask."""
        spread = lambda mask: None if mask is None else jnp.broadcast_to(mask[:, None], self.shape)
        return [
            [((x[:, None], n[None, :]), spread(mask)) for n in self.states]
            for x, mask in zip(self.channels, self.inside, strict=True)
        ]

    def matrix_or_zeros(self, name: str) -> States:
        """Of the sequence, if there is such an array."""
        if name in self.refs:
            return self.matrix(name, self.sequence)
        return [[jnp.zeros(self.shape, jnp.float32) for _ in self.states] for _ in self.channels]

    def over_states(self, xs: list[jax.Array], ys: list[jax.Array]) -> jax.Array:
        """Σ x·y of a channel.  States that were added are 0 in y, but 0 · inf is not."""
        total = None
        for x, y, exist in zip(xs, ys, self.exist, strict=True):
            x = x if exist is None else jnp.where(exist[None, :], x, 0)
            total = x * y if total is None else fma(x, y, total)
        assert total is not None
        return jnp.sum(total, 1)

    def over_channels(self, xs: States, ys: PerChannel) -> PerState:
        """Σ x·y of a state, over the channels of the program."""
        totals: Any = [None] * len(self.states)
        for row, y, inside in zip(xs, ys, self.inside, strict=True):
            for j, x in enumerate(row):
                x = x if inside is None else jnp.where(inside[:, None], x, 0)
                y_ = y[:, None]
                totals[j] = x * y_ if totals[j] is None else fma(x, y_, totals[j])
        return [jnp.sum(total, 0) for total in totals]


def decays(steps: PerChannel, a: States) -> States:
    """exp(Δ·a), of a · log₂ e."""
    return [[exp2(step[:, None] * x) for x in row] for step, row in zip(steps, a, strict=True)]


def advance(h: States, keep: States, inputs: PerChannel, b: PerState) -> States:
    """The next states; ``inputs`` are Δ·u."""
    return [
        [fma(k, x, moved[:, None] * y) for k, x, y in zip(kept, before, b, strict=True)]
        for before, kept, moved in zip(h, keep, inputs, strict=True)
    ]


SLOW = 0.09  # of Δ·a: beyond, what the exponential is off by is soon forgotten


class Kept(NamedTuple):
    """What some steps kept of a state, to compare with what they should have kept.

    exp(Δ·a) is near 1 where little is forgotten, and off by a unit in the last place or two, mostly
    to one side: over the steps that a state remembers that adds up, to 1.4e-5 in 2400 steps
    (measured on an H200).  So after every few steps the state is scaled by what they were off by
    together, Σ (exp(Δ·a) − 1) by its series less the sum of what was taken.
    """

    powers: list[list[jax.Array]]  # Σ Δ, Σ Δ², Σ Δ³, Σ Δ⁴ and the least Δ, of each channel
    bits: list[list[jax.Array]]  # sum of what was kept, of each channel and piece, as integers
    steps: int

    @classmethod
    def nothing(cls, channels: int, pieces: int, shape: tuple[int, int]):
        """Before the first step."""
        zeros = lambda shape, dtype: jnp.zeros(shape, dtype)
        powers = [[zeros(shape[:1], jnp.float32) for _ in range(5)] for _ in range(channels)]
        bits = [[zeros(shape, jnp.int32) for _ in range(pieces)] for _ in range(channels)]
        return cls(powers, bits, 0)

    def and_step(self, steps: PerChannel, keep: States):
        """With one more.  Numbers from 1/2 to 1 are whole multiples of 2⁻²⁴: of their bits."""
        powers = []
        for (one, two, three, four, least), x in zip(self.powers, steps, strict=True):
            square = x * x
            sums = one + x, two + square, fma(square, x, three), fma(square, square, four)
            powers.append([*sums, jnp.minimum(least, x)])
        whole = lambda x: lax.bitcast_convert_type(x, jnp.int32)
        bits = [
            [x + whole(y) for x, y in zip(xs, ys, strict=True)]
            for xs, ys in zip(self.bits, keep, strict=True)
        ]
        return Kept(powers, bits, self.steps + 1)

    def corrected(self, h: States, rests: States, a: States) -> tuple[States, States]:
        """The state that they should have left; ``a`` is a · log₂ e.

        What they were off by is a unit in the last place or so of the state, and the sum is rounded
        to whole ones; the rest waits for the next few steps.
        """
        ones = np.int32(np.uint32(self.steps * 0x3F800000 & 0xFFFFFFFF).astype(np.int32))
        found, left = [], []
        for xs, waiting, rates, sums, powers in zip(
            h, rests, a, self.bits, self.powers, strict=True
        ):
            one, two, three, four, least = (
                jnp.broadcast_to(x[:, None], xs[0].shape) for x in powers
            )
            row, row_left = [], []
            for x, rest, rate, total in zip(xs, waiting, rates, sums, strict=True):
                rate = rate * (1 / LOG2_E)
                square = rate * rate
                series = fma(rate, four * (1 / 24), three * (1 / 6))
                series = fma(rate, fma(rate, series, two * 0.5), one)
                off = fma(rate, series, (ones - total).astype(jnp.float32) * 2.0**-24)
                slow = (rate <= 0) & (least >= 0) & (square * square * four < SLOW**4)
                slow &= jnp.abs(x) < np.float32(np.inf)  # that stays what it is
                due = jnp.where(slow, fma(off, x, rest), 0)
                row.append(x + due)
                row_left.append(due - (row[-1] - x))
            found.append(row)
            left.append(row_left)
        return found, left


def products(xs: PerChannel, ys: PerChannel) -> PerChannel:
    """x·y of each channel."""
    return [x * y for x, y in zip(xs, ys, strict=True)]


# -- Δ -------------------------------------------------------------------------------------

# ln(1 + e) / e on [0, 1], by Chebyshev's polynomial of degree 8: right to 2e-7.
LOG1P = (
    *(1.0, -0.49999502301216125, 0.33319270610809326, -0.24844369292259216, 0.19111430644989014),
    *(-0.13674770295619965, 0.07836166769266129, -0.02958850748836994, 0.005253457929939032),
)


def softplus(x: jax.Array) -> jax.Array:
    """ln(1 + eˣ), right also where it is small."""
    e = exp2(-jnp.abs(x) * LOG2_E)
    y = jnp.full(x.shape, LOG1P[-1], jnp.float32)
    for coefficient in LOG1P[-2::-1]:
        y = fma(y, e, jnp.full(x.shape, coefficient, jnp.float32))
    return fma(y, e, jnp.maximum(x, 0))


def logistic(x: jax.Array) -> jax.Array:
    """The slope of :func:`softplus`."""
    return reciprocal(1 + exp2(-x * LOG2_E))


def step_size(softplus_: bool) -> Activation:
    """From ``delta`` to Δ."""
    return softplus if softplus_ else lambda x: x


# -- arrays in, arrays out -----------------------------------------------------------------

BY_STEPS = {"u", "delta", "b", "c", "g", "y", "du", "ddelta", "db", "dc"}


def padded(states: int) -> int:
    """States that are computed: the blocks of any tile are whole."""
    return max(power_of_two(states), 4 * OF_THREAD)


def operands(u, delta, a, b, c, **states: jax.Array | None) -> dict[str, jax.Array]:
    """What the kernels read.  A state that was added does not decay, and nothing moves it."""
    added = padded(a.shape[1]) - a.shape[1]
    wide = lambda x: jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, added)])
    given = {"u": u, "delta": delta, "a": wide(a) * LOG2_E, "b": wide(b), "c": wide(c)}
    return given | {name: wide(x) for name, x in states.items() if x is not None}


def run(
    kernel: Callable[..., None],
    name: str,
    given: dict[str, jax.Array],
    out: dict[str, Any],
    states: int,
    tile: Tile,
    interpret: bool,
) -> dict[str, jax.Array]:
    """The kernel, one program for each block of channels of each sequence."""
    (batch, length, d), n = given["u"].shape, given["a"].shape[1]
    size = Size(batch * length, length, d, n, states)
    flat = lambda name, x: x.reshape(-1) if name in BY_STEPS else x
    found = launch(
        functools.partial(kernel, names=[*given, *out], size=size, tile=tile),
        name,
        out=[like(x, (x.size,)) if name in BY_STEPS else x for name, x in out.items()],
        grid=(batch * tile.blocks(d, n),),
        warps=1,
        interpret=interpret,
    )(*(flat(name, x) for name, x in given.items()))
    return {name: x.reshape(out[name].shape) for name, x in zip(out, found, strict=True)}
