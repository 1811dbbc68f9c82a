"""The blocks of GGUF, as llama.cpp stores them, for tensor cores; see ``quantised_runs.py``.

A step has 32 or 64 weights, and its tiles are 16 elements: of one byte, where a run has 16 of them,
or of two.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._rows import counted
from .quantised import Tile, half, load, number, shifted
from .quantised_gguf import six_bits
from .quantised_runs import Run, Runs, code, dealt, in_bytes, in_pairs, signed_byte

TILE = 16  # elements


def tile(ref: Any, first: Tile) -> Tile:
    """Elements of each row from its first one on, of 16 bits."""
    return load(ref, first[:, None] + counted(TILE)[None, :]).astype(jnp.uint16)


def float16(bits: Tile) -> Tile:
    """In float32."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def views(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stream by one byte and by two."""
    return in_bytes(words), in_pairs(words)


def as_it_is(x: jax.Array) -> jax.Array:
    """The order of nibbles of bytes, in which the first ones are the low ones."""
    return x


def of_32(k: int, size: int, bits: int, less: int, has_minimum: bool) -> Runs:
    """Q4, Q5, Q8:  d[2] (m[2]) (fifth bits[4]) codes;  a block is a step, and a run."""
    halves = 1 + has_minimum

    def begin(row, step):
        return (row * (k // 32) + step) * size

    def tiles(refs, row, step):
        at = begin(row, step) + size
        return (tile(refs[1], at - 32 >> 1) if bits == 8 else tile(refs[0], at - 16),)

    def scales(refs, row, step):
        first = begin(row, step) >> 1
        count = halves + 2 * (bits == 5)
        return tuple(load(refs[1], first + i) for i in range(count))

    def runs(tiles, scales, dtype, parts):
        (words,) = tiles
        if bits == 8:
            pieces = [signed_byte(words, 8 * j, dtype) for j in (0, 1)]
        elif bits == 4:
            pieces = [code(words, 4 * j, 4, dtype, less=less) for j in (0, 1)]
        else:
            each = [
                x[:, None] >> counted(TILE).astype(jnp.uint16)[None, :] for x in scales[halves:]
            ]
            pieces = [
                code(words, 4 * j, 4, dtype, less=less, upper=(each[j], 0, 1)) for j in (0, 1)
            ]
        d, *m = map(float16, scales[:halves])
        return (Run(tuple((x,) for x in pieces), d, *m),)

    ordered = functools.partial(dealt, size=32, ways=2) if bits == 8 else as_it_is
    steps, offset = k // 32, has_minimum
    return Runs(32, steps, TILE, 1, offset, False, False, ordered, views, tiles, scales, runs)


def q45k(k: int, bits: int) -> Runs:
    """Q4K, Q5K:  d[2] dmin[2], scales and minima[12], (fifth bits[32],) q[128].

    A step is 32 bytes, of which low and high nibbles are runs.
    """
    size = 36 if bits == 4 else 44  # words

    def begin(row, step):
        return (row * (k // 256) + (step >> 2)) * size

    def tiles(refs, row, step):
        _, by_two, _ = refs
        first = 2 * begin(row, step)
        found = [tile(by_two, first + 2 * size - 64 + (step & 3) * TILE)]
        if bits == 5:
            found.append(tile(by_two, first + 8) >> (2 * (step & 3)).astype(jnp.uint16))
        return tuple(found)

    def scales(refs, row, step):
        *_, words = refs
        head = tuple(load(words, begin(row, step) + i) for i in range(4))
        return head, jnp.broadcast_to(2 * (step & 3), row.shape)

    def runs(tiles, scales, dtype, parts):
        words, *fifth = tiles
        head, group = scales
        d, least = half(head[0]), half(shifted(head[0], 16))
        found = []
        for j in (0, 1):
            scale, minimum = six_bits(head[1:], group + j)
            upper = [(fifth[0], j + at, 1) if fifth else None for at in (0, 8)]
            pieces = tuple(
                (code(words, 4 * j + at, 4, dtype, upper=more),)
                for at, more in zip((0, 8), upper, strict=True)
            )
            found.append(Run(pieces, d * scale, -(least * minimum)))
        return tuple(found)

    ordered = functools.partial(dealt, size=32, ways=2)
    by_width = lambda words: (*views(words), words)
    return Runs(64, k // 64, TILE, 2, True, False, True, ordered, by_width, tiles, scales, runs)


def in_halves(x: jax.Array) -> jax.Array:
    """Of 128 weights the first 16 of each 32, field by field; then the others."""
    parts = x.reshape(*x.shape[:-1], -1, 4, 2, TILE)
    return parts.swapaxes(-3, -2).reshape(x.shape)


def q2k(k: int) -> Runs:
    """Scales and minima[16] q[64] d[2] dmin[2];  16 bytes of four fields, which are runs."""

    def begin(row, step):
        return (row * (k // 256) + (step >> 2)) * 84

    def tiles(refs, row, step):
        return (tile(refs[0], begin(row, step) + 16 + (step & 3) * TILE),)

    def scales(refs, row, step):
        by_one, by_two = refs
        block = begin(row, step)
        first = block + (step & 2) * 4 + (step & 1)
        of_run = tuple(load(by_one, first + 2 * f) for f in range(4))
        return of_run, tuple(load(by_two, (block >> 1) + i) for i in (40, 41))

    def runs(tiles, scales, dtype, parts):
        of_run, halves = scales
        d, least = map(float16, halves)
        found = []
        for f, byte in enumerate(of_run):
            pieces = ((code(tiles[0], 2 * f, 2, dtype),),)
            pair = byte.astype(jnp.uint32)
            found.append(Run(pieces, d * number(pair, 0, 4), -(least * number(pair, 4, 4))))
        return tuple(found)

    return Runs(64, k // 64, TILE, 4, True, False, False, in_halves, views, tiles, scales, runs)


def q3k(k: int) -> Runs:
    """Third bits[32] q[64] scales[12] d[2];  16 bytes of four fields, which are runs."""

    def begin(row, step):
        return (row * (k // 256) + (step >> 2)) * 110

    def tiles(refs, row, step):
        block = begin(row, step)
        third = tile(refs[0], block + (step & 1) * TILE) >> (2 * (step & 2)).astype(jnp.uint16)
        return tile(refs[0], block + 32 + (step & 3) * TILE), third

    def scales(refs, row, step):
        by_one, by_two = refs
        block, odd = begin(row, step) + 96, step & 1
        low = tuple(load(by_one, block + 2 * f + odd) for f in range(4))
        high = tuple(load(by_one, block + 8 + 2 * f + odd) for f in (0, 1))
        nibble = jnp.broadcast_to(2 * (step & 2), row.shape)
        return low, high, nibble, load(by_two, (block + 12) >> 1)

    def runs(tiles, scales, dtype, parts):
        words, third = tiles
        low, high, nibble, d = scales
        d, found = float16(d), []
        for f in range(4):
            pieces = ((code(words, 2 * f, 2, dtype, less=4, upper=(third, f, 1)),),)
            four = number(low[f].astype(jnp.uint32), nibble, 4)
            two = number(high[f % 2].astype(jnp.uint32), nibble + f // 2 * 2, 2)
            found.append(Run(pieces, d * (four + 16 * two - 32)))
        return tuple(found)

    return Runs(64, k // 64, TILE, 4, False, False, False, in_halves, views, tiles, scales, runs)


def q6k(k: int) -> Runs:
    """q[128] fifth and sixth bits[64] scales[16] d[2];  32 bytes, of which each 16 are two runs."""

    def begin(row, step):
        return (row * (k // 256) + (step >> 2)) * 210

    def tiles(refs, row, step):
        lower = begin(row, step) + (step & 3) * 32
        upper = begin(row, step) + 128 + (step & 2) * 16
        move = (2 * (step & 1)).astype(jnp.uint16)
        found = [tile(refs[0], lower + TILE * i) for i in (0, 1)]
        return *found, *(tile(refs[0], upper + TILE * i) >> move for i in (0, 1))

    def scales(refs, row, step):
        by_one, by_two = refs
        block = begin(row, step)
        first = block + 192 + (step & 2) * 4 + (step & 1) * 2
        return tuple(load(by_one, first + i) for i in (0, 1, 4, 5)), load(
            by_two, (block + 208) >> 1
        )

    def runs(tiles, scales, dtype, parts):
        of_run, d = scales
        d, found = float16(d), []
        for j in (0, 1):
            for i in (0, 1):
                upper = (tiles[2 + i], 4 * j, 2)
                pieces = ((code(tiles[i], 4 * j, 4, dtype, less=32, upper=upper),),)
                scale = of_run[2 * j + i].astype(jnp.int8).astype(jnp.float32)
                found.append(Run(pieces, d * scale))
        return tuple(found)

    def ordered(x):  # of 128 weights the first 32, the third, the second, the fourth
        return x.reshape(*x.shape[:-1], -1, 2, 2, 32).swapaxes(-2, -3).reshape(x.shape)

    return Runs(64, k // 64, TILE, 4, False, False, False, ordered, views, tiles, scales, runs)


RUNS: dict[str, Callable[[int], Runs]] = {
    "Q4_0": lambda k: of_32(k, 18, 4, 8, False),
    "Q4_1": lambda k: of_32(k, 20, 4, 0, True),
    "Q5_0": lambda k: of_32(k, 22, 5, 16, False),
    "Q5_1": lambda k: of_32(k, 24, 5, 0, True),
    "Q8_0": lambda k: of_32(k, 34, 8, 0, False),
    "Q8_1": lambda k: of_32(k, 36, 8, 0, False),
    "Q2K": q2k,
    "Q3K": q3k,
    "Q4K": lambda k: q45k(k, 4),
    "Q5K": lambda k: q45k(k, 5),
    "Q6K": q6k,
}
RUNS |= {f"Q{bits}_K": RUNS[f"Q{bits}K"] for bits in (2, 3, 4, 5, 6)}  # ggml's spelling
RUNS |= {"Q4_K_M": RUNS["Q4K"]}  # Fuel's second name
