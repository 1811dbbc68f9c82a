"""The model of ``tiny_transformer`` in plain ``jax.numpy``: what the curves are compared with.

Same weights, same maths, no fuel_jax op; attention and loss as most people write them.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from tiny_transformer import Config, Params, merge_heads, rotary_tables, split_heads


def linear(p: Params, x: Array) -> Array:
    return x @ p["w"] + p["b"]


def rms_norm(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    low, high = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-high, low], axis=-1) * sin


def attention(q: Array, k: Array, v: Array) -> Array:
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v


def layer(config: Config, p: Params, x: Array, cos: Array, sin: Array) -> Array:
    h = rms_norm(x)
    q, k, v = (split_heads(config, linear(p[name], h)) for name in "qkv")
    y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + linear(p["out"], merge_heads(y))

    h = rms_norm(x)
    return x + linear(p["down"], jax.nn.silu(linear(p["gate"], h)) * linear(p["up"], h))


def logits(config: Config, params: Params, tokens: Array) -> Array:
    """Logits of the next token at every position of ``tokens [B, S]``."""
    cos, sin = (table[: tokens.shape[1]] for table in rotary_tables(config))
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = layer(config, p, x, cos, sin)
    return linear(params["head"], rms_norm(x))


def loss(config: Config, params: Params, tokens: Array) -> Array:
    """Mean cross entropy, in nats, of ``tokens[:, 1:]`` given what comes before each."""
    log_p = jax.nn.log_softmax(logits(config, params, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))
