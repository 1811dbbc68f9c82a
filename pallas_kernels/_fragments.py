"""Packed weights become operands of Hopper's products in registers.

A register of a thread holds 16 bits of two neighbours in a row: in memory four codes each, for
tensor cores a half each.  So one register of codes becomes four of halves, and each of these goes
to columns of its own: an operand's columns are in another order than the weights of a row, and
activations are put in the same one.

Mosaic has no names for some instructions; here they are MLIR's.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._hopper import spread
from ._launch import mosaic
from .quantised_runs import HALVES, dealt, in_pairs, twice

ROWS = 64  # of a product's operand
TILE = 8  # its columns, of which a thread has two
LANES = 32
BYTES = 256


class Packed(NamedTuple):
    """How the rows of a weight are packed, in four bits each."""

    group: int
    """Weights that share a scale: a power of two."""
    views: Callable[..., tuple[jax.Array, ...]]
    """The words of the weight, u16 ``[n, k / 4]``, and what else is read."""
    ordered: Callable[[jax.Array, int], jax.Array]
    """Activations in the order of an operand of so many columns."""
    table: np.ndarray | None
    """The two halves of each byte, if codes stand for levels."""
    scales: Callable[..., tuple[Any, ...]]
    """``(refs, rows, group)``: a scale for each row, and what else is read."""
    halves: Callable[..., Any]
    """``(fields, scales, group)``: the weights before they are scaled, ``[64, columns]``."""


def by_row(ref: Any, rows: Any, i: Any) -> Any:
    """A number for each row."""
    gpu = mosaic()
    return gpu.load(ref.at[rows, i], layout=gpu.Layout.WGMMA.reduce(1), optimized=False)


def awq(group_size: int, dtype: Any) -> Packed:
    """``weight[n, words]``, ``zeros[n, groups / 8]``, ``scales[n, groups]``."""
    dtype = jnp.dtype(dtype)

    def views(weight, zeros, scales):
        return in_pairs(weight), zeros, scales

    def scales(refs, rows, group):
        zeros, scales = refs
        return by_row(scales, rows, group), by_row(zeros, rows, group >> 3)

    def halves(fields, scales, group):
        zero = (scales[1] >> (4 * (group & 7)).astype(jnp.uint32)) & jnp.uint32(15)
        less = zero.astype(jnp.int32).astype(jnp.float32) + HALVES[dtype.name].power
        codes = lax.bitcast_convert_type(fields, dtype)
        return codes - spread(less.astype(dtype), codes.shape)

    ordered = lambda x, size: dealt(x, size, 4)
    return Packed(group_size, views, ordered, None, scales, halves)


def nf4(block_size: int, low_nibble_first: bool, levels: np.ndarray, dtype: Any) -> Packed:
    """``codes[n, words]``, ``absmax[n, blocks]``; a code stands for one of 16 levels."""
    dtype = jnp.dtype(dtype)

    def views(codes, absmax):
        return in_pairs(codes), absmax

    def ordered(x, size):  # in words: a byte's two weights stay together
        pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
        return lax.bitcast_convert_type(dealt(pairs, size // 2, 4), x.dtype).reshape(x.shape)

    def scales(refs, rows, block):
        return (by_row(refs[0], rows, block),)

    def halves(fields, scales, block):
        return lax.bitcast_convert_type(fields, dtype)

    table = pairs_of(levels.astype(dtype), low_nibble_first)
    return Packed(block_size, views, ordered, table, scales, halves)


def pairs_of(levels: np.ndarray, low_nibble_first: bool) -> np.ndarray:
    """The two halves that each byte stands for."""
    bits = levels.view(np.uint16).astype(np.uint32)
    low, high = bits[np.arange(BYTES) & 15], bits[np.arange(BYTES) >> 4]
    pairs = low | high << 16 if low_nibble_first else high | low << 16
    return pairs.view(np.int32)


# -- instructions --------------------------------------------------------------------------


def of_nibbles(dtype: Any) -> str:
    """Codes as last places of a power of two, which is to be taken off."""
    mask, mark = twice(15), twice(HALVES[jnp.dtype(dtype).name].bits)
    each = "shr.u32 t, $4, {}; lop3.b32 ${}, t, {}, {}, 0xEA;"  # t & mask | mark
    return "\n".join(each.format(4 * i, i, mask, mark) for i in range(4))


def of_bytes(copies: int) -> str:
    """What a table has for each byte: it begins at $5, $6 is four times the lane.

    A row of it holds as many copies, so that no two lanes meet in a bank of memory.  With 64 a row
    has as many bytes as a byte has values, and an instruction that picks bytes makes its place.
    """
    read = " add.u32 t, t, $5; ld.shared.b32 ${0}, [t];"
    if 4 * copies == BYTES:
        return "\n".join(("prmt.b32 t, $4, $6, 0x55{0}4;" + read).format(i) for i in range(4))
    lines, mask = [], (BYTES - 1) * 4 * copies
    for i in range(4):
        left = (4 * copies).bit_length() - 1 - 8 * i
        shift = f"shl.b32 t, $4, {left};" if left > 0 else f"shr.u32 t, $4, {-left};"
        lines.append(f"{shift} lop3.b32 t, t, 0x{mask:X}, $6, 0xEA;" + read.format(i))  # & | $6
    return "\n".join(lines)


def operands(words: Any, parts: int, dtype: Any, table: Any = None) -> tuple[Any, ...]:
    """So many operands from u16 ``[64, columns]``: of each part its four fields side by side.

    They are still u16: see :attr:`Packed.halves`.
    """
    gpu = mosaic()
    layout, columns = gpu.Layout.WGMMA, 4 * words.shape[1] // parts
    result = gpu.ShapeDtypeStruct((ROWS, columns), jnp.uint16, layout=layout)
    more = () if table is None else (table,)
    kinds = (layout, *(gpu.RefType() for _ in more))
    text = of_nibbles(dtype) if table is None else of_bytes(table.shape[1])

    @gpu.inline_mgpu(arg_types=kinds, return_type=(result,) * parts)
    def run(_, words, *table):
        from jax.experimental.mosaic.gpu import FragmentedArray

        before, width, *after = words.registers.shape
        width //= parts  # of a part's words, and of each of its fields, in tiles
        found = np.empty((parts, before, 4 * width, *after), object)
        fields = instructions(text, *table)
        for at, register in np.ndenumerate(words.registers):
            i, tile, *rest = at
            part, tile = divmod(tile, width)
            for field, x in enumerate(fields(register)):
                found[(part, i, field * width + tile, *rest)] = x
        made = functools.partial(FragmentedArray, _layout=words.layout, _is_signed=False)
        return tuple(made(_registers=registers) for registers in found)

    return run(words, *more)


def instructions(text: str, *table: Any) -> Callable[[Any], Iterator[Any]]:
    """What makes four registers, $0 to $3, from one, $4, by such instructions."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    word, assembled = ir.IntegerType.get_signless(32), cast(Any, llvm.inline_asm)
    more: Sequence[Any] = ()
    if table:
        start = llvm.ptrtoint(word, utils.memref_ptr(*table))
        lane = assembled(word, [], "mov.u32 $0, %laneid;", "=r")
        more = start, arith.shli(lane, arith.constant(word, 2))
    inside = f"{{\n.reg .b32 t;\n{text}\n}}"
    constraints = ",".join(["=&r"] * 4 + ["r"] * (1 + len(more)))
    one = ir.VectorType.get((1,), word)

    def fields(register: Any) -> Iterator[Any]:
        given = vector.extract(vector.bitcast(one, register), [], [0])
        results = llvm.StructType.get_literal([word] * 4)
        found = assembled(results, [given, *more], inside, constraints)
        for i in range(4):
            field = vector.broadcast(one, llvm.extractvalue(word, found, [i]))
            yield vector.bitcast(register.type, field)

    return fields
