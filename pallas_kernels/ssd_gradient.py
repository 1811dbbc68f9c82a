"""The gradient of Mamba-2's recurrence: states made again, cotangents from the end, then the rest.

states, cotangents
    grid      heads (× parts of p) × sequences; forward, and from the last block back
    reads     x and b; or dy, c and the states               writes   a state a block
across, within blocks: the gradient
    grid      groups × parts of their heads × blocks × sequences
    reads     x and dy twice, cotangents twice, states once  writes   dx; db and dc of its heads
bound by  tensor cores, and one block waiting for another.  Measured on an H200, 8 sequences of 2048
          steps, 64 heads of 64, 128 states, bfloat16: 1115 µs, of which states and cotangents 485;
          with all products of a block in one kernel it took 1678

The gradient of bfloat16 makes do with one piece of every state between blocks, a rounding like its
own: two take 1.3 times as long.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    Block,
    Decay,
    Head,
    Scalar,
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
from ._tiles import Tiles, varied
from .ssd import FORWARD, extents, refuses

BACKWARD = Tile(64, 64, 4, 2)
FAR = Tile(64, 64, 4, 1)
SPLITS = 2  # parts of the heads of a group


class Cut(NamedTuple):
    """How the gradient is cut: :func:`gradient` says of what each is."""

    tile: Tile = BACKWARD
    far: Tile = FAR
    edge: Tile = FORWARD
    splits: int = SPLITS


def tiles_gradient(x: Any, dt: Any, a: Any, b: Any, *rest: Any, **params: Any) -> Tiles:
    """More or fewer warps and stages of each kernel, and parts of the heads."""
    first, ways = Cut(), {"warps": (4, 8), "stages": (1, 2, 3)}
    several = {name: [*varied(getattr(first, name), **ways)] for name in ("tile", "far", "edge")}
    return Tiles.of(extents(x, b), first, *varied(first, **several, splits=(1, 2, 4)))


def declines_gradient(x: Any, *rest: Any, **params: Any) -> str | None:
    """Where XLA is faster: 173 µs against 154 of two steps on an H200.  Three were not measured."""
    if x.shape[1] <= 2:
        return f"a block of {x.shape[1]} of {BACKWARD.steps} steps is mostly empty"
    return None


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
    what has decayed since its beginning.  The second also multiplies the two: what goes across a
    block, all of which its decay has scaled.
    """
    x_ref, *sums_refs, b_ref = refs[:5]
    before_ref, across_ref = (refs[5], refs[-1]) if reverse else (None, None)
    *initial, edges_ref, last_ref = refs[6:-1] if reverse else refs[5:]
    here = Head.of(x_ref, b_ref, tile.width)
    blocks = cdiv(x_ref.shape[1], tile.steps)

    def step(i, h):
        j = blocks - 1 - i if reverse else i
        at = (here.row, j, here.head, here.state[:, None], here.column[None, :])
        for k, piece in enumerate(pieces(h, edges_ref.shape[0])):
            write(edges_ref, (k, *at), piece, here.mask)
        t = j * tile.steps + counted(tile.steps)
        x = load(x_ref, *here.channels(x_ref, t))
        b = load(b_ref, *here.projections(b_ref, t))
        decay = Decay.read(sums_refs, here.row, here.head, j, tile.steps)
        weight = decay.kept if reverse else decay.dt * decay.rest
        fed = x.astype(jnp.float32) * weight[:, None]
        new = h * decay.whole
        if before_ref is not None and across_ref is not None:
            both = sum(
                new * load(before_ref, (k, *at), here.mask).astype(jnp.float32)
                for k in range(edges_ref.shape[0])
            )
            across = jnp.sum(jnp.sum(both, 0, keepdims=True), 1)
            triton().store(across_ref.at[here.row, here.head, j + counted(1)], across)
        return product(pieces(b), pieces(fed, FED), (0, 0), new)

    h = loop(blocks, step, here.first(initial[0] if initial else None))
    write(last_ref, here.at_state, h, here.mask)


def edges(
    x: jax.Array,
    summed: Sequence[jax.Array],
    b: jax.Array,
    initial: jax.Array | None,
    before: jax.Array | None = None,
    *,
    interpret: bool,
    tile: Tile,
) -> Sequence[jax.Array]:
    """States at the edges of blocks, ``[pieces, batch, blocks, h, n, p]``; and after the last.

    Beside states ``before``: their cotangents, and the products of both, ``[batch, h, blocks]``.
    """
    batch, length, heads, p = x.shape
    n = b.shape[-1]
    reverse = before is not None
    # The products are summed over a head's columns, so those are one program's.
    tile = tile._replace(width=block_of(p) if reverse else min(tile.width, block_of(p)))
    blocks = cdiv(length, tile.steps)
    kept = 1 if x.dtype == jnp.bfloat16 else PIECES
    shape = (kept, batch, blocks, heads, n, p)
    out = [like(x, shape, jnp.bfloat16), like(x, (batch, heads, p, n), jnp.float32)]
    return launch(
        functools.partial(edges_kernel, tile=tile, reverse=reverse),
        "ssd_cotangents" if reverse else "ssd_states",
        out=out + [like(x, (batch, heads, blocks), jnp.float32)] * reverse,
        grid=(heads * cdiv(p, tile.width), batch),
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )(x, *summed, b, *given(before), *given(initial))


class Share(NamedTuple):
    """Some heads of a group, one block of steps of a sequence, a program works on."""

    group: Scalar
    split: Scalar
    j: Scalar
    row: Scalar
    first: Scalar
    t: jax.Array
    column: jax.Array
    state: jax.Array

    @classmethod
    def of(cls, x_ref: Any, b_ref: Any, steps: int, each: int):
        """That of this program of a grid of parts of groups, blocks and sequences."""
        heads, p = x_ref.shape[2:]
        groups, n = b_ref.shape[2:]
        splits = np.int32(heads // groups // each)
        split, group = lax.rem(program_id(0), splits), lax.div(program_id(0), splits)
        j = program_id(1)
        t = j * steps + counted(steps)
        column, state = counted(block_of(p)), counted(block_of(n))
        first = (group * splits + split) * each
        return cls(group, split, j, program_id(2), first, t, column, state)

    def channels(self, ref: Any, head: Scalar) -> tuple[tuple[Any, ...], Block | None]:
        """Where a head's columns are, and which of them there are."""
        mask = inside(self.t, ref.shape[1], self.column, ref.shape[3])
        return (self.row, self.t[:, None], head, self.column[None, :]), mask

    def projections(self, ref: Any) -> tuple[tuple[Any, ...], Block | None]:
        """Where b or c is, or its gradient, and how much of it there is."""
        mask = inside(self.t, ref.shape[-3], self.state, ref.shape[-1])
        return (self.row, self.t[:, None], self.group, self.state[None, :]), mask

    def edge(self, ref: Any, head: Scalar) -> list[Block]:
        """A head's state before the block, or its cotangent after it, in pieces."""
        mask = inside(self.state, ref.shape[-2], self.column, ref.shape[-1])
        at = (self.row, self.j, head, self.state[:, None], self.column[None, :])
        return [load(ref, (k, *at), mask) for k in range(ref.shape[0])]


def across_kernel(*refs: Any, tile: Tile, each: int, reverse: bool) -> None:
    """What db owes to the cotangents after the block; or dc, reversed, to the states before it."""
    x_ref, *sums_refs, b_ref, edges_ref, rows_ref, db_ref = refs
    here = Share.of(x_ref, b_ref, tile.steps, each)
    b = load(b_ref, *here.projections(b_ref))

    def step(i, db):
        head = here.first + i
        x = load(x_ref, *here.channels(x_ref, head))
        decay = Decay.read(sums_refs, here.row, head, here.j, tile.steps)
        weight = decay.kept if reverse else decay.rest
        part = product(pieces(x), here.edge(edges_ref, head), (1, 1)) * weight[:, None]
        triton().store(
            rows_ref.at[here.row, head, here.t], jnp.sum(part * b.astype(jnp.float32), 1)
        )
        return db + (part if reverse else part * decay.dt[:, None])

    db = loop(each, step, jnp.zeros((tile.steps, here.state.size), jnp.float32))
    at, mask = here.projections(db_ref)
    write(db_ref, (here.split, *at), db, mask)


def within_kernel(*refs: Any, tile: Tile, each: int) -> None:
    """dx, and what db and dc owe to the scores of a block, summed over the heads first."""
    x_ref, dy_ref, *sums_refs, b_ref, c_ref, dh_ref = refs[:8]
    dx_ref, later_ref, direct_ref, db_ref, dc_ref = refs[8:]
    here = Share.of(x_ref, b_ref, tile.steps, each)
    b = load(b_ref, *here.projections(b_ref))
    c = load(c_ref, *here.projections(c_ref))
    scores = dot(b, c, (1, 1))  # [s, t]

    def step(i, pairs):
        head = here.first + i
        at, mask = here.channels(x_ref, head)
        x, dy = load(x_ref, at, mask), load(dy_ref, at, mask)
        decay = Decay.read(sums_refs, here.row, head, here.j, tile.steps)
        dt, between = decay.dt[:, None], decay.between(turned=True)
        dx = product(pieces(b), here.edge(dh_ref, head), (1, 0)) * (decay.rest[:, None] * dt)
        dx = product(pieces(scores * between * dt), pieces(dy), (1, 0), dx)
        write(dx_ref, at, dx, mask)
        seen = between * dot(x, dy, (1, 1))
        pairs = pairs + seen * dt
        seen = seen * scores
        triton().store(later_ref.at[here.row, head, here.t], jnp.sum(seen * dt, 0))
        triton().store(direct_ref.at[here.row, head, here.t], jnp.sum(seen, 1))
        return pairs

    pairs = loop(each, step, jnp.zeros((tile.steps, tile.steps), jnp.float32))
    at, mask = here.projections(db_ref)
    write(db_ref, (here.split, *at), product(pieces(pairs), pieces(c), (1, 0)), mask)
    write(dc_ref, (here.split, *at), product(pieces(pairs), pieces(b), (0, 0)), mask)


def finish_kernel(
    dt_ref,
    a_ref,
    later_ref,
    of_state_ref,
    direct_ref,
    fed_ref,
    across_ref,
    ddt_ref,
    da_ref,
    *,
    steps: int,
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
    dt, fed = load(dt_ref, at, there), load(fed_ref, at, there)
    later = load(later_ref, at, there) + load(of_state_ref, at, there)
    direct = load(direct_ref, at, there) + fed
    across = load(across_ref, (row, head, j), head < heads) + jnp.sum(dt * fed, 0)
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
    far: Tile = FAR,
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
        tile: within blocks.
        far: across blocks, of as many steps.
        edge: of the states and their cotangents.
        splits: parts of the heads of a group, each of which sums its own db and dc.
    """
    batch, length, heads, _ = x.shape
    groups, each = b.shape[2], heads // b.shape[2]
    blocks = cdiv(length, tile.steps)
    splits = max(s for s in range(1, splits + 1) if each % s == 0)
    far = far._replace(steps=tile.steps)
    summed = sums(dt, a, tile.steps, interpret)
    how: dict[str, Any] = {"interpret": interpret, "tile": edge._replace(steps=tile.steps)}
    h, _ = edges(x, summed, b, initial_state, **how)
    dh, dinitial, across = edges(upstream, summed, c, dlast_state, h, **how)
    by_step = like(x, (batch, heads, blocks * tile.steps), jnp.float32)
    by_split = like(b, (splits, *b.shape), jnp.float32)

    def over_heads(kernel: Any, name: str, out: Any, tile: Tile, **params: bool) -> Any:
        """A program for every part of a group, block and sequence."""
        return launch(
            functools.partial(kernel, tile=tile, each=each // splits, **params),
            name,
            out=out,
            grid=(groups * splits, blocks, batch),
            warps=tile.warps,
            stages=tile.stages,
            interpret=interpret,
        )

    shared = (by_step, by_split)
    fed, db = over_heads(across_kernel, "ssd_db", shared, far, reverse=False)(x, *summed, b, dh)
    of_state, dc = over_heads(across_kernel, "ssd_dc", shared, far, reverse=True)(
        upstream, *summed, c, h
    )
    out = (like(x), by_step, by_step, by_split, by_split)
    dx, later, direct, db_within, dc_within = over_heads(within_kernel, "ssd_dx", out, tile)(
        x, upstream, *summed, b, c, dh
    )
    ddt, da = launch(
        functools.partial(finish_kernel, steps=tile.steps),
        "ssd_finish",
        out=(like(dt), like(dt, (blocks, batch, heads), jnp.float32)),
        grid=(blocks, batch, cdiv(heads, HEADS)),
        warps=4,
        interpret=interpret,
    )(summed[2], a, later, of_state, direct, fed, across)
    db, dc = (jnp.sum(d + e, 0).astype(b.dtype) for d, e in ((db, db_within), (dc, dc_within)))
    return dx, ddt, jnp.sum(da, (0, 1)).astype(a.dtype), db, dc, dinitial


def cut_gradient(
    *operands: Any, tile: Cut = Cut(), interpret: bool = False, **params: Any
) -> tuple[jax.Array, ...]:
    """:func:`gradient`, by a setting."""
    return gradient(*operands, **tile._asdict(), interpret=interpret, **params)
