"""Convolution as a sum over the elements of the kernel, its taps: where XLA on the CPU is slow.

XLA has a good program for dense convolutions.  For the gradient of a grouped kernel it falls back
to loops (1.4 s where one product per tap takes 0.06: 64 channels in 4 groups, 8 × 56 × 56), and a
depthwise one, all but free of arithmetic, is never vectorised.  Tap by tap the first is a sum of
matrix products, the second a sum of shifted copies.
"""

import itertools
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


def depthwise(
    x: Array, w: Array, out: Any, *, stride: Pair, padding: Pair, dilation: Pair
) -> Array:
    """One input channel to a group: ``[n, c, h, w]`` and ``[c · m, 1, kh, kw]``."""
    (n, c), (c_out, _, *kernel) = x.shape[:2], w.shape
    taps = w.reshape(c, c_out // c, -1)
    y = jnp.zeros((n, c, c_out // c, *out), x.dtype)
    for t, crop in enumerate(crops(x, kernel, out, stride, padding, dilation)):
        y = y + taps[:, :, t, None, None] * crop[:, :, None]
    return y.reshape(n, c_out, *out)


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
