"""The order of attention on Hopper: a program's blocks of rows, and the keys that rows meet."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._attention import Rules, Sizes, Span, Tile, length_of
from ._hopper import GROUPS
from ._launch import cdiv, dynamic_slice

TOGETHER = 8  # heads that are computed at a time, if the cache keeps their keys and values
CACHED = 2**24  # bytes
BETWEEN = 0.4  # what the change to other rows takes, in blocks of keys
BEHIND, AROUND, AHEAD = 1, 0, -1  # where keys are, as all rows of a program see them


def met(sizes: Sizes, rows: int, keys: int, rules: Rules) -> tuple[int, ...]:
    """How many blocks of keys each block of rows meets, if all keys are in use."""
    counts = []
    for low in range(sizes.sk - sizes.sq, sizes.sk, rows):
        high = min(low + rows, sizes.sk) - 1
        first = 0 if rules.left is None else max(low - rules.left, 0)
        end = sizes.sk if rules.right is None else min(high + rules.right + 1, sizes.sk)
        counts.append(max(cdiv(end, keys) - first // keys, 1))
    return tuple(counts)


def together(k: Any) -> int:
    """How many heads are computed at a time, of keys ``[b, hk, sk, d]`` and as many values."""
    head = 2 * k.dtype.itemsize * k.shape[2] * k.shape[3]
    return min(max(CACHED // head, 1), TOGETHER)


@functools.lru_cache
def shares(counts: tuple[int, ...], heads: int, together: int, programs: int) -> np.ndarray:
    """``i32[programs, 1 + most]``: how many blocks of rows a program computes, and which.

    Block ``i`` of a head is number ``head · len(counts) + i``, and meets ``counts[i]`` blocks of
    keys.  Those of heads that are ``together`` are given out at a time, those first that meet most,
    each to the program that has least to do: all end at nearly the same time.  Where all meet as
    many it is one head at a time: its keys are read by all at once.
    """
    together = 1 if len(set(counts)) == 1 else together
    free = [(0.0, p) for p in range(min(programs, heads * len(counts)))]
    lists: list[list[int]] = [[] for _ in free]
    longest_first = sorted(range(len(counts)), key=lambda i: -counts[i])
    for first in range(0, heads, together):
        for i in longest_first:
            for head in range(first, min(first + together, heads)):
                load, p = free[0]
                lists[p].append(head * len(counts) + i)
                heapq.heapreplace(free, (load + counts[i] + BETWEEN, p))
    table = np.zeros((len(lists), 1 + max(map(len, lists))), np.int32)
    for row, numbers in zip(table, lists, strict=True):
        row[0], row[1 : 1 + len(numbers)] = len(numbers), numbers
    return table


def one_after_another(run: Callable[[Any, Any], Any], table: Any, program: Any) -> None:
    """``run(number, carry)`` of a program's blocks of rows; the carry is 0 at first.

    The next number is asked for before it is needed.
    """
    most, start = table.shape[1] - 1, jnp.int32(0)
    if most == 1:
        run(table[program, 1], start)
        return

    def go_on(i: Any, carry: Any) -> Any:
        number, base = carry
        following = table[program, jnp.minimum(i + 2, most)]
        return following, run(number, base)

    lax.fori_loop(start, table[program, 0], go_on, (table[program, 1], start))


class Kind(NamedTuple):
    """Of a block of keys."""

    masked: bool
    side: int  # of all rows of a program


class Walk(NamedTuple):
    """Blocks of keys from the last to the first: ``top − t`` at step t.

    The last is the one that is masked: without a window nothing is, later.  Step 0 is always done,
    though nobody see its keys.
    """

    top: Any
    steps: Any
    begin: Kind
    parts: tuple[tuple[Any, Any, Kind], ...]  # the other steps, from … to, that not included

    @classmethod
    def of(cls, span: Span, rows: tuple[Any, Any], sk: int, keys: int, sided: bool) -> Walk:
        """Of what ``rows`` see, from … to, that not included.

        Args:
            span: blocks of keys, as :meth:`Span.seen` counts them.
            rows: positions of the first row and of the one after the last.
            sk: keys.
            keys: of a block.
            sided: what is ahead, around and behind is told apart; else all that counts is behind.
        """
        first = jnp.minimum(span.first, (sk - 1) // keys)
        end = jnp.maximum(span.last, first + 1)
        step_of = lambda block: jnp.maximum(end - jnp.clip(block, first, end), 1)
        edge, whole, steps = step_of(span.edge), step_of(span.whole), end - first
        side = AROUND if sided else BEHIND
        parts = [(jnp.int32(1), edge, Kind(True, side))] if span.after else []
        if sided:
            down = lambda x: lax.div(jnp.maximum(x, 0), jnp.int32(keys))
            within = lambda block: jnp.clip(step_of(block), edge, jnp.maximum(edge, whole))
            near, past = within(down(rows[1] + (keys - 1))), within(down(rows[0] + 1))
            parts += [(edge, near, Kind(False, AHEAD)), (near, past, Kind(False, AROUND))]
            parts += [(past, whole, Kind(False, BEHIND))]
        else:
            parts += [(edge, whole, Kind(False, BEHIND))]
        if span.before:
            parts += [(whole, steps, Kind(True, side))]
        return cls(end - 1, steps, Kind(span.before or span.after, side), tuple(parts))

    def over(self, step: Callable[[Kind], Callable[..., Any]], carry: Any) -> Any:
        """``carry`` through ``step(kind)`` of every block but the first."""
        for first, end, kind in self.parts:
            carry = lax.fori_loop(first, end, step(kind), carry)
        return carry


class Block(NamedTuple):
    """Rows of a program: which they are, and the blocks of keys that they meet."""

    sequence: Any
    head: Any
    start: Any  # number of the first one
    position: Any  # of that among the keys
    length: Any
    valid: Any  # whether that is a number of keys
    walk: Walk
    base: Any  # blocks of keys that the program met before
    tile: Tile

    @classmethod
    def of(
        cls,
        number: Any,
        base: Any,
        lengths: Any,
        sizes: Sizes,
        tile: Tile,
        rules: Rules,
        sloped: bool,
    ) -> Block:
        """Of its number among all; ``sloped``: distance counts."""
        rows = GROUPS * tile.rows
        n, h = jnp.int32(cdiv(sizes.sq, rows)), jnp.int32(sizes.h)
        line, start = lax.div(number, n), lax.rem(number, n) * rows
        sequence, head = lax.div(line, h), lax.rem(line, h)
        length, valid = length_of(lengths, sequence, sizes)
        low = start + length - sizes.sq
        high = jnp.minimum(low + rows, length) - 1
        span = Span.seen(low, high, length, sizes.sk, tile.keys, rules, lengths is not None)
        sided = sloped and rules.right != 0
        walk = Walk.of(span, (low, low + rows), sizes.sk, tile.keys, sided)
        return cls(sequence, head, start, low, length, valid, walk, base, tile)

    def rows(self, group: Any) -> tuple[Any, ...]:
        """Where those of a group of warps are."""
        rows = dynamic_slice(self.start + group * self.tile.rows, self.tile.rows)
        return self.sequence, self.head, rows

    def slot(self, t: Any) -> Any:
        """Where the keys of step ``t`` are on the chip."""
        return lax.rem(self.base + t, jnp.int32(self.tile.stages))
