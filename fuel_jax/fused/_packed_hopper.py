"""Packed products for Hopper GPUs with the ops' signatures."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels import _fragments, quantised_matmul as kernels

from ..types import Array

# Rows of activations.  Any number up to 16 takes 15 µs of AWQ and 23 of NF4 on an H200 (K4096,
# N14336); one by one, two take 20 and 23, four 31 and 33.
LEAST_AWQ, LEAST_NF4 = 2, 3


def words_of(w_packed: Any) -> tuple[int, int]:
    """Rows and columns of a weight of NF4."""
    n, half_k = w_packed.shape
    return n, 2 * half_k


def refuses_nf4(activations, w_packed, absmax, *, block_size, low_nibble_first) -> str | None:
    """What the kernel cannot do."""
    shape = words_of(w_packed)
    return kernels.refuses_hopper(activations, *shape, block_size, w_packed, absmax)


def declines_nf4(activations, w_packed, absmax, *, block_size, low_nibble_first) -> str | None:
    """Where Triton's kernels are as fast."""
    return kernels.declines_hopper(activations, *words_of(w_packed), LEAST_NF4)


def nf4(levels: np.ndarray, in_words: Callable[[Array], Array]) -> Callable[..., Array]:
    """``nf4_matmul`` with such levels."""

    def forward(activations, w_packed, absmax, *, block_size, low_nibble_first):
        packed = _fragments.nf4(block_size, low_nibble_first, levels, activations.dtype)
        weight = in_words(w_packed), absmax
        return kernels.by_hopper(activations, weight, len(w_packed), packed, name="nf4_matmul")

    return forward


def refuses_awq(activations, weight, zeros, scales, *, group_size, split_k_iters) -> str | None:
    """What the kernel cannot do."""
    n, words = weight.shape
    return kernels.refuses_hopper(activations, n, 8 * words, group_size, weight, zeros, scales)


def declines_awq(activations, weight, zeros, scales, *, group_size, split_k_iters) -> str | None:
    """Where Triton's kernels are as fast."""
    n, words = weight.shape
    return kernels.declines_hopper(activations, n, 8 * words, LEAST_AWQ)


def awq(activations, weight, zeros, scales, *, group_size, split_k_iters):
    """``awq_matmul``."""
    packed = _fragments.awq(group_size, activations.dtype)
    packed_weight = weight, zeros, scales
    return kernels.by_hopper(activations, packed_weight, len(weight), packed, name="awq_matmul")
