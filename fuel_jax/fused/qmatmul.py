"""Product with a weight in one of llama.cpp's block formats."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import quantised_gguf, quantised_gguf_runs, quantised_matmul as kernels
from pallas_kernels._tiles import Tiles

from .._op import Precision
from ..numerics import wide, wide_dtype
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Words
from . import _gguf_lanes as lanes
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
from ._gguf_blocks import FORMATS, QuantType

PRECISION = Precision(float32=2e-6)


# Where a block of an example keeps its halves, and their size: weights come out near 0.3.
HALVES: dict[str, tuple[tuple[int, ...], float]] = {
    "Q4_0": ((0,), 2**-5),
    "Q4K": ((0, 2), 2**-11),
    "Q6K": ((208,), 2**-13),
}


def stream(quant_type: str, k: int, n: int) -> np.ndarray:
    """The weights of an example: random codes, scales of a trained layer's size."""
    form = FORMATS[quant_type]
    rng = np.random.default_rng(14)
    blocks = rng.integers(0, 256, (n * k // form.weights, form.bytes), np.uint8)
    places, size = HALVES[quant_type]
    for at in places:
        half = rng.normal(0, size, (len(blocks), 1)).astype("<f2")
        blocks[:, at : at + 2] = half.view(np.uint8)
    loose = blocks.reshape(-1)
    return np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)


def examples() -> Iterator[dict[str, Any]]:
    """A super-block format, an odd half word with a batch, and one row of one block."""
    for batch, m, k, n, quant_type in (
        *(((), 3, 256, 5, "Q4K"), ((2,), 2, 32, 3, "Q4_0")),
        ((), 1, 256, 1, "Q6K"),
    ):
        yield {
            "a": jax.ShapeDtypeStruct((*batch, m, k), jnp.float32),
            "w_q_bytes": stream(quant_type, k, n),
            "quant_type": quant_type,
            "k": k,
            "n": n,
        }


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with the cotangent of its result."""
    for example in examples():
        a = example.pop("a")
        upstream = jax.ShapeDtypeStruct((*a.shape[:-1], example["n"]), jnp.float32)
        yield {"upstream": upstream, **example}


def stream_rejects(w_q_bytes: Any, quant_type: Any, k: int, n: int) -> str | None:
    """Sizes that make no whole blocks, or other blocks than the stream holds."""
    form = FORMATS[quant_type]
    if k < 0 or k % form.weights:
        return f"parameter 'k' is {k}; {quant_type} packs {form.weights} weights of a row together."
    if n < 0:
        return f"parameter 'n' is {n}; it must be at least 0."
    words = -(-n * (k // form.weights) * form.bytes // 4)
    if w_q_bytes.shape[0] != words:
        return (
            f"'w_q_bytes' has {w_q_bytes.shape[0]} words; {n} x {k} weights in {quant_type} fill "
            f"{words}, the last one padded with zeros. Check 'n', 'k' and 'quant_type'."
        )
    return None


def rejects(a: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int) -> str | None:
    """Rows of another length than the weight's, or a stream of another size."""
    if a.shape[-1] != k:
        return f"'a' has rows of {a.shape[-1]} and parameter 'k' is {k}; they must be equal."
    return stream_rejects(w_q_bytes, quant_type, k, n)


def backward_rejects(
    upstream: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int
) -> str | None:
    """Likewise, for the cotangent."""
    if upstream.shape[-1] != n:
        return f"'upstream' has rows of {upstream.shape[-1]} and parameter 'n' is {n}."
    return stream_rejects(w_q_bytes, quant_type, k, n)


def decoder(words: Array, dtype: jnp.dtype, *, quant_type: str, k: int, n: int) -> Rows:
    """Rows of the weight, float32 as ggml computes them, in ``dtype``."""
    form = FORMATS[quant_type]
    blocks = k // form.weights
    row_bytes = blocks * form.bytes

    def blocks_of(start, count):  # start is even: every format's bytes are, so it is a whole word
        size = -(-count * row_bytes // 4)
        part = lax.dynamic_slice_in_dim(words, start // 2 * (row_bytes // 2), size)
        loose = lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)  # lowest byte first
        return loose[: count * row_bytes].reshape(count, blocks, form.bytes)

    # Of all rows beforehand: inside a loop XLA would compute the scales anew for every weight.
    d, m = form.scales(blocks_of(0, n))

    def rows(start, count):
        spread = lambda s: lax.dynamic_slice_in_dim(s, start, count)[..., None]
        q = form.codes(blocks_of(start, count)).astype(jnp.float32)
        w = q.reshape(count, *d.shape[1:], form.weights // d.shape[-1]) * spread(d)
        w = w if m is None else w + spread(m)
        return w.reshape(count, k).astype(dtype)

    return rows


def declines(
    _: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int, most: int = BLOCK
) -> str | None:
    """Small weights."""
    return fits_one_block(n, k, most)


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("da",),
    splits="*batch m",
    matchable=False,
    rejects=backward_rejects,
    examples=backward_examples,
)
def qmatmul_backward(
    upstream: Floats[Array, "*batch m n"],
    w_q_bytes: Words[Array, " words"],
    *,
    quant_type: QuantType,
    k: int,
    n: int,
) -> Floats[Array, "*batch m k"]:
    """Gradient of :func:`qmatmul`:  upstream @ W.

    W is decoded some rows at a time: of a large one no dense copy is held.

    Args:
        upstream: the cotangent of the result, ``[*batch, m, n]``.
        w_q_bytes: the forward's weight.
        quant_type: the forward's.
        k: columns of the weight.
        n: rows of the weight.

    Returns:
        The cotangent of ``a``, ``[*batch, m, k]``, in the dtype of ``upstream``.
    """
    g = wide(upstream)
    rows = decoder(w_q_bytes, g.dtype, quant_type=quant_type, k=k, n=n)
    return times(g, rows, n).astype(upstream.dtype)


@fused_op(
    OpKind.QMatMul,
    id=FusedOps.QMATMUL,
    family="Quantized",
    precision=PRECISION,
    backward=qmatmul_backward,
    splits="*batch m",
    matchable=False,
    rejects=rejects,
    examples=examples,
)
def qmatmul(
    a: Floats[Array, "*batch m k"],
    w_q_bytes: Words[Array, " words"],
    *,
    quant_type: QuantType,
    k: int,
    n: int,
) -> Floats[Array, "*batch m n"]:
    """a @ Wᵀ with a weight W[n, k] in GGUF blocks, as llama.cpp stores them.

    The weights are those of ggml to the bit; the activations are not quantised.  (llama.cpp's own
    products round them to 8 bits first and differ by 1e-2.)  Products are summed in float32
    (float64 for float64 activations), rounded once.  The weight is frozen; ``a`` has a gradient.
    On NVIDIA GPUs many rows of halves meet weights rounded to their dtype.

    Args:
        a: activations ``[*batch, m, k]``.  Fuel takes F32 alone.
        w_q_bytes: the bytes of the rows of W one after the other, ``k / weights`` blocks each, as
            U32 words: little-endian, the last one padded with zeros.
        quant_type: the block format: ``Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_1`` with 32 weights a block,
            ``Q2K Q3K Q4K Q5K Q6K`` with 256; these also as ggml spells them, ``Q4_K``.  Fuel's
            ``Q4_K_M`` is Q4K.  (In llama.cpp that names a file, some of whose tensors are Q6_K.)
        k: columns of W, a multiple of the block's weights.
        n: rows of W.

    Returns:
        ``[*batch, m, n]`` in the dtype of ``a``.

    Raises:
        ArgumentError: ``k`` makes no whole blocks, or the stream holds another number of words.

    Source: https://github.com/ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c.
    """
    x = wide(a)
    rows = decoder(w_q_bytes, x.dtype, quant_type=quant_type, k=k, n=n)
    return times_transposed(x, rows, n).astype(a.dtype)


@qmatmul.kernel("lanes", platforms=("cpu",), refuses=lanes.refuses, declines=lanes.declines)
def qmatmul_lanes(a, w_q_bytes, *, quant_type, k, n):
    """Decoded word by word, and never written down.

    Parts of a weight are summed apart, or times 0: an infinite activation would give NaN.
    """
    params, x = {"quant_type": quant_type, "k": k, "n": n}, wide(a)
    y = lax.cond(
        jnp.all(jnp.isfinite(x)),
        lambda: lanes.times_transposed(x, w_q_bytes, **params),
        lambda: qmatmul_blocked(x, w_q_bytes, **params),
    )
    return y.astype(a.dtype)


def tiles_blocked(
    x: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int, most: int = BLOCK
) -> Tiles:
    """How many rows at a time."""
    return block_tiles(x, n, k, most, format=quant_type)


in_blocks: dict[str, Any] = {
    "platforms": ("cpu",),
    "refuses": refuses_nothing,
    "declines": declines,
    "tiles": tiles_blocked,
}


@qmatmul.kernel("blocked", **in_blocks)
def qmatmul_blocked(a, w_q_bytes, *, quant_type, k, n, tile=None):
    """The weight a block of rows at a time."""
    x = wide(a)
    rows = decoder(w_q_bytes, x.dtype, quant_type=quant_type, k=k, n=n)
    return times_transposed_blocked(x, rows, n, tile).astype(a.dtype)


@qmatmul_backward.kernel("blocked", **in_blocks)
def qmatmul_backward_blocked(upstream, w_q_bytes, *, quant_type, k, n, tile=None):
    """The weight a block of rows at a time."""
    rows = decoder(w_q_bytes, wide_dtype(upstream), quant_type=quant_type, k=k, n=n)
    return times_blocked(upstream, rows, n, k, tile)


# -- on NVIDIA GPUs ------------------------------------------------------------------------


def refuses_triton(a: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int) -> str | None:
    """Streams whose bytes are not counted in 32 bits."""
    return kernels.refuses(a, n, k, w_q_bytes) or kernels.refuses_bytes(w_q_bytes)


def declines_triton(a: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int) -> str | None:
    """Where XLA is as fast."""
    return kernels.declines(a, n, quant_type=quant_type)


def tiles_triton(a: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int) -> Tiles:
    """How it may be cut."""
    packing, runs = quantised_gguf.GGUF[quant_type](k), quantised_gguf_runs.RUNS[quant_type](k)
    return kernels.tiles(a, n, packing, runs, format=quant_type)


def tiles_triton_backward(
    upstream: Any, w_q_bytes: Any, *, quant_type: Any, k: int, n: int
) -> Tiles:
    """How its gradient may be cut."""
    packing = quantised_gguf.GGUF[quant_type](k)
    return kernels.gradient_tiles(upstream, packing, format=quant_type)


@qmatmul.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=declines_triton,
    tiles=tiles_triton,
)
def qmatmul_by_triton(a, w_q_bytes, *, quant_type, k, n, tile=None, interpret=False):
    """Decoded in registers."""
    packing, runs = quantised_gguf.GGUF[quant_type](k), quantised_gguf_runs.RUNS[quant_type](k)
    options = {"name": f"qmatmul_{quant_type.lower()}", "interpret": interpret, "tile": tile}
    return kernels.product(a, (w_q_bytes,), n, packing, runs, **options)


@qmatmul_backward.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=kernels.declines_gradient,
    tiles=tiles_triton_backward,
)
def qmatmul_backward_by_triton(
    upstream, w_q_bytes, *, quant_type, k, n, tile=None, interpret=False
):
    """Decoded in registers."""
    packing = quantised_gguf.GGUF[quant_type](k)
    name = f"qmatmul_{quant_type.lower()}_backward"
    options = {"name": name, "interpret": interpret, "tile": tile}
    return kernels.gradient(upstream, (w_q_bytes,), packing, **options)


rounded: dict[str, Any] = {
    "platforms": ("cuda",),
    "refuses": refuses_rounded,
    "declines": functools.partial(declines_rounded, least=5),  # 16 take half of what XLA does else
}
tiles_parts = functools.partial(tiles_blocked, most=PART)


@qmatmul.kernel("rounded", **rounded)
def qmatmul_rounded(a, w_q_bytes, *, quant_type, k, n, interpret=False):
    """The weight rounded to the dtype of the activations, for the tensor cores."""
    rows = decoder(w_q_bytes, jnp.float32, quant_type=quant_type, k=k, n=n)
    return times_transposed_rounded(a, rows, n)


@qmatmul_backward.kernel("rounded", **rounded, tiles=tiles_parts)
def qmatmul_backward_rounded(upstream, w_q_bytes, *, quant_type, k, n, tile=None, interpret=False):
    """The weight rounded to the dtype of the cotangent, for the tensor cores; a part at a time."""
    rows = decoder(w_q_bytes, jnp.float32, quant_type=quant_type, k=k, n=n)
    return times_blocked(upstream, rows, n, k, tile, rounded=True)


qmatmul_backward.kernel(
    "parts",
    refuses=refuses_nothing,
    declines=functools.partial(declines, most=PART),
    tiles=tiles_parts,
)(qmatmul_backward_blocked)
