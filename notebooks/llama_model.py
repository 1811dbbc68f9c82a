"""A model of Llama's architecture, made of fuel_jax ops; its weights packed or not.

    x, cache = hidden(config, params, cache, tokens, position)      any number of tokens at once
    logits(config, params, x)                                       of the token after each

Pre-norm, rotary positions, grouped-query attention over a cache, SwiGLU.  Arrays are ``[batch,
sequence, width]``, inside attention ``[batch, head, sequence, head width]``; activations float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fuel_jax import (
    flash_attn,
    index_select,
    matmul,
    qmatmul,
    rms_norm_last_dim,
    rope,
    silu,
    write_slice_doff,
)
from fuel_jax.formats.rows import take_rows

Params = dict[str, Any]
Cache = list[tuple[Array, Array]]  # per layer: keys, values [batch, head, context, head width]


class Config(NamedTuple):
    """Sizes of the model, as its file gives them."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    context: int
    eps: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """x Wᵀ + b, with W[n, k] in whatever form ``product`` takes after the activations."""

    operands: tuple[Array, ...]
    bias: Array | None = None
    product: Callable[..., Array] = dataclasses.field(default=matmul, metadata={"static": True})
    params: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), metadata={"static": True})

    def __call__(self, x: Array) -> Array:
        y = self.product(x, *self.operands, **dict(self.params))
        return y if self.bias is None else y + self.bias

    def rows(self, ids: Array) -> Array:
        """Rows ``ids`` of W, as an embedding: ``[*ids, k]``."""
        (w,) = self.operands
        if self.product is qmatmul:
            layout = dict(self.params)
            return take_rows(w, ids, quant_type=layout["quant_type"], k=layout["k"])
        rows = index_select(w, ids.reshape(-1), dim=0).astype(jnp.float32)
        return rows.reshape(*ids.shape, -1)


def dense(x: Array, w: Array) -> Array:
    """x Wᵀ, with a weight of any float type, as its file has it."""
    return matmul(x, w.astype(x.dtype).mT)


# -- the model -------------------------------------------------------------------------------


def norm(config: Config, gain: Array, x: Array) -> Array:
    """RMS normalisation with a gain."""
    return rms_norm_last_dim(x, eps=config.eps) * gain


def split_heads(config: Config, x: Array) -> Array:
    """``[B, S, H·d]`` to ``[B, H, S, d]``."""
    return x.reshape(*x.shape[:2], -1, config.head_width).swapaxes(1, 2)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions on as much of a head as the tables are wide."""
    turning = rope(x[..., : cos.shape[-1]], cos, sin)
    return jnp.concatenate([turning, x[..., cos.shape[-1] :]], -1)


def hidden(
    config: Config, params: Params, cache: Cache, tokens: Array, position: Array
) -> tuple[Array, Cache]:
    """The last layer's output ``[B, S, width]`` for ``tokens [B, S]``, and the cache with them.

    ``position``, of the first of them, is a traced scalar: one compilation serves all.
    """
    length = tokens.shape[1]
    places = position + jnp.arange(length, dtype=jnp.int32)
    cos, sin = (index_select(t, places, dim=0) for t in params["rope"])
    x = params["embedding"].rows(tokens)
    extended = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        h = norm(config, p["attention_norm"], x)
        q, k, v = (split_heads(config, p[name](h)) for name in "qkv")
        keys = write_slice_doff(keys, rotated(k, cos, sin), position, axis=2)
        values = write_slice_doff(values, v, position, axis=2)
        extended.append((keys, values))
        y = flash_attn(rotated(q, cos, sin), keys, values, k_len=position + length, causal=True)
        x = x + p["out"](y.swapaxes(1, 2).reshape(*x.shape[:2], -1))

        h = norm(config, p["norm"], x)
        x = x + p["down"](silu(p["gate"](h)) * p["up"](h))
    return x, extended


def logits(config: Config, params: Params, x: Array) -> Array:
    """Logits of the next token, of the last layer's output."""
    return params["head"](norm(config, params["norm"], x))


def empty_cache(config: Config, batch: int = 1) -> Cache:
    """Room for ``config.context`` keys and values per layer."""
    shape = (batch, config.kv_heads, config.context, config.head_width)
    zeros = lambda: jnp.zeros(shape, jnp.float32)
    return [(zeros(), zeros()) for _ in range(config.layers)]
