"""Product with an AWQ weight: 4-bit codes, a zero point and a scale for each group of a row."""

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
from ..op_kind import FusedOps
from ..registry import fused_op
from ..types import Array, Floats, Halves, Words
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
from ._lanes import field, materialised, products, several

PRECISION = Precision(float32=2e-6)


def examples() -> Iterator[dict[str, Any]]:
    """One group a row; a batch of small groups whose zeros are padded; one word."""
    rng = np.random.default_rng(25)
    for batch, m, k, n, group_size, zeros_w in (
        *(((), 3, 128, 5, 128, 1), ((2,), 2, 96, 3, 8, 4)),
        ((), 1, 8, 1, 8, 1),
    ):
        yield {
            "activations": jax.ShapeDtypeStruct((*batch, m, k), jnp.float32),
            "weight": rng.integers(0, 2**32, (n, k // 8), np.uint32),
            "zeros": rng.integers(0, 2**32, (n, zeros_w), np.uint32),
            "scales": rng.uniform(0.02, 0.06, (n, 8 * zeros_w)).astype(np.float16),
            "group_size": group_size,
            "split_k_iters": 8,
        }


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with the cotangent of its result."""
    for example in examples():
        shape = (*example.pop("activations").shape[:-1], example["weight"].shape[0])
        yield {"upstream": jax.ShapeDtypeStruct(shape, jnp.float32), **example}


def weight_rejects(
    weight: Any, zeros: Any, scales: Any, group_size: int, split_k_iters: int
) -> str | None:
    """Groups that do not fill a row or have no zero or scale."""
    k = 8 * weight.shape[1]
    if group_size < 1 or k % group_size:
        return (
            f"parameter 'group_size' is {group_size} and 'weight' has {k} weights a row; groups "
            f"must fill a row. Pass group_size={k} if a row is one group."
        )
    if split_k_iters < 1:
        return f"parameter 'split_k_iters' is {split_k_iters}; it must be at least 1."
    if 8 * zeros.shape[1] < k // group_size:
        return (
            f"'zeros' has {zeros.shape[1]} words a row, for {8 * zeros.shape[1]} groups; {k} "
            f"weights in groups of {group_size} make {k // group_size}."
        )
    if scales.shape[1] != 8 * zeros.shape[1]:
        return (
            f"'scales' has {scales.shape[1]} columns and 'zeros' has {zeros.shape[1]} words a row; "
            f"there must be 8 columns for each word. Pad the scales."
        )
    return None


def rejects(
    activations: Any, weight: Any, zeros: Any, scales: Any, *, group_size: int, split_k_iters: int
) -> str | None:
    """Rows of another length than the weight's."""
    if activations.shape[-1] != 8 * weight.shape[1]:
        return (
            f"'activations' has rows of {activations.shape[-1]} and 'weight' has "
            f"{8 * weight.shape[1]} weights a row, eight a word; they must be equal."
        )
    return weight_rejects(weight, zeros, scales, group_size, split_k_iters)


def backward_rejects(
    upstream: Any, weight: Any, zeros: Any, scales: Any, *, group_size: int, split_k_iters: int
) -> str | None:
    """Likewise; the cotangent's rows are an axis of the weight's already."""
    return weight_rejects(weight, zeros, scales, group_size, split_k_iters)


def nibbles(words: Array) -> Array:
    """Eight codes a word, the lowest nibble first: ``[n, w]`` to ``[n, 8w]``."""
    codes = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32)) & 15
    return codes.reshape(words.shape[0], 8 * words.shape[1])


def decoder(
    weight: Array, zeros: Array, scales: Array, dtype: jnp.dtype, *, group_size: int
) -> Rows:
    """Rows of the weight in ``dtype``."""
    k = 8 * weight.shape[1]
    groups = k // group_size
    zero = nibbles(zeros)[:, :groups].astype(dtype)  # what follows is padding
    scale = scales[:, :groups].astype(dtype)

    def rows(start, count):
        of = lambda x: lax.dynamic_slice_in_dim(x, start, count)
        q = nibbles(of(weight)).astype(dtype).reshape(count, groups, group_size)
        return ((q - of(zero)[..., None]) * of(scale)[..., None]).reshape(count, k)

    return rows


def declines(_: Any, weight: Any, *rest: Any, most: int = BLOCK, **params: Any) -> str | None:
    """Small weights."""
    return fits_one_block(weight.shape[0], 8 * weight.shape[1], most)


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dactivations",),
    splits="*batch m n",
    frozen=("scales",),
    matchable=False,
    rejects=backward_rejects,
    examples=backward_examples,
)
def awq_matmul_backward(
    upstream: Floats[Array, "*batch m n"],
    weight: Words[Array, "n words"],
    zeros: Words[Array, "n zeros_w"],
    scales: Halves[Array, "n scales_w"],
    *,
    group_size: int = 128,
    split_k_iters: int = 8,
) -> Floats[Array, "*batch m k"]:
    """Gradient of :func:`awq_matmul`:  upstream @ W.

    W is decoded some rows at a time: of a large one no dense copy is held.

    Args:
        upstream: the cotangent of the result, ``[*batch, m, n]``.
        weight: the forward's codes.
        zeros: the forward's zero points.
        scales: the forward's scales; frozen.
        group_size: the forward's.
        split_k_iters: the forward's.

    Returns:
        The cotangent of ``activations``, ``[*batch, m, k]``, in the dtype of ``upstream``.
    """
    g = wide(upstream)
    rows = decoder(weight, zeros, scales, g.dtype, group_size=group_size)
    return times(g, rows, weight.shape[0]).astype(upstream.dtype)


@fused_op(
    id=FusedOps.AWQ_MATMUL,
    family="Quantized",
    precision=PRECISION,
    backward=awq_matmul_backward,
    splits="*batch m n",
    seed_backward="Decompose",
    frozen=("scales",),
    matchable=False,
    rejects=rejects,
    examples=examples,
)
def awq_matmul(
    activations: Floats[Array, "*batch m k"],
    weight: Words[Array, "n words"],
    zeros: Words[Array, "n zeros_w"],
    scales: Halves[Array, "n scales_w"],
    *,
    group_size: int = 128,
    split_k_iters: int = 8,
) -> Floats[Array, "*batch m n"]:
    """activations @ Wᵀ,  W[n, k] = (code[n, k] − zero[n, g]) · scales[n, g],  g = k // group_size.

    AutoAWQ's GEMV layout.  Weights are exact for F16 scales; products are summed in float32
    (float64 for float64 activations) and rounded once.  On NVIDIA GPUs many rows of half
    activations meet a weight rounded to their dtype, for the tensor cores.  The weight is frozen;
    ``activations`` has a gradient.

    Args:
        activations: ``[*batch, m, k]``.
        weight: eight codes a word, ``[n, k / 8]``; nibble i of a word, counted from the lowest, is
            weight i.
        zeros: zero points, ``[n, zeros_w]``: of group g nibble g % 8 of word g // 8.  Words beyond
            the groups are padding.
        scales: ``[n, 8 · zeros_w]``, F16; columns beyond the groups are padding.
        group_size: weights that share a zero point and a scale; divides k.
        split_k_iters: partial sums of Fuel's kernel, at least 1.  Changes nothing here.

    Returns:
        ``[*batch, m, n]`` in the dtype of ``activations``.

    Raises:
        ArgumentError: groups do not fill a row, or the operands disagree on their number.
        NotDifferentiable: when ``scales`` is differentiated.

    Source: Lin et al. 2023, arXiv:2306.00978; AutoAWQ ``modules/linear/gemv.py``.
    """
    x = wide(activations)
    rows = decoder(weight, zeros, scales, x.dtype, group_size=group_size)
    return times_transposed(x, rows, weight.shape[0]).astype(activations.dtype)


def refuses_lanes(
    activations: Any, weight: Any, *rest: Any, group_size: int, split_k_iters: int
) -> str | None:
    """Sums in another width, groups that are no vectors."""
    if activations.dtype == jnp.float64:
        return "it sums in float32"
    if 0 in weight.shape:
        return "there is nothing to decode"
    return None if group_size % 128 == 0 else f"groups of {group_size} are no vectors of words"


def few(activations: Any, *rest: Any, **params: Any) -> str | None:
    """More than a few activations."""
    return several(activations, 4)


@awq_matmul.kernel("lanes", platforms=("cpu",), refuses=refuses_lanes, declines=few)
def awq_matmul_lanes(activations, weight, zeros, scales, *, group_size, split_k_iters):
    """Decoded word by word, and never written down."""
    words = weight.shape[1]
    groups = 8 * words // group_size
    zero = nibbles(zeros)[:, :groups].astype(jnp.int32)
    scale = scales[:, :groups].astype(jnp.float32)

    def one(v, weight, zero, scale):
        x = materialised(jnp.moveaxis(v.reshape(groups, -1, 8), 2, 0))
        w, z = weight.reshape(len(weight), groups, -1), zero[..., None]
        codes = ((field(w, 4 * i).astype(jnp.int32) - z).astype(jnp.float32) for i in range(8))
        lanes = sum(code * x[i] for i, code in enumerate(codes)) * scale[..., None]
        return materialised(lanes).sum((-1, -2))

    y = products(wide(activations), (weight, zero, scale), words, one)
    return y.astype(activations.dtype)


def tiles_blocked(x: Any, weight: Any, *rest: Any, most: int = BLOCK, **params: Any) -> Tiles:
    """How many rows at a time."""
    return block_tiles(x, weight.shape[0], 8 * weight.shape[1], most)


in_blocks: dict[str, Any] = {
    "platforms": ("cpu",),
    "refuses": refuses_nothing,
    "declines": declines,
    "tiles": tiles_blocked,
}


@awq_matmul.kernel("blocked", **in_blocks)
def awq_matmul_blocked(activations, weight, zeros, scales, *, group_size, split_k_iters, tile=None):
    """The weight a block of rows at a time."""
    x = wide(activations)
    rows = decoder(weight, zeros, scales, x.dtype, group_size=group_size)
    return times_transposed_blocked(x, rows, weight.shape[0], tile).astype(activations.dtype)


@awq_matmul_backward.kernel("blocked", **in_blocks)
def awq_matmul_backward_blocked(
    upstream, weight, zeros, scales, *, group_size, split_k_iters, tile=None
):
    """The weight a block of rows at a time."""
    rows = decoder(weight, zeros, scales, wide_dtype(upstream), group_size=group_size)
    n, words = weight.shape
    return times_blocked(upstream, rows, n, 8 * words, tile)


# -- on NVIDIA GPUs ------------------------------------------------------------------------


def refuses_triton(
    activations: Any, weight: Any, zeros: Any, scales: Any, *, group_size: int, split_k_iters: int
) -> Any:
    """Groups that are no tiles of words."""
    n, words = weight.shape
    cannot = kernels.refuses(activations, n, 8 * words, weight, zeros, scales)
    return cannot or kernels.refuses_bytes(weight) or kernels.refuses_groups(group_size)


def declines_triton(
    activations: Any, weight: Any, *rest: Any, group_size: int, split_k_iters: int
) -> str | None:
    """Where XLA is as fast."""
    return kernels.declines(activations, weight.shape[0], group=group_size)


def tiles_triton(
    activations: Any, weight: Any, *rest: Any, group_size: int, split_k_iters: int
) -> Tiles:
    """How it may be cut."""
    n, words = weight.shape
    packing, runs = quantised.awq(words, group_size), quantised_runs.awq(words, group_size)
    return kernels.tiles(activations, n, packing, runs)


def tiles_triton_backward(
    upstream: Any, weight: Any, *rest: Any, group_size: int, split_k_iters: int
) -> Tiles:
    """How its gradient may be cut."""
    return kernels.gradient_tiles(upstream, quantised.awq(weight.shape[1], group_size))


awq_matmul.kernel(
    "mosaic", platforms=("cuda",), refuses=hopper.refuses_awq, declines=hopper.declines_awq
)(hopper.awq)


@awq_matmul.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=declines_triton,
    tiles=tiles_triton,
)
def awq_matmul_by_triton(
    activations, weight, zeros, scales, *, group_size, split_k_iters, tile=None, interpret=False
):
    """Decoded in registers."""
    n, words = weight.shape
    packing, runs = quantised.awq(words, group_size), quantised_runs.awq(words, group_size)
    options = {"name": "awq_matmul", "interpret": interpret, "tile": tile}
    return kernels.product(activations, (weight, zeros, scales), n, packing, runs, **options)


@awq_matmul_backward.kernel(
    "triton",
    platforms=("cuda",),
    refuses=refuses_triton,
    declines=kernels.declines_gradient,
    tiles=tiles_triton_backward,
)
def awq_matmul_backward_by_triton(
    upstream, weight, zeros, scales, *, group_size, split_k_iters, tile=None, interpret=False
):
    """Decoded in registers."""
    packing = quantised.awq(weight.shape[1], group_size)
    options = {"name": "awq_matmul_backward", "interpret": interpret, "tile": tile}
    return kernels.gradient(upstream, (weight, zeros, scales), packing, **options)


rounded: dict[str, Any] = {
    "platforms": ("cuda",),
    "refuses": refuses_rounded,
    "declines": declines_rounded,
}


tiles_parts = functools.partial(tiles_blocked, most=PART)


@awq_matmul.kernel("rounded", **rounded)
def awq_matmul_rounded(
    activations, weight, zeros, scales, *, group_size, split_k_iters, interpret=False
):
    """The weight rounded to the dtype of the activations, for the tensor cores."""
    rows = decoder(weight, zeros, scales, jnp.float32, group_size=group_size)
    return times_transposed_rounded(activations, rows, weight.shape[0])


@awq_matmul_backward.kernel("rounded", **rounded, tiles=tiles_parts)
def awq_matmul_backward_rounded(
    upstream, weight, zeros, scales, *, group_size, split_k_iters, tile=None, interpret=False
):
    """The weight rounded to the dtype of the cotangent, for the tensor cores; a part at a time."""
    rows = decoder(weight, zeros, scales, jnp.float32, group_size=group_size)
    n, words = weight.shape
    return times_blocked(upstream, rows, n, 8 * words, tile, rounded=True)


awq_matmul_backward.kernel(
    "parts",
    refuses=refuses_nothing,
    declines=functools.partial(declines, most=PART),
    tiles=tiles_parts,
)(awq_matmul_backward_blocked)
