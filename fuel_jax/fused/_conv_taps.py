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
import numpy as np
from jax import lax

from ..numerics import product_precision
from ..types import Array, Pair

MOST_TAPS = 64  # the sum is unrolled; beyond, compiling takes seconds


def with_margins(x: Array, padding: Pair) -> Array:
    """``x`` with its zeros at either end."""
    margins = [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in padding)]
    return lax.pad(x, jnp.zeros((), x.dtype), margins)


def crops(
    x: Array, kernel: Any, out: Any, stride: Pair, padding: Pair, dilation: Pair
) -> Iterator[Array]:
    """For every tap, the elements of ``x`` that it meets: ``[n, c, *out]``."""
    padded = with_margins(x, padding)
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


def input_gradient(
    g: Array, w: Array, extents: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Array:
    """Cotangent of an input of those extents: ``g``, its elements a stride apart, under the kernel
    turned round.

    (XLA compiles the derivative of ``shifted``, which is the same sum, in four times as long.)
    """
    c_out, per_group, *kernel = w.shape
    turned = jnp.flip(w.reshape(groups, c_out // groups, per_group, *kernel), (3, 4))
    turned = turned.swapaxes(1, 2).reshape(groups * per_group, c_out // groups, *kernel)
    margins = [(0, 0, 0), (0, 0, 0)]
    rows = zip(extents, g.shape[2:], kernel, stride, padding, dilation, strict=True)
    for n, out, k, s, p, d in rows:
        before, wanted = d * (k - 1) - p, n + d * (k - 1)
        margins.append((before, wanted - before - (out - 1) * s - 1, s - 1))
    spread = lax.pad(g, jnp.zeros((), g.dtype), margins)
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": dilation}
    return shifted(spread, turned, extents, **window, groups=groups)


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
    """Cotangent of the kernel: ``[c_out, c_in / groups, kh, kw]``.

    Tap by tap in a loop: of 7 × 7 taps it compiles in 0.6 s, 49 products one by one in 2.3.
    """
    (n, c_in), (_, c_out, *out) = x.shape[:2], g.shape
    grouped = lambda v: v.reshape(n, groups, v.shape[1] // groups, -1)
    padded = with_margins(x, padding)
    reach = [(m - 1) * s + 1 for m, s in zip(out, stride, strict=True)]

    def of_tap(first: Array) -> Array:
        crop = lax.dynamic_slice(padded, list(first), (n, c_in, *reach))
        crop = crop[:, :, :: stride[0], :: stride[1]]
        return jnp.einsum(
            "ngos,ngcs->goc", grouped(g), grouped(crop), precision=product_precision()
        )

    firsts = np.array([*np.ndindex(1, 1, *kernel)], np.int32)
    firsts *= np.array([0, 0, *dilation], np.int32)
    taps = jnp.moveaxis(lax.map(of_tap, jnp.asarray(firsts)), 0, -1)
    return taps.reshape(c_out, c_in // groups, *kernel)
