"""Weights packed in a few bits, as tensor cores read them: in runs, which share a scale.

    weight = code · scale + minimum

A run's codes are whole numbers, which halves hold exactly, so that a run is multiplied as it is and
its sum is scaled: a scale then is an operation for each sum, not for each weight.  (NF4's codes are
levels instead, in one half or, for float32, in three.)  Tiles have elements of 16 bits, the size of
what becomes of them, so that they go to the tensor cores as they come from memory; each holds two
codes or four, and each field of a tile is a piece of its run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, cdiv, triton
from ._rows import counted
from .quantised import Tile, exponent, load, number, shifted

Piece = tuple[Tile, ...]  # halves[rows, elements] that add up to the codes, the largest first


class Run(NamedTuple):
    """Weights of each row that share a scale."""

    pieces: tuple[Piece, ...]
    scale: Tile
    minimum: Tile | None = None


class Runs(NamedTuple):
    """How the rows of a weight are packed."""

    weights: int
    """Of a step."""
    steps: int
    """Of a row."""
    elements: int
    """Of a tile, and weights of a piece."""
    of_step: int
    """Runs."""
    offset: bool
    """Whether there are minima."""
    levels: bool
    """Whether codes are no whole numbers."""
    aligned: bool
    """Whether tiles begin where the chip copies them to shared memory by itself."""
    ordered: Callable[[jax.Array], jax.Array]
    """Activations ``[m, k]`` in the order of the pieces, filled up to whole steps."""
    views: Callable[..., tuple[jax.Array, ...]]
    """The arrays of the weight, in the widths that are read."""
    tiles: Callable[..., tuple[Tile, ...]]
    """``(refs, row, step)``: the elements of a step."""
    scales: Callable[..., Any]
    """``(refs, row, step)``: what else is read for it."""
    runs: Callable[..., tuple[Run, ...]]
    """``(tiles, scales, dtype, parts)``: what these hold, codes in so many halves."""


def in_bytes(x: jax.Array) -> jax.Array:
    """The last axis byte by byte."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def in_pairs(x: jax.Array) -> jax.Array:
    """The last axis by two bytes."""
    # XLA joins this with a conversion from bytes before it, and refuses what comes of that.
    x = lax.optimization_barrier(x)
    return lax.bitcast_convert_type(x, jnp.uint16).reshape(*x.shape[:-1], -1)


def dealt(x: jax.Array, size: int, ways: int) -> jax.Array:
    """Of so many weights side by side every ``ways``-th, then those after them."""
    parts = x.reshape(*x.shape[:-1], -1, size // ways, ways)
    return parts.swapaxes(-1, -2).reshape(x.shape)


# -- codes in halves -----------------------------------------------------------------------


class Half(NamedTuple):
    """A number whose last places count ones; and what it is called."""

    power: float
    bits: int
    name: str


HALVES = {"bfloat16": Half(2.0**7, 0x4300, "bf16x2"), "float16": Half(2.0**10, 0x6400, "f16x2")}


def pairs(asm: str, dtype: Any, *args: Tile) -> Tile:
    """Instructions for two elements of 16 bits at a time."""
    (y,) = triton().elementwise_inline_asm(
        f"{{\n.reg .b32 t, u, s, ah, bh, al, bl, m, h, l;\n{asm}\n}}",
        args=args,
        constraints=",".join(["=&r", *["r"] * len(args)]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return y


def twice(bits: int) -> str:
    """The same 16 bits for both elements."""
    return f"0x{bits:04x}{bits:04x}"


def code(
    words: Tile,
    shift: int,
    bits: int,
    dtype: Any,
    *,
    less: int | Tile = 0,
    upper: tuple[Tile, int, int] | None = None,
) -> Tile:
    """Some bits of each element, less something whole, in halves: exact.

    They become the last places of a power of two, which is taken off again.

    Args:
        words: u16 tile.
        shift: where the bits stand.
        bits: how many; up to six, with the upper ones.
        dtype: of the result.
        less: taken off; or a tile of it plus the power of two.
        upper: more bits that go before these: another tile, where they stand, how many.
    """
    half, mask = HALVES[jnp.dtype(dtype).name], 2**bits - 1
    if INTERPRETED.value:
        codes = words.astype(jnp.int32) >> shift & mask
        if upper is not None:
            more, at, count = upper
            codes |= (more.astype(jnp.int32) >> at & 2**count - 1) << bits
        less = less.astype(jnp.float32) - half.power if isinstance(less, jax.Array) else less
        return (codes.astype(jnp.float32) - less).astype(dtype)
    asm, args = [f"shr.u32 t, $1, {shift};"], [words]
    if upper is not None:
        more, at, count = upper
        args.append(more)
        to = bits - at
        asm += [
            f"and.b32 t, t, {twice(mask)};",
            f"shl.b32 u, $2, {to};" if to >= 0 else f"shr.u32 u, $2, {-to};",
            f"lop3.b32 t, u, {twice((2**count - 1) << bits)}, t, 0xEA;",  # u & mask | t
            f"or.b32 t, t, {twice(half.bits)};",
        ]
    else:
        asm.append(f"lop3.b32 t, t, {twice(mask)}, {twice(half.bits)}, 0xEA;")
    if isinstance(less, jax.Array):
        args.append(jnp.broadcast_to(less, words.shape))
        asm.append(f"sub.rn.{half.name} $0, t, ${len(args)};")
    else:
        power = int(np.asarray(half.power + less, dtype).view(np.uint16))
        asm += [f"mov.b32 u, {twice(power)};", f"sub.rn.{half.name} $0, t, u;"]
    return pairs("\n".join(asm), dtype, *args)


def signed_byte(words: Tile, shift: int, dtype: Any) -> Tile:
    """A byte of each element in two's complement, in halves: exact.

    bfloat16 counts ones in seven places: the eighth bit, which stands for −128, is taken off apart.
    """
    half = HALVES[jnp.dtype(dtype).name]
    if INTERPRETED.value:
        codes = (words >> jnp.uint16(shift)).astype(jnp.int8)
        return codes.astype(jnp.float32).astype(dtype)
    low, high, mark = twice(127), twice(128), twice(half.bits)
    asm = [
        f"shr.u32 t, $1, {shift};",
        f"lop3.b32 u, t, {low}, {mark}, 0xEA;",  # t & low | mark
        f"lop3.b32 t, t, {high}, {mark}, 0xEA;",  # in bfloat16 that bit doubles 2⁷
        f"sub.rn.{half.name} $0, u, t;",
    ]
    return pairs("\n".join(asm), dtype, words)


def in_parts(levels: np.ndarray, dtype: Any, parts: int) -> list[np.ndarray]:
    """Halves that add up to the levels, the largest first."""
    found, rest = [], levels
    for _ in range(parts):
        found.append(rest.astype(dtype))
        rest = rest - found[-1].astype(np.float32)
    return found


def level(words: Tile, nibble: int, levels: np.ndarray) -> Tile:
    """One of 16 halves for each element, by one of its nibbles.

    Bytes of halves stand in registers, four in each; an instruction picks four by four nibbles'
    lower three bits, and their highest bit chooses between two picks.  For the fields of a tile the
    compiler does so once.
    """
    if INTERPRETED.value:
        codes = words.astype(jnp.int32) >> 4 * nibble & 15
        each = (jnp.where(codes == i, float(x), 0.0) for i, x in enumerate(levels))
        return functools.reduce(jnp.add, each).astype(levels.dtype)
    bits = levels.view(np.uint16)
    low, high = ((x.astype(np.uint8).view(np.uint32)) for x in (bits & 255, bits >> 8))
    later = nibble > 1
    asm = [
        "prmt.b32 t, $1, $1, 0x3120;",  # the first two nibbles of both elements, the other two
        "shl.b32 u, t, 4;",
        "and.b32 s, t, 0x77777777;",
        f"shr.u32 s, s, {16 * later};",
        *(
            f"prmt.b32 {to}, {table[i]}, {table[i + 1]}, s;"
            for to, table, i in (("al", low, 0), ("bl", low, 2), ("ah", high, 0), ("bh", high, 2))
        ),
        f"prmt.b32 m, u, t, {'0xFBEA' if later else '0xD9C8'};",  # the highest bits, eight times
        "lop3.b32 l, al, bl, m, 0xD8;",
        "lop3.b32 h, ah, bh, m, 0xD8;",
        f"prmt.b32 $0, l, h, {'0x7351' if nibble % 2 else '0x6240'};",
    ]
    return pairs("\n".join(asm), levels.dtype, words)


# -- groups of a row: AWQ, NF4 -------------------------------------------------------------

LEAST, MOST = 64, 128  # weights of a step: tensor cores take 16 elements of four nibbles


class Grouped(NamedTuple):
    """Rows of nibbles, of which a power of two share a scale."""

    k: int
    group: int

    @property
    def step(self) -> int:
        """Weights of a step: of a group or, where groups are small, of several."""
        return min(max(self.group, LEAST), MOST)

    def elements(self, step: Tile) -> Tile:
        """Which ones of a row."""
        at = step * (self.step // 4) + counted(self.step // 4)
        return at if self.k % self.step == 0 else jnp.minimum(at, self.k // 4 - 1)

    def groups(self, step: Tile) -> list[Tile]:
        """Which groups of a row."""
        if self.group >= self.step:
            return [step >> exponent(self.group // self.step)]
        last = self.k // self.group - 1
        each = self.step // self.group
        return [jnp.minimum(step * each + i, last) for i in range(each)]

    def of_group(self, i: int, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The codes of one of several groups; 0 for the others'."""
        if self.group >= self.step:
            return pieces
        mine = (counted(self.step // 4) >> exponent(self.group // 4) == i)[None, :]
        return tuple(tuple(jnp.where(mine, x, x.dtype.type(0)) for x in p) for p in pieces)

    def ordered(self, x: jax.Array) -> jax.Array:
        """One weight of four, for each nibble."""
        x = jnp.pad(x, ((0, 0), (0, -self.k % self.step)))
        return dealt(x, self.step, 4)

    def described(self, **of_format: Any) -> Runs:
        """Of such rows."""
        each = max(self.step // self.group, 1)
        steps = cdiv(self.k, self.step)
        of_format |= {"offset": False, "aligned": True, "ordered": self.ordered}
        return Runs(self.step, steps, self.step // 4, each, **of_format)


def awq(words: int, group_size: int) -> Runs:
    """``weight[n, words]``, ``zeros[n, groups / 8]``, ``scales[n, groups]``."""
    rows = Grouped(8 * words, group_size)

    def views(weight, zeros, scales):
        return in_pairs(weight), zeros, scales

    def tiles(refs, row, step):
        weight, zeros, _ = refs
        elements = load(weight, row[:, None], rows.elements(step)[None, :])
        groups = rows.groups(step)
        return elements, *(shifted(load(zeros, row, g >> 3), 4 * (g & 7)) for g in groups)

    def scales(refs, row, step):
        return tuple(load(refs[2], row, group) for group in rows.groups(step))

    def runs(tiles, scales, dtype, parts):
        (words, *zeros), found = tiles, []
        for i, (zero, scale) in enumerate(zip(zeros, scales, strict=True)):
            less = number(zero, 0, 4) + HALVES[jnp.dtype(dtype).name].power
            less = less.astype(dtype)[:, None]
            pieces = tuple((code(words, 4 * j, 4, dtype, less=less),) for j in range(4))
            found.append(Run(rows.of_group(i, pieces), scale.astype(jnp.float32)))
        return tuple(found)

    how = {"views": views, "tiles": tiles, "scales": scales, "runs": runs}
    return rows.described(levels=False, **how)


def nf4(words: int, block_size: int, low_nibble_first: bool, levels: np.ndarray) -> Runs:
    """``codes[n, words]``, ``absmax[n, blocks]``; a code stands for one of 16 levels."""
    rows = Grouped(8 * words, block_size)
    order = (0, 1, 2, 3) if low_nibble_first else (1, 0, 3, 2)

    def views(codes, absmax):
        return in_pairs(codes), absmax

    def tiles(refs, row, step):
        return (load(refs[0], row[:, None], rows.elements(step)[None, :]),)

    def scales(refs, row, step):
        return tuple(load(refs[1], row, block) for block in rows.groups(step))

    def runs(tiles, scales, dtype, parts):
        tables = in_parts(levels, dtype, parts)
        pieces = tuple(tuple(level(tiles[0], j, table) for table in tables) for j in order)
        return tuple(Run(rows.of_group(i, pieces), scale) for i, scale in enumerate(scales))

    how = {"views": views, "tiles": tiles, "scales": scales, "runs": runs}
    return rows.described(levels=True, **how)
