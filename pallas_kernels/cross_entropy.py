"""Cross entropy of rows of logits, and its gradient.

row_losses
    grid      rows
    reads     the logits once                          writes   two numbers a row
gradient
    grid      rows × blocks of columns; float32: rows
    reads     the logits once; float32, where lse is beyond ±16: twice
    writes    the gradient once
bound by  memory
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import cdiv, exp, launch, like, program_id, read, unavailable, write
from ._rows import DIVIDED, counted, is_short
from ._tiles import FULL, Tiles, varied

LEAST = float(np.finfo(np.float32).min)
ROUNDED = 16.0  # lse beyond it is rounded by more than 5e-7
FEW, MANY = 64, 512  # rows; measured were 16, 334 and 4096


class Tile(NamedTuple):
    """What a program reads at a time: columns in ``high`` lines of ``wide``, by some warps."""

    high: int
    wide: int
    warps: int

    @property
    def size(self) -> int:
        """Columns."""
        return self.high * self.wide

    def columns(self) -> jax.Array:
        """Their numbers, ``[high, wide]``."""
        return counted(self.high)[:, None] * self.wide + counted(self.wide)[None, :]


LOSSES = Tile(4, 2048, 8)
GRADIENT = Tile(1, 4096, 8)


def extents(logits: Any) -> dict[str, int | str]:
    """What decides about both kernels' tiles."""
    v = logits.shape[-1]
    return {"rows": min(logits.size // v, FULL), "classes": v}


def tiles(logits: Any, *rest: Any, **params: Any) -> Tiles:
    """Of the losses: less or more at a time, in other shapes."""
    others = varied(LOSSES, high=(1, 2, 8), wide=(1024, 4096), warps=(4, 16))
    return Tiles.of(extents(logits), LOSSES, *others, Tile(1, 4096, 8), Tile(8, 1024, 8))


def tiles_gradient(logits: Any, *rest: Any, **params: Any) -> Tiles:
    """Of the gradient, which has one line."""
    others = varied(GRADIENT, wide=(2048, 8192), warps=(4, 16))
    return Tiles.of(extents(logits), GRADIENT, *others, Tile(1, 2048, 4), Tile(1, 8192, 16))


def refuses(logits: Any, *rest: Any, **params: Any) -> str | None:
    """Why these kernels cannot serve the logits, or None."""
    return unavailable(logits)


def declines(logits: Any, *rest: Any, **params: Any) -> str | None:
    """Where XLA finds the loss as fast."""
    rows, v = logits.size // logits.shape[-1], logits.shape[-1]
    if v < LOSSES.size and rows > MANY:
        return f"more than {MANY} rows of less than {LOSSES.size} are as fast in XLA"
    return are_idle(logits) or are_short(logits)


def declines_gradient(logits: Any, *rest: Any, **params: Any) -> str | None:
    """Where XLA finds the gradient as fast: of halves few rows are read once, of float32 twice."""
    twice = logits.dtype.itemsize == 4
    return (are_idle(logits) if twice else None) or are_short(logits)


def are_idle(logits: Any) -> str | None:
    """Few rows that XLA divides."""
    rows, v = logits.size // logits.shape[-1], logits.shape[-1]
    if rows < FEW and v > DIVIDED:
        return f"{rows} long rows leave most of the chip idle; XLA divides them"
    return None


def are_short(logits: Any) -> str | None:
    """Short rows, but for a few hundred, for which XLA's kernels take longer to start than ours."""
    rows = logits.size // logits.shape[-1]
    return None if FEW <= rows <= MANY else is_short(logits)


# -- loss ----------------------------------------------------------------------------------


def losses_kernel(x_ref, label_ref, loss_ref, lse_ref, *, tile: Tile) -> None:
    """One row: its maximum and Σ exp(x − maximum), each lane for itself, and then together."""
    row, v = program_id(0), x_ref.shape[1]
    full, rest = divmod(v, tile.size)

    def load(j, masked=False):
        column = j * tile.size + tile.columns()
        mask, other = (column < v, -jnp.inf) if masked else (None, None)
        return read(x_ref, (row, column), mask, other)

    def add(x, m, s):
        top = jnp.maximum(m, jnp.max(x, axis=0))
        return top, s * exp(m - top) + jnp.sum(exp(x - top[None, :]), axis=0)

    def step(j, carry):
        x, *found = carry
        return load(j), *add(x, *found)  # the next block is on its way while this one is summed

    # From the least finite number: the sum over a row of −inf is then 0, and its logarithm −inf.
    m, s = jnp.full(tile.wide, LEAST, jnp.float32), jnp.zeros(tile.wide, jnp.float32)
    if full:
        x, m, s = lax.fori_loop(np.int32(1), np.int32(full), step, (load(0), m, s))
        m, s = add(x, m, s)
    if rest:
        m, s = add(load(full, masked=True), m, s)
    top = jnp.max(m)
    log_sum = jnp.log(jnp.sum(s * exp(m - top)))
    picked = x_ref[row, jnp.maximum(label_ref[row], 0)].astype(jnp.float32)
    # Differences of logits first: ln Σ exp is rounded, by 4e-6 where it is 100.
    loss_ref[row] = log_sum + (top - picked)
    lse_ref[row] = log_sum + top


def row_losses(
    logits: jax.Array, label: jax.Array, *, interpret: bool = False, tile: Tile | None = None
) -> tuple[jax.Array, jax.Array]:
    """−ln p of the label, and ln Σ exp, over the last axis, in float32.

    Args:
        logits: ``[*rows, v]``.
        label: int32 ``[*rows]`` in [0, v); what it says of a negative one means nothing.
        interpret: run without a GPU.
        tile: what a program reads at a time.
    """
    count, v = label.size, logits.shape[-1]
    tile = tile or LOSSES
    out = like(logits, (count,), jnp.float32)
    run = launch(
        functools.partial(losses_kernel, tile=tile),
        "cross_entropy",
        out=(out, out),
        grid=(count,),
        warps=tile.warps,
        interpret=interpret,
    )
    loss, lse = run(logits.reshape(count, v), label.reshape(count))
    return loss.reshape(label.shape), lse.reshape(label.shape)


# -- gradient ------------------------------------------------------------------------------


def exponentials(x: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(x − lse), of −inf as of the least finite number: NaN where lse is −inf, too."""
    return exp(jnp.maximum(x, LEAST) - lse)


def gradient_kernel(x_ref, label_ref, lse_ref, weight_ref, g_ref, dx_ref, *, tile: Tile) -> None:
    """One block of a row of  weight · p − g · onehot;  0 where the row does not count."""
    row, v = program_id(0), x_ref.shape[1]
    column = program_id(1) * tile.size + counted(tile.size)
    mask = column < v if v % tile.size else None
    x = read(x_ref, (row, column), mask, None if mask is None else 0.0)
    weight, g = weight_ref[row], g_ref[row]
    d = exponentials(x, lse_ref[row]) * weight - jnp.where(column == label_ref[row], g, 0)
    write(dx_ref, (row, column), jnp.where((weight == 0) & (g == 0), 0, d), mask)


def exact_gradient_kernel(
    x_ref, label_ref, lse_ref, weight_ref, g_ref, dx_ref, *, tile: Tile
) -> None:
    """One row.  Where lse is large, p is divided by its sum: 1 but for the rounding of lse.

    That is up to 4e-6 at 100, and 5e-7 below 16, as it is in most models: one pass instead of two.
    """
    row, v = program_id(0), x_ref.shape[1]
    weight, g = weight_ref[row], g_ref[row]
    blocks = cdiv(v, tile.size)

    def block(j):
        column = j * tile.size + counted(tile.size)
        mask = column < v
        return column, mask, read(x_ref, (row, column), mask, -jnp.inf)

    def add(j, s):
        _, mask, x = block(j)
        return s + jnp.where(mask, exponentials(x, lse_ref[row]), 0)

    def store(i, _):
        column, mask, x = block(blocks - 1 - i)  # what was read last is in the cache still
        d = exponentials(x, lse_ref[row]) * share - jnp.where(column == label_ref[row], g, 0)
        write(dx_ref, (row, column), jnp.where((weight == 0) & (g == 0), 0, d), mask)

    def divided(weight):
        return weight / jnp.sum(lax.fori_loop(first, last, add, jnp.zeros(tile.size, jnp.float32)))

    first, last = np.int32(0), np.int32(blocks)
    share = lax.cond(jnp.abs(lse_ref[row]) > ROUNDED, divided, lambda weight: weight, weight)
    lax.fori_loop(first, last, store, None)


def gradient(
    logits: jax.Array,
    label: jax.Array,
    lse: jax.Array,
    weight: jax.Array,
    g: jax.Array,
    *,
    interpret: bool = False,
    tile: Tile | None = None,
) -> jax.Array:
    """weight · softmax(logits) − g · onehot(label), like the logits.

    A row whose weight and g are 0 is 0, whatever its logits.

    Args:
        logits: ``[*rows, v]``.
        label: int32 ``[*rows]``; a negative one is no class.
        lse: ln Σ exp of each row, ``[*rows]`` in float32.
        weight: of the softmax, like ``lse``.
        g: of the label, like ``lse``.
        interpret: run without a GPU.
        tile: what a program reads at a time.
    """
    *_, v = logits.shape
    tile = tile or GRADIENT
    count = math.prod(label.shape)
    exact = logits.dtype == jnp.float32
    kernel = exact_gradient_kernel if exact else gradient_kernel
    dx = launch(
        functools.partial(kernel, tile=tile),
        "cross_entropy_backward",
        out=like(logits, (count, v)),
        grid=(count,) if exact else (count, cdiv(v, tile.size)),
        warps=tile.warps,
        interpret=interpret,
    )(logits.reshape(count, v), *(x.reshape(count) for x in (label, lse, weight, g)))
    return dx.reshape(logits.shape)
