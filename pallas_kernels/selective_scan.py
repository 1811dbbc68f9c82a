"""Mamba's selective state-space recurrence: states in registers, one step after the other.

grid      batch × blocks of channels; a program is one warp
reads     u, Δ, b and c once
writes    y once, and the state after the last step
bound by  instructions, and latency: 9 for each state and step, of which the exponential alone takes
          8 cycles of its unit.  Measured on an H200 at B8 L2048 D2048 N16 bfloat16: 367 µs, where
          XLA's loop takes 10,654; 280 if what the exponential is off by were left
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
    Kept,
    Program,
    Size,
    Tile,
    advance,
    decays,
    operands,
    products,
    run,
    step_size,
)
from ._tiles import Tiles, varied

MOST_STATES = 128
FORWARD = Tile(channels=1, pieces=1, steps=8)
FULL = 1024  # programs that keep the card busy
SHORTEST = 128  # steps of a part


def extents(u: Any, a: Any) -> dict[str, int | str]:
    """What decides about the tiles of both directions."""
    batch, length, d = u.shape
    return {"sequences": batch, "steps": length, "channels": d, "states": a.shape[1]}


def tiles(u: Any, delta: Any, a: Any, *rest: Any, **params: Any) -> Tiles:
    """More or fewer steps, channels and threads of a channel."""
    ways = {"channels": (1, 2), "pieces": (1, 2), "steps": (4, 8, 16)}
    return Tiles.of(extents(u, a), FORWARD, *varied(FORWARD, **ways))


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
        keep = decays(sizes, a)
        h = advance(h, keep, products(sizes, u), b)
        if "y" in wanted:
            my.write_per_channel("y", row, k, [my.over_states(states, c) for states in h])
        return h, sizes, keep

    def block(i, of):
        row = my.row(i * tile.steps)
        return [of(row, k) for k in range(tile.steps)]

    def body(i, carry):
        h, rests, *now = carry
        following = jnp.minimum(i + 1, full - 1)
        ahead = block(following, given), block(following, projections)
        row, kept = my.row(i * tile.steps), Kept.nothing(tile.channels, tile.pieces, my.shape)
        for k, (xs, ys) in enumerate(zip(*now, strict=True)):
            if every and k % every == 0:
                my.write_matrix("edges", h, my.sequence, (i * tile.steps + k) // every)
            h, sizes, keep = step(row, k, h, xs, ys)
            kept = kept.and_step(sizes, keep)
        return *(kept.corrected(h, rests, a) if corrected else (h, rests)), *ahead

    h, first = my.matrix_or_zeros("start"), np.int32(0)
    if full:
        now = block(first, given), block(first, projections)
        rests = my.matrix_or_zeros("")
        h, *_ = lax.fori_loop(first, np.int32(full), body, (h, rests, *now))

    def one(t, h):
        row = my.row(t)
        return step(row, 0, h, given(row, 0), projections(row, 0))[0]

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
    tile: Tile = FORWARD,
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
        tile: what a program holds.
        parts: of equal length, into which a sequence is divided; None: as many as pay.
        corrected: carry on what rounding the state loses; None: in float32.  In halves that is
            far below what they promise, and takes a quarter more of the time.
    """
    (batch, length, d), n = u.shape, a.shape[1]
    given = operands(u, delta, a, b, c, start=initial_state)
    if parts is None:
        parts = parts_of(batch, length, tile.blocks(d, given["a"].shape[1]))
    activate = step_size(delta_softplus)
    corrected = bool(u.dtype == jnp.float32) if corrected is None else corrected
    kernel = functools.partial(forward_kernel, activate=activate, corrected=corrected)
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
