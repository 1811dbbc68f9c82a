"""What the kernels of Mamba's recurrence share: what a thread holds, what it reads, its maths.

A thread holds some states of some channels.  More channels share what is read of b and c; more
states of a channel leave less to be summed between threads.
"""

import functools
import itertools
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
    triton,
    write,
)
from ._rows import counted
from ._threads import halves, joined, narrowed, parts

PerChannel = list[jax.Array]  # f32[lanes, across], of each channel of a thread
PerState = list[jax.Array]  # f32[lanes, across], of each state of a thread
States = list[list[jax.Array]]  # f32[lanes, across], of each channel and state of a thread
Activation = Callable[[jax.Array], jax.Array]

OF_THREAD = 4  # neighbouring states that a thread holds: it reads and writes them as one


class Tile(NamedTuple):
    """What a program, one warp, holds in registers."""

    channels: int
    """Of a thread; not neighbours, so that threads are."""
    pieces: int
    """In which the states of a channel are cut; a thread has states of each."""
    steps: int
    """Written out in a loop's body.  The input of as many is on its way meanwhile."""

    def lanes(self, states: int) -> int:
        """Threads that share a channel."""
        return max(states // self.pieces // OF_THREAD, 1)

    def across(self, states: int) -> int:
        """Threads side by side that hold different channels."""
        return WARP // self.lanes(states)

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
    """One program's part of the arrays, which have names; [batch, l, …] are flat.

    The threads of a channel take some steps together: what has a number for each channel each reads
    for one of them, and has from the others what it needs.
    """

    def __init__(self, refs: dict[str, Any], size: Size, tile: Tile) -> None:
        """The first program has the first channels of the first sequence."""
        self.refs, self.size, self.tile = refs, size, tile
        self.lanes, self.across = tile.lanes(size.n), tile.across(size.n)
        self.shape = (self.lanes, self.across)
        blocks, together = tile.blocks(size.d, size.n), self.across * tile.channels
        self.sequence, self.block = program_id(0) // blocks, program_id(0) % blocks
        self.first = bounded(self.block, blocks) * together
        self.lane, self.column = counted(self.lanes)[:, None], counted(self.across)[None, :]
        self.channels = [self.first + (i * self.across) + self.column for i in range(tile.channels)]
        cut = size.d % together > 0
        self.inside = [self.spread(x < size.d) if cut else None for x in self.channels]
        each = self.lane * OF_THREAD + counted(OF_THREAD)[None, :]
        wide = size.n // tile.pieces
        self.states = [each + i * wide for i in range(tile.pieces)]
        added = size.states < size.n
        own = [self.lane * OF_THREAD + (i * wide + j) for i, j in self.of_thread()]
        self.exist = [self.spread(x < size.states) if added else None for x in own]

    def of_thread(self) -> list[tuple[int, int]]:
        """Piece and place of each state of a thread."""
        return list(itertools.product(range(self.tile.pieces), range(OF_THREAD)))

    def spread(self, x: jax.Array) -> jax.Array:
        """For every thread."""
        return jnp.broadcast_to(x, self.shape)

    def together(self, steps: int) -> int:
        """How many of some steps the threads of a channel take at a time."""
        return min(self.lanes, steps & -steps)

    def row(self, step: Any) -> jax.Array:
        """Where a step of the sequence is among those of all."""
        return bounded(self.sequence * self.size.length + step, self.size.rows)

    def per_channel(self, name: str, row: Any, k: int, steps: int) -> list[jax.Array]:
        """A number for each channel, of each of some steps from k on; 0 beyond the last channel."""
        ref = self.refs[name]
        return [
            triton().load(ref.at[at], mask=mask, other=None if mask is None else 0)
            for at, mask in zip(self.of_channels(row, k, steps), self.inside, strict=True)
        ]

    def write_per_channel(
        self, name: str, row: Any, k: int, steps: int, values: PerChannel
    ) -> None:
        """The other way."""
        ref, places = self.refs[name], self.of_channels(row, k, steps)
        for value, at, mask in zip(values, places, self.inside, strict=True):
            triton().store(ref.at[at], narrowed(value, ref.dtype), mask=mask)

    def of_channels(self, row: Any, k: int, steps: int) -> list[jax.Array]:
        """Where they are."""
        at = (row + (self.lane & (steps - 1))) * self.size.d + self.first + self.column
        return [at + (k * self.size.d + i * self.across) for i in range(self.tile.channels)]

    def per_state(self, name: str, row: Any, k: int) -> list[jax.Array]:
        """A number for each state, the same for all channels, k steps on; halves in pairs.

        On its way a pair takes the room of one: :meth:`of_states` has them apart.
        """
        ref = self.refs[name]
        each = 1 if ref.dtype == jnp.float32 else 2
        n = OF_THREAD // each
        first = self.lane * n + counted(n)[None, :]
        wide = lambda x: jnp.broadcast_to(x[:, None, :], (*self.shape, n))
        pieces = self.tile.pieces
        starts = [self.size.n * (k * pieces + i) // pieces // each for i in range(pieces)]
        at = row * (self.size.n // each)
        return [triton().load(ref.at[wide(at + (first + start))]) for start in starts]

    def of_states(self, read: list[jax.Array]) -> PerState:
        """In float32, of each state of a thread."""
        apart = [x for piece in read for x in parts(piece)]
        if apart[0].dtype == jnp.float32:
            return apart
        return [x for pair in apart for x in halves(pair, self.refs["u"].dtype)]

    def write_sums(self, name: str, row: Any, k: int, values: list[jax.Array]) -> None:
        """Two numbers for each state, of this block of channels: what ``summed`` has of them.

        Threads that have the same write the same.
        """
        size, own = self.size, len(self.exist)
        row = bounded(self.block * size.rows + row, self.tile.blocks(size.d, size.n) * size.rows)
        for i, value in enumerate(values):
            which = (i * self.across + self.column) & (2 * own - 1)
            of, piece, place = which // own, which % own // OF_THREAD, which % OF_THREAD
            state = piece * (size.n // self.tile.pieces) + self.lane * OF_THREAD + place
            at = (row * 2 + of) * size.n + state
            write(self.refs[name], (at + k * 2 * size.n,), value)

    def matrix(self, name: str, *first: Any) -> States:
        """A number for each state of each channel."""
        return [
            [
                x
                for where, mask in row
                for x in parts(
                    read(self.refs[name], (*first, *where), mask, None if mask is None else 0.0)
                )
            ]
            for row in self.places()
        ]

    def write_matrix(self, name: str, values: States, *first: Any) -> None:
        """The other way."""
        for row, places in zip(values, self.places(), strict=True):
            for i, (where, mask) in enumerate(places):
                piece = joined(row[i * OF_THREAD : (i + 1) * OF_THREAD])
                write(self.refs[name], (*first, *where), piece, mask)

    def places(self) -> list[list[tuple[Any, Any]]]:
        """Of each channel and piece: indices into a matrix, and the mask."""
        spread = lambda x: jnp.broadcast_to(x, (*self.shape, OF_THREAD))
        return [
            [
                (
                    (spread(x[:, :, None]), spread(n[:, None, :])),
                    None if mask is None else spread(mask[:, :, None]),
                )
                for n in self.states
            ]
            for x, mask in zip(self.channels, self.inside, strict=True)
        ]

    def zeros(self, dtype: Any = jnp.float32) -> list[list[jax.Array]]:
        """Of each channel and state of a thread."""
        return [[jnp.zeros(self.shape, dtype) for _ in self.exist] for _ in self.channels]

    def matrix_or_zeros(self, name: str) -> States:
        """Of the sequence, if there is such an array."""
        return self.matrix(name, self.sequence) if name in self.refs else self.zeros()

    def over_states(self, xs: list[jax.Array], ys: list[jax.Array]) -> jax.Array:
        """Σ x·y over a thread's states.  Those that were added are 0 in y, but 0 · inf is not."""
        return dot(xs, ys, self.exist)

    def over_channels(self, xs: States, ys: PerChannel) -> PerState:
        """Σ x·y over a thread's channels, of each of its states."""
        return [dot(list(x), ys, self.inside) for x in zip(*xs, strict=True)]


def dot(xs: list[jax.Array], ys: list[jax.Array], masks: list[jax.Array | None]) -> jax.Array:
    """Σ x·y where there is something."""
    total = None
    for x, y, mask in zip(xs, ys, masks, strict=True):
        x = x if mask is None else jnp.where(mask, x, 0)
        total = x * y if total is None else fma(x, y, total)
    assert total is not None
    return total


def decays(steps: PerChannel, a: States) -> States:
    """exp(Δ·a), of a · log₂ e."""
    return [[exp2(step * x) for x in row] for step, row in zip(steps, a, strict=True)]


def advance(h: States, keep: States, inputs: PerChannel, b: PerState) -> States:
    """The next states; ``inputs`` are Δ·u."""
    return [
        [fma(k, x, moved * y) for k, x, y in zip(kept, before, b, strict=True)]
        for before, kept, moved in zip(h, keep, inputs, strict=True)
    ]


def in_float32(x: jax.Array) -> jax.Array:
    """``x`` itself, or wider."""
    return x.astype(jnp.float32)


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

BY_STEPS = {"u", "delta", "b", "c", "g", "y", "du", "ddelta", "dbc"}


def padded(states: int) -> int:
    """States that are computed: the blocks of any tile are whole."""
    return max(power_of_two(states), 4 * OF_THREAD)


def operands(u, delta, a, b, c, **states: jax.Array | None) -> dict[str, jax.Array]:
    """What the kernels read.  A state that was added does not decay, and nothing moves it."""
    added = padded(a.shape[1]) - a.shape[1]
    wide = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, added)])
    f32 = lambda x: wide(x.astype(jnp.float32))

    def of_steps(x):
        """Halves in pairs."""
        if x.dtype == jnp.float32:
            return wide(x)
        return lax.bitcast_convert_type(wide(x).reshape(*x.shape[:2], -1, 2), jnp.int32)

    given = {"u": u, "delta": delta, "a": f32(a) * LOG2_E, "b": of_steps(b), "c": of_steps(c)}
    return given | {name: f32(x) for name, x in states.items() if x is not None}


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
