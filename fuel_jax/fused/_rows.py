"""Some rows of a matrix at a time, on the CPU: what they need stays in cache.

XLA's CPU backend does that by itself for rows of up to 32768.  Of longer ones it stores whatever
comes before a sum, exponentials say, as an array of the matrix's size: four times the time, and
memory that its own analysis does not count.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._tiles import Tiles

from ..numerics import wide, zeros
from ..types import Array

LONG = 32768
TOGETHER = 2  # enough for two threads, few enough to stay in their caches


class Some(NamedTuple):
    """Rows of a step."""

    rows: int


def tiles(x: Any, *_: Any, **__: Any) -> Tiles:
    """More or fewer rows."""
    count, v = math.prod(x.shape[:-1]), x.shape[-1]
    some = (Some(rows) for rows in (TOGETHER, 1, 4, 8) if rows <= max(count, TOGETHER))
    return Tiles.of({"rows": min(count, 8 * TOGETHER), "columns": v}, *some)


def taken_together(x, *_, **__) -> str | None:
    """Where XLA does well with all rows at once."""
    if x.shape[-1] <= LONG or math.prod(x.shape[:-1]) <= TOGETHER:
        return "all rows at once are as fast where they are short, or few"
    return None


class Rows:
    """A matrix of which a loop reads some rows at a time.

    Kept as integers if it is of bfloat16, for a loop that slices such floats would have XLA's CPU
    backend widen them all before it begins.
    """

    def __init__(self, x: Array, together: int = TOGETHER) -> None:
        """Of ``[*rows, v]``."""
        self.together = together
        self.matrix = self.stored = x.reshape(-1, x.shape[-1])
        if x.dtype == jnp.bfloat16:
            self.stored = lax.bitcast_convert_type(self.matrix, jnp.uint16)

    def read(self, stored: Array) -> Array:
        """What was kept, in float32 or float64."""
        return wide(lax.bitcast_convert_type(stored, self.matrix.dtype))

    def at(self, column: Array) -> Array:
        """One element of each row."""
        found = jnp.take_along_axis(self.stored, column[:, None], 1, mode="clip")
        return self.read(found[:, 0])

    def map(self, f: Callable[..., tuple[Array, ...]], *others: Array) -> tuple[Array, ...]:
        """``f`` of some rows, with theirs of the others; the last ones reach back if too few."""
        count = len(self.stored)
        together = min(self.together, count)

        def step(i: Array, found: list[Array]) -> list[Array]:
            start = jnp.minimum(i * together, count - together)
            cut = lambda x: lax.dynamic_slice_in_dim(x, start, together)
            new = f(self.read(cut(self.stored)), *map(cut, others))
            put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start, 0)
            return list(map(put, found, new))

        like = jax.eval_shape(f, wide(self.matrix), *others)
        found = [zeros(x.shape, self.stored).astype(x.dtype) for x in like]
        return tuple(lax.fori_loop(0, math.ceil(count / together), step, found))


def sums(v: Array) -> tuple[Array, Array]:
    """Maximum of each row, and Σ exp(v − maximum).  Nothing is contracted with what made v."""
    m = jnp.max(v, -1, initial=jnp.finfo(v.dtype).min)
    return m, jnp.sum(jnp.exp(v - m[:, None]), -1)
