"""A decoder of Llama's architecture to train, in plain JAX, with fuel_jax ops, or with cuDNN.

Pre-norm, rotary positions, grouped-query attention, SwiGLU.  The ways of writing it differ in
three parts and share the rest: weights in float32, cast to bfloat16 in every layer; each layer
computed again in the backward pass; Adam.  Arrays are ``[batch, sequence, width]``, inside
attention ``[batch, sequence, head, head width]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import flash_attn, fused_softmax_cross_entropy, rms_norm_last_dim, rope
from ..types import Array

Params = dict[str, Any]
HALF = jnp.bfloat16
EPS = 1e-6


class Config(NamedTuple):
    """Sizes of the model and of a batch."""

    vocabulary: int = 32_000
    width: int = 2048
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    hidden: int = 5632
    batch: int = 4
    length: int = 4096

    @property
    def head_width(self) -> int:
        """Of queries, keys and values."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.batch * self.length


class Written(NamedTuple):
    """The parts in which one way of writing the model differs from another."""

    norm: Callable[..., Any]  # of x and the gain
    attend: Callable[..., Any]  # of queries and keys without positions, values, and the tables
    cross_entropy: Callable[..., Any]  # of the logits, and the tokens of which each tells the next
    stack: Callable[..., Any]  # of one layer, what enters the first, and the weights of all


def cast(p: Params) -> Params:
    """Matrices as halves."""
    return {name: w.astype(HALF) if w.ndim > 1 else w for name, w in p.items()}


def stacked(
    layer: Callable[..., Any], x: Any, weights: Params, *, policy: Callable[..., Any] | None = None
) -> Any:
    """Layer after layer, each computed again in the backward pass but for what a policy keeps."""
    again = jax.checkpoint(lambda x, p: layer(x, cast(p)), policy=policy)
    return lax.scan(lambda x, p: (again(x, p), None), x, weights)[0]


def keeps_attention(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy: cuDNN's attention is not computed again."""
    return primitive.name.startswith("dot_product_attention_fwd")


def halves_stacked(layer: Callable[..., Any], x: Any, weights: Params) -> Any:
    """As :func:`stacked`; gradients stay halves, as the products give them, until Adam reads them.

    The transposed cast would write those of all layers in float32, at twice the size.
    """

    @jax.custom_vjp
    def through(x, weights):
        return kept(x, weights)[0]

    def kept(x, weights):
        y, xs = lax.scan(lambda x, p: (layer(x, cast(p)), x), x, weights)
        return y, (xs, weights)

    def back(residuals, g):
        pull = lambda g, at: jax.vjp(layer, at[0], cast(at[1]))[1](g)
        g, gradient = lax.scan(pull, g, residuals, reverse=True)
        return g, jax.tree.map(lambda d, w: d.astype(w.dtype), gradient, residuals[1])

    through.defvjp(kept, back)
    return through(x, weights)


# -- plain JAX -----------------------------------------------------------------------------


def plain_norm(x: Array, gain: Array) -> Array:
    """Root mean square, in float32."""
    wide = x.astype(jnp.float32)
    mean = (wide * wide).mean(-1, keepdims=True)
    return (wide * lax.rsqrt(mean + EPS) * gain).astype(x.dtype)


def plain_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def plain_attention(
    q: Array, k: Array, v: Array, cos: Array, sin: Array, *, implementation: Any
) -> Array:
    """JAX's own, dense or by cuDNN."""
    return jax.nn.dot_product_attention(
        *(plain_rope(q, cos, sin), plain_rope(k, cos, sin), v),
        is_causal=True,
        implementation=implementation,
    )


def plain_cross_entropy(logits: Array, tokens: Array) -> Array:
    """In float32."""
    wide = logits[:, :-1].astype(jnp.float32)
    told = tokens[:, 1:, None]
    return -jnp.take_along_axis(jax.nn.log_softmax(wide, -1), told, -1).mean()


def plain(implementation: str) -> Written:
    """In plain JAX, with one of its attentions."""
    attend = functools.partial(plain_attention, implementation=implementation)
    return Written(plain_norm, attend, plain_cross_entropy, stacked)


# -- fuel_jax ------------------------------------------------------------------------------


def norm(x: Array, gain: Array) -> Array:
    """Root mean square."""
    return (rms_norm_last_dim(x, eps=EPS) * gain).astype(x.dtype)


def attention(q: Array, k: Array, v: Array, cos: Array, sin: Array) -> Array:
    """Ours throughout; positions are turned in float32, as the tables are."""
    cos, sin = (jnp.concatenate([table, table], -1) for table in (cos, sin))
    turned = lambda x: rope(x.astype(jnp.float32), cos, sin).astype(x.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return flash_attn(turned(q), turned(k), v, causal=True).swapaxes(1, 2)


def cross_entropy(logits: Array, tokens: Array) -> Array:
    """Of halves as they are; the last position of each row has nothing to tell and is ignored."""
    told = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    return fused_softmax_cross_entropy(logits, told, ignore_index=-100)


OPS = Written(norm, attention, cross_entropy, stacked)


# -- what they share -----------------------------------------------------------------------


def init(config: Config, key: Any) -> Params:
    """Random weights, those of the layers stacked."""
    d, n, f = config.width, config.layers, config.hidden
    kv = config.kv_heads * config.head_width
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape, jnp.float32) * shape[-2] ** -0.5

    layers = {"q": normal(n, d, d), "k": normal(n, d, kv), "v": normal(n, d, kv)}
    layers |= {"out": normal(n, d, d), "gate": normal(n, d, f), "up": normal(n, d, f)}
    layers |= {"down": normal(n, f, d)}
    gains = {name: jnp.ones((n, d), jnp.float32) for name in ("attention_norm", "norm")}
    return {
        "embedding": normal(config.vocabulary, d),
        "layers": layers | gains,
        "norm": jnp.ones(d, jnp.float32),
        "head": normal(d, config.vocabulary),
    }


def tables(config: Config) -> tuple[Any, Any]:
    """cos and sin of position · 10000^(−2i/d), ``[length, head width / 2]``."""
    half = jnp.arange(0, config.head_width, 2) / config.head_width
    angles = jnp.arange(config.length)[:, None] / 10_000**half
    return jnp.cos(angles), jnp.sin(angles)


def layer(config: Config, norm: Any, attend: Any, p: Params, x: Any) -> Any:
    """One layer; ``attend(q, k, v)`` brings the positions."""
    heads = lambda y: y.reshape(*y.shape[:2], -1, config.head_width)
    h = norm(x, p["attention_norm"])
    x = x + attend(*(heads(h @ p[name]) for name in "qkv")).reshape(x.shape) @ p["out"]
    h = norm(x, p["norm"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss(config: Config, written: Written, params: Params, tokens: Any) -> Any:
    """Mean cross entropy, in nats, of every token but the first given those before it."""
    places = tables(config)
    attend = lambda *qkv: written.attend(*qkv, *places)
    each = lambda x, p: layer(config, written.norm, attend, p, x)
    x = written.stack(each, params["embedding"].astype(HALF)[tokens], params["layers"])
    logits = written.norm(x, params["norm"]) @ params["head"].astype(HALF)
    return written.cross_entropy(logits, tokens)


State = tuple[Params, Params, Params]  # weights, and Adam's two averages


def start(config: Config, key: Any) -> State:
    """Before the first step."""
    params = init(config, key)
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return params, zeros(), zeros()


def step(f: Callable[..., Any], state: State, tokens: Any) -> tuple[State, Any]:
    """A step of Adam down the loss ``f``, and the loss before it."""
    params, mean, square = state
    value, gradient = jax.value_and_grad(f)(params, tokens)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradient)
    moved = lambda p, m, v: p - 1e-4 * m / (jnp.sqrt(v) + 1e-8)
    return (jax.tree.map(moved, params, mean, square), mean, square), value
