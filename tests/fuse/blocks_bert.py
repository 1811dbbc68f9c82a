"""BERT: attention both ways, padding, layer norm after the residual."""

import math

import jax
import jax.numpy as jnp

from .blocks import block, draw

B, S, D, H, K, F = 2, 6, 12, 3, 4, 20


def weights():
    """Of one layer."""
    square = {f"w{n}": (D, D) for n in "qkvo"} | {f"b{n}": (D,) for n in "qkvo"}
    norms = {n: (D,) for n in ("g1", "c1", "g2", "c2")}
    return draw(31, **square, **norms, w1=(D, F), b1=(F,), w2=(F, D), b2=(D,))


def x():
    """Hidden states."""
    return draw(32, x=(B, S, D))["x"]


def layer_norm(x, g, b):
    """Epsilon inside the root, as always; 1e-12, as in BERT."""
    u = x.mean(-1, keepdims=True)
    s = jnp.square(x - u).mean(-1, keepdims=True)
    return g * ((x - u) / jnp.sqrt(s + 1e-12)) + b


def after_attention(w, x, o):
    """What follows, on ``[…, s, d]``."""
    x = layer_norm(x + (o @ w["wo"] + w["bo"]), w["g1"], w["c1"])
    h = jax.nn.gelu(x @ w["w1"] + w["b1"], approximate=False)
    return layer_norm(x + h @ w["w2"] + w["b2"], w["g2"], w["c2"])


LENGTHS = jnp.asarray([S, 4], jnp.int32)


@block(layer_norm=2, linear=6, flash_attn=1)
def bhsd_matmul_with_lengths():
    """A mask made of the lengths, added to the scores."""

    def layer(w, x, lengths):
        heads = lambda n: (x @ w["w" + n] + w["b" + n]).reshape(B, S, H, K).transpose(0, 2, 1, 3)
        q, k, v = map(heads, "qkv")
        mask = jnp.arange(S)[None, :] < lengths[:, None]
        bias = jnp.where(mask, 0.0, jnp.finfo(x.dtype).min)[:, None, None, :]
        p = jax.nn.softmax(q @ k.mT / math.sqrt(K) + bias, axis=-1)
        return after_attention(w, x, (p @ v).transpose(0, 2, 1, 3).reshape(B, S, D))

    return layer, (weights(), x(), LENGTHS)


@block(layer_norm=2, linear=6, flash_attn=1)
def bshd_einsum_with_lengths():
    """Scores replaced where there is padding."""

    def layer(w, x, lengths):
        dense = lambda n: (
            jnp.einsum("bsd,dhk->bshk", x, w["w" + n].reshape(D, H, K)) + w["b" + n].reshape(H, K)
        )
        q, k, v = map(dense, "qkv")
        s = jnp.einsum("bqhk,bshk->bhqs", q / jnp.sqrt(K).astype(x.dtype), k)
        padding = jnp.arange(S) >= lengths[:, None, None, None]
        p = jax.nn.softmax(jnp.where(padding, -1e9, s))
        return after_attention(w, x, jnp.einsum("bhqs,bshk->bqhk", p, v).reshape(B, S, D))

    return layer, (weights(), x(), LENGTHS)


@block(layer_norm=2, linear=6, flash_attn=1)
def per_example_under_vmap():
    """A sequence alone, with a length that is a scalar."""

    def one(w, x, length):
        q, k, v = ((x @ w["w" + n] + w["b" + n]).reshape(S, H, K) for n in "qkv")
        seen = jnp.arange(S) < length

        def head(q, k, v):
            return jax.nn.softmax(jnp.where(seen, q @ k.T / math.sqrt(K), -jnp.inf), -1) @ v

        o = jax.vmap(head, 1, 1)(q, k, v).reshape(S, D)
        return after_attention(w, x, o)

    return jax.vmap(one, (None, 0, 0)), (weights(), x(), LENGTHS)


@block(layer_norm=2, linear=6, softmax=1, near=("flash_attn",))
def a_boolean_mask():
    """A mask that comes from outside is an array, which ``flash_attn`` does not take."""

    def layer(w, x, mask):
        heads = lambda n: (x @ w["w" + n] + w["b" + n]).reshape(B, S, H, K).transpose(0, 2, 1, 3)
        q, k, v = map(heads, "qkv")
        s = q @ k.mT / math.sqrt(K)
        p = jax.nn.softmax(jnp.where(mask[:, None, None, :], s, -1e9), axis=-1)
        return after_attention(w, x, (p @ v).transpose(0, 2, 1, 3).reshape(B, S, D))

    return layer, (weights(), x(), jnp.arange(S) < LENGTHS[:, None])


@block(linear=2)
def pooled():
    """The first token, and the mean over tokens: no norm, no softmax."""

    def pool(w, x):
        first = jnp.tanh(x[:, 0] @ w["wq"] + w["bq"])
        return first + jnp.tanh(x.mean(1) @ w["wk"] + w["bk"])

    return pool, (weights(), x())
