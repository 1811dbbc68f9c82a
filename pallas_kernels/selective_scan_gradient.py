"""The gradient of Mamba's recurrence, from its states computed again.

grid      batch × blocks of channels, twice: from the beginning, to write the state before every few
          steps; then from the end, where the states between two of those are computed again
reads     u, Δ and b twice, c and dy once, the states written once
writes    the gradients once; those of b and c once for each block of channels, added up later
bound by  instructions, and latency: 21 for each state and step and 7 for those at the edges, which
          are 537 MB written and read.  Measured on an H200 at B8 L2048 D2048 N16 bfloat16: 1,016 µs
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import LIMIT, LOG2_E, cdiv, fma, like
from ._selective_scan import (
    Activation,
    PerChannel,
    PerState,
    Program,
    Size,
    States,
    Tile,
    advance,
    decays,
    in_float32,
    logistic,
    operands,
    padded,
    products,
    run,
    step_size,
)
from ._selective_scan_kept import Kept
from ._threads import of_row, summed
from ._tiles import Tiles, varied
from .selective_scan import extents, forward_kernel, refuses

BACKWARD = Tile(channels=2, pieces=1, steps=4)
EDGES = Tile(channels=1, pieces=1, steps=8)


class Cut(NamedTuple):
    """How the gradient is cut: from the end, and for the states at the edges of its blocks."""

    tile: Tile = BACKWARD
    edges: Tile = EDGES


def tiles_gradient(u: Any, delta: Any, a: Any, *rest: Any, **params: Any) -> Tiles:
    """More steps, more or fewer channels."""
    first = Cut()
    back = [*varied(BACKWARD, channels=(1, 2), steps=(4, 8))]
    edges = [*varied(EDGES, channels=(1, 2), steps=(4, 8, 16))]
    return Tiles.of(extents(u, a), first, *varied(first, tile=back, edges=edges))


def refuses_gradient(u: Any, delta: Any, a: Any, *rest: Any, **params: Any) -> str | None:
    """Why they cannot serve the gradient, or None."""
    (batch, length, d), n = u.shape, padded(a.shape[1])
    if (
        batch * n * max(cdiv(length, BACKWARD.steps) * d, 2 * length * BACKWARD.blocks(d, n))
        >= LIMIT
    ):
        return "what it writes between two kernels has 2³¹ elements and more"
    return refuses(u, delta, a, *rest)


class Step(NamedTuple):
    """What a step of the recurrence has, and what it has made of it."""

    before: States
    after: States
    keep: States
    sizes: PerChannel
    inputs: PerChannel
    g: PerChannel
    b: PerState
    c: PerState


def backward_kernel(
    *refs: Any,
    names: list[str],
    size: Size,
    tile: Tile,
    activate: Activation,
    slope: Activation,
    corrected: bool,
) -> None:
    """Some channels of one sequence, from its end to its beginning."""
    my = Program(dict(zip(names, refs, strict=True)), size, tile)
    a = my.matrix("a")
    full, rest = divmod(size.length, tile.steps)

    def given(i, count=tile.steps):
        """Of block i: the state before it; Δ, u and dy; b and c."""
        row, together = my.row(i * tile.steps), my.together(count)
        per_channel = [
            [my.per_channel(name, row, k, together) for k in range(0, count, together)]
            for name in ("delta", "u", "g")
        ]
        per_state = [[my.per_state(name, row, k) for k in range(count)] for name in ("b", "c")]
        return my.matrix("edges", my.sequence, i), per_channel, per_state

    def block(i, given, carry, count=tile.steps):
        """The gradients of the steps of block i, and the carry before it."""
        lam, da, rests = carry
        before, per_channel, per_state = given
        row, together, kept = my.row(i * tile.steps), my.together(count), Kept.nothing(my)
        delta, u, g = ([list(map(in_float32, xs)) for xs in each] for each in per_channel)
        b, c = (list(map(my.of_states, each)) for each in per_state)
        sizes = [list(map(activate, xs)) for xs in delta]
        inputs = list(map(products, sizes, u))
        at = lambda each, k: [of_row(x, k % together) for x in each[k // together]]
        steps = []
        for k in range(count):
            of_step, moved = at(sizes, k), at(inputs, k)
            keep = decays(of_step, a)
            after = advance(before, keep, moved, b[k])
            steps.append(Step(before, after, keep, of_step, moved, at(g, k), b[k], c[k]))
            before = after
        for n in reversed(range(count // together)):
            along = []
            for k in reversed(range(n * together, (n + 1) * together)):
                kept = kept.and_step(steps[k].keep)
                lam, da, found = back(row, k, steps[k], lam, da)
                along.insert(0, found)
            kept = kept.and_sizes(sizes[n])
            along_a, along_b = (
                [summed(of_channel, 0)[0] for of_channel in zip(*each, strict=True)]
                for each in zip(*along, strict=True)
            )
            du = products(sizes[n], along_b)
            ddelta = [
                (x * y + z / LOG2_E) * slope(raw)
                for x, y, z, raw in zip(u[n], along_b, along_a, delta[n], strict=True)
            ]
            my.write_per_channel("du", row, n * together, together, du)
            my.write_per_channel("ddelta", row, n * together, together, ddelta)
        if corrected:
            lam, rests = kept.corrected(lam, rests, a, count, together)
        return lam, da, rests

    def back(row, k, step, lam, da):
        """The carry before a step; and a thread's part of the sums along a and along b."""
        lam = [
            [fma(x, into, y) for x, y in zip(step.c, xs, strict=True)]
            for xs, into in zip(lam, step.g, strict=True)
        ]
        db, dc = my.over_channels(lam, step.inputs), my.over_channels(step.after, step.g)
        my.write_sums("dbc", row, k, summed([*db, *dc], 1))
        along_b = [my.over_states(xs, step.b) for xs in lam]
        lam = list(map(products, step.keep, lam))
        dkeep = list(map(products, lam, step.before))
        along_a = list(map(my.over_states, dkeep, a))
        da = [
            [fma(x, of_channel, y) for x, y in zip(xs, ys, strict=True)]
            for xs, of_channel, ys in zip(dkeep, step.sizes, da, strict=True)
        ]
        return lam, da, (along_a, along_b)

    def from_end(i, carry):
        now, *carry = carry
        i = full - 1 - i
        # All of it is read before anything is written: nothing read may overtake a write.
        following = given(jnp.maximum(i - 1, 0))
        return following, *block(i, now, carry)

    carry = my.matrix_or_zeros("dlast"), my.zeros(), my.zeros()
    if rest:
        carry = block(np.int32(full), given(np.int32(full), rest), carry, rest)
    if full:
        now = given(np.int32(full - 1))
        _, *carry = lax.fori_loop(np.int32(0), np.int32(full), from_end, (now, *carry))
    lam, da, _ = carry
    my.write_matrix("da", da, my.sequence)
    my.write_matrix("dstart", lam, my.sequence)


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
    edges: Tile = EDGES,
    corrected: bool | None = None,
) -> tuple[jax.Array, ...]:
    """The gradients of u, Δ, a, b, c and the initial state; arguments as of the forward."""
    (batch, length, d), n = u.shape, a.shape[1]
    activate = step_size(delta_softplus)
    given = operands(u, delta, a, b, c, start=initial_state, dlast=dlast_state)
    padded_n = given["a"].shape[1]
    f32 = lambda *shape: like(u, shape, jnp.float32)
    out = {"edges": f32(batch, cdiv(length, tile.steps), d, padded_n)}
    corrected = bool(u.dtype == jnp.float32) if corrected is None else corrected
    how: dict[str, Any] = {"activate": activate, "corrected": corrected}
    kernel = functools.partial(forward_kernel, **how, every=tile.steps)
    before = {name: x for name, x in given.items() if name not in ("c", "dlast")}
    found = run(kernel, "selective_scan_states", before, out, n, edges, interpret)
    given = {name: x for name, x in given.items() if name != "start"} | found | {"g": upstream}
    sums = f32(tile.blocks(d, padded_n), batch, length, 2, padded_n)
    matrix = f32(batch, d, padded_n)
    out = {"du": like(u), "ddelta": like(u), "da": matrix, "dbc": sums}
    kernel = functools.partial(
        backward_kernel,
        **how,
        slope=logistic if delta_softplus else lambda x: jnp.ones(x.shape, jnp.float32),
    )
    out |= {"dstart": matrix}
    found = run(kernel, "selective_scan_backward", given, out, n, tile, interpret)
    total = lambda x: jnp.sum(x, 0)[..., :n].astype(u.dtype)
    db, dc = (total(found["dbc"][..., i, :]) for i in (0, 1))
    return found["du"], found["ddelta"], total(found["da"]), db, dc, found["dstart"][..., :n]


def cut_backward(
    *operands: Any, tile: Cut = Cut(), interpret: bool = False, **params: Any
) -> tuple[jax.Array, ...]:
    """:func:`backward`, by a setting."""
    return backward(*operands, **tile._asdict(), interpret=interpret, **params)
