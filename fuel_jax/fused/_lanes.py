"""Products of one activation row with a packed weight: as it is decoded, and never written down.

A row of the weight is a run of words, each a few codes.  Shifted by as much, all words give one
code each, and these meet a row of activations in that order: a loop over words that XLA vectorises.
What remains is one partial sum a word.  A float32 weight would be written and read again, eight
bytes for half a byte: with one row of activations, that is what the product costs.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..types import Array

WORDS = 2**17  # of the weight at a time, 512 KiB: they and their sums stay in a core's cache


def materialised(x: Array) -> Array:
    """``x``, no element of it changed, computed before anything is done with it.

    XLA:CPU hands a sum, and the float32 operations before it, to a library that knows no shifts:
    the codes would be written down for it, as float32.  This operation the library does not know.
    """
    return lax.reduce_precision(x, 8, 23)


def floats(codes: Array) -> Array:
    """Codes as float32.  (From int32: AVX has no conversion from uint32.)"""
    return codes.astype(jnp.int32).astype(jnp.float32)


def field(words: Array, shift: int, bits: int = 4) -> Array:
    """``bits`` bits of each word."""
    return (words >> jnp.uint32(shift)) & jnp.uint32(2**bits - 1)


def signed_field(words: Array, shift: int, bits: int) -> Array:
    """As float32, read as two's complement."""
    bare = lax.bitcast_convert_type(words, jnp.int32) << jnp.int32(32 - bits - shift)
    return (bare >> jnp.int32(32 - bits)).astype(jnp.float32)


def half(bits: Array) -> Array:
    """float16 in the low half of each word."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def several(x: Any, few: int) -> str | None:
    """More than ``few`` rows of activations: the weight is decoded for each."""
    rows = x.size // max(x.shape[-1], 1)
    if rows == 0:
        return "there is nothing to sum"
    return f"{rows} rows of activations; it decodes for each" if rows > few else None


def products(x: Array, weight: tuple[Array, ...], words: int, one: Callable[..., Array]) -> Array:
    """``[*batch, m, n]`` from ``one(row of x, rows of each array of the weight) -> their sums``.

    ``words``: 32 bits each, in a row of the weight.
    """
    n = weight[0].shape[0]
    size = min(n, max(8, WORDS // max(words, 1) // 8 * 8))

    def row(v):  # parts are cut inside the loop: cut before it, the weight would be copied
        part = lambda start, count: [lax.dynamic_slice_in_dim(w, start, count) for w in weight]
        starts = jnp.arange(n // size) * size
        y = lax.map(lambda start: one(v, *part(start, size)), starts).reshape(-1)
        return jnp.concatenate([y, one(v, *part(n - n % size, n % size))]) if n % size else y

    rows = x.reshape(-1, x.shape[-1])
    y = row(rows[0]) if len(rows) == 1 else lax.map(row, rows)
    return y.reshape(*x.shape[:-1], n)
