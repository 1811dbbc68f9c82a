"""The blocks of GGUF, as llama.cpp stores them, read in place; see ``quantised.py``."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._rows import counted
from .quantised import (
    Cut,
    Packing,
    Part,
    Tile,
    exponent,
    fields,
    funnel,
    half,
    load,
    number,
    powers,
    shifted,
    view,
    within,
)

#
# The bytes of the rows, one after the other, in words.  Blocks have an even number of bytes and
# may begin in the middle of a word.  Layouts as in ggml's ggml-common.h.


def and_halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words, and the halves of each."""
    return words, view(words, jnp.uint16)


class Place(NamedTuple):
    """Where the block of each unit begins: so many words and an even number of bytes."""

    word: Tile | int
    byte: Tile

    def load(self, words: Any, offset: Tile | int) -> Tile:
        """The word with that byte of the block."""
        return load(words, self.word + (self.byte + offset >> 2))

    def halves(self, halves: Any, offset: int) -> Tile:
        """Two bytes at an even offset."""
        return load(halves, self.word * 2 + (self.byte + offset >> 1))

    def bytes(self, bytes: Any, offset: Tile) -> Tile:
        """One byte."""
        return load(bytes, self.word * 4 + (self.byte + offset))

    def words(
        self, words: Any, offset: Tile | int, shift: Tile | int = 0
    ) -> tuple[Tile, Tile, Tile]:
        """Four bytes at an even offset, to be shifted by less than 16, for :func:`funnel`."""
        low, high = self.load(words, offset), self.load(words, offset + 2)
        return low, high, (self.byte + offset & 2) * 8 + shift


class Blocks(NamedTuple):
    """Blocks of a row: their bytes, their units, and how these are arranged."""

    units: int
    bytes: int
    of_block: int
    each: int
    """Units that are read as one axis."""

    def shape(self, count: int) -> tuple[int, int]:
        """Some of them, several times."""
        return count // self.each, self.each

    def at(self, row: Tile, first: int, count: int) -> tuple[Place, Tile]:
        """Where the block of each unit begins, and the number of the unit in its block."""
        outer, each = self.shape(count)
        unit = first + counted(outer)[:, None] * each + counted(each)[None, :]
        unit = within(unit, first, count, self.units)
        of_row = self.units // self.of_block * self.bytes
        row, block = row[:, None, None], (unit >> exponent(self.of_block))[None] * self.bytes
        # Rows of whole words apart: what is the same in all of them is then computed once.
        place = Place(0, row * of_row + block) if of_row % 4 else Place(row * (of_row // 4), block)
        return place, unit & (self.of_block - 1)


BYTES = (0, 8, 16, 24)  # shifts
NIBBLES = (*BYTES, *(4 + shift for shift in BYTES))  # low ones, then high ones
LOW_NIBBLES, LOW_PAIRS, LOW_BITS = (np.uint32(0x01010101 * x) for x in (15, 3, 1))


def of_32(k: int, size: int, bits: int, less: int, has_minimum: bool) -> Packing:
    """Q4, Q5, Q8:  d[2] (m[2]) (fifth bits[4]) codes;  units of four bytes.

    Codes of four and five bits: low nibbles of 16 bytes, then the high ones.
    """
    of_block, whole = 8 if bits == 8 else 4, size % 4 == 0
    index = Blocks(k // 32 * of_block, size, of_block, of_block)
    codes_at = size - 4 * of_block

    def read(refs, row, first, count):
        words, halves = refs
        block, i = index.at(row, first, count)
        code = block.words(words, codes_at + 4 * i)
        head = block.load(words, 0) if whole else block.halves(halves, 0)
        fifth = (block.words(words, codes_at - 4), 4 * i) if bits == 5 else None
        return code, head, fifth

    def parts(raw):
        code, head, fifth = raw
        code = funnel(*code)
        if bits == 8:
            codes = fields(code ^ jnp.uint32(0x80808080), 8, BYTES)
        elif bits == 4:
            codes = fields(code, 4, NIBBLES)
        else:
            fifth = shifted(funnel(*fifth[0]), fifth[1])
            low = code & LOW_NIBBLES | spread(fifth)
            high = shifted(code, 4) & LOW_NIBBLES | spread(shifted(fifth, 16))
            codes = fields(low, 5, BYTES) + fields(high, 5, BYTES)
        return (Part(codes, half(head), half(shifted(head, 16)) if has_minimum else None, less),)

    def planes(x):
        if bits == 8:
            return x.reshape(len(x), 1, index.units, 4).swapaxes(2, 3)
        x = x.reshape(len(x), -1, 2, 4, 4).transpose(0, 2, 4, 1, 3)  # half, byte, block, word
        return x.reshape(len(x), 1, 8, index.units)

    exponents = powers(bits, {8: BYTES, 4: NIBBLES, 5: BYTES + BYTES}[bits])
    lies = in_order(k, size, bits, less) if size in (18, 34) and k % 64 == 0 else None
    rows, ahead = {4: (4, 1), 5: (2, 2), 8: (4, 2)}[bits]
    cut = Cut(rows, 32, ahead, bounded=has_minimum)
    return Packing(
        *(index.units, index.shape, exponents, True, True, cut, planes, read, parts),
        and_halves,
        lies,
    )


def in_order(k: int, size: int, bits: int, less: int) -> Packing:
    """Q4_0, Q8_0 where rows are whole words:  these as they lie, each with codes of one block.

    Activations lie likewise, with zeros where scales do.  No word is read twice or put together.
    """
    units, halves = k // 32 * size // 4, 8 // bits

    def read(refs, row, first, count):
        words, scales = refs
        row, unit = row[:, None], within(first + counted(count), first, count, units)[None]
        block = 4 * unit.astype(jnp.uint32) // jnp.uint32(size)
        d = (block * jnp.uint32(size // 2)).astype(jnp.int32)
        return load(words, row * units + unit), load(scales, row * (2 * units) + d)

    def parts(raw):
        code, d = raw
        code = code ^ jnp.uint32(0x80808080) if bits == 8 else code
        return (Part(fields(code, bits, shifts), half(d), less=less),)

    def planes(x):
        x = x.reshape(len(x), -1, halves, size - 2).swapaxes(1, 2)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (2, 0))).reshape(len(x), halves, units, 4)
        return x.swapaxes(2, 3).reshape(len(x), 1, 4 * halves, units)

    shifts = BYTES if bits == 8 else NIBBLES
    shape = lambda count: (count,)
    exponents, cut = powers(bits, shifts), Cut(4, 64, 2 if bits == 8 else 3, bounded=True)
    return Packing(units, shape, exponents, True, True, cut, planes, read, parts, and_halves)


def spread(bits: Tile) -> Tile:
    """Four bits, each the fifth one of a byte."""
    each = (bits & jnp.uint32(15)) * jnp.uint32(0x00204081)
    return (each & LOW_BITS) << jnp.uint32(4)


def q45k(k: int, bits: int) -> Packing:
    """Q4K, Q5K:  d[2] dmin[2], scales and minima[12], (fifth bits[32],) q[128].

    Eight groups of 32: low and high nibbles of 32 bytes, four times.  Whole words.
    """
    size = 36 if bits == 4 else 44  # words
    units = k // 256 * 32
    shifts = (NIBBLES[:4], NIBBLES[4:]) if bits == 4 else (BYTES, BYTES)

    def read(refs, row, first, count):
        (words,) = refs
        begin = first >> 3
        chunk = within(begin + counted(count // 8), begin, count // 8, units // 8)
        block = (row[:, None] * (k // 256) + (chunk >> 2)) * size
        at = (block + size - 32 + (chunk & 3) * 8)[..., None] + counted(8)
        head = tuple(load(words, block + i) for i in range(4))
        fifth = load(words, (block + 4)[..., None] + counted(8)) if bits == 5 else None
        return load(words, at), fifth, head, chunk & 3

    def parts(raw):
        words, fifth, head, chunk = raw
        d, least = half(head[0]), half(shifted(head[0], 16))
        found = []
        for j in (0, 1):
            scale, minimum = six_bits(head[1:], 2 * chunk + j)
            code = words
            if bits == 5:
                high = shifted(fifth, (2 * chunk + j)[..., None]) & LOW_BITS
                code = shifted(words, 4 * j) & LOW_NIBBLES | high << jnp.uint32(4)
            codes = fields(code, bits, shifts[j])
            found.append(Part(codes, (d * scale)[..., None], -(least * minimum)[..., None]))
        return tuple(found)

    def planes(x):
        x = x.reshape(len(x), -1, 2, 8, 4).transpose(0, 2, 4, 1, 3)  # half, byte, chunk, word
        return x.reshape(len(x), 2, 4, units)

    shape = lambda count: (count // 8, 8)
    cut = Cut(2, 128, 2 if bits == 4 else 1, beside=True)
    return Packing(units, shape, powers(bits, *shifts), True, True, cut, planes, read, parts)


def six_bits(words: tuple[Tile, ...], group: Tile) -> tuple[Tile, Tile]:
    """Scale and minimum of a group of eight: four of each whole, four in pieces."""
    x, y, z = (shifted(w, (group & 3) * 8) & jnp.uint32(255) for w in words)
    whole = group < 4
    four, six = jnp.uint32(15), jnp.uint32(63)
    high = lambda v: v >> jnp.uint32(6) << jnp.uint32(4)
    scale = jnp.where(whole, x & six, z & four | high(x))
    minimum = jnp.where(whole, y & six, z >> jnp.uint32(4) | high(y))
    return number(scale, 0, 6), number(minimum, 0, 6)


def in_quarters(x: jax.Array, units: int) -> jax.Array:
    """Planes of 2-bit codes: those of 32 bytes, lowest field first, twice to a block."""
    x = x.reshape(len(x), -1, 4, 8, 4).transpose(0, 2, 4, 1, 3)  # field, byte, half, word
    return x.reshape(len(x), 4, 4, units)


def q2k(k: int) -> Packing:
    """Scales and minima[16] q[64] d[2] dmin[2];  16 codes a word, in four groups."""
    index = Blocks(k // 256 * 16, 84, 16, 8)
    shifts = [[2 * f + shift for shift in BYTES] for f in range(4)]

    def read(refs, row, first, count):
        (words,) = refs
        block, i = index.at(row, first, count)
        scales = tuple(block.load(words, (i & 8) + j) for j in (0, 4))
        return block.load(words, 16 + 4 * i), scales, (i & 4) * 2, block.load(words, 80)

    def parts(raw):
        words, scales, at, head = raw
        d, least = half(head), half(shifted(head, 16))
        found = []
        for f in range(4):
            pair = shifted(scales[f // 2], at + 16 * (f % 2))
            minimum = -(least * number(pair, 4, 4))
            found.append(Part(fields(words, 2, shifts[f]), d * number(pair, 0, 4), minimum))
        return tuple(found)

    planes = functools.partial(in_quarters, units=index.units)
    exponents, cut = powers(2, *shifts), Cut(2, 32, 2, bounded=True)
    return Packing(index.units, index.shape, exponents, True, True, cut, planes, read, parts)


def q3k(k: int) -> Packing:
    """Third bits[32] q[64] scales[12] d[2];  16 codes a word, in four groups."""
    index = Blocks(k // 256 * 16, 110, 16, 8)

    def read(refs, row, first, count):
        words, halves = refs
        block, i = index.at(row, first, count)
        of_half = (i & 8) >> 1  # bits
        third = block.words(words, (i & 7) * 4, of_half)
        scales = tuple(block.words(words, j, of_half) for j in (96, 100, 104))
        code = block.words(words, 32 + 4 * i)
        return code, third, scales, block.halves(halves, 108), (i & 4) * 2

    def parts(raw):
        words, third, scales, head, byte = raw
        words, third, d = funnel(*words), funnel(*third), half(head)
        *low, high = (funnel(*scale) for scale in scales)
        found = []
        for f in range(4):
            bits = shifted(third, f) & LOW_BITS
            code = shifted(words, 2 * f) & LOW_PAIRS | bits << jnp.uint32(2)
            at = byte + 16 * (f % 2)
            six = number(low[f // 2], at, 4) + 16 * number(high, at + f // 2 * 2, 2)
            found.append(Part(fields(code, 3, BYTES), d * (six - 32), less=4))
        return tuple(found)

    planes = functools.partial(in_quarters, units=index.units)
    exponents, cut = powers(3, *[BYTES] * 4), Cut(2, 32, 1)
    return Packing(
        index.units, index.shape, exponents, True, True, cut, planes, read, parts, and_halves
    )


def q6k(k: int) -> Packing:
    """q[128] fifth and sixth bits[64] scales[16] d[2];  eight codes a word, in two groups."""
    index = Blocks(k // 256 * 32, 210, 32, 16)

    def read(refs, row, first, count):
        words, halves, bytes = refs
        block, i = index.at(row, first, count)
        upper = block.words(words, 128 + (i & 16) * 2 + (i & 7) * 4, (i & 8) >> 2)
        at = 192 + ((i & 16) >> 1) + (i >> 2 & 3)  # of the scale of the low nibbles
        scales = tuple(block.bytes(bytes, at + j) for j in (0, 4))
        return block.words(words, 4 * i), upper, scales, block.halves(halves, 208)

    def parts(raw):
        words, upper, scales, head = raw
        words, upper, d = funnel(*words), funnel(*upper), half(head)
        found = []
        for j in (0, 1):
            bits = shifted(upper, 4 * j) & LOW_PAIRS
            code = shifted(words, 4 * j) & LOW_NIBBLES | bits << jnp.uint32(4)
            scale = scales[j].astype(jnp.float32)
            found.append(Part(fields(code, 6, BYTES), d * scale, less=32))
        return tuple(found)

    def planes(x):
        x = x.reshape(len(x), -1, 2, 16, 4).transpose(0, 2, 4, 1, 3)  # half, byte, run, word
        return x.reshape(len(x), 2, 4, index.units)

    views = lambda words: (*and_halves(words), view(words, jnp.int8))
    exponents, cut = powers(6, BYTES, BYTES), Cut(2, 32, 2, bounded=True)
    return Packing(index.units, index.shape, exponents, True, True, cut, planes, read, parts, views)


GGUF: dict[str, Callable[[int], Packing]] = {
    "Q4_0": lambda k: of_32(k, 18, 4, 8, False),
    "Q4_1": lambda k: of_32(k, 20, 4, 0, True),
    "Q5_0": lambda k: of_32(k, 22, 5, 16, False),
    "Q5_1": lambda k: of_32(k, 24, 5, 0, True),
    "Q8_0": lambda k: of_32(k, 34, 8, 128, False),
    "Q8_1": lambda k: of_32(k, 36, 8, 128, False),
    "Q2K": q2k,
    "Q3K": q3k,
    "Q4K": lambda k: q45k(k, 4),
    "Q5K": lambda k: q45k(k, 5),
    "Q6K": q6k,
}
GGUF |= {f"Q{bits}_K": GGUF[f"Q{bits}K"] for bits in (2, 3, 4, 5, 6)}  # ggml's spelling
GGUF |= {"Q4_K_M": GGUF["Q4K"]}  # Fuel's second name
