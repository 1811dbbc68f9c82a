"""Mamba's selective state-space recurrence: states in registers, one step after the other.

forward
    grid      batch × blocks of channels; a program is one warp
    reads     u, Δ, b and c once
    writes    y once, and the state after the last step
gradient
    grid      the same, twice: from the beginning, to write the state before every few steps; then
              from the end, where the states between two of those are computed again
    reads     u, Δ and b twice, c and dy once, the states written once
    writes    the gradients once; those of b and c once for each block of channels, added up later
bound by  instructions, and latency.  For each state and step 9 forward, of which the exponential
          alone takes 8 cycles of its unit; 29 backward, of which sums are the half.  Measured on an
          H200 at B8 L2048 D2048 N16 bfloat16: forward 283 µs, where XLA's loop takes 10,654;
          gradient 1626

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
    LIMIT,
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
    unavailable,
    write,
)
from ._rows import counted

PerChannel = list[jax.Array]  # f32[across], of each channel of a thread
PerState = list[jax.Array]  # f32[1, wide], or f32[wide], of each piece
States = list[list[jax.Array]]  # f32[across, wide], of each channel and piece
Activation = Callable[[jax.Array], jax.Array]

MOST_STATES = 128
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


FORWARD = Tile(channels=1, pieces=2, steps=8)
BACKWARD = Tile(channels=2, pieces=1, steps=4)


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


def decays(step: jax.Array, a: list[jax.Array]) -> list[jax.Array]:
    """exp(Δ·a), of a · log₂ e."""
    return [exp2(step[:, None] * x) for x in a]


def advance(h: States, steps: PerChannel, inputs: PerChannel, a: States, b: PerState) -> States:
    """The next states; ``inputs`` are Δ·u."""
    return [
        [
            fma(keep, x, moved[:, None] * y)
            for keep, x, y in zip(decays(step, row), before, b, strict=True)
        ]
        for before, step, moved, row in zip(h, steps, inputs, a, strict=True)
    ]


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


# -- kernels -------------------------------------------------------------------------------


def forward_kernel(
    *refs: Any,
    names: list[str],
    size: Size,
    tile: Tile,
    activate: Activation,
    every: int | None = None,
) -> None:
    """Some channels of one sequence, from its beginning to its end.

    Wanted are ``y``, the last state, or the state before every few steps, of which those of the
    tile are a multiple.
    """
    my = Program(dict(zip(names, refs, strict=True)), size, tile)
    wanted = my.refs.keys()
    a = my.matrix("a")
    full = size.length // tile.steps

    def given(row, k):
        return my.per_channel("delta", row, k), my.per_channel("u", row, k)

    def projections(row, k):
        return my.per_state("b", row, k), my.per_state("c", row, k) if "y" in wanted else None

    def step(row, k, h, given, projections):
        (delta, u), (b, c) = given, projections
        sizes = list(map(activate, delta))
        h = advance(h, sizes, products(sizes, u), a, b)
        if "y" in wanted:
            my.write_per_channel("y", row, k, [my.over_states(states, c) for states in h])
        return h

    def block(i, of):
        row = my.row(i * tile.steps)
        return [of(row, k) for k in range(tile.steps)]

    def body(i, carry):
        h, *now = carry
        following = jnp.minimum(i + 1, full - 1)
        ahead = block(following, given), block(following, projections)
        row = my.row(i * tile.steps)
        for k, (xs, ys) in enumerate(zip(*now, strict=True)):
            if every and k % every == 0:
                my.write_matrix("edges", h, my.sequence, (i * tile.steps + k) // every)
            h = step(row, k, h, xs, ys)
        return h, *ahead

    h, first = my.matrix_or_zeros("start"), np.int32(0)
    if full:
        now = block(first, given), block(first, projections)
        h, *_ = lax.fori_loop(first, np.int32(full), body, (h, *now))

    def one(t, h):
        row = my.row(t)
        return step(row, 0, h, given(row, 0), projections(row, 0))

    for begin in range(full * tile.steps, size.length, every or tile.steps):
        if every:
            my.write_matrix("edges", h, my.sequence, begin // every)
        end = min(begin + (every or tile.steps), size.length)
        h = lax.fori_loop(np.int32(begin), np.int32(end), one, h)
    if "last" in wanted:
        my.write_matrix("last", h, my.sequence)


def backward_kernel(
    *refs: Any,
    names: list[str],
    size: Size,
    tile: Tile,
    activate: Activation,
    slope: Activation,
) -> None:
    """Some channels of one sequence, from its end to its beginning."""
    my = Program(dict(zip(names, refs, strict=True)), size, tile)
    a = my.matrix("a")
    full, rest = divmod(size.length, tile.steps)

    def given(row, k):
        """What a step begins with."""
        return (
            *(my.per_channel(name, row, k) for name in ("delta", "u")),
            my.per_state("b", row, k),
        )

    def block(i, carry, count=tile.steps):
        """The ``count`` steps after the state before block i."""
        states, row = [my.matrix("edges", my.sequence, i)], my.row(i * tile.steps)
        for k in range(count):
            delta, u, b = given(row, k)
            sizes = list(map(activate, delta))
            states.append(advance(states[-1], sizes, products(sizes, u), a, b))
        for end in range(count, 0, -PORTION):
            # All of it is read before anything is written: nothing read may overtake a write.
            steps = range(max(end - PORTION, 0), end)
            read = [
                (*given(row, k), my.per_channel("g", row, k), my.per_state("c", row, k))
                for k in steps
            ]
            for k, xs in reversed(list(zip(steps, read, strict=True))):
                carry = back(row, k, states[k], states[k + 1], xs, carry)
        return carry

    def back(row, k, before, h, xs, carry):
        """The gradients of one step, and the carry before it."""
        (delta, u, b, g, c), (lam, da) = xs, carry
        sizes = list(map(activate, delta))
        inputs = products(sizes, u)
        spread = [jnp.broadcast_to(x, my.shape) for x in c]
        lam = [
            [fma(y, into[:, None], x) for x, y in zip(xs, spread, strict=True)]
            for xs, into in zip(lam, g, strict=True)
        ]
        my.write_per_state("db", row, k, my.over_channels(lam, inputs))
        my.write_per_state("dc", row, k, my.over_channels(h, g))
        along_b = [my.over_states(xs, b) for xs in lam]
        my.write_per_channel("du", row, k, products(sizes, along_b))
        lam = [
            products(decays(step, rates), xs) for step, rates, xs in zip(sizes, a, lam, strict=True)
        ]
        dkeep = [products(xs, past) for xs, past in zip(lam, before, strict=True)]
        along_a = [my.over_states(xs, rates) for xs, rates in zip(dkeep, a, strict=True)]
        ddelta = [
            (x * y + z / LOG2_E) * slope(raw)
            for x, y, z, raw in zip(u, along_b, along_a, delta, strict=True)
        ]
        my.write_per_channel("ddelta", row, k, ddelta)
        da = [
            [fma(x, step[:, None], y) for x, y in zip(xs, ys, strict=True)]
            for xs, step, ys in zip(dkeep, sizes, da, strict=True)
        ]
        return lam, da

    carry = my.matrix_or_zeros("dlast"), my.matrix_or_zeros("")
    carry = block(np.int32(full), carry, rest) if rest else carry
    first, end = np.int32(0), np.int32(full)
    lam, da = lax.fori_loop(first, end, lambda i, carry: block(full - 1 - i, carry), carry)
    my.write_matrix("da", da, my.sequence)
    my.write_matrix("dstart", lam, my.sequence)


BY_STEPS = {"u", "delta", "b", "c", "g", "y", "du", "ddelta", "db", "dc"}

# -- arrays in, arrays out -----------------------------------------------------------------


def padded(states: int) -> int:
    """States that are computed: the blocks of any tile are whole."""
    return max(power_of_two(states), 4 * OF_THREAD)


def refuses(u: Any, delta: Any, a: Any, b: Any, c: Any, *rest: Any, **params: Any) -> str | None:
    """Why these kernels cannot serve the call, or None."""
    if a.shape[1] > MOST_STATES:
        return f"{a.shape[1]} states of a channel do not fit in registers; {MOST_STATES} do"
    return unavailable(u, delta, a, b, c)


def declines(u: Any, *rest: Any, **params: Any) -> str | None:
    """Where XLA is as fast."""
    return (
        "one step is one kernel in XLA, without copies of a, b and c" if u.shape[1] == 1 else None
    )


def declines_gradient(*operands: Any, **params: Any) -> str | None:
    """Until it was compared on a GPU: it was timed there, and compared where it is interpreted."""
    return declines(*operands) or "its results were not compared with float64 on a GPU yet"


def refuses_gradient(u: Any, delta: Any, a: Any, *rest: Any, **params: Any) -> str | None:
    """Why they cannot serve the gradient, or None."""
    (batch, length, d), n = u.shape, padded(a.shape[1])
    if batch * n * max(cdiv(length, BACKWARD.steps) * d, length * BACKWARD.blocks(d, n)) >= LIMIT:
        return "what it writes between two kernels has 2³¹ elements and more"
    return refuses(u, delta, a, *rest)


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


def between(
    ends: jax.Array, given: dict[str, jax.Array], parts: int, delta_softplus: bool
) -> jax.Array:
    """The state before each part, from those after it if it begins with 0.

    What is left of a state after a part is exp(a · Σ Δ) of it.
    """
    delta = given["delta"].astype(jnp.float32)
    sizes = jnp.sum(jax.nn.softplus(delta) if delta_softplus else delta, 1)
    left = jnp.exp2(sizes[:, :, None] * given["a"])
    of_sequence = lambda x: x.reshape(-1, parts, *x.shape[1:])
    ends, left = of_sequence(ends), of_sequence(left)
    h = given.get("start", jnp.zeros_like(ends[:, 0]))
    starts = []
    for i in range(parts):
        starts.append(h)
        h = left[:, i] * h + ends[:, i]
    return jnp.stack(starts, 1).reshape(-1, *h.shape[1:])


def forward(
    u: jax.Array,
    delta: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array | None,
    *,
    delta_softplus: bool,
    interpret: bool = False,
    tile: Tile = FORWARD,
    parts: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """h ← exp(Δ·a)·h + Δ·b·u,  y = Σₙ h·c,  along axis 1; and h after the last step.

    Args:
        u: ``[batch, l, d]``.
        delta: step sizes, ``[batch, l, d]``.
        a: ``[d, n]``.
        b: ``[batch, l, n]``.
        c: ``[batch, l, n]``.
        initial_state: h before the first step, f32 ``[batch, d, n]``, or None.
        delta_softplus: take Δ = ln(1 + e^delta).
        interpret: run without a GPU.
        tile: what a program holds.
        parts: of equal length, into which a sequence is divided: two passes, more programs.
    """
    batch, n = u.shape[0], a.shape[1]
    given = operands(u, delta, a, b, c, start=initial_state)
    kernel = functools.partial(forward_kernel, activate=step_size(delta_softplus))
    given |= {
        name: x.reshape(batch * parts, -1, x.shape[2])
        for name, x in given.items()
        if name in BY_STEPS
    }
    last = {"last": like(u, (batch * parts, *given["a"].shape), jnp.float32)}
    if parts > 1:
        before = {name: x for name, x in given.items() if name not in ("c", "start")}
        ends = run(kernel, "selective_scan_last", before, last, n, tile, interpret)["last"]
        given["start"] = between(ends, given, parts, delta_softplus)
    found = run(kernel, "selective_scan", given, {"y": like(given["u"])} | last, n, tile, interpret)
    return found["y"].reshape(u.shape), found["last"][parts - 1 :: parts, :, :n]


def backward(
    u: jax.Array,
    delta: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    upstream: jax.Array,
    initial_state: jax.Array | None,
    dlast_state: jax.Array | None,
    *,
    delta_softplus: bool,
    interpret: bool = False,
    tile: Tile = BACKWARD,
    edges: Tile = FORWARD,
) -> tuple[jax.Array, ...]:
    """The gradients of u, Δ, a, b, c and the initial state; arguments as of the forward."""
    (batch, length, d), n = u.shape, a.shape[1]
    activate = step_size(delta_softplus)
    given = operands(u, delta, a, b, c, start=initial_state, dlast=dlast_state)
    padded_n = given["a"].shape[1]
    f32 = lambda *shape: like(u, shape, jnp.float32)
    out = {"edges": f32(batch, cdiv(length, tile.steps), d, padded_n)}
    kernel = functools.partial(forward_kernel, activate=activate, every=tile.steps)
    before = {name: x for name, x in given.items() if name not in ("c", "dlast")}
    found = run(kernel, "selective_scan_states", before, out, n, edges, interpret)
    given = {name: x for name, x in given.items() if name != "start"} | found | {"g": upstream}
    parts = f32(tile.blocks(d, padded_n), batch, length, padded_n)
    matrix = f32(batch, d, padded_n)
    out = {"du": like(u), "ddelta": like(u), "da": matrix, "db": parts, "dc": parts}
    kernel = functools.partial(
        backward_kernel,
        activate=activate,
        slope=logistic if delta_softplus else lambda x: jnp.ones(x.shape, jnp.float32),
    )
    out |= {"dstart": matrix}
    found = run(kernel, "selective_scan_backward", given, out, n, tile, interpret)
    summed = lambda name: jnp.sum(found[name], 0)[..., :n].astype(u.dtype)
    return (
        *(found["du"], found["ddelta"], summed("da"), summed("db"), summed("dc")),
        found["dstart"][..., :n],
    )
