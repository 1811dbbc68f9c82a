"""The block formats of GGUF files: from a block's bytes to its weights, as ggml computes them.

A weight is  code · d + m  with one ``d`` and one ``m`` for each group of a block.  Each format is
two functions of ``[..., bytes]`` uint8: its codes ``[..., weights]``, and its ``(d, m)``, float32
``[..., groups]``.  Layouts as in ggml's ``ggml-common.h``; a half is little-endian float16.

The results are ggml's to the bit, on every device: half times scale times code fits in 23 bits, so
every product is exact in float32 and only adding the minimum rounds, contracted or not.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..types import Array

Scales = tuple[Array, Array | None]  # d, and m where the format has one


def halves(b: Array) -> Array:
    """Little-endian float16, widened: ``[..., 2n]`` bytes to ``[..., n]``."""
    pairs = b.reshape(*b.shape[:-1], b.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def signed(b: Array) -> Array:
    """Bytes as int8."""
    return lax.bitcast_convert_type(b, jnp.int8)


def fields(b: Array, bits: int, run: int) -> Array:
    """The lowest field of each byte in a run, then the next; then the next run.

    ``[..., n]`` bytes to ``[..., 8n / bits]`` codes.
    """
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]
    runs = b.reshape(*b.shape[:-1], b.shape[-1] // run, 1, run)
    codes = (runs >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*b.shape[:-1], b.shape[-1] * (8 // bits))


# -- 32 weights, one group: low nibbles of 16 bytes, then the high ones ----------------------


def first_half(b: Array) -> Scales:
    """d in front."""
    return halves(b[..., :2]), None


def two_halves(b: Array) -> Scales:
    """d and m in front."""
    return halves(b[..., :2]), halves(b[..., 2:4])


def q4_0(b: Array) -> Array:
    """d[2] q[16]:  q − 8."""
    return signed(fields(b[..., 2:], 4, run=16)) - 8


def q4_1(b: Array) -> Array:
    """d[2] m[2] q[16]:  q."""
    return fields(b[..., 4:], 4, run=16)


def q5_0(b: Array) -> Array:
    """d[2] fifth bits[4] q[16]:  q − 16."""
    q = fields(b[..., 6:], 4, run=16) | fields(b[..., 2:6], 1, run=1) << 4
    return signed(q) - 16


def q5_1(b: Array) -> Array:
    """d[2] m[2] fifth bits[4] q[16]:  q."""
    return fields(b[..., 8:], 4, run=16) | fields(b[..., 4:8], 1, run=1) << 4


def q8_0(b: Array) -> Array:
    """d[2] q[32]:  q."""
    return signed(b[..., 2:])


def q8_1(b: Array) -> Array:
    """d[2] sum[2] q[32]:  q.  (The sum serves ggml's integer products.)"""
    return signed(b[..., 4:])


# -- 256 weights, in groups of 16 or 32 that have scales of their own ------------------------


def q2k(b: Array) -> Array:
    """Scales and minima[16] q[64] d[2] dmin[2]:  q."""
    return fields(b[..., 16:80], 2, run=32)


def q2k_scales(b: Array) -> Scales:
    """16 groups:  d·scale, −dmin·minimum; a nibble each."""
    scale, minimum = (b[..., :16] & 15).astype(jnp.float32), (b[..., :16] >> 4).astype(jnp.float32)
    return halves(b[..., 80:82]) * scale, -(halves(b[..., 82:84]) * minimum)


def q3k(b: Array) -> Array:
    """Third bits[32] q[64] scales[12] d[2]:  q − 4."""
    q = fields(b[..., 32:96], 2, run=32) | fields(b[..., :32], 1, run=32) << 2
    return signed(q) - 4


def q3k_scales(b: Array) -> Scales:
    """16 groups:  d·(scale − 32), scales of 6 bits."""
    scale = fields(b[..., 96:104], 4, run=8) | fields(b[..., 104:108], 2, run=4) << 4
    return halves(b[..., 108:110]) * (signed(scale) - 32).astype(jnp.float32), None


def q4k(b: Array) -> Array:
    """d[2] dmin[2] scales and minima[12] q[128]:  q.

    Joined and not shifted by an array, as in ``fields``: beside these scales XLA:CPU takes a fifth
    of the time.
    """
    runs = b[..., 16:].reshape(*b.shape[:-1], 4, 1, 32)
    return jnp.concatenate([runs & 15, runs >> 4], -2).reshape(*b.shape[:-1], 256)


def q5k(b: Array) -> Array:
    """d[2] dmin[2] scales and minima[12] fifth bits[32] q[128]:  q."""
    return fields(b[..., 48:], 4, run=32) | fields(b[..., 16:48], 1, run=32) << 4


def q45k_scales(b: Array) -> Scales:
    """8 groups:  d·scale, −dmin·minimum, of 6 bits; four of each whole, four in pieces."""
    x, y, z = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = jnp.concatenate([x & 63, z & 15 | x >> 6 << 4], -1).astype(jnp.float32)
    minimum = jnp.concatenate([y & 63, z >> 4 | y >> 6 << 4], -1).astype(jnp.float32)
    return halves(b[..., :2]) * scale, -(halves(b[..., 2:4]) * minimum)


def q6k(b: Array) -> Array:
    """q[128] fifth and sixth bits[64] scales[16] d[2]:  q − 32."""
    q = fields(b[..., :128], 4, run=64) | fields(b[..., 128:192], 2, run=32) << 4
    return signed(q) - 32


def q6k_scales(b: Array) -> Scales:
    """16 groups:  d·scale, scales int8."""
    return halves(b[..., 208:]) * signed(b[..., 192:208]).astype(jnp.float32), None


class Format(NamedTuple):
    """A block's number of weights and of bytes; its codes; the scale and minimum of its groups."""

    weights: int
    bytes: int
    codes: Callable[[Array], Array]
    scales: Callable[[Array], Scales]


FORMATS = {
    "Q4_0": Format(32, 18, q4_0, first_half),
    "Q4_1": Format(32, 20, q4_1, two_halves),
    "Q5_0": Format(32, 22, q5_0, first_half),
    "Q5_1": Format(32, 24, q5_1, two_halves),
    "Q8_0": Format(32, 34, q8_0, first_half),
    "Q8_1": Format(32, 36, q8_1, first_half),
    "Q2K": Format(256, 84, q2k, q2k_scales),
    "Q3K": Format(256, 110, q3k, q3k_scales),
    "Q4K": Format(256, 144, q4k, q45k_scales),
    "Q5K": Format(256, 176, q5k, q45k_scales),
    "Q6K": Format(256, 210, q6k, q6k_scales),
}
FORMATS |= {f"Q{bits}_K": FORMATS[f"Q{bits}K"] for bits in (2, 3, 4, 5, 6)}  # ggml's spelling
FORMATS |= {"Q4_K_M": FORMATS["Q4K"]}  # Fuel's second name

QuantType = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2K", "Q3K", "Q4K", "Q5K", "Q6K",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M",
]  # fmt: skip
