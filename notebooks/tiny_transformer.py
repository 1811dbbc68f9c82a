"""A decoder-only transformer, every layer made of fuel_jax ops.

    params = init(config, key)
    loss(config, params, tokens)                             differentiate it, jit it, train it
    decode(config, params, cache, token, position)           one token at a time, with a KV cache

Pre-norm, rotary positions, grouped-query attention (two query heads share one key head), SwiGLU.
Arrays are ``[batch, sequence, width]``, inside attention ``[batch, head, sequence, head width]``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fuel_jax import (
    flash_attn,
    fused_linear,
    fused_softmax_cross_entropy,
    index_select,
    rms_norm_last_dim,
    rope,
    silu,
    write_slice_doff,
)

Params = dict[str, Any]
Cache = list[tuple[Array, Array]]  # per layer: keys, values [batch, head, context, head width]


class Config(NamedTuple):
    """Sizes of the model."""

    vocabulary: int
    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    context: int = 128

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def init(config: Config, key: Array) -> Params:
    """Random weights; what layers add to the residual stream starts small, logits near zero."""
    keys = iter(jax.random.split(key, 2 + 7 * config.layers))

    def normal(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.float32)

    def linear(n_in: int, n_out: int, scale: float = 1.0) -> Params:
        w = normal(n_in, n_out) * (scale * n_in**-0.5)
        return {"w": w, "b": jnp.zeros(n_out, jnp.float32)}

    width, kv_width = config.width, config.kv_heads * config.head_width
    small = (2 * config.layers) ** -0.5
    return {
        "embedding": normal(config.vocabulary, width),
        "layers": [
            {
                "q": linear(width, width),
                "k": linear(width, kv_width),
                "v": linear(width, kv_width),
                "out": linear(width, width, small),
                "gate": linear(width, config.hidden),
                "up": linear(width, config.hidden),
                "down": linear(config.hidden, width, small),
            }
            for _ in range(config.layers)
        ],
        "head": linear(width, config.vocabulary, 0.1),
    }


def rotary_tables(config: Config) -> tuple[Array, Array]:
    """cos and sin of position · 10000^(−2i/d), ``[context, head width]``; both halves alike."""
    half = np.arange(0, config.head_width, 2) / config.head_width
    angles = np.outer(np.arange(config.context), 10000.0**-half)
    angles = np.concatenate([angles, angles], axis=-1)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def linear(p: Params, x: Array) -> Array:
    """``x @ w + b`` over the last axis."""
    rows = fused_linear(x.reshape(-1, x.shape[-1]), p["w"], p["b"])
    return rows.reshape(*x.shape[:-1], -1)


def split_heads(config: Config, x: Array) -> Array:
    """``[B, S, H·d]`` to ``[B, H, S, d]``."""
    return x.reshape(*x.shape[:2], -1, config.head_width).swapaxes(1, 2)


def merge_heads(x: Array) -> Array:
    """``[B, H, S, d]`` to ``[B, S, H·d]``."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def layer(
    config: Config,
    p: Params,
    x: Array,
    tables: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
) -> Array:
    """One layer.  ``attend(q, k, v)`` is all that differs between training and decoding."""
    h = rms_norm_last_dim(x)
    q, k, v = (split_heads(config, linear(p[name], h)) for name in "qkv")
    y = attend(rope(q, *tables), rope(k, *tables), v)
    x = x + linear(p["out"], merge_heads(y))

    h = rms_norm_last_dim(x)
    return x + linear(p["down"], silu(linear(p["gate"], h)) * linear(p["up"], h))


def embed(params: Params, tokens: Array) -> Array:
    """Rows of the embedding, ``[B, S, D]``."""
    rows = index_select(params["embedding"], tokens.reshape(-1), dim=0)
    return rows.reshape(*tokens.shape, -1)


def head(params: Params, x: Array) -> Array:
    """Logits, ``[B, S, V]``."""
    return linear(params["head"], rms_norm_last_dim(x))


# -- training ------------------------------------------------------------------------------


def logits(config: Config, params: Params, tokens: Array) -> Array:
    """Logits of the next token at every position of ``tokens [B, S]``."""
    cos, sin = (table[: tokens.shape[1]] for table in rotary_tables(config))
    x = embed(params, tokens)
    for p in params["layers"]:
        x = layer(config, p, x, (cos, sin), lambda q, k, v: flash_attn(q, k, v, causal=True))
    return head(params, x)


def loss(config: Config, params: Params, tokens: Array) -> Array:
    """Mean cross entropy, in nats, of ``tokens[:, 1:]`` given what comes before each."""
    scores = logits(config, params, tokens[:, :-1])
    return fused_softmax_cross_entropy(
        scores.reshape(-1, config.vocabulary), tokens[:, 1:].reshape(-1)
    )


# -- decoding ------------------------------------------------------------------------------


def empty_cache(config: Config, batch: int = 1) -> Cache:
    """Room for ``config.context`` keys and values per layer."""
    shape = (batch, config.kv_heads, config.context, config.head_width)
    zeros = lambda: jnp.zeros(shape, jnp.float32)
    return [(zeros(), zeros()) for _ in range(config.layers)]


def decode(
    config: Config, params: Params, cache: Cache, tokens: Array, position: Array
) -> tuple[Array, Cache]:
    """Logits ``[B, V]`` after one more token per sequence, and the cache with its keys and values.

    ``position`` is a traced scalar: the offset of the write, the row of the rotary tables and the
    number of keys seen.  One compilation serves all of them.
    """
    cos, sin = (index_select(t, position[None], dim=0) for t in rotary_tables(config))
    x = embed(params, tokens[:, None])
    extended = []

    for p, (keys, values) in zip(params["layers"], cache, strict=True):

        def attend(q: Array, k: Array, v: Array, keys: Array = keys, values: Array = values):
            keys = write_slice_doff(keys, k, position, axis=2)
            values = write_slice_doff(values, v, position, axis=2)
            extended.append((keys, values))
            return flash_attn(q, keys, values, k_len=position + 1, causal=True)

        x = layer(config, p, x, (cos, sin), attend)
    return head(params, x)[:, 0], extended
