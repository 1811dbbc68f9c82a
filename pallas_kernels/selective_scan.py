"""Mamba's selective state-space recurrence: states in registers, one step after the other.

grid      batch × blocks of channels; a program is one warp
reads     u, Δ, b and c once
writes    y once, and the state after the last step
bound by  instructions, and latency: 10 for each state and step, of which the exponential takes
          8 cycles of its unit.  Measured on an H200 at B8 L2048 D2048 N16: 247 µs in bfloat16,
          where XLA's loop takes 10,926; 297 in float32, which gives back what rounding takes
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import like, unavailable
from ._selective_scan import (
    BY_STEPS,
    Activation,
    Program,
    Size,
    Tile,
    advance,
    decays,
    in_float32,
    operands,
    products,
    run,
    step_size,
)
from ._selective_scan_kept import Kept
from ._threads import of_row, summed
from ._tiles import Tiles, varied

MOST_STATES = 128
FORWARD = Tile(channels=1, pieces=1, steps=8)
IN_FLOAT32 = Tile(channels=2, pieces=1, steps=8)
FULL = 1024  # programs that keep the card busy
SHORTEST = 128  # steps of a part
WINDOW = 4  # blocks of a tile's steps until a state is corrected: 288 µs, after each block 308


def extents(u: Any, a: Any) -> dict[str, int | str]:
    """What decides about the tiles of both directions."""
    batch, length, d = u.shape
    return {"sequences": batch, "steps": length, "channels": d, "states": a.shape[1]}


def by_rule(u: Any) -> Tile:
    """Numbers of float32 take twice the registers on their way, so more channels share them."""
    return IN_FLOAT32 if u.dtype == jnp.float32 else FORWARD


def tiles(u: Any, delta: Any, a: Any, *rest: Any, **params: Any) -> Tiles:
    """More or fewer steps, channels and threads of a channel."""
    ways = {"channels": (1, 2), "pieces": (1, 2), "steps": (4, 8, 16)}
    return Tiles.of(extents(u, a), by_rule(u), *varied(by_rule(u), **ways))


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


def forward_kernel(
    *refs: Any,
    names: list[str],
    size: Size,
    tile: Tile,
    activate: Activation,
    corrected: bool,
    window: int = 1,
    every: int | None = None,
) -> None:
    """Some channels of one sequence, from its beginning to its end.

    Wanted are ``y``, the last state, or the state before every few steps, of which those of the
    tile are a multiple.  After ``window`` blocks of those what rounding took is given back, if the
    states are to be ``corrected``.
    """
    my = Program(dict(zip(names, refs, strict=True)), size, tile)
    wanted = my.refs.keys()
    a = my.matrix("a")
    full, together = size.length // tile.steps, my.together(tile.steps)
    groups = [range(k, k + together) for k in range(0, tile.steps, together)]

    def of_channels(row, steps):
        """Δ and u of some steps, one in each thread of a channel."""
        return [my.per_channel(name, row, steps[0], len(steps)) for name in ("delta", "u")]

    def of_states(row, steps):
        """b and c of some steps."""
        names = ("b", "c") if "y" in wanted else ("b",)
        return [[my.per_state(name, row, k) for name in names] for k in steps]

    def advanced(row, steps, h, kept, per_channel, per_state, edge=None):
        """The states after some steps, and what they kept; every few are written, to ``edge``."""
        delta, u = (list(map(in_float32, each)) for each in per_channel)
        sizes, ys = list(map(activate, delta)), []
        inputs = products(sizes, u)
        for i, (k, read) in enumerate(zip(steps, per_state, strict=True)):
            if edge is not None and k % every == 0:
                my.write_matrix("edges", h, my.sequence, edge + k // every)
            b, *c = map(my.of_states, read)
            keep = decays([of_row(x, i) for x in sizes], a)
            h = advance(h, keep, [of_row(x, i) for x in inputs], b)
            kept = kept and kept.and_step(keep)
            ys.append([my.over_states(states, *c) for states in h] if c else [])
        if "y" in wanted:
            y = [summed(of_channel, 0)[0] for of_channel in zip(*ys, strict=True)]
            my.write_per_channel("y", row, steps[0], len(steps), y)
        return h, kept and kept.and_sizes(sizes)

    def given(row):
        """What a block reads.  Before it writes: nothing read may overtake a write."""
        return [(of_channels(row, steps), of_states(row, steps)) for steps in groups]

    def block(i, carry):
        h, kept, now = carry
        row = my.row(i * tile.steps)
        following = given(my.row(jnp.minimum(i + 1, full - 1) * tile.steps))
        edge = i * (tile.steps // every) if every else None
        for steps, read in zip(groups, now, strict=True):
            h, kept = advanced(row, steps, h, kept, *read, edge=edge)
        return h, kept, following

    def blocks(first, count, carry):
        """Some blocks from one on; then, in float32, the state that they should have left."""
        (h, rests, now), kept = carry, Kept.nothing(my) if corrected else None
        one = lambda i, carry: block(first + i, carry)
        h, kept, now = lax.fori_loop(np.int32(0), np.int32(count), one, (h, kept, now))
        if kept is not None:
            h, rests = kept.corrected(h, rests, a, count * tile.steps, together)
        return h, rests, now

    h = my.matrix_or_zeros("start")
    if full:
        many = min(window, full) if corrected else full
        whole, rest = divmod(full, many)
        several = lambda i, carry: blocks(i * many, many, carry)
        carry = h, my.zeros(), given(my.row(np.int32(0)))
        carry = lax.fori_loop(np.int32(0), np.int32(whole), several, carry)
        h, *_ = blocks(np.int32(whole * many), rest, carry) if rest else carry

    def one(t, h):
        row, steps = my.row(t), range(1)
        read = of_channels(row, steps), of_states(row, steps)
        return advanced(row, steps, h, None, *read)[0]

    for begin in range(full * tile.steps, size.length, every or tile.steps):
        if every:
            my.write_matrix("edges", h, my.sequence, begin // every)
        end = min(begin + (every or tile.steps), size.length)
        h = lax.fori_loop(np.int32(begin), np.int32(end), one, h)
    if "last" in wanted:
        my.write_matrix("last", h, my.sequence)


def parts_of(batch: int, length: int, blocks: int) -> int:
    """Into how many a sequence is divided: so many that the card is full.

    Two passes take twice the time, so two parts gain nothing.  Measured on an H200, one sequence of
    2048 steps, 2048 channels: 155, 157, 94, 67 and 73 µs in 1, 2, 4, 8 and 16.
    """
    for parts in (16, 8, 4):
        if batch * blocks * parts <= FULL and length % parts == 0 and length >= parts * SHORTEST:
            return parts
    return 1


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
    tile: Tile | None = None,
    parts: int | None = None,
    corrected: bool | None = None,
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
        tile: what a program holds; None: by rule.
        parts: of equal length, into which a sequence is divided; None: as many as pay.
        corrected: carry on what rounding the state loses; None: in float32.  In halves that is
            far below what they promise, and takes a quarter more of the time.
    """
    (batch, length, d), n = u.shape, a.shape[1]
    tile = tile or by_rule(u)
    given = operands(u, delta, a, b, c, start=initial_state)
    if parts is None:
        parts = parts_of(batch, length, tile.blocks(d, given["a"].shape[1]))
    activate = step_size(delta_softplus)
    corrected = bool(u.dtype == jnp.float32) if corrected is None else corrected
    kernel = functools.partial(
        forward_kernel, activate=activate, corrected=corrected, window=WINDOW
    )
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
