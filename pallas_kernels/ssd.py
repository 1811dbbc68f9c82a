"""Mamba-2's state-space recurrence on tensor cores, and its gradient.

Within a block of steps the recurrence is a masked product; a program goes from block to block with
the state in registers, and no scores reach memory.

scan
    grid      heads (× parts of p) × sequences
    reads     x, b and c once, b and c for every head        writes   y once
states, cotangents
    grid      the same; forward, and from the last block back
    reads     x and b, or dy and c                           writes   a state a block
gradient
    grid      groups × parts of their heads × blocks × sequences
    reads     x, dy and the states once                      writes   dx; db and dc of its heads
bound by  tensor cores, and one block waiting for another.  Measured on an H200, 8 sequences of 2048
          steps, 64 heads of 64, 128 states, bfloat16: 353 µs, 371 if every head has its own b and
          c (XLA: 3765 in chunks of 256); the gradient 1678, of which states and cotangents 414

dt · a is summed within blocks first: a stretch decays by the difference of two sums, which are
kept as unrounded pairs, or a strong decay would take the digits of what comes after it.

A product takes bfloat16.  What is not is cut into pieces that are, of 8 bits each: float16 is two,
scores and states are two, what is added to a state is three, for it is returned in float32.  The
gradient of bfloat16 makes do with one of every state between blocks, a rounding like its own: two
take twice as long.

Dao & Gu 2024, arXiv:2405.21060.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import (
    LIMIT,
    cdiv,
    exp,
    launch,
    like,
    power_of_two,
    program_id,
    triton,
    unavailable,
    write,
)
from ._rows import counted

Block = jax.Array  # of a matrix
Scalar = jax.Array

PIECES = 2  # of scores and states
FED = 3  # of what is added to a state
HEADS = 32  # whose dt a program sums at a time
GRID = 65535  # programs along the second and third axis, at most


class Tile(NamedTuple):
    """What a program works on: steps at a time, columns of x, by some warps."""

    steps: int
    width: int
    warps: int
    stages: int


FORWARD = Tile(64, 64, 4, 2)
BACKWARD = Tile(64, 64, 8, 1)
SPLITS = 2  # parts of the heads of a group


def refuses(x: Any, dt: Any, a: Any, b: Any, *rest: Any, **params: Any) -> str | None:
    """Why these kernels cannot serve the call, or None."""
    if x.dtype == jnp.float32:
        return "float32 is left to XLA: six products of bfloat16 for one take 1.5 times as long"
    if b.shape[-1] > 128:
        return f"{b.shape[-1]} states of a channel do not fit on chip; at most 128"
    if x.shape[0] > GRID:
        return f"{x.shape[0]} sequences; at most {GRID}"
    return unavailable(x, b)


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


# -- sums of dt · a ------------------------------------------------------------------------


def sums_kernel(dt_ref, a_ref, high_ref, low_ref, by_head_ref, *, steps: int) -> None:
    """One block of steps, some heads.

    The high parts are multiples of one power of two, so large that their sums are exact; the low
    parts are what is left.
    """
    row, length, heads = program_id(1), dt_ref.shape[1], dt_ref.shape[2]
    t = program_id(0) * steps + counted(steps)
    head = program_id(2) * HEADS + counted(HEADS)
    there = jnp.broadcast_to((head < heads)[None, :], (steps, HEADS))
    mask = there & (t < length)[:, None]
    dt = triton().load(dt_ref.at[row, t[:, None], head[None, :]], mask=mask, other=0.0)
    dt = dt.astype(jnp.float32)
    a = triton().load(a_ref.at[head], mask=head < heads, other=0.0).astype(jnp.float32)
    x = dt * a[None, :]
    # The unit: what is below 2^e, summed over the steps, has 24 bits of it or less.
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(x), 0), jnp.int32) >> 23
    unit = jnp.clip(largest + (steps.bit_length() + 1 - 23), 1, 230)
    # 1.5 · 2²³ of it, added and taken away, leave multiples of it.
    shift = lax.bitcast_convert_type((unit + 23 << 23) | 2**22, jnp.float32)[None, :]
    high = (x + shift) - shift
    for ref, part in (
        (high_ref, jnp.cumsum(high, 0)),
        (low_ref, jnp.cumsum(x - high, 0)),
        (by_head_ref, dt),
    ):
        triton().store(ref.at[row, head[None, :], t[:, None]], part, mask=there)


def sums(dt: jax.Array, a: jax.Array, steps: int, interpret: bool) -> Sequence[jax.Array]:
    """Sums from the start of every block, high and low parts, and dt; ``[batch, h, l]`` each.

    In float32, filled up to whole blocks with steps of dt = 0.
    """
    batch, length, heads = dt.shape
    blocks = cdiv(length, steps)
    return launch(
        functools.partial(sums_kernel, steps=steps),
        "ssd_sums",
        out=[like(dt, (batch, heads, blocks * steps), jnp.float32)] * 3,
        grid=(blocks, batch, cdiv(heads, HEADS)),
        warps=4,
        interpret=interpret,
    )(dt, a)


class Decay(NamedTuple):
    """A block of steps of one head: the sums, dt, and the sums at its end."""

    high: jax.Array  # [steps]
    low: jax.Array
    dt: jax.Array
    high_end: jax.Array  # [1]
    low_end: jax.Array

    @classmethod
    def read(cls, refs: Sequence[Any], row: Scalar, head: Scalar, j: Scalar, steps: int):
        """That of block j."""
        t = j * steps + counted(steps)
        end = j * steps + (steps - 1) + counted(1)
        load = lambda ref, at: triton().load(ref.at[row, head, at])
        return cls(*(load(ref, t) for ref in refs), *(load(ref, end) for ref in refs[:2]))

    @property
    def kept(self) -> jax.Array:
        """What is left, after each step, of the state before the block."""
        return exp(self.high + self.low)

    @property
    def rest(self) -> jax.Array:
        """What is left, at the end of the block, of what each step adds."""
        return exp((self.high_end - self.high) + (self.low_end - self.low))

    @property
    def whole(self) -> Block:
        """What the block leaves of a state, ``[1, 1]``."""
        return exp(self.high_end + self.low_end)[:, None]

    def between(self, *, turned: bool = False) -> Block:
        """What is left of step s after step t, 0 before it: ``[t, s]``, or turned ``[s, t]``."""
        t, s = (slice(None), None), (None, slice(None))
        t, s = (s, t) if turned else (t, s)
        here = counted(self.dt.size)
        past = (self.high[t] - self.high[s]) + (self.low[t] - self.low[s])
        return exp(jnp.where(here[t] >= here[s], past, -jnp.inf))


# -- products ------------------------------------------------------------------------------


def pieces(x: Block, count: int = PIECES) -> list[Block]:
    """bfloat16 blocks whose sum is x, to 8 bits for each: exactly that, if x is a half."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found, rest = [], x.astype(jnp.float32)
    for _ in range(count - 1):
        # In bits: a cast there and back is a cast that XLA leaves out, where this is interpreted.
        bits = lax.bitcast_convert_type(rest, jnp.int32) + 2**15
        piece = lax.bitcast_convert_type(bits & -(2**16), jnp.float32)
        found.append(piece.astype(jnp.bfloat16))
        rest = rest - piece
    return [*found, rest.astype(jnp.bfloat16)]


def dot(x: Block, y: Block, over: tuple[int, int]) -> Block:
    """A product over one axis of each, in float32."""
    dims = ((over[:1], over[1:]), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def product(
    xs: list[Block], ys: list[Block], over: tuple[int, int], total: Block | None = None
) -> Block:
    """That of two sums of pieces, less what is too small to count; added to a total."""
    count = max(len(xs), len(ys))
    for i, j in sorted(np.ndindex(len(xs), len(ys)), key=sum, reverse=True):
        if i + j < count:
            part = dot(xs[i], ys[j], over)
            total = part if total is None else total + part
    assert total is not None
    return total


# -- blocks --------------------------------------------------------------------------------


def inside(row: jax.Array, rows: int, column: jax.Array, columns: int) -> Block | None:
    """Which of a block there is; None if all is, wherever blocks of its size begin."""
    masks = [(row < rows)[:, None]] * (rows % row.size > 0)
    masks += [(column < columns)[None, :]] * (columns % column.size > 0)
    shape = (row.size, column.size)
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None


def load(ref: Any, at: tuple[Any, ...], mask: Block | None) -> Block:
    """A block as it is; 0 where there is none."""
    return triton().load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


class Head(NamedTuple):
    """Where a program works: some columns of a head of a sequence, and the states of each."""

    row: Scalar
    head: Scalar
    group: Scalar
    column: jax.Array
    state: jax.Array
    mask: Block | None  # [state, column]

    @classmethod
    def of(cls, x_ref: Any, b_ref: Any, width: int):
        """That of this program of a grid of heads times parts of p, and sequences."""
        _, _, heads, p = x_ref.shape
        groups, n = b_ref.shape[2:]
        parts, each = np.int32(cdiv(p, width)), np.int32(heads // groups)
        head = lax.div(program_id(0), parts)
        column = lax.rem(program_id(0), parts) * width + counted(width)
        state = counted(block_of(n))
        mask = inside(state, n, column, p)
        return cls(program_id(1), head, lax.div(head, each), column, state, mask)

    @property
    def at_state(self) -> tuple[Any, ...]:
        """In ``[batch, h, p, n]``, as ``[state, column]``."""
        return self.row, self.head, self.column[None, :], self.state[:, None]

    def first(self, ref: Any) -> Block:
        """The state to start from; 0 if there is no array of them."""
        if ref is None:
            return jnp.zeros((self.state.size, self.column.size), jnp.float32)
        return load(ref, self.at_state, self.mask)

    def channels(self, ref: Any, t: jax.Array) -> tuple[tuple[Any, ...], Block | None]:
        """Where the columns are at some steps, and which of them there are."""
        mask = inside(t, ref.shape[1], self.column, ref.shape[3])
        return (self.row, t[:, None], self.head, self.column[None, :]), mask

    def projections(self, ref: Any, t: jax.Array) -> tuple[tuple[Any, ...], Block | None]:
        """Where b or c is at some steps, and how much of it there is."""
        mask = inside(t, ref.shape[1], self.state, ref.shape[3])
        return (self.row, t[:, None], self.group, self.state[None, :]), mask


def block_of(n: int) -> int:
    """The least size of an axis that holds n and that products take."""
    return max(16, power_of_two(n))


def loop(blocks: int, step: Any, carry: Any) -> Any:
    """``carry`` through the blocks of a sequence, or heads of a group."""
    return lax.fori_loop(np.int32(0), np.int32(blocks), step, carry)


# -- forward -------------------------------------------------------------------------------


def scan_kernel(*refs: Any, tile: Tile) -> None:
    """One head, or some columns of it, a block of steps after another."""
    x_ref, *sums_refs, b_ref, c_ref = refs[:6]
    *initial, y_ref, last_ref = refs[6:]
    here = Head.of(x_ref, b_ref, tile.width)

    def step(j, h):
        t = j * tile.steps + counted(tile.steps)
        x = load(x_ref, *here.channels(x_ref, t))
        b = load(b_ref, *here.projections(b_ref, t))
        c = load(c_ref, *here.projections(c_ref, t))
        decay = Decay.read(sums_refs, here.row, here.head, j, tile.steps)
        scores = dot(c, b, (1, 1)) * (decay.between() * decay.dt[None, :])
        y = product(pieces(c), pieces(h), (1, 0)) * decay.kept[:, None]
        y = product(pieces(scores), pieces(x), (1, 0), y)
        at, mask = here.channels(y_ref, t)
        write(y_ref, at, y, mask)
        fed = x.astype(jnp.float32) * (decay.dt * decay.rest)[:, None]
        return product(pieces(b), pieces(fed, FED), (0, 0), h * decay.whole)

    h = loop(cdiv(x_ref.shape[1], tile.steps), step, here.first(initial[0] if initial else None))
    write(last_ref, here.at_state, h, here.mask)


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
    return launch(
        functools.partial(scan_kernel, tile=tile),
        "ssd_scan",
        out=(like(x), like(x, (batch, heads, p, b.shape[-1]), jnp.float32)),
        grid=(heads * cdiv(p, tile.width), batch),
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )(x, *sums(dt, a, tile.steps, interpret), b, c, *given(initial_state))


def given(state: jax.Array | None) -> list[jax.Array]:
    """The states to start from, if there are any."""
    return [] if state is None else [state]


# -- gradient ------------------------------------------------------------------------------


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
