"""The peers in JAX: what a user without these ops would write or call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..types import Array


def rms_norm(x: Array, *, eps: float = 1e-6) -> Array:
    """In float32, rounded once."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * lax.rsqrt(mean + eps)).astype(x.dtype)


def layer_norm(x: Array, *, eps: float = 1e-6) -> Array:
    """In float32, rounded once."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return (centred * lax.rsqrt(variance + eps)).astype(x.dtype)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean negative log-likelihood, in float32."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -jnp.mean(jnp.take_along_axis(logp, targets.astype(jnp.int32)[:, None], -1))


def cross_entropy_exact(
    direction: str, cut: Any, operands: Sequence[Array], cotangents: Any
) -> Any:
    """The loss over all rows, block by block, and the gradient of the rows of ``cut``."""
    logits, targets = operands
    targets = targets.astype(jnp.int32)
    r = logits.shape[0]
    block = 16

    def of_block(at):
        x = lax.dynamic_slice_in_dim(logits, at, block).astype(jnp.float64)
        t = lax.dynamic_slice_in_dim(targets, at, block)
        return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, t[:, None], -1)[:, 0]

    loss = jnp.mean(lax.map(of_block, jnp.arange(0, r, block, dtype=jnp.int32)))
    if direction == "forward":
        return loss
    x = logits[cut].astype(jnp.float64)
    hit = jax.nn.one_hot(targets[cut], x.shape[-1], dtype=jnp.float64)
    return loss, ((jax.nn.softmax(x, -1) - hit) * cotangents.astype(jnp.float64) / r,)


def heads_after(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """``[b, s, h, d]``, the layout of ``jax.nn.dot_product_attention``."""
    return tuple(x.swapaxes(1, 2) for x in (q, k, v))


def heads_before(outputs: Any) -> Any:
    """And back."""
    return jax.tree.map(lambda x: x.swapaxes(1, 2), outputs)


def cudnn_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, window_size_left: int | None = None
) -> Array:
    """cuDNN's, where there is one; XLA's elsewhere."""
    window = None if window_size_left is None else (window_size_left, 0)
    here = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, implementation=here
    )


def paged(q: Array, k_cache: Array, v_cache: Array, table: Array, lengths: Array) -> Array:
    """Gather the pages, then attend in float32."""
    b, h, _, d = q.shape
    k, v = (c[table].reshape(b, -1, *c.shape[2:]) for c in (k_cache, v_cache))
    hk = k.shape[2]
    grouped = q.reshape(b, hk, h // hk, d)
    wide = jnp.float32
    s = jnp.einsum("bhgd,bkhd->bhgk", grouped, k, preferred_element_type=wide) * d**-0.5
    seen = jnp.arange(k.shape[1], dtype=lengths.dtype) < lengths[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf), -1).astype(q.dtype)
    return jnp.einsum("bhgk,bkhd->bhgd", p, v).reshape(q.shape)


def nf4(x: Array, packed: Array, absmax: Array, *, block_size: int = 64) -> Array:
    """Dequantise in the dtype of x, then multiply."""
    from ..fused.nf4_matmul import LEVELS

    codes = jnp.stack([packed >> 4, packed & 15], -1).reshape(packed.shape[0], -1)
    levels = jnp.asarray(LEVELS, jnp.float32)[codes.astype(jnp.int32)]
    blocks = levels.reshape(*absmax.shape, block_size) * absmax[..., None]
    return x @ blocks.reshape(codes.shape).astype(x.dtype).T


def awq(x: Array, weight: Array, zeros: Array, scales: Array, *, group_size: int = 128) -> Array:
    """Dequantise in the dtype of x, then multiply."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    unpack = lambda w: (w[..., None] >> shifts & 15).reshape(w.shape[0], -1).astype(jnp.float32)
    q, z = unpack(weight), unpack(zeros)
    groups = q.shape[1] // group_size
    spread = lambda s: jnp.repeat(s[:, :groups].astype(jnp.float32), group_size, 1)
    return x @ ((q - spread(z)) * spread(scales)).astype(x.dtype).T


def selective_scan(u: Array, delta: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The recurrence, step by step."""
    wide = lambda *arrays: tuple(x.astype(jnp.float32) for x in arrays)
    (decay,) = wide(a)

    def step(h, at_t):
        u, dt, b, c = wide(*at_t)
        h = jnp.exp(dt[..., None] * decay) * h + (dt * u)[..., None] * b[:, None]
        return h, jnp.sum(h * c[:, None], -1)

    along = [x.swapaxes(0, 1) for x in (u, delta, b, c)]
    h, y = lax.scan(step, jnp.zeros((u.shape[0], *a.shape), jnp.float32), along)
    return y.swapaxes(0, 1).astype(u.dtype), h


def selective_associative(
    u: Array, delta: Array, a: Array, b: Array, c: Array
) -> tuple[Array, Array]:
    """All states at once, by a parallel prefix."""
    dtype = u.dtype
    u, delta, a, b, c = (x.astype(jnp.float32) for x in (u, delta, a, b, c))
    decay = jnp.exp(delta[..., None] * a)
    x = (delta * u)[..., None] * b[:, :, None]
    two = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    h: Any = lax.associative_scan(two, (decay, x), axis=1)[1]
    return jnp.sum(h * c[:, :, None], -1).astype(dtype), h[:, -1]


def causal_conv1d(x: Array, w: Array, bias: Array) -> Array:
    """Depthwise convolution, bias, SiLU."""
    y = lax.conv_general_dilated(x, w, (1,), [(0, 0)], feature_group_count=x.shape[1])
    return jax.nn.silu(y + bias[:, None])


def conv2d(x: Array, w: Array, bias: Array, *, padding: Sequence[int]) -> Array:
    """lax's convolution and a bias."""
    y = lax.conv_general_dilated(x, w, (1, 1), [(p, p) for p in padding])
    return y + bias[:, None, None]
