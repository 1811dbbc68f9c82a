"""Products with a packed weight whose rows are decoded on the way.

A weight ``W[n, k]`` is given as ``rows(start, count)``, a function that decodes some of its rows.
Whole, it is a plain product.  A block of rows at a time, each block is decoded, used and forgotten
while it is in cache: that bounds the memory, and on a CPU it is faster than the plain spelling for
any number of activations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels._tiles import Tiles, around

from ..numerics import product_precision, wide_dtype, zeros
from ..types import Array

Rows = Callable[[int | Array, int], Array]

BLOCK = 2**21  # decoded elements at a time: 8 MiB of float32, about a core's share of cache
PART = 2**24  # the same where a step of a loop takes several launches: 64 MiB, 32 of halves


def block_rows(n: int, k: int, most: int = BLOCK) -> int:
    """How many of ``n`` rows of ``k`` weights are decoded together.

    A multiple of 8, so that a block begins at a whole word of any packed stream.
    """
    return min(n, max(8, most // max(k, 1) // 8 * 8))


class Block(NamedTuple):
    """Rows of the weight that are decoded together."""

    rows: int


def block_tiles(x: Any, n: int, k: int, most: int = BLOCK, **words: str) -> Tiles:
    """More or fewer rows; ``words`` tell formats apart."""
    first = block_rows(n, k, most)
    others = [Block(rows) for rows in around(first, 8, n) if rows % 8 == 0]
    m = x.size // max(x.shape[-1], 1)
    return Tiles.of({"rows": m, "k": k, "n": n, **words}, Block(first), *others)


def fits_one_block(n: int, k: int, most: int = BLOCK) -> str | None:
    """Why it would not pay to go block by block, or None."""
    return f"{n} x {k} weights fit one block" if block_rows(n, k, most) == n else None


def refuses_nothing(*arrays, **params) -> str | None:
    """Sums of nothing, which need no blocks."""
    return "there is nothing to sum" if 0 in (x.size for x in arrays) else None


def times_transposed(x: Array, rows: Rows, n: int) -> Array:
    """x Wᵀ: ``[*batch, m, k]`` to ``[*batch, m, n]``."""
    return jnp.einsum("...k,nk->...n", x, rows(0, n), precision=product_precision())


def times(g: Array, rows: Rows, n: int) -> Array:
    """g W: ``[*batch, m, n]`` to ``[*batch, m, k]``."""
    return jnp.einsum("...n,nk->...k", g, rows(0, n), precision=product_precision())


def times_transposed_rounded(x: Array, rows: Rows, n: int) -> Array:
    """x Wᵀ, W rounded to the dtype of x."""
    w = rows(0, n).astype(x.dtype)
    return jnp.einsum("...k,nk->...n", x, w, precision=product_precision(x))


def refuses_rounded(x, *rest, **params) -> str | None:
    """Activations that the weight would lose digits for."""
    if x.dtype.itemsize != 2:
        return f"the weight has more digits than it would keep beside {x.dtype.name}"
    return refuses_nothing(x, *rest)


MANY = 64  # rows of activations


def declines_rounded(x, *rest, least: int = MANY, **params) -> str | None:
    """Rows so few that writing the weight down takes longer than multiplying with it."""
    m = x.size // x.shape[-1]
    return f"{m} rows are too few to write the weight down for" if m < least else None


def times_transposed_blocked(x: Array, rows: Rows, n: int, tile: Block | None = None) -> Array:
    """x Wᵀ, a block of rows at a time; the same values."""
    size = tile.rows if tile else block_rows(n, x.shape[-1])
    flat = x.reshape(-1, x.shape[-1])

    def columns(start, count):  # W stands first: XLA would transpose it for a single row of x
        return jnp.einsum("nk,mk->nm", rows(start, count), flat, precision=product_precision())

    starts = jnp.arange(n // size) * size
    y = lax.map(lambda start: columns(start, size), starts).reshape(-1, flat.shape[0])
    if rest := n % size:
        y = jnp.concatenate([y, columns(n - rest, rest)])
    return y.T.reshape(*x.shape[:-1], n)


def times_blocked(
    g: Array, rows: Rows, n: int, k: int, tile: Block | None = None, rounded: bool = False
) -> Array:
    """g W, a block of rows at a time, in the dtype of g; sums over the blocks in order.

    These are in float32 for halves, and so are W and g, or W is ``rounded`` to halves.
    """
    size = tile.rows if tile else block_rows(n, k, PART if rounded else BLOCK)
    flat, wide = g.reshape(-1, n), wide_dtype(g)
    dtype = g.dtype if rounded else wide

    def share(start, count):
        part = lax.dynamic_slice_in_dim(flat, start, count, axis=1).astype(dtype)
        w = rows(start, count).astype(dtype)
        how = {"precision": product_precision(part), "preferred_element_type": wide}
        return jnp.einsum("mn,nk->mk", part, w, **how)

    total = zeros((flat.shape[0], k), flat).astype(wide)
    starts = jnp.arange(n // size) * size
    total, _ = lax.scan(lambda sum, start: (sum + share(start, size), None), total, starts)
    if rest := n % size:
        total += share(n - rest, rest)
    return total.reshape(*g.shape[:-1], k).astype(g.dtype)
