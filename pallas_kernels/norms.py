"""RMS norm, layer norm and their backwards; ``_rows.py`` has grid, reads and writes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._rows import (
    DIVIDED,
    Block,
    Blocks,
    Found,
    RowMaths,
    added,
    are_few,
    by_rows,
    declines_gradient as declines_gradient,
    is_short,
    is_unaligned,
    refuses as refuses,
    tiles as tiles,
    total,
)


class Mean(NamedTuple):
    """The mean of a row, and what was lost when it was rounded: at 10⁴ that is up to 5·10⁻⁴."""

    rounded: jax.Array
    left: jax.Array


def about_mean(x: Block, count: int, inside: Any) -> tuple[Mean, Block]:
    """The mean of each row, and the distance of its elements from it; 0 after its end."""
    kept = lambda d: d if inside is None else jnp.where(inside, d, 0)
    rounded = total(x) / count
    centred = kept(x - rounded)
    left = total(centred) / count
    return Mean(rounded, left), kept(centred - left)


def of_both(a: Mean, seen: Any, b: Mean, count: int) -> tuple[Mean, jax.Array, jax.Array]:
    """The mean of two blocks, how far apart theirs are, and the weight of that distance squared."""
    share = count / jnp.asarray(seen + count, jnp.float32)
    apart = (b.rounded - a.rounded) + (b.left - a.left)
    step = apart * share
    mean = a.rounded + step
    moved = mean - a.rounded
    lost = (a.rounded - (mean - moved)) + (step - moved)  # of the sum (Knuth 1969, 4.2.2)
    return Mean(mean, a.left + lost), apart, jnp.asarray(seen, jnp.float32) * share


def moments(x: Block, *, count: int, inside: Any) -> Found:
    """Mean, and Σ (x − mean)²."""
    mean, d = about_mean(x, count, inside)
    return *mean, total(d * d)


def moments_together(a: Found, seen: Any, b: Found, count: int) -> Found:
    """The same of two blocks.  (Chan, Golub & LeVeque 1983, eq. 2.1.)"""
    mean, apart, weight = of_both(Mean(*a[:2]), seen, Mean(*b[:2]), count)
    return *mean, a[2] + b[2] + apart * apart * weight


def co_moments(x: Block, g: Block, *, count: int, inside: Any) -> Found:
    """Mean of x, mean of g, Σ (x − mean)², and Σ (x − mean)·(g − mean)."""
    mean, d = about_mean(x, count, inside)
    mean_g = total(g) / count
    return *mean, mean_g, total(d * d), total(d * (g - mean_g))


def co_moments_together(a: Found, seen: Any, b: Found, count: int) -> Found:
    """The same of two blocks."""
    mean, apart, weight = of_both(Mean(*a[:2]), seen, Mean(*b[:2]), count)
    apart_g = b[2] - a[2]
    mean_g = a[2] + apart_g * (count / jnp.asarray(seen + count, jnp.float32))
    squares = a[3] + b[3] + apart * apart * weight
    return *mean, mean_g, squares, a[4] + b[4] + apart * apart_g * weight


def rms_result(found: Found, x: Block, *, n: int, eps: float) -> Block:
    """x / √(mean(x²) + eps)."""
    return x * lax.rsqrt(found[0] / n + eps)


def rms_gradient(found: Found, x: Block, g: Block, *, n: int, eps: float) -> Block:
    """r · (g − x · r² · mean(x·g))."""
    r = lax.rsqrt(found[0] / n + eps)
    return r * (g - x * (r * r * (found[1] / n)))


def layer_result(found: Found, x: Block, *, n: int, eps: float) -> Block:
    """(x − mean) / √(variance + eps)."""
    mean, left, squares = found
    return ((x - mean) - left) * lax.rsqrt(squares / n + eps)


def layer_gradient(found: Found, x: Block, g: Block, *, n: int, eps: float) -> Block:
    """r · (g − mean(g) − (x − mean) · r² · mean((x − mean)·g))."""
    mean, left, mean_g, squares, products = found
    r = lax.rsqrt(squares / n + eps)
    return r * ((g - mean_g) - ((x - mean) - left) * (r * r * (products / n)))


RMS = RowMaths("rms_norm", 0.0, lambda x, **_: (total(x * x),), added, rms_result)
RMS_BACKWARD = RowMaths(
    "rms_norm_backward", 0.0, lambda x, g, **_: (total(x * x), total(x * g)), added, rms_gradient
)
LAYER = RowMaths("layer_norm", 0.0, moments, moments_together, layer_result)
LAYER_BACKWARD = RowMaths(
    "layer_norm_backward", 0.0, co_moments, co_moments_together, layer_gradient
)


def rms_norm(
    x: jax.Array, *, eps: float, interpret: bool = False, tile: Blocks | None = None
) -> jax.Array:
    """RMS norm of ``x[..., n]``."""
    return by_rows(RMS, x, eps=eps, interpret=interpret, tile=tile)


def rms_norm_backward(
    x, upstream, *, eps: float, interpret: bool = False, tile: Blocks | None = None
) -> jax.Array:
    """Its gradient."""
    return by_rows(RMS_BACKWARD, x, upstream, eps=eps, interpret=interpret, tile=tile)


def layer_norm(
    x: jax.Array, *, eps: float, interpret: bool = False, tile: Blocks | None = None
) -> jax.Array:
    """Layer norm of ``x[..., n]``."""
    return by_rows(LAYER, x, eps=eps, interpret=interpret, tile=tile)


def layer_norm_backward(
    x, upstream, *, eps: float, interpret: bool = False, tile: Blocks | None = None
) -> jax.Array:
    """Its gradient."""
    return by_rows(LAYER_BACKWARD, x, upstream, eps=eps, interpret=interpret, tile=tile)


def declines(x: Any, *, eps: float) -> str:
    """Everywhere.  Measured on an H200 at [16384, 8192] bfloat16: 131 µs here and 137 in XLA alone,
    but 295 and 143 with a gain; of 42 other shapes with a gain none was faster."""
    return "XLA fuses a norm with the gain that follows; in two kernels they take twice as long"


def declines_layer(x: Any, *, eps: float) -> str | None:
    """But for a single row, of which XLA takes three kernels for the sums: 2.7 µs to 3.7 with gain
    and bias, where this and one more take 1.9 to 2.9."""
    return None if x.size == x.shape[-1] <= DIVIDED else declines(x, eps=eps)


def declines_layer_gradient(x: Any, g: Any, *, eps: float) -> str | None:
    """Where XLA is as fast: it takes one kernel up to 16384 columns, eight beyond.

    Of a single row it takes three at any width, 5 µs where this takes 1.
    """
    short = is_short(x) if x.size > x.shape[-1] else None
    return short or is_unaligned(x, 2) or are_few(x, 2)
