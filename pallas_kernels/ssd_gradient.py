"""The gradient of Mamba-2's recurrence: states made again, cotangents from the end, then the rest.

states, cotangents
    grid      heads (× parts of p) × sequences; forward, and from the last block back
    reads     x and b, or dy and c                           writes   a state a block
gradient
    grid      groups × parts of their heads × blocks × sequences
    reads     x, dy and the states once                      writes   dx; db and dc of its heads
bound by  tensor cores, and one block waiting for another.  Measured on an H200, 8 sequences of 2048
          steps, 64 heads of 64, 128 states, bfloat16: 1678 µs, of which states and cotangents 414

The gradient of bfloat16 makes do with one piece of every state between blocks, a rounding like its
own: two take twice as long.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import GRID, LIMIT, cdiv, launch, like, program_id, triton, write
from ._rows import counted
from ._ssd import (
    FED,
    HEADS,
    PIECES,
    Decay,
    Head,
    Tile,
    block_of,
    dot,
    given,
    inside,
    load,
    loop,
    pieces,
    product,
    sums,
)
from .ssd import FORWARD, refuses

BACKWARD = Tile(64, 64, 8, 1)
SPLITS = 2  # parts of the heads of a group


def refuses_gradient(x: Any, dt: Any, a: Any, b: Any, *rest: Any, **params: Any) -> str | None:
    """Why the gradient cannot be served, or None."""
    batch, length, heads, p = x.shape
    if PIECES * batch * cdiv(length, BACKWARD.steps) * heads * p * b.shape[-1] >= LIMIT:
        return "states between blocks would be 2³¹ numbers or more"
    if p > BACKWARD.width:
        return f"heads of {p} do not fit on chip; at most {BACKWARD.width}"
    if length > GRID * BACKWARD.steps:
        return f"{length} steps; at most {GRID * BACKWARD.steps}"
    return refuses(x, dt, a, b, *rest, **params)


def edges_kernel(*refs: Any, tile: Tile, reverse: bool) -> None:
    """The state before every block of one head; or, from the end, its cotangent after every block.

    The one grows by dt · x bᵀ, less what decays till the end of the block; the other by dy cᵀ, less
    what has decayed since its beginning.
    """
    x_ref, *sums_refs, b_ref = refs[:5]
    *initial, edges_ref, last_ref = refs[5:]
    here = Head.of(x_ref, b_ref, tile.width)
    blocks = cdiv(x_ref.shape[1], tile.steps)

    def step(i, h):
        j = blocks - 1 - i if reverse else i
        for k, piece in enumerate(pieces(h, edges_ref.shape[0])):
            at = (k, here.row, j, here.head, here.state[:, None], here.column[None, :])
            write(edges_ref, at, piece, here.mask)
        t = j * tile.steps + counted(tile.steps)
        x = load(x_ref, *here.channels(x_ref, t))
        b = load(b_ref, *here.projections(b_ref, t))
        decay = Decay.read(sums_refs, here.row, here.head, j, tile.steps)
        weight = decay.kept if reverse else decay.dt * decay.rest
        fed = x.astype(jnp.float32) * weight[:, None]
        return product(pieces(b), pieces(fed, FED), (0, 0), h * decay.whole)

    h = loop(blocks, step, here.first(initial[0] if initial else None))
    write(last_ref, here.at_state, h, here.mask)


def edges(
    x: jax.Array,
    summed: Sequence[jax.Array],
    b: jax.Array,
    initial: jax.Array | None,
    *,
    reverse: bool,
    interpret: bool,
    tile: Tile,
) -> tuple[jax.Array, jax.Array]:
    """States at the edges of blocks, ``[pieces, batch, blocks, h, n, p]``; and after the last."""
    batch, length, heads, p = x.shape
    n = b.shape[-1]
    tile = tile._replace(width=min(tile.width, block_of(p)))
    kept = 1 if x.dtype == jnp.bfloat16 else PIECES
    shape = (kept, batch, cdiv(length, tile.steps), heads, n, p)
    return launch(
        functools.partial(edges_kernel, tile=tile, reverse=reverse),
        "ssd_cotangents" if reverse else "ssd_states",
        out=(like(x, shape, jnp.bfloat16), like(x, (batch, heads, p, n), jnp.float32)),
        grid=(heads * cdiv(p, tile.width), batch),
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )(x, *summed, b, *given(initial))


def gradient_kernel(*refs: Any, tile: Tile, each: int) -> None:
    """One block of steps, ``each`` heads of a group one after the other.

    What db and dc owe to scores is summed over the heads first: scores are c bᵀ for all of them.
    """
    x_ref, dy_ref, *sums_refs, b_ref, c_ref, h_ref, dh_ref = refs[:9]
    dx_ref, later_ref, direct_ref, across_ref, db_ref, dc_ref = refs[9:]
    _, length, heads, p = x_ref.shape
    groups, n = b_ref.shape[2:]
    splits = np.int32(heads // groups // each)
    split, group = lax.rem(program_id(0), splits), lax.div(program_id(0), splits)
    j, row = program_id(1), program_id(2)
    t = j * tile.steps + counted(tile.steps)
    column, state = counted(block_of(p)), counted(block_of(n))
    at_group, of_group = (row, t[:, None], group, state[None, :]), inside(t, length, state, n)
    b, c = load(b_ref, at_group, of_group), load(c_ref, at_group, of_group)
    scores = dot(b, c, (1, 1))  # [s, t]
    as_wide = lambda parts: functools.reduce(jnp.add, [q.astype(jnp.float32) for q in parts])

    def step(i, carry):
        pairs, db, dc = carry
        head = (group * splits + split) * each + i
        at, mask = (row, t[:, None], head, column[None, :]), inside(t, length, column, p)
        x, dy = load(x_ref, at, mask), load(dy_ref, at, mask)
        at_edge, of_edge = (
            (row, j, head, state[:, None], column[None, :]),
            inside(state, n, column, p),
        )
        edge = lambda ref: [load(ref, (k, *at_edge), of_edge) for k in range(h_ref.shape[0])]
        h, dh = edge(h_ref), edge(dh_ref)
        decay = Decay.read(sums_refs, row, head, j, tile.steps)
        dt, rest, between = decay.dt[:, None], decay.rest, decay.between(turned=True)

        of_state = product(pieces(b), dh, (1, 0))  # [s, p]
        fed = jnp.sum(of_state * x.astype(jnp.float32), 1) * rest
        dx = of_state * (rest[:, None] * dt)
        dx = product(pieces(scores * between * dt), pieces(dy), (1, 0), dx)
        write(dx_ref, at, dx, mask)

        seen = between * dot(x, dy, (1, 1))
        pairs = pairs + seen * dt
        seen = seen * scores
        from_state = product(pieces(dy), h, (1, 1)) * decay.kept[:, None]  # [t, n]
        dc = dc + from_state
        db = db + product(pieces(x), dh, (1, 1)) * (rest[:, None] * dt)

        later = jnp.sum(seen * dt, 0) + jnp.sum(from_state * c.astype(jnp.float32), 1)
        triton().store(later_ref.at[row, head, t], later)
        triton().store(direct_ref.at[row, head, t], jnp.sum(seen, 1) + fed)
        both = jnp.sum(jnp.sum(as_wide(h) * as_wide(dh), 0, keepdims=True), 1)
        across = jnp.sum((decay.dt * fed)[None, :], 1) + both * decay.whole[0]
        triton().store(across_ref.at[row, head, j + counted(1)], across)
        return pairs, db, dc

    zero = lambda *shape: jnp.zeros(shape, jnp.float32)
    start = zero(tile.steps, tile.steps), *[zero(tile.steps, state.size)] * 2
    pairs, db, dc = loop(each, step, start)
    db = product(pieces(pairs), pieces(c), (1, 0), db)
    dc = product(pieces(pairs), pieces(b), (0, 0), dc)
    for ref, d in ((db_ref, db), (dc_ref, dc)):
        write(ref, (split, *at_group), d, of_group)


def finish_kernel(
    dt_ref, a_ref, later_ref, direct_ref, across_ref, ddt_ref, da_ref, *, steps: int
) -> None:
    """Cotangents of dt and a, those of a summed over a block.

    dt · a of a step decays what is before it on its way to what is at it or later; so its cotangent
    is the sum, from the step to the end of the block, of what the steps have seen less what was
    seen of them, and all that goes across the end.
    """
    j, row = program_id(0), program_id(1)
    _, length, heads = ddt_ref.shape
    t = j * steps + (steps - 1 - counted(steps))  # from the last
    head = program_id(2) * HEADS + counted(HEADS)
    there = jnp.broadcast_to((head < heads)[None, :], (steps, HEADS))
    at = (row, head[None, :], t[:, None])
    dt, later, direct = (load(ref, at, there) for ref in (dt_ref, later_ref, direct_ref))
    across = load(across_ref, (row, head, j), head < heads)
    a = load(a_ref, (head,), head < heads).astype(jnp.float32)
    of_product = jnp.cumsum(later - dt * direct, 0) + across[None, :]
    ddt = direct + of_product * a[None, :]
    write(ddt_ref, (row, t[:, None], head[None, :]), ddt, there & (t < length)[:, None])
    write(da_ref, (j, row, head), jnp.sum(of_product * dt, 0), head < heads)


def gradient(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    upstream: jax.Array,
    initial_state: jax.Array | None = None,
    dlast_state: jax.Array | None = None,
    *,
    chunk_size: int = 64,
    interpret: bool = False,
    tile: Tile = BACKWARD,
    edge: Tile = FORWARD,
    splits: int = SPLITS,
) -> tuple[jax.Array, ...]:
    """Cotangents of x, dt, a, b, c and the initial state.

    Args:
        x: as in :func:`scan`.
        dt: as in the forward.
        a: as in the forward.
        b: as in the forward.
        c: as in the forward.
        upstream: cotangent of the outputs.
        initial_state: as in the forward.
        dlast_state: cotangent of the state after the last step; zero when None.
        chunk_size: is not what this takes at once.
        interpret: run without a GPU.
        tile: of the gradient.
        edge: of the states and their cotangents.
        splits: parts of the heads of a group, each of which sums its own db and dc.
    """
    batch, length, heads, _ = x.shape
    groups, each = b.shape[2], heads // b.shape[2]
    blocks = cdiv(length, tile.steps)
    splits = max(s for s in range(1, splits + 1) if each % s == 0)
    summed = sums(dt, a, tile.steps, interpret)
    how: dict[str, Any] = {"interpret": interpret, "tile": edge._replace(steps=tile.steps)}
    h, _ = edges(x, summed, b, initial_state, reverse=False, **how)
    dh, dinitial = edges(upstream, summed, c, dlast_state, reverse=True, **how)
    by_step = like(x, (batch, heads, blocks * tile.steps), jnp.float32)
    by_block = like(x, (batch, heads, blocks), jnp.float32)
    by_split = like(b, (splits, *b.shape), jnp.float32)
    dx, later, direct, across, db, dc = launch(
        functools.partial(gradient_kernel, tile=tile, each=each // splits),
        "ssd_gradient",
        out=(like(x), by_step, by_step, by_block, by_split, by_split),
        grid=(groups * splits, blocks, batch),
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )(x, upstream, *summed, b, c, h, dh)
    ddt, da = launch(
        functools.partial(finish_kernel, steps=tile.steps),
        "ssd_finish",
        out=(like(dt), like(dt, (blocks, batch, heads), jnp.float32)),
        grid=(blocks, batch, cdiv(heads, HEADS)),
        warps=4,
        interpret=interpret,
    )(summed[2], a, later, direct, across)
    db, dc = (jnp.sum(d, 0).astype(b.dtype) for d in (db, dc))
    return dx, ddt, jnp.sum(da, (0, 1)).astype(a.dtype), db, dc, dinitial
