"""Convolution as a sum over the elements of the kernel, its taps: where XLA on the CPU is slow.

XLA has a good program for dense convolutions.  Grouped ones it loops over (92 ms where shifted
copies take 3.6: 64 channels in 16 groups, 8 × 56 × 56), and depthwise ones, all but free of
arithmetic, it never vectorises; for the gradient of a grouped kernel it falls back to loops too.
Tap by tap that gradient is a sum of matrix products, and a convolution with few channels in a group
a sum of shifted copies.  A kernel of one element is one product, without XLA's unfolding of the
input.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..numerics import product_precision
from ..types import Array, Pair

MOST_TAPS = 64  # the sum is unrolled; beyond, compiling takes seconds


def crops(
    x: Array, kernel: Any, out: Any, stride: Pair, padding: Pair, dilation: Pair
) -> Iterator[Array]:
    """For every tap, the elements of ``x`` that it meets: ``[n, c, *out]``."""
    margins = [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in padding)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), margins)
    for tap in itertools.product(*map(range, kernel)):
        first = [t * d for t, d in zip(tap, dilation, strict=True)]
        end = [f + (n - 1) * s + 1 for f, n, s in zip(first, out, stride, strict=True)]
        yield lax.slice(padded, (0, 0, *first), (*x.shape[:2], *end), (1, 1, *stride))


def shifted(
    x: Array, w: Array, out: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Array:
    """The sum of shifted copies of the channels of each group, in one loop."""
    (n, _), (c_out, per_group, *kernel) = x.shape[:2], w.shape
    taps = w.reshape(groups, c_out // groups, per_group, math.prod(kernel))
    y = jnp.zeros((n, groups, c_out // groups, *out), x.dtype)
    for t, crop in enumerate(crops(x, kernel, out, stride, padding, dilation)):
        channels = crop.reshape(n, groups, per_group, *out)
        for c in range(per_group):
            y = y + taps[:, :, c, t, None, None] * channels[:, :, None, c]
    return y.reshape(n, c_out, *out)


def pointwise(x: Array, w: Array, stride: Pair) -> Array:
    """A kernel of one element: each image a product, ``w`` repeated so that no axis need move."""
    x = x[:, :, :: stride[0], :: stride[1]]
    n, c, *out = x.shape
    kernel = jnp.broadcast_to(w[:, :, 0, 0], (n, *w.shape[:2]))
    y = jnp.matmul(kernel, x.reshape(n, c, math.prod(out)), precision=product_precision())
    return y.reshape(n, w.shape[0], *out)


def weight_gradient(
    x: Array, g: Array, kernel: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Array:
    """Cotangent of the kernel: ``[c_out, c_in / groups, kh, kw]``."""
    (n, c_in), (_, c_out, *out) = x.shape[:2], g.shape
    grouped = lambda v: v.reshape(n, groups, v.shape[1] // groups, -1)
    taps = [
        jnp.einsum("ngos,ngcs->goc", grouped(g), grouped(crop), precision=product_precision())
        for crop in crops(x, kernel, out, stride, padding, dilation)
    ]
    return jnp.stack(taps, -1).reshape(c_out, c_in // groups, *kernel)
