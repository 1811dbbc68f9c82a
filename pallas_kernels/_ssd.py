"""What the kernels of Mamba-2's recurrence share: sums of decay, products in pieces, blocks.

dt · a is summed within blocks first: a stretch decays by the difference of two sums, which are
kept as unrounded pairs, or a strong decay would take the digits of what comes after it.

A product takes bfloat16.  What is not is cut into pieces that are, of 8 bits each: float16 is two,
scores and states are two, what is added to a state is three, for it is returned in float32.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import (
    cdiv,
    exp,
    launch,
    like,
    power_of_two,
    program_id,
    triton,
)
from ._rows import counted

Block = jax.Array  # of a matrix
Scalar = jax.Array

PIECES = 2  # of scores and states
FED = 3  # of what is added to a state
HEADS = 32  # whose dt a program sums at a time


class Tile(NamedTuple):
    """What a program works on: steps at a time, columns of x, by some warps."""

    steps: int
    width: int
    warps: int
    stages: int


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
    finite = jnp.where(jnp.abs(x) < np.float32(np.inf), jnp.abs(x), 0)  # of any other, only itself
    largest = lax.bitcast_convert_type(jnp.max(finite, 0), jnp.int32) >> 23
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
        past = (self.high[t] - self.high[s]) + (self.low[t] - self.low[s])
        return exp(jnp.where(precedes(self.dt.size, turned=turned), past, -jnp.inf))


def precedes(steps: int, *, turned: bool = False) -> Block:
    """Whether step s is t or before it: ``[t, s]``, or turned ``[s, t]``."""
    here = counted(steps)
    return here[:, None] <= here[None, :] if turned else here[:, None] >= here[None, :]


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


def given(state: jax.Array | None) -> list[jax.Array]:
    """The states to start from, if there are any."""
    return [] if state is None else [state]
