"""The gradient of Mamba's recurrence, from its states computed again.

grid      batch × blocks of channels, twice: from the beginning, to write the state before every few
          steps; then from the end, where the states between two of those are computed again
reads     u, Δ and b twice, c and dy once, the states written once
writes    the gradients once; those of b and c once for each block of channels, added up later
bound by  instructions, and latency: 29 for each state and step, of which sums are the half.
          Measured on an H200 at B8 L2048 D2048 N16 bfloat16: 1517 µs
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import LIMIT, LOG2_E, cdiv, fma, like
from ._selective_scan import (
    PORTION,
    Activation,
    Kept,
    Program,
    Size,
    Tile,
    advance,
    decays,
    logistic,
    operands,
    padded,
    products,
    run,
    step_size,
)
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
    if batch * n * max(cdiv(length, BACKWARD.steps) * d, length * BACKWARD.blocks(d, n)) >= LIMIT:
        return "what it writes between two kernels has 2³¹ elements and more"
    return refuses(u, delta, a, *rest)


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

    def given(row, k):
        """What a step begins with."""
        return (
            *(my.per_channel(name, row, k) for name in ("delta", "u")),
            my.per_state("b", row, k),
        )

    def block(i, carry, count=tile.steps):
        """The ``count`` steps after the state before block i."""
        rests, *carry = carry
        kept = Kept.nothing(tile.channels, tile.pieces, my.shape)
        states, row = [my.matrix("edges", my.sequence, i)], my.row(i * tile.steps)
        for k in range(count):
            delta, u, b = given(row, k)
            sizes = list(map(activate, delta))
            states.append(advance(states[-1], decays(sizes, a), products(sizes, u), b))
        for end in range(count, 0, -PORTION):
            # All of it is read before anything is written: nothing read may overtake a write.
            steps = range(max(end - PORTION, 0), end)
            read = [
                (*given(row, k), my.per_channel("g", row, k), my.per_state("c", row, k))
                for k in steps
            ]
            for k, xs in reversed(list(zip(steps, read, strict=True))):
                carry, sizes, keep = back(row, k, states[k], states[k + 1], xs, carry)
                kept = kept.and_step(sizes, keep)
        lam, da = carry
        if corrected:
            lam, rests = kept.corrected(lam, rests, a)
        return rests, lam, da

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
        keep = decays(sizes, a)
        lam = [products(row, xs) for row, xs in zip(keep, lam, strict=True)]
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
        return (lam, da), sizes, keep

    carry = my.matrix_or_zeros(""), my.matrix_or_zeros("dlast"), my.matrix_or_zeros("")
    carry = block(np.int32(full), carry, rest) if rest else carry
    first, end = np.int32(0), np.int32(full)
    _, lam, da = lax.fori_loop(first, end, lambda i, carry: block(full - 1 - i, carry), carry)
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
    parts = f32(tile.blocks(d, padded_n), batch, length, padded_n)
    matrix = f32(batch, d, padded_n)
    out = {"du": like(u), "ddelta": like(u), "da": matrix, "db": parts, "dc": parts}
    kernel = functools.partial(
        backward_kernel,
        **how,
        slope=logistic if delta_softplus else lambda x: jnp.ones(x.shape, jnp.float32),
    )
    out |= {"dstart": matrix}
    found = run(kernel, "selective_scan_backward", given, out, n, tile, interpret)
    summed = lambda name: jnp.sum(found[name], 0)[..., :n].astype(u.dtype)
    return (
        *(found["du"], found["ddelta"], summed("da"), summed("db"), summed("dc")),
        found["dstart"][..., :n],
    )


def cut_backward(
    *operands: Any, tile: Cut = Cut(), interpret: bool = False, **params: Any
) -> tuple[jax.Array, ...]:
    """:func:`backward`, by a setting."""
    return backward(*operands, **tile._asdict(), interpret=interpret, **params)
