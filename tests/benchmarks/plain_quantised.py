"""How a JAX user without fuel_jax would write products with quantised weights."""

import jax.numpy as jnp
from jax import lax

from .row import Row


def nf4_matmul(x, packed, absmax, *, block_size):
    """Dequantise, then multiply."""
    from fuel_jax.fused.nf4_matmul import LEVELS

    codes = jnp.stack([packed >> 4, packed & 15], -1).reshape(packed.shape[0], -1)
    levels = jnp.asarray(LEVELS)[codes].reshape(*absmax.shape, block_size)
    return x @ (levels * absmax[..., None]).reshape(packed.shape[0], -1).T


def awq_matmul(x, weight, zeros, scales, *, group_size):
    """Dequantise, then multiply."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    unpack = lambda w: ((w[..., None] >> shifts) & 15).reshape(w.shape[0], -1).astype(jnp.float32)
    q, z = unpack(weight), unpack(zeros)
    groups = q.shape[1] // group_size
    spread = lambda s: jnp.repeat(s[:, :groups].astype(jnp.float32), group_size, 1)
    return x @ ((q - spread(z)) * spread(scales)).T


def q4_0_matmul(a, words, *, quant_type, k, n):
    """Dequantise Q4_0 blocks, then multiply."""
    raw = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: n * k // 32 * 18]
    blocks = raw.reshape(n, k // 32, 18)
    d = lax.bitcast_convert_type(blocks[..., :2], jnp.float16).astype(jnp.float32)
    qs = blocks[..., 2:]
    q = jnp.concatenate([qs & 15, qs >> 4], -1).astype(jnp.float32) - 8
    return a @ (q * d[..., None]).reshape(n, k).T


def q8_0_matmul(a, words, *, quant_type, k, n):
    """Dequantise Q8_0 blocks, then multiply."""
    raw = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: n * k // 32 * 34]
    blocks = raw.reshape(n, k // 32, 34)
    d = lax.bitcast_convert_type(blocks[..., :2], jnp.float16).astype(jnp.float32)
    q = lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32)
    return a @ (q * d[..., None]).reshape(n, k).T


def q4_k_matmul(a, words, *, quant_type, k, n):
    """Dequantise Q4_K super-blocks, then multiply."""
    raw = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: n * k // 256 * 144]
    blocks = raw.reshape(n, k // 256, 144)
    half = lambda b: lax.bitcast_convert_type(b, jnp.float16).astype(jnp.float32)[..., None]
    low, mid, high = jnp.split(blocks[..., 4:16], 3, -1)  # eight pairs of six bits
    scale = jnp.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    least = jnp.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], -1)
    runs = blocks[..., 16:].reshape(n, k // 256, 4, 1, 32)
    q = jnp.concatenate([runs & 15, runs >> 4], -2).reshape(n, k // 256, 8, 32)
    w = q * (half(blocks[..., :2]) * scale)[..., None]
    w = w - (half(blocks[..., 2:4]) * least)[..., None]
    return a @ w.reshape(n, k).T


def quantised(quant_type, m, k, n):
    """A call of qmatmul."""
    params = {"quant_type": quant_type, "k": k, "n": n}
    return [f"f32 {m} {k}", f"{quant_type} {k * n}"], params


def nf4(m, k, n):
    """A call of nf4_matmul."""
    arrays = [f"f32 {m} {k}", f"u8<256 {n} {k // 2}", f"f32+ {n} {k // 64}"]
    return arrays, {"block_size": 64}


def awq(m, k, n):
    """A call of awq_matmul."""
    groups = k // 128
    arrays = [f"f32 {m} {k}", f"u32 {n} {k // 8}", f"u32 {n} {-(-groups // 8)}"]
    return [*arrays, f"f16+ {n} {-(-groups // 8) * 8}"], {"group_size": 128}


DECODE = [(1, 4096, 14336), (1, 4096, 4096)]
MANY = [(128, 1024, 1024), (7, 512, 1000)]

QUANTISED: dict[str, Row] = {
    "qmatmul Q4_0 M1": Row(q4_0_matmul, [quantised("Q4_0", *shape) for shape in DECODE], torch=1.0),
    "qmatmul Q4_0": Row(q4_0_matmul, [quantised("Q4_0", *shape) for shape in MANY]),
    "qmatmul Q8_0 M1": Row(q8_0_matmul, [quantised("Q8_0", *shape) for shape in DECODE]),
    "qmatmul Q8_0": Row(q8_0_matmul, [quantised("Q8_0", *shape) for shape in MANY]),
    "qmatmul Q4K M1": Row(q4_k_matmul, [quantised("Q4K", *shape) for shape in DECODE], torch=1.0),
    "qmatmul Q4K": Row(q4_k_matmul, [quantised("Q4K", *shape) for shape in MANY]),
    "nf4_matmul M1": Row(nf4_matmul, [nf4(*shape) for shape in DECODE], at=(0,), torch=1.0),
    "nf4_matmul": Row(nf4_matmul, [nf4(*shape) for shape in MANY], at=(0,)),
    "awq_matmul M1": Row(awq_matmul, [awq(*shape) for shape in DECODE], at=(0,), torch=1.0),
    "awq_matmul": Row(awq_matmul, [awq(*shape) for shape in MANY], at=(0,)),
}
