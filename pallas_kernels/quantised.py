"""Weights packed in a few bits, as a kernel reads them: in units, each a word of codes.

A row of a weight is so many units.  :class:`Packing` says how a tile of them is read and what it
holds: parts, each some codes of every unit, with a scale and perhaps a minimum,

    weight = (code − less) · scale + minimum.

Activations are brought into the order of the codes beforehand, ``[m, parts, codes, units]``.  The
weight then needs no shuffle, only masks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, triton
from ._rows import counted

Tile = jax.Array  # [rows, *units], or of some of these axes


class Code(NamedTuple):
    """How one code of each unit is decoded: less something, and times a power of two."""

    exact: Callable[[Tile | float], Tile]
    fast: Callable[[], Tile]


class Part(NamedTuple):
    """Codes of every unit of a tile that share a scale."""

    codes: tuple[Code, ...]
    scale: Tile
    minimum: Tile | None = None
    less: Tile | float = 0.0

    def weights(self, code: Code) -> Tile:
        """What one code of each unit stands for."""
        scaled = code.exact(self.less) * self.scale
        return scaled if self.minimum is None else scaled + self.minimum


class Cut(NamedTuple):
    """How products with few rows of activations are divided.

    To compile takes a time that grows with the cube of what is written out: Triton looks from each
    load for all that depend on the same indices, operation by operation.
    """

    rows: int
    """Of the weight, of a program."""
    units: int
    """Of each at a time: a tile."""
    ahead: int
    """Tiles that are asked for before the first is decoded."""
    beside: bool = False
    """Whether a tile is of all these rows, rather than of one."""
    early: bool = False
    """Whether the next tiles are asked for before these are decoded."""
    bounded: bool = False
    """Whether the compiler sees how small indices are, so that addresses do not wrap: those of
    other rows are then constants apart.  That takes fewer instructions and not always less time."""


class Packing(NamedTuple):
    """How the rows of a weight are packed."""

    units: int
    """In a row."""
    shape: Callable[[int], tuple[int, ...]]
    """In which so many units side by side are read."""
    powers: np.ndarray
    """What is to be added to the exponents of activations that meet fast codes, in each part."""
    subnormal: bool
    """Whether fast codes are subnormal numbers."""
    offset: bool
    """Whether there are minima, or something is taken off the codes."""
    cut: Cut
    """For few rows of activations: as measured for one on an H200."""
    planes: Callable[[jax.Array], jax.Array]
    """``f32[m, k]`` to ``[m, parts, codes, units]``."""
    read: Callable[..., Any]
    """``(refs, row, first, count)``: the words and scales of ``count`` units from the first on.

    Loaded, and where in them things stand: to compute with what is loaded would wait for it.
    """
    parts: Callable[[Any], tuple[Part, ...]]
    """What these hold."""
    views: Callable[..., tuple[jax.Array, ...]] = lambda *arrays: arrays
    """The arrays of a weight as they are read."""
    in_order: "Packing | None" = None
    """The same with units that are words as they lie, for few rows of activations."""


def load(ref: Any, *at: Any) -> Tile:
    """The elements at some indices, which broadcast as in NumPy."""
    axes = max(jnp.ndim(x) for x in at)
    return triton().load(ref.at[tuple(jnp.expand_dims(x, range(axes - jnp.ndim(x))) for x in at)])


def exponent(size: int) -> int:
    """Of a power of two.  Indices are divided by shifts: ``//`` minds signs, in nine operations."""
    return size.bit_length() - 1


def within(index: Tile, first: int | Tile, count: int, end: int) -> Tile:
    """Indices; the last one for those beyond the end, which meet activations of 0."""
    inside = end % count == 0 or (isinstance(first, int) and first + count <= end)
    return index if inside else jnp.minimum(index, np.int32(end - 1))


# -- bits ----------------------------------------------------------------------------------


def inline(asm: str, constraints: str, dtype: Any, *args: Tile) -> Tile:
    """One instruction, or a few, for each element of tiles of one shape."""
    (y,) = triton().elementwise_inline_asm(
        asm,
        args=args,
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return y


ONE = 2.0**-49  # what a fast code times its activation is worth
SMALLEST = 149  # 2⁻¹⁴⁹ is the smallest subnormal number


def place(shift: int, bits: int) -> int:
    """Where a field stands that is to be within the 24 lowest bits."""
    return shift if shift + bits <= 24 else shift - moved(bits)


def moved(bits: int) -> int:
    """By how much words are shifted for that: for all fields in question, or to the only one."""
    return 16 if bits in (2, 4) else 24


def number(words: Tile, shift: Any, bits: int) -> Tile:
    """Some bits of each word."""
    code = shifted(words, shift) & jnp.uint32(2**bits - 1)
    return code.astype(jnp.int32).astype(jnp.float32)


def difference(words: Tile, shift: int, bits: int, less: Tile | float) -> Tile:
    """Some bits of each word, less something whole: exact.

    They become the last places of a power of two, which is taken off again.  No shift, and no
    conversion.
    """
    at = shift if shift + bits <= 23 else shift - 16  # within the significand
    words = words if at == shift else words >> jnp.uint32(16)
    power = 23 - at
    mask, exponent = ((1 << bits) - 1) << at, (127 + power) << 23
    marked = words & jnp.uint32(mask) | jnp.uint32(exponent)
    return lax.bitcast_convert_type(marked, jnp.float32) - (less + 2.0**power)


def subnormal(words: Tile, shift: int, bits: int) -> Tile:
    """The same, times 2 to the power of where they stand, less 149.

    Masked words, read as float32: they are subnormal numbers, which the chip multiplies as fast as
    others, or have the next exponent, which stands for the same.  No shift, and no conversion;
    XLA's CPU takes them for 0, so there it is 2⁴⁹ times that.
    """
    at = place(shift, bits)
    words = words if at == shift else words >> jnp.uint32(moved(bits))
    if INTERPRETED.value:
        return number(words, at, bits) * (2.0 ** (at - SMALLEST) / ONE)
    return lax.bitcast_convert_type(words & jnp.uint32((2**bits - 1) << at), jnp.float32)


def fields(words: Tile, bits: int, shifts: Any) -> tuple[Code, ...]:
    """Codes at some shifts."""
    of = functools.partial
    return tuple(
        Code(of(difference, words, at, bits), of(subnormal, words, at, bits)) for at in shifts
    )


def powers(bits: int, *parts: Any) -> np.ndarray:
    """Of codes at such shifts, in each part."""
    exponents = [[SMALLEST - 49 - place(shift, bits) for shift in part] for part in parts]
    return np.exp2(exponents).astype(np.float32)


def view(words: jax.Array, dtype: Any) -> jax.Array:
    """The same bytes in smaller pieces."""
    return lax.bitcast_convert_type(words, dtype).reshape(-1)


def half(words: Tile) -> Tile:
    """float16 in the low half of each word."""
    bits = words.astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def shifted(words: Tile, count: Any) -> Tile:
    """To the right."""
    return words >> jnp.asarray(count).astype(jnp.uint32)


def funnel(low: Tile, high: Tile, count: Any) -> Tile:
    """Two words put together, shifted to the right by less than 32: the lower half."""
    count = jnp.broadcast_to(jnp.asarray(count).astype(jnp.uint32), low.shape)
    if INTERPRETED.value:
        return low >> count | high << jnp.uint32(1) << (jnp.uint32(31) - count)
    asm = "shf.r.wrap.b32 $0, $1, $2, $3;"
    return lax.bitcast_convert_type(
        inline(asm, "=r,r,r,r", jnp.int32, low, high, count), jnp.uint32
    )


# -- groups of a row: AWQ, NF4 -------------------------------------------------------------


class Grouped(NamedTuple):
    """Words of eight nibbles, a power of two of them to a group."""

    words: int
    group: int

    def shape(self, count: int) -> tuple[int, int]:
        """Groups, and words of each; or words of one group."""
        each = min(count, self.group)
        return count // each, each

    def at(self, first: int, count: int) -> tuple[Tile, Tile]:
        """Indices of the words, ``[groups, each]``, and of their groups, ``[groups]``."""
        groups, each = self.shape(count)
        word = first + counted(groups)[:, None] * each + counted(each)[None, :]
        group = first >> exponent(self.group)
        groups_of_row = self.words // self.group
        return (
            within(word, first, count, self.words),
            within(group + counted(groups), group, groups, groups_of_row),
        )


def awq(words: int, group_size: int) -> Packing:
    """``weight[n, words]``, ``zeros[n, groups / 8]``, ``scales[n, groups]``."""
    index = Grouped(words, group_size // 8)

    def read(refs, row, first, count):
        weight, zeros, scales = refs
        word, group = index.at(first, count)
        zero = load(zeros, row[:, None], group >> 3)
        scale = load(scales, row[:, None], group)
        return load(weight, row[:, None, None], word), zero, 4 * (group & 7), scale

    def parts(raw):
        weight, zero, at, scale = raw
        codes = fields(weight, 4, range(0, 32, 4))
        scale = scale.astype(jnp.float32)[..., None]
        return (Part(codes, scale, less=number(zero, at, 4)[..., None]),)

    def planes(x):
        return x.reshape(len(x), 1, words, 8).swapaxes(2, 3)

    exponents = powers(4, range(0, 32, 4))
    cut = Cut(2, 128, 2, beside=True)
    return Packing(words, index.shape, exponents, True, True, cut, planes, read, parts)


def nf4(words: int, block_size: int, low_nibble_first: bool, levels: np.ndarray) -> Packing:
    """``codes[n, words]``, ``absmax[n, blocks]``; a code stands for one of 16 levels."""
    index = Grouped(words, block_size // 8)

    def read(refs, row, first, count):
        codes, absmax = refs
        word, block = index.at(first, count)
        return load(codes, row[:, None, None], word), load(absmax, row[:, None], block)

    def parts(raw):
        word, absmax = raw
        lanes = levels_of_lanes(levels, word.shape)
        of = functools.partial(level, levels, lanes, word)
        codes = tuple(Code(lambda _, j=j: of(4 * j), lambda j=j: of(4 * j)) for j in range(8))
        return (Part(codes, absmax[..., None]),)

    def planes(x):
        x = x.reshape(len(x), words, 4, 2)
        x = x if low_nibble_first else x[..., ::-1]
        return x.reshape(len(x), 1, words, 8).swapaxes(2, 3)

    ones = np.ones((1, 8), np.float32)
    cut = Cut(2, 128, 2, early=True)
    return Packing(words, index.shape, ones, False, False, cut, planes, read, parts)


def levels_of_lanes(levels: np.ndarray, shape: tuple[int, ...]) -> Tile:
    """In each lane of a warp the level of its number, modulo 16; for :func:`level`."""
    nothing = jnp.zeros(shape, jnp.uint32)
    if INTERPRETED.value:
        return nothing
    bits = levels.view(np.uint32)
    moves = "".join(f"setp.eq.u32 p, l, {i};\n@p mov.b32 $0, {b};\n" for i, b in enumerate(bits))
    asm = f"{{\n.reg .u32 l;\n.reg .pred p;\nmov.u32 l, %laneid;\nand.b32 l, l, 15;\n{moves}}}"
    return inline(asm, "=f,r", jnp.float32, nothing)


def level(levels: np.ndarray, lanes: Tile, words: Tile, shift: int) -> Tile:
    """The level of four bits of each word, from the lane that holds it.

    One shuffle a code.  A choice bit by bit takes 19 operations, a table in memory a conflict.
    """
    if INTERPRETED.value:
        code = (words >> jnp.uint32(shift)) & jnp.uint32(15)
        each = (jnp.where(code == i, float(x), 0.0) for i, x in enumerate(levels))
        return functools.reduce(jnp.add, each)
    asm = (
        f"{{\n.reg .b32 t;\nshr.u32 t, $1, {shift};\n"
        "shfl.sync.idx.b32 $0, $2, t, 0x101f, 0xffffffff;\n}"
    )
    return inline(asm, "=f,r,f", jnp.float32, words, lanes)
