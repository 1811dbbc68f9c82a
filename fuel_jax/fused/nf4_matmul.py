"""Product with a 4-bit NormalFloat weight."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import quantised, quantised_matmul as kernels, quantised_runs
from pallas_kernels._tiles import Tiles

from .._op import Precision
from ..numerics import wide, wide_dtype
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Bytes, Floats, Wide
from . import _packed_hopper as hopper
from ._frozen_weight import (
    BLOCK,
    PART,
    Rows,
    block_tiles,
    declines_rounded,
    fits_one_block,
    refuses_nothing,
    refuses_rounded,
    times,
    times_blocked,
    times_transposed,
    times_transposed_blocked,
    times_transposed_rounded,
)
from ._lanes import materialised, products, several

PRECISION = Precision(float32=2e-6)

# Quantiles of a normal distribution, scaled to [−1, 1].  Dettmers et al. 2023, arXiv:2305.14314,
# appendix E; these digits are bitsandbytes'.
LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


def examples() -> Iterator[dict[str, Any]]:
    """A block a row; half a batch of small blocks, nibbles the other way round; one weight pair."""
    rng = np.random.default_rng(21)
    for batch, m, k, n, block_size in (
        *(((), 3, 64, 5, 64), ((2,), 2, 48, 3, 8)),
        ((), 1, 2, 1, 2),
    ):
        yield {
            "activations": jax.ShapeDtypeStruct((*batch, m, k), jnp.float32),
            "w_packed": rng.integers(0, 256, (n, k // 2), np.uint8),
            "absmax": rng.uniform(0.5, 1.5, (n, k // block_size)).astype(np.float32),
            "block_size": block_size,
            "low_nibble_first": bool(batch),
        }


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with the cotangent of its result."""
    for example in examples():
        shape = (*example.pop("activations").shape[:-1], example["w_packed"].shape[0])
        yield {"upstream": jax.ShapeDtypeStruct(shape, jnp.float32), **example}


def weight_rejects(w_packed: Any, absmax: Any, block_size: int) -> str | None:
    """Blocks that do not fill a row."""
    k = 2 * w_packed.shape[1]
    if block_size < 1 or k % block_size:
        return (
            f"parameter 'block_size' is {block_size} and 'w_packed' has {k} weights a row; blocks "
            f"must fill a row. (bitsandbytes counts blocks over the flat weight: where rows are no "
            f"multiple of the block, quantise again.)"
        )
    if absmax.shape[1] != k // block_size:
        return (
            f"'absmax' has {absmax.shape[1]} blocks a row; {k} weights in blocks of {block_size} "
            f"make {k // block_size}. Reshape bitsandbytes' flat absmax to [n, k / block_size]."
        )
    return None


def rejects(
    activations: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> str | None:
    """Rows of another length than the weight's."""
    if activations.shape[-1] != 2 * w_packed.shape[1]:
        return (
            f"'activations' has rows of {activations.shape[-1]} and 'w_packed' has "
            f"{2 * w_packed.shape[1]} weights a row, two a byte; they must be equal."
        )
    return weight_rejects(w_packed, absmax, block_size)


def backward_rejects(
    upstream: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> str | None:
    """Likewise; the cotangent's rows are an axis of the weight's already."""
    return weight_rejects(w_packed, absmax, block_size)


def decoder(w_packed: Array, absmax: Array, dtype: jnp.dtype, *, low_nibble_first: bool) -> Rows:
    """Rows of the weight in ``dtype``.

    (On a CPU a level for each nibble takes two thirds of the time of a pair of them for each byte.)
    """
    levels = jnp.asarray(LEVELS, dtype)
    k, blocks = 2 * w_packed.shape[1], absmax.shape[1]

    def rows(start, count):
        packed = lax.dynamic_slice_in_dim(w_packed, start, count)
        scale = lax.dynamic_slice_in_dim(absmax, start, count).astype(dtype)
        nibbles = (packed & 15, packed >> 4) if low_nibble_first else (packed >> 4, packed & 15)
        pairs = [levels.at[nibble].get(mode="promise_in_bounds") for nibble in nibbles]
        blocked = jnp.stack(pairs, -1).reshape(count, blocks, k // max(blocks, 1))
        blocked = blocked * scale[..., None]
        return blocked.reshape(count, k)

    return rows


def declines(_: Any, w_packed: Any, *rest: Any, most: int = BLOCK, **params: Any) -> str | None:
    """Small weights."""
    return fits_one_block(w_packed.shape[0], 2 * w_packed.shape[1], most)


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dactivations",),
    splits="*batch m n",
    frozen=("absmax",),
    matchable=False,
    rejects=backward_rejects,
    examples=backward_examples,
)
def nf4_matmul_backward(
    upstream: Floats[Array, "*batch m n"],
    w_packed: Bytes[Array, "n half_k"],
    absmax: Wide[Array, "n blocks"],
    *,
    block_size: int = 64,
    low_nibble_first: bool = False,
) -> Floats[Array, "*batch m k"]:
    """Gradient of :func:`nf4_matmul`:  upstream @ W.

    W is decoded some rows at a time: of a large one no dense copy is held.

    Args:
        upstream: the cotangent of the result, ``[*batch, m, n]``.
        w_packed: the forward's codes.
        absmax: the forward's scales; frozen.
        block_size: the forward's.
        low_nibble_first: the forward's.

    Returns:
        The cotangent of ``activations``, ``[*batch, m, k]``, in the dtype of ``upstream``.
    """
    g = wide(upstream)
    rows = decoder(w_packed, absmax, g.dtype, low_nibble_first=low_nibble_first)
    return times(g, rows, w_packed.shape[0]).astype(upstream.dtype)


@fused_op(
    OpKind.Nf4Matmul,
    id=FusedOps.NF4_MATMUL,
    family="Quantized",
    precision=PRECISION,
    backward=nf4_matmul_backward,
    splits="*batch m n",
    frozen=("absmax",),
    matchable=False,
    rejects=rejects,
    examples=examples,
)
def nf4_matmul(
    activations: Floats[Array, "*batch m k"],
    w_packed: Bytes[Array, "n half_k"],
    absmax: Wide[Array, "n blocks"],
    *,
    block_size: int = 64,
    low_nibble_first: bool = False,
) -> Floats[Array, "*batch m n"]:
    """activations @ Wᵀ,  W[n, k] = level[code[n, k]] · absmax[n, k // block_size].

    The weights are those of bitsandbytes in float32; products are summed in float32 (float64 for
    float64 activations) and rounded once.  On NVIDIA GPUs three and more rows of half activations
    meet levels or weights rounded to their dtype, for the tensor cores, as in bitsandbytes.  Codes
    and scales are frozen; ``activations`` has a gradient.

    Args:
        activations: ``[*batch, m, k]``.
        w_packed: two codes a byte, ``[n, k / 2]``; weight 0 in the **high** nibble, as bitsandbytes
            packs them.
        absmax: the largest magnitude of each block, ``[n, k / block_size]``, F32 (F64 is taken).
        block_size: weights that share a scale; divides k.
        low_nibble_first: weight 0 in the low nibble instead, as Fuel packs them.

    Returns:
        ``[*batch, m, n]`` in the dtype of ``activations``.

    Raises:
        ArgumentError: blocks do not fill a row, or the operands disagree on ``k``.
        NotDifferentiable: when ``absmax`` is differentiated.

    Source: Dettmers et al. 2023, arXiv:2305.14314; bitsandbytes ``functional.quantize_4bit``.
    """
    x = wide(activations)
    rows = decoder(w_packed, absmax, x.dtype, low_nibble_first=low_nibble_first)
    return times_transposed(x, rows, w_packed.shape[0]).astype(activations.dtype)


def refuses_lanes(
    activations: Any, w_packed: Any, *rest: Any, block_size: int, **params: Any
) -> str | None:
    """Sums in another width, blocks that are no vectors."""
    if activations.dtype == jnp.float64 or rest[0].dtype == jnp.float64:
        return "it sums in float32"
    if 0 in w_packed.shape:
        return "there is nothing to decode"
    return None if block_size % 64 == 0 else f"blocks of {block_size} are no vectors of bytes"


def few(activations: Any, w_packed: Any, *rest: Any, **params: Any) -> str | None:
    """More than a few activations, or little to decode."""
    if w_packed.size < 2**19:
        return f"{2 * w_packed.size} weights are decoded as fast together"
    return several(activations, 2)


def level(codes: Array) -> Array:
    """LEVELS of I32 codes, chosen bit by bit: XLA vectorises that, and not a read from a table."""
    levels = [jnp.float32(x) for x in LEVELS]
    for bit in (3, 2, 1, 0):
        is_set, half = (codes >> bit) & 1 != 0, len(levels) // 2
        levels = [jnp.where(is_set, levels[half + i], levels[i]) for i in range(half)]
    return levels[0]


@nf4_matmul.kernel("lanes", platforms=("cpu",), refuses=refuses_lanes, declines=few)
def nf4_matmul_lanes(activations, w_packed, absmax, *, block_size, low_nibble_first):
    """Decoded byte by byte, and never written down."""
    blocks = absmax.shape[1]

    def one(v, packed, absmax):
        x = materialised(jnp.moveaxis(v.reshape(blocks, -1, 2), 2, 0))
        high, low = x[::-1] if low_nibble_first else x
        codes = packed.reshape(len(packed), blocks, -1).astype(jnp.int32)
        lanes = (level(codes >> 4) * high + level(codes & 15) * low) * absmax[..., None]
        return materialised(lanes).sum((-1, -2))

    # A byte has a partial sum, as a word has elsewhere.
    y = products(wide(activations), (w_packed, absmax), 2 * w_packed.shape[1], one)
    return y.astype(activations.dtype)


def tiles_blocked(x: Any, w_packed: Any, *rest: Any, most: int = BLOCK, **params: Any) -> Tiles:
    """How many rows at a time."""
    return block_tiles(x, w_packed.shape[0], 2 * w_packed.shape[1], most)


in_blocks: dict[str, Any] = {
    "platforms": ("cpu",),
    "refuses": refuses_nothing,
    "declines": declines,
    "tiles": tiles_blocked,
}


@nf4_matmul.kernel("blocked", **in_blocks)
def nf4_matmul_blocked(activations, w_packed, absmax, *, block_size, low_nibble_first, tile=None):
    """The weight a block of rows at a time."""
    x = wide(activations)
    rows = decoder(w_packed, absmax, x.dtype, low_nibble_first=low_nibble_first)
    return times_transposed_blocked(x, rows, w_packed.shape[0], tile).astype(activations.dtype)


@nf4_matmul_backward.kernel("blocked", **in_blocks)
def nf4_matmul_backward_blocked(
    upstream, w_packed, absmax, *, block_size, low_nibble_first, tile=None
):
    """The weight a block of rows at a time."""
    rows = decoder(w_packed, absmax, wide_dtype(upstream), low_nibble_first=low_nibble_first)
    n, half_k = w_packed.shape
    return times_blocked(upstream, rows, n, 2 * half_k, tile)


# -- on NVIDIA GPUs ------------------------------------------------------------------------


def refuses_triton(
    activations: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> str | None:
    """Rows that are no words, blocks that are no tiles of words."""
    n, half_k = w_packed.shape
    if half_k % 4:
        return f"rows of {half_k} bytes are not whole words"
    cannot = kernels.refuses(activations, n, 2 * half_k, w_packed, absmax)
    return cannot or kernels.refuses_groups(block_size)


def declines_triton(
    activations: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> str | None:
    """Where XLA is as fast."""
    return kernels.declines(activations, w_packed.shape[0], group=block_size)


def tiles_triton(
    activations: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> Tiles:
    """How it may be cut."""
    n, half_k = w_packed.shape
    how = (half_k // 4, block_size, low_nibble_first, LEVELS)
    return kernels.tiles(activations, n, quantised.nf4(*how), quantised_runs.nf4(*how))


def tiles_triton_backward(
    upstream: Any, w_packed: Any, absmax: Any, *, block_size: int, low_nibble_first: bool
) -> Tiles:
    """How its gradient may be cut."""
    packing = quantised.nf4(w_packed.shape[1] // 4, block_size, low_nibble_first, LEVELS)
    return kernels.gradient_tiles(upstream, packing)


def in_words(w_packed: Array) -> Array:
    """Four bytes together: ``[n, k / 2]`` to ``[n, k / 8]``."""
    n, half_k = w_packed.shape
    return lax.bitcast_convert_type(w_packed.reshape(n, half_k // 4, 4), jnp.uint32)


nf4_matmul.kernel(
    "mosaic", platforms=("cuda",), refuses=hopper.refuses_nf4, declines=hopper.declines_nf4
)(hopper.nf4(LEVELS, in_words))


@nf4_matmul.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=declines_triton,
    tiles=tiles_triton,
)
def nf4_matmul_by_triton(
    activations, w_packed, absmax, *, block_size, low_nibble_first, tile=None, interpret=False
):
    """Decoded in registers."""
    words = in_words(w_packed)
    how = (words.shape[1], block_size, low_nibble_first, LEVELS)
    packing, runs = quantised.nf4(*how), quantised_runs.nf4(*how)
    options = {"name": "nf4_matmul", "interpret": interpret, "tile": tile}
    return kernels.product(activations, (words, absmax), len(words), packing, runs, **options)


@nf4_matmul_backward.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=kernels.declines_gradient,
    tiles=tiles_triton_backward,
)
def nf4_matmul_backward_by_triton(
    upstream, w_packed, absmax, *, block_size, low_nibble_first, tile=None, interpret=False
):
    """Decoded in registers."""
    words = in_words(w_packed)
    packing = quantised.nf4(words.shape[1], block_size, low_nibble_first, LEVELS)
    options = {"name": "nf4_matmul_backward", "interpret": interpret, "tile": tile}
    return kernels.gradient(upstream, (words, absmax), packing, **options)


rounded: dict[str, Any] = {
    "platforms": ("cuda",),
    "refuses": refuses_rounded,
    "declines": declines_rounded,
}
tiles_parts = functools.partial(tiles_blocked, most=PART)


@nf4_matmul.kernel("rounded", **rounded)
def nf4_matmul_rounded(
    activations, w_packed, absmax, *, block_size, low_nibble_first, interpret=False
):
    """The weight rounded to the dtype of the activations, for the tensor cores."""
    rows = decoder(w_packed, absmax, jnp.float32, low_nibble_first=low_nibble_first)
    return times_transposed_rounded(activations, rows, w_packed.shape[0])


@nf4_matmul_backward.kernel("rounded", **rounded, tiles=tiles_parts)
def nf4_matmul_backward_rounded(
    upstream, w_packed, absmax, *, block_size, low_nibble_first, tile=None, interpret=False
):
    """The weight rounded to the dtype of the cotangent, for the tensor cores; a part at a time."""
    rows = decoder(w_packed, absmax, jnp.float32, low_nibble_first=low_nibble_first)
    n, half_k = w_packed.shape
    return times_blocked(upstream, rows, n, 2 * half_k, tile, rounded=True)


nf4_matmul_backward.kernel(
    "parts",
    refuses=refuses_nothing,
    declines=functools.partial(declines, most=PART),
    tiles=tiles_parts,
)(nf4_matmul_backward_blocked)
