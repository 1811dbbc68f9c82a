"""GPT-2: layer norm before, one matrix for q, k and v, biases, gelu by tanh, tied logits."""

import math

import jax
import jax.numpy as jnp

from .blocks import block, draw, tokens

B, S, D, H, K, V = 2, 6, 12, 3, 4, 11


def weights():
    """Of one layer."""
    return draw(
        11,
        **{"g1": (D,), "b1": (D,), "g2": (D,), "b2": (D,)},
        **{"attn_w": (D, 3 * D), "attn_b": (3 * D,), "proj_w": (D, D), "proj_b": (D,)},
        **{"fc_w": (D, 4 * D), "fc_b": (4 * D,), "out_w": (4 * D, D), "out_b": (D,)},
    )


def x():
    """Hidden states."""
    return draw(12, x=(B, S, D))["x"]


def layer_norm(x, g, b, eps=1e-5):
    """With ``jnp.var``."""
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return g * (x - mean) / jnp.sqrt(variance + eps) + b


def gelu_new(x):
    """By tanh, as written out in picoGPT."""
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi).astype(x.dtype) * (x + 0.044715 * x**3)))


def linear(x, w, b):
    """``x @ w + b``."""
    return x @ w + b


@block(layer_norm=2, linear=4, flash_attn=1)
def bhsd_matmul():
    """As in the original: split in three, split into heads, a mask of −1e10."""

    def layer(w, x):
        h = layer_norm(x, w["g1"], w["b1"])
        heads = lambda t: t.reshape(B, S, H, K).transpose(0, 2, 1, 3)
        q, k, v = map(heads, jnp.split(linear(h, w["attn_w"], w["attn_b"]), 3, axis=-1))
        s = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(jnp.float32(K))
        seen = jnp.tril(jnp.ones((S, S), x.dtype))
        s = s * seen - 1e10 * (1 - seen)
        o = (jax.nn.softmax(s) @ v).transpose(0, 2, 1, 3).reshape(B, S, D)
        x = x + linear(o, w["proj_w"], w["proj_b"])
        h = layer_norm(x, w["g2"], w["b2"])
        h = gelu_new(linear(h, w["fc_w"], w["fc_b"]))
        return x + linear(h, w["out_w"], w["out_b"])

    return layer, (weights(), x())


@block(layer_norm=2, linear=4, flash_attn=1)
def bshd_einsum():
    """The same weights seen as ``[d, 3, h, k]``, ``jax.nn.gelu``, a variance of squares."""

    def norm(x, g, b):
        mean = x.mean(-1, keepdims=True)
        variance = (x**2).mean(-1, keepdims=True) - mean**2
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * g + b

    def layer(w, x):
        h = norm(x, w["g1"], w["b1"])
        qkv = jnp.einsum("bsd,dthk->tbshk", h, w["attn_w"].reshape(D, 3, H, K))
        q, k, v = qkv + w["attn_b"].reshape(3, 1, 1, H, K)
        s = jnp.einsum("bqhk,bshk->bhqs", q, k) * (1.0 / math.sqrt(K))
        i = jnp.arange(S)
        s = jnp.where(i[:, None] < i[None, :], jnp.finfo(jnp.float32).min, s)
        o = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(s, axis=-1), v)
        out = jnp.einsum("bqhk,hkd->bqd", o, w["proj_w"].reshape(H, K, D)) + w["proj_b"]
        x = x + out
        h = jax.nn.gelu(norm(x, w["g2"], w["b2"]) @ w["fc_w"] + w["fc_b"])
        return x + (jnp.dot(h, w["out_w"]) + w["out_b"])

    return layer, (weights(), x())


@block(layer_norm=2, linear=4, flash_attn=1)
def per_example_under_vmap():
    """A sequence, and a head, alone."""

    def one(w, x):
        h = jax.vmap(layer_norm, (0, None, None))(x, w["g1"], w["b1"])
        qkv = linear(h, w["attn_w"], w["attn_b"])
        q, k, v = (t.reshape(S, H, K) for t in (qkv[:, :D], qkv[:, D : 2 * D], qkv[:, 2 * D :]))

        def head(q, k, v):
            s = jnp.dot(q, k.T) / K**0.5
            s = s + jnp.triu(jnp.full((S, S), -jnp.inf), 1)
            return jax.nn.softmax(s, -1) @ v

        o = jax.vmap(head, in_axes=1, out_axes=1)(q, k, v).reshape(S, D)
        x = x + linear(o, w["proj_w"], w["proj_b"])
        h = jax.vmap(layer_norm, (0, None, None))(x, w["g2"], w["b2"])
        return x + linear(gelu_new(linear(h, w["fc_w"], w["fc_b"])), w["out_w"], w["out_b"])

    return jax.vmap(one, (None, 0)), (weights(), x())


@block(layer_norm=1, cross_entropy=1)
def tied_logits_and_loss():
    """The last norm, logits by the embedding, the loss of the labels that are not padding."""

    def loss(embedding, g, b, x, labels):
        logits = layer_norm(x, g, b) @ embedding.T
        logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        picked = jnp.take_along_axis(logp, jnp.expand_dims(labels, -1), axis=-1).squeeze(-1)
        keep = (labels != 0).astype(logits.dtype)
        return -(picked * keep).sum() / keep.sum()

    given = draw(13, e=(V, D), g=(D,), b=(D,), x=(B, S, D))
    return loss, (*given.values(), tokens(14, (B, S), V))


@block(softmax=1, layer_norm=2, linear=4)
def dropout_on_attention():
    """Weights that are dropped at random are not those of ``flash_attn``."""

    def layer(w, x, key):
        h = layer_norm(x, w["g1"], w["b1"])
        qkv = linear(h, w["attn_w"], w["attn_b"]).reshape(B, S, 3, H, K)
        q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
        s = q @ k.swapaxes(2, 3) / K**0.5
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((S, S), bool)), s, -jnp.inf))
        p = jnp.where(jax.random.bernoulli(key, 0.9, p.shape), p / 0.9, 0.0)
        o = (p @ v).swapaxes(1, 2).reshape(B, S, D)
        x = x + linear(o, w["proj_w"], w["proj_b"])
        h = layer_norm(x, w["g2"], w["b2"])
        return x + linear(gelu_new(linear(h, w["fc_w"], w["fc_b"])), w["out_w"], w["out_b"])

    return layer, (weights(), x(), jax.random.key(0))


@block(softmax=1, near=("flash_attn",))
def weights_returned_as_well():
    """Who wants to see the attention weights keeps them."""

    def attend(q, k, v):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / K**0.5
        p = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), s, -1e30))
        return jnp.einsum("bhqk,bhkd->bhqd", p, v), p

    return attend, tuple(draw(15, q=(B, H, S, K), k=(B, H, S, K), v=(B, H, S, K)).values())
