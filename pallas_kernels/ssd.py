"""Mamba-2's state-space recurrence on tensor cores.

Within a block of steps the recurrence is a masked product; a program goes from block to block with
the state in registers, and no scores reach memory.

grid      heads (× parts of p) × sequences
reads     x, b and c once, b and c for every head        writes   y once
bound by  tensor cores, and one block waiting for another.  Measured on an H200, 8 sequences of 2048
          steps, 64 heads of 64, 128 states, bfloat16: 353 µs, 371 if every head has its own b and
          c (XLA: 3765 in chunks of 256)

Dao & Gu 2024, arXiv:2405.21060.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import GRID, cdiv, launch, like, unavailable, write
from ._rows import counted
from ._ssd import (
    FED,
    Block,
    Decay,
    Head,
    Tile,
    block_of,
    dot,
    given,
    load,
    loop,
    pieces,
    precedes,
    product,
    sums,
)
from ._tiles import FULL, Tiles, varied

FORWARD = Tile(64, 64, 4, 2)


def extents(x: Any, b: Any) -> dict[str, int | str]:
    """What decides about the tiles of both directions."""
    batch, length, heads, p = x.shape
    sizes: dict[str, int | str] = {"heads": min(batch * heads, FULL), "steps": length, "width": p}
    return sizes | {"states": b.shape[-1], "each": heads // b.shape[2]}


def tiles(x: Any, dt: Any, a: Any, b: Any, *rest: Any, **params: Any) -> Tiles:
    """Fewer steps at a time, fewer columns, more warps."""
    ways = {"steps": (32, 64), "width": (32, 64), "warps": (2, 4, 8), "stages": (1, 2, 3)}
    return Tiles.of(extents(x, b), FORWARD, *varied(FORWARD, **ways))


def refuses(x: Any, dt: Any, a: Any, b: Any, *rest: Any, **params: Any) -> str | None:
    """Why these kernels cannot serve the call, or None."""
    if x.dtype == jnp.float32:
        return "float32 is left to XLA: six products of bfloat16 for one take 1.5 times as long"
    if b.shape[-1] > 128:
        return f"{b.shape[-1]} states of a channel do not fit on chip; at most 128"
    if x.shape[0] > GRID:
        return f"{x.shape[0]} sequences; at most {GRID}"
    return unavailable(x, b)


def declines(x: Any, *rest: Any, **params: Any) -> str | None:
    """Where XLA is faster: 58 µs against 26, and backward 148 against 35, of 64 sequences."""
    return "a block of one step is mostly empty" if x.shape[1] == 1 else None


def causal(scores: Block, x: Block, y: Block) -> Block:
    """scores · x + y, where what is not finite in x or scores reaches no step before its own.

    0 times that is NaN.
    """
    past, fine = precedes(x.shape[0]), jnp.abs(x.astype(jnp.float32)) < np.float32(np.inf)
    bad, ones = jnp.where(fine, 0.0, 1.0), jnp.where(past, 1.0, 0.0)
    reached = dot(ones.astype(jnp.bfloat16), bad.astype(jnp.bfloat16), (1, 0))
    clean = jnp.where(fine, x, jnp.zeros_like(x))
    total = product(pieces(jnp.where(past, scores, 0)), pieces(clean), (1, 0), y)
    return jnp.where(reached > 0, jnp.nan, total)


def steps_of(refs: Sequence[Any], here: Head, y_ref: Any, tile: Tile, product_of: Any) -> Any:
    """From block to block: its outputs written, the state after it; of x, sums, b and c."""
    x_ref, *sums_refs, b_ref, c_ref = refs

    def step(j, h):
        t = j * tile.steps + counted(tile.steps)
        x = load(x_ref, *here.channels(x_ref, t))
        b = load(b_ref, *here.projections(b_ref, t))
        c = load(c_ref, *here.projections(c_ref, t))
        decay = Decay.read(sums_refs, here.row, here.head, j, tile.steps)
        scores = dot(c, b, (1, 1)) * (decay.between() * decay.dt[None, :])
        y = product(pieces(c), pieces(h), (1, 0)) * decay.kept[:, None]
        at, mask = here.channels(y_ref, t)
        write(y_ref, at, product_of(scores, x, y), mask)
        fed = x.astype(jnp.float32) * (decay.dt * decay.rest)[:, None]
        return product(pieces(b), pieces(fed, FED), (0, 0), h * decay.whole)

    return step


def scan_kernel(*refs: Any, tile: Tile) -> None:
    """One head, or some columns of it, a block of steps after another."""
    *initial, y_ref, last_ref = refs[6:]
    here = Head.of(refs[0], refs[4], tile.width)
    plain = lambda scores, x, y: product(pieces(scores), pieces(x), (1, 0), y)
    step = steps_of(refs[:6], here, y_ref, tile, plain)
    blocks = cdiv(refs[0].shape[1], tile.steps)
    h = loop(blocks, step, here.first(initial[0] if initial else None))
    write(last_ref, here.at_state, h, here.mask)


def mend_kernel(*refs: Any, tile: Tile) -> None:
    """The outputs again, if the last state is not finite: it never is, if any operand was not."""
    last_ref, _, *initial, y_ref = refs[6:]
    here = Head.of(refs[0], refs[4], tile.width)
    last = jnp.abs(here.first(last_ref))
    spoilt = jnp.max(jnp.where(last < np.float32(np.inf), 0, 1))
    blocks = spoilt.astype(jnp.int32) * cdiv(refs[0].shape[1], tile.steps)
    step = steps_of(refs[:6], here, y_ref, tile, causal)
    lax.fori_loop(np.int32(0), blocks, step, here.first(initial[0] if initial else None))


def scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    chunk_size: int = 64,
    interpret: bool = False,
    tile: Tile = FORWARD,
) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the state after the last step, ``[batch, h, p, n]`` in float32.

    Args:
        x: ``[batch, l, h, p]``, a half type.
        dt: ``[batch, l, h]``.
        a: ``[h]``.
        b: ``[batch, l, g, n]``.
        c: like ``b``.
        initial_state: before the first step, ``[batch, h, p, n]`` in float32; zero when None.
        chunk_size: is not what this takes at once.
        interpret: run without a GPU.
        tile: is.
    """
    batch, _, heads, p = x.shape
    tile = tile._replace(width=min(tile.width, block_of(p)))
    how: dict[str, Any] = {"grid": (heads * cdiv(p, tile.width), batch), "interpret": interpret}
    how |= {"warps": tile.warps, "stages": tile.stages}
    operands = (x, *sums(dt, a, tile.steps, interpret), b, c)
    y, last = launch(
        functools.partial(scan_kernel, tile=tile),
        "ssd_scan",
        out=(like(x), like(x, (batch, heads, p, b.shape[-1]), jnp.float32)),
        **how,
    )(*operands, *given(initial_state))
    mend = functools.partial(mend_kernel, tile=tile)
    y = launch(mend, "ssd_mend", out=like(x), aliases={7: 0}, **how)(
        *operands, last, y, *given(initial_state)
    )
    return y, last
