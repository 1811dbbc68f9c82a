"""Running sums along the last axis in blocks, in a form that XLA vectorises on the CPU.

A row is cut in blocks, of ``LANES`` by rule.  Within a block the sum is one of masked broadcasts,
``yₗ = Σₖ [k ≤ l] xₖ``, a vector of lanes at a time; what comes before the block is a running sum of
sums of blocks, which is that many times less work.  The mask selects and does not multiply: inf and
NaN reach only what comes after them.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ..numerics import product_precision
from ..types import Array

LANES = 16


class Block(NamedTuple):
    """How long a block is."""

    lanes: int


def running_sum(x: Array, reverse: bool = False, tile: Block = Block(LANES)) -> Array:
    """Inclusive running sums of the rows of ``[…, n]``, or from the other end.

    JAX would transpose the masked broadcasts into sixteen paddings.  So it is said to solve a
    linear system, differences = x, whose transpose is the same from the other end.
    """
    if not x.size:
        return x
    rows, (lanes,) = x.reshape(-1, x.shape[-1]), tile
    n = rows.shape[1]
    if n % lanes:
        rows = padded(rows, reverse, lanes)
    sums = lax.custom_linear_solve(
        functools.partial(differences, reverse=reverse),
        rows,
        lambda _, x: in_blocks(x, reverse, lanes),
        lambda _, x: in_blocks(x, not reverse, lanes),
    )
    if n % lanes:
        sums = sums[:, -n:] if reverse else sums[:, :n]
    return sums.reshape(x.shape)


def differences(y: Array, reverse: bool) -> Array:
    """What the running sum inverts."""
    ends = ((0, 0, 0), (-1, 1, 0)) if reverse else ((0, 0, 0), (1, -1, 0))
    return y - lax.pad(y, jnp.zeros((), y.dtype), ends)


def padded(rows: Array, reverse: bool, lanes: int) -> Array:
    """Rows with zeros after them, as they are read, to a multiple of ``lanes``."""
    more = -rows.shape[1] % lanes
    ends = (more, 0, 0) if reverse else (0, more, 0)
    return lax.pad(rows, jnp.zeros((), rows.dtype), ((0, 0, 0), ends))


def in_blocks(x: Array, reverse: bool, lanes: int) -> Array:
    """Running sums of rows of a multiple of ``lanes``."""
    count, n = x.shape
    blocks = x.reshape(-1, lanes)
    sums = jnp.dot(blocks, jnp.ones(lanes, x.dtype), precision=product_precision())
    carry = before(sums.reshape(count, n // lanes), reverse, lanes).reshape(-1, 1)
    lane = lax.broadcasted_iota(jnp.int32, blocks.shape, 1)
    terms = [blocks[:, k : k + 1] for k in range(lanes)]
    if reverse:  # the last term is in all sums, as the first one otherwise
        terms, lane = terms[::-1], lanes - 1 - lane
    y = carry + terms[0]  # with a mask more, XLA would read the lanes from memory
    for k, term in enumerate(terms[1:], 1):
        y = y + jnp.where(lane >= k, term, jnp.zeros((), x.dtype))
    return y.reshape(x.shape)


def before(x: Array, reverse: bool, lanes: int) -> Array:
    """Exclusive running sums of rows, by windows: XLA computes these by themselves.

    (Sums of sums written as additions would be fused into what reads them, and be computed again
    for every lane.)
    """
    count, n = x.shape
    add = functools.partial(
        lax.reduce_window, init_value=jnp.zeros((), x.dtype), computation=lax.add
    )
    if n <= lanes:
        ends = (-1, n) if reverse else (n, -1)
        return add(x, window_dimensions=(1, n), window_strides=(1, 1), padding=((0, 0), ends))
    blocks = padded(x, reverse, lanes).reshape(count, -1, lanes)
    carry = before(jnp.sum(blocks, 2), reverse, lanes)[:, :, None]
    # Each block moved on by one, and what comes before it put first.
    if reverse:
        blocks = lax.concatenate([blocks[:, :, 1:], carry], 2)
    else:
        blocks = lax.concatenate([carry, blocks[:, :, :-1]], 2)
    ends = (0, lanes - 1) if reverse else (lanes - 1, 0)
    sums = add(
        blocks,
        window_dimensions=(1, 1, lanes),
        window_strides=(1, 1, 1),
        padding=((0, 0), (0, 0), ends),
    ).reshape(count, -1)
    return sums[:, -n:] if reverse else sums[:, :n]
