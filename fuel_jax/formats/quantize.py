"""Trained weights as the packed operands of the quantised products.

``quantize`` packs for ``qmatmul``, ``quantize_nf4`` for ``nf4_matmul``, ``quantize_awq`` for
``awq_matmul``.  A weight is ``W[n, k]``, as its layer computes  x @ Wᵀ.

All round to nearest, from the weights alone: no sample of activations decides which of them matter.
Scales are rounded up, so that no weight is clipped and each is off by half a step at most.  Blocks
of 32 are the ``gguf`` package's, where some are off by a whole step.  NumPy, on the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ArgumentError, ShapeError
from ..fused._gguf_blocks import FORMATS, QuantType
from ..fused.nf4_matmul import LEVELS
from ..types import FLOATS

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Parts = list[NDArray[Any]]  # of blocks side by side, each [blocks, bytes]

AT_ONCE = 2**12  # blocks of 256 encoded together: a few MiB of float32 on the way

# -- what arrives ----------------------------------------------------------------------------


def matrix(w: ArrayLike, caller: str) -> Floats:
    """The weight in float32, or an error."""
    given = np.asarray(w)
    if given.dtype.name not in FLOATS:
        raise ShapeError(f"{caller}: 'w' is {given.dtype}; it must be one of {', '.join(FLOATS)}.")
    if given.ndim != 2:
        raise ShapeError(
            f"{caller}: 'w' has {given.ndim} axes; it must have 2, [n, k]. Pack layers one by one."
        )
    with np.errstate(over="ignore"):
        x = given.astype(np.float32)
    bad = ~np.isfinite(x)
    if bad.any():
        i, j = divmod(int(bad.argmax()), x.shape[1])
        raise ArgumentError(
            f"{caller}: 'w' at [{i}, {j}] is {given[i, j]}; packed weights are finite in float32. "
            f"({bad.sum()} of {x.size} are not.)"
        )
    return x


def grouped(w: Floats, size: int, parameter: str, caller: str) -> Floats:
    """``[n, k]`` to ``[n, k / size, size]``, or an error."""
    if size < 1 or w.shape[1] % size:
        raise ArgumentError(
            f"{caller}: parameter '{parameter}' is {size} and 'w' has rows of {w.shape[1]}; "
            f"groups must fill a row."
        )
    return w.reshape(len(w), w.shape[1] // size, size)


def half_at_least(x: Floats, caller: str) -> NDArray[np.float16]:
    """The smallest float16 that is no less."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        half = np.where(half < x, np.nextafter(half, np.float16(np.inf)), half)
    require_finite(half, caller)
    return half


def require_finite(halves: NDArray[np.float16], caller: str) -> None:
    """An error where a scale is beyond float16."""
    if not np.isfinite(halves).all():
        raise ArgumentError(
            f"{caller}: 'w' holds weights whose scale is beyond float16, 65504. Divide the weight "
            f"by a power of two and multiply the product by it."
        )


def quotient(x: Floats, step: Floats) -> Floats:
    """``x / step``; 0 where the step is 0, for then so are the weights."""
    out = np.zeros(x.shape, np.float32)
    return np.divide(x, step, out=out, where=step != 0)


# -- GGUF: 32 weights a block, by the gguf package ---------------------------------------------


def by_gguf(w: Floats, name: str) -> Codes:
    """Blocks as ``gguf.quants`` packs them, ``[blocks, bytes]``."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            f"quantize: {name} is packed by the gguf package, which is not installed. "
            f"Run: pip install 'fuel-jax[formats]'"
        ) from error
    with np.errstate(all="ignore"):  # reciprocals of steps near 0, whose codes then do not matter
        packed = gguf.quants.quantize(w, gguf.GGMLQuantizationType[name])
    blocks = packed.reshape(-1, FORMATS[name].bytes)
    require_finite(blocks[:, : 4 if name.endswith("_1") else 2].copy().view("<f2"), "quantize")
    return blocks


# -- GGUF: 256 weights a block, in groups with scales of their own -----------------------------


def packed(q: NDArray[Any], bits: int, run: int) -> Codes:
    """Codes side by side in bytes: what ``_gguf_blocks.fields`` takes apart."""
    q = q.astype(np.uint8).reshape(len(q), -1, 8 // bits, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(q << shifts, axis=2).reshape(len(q), -1)


def raw(half: NDArray[np.float16]) -> Codes:
    """The two bytes of each."""
    return half.astype("<f2").view(np.uint8)


def graded(x: Floats, largest: int) -> tuple[NDArray[np.float16], Floats, Floats]:
    """Numbers of a block, ``[blocks, groups]``, as ``d · code`` with codes up to ``largest``.

    Rounded up.  Returns ``d [blocks, 1]``, the codes, and what the products are.
    """
    # In float64: a quotient that underflows would leave numbers that are not 0 without a step.
    d = half_at_least(x.max(-1, keepdims=True) / np.float64(largest), "quantize")
    code = np.minimum(np.ceil(quotient(x, d.astype(np.float32))), largest)
    return d, code, d.astype(np.float32) * code


def with_minimum(w: Floats, groups: int, bits: int, grades: int) -> tuple[Any, ...]:
    """w ≈ d·scale·q − dmin·minimum,  q of ``bits`` bits, scale and minimum up to ``grades``."""
    w = w.reshape(len(w), groups, -1)
    largest = 2**bits - 1
    dmin, minimum, below = graded(np.maximum(-w.min(-1), 0), grades)
    d, scale, step = graded((w.max(-1) + below) / np.float64(largest), grades)
    q = np.rint(quotient(w + below[..., None], step[..., None])).clip(0, largest)
    return d, dmin, scale.astype(np.uint8), minimum.astype(np.uint8), q.astype(np.uint8)


def around_zero(w: Floats, bits: int, grades: int) -> tuple[Any, ...]:
    """w ≈ d·scale·q,  q signed of ``bits`` bits; 16 groups, scales from −grades to grades.

    A negative scale where the larger weights are positive: there is one code more below zero.
    """
    w = w.reshape(len(w), 16, 16)
    bottom, top = np.float64(2 ** (bits - 1)), np.float64(2 ** (bits - 1) - 1)
    low, high = -w.min(-1), w.max(-1)
    needed = np.maximum(np.maximum(low, high) / bottom, np.minimum(low, high) / top)
    d, scale, step = graded(needed, grades)
    sign = np.where(high > low, np.float32(-1), np.float32(1))
    q = np.rint(quotient(w, (sign * step)[..., None])).clip(-bottom, top)
    return d, (sign * scale).astype(np.int8), q.astype(np.int8).reshape(len(w), 256)


def q2k(w: Floats) -> Parts:
    """Scales and minima[16] q[64] d[2] dmin[2]."""
    d, dmin, scale, minimum, q = with_minimum(w, 16, bits=2, grades=15)
    return [scale | minimum << 4, packed(q, 2, run=32), raw(d), raw(dmin)]


def q3k(w: Floats) -> Parts:
    """Third bits[32] q[64] scales[12] d[2]."""
    d, scale, q = around_zero(w, bits=3, grades=31)
    s, q = scale + 32, q + 4
    scales = [packed(s & 15, 4, run=8), packed(s >> 4, 2, run=4)]
    return [packed(q >> 2, 1, run=32), packed(q & 3, 2, run=32), *scales, raw(d)]


def q45k_scales(d: Any, dmin: Any, scale: Codes, minimum: Codes) -> Parts:
    """d[2] dmin[2] scales and minima[12]: four of each whole, four in pieces."""
    (s, s4), (m, m4) = np.split(scale, 2, axis=1), np.split(minimum, 2, axis=1)
    pieces = s4 & 15 | (m4 & 15) << 4
    return [raw(d), raw(dmin), s | s4 >> 4 << 6, m | m4 >> 4 << 6, pieces]


def q4k(w: Floats) -> Parts:
    """d[2] dmin[2] scales and minima[12] q[128]."""
    *scales, q = with_minimum(w, 8, bits=4, grades=63)
    return [*q45k_scales(*scales), packed(q, 4, run=32)]


def q5k(w: Floats) -> Parts:
    """d[2] dmin[2] scales and minima[12] fifth bits[32] q[128]."""
    *scales, q = with_minimum(w, 8, bits=5, grades=63)
    return [*q45k_scales(*scales), packed(q >> 4, 1, run=32), packed(q & 15, 4, run=32)]


def q6k(w: Floats) -> Parts:
    """q[128] fifth and sixth bits[64] scales[16] d[2]."""
    d, scale, q = around_zero(w, bits=6, grades=127)
    q = q + 32
    return [packed(q & 15, 4, run=64), packed(q >> 4, 2, run=32), scale.view(np.uint8), raw(d)]


Encoder = Callable[[Floats], Parts]
ENCODERS: dict[str, Encoder] = {"Q2K": q2k, "Q3K": q3k, "Q4K": q4k, "Q5K": q5k, "Q6K": q6k}
ENCODERS |= {f"Q{bits}_K": ENCODERS[f"Q{bits}K"] for bits in (2, 3, 4, 5, 6)}
ENCODERS |= {"Q4_K_M": q4k}
BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def quantize(w: ArrayLike, quant_type: QuantType) -> Words:
    """A weight in llama.cpp's blocks, as ``qmatmul`` takes it.

    w ≈ d·q for ``Q4_0 Q5_0 Q8_0``, d·q + m for ``Q4_1 Q5_1``: blocks of 32, packed by the ``gguf``
    package.  w ≈ d·scale·q for ``Q3K Q6K``, d·scale·q − dmin·minimum for ``Q2K Q4K Q5K``: blocks of
    256 in groups of 16 or 32, d and dmin float16, scale and minimum small integers of each group.
    There every weight is within half a step, d·scale / 2.  (llama.cpp searches for scales with a
    smaller square error; its files are read the same way.)

    Args:
        w: ``[n, k]``, a float dtype; packed from its float32 values.
        quant_type: as for ``qmatmul``, but for ``Q8_1``, which llama.cpp has for activations.

    Returns:
        The bytes of the rows one after the other as little-endian words, uint32, the last one
        padded with zeros.

    Raises:
        ShapeError: ``w`` is not a matrix of floats.
        ArgumentError: ``k`` makes no whole blocks, a weight is not finite or needs a scale beyond
            float16, or no such type.
        ImportError: a type that needs ``gguf``, without it: ``pip install 'fuel-jax[formats]'``.

    Source: https://github.com/ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c.
    """
    if quant_type not in (*BY_GGUF, *ENCODERS):
        known = ", ".join((*BY_GGUF, *ENCODERS))
        why = " (Q8_1 is for activations; Q8_0 holds the same weights.)" * (quant_type == "Q8_1")
        raise ArgumentError(
            f"quantize: parameter 'quant_type' is {quant_type!r}; it must be one of {known}.{why}"
        )
    weights = FORMATS[quant_type].weights
    x = matrix(w, "quantize")
    if x.shape[1] % weights:
        raise ArgumentError(
            f"quantize: 'w' has rows of {x.shape[1]}; {quant_type} packs {weights} weights of a "
            f"row together. Pad rows and activations with zeros, or take a type of 32."
        )
    if not x.size:
        return np.zeros(0, np.uint32)
    if quant_type in BY_GGUF:
        blocks = by_gguf(x, quant_type)
    else:
        encode, loose = ENCODERS[quant_type], x.reshape(-1, weights)
        parts = np.array_split(loose, -(-len(loose) // AT_ONCE))
        blocks = np.concatenate([np.concatenate(encode(part), 1) for part in parts])
    loose = blocks.reshape(-1)
    return np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)


# -- four bits, by level or by scale and zero point --------------------------------------------


def quantize_nf4(
    w: ArrayLike, block_size: int = 64, *, low_nibble_first: bool = False
) -> tuple[Codes, Floats]:
    """A weight in 4-bit NormalFloat, as ``nf4_matmul`` takes it.

    w ≈ level[code] · absmax,  absmax the largest magnitude of a block, code that of the level
    nearest to w / absmax.  A weight is off by at most 0.152 · absmax, half the widest gap.

    Args:
        w: ``[n, k]``, a float dtype; packed from its float32 values.
        block_size: weights that share a scale; divides k.
        low_nibble_first: weight 0 in the low nibble of a byte, as Fuel packs them; bitsandbytes
            has it in the high one.

    Returns:
        ``w_packed [n, k / 2]`` uint8 and ``absmax [n, k / block_size]`` float32.

    Raises:
        ShapeError: ``w`` is not a matrix of floats.
        ArgumentError: blocks do not fill a row, k is odd, or a weight is not finite.

    Source: Dettmers et al. 2023, arXiv:2305.14314; bitsandbytes ``functional.quantize_4bit``.
    """
    x = matrix(w, "quantize_nf4")
    blocks = grouped(x, block_size, "block_size", "quantize_nf4")
    if x.shape[1] % 2:
        raise ArgumentError(
            f"quantize_nf4: 'w' has rows of {x.shape[1]}; two weights share a byte."
        )
    absmax = np.abs(blocks).max(-1)
    between = (LEVELS[1:] + LEVELS[:-1]) / 2
    code = np.searchsorted(between, quotient(blocks, absmax[..., None])).astype(np.uint8)
    first, second = np.moveaxis(code.reshape(len(x), x.shape[1] // 2, 2), -1, 0)
    if low_nibble_first:
        first, second = second, first
    return first << np.uint8(4) | second, absmax


def quantize_awq(w: ArrayLike, group_size: int = 128) -> tuple[Words, Words, NDArray[np.float16]]:
    """A weight in AutoAWQ's GEMV layout, as ``awq_matmul`` takes it.

    w ≈ (code − zero) · scale,  codes and zeros of 4 bits, scale = (max − min) / 15 of a group that
    is made to hold 0.  Every weight is within scale / 2.  This is the layout, rounded to nearest;
    what AWQ adds is to scale channels by their activations first: multiply the columns of ``w`` and
    divide the activations.

    Args:
        w: ``[n, k]``, a float dtype; packed from its float32 values.
        group_size: weights that share a scale and a zero point; divides k.

    Returns:
        ``weight [n, k / 8]`` uint32, nibble i of a word is weight i; ``zeros [n, z]`` uint32, of
        group g nibble g % 8 of word g // 8, z = groups / 8 rounded up; ``scales [n, 8z]`` float16,
        those beyond the groups 0.

    Raises:
        ShapeError: ``w`` is not a matrix of floats.
        ArgumentError: groups do not fill a row, k is no multiple of 8, or a weight is not finite or
            needs a scale beyond float16.

    Source: Lin et al. 2023, arXiv:2306.00978; AutoAWQ ``quantizer.pseudo_quantize_tensor``.
    """
    x = matrix(w, "quantize_awq")
    groups = grouped(x, group_size, "group_size", "quantize_awq")
    if x.shape[1] % 8:
        raise ArgumentError(f"quantize_awq: 'w' has rows of {x.shape[1]}; a word holds 8 weights.")
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    # In float64, as in graded.
    scales = half_at_least((np.float64(1) * high - low) / 15, "quantize_awq")
    step = scales.astype(np.float32)
    zero = np.rint(quotient(-low, step))
    code = np.rint(quotient(groups, step[..., None]) + zero[..., None]).clip(0, 15)
    padding = ((0, 0), (0, -zero.shape[1] % 8))
    return nibbles(code.reshape(x.shape)), nibbles(np.pad(zero, padding)), np.pad(scales, padding)


def nibbles(code: Floats) -> Words:
    """Eight codes a word, the first one lowest: ``[n, 8w]`` to ``[n, w]``."""
    eight = code.astype(np.uint32).reshape(len(code), code.shape[1] // 8, 8)
    return np.bitwise_or.reduce(eight << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
