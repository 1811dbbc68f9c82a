"""One activation row times a weight in GGUF blocks, word by word; see ``_lanes``.

Formats of 32 weights: two blocks are an odd number of words.  Words are taken as they come, with
activations of 0 where a word holds no code, and a product with ones sums those of a block.
Formats of 256 weights: 8 words side by side hold two groups; codes are scaled, then summed.
Two blocks of Q6K are an odd number of words, too; the second's are put together from halves.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import product_precision
from ..types import Array
from ._lanes import field, floats, half, materialised, products, several, signed_field


def refuses(x, words, *, quant_type, k, n) -> str | None:
    """Formats that it does not read, rows that are no whole words."""
    if x.dtype == jnp.float64:
        return "it sums in float32"
    if quant_type not in FORMATS:
        return f"it does not read {quant_type}"
    return (
        None if k and n and k % WHOLE.get(quant_type, 64) == 0 else "its rows are not whole words"
    )


def declines(x, words, *, quant_type, k, n) -> str | None:
    """More than a few activations; little to decode, where the weights of pairs are not faster."""
    if quant_type not in PAIRS:
        return several(x, 4)
    if n * k < 2**22:
        return f"{n} x {k} weights are decoded as fast together"
    return several(x, PAIRS[quant_type])


def times_transposed(x: Array, words: Array, *, quant_type: str, k: int, n: int) -> Array:
    """x Wᵀ."""
    weight = words.reshape(n, -1)
    return products(x, (weight,), weight.shape[1], FORMATS[quant_type])


def total(parts: Iterable[Array]) -> Array:
    """Their sum."""
    return functools.reduce(operator.add, parts)


# -- 32 weights: d[2] and codes ----------------------------------------------------------------


def in_pairs(bits: int, flip: int) -> Callable[[Array, Array], Array]:
    """Blocks of codes of ``bits`` bits, two's complement once flipped."""
    size = 2 + 4 * bits  # bytes
    of_word = 32 // bits  # codes
    second = np.arange(0, 2 * size, 4) >= size // 4 * 4 + 2  # words of the second block
    join = 8  # pairs of blocks in one product: as many columns as a vector has
    ones = np.kron(np.eye(join), np.stack([~second, second], 1)).astype(np.float32)

    def one(v: Array, words: Array) -> Array:
        n, pairs = len(words), v.size // 64
        codes = v.reshape(pairs, 2, 8 // bits, 4 * bits).swapaxes(2, 3)  # as bytes hold them
        spread = jnp.pad(codes, ((0, 0), (0, 0), (2, 0), (0, 0)))
        spread = materialised(spread.reshape(words.shape[1], of_word).T)
        flipped = words ^ jnp.uint32(flip)
        lanes = materialised(
            total(signed_field(flipped, bits * i, bits) * spread[i] for i in range(of_word))
        )
        fit = join if pairs % join == 0 else 1
        sums = jnp.dot(
            lanes.reshape(n * pairs // fit, -1),
            jnp.asarray(ones[: fit * len(second), : 2 * fit]),
            precision=product_precision(),
        )
        sums = materialised(sums).reshape(n, pairs, 2)
        heads = words.reshape(n, pairs, -1)
        first, other = half(heads[..., 0]), half(heads[..., size // 4] >> 16)
        return materialised(sums[..., 0] * first + sums[..., 1] * other).sum(-1)

    return one


# -- 256 weights: d[2] dmin[2] scales and minima[12] [fifth bits[32]] q[128] ---------------------


def nibbles(words: Array, group: int, byte: int) -> Array:
    """The codes of Q4K: 8 groups, two to 8 words."""
    c = group // 2
    return field(words[..., 4 + 8 * c : 12 + 8 * c], 8 * byte + 4 * (group % 2))


def with_fifth(words: Array, group: int, byte: int) -> Array:
    """The codes of Q5K."""
    c = group // 2
    low = field(words[..., 12 + 8 * c : 20 + 8 * c], 8 * byte + 4 * (group % 2))
    return low | field(words[..., 4:12], 8 * byte + group, 1) << jnp.uint32(4)


def six_bits(whole: Array, pieces: Array, group: int, shift: int) -> Array:
    """A scale or a minimum."""
    if group < 4:
        return field(whole, 8 * group, 6)
    byte = 8 * (group - 4)
    return field(pieces, byte + shift) | field(whole, byte + 6, 2) << jnp.uint32(4)


def in_super_blocks(size: int, code: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    """Blocks of ``size`` words."""

    def one(v: Array, words: Array) -> Array:
        w = words.reshape(len(words), -1, size)
        x = v.reshape(w.shape[1], 8, 8, 4)  # block, group, word, byte
        sums = materialised(jnp.sum(x, (-1, -2)))
        x = materialised(x.transpose(1, 3, 0, 2))
        w0, w1, w2, w3 = (w[..., i] for i in range(4))
        lanes = total(
            floats(six_bits(w1, w3, g, 0))[..., None]
            * total(floats(code(w, g, i)) * x[g, i] for i in range(4))
            for g in range(8)
        )
        lanes = materialised(half(w0)[..., None] * lanes)
        least = total(floats(six_bits(w2, w3, g, 4)) * sums[:, g] for g in range(8))
        least = materialised(half(w0 >> 16) * least)
        return lanes.sum((-1, -2)) - least.sum(-1)

    return one


# -- 256 weights: q[128] fifth and sixth bits[64] scales[16] d[2] --------------------------------


def part_of_pair(words: Array, block: int, start: int, count: int) -> Array:
    """Words of a block, of ``[..., 105]`` that hold two: the second begins in the middle of one."""
    if block == 0:
        return words[..., start : start + count]
    first, then = (words[..., 52 + start + i : 52 + start + i + count] for i in (0, 1))
    return first >> jnp.uint32(16) | then << jnp.uint32(16)


def six_bit_codes(v: Array, words: Array) -> Array:
    """Groups of 16, half of 8 words: each half of those has a scale of its own."""
    pairs = words.reshape(len(words), -1, 105)
    x = v.reshape(pairs.shape[1], 2, 2, 4, 8, 4)  # pair, block, half, run of 32, word, byte
    x = materialised(x.transpose(1, 2, 3, 5, 0, 4))
    first = lax.iota(jnp.int32, 8) < 4
    sums = []
    for block in range(2):
        part = functools.partial(part_of_pair, pairs, block)
        scales, lanes = part(48, 4), []
        for at, run in np.ndindex(2, 4):
            low, high = part(16 * at + 8 * (run % 2), 8), part(32 + 8 * at, 8)
            fours = (field(low, 8 * i + 4 * (run // 2)) for i in range(4))
            twos = (field(high, 8 * i + 2 * run, 2) << jnp.uint32(4) for i in range(4))
            codes = (((a | b).astype(jnp.int32) - 32) for a, b in zip(fours, twos, strict=True))
            dots = total(c.astype(jnp.float32) * x[block, at, run, i] for i, c in enumerate(codes))
            word, byte = 2 * at + run // 2, run % 2 * 16
            one, other = (signed_field(scales[..., word], byte + i, 8) for i in (0, 8))
            lanes.append(dots * jnp.where(first, one[..., None], other[..., None]))
        d = half(pairs[..., 52] if block == 0 else pairs[..., 104] >> jnp.uint32(16))
        sums.append(materialised(total(lanes) * d[..., None]).sum((-1, -2)))
    return total(sums)


WHOLE = {"Q6K": 512, "Q6_K": 512}  # weights that fill whole words, where it is not 64
PAIRS = {"Q4_0": 3, "Q8_0": 1}  # up to how many rows of activations it was faster
FORMATS: dict[str, Any] = {
    "Q4_0": in_pairs(4, 0x88888888),
    "Q8_0": in_pairs(8, 0),
    "Q4K": in_super_blocks(36, nibbles),
    "Q5K": in_super_blocks(44, with_fifth),
    "Q6K": six_bit_codes,
}
FORMATS |= {"Q4_K": FORMATS["Q4K"], "Q4_K_M": FORMATS["Q4K"], "Q5_K": FORMATS["Q5K"]}
FORMATS["Q6_K"] = FORMATS["Q6K"]
