"""Llama: RMSNorm, rotary embedding, grouped queries, SwiGLU."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import block, draw, tokens

B, S, D, H, G, K, F, V = 2, 6, 16, 4, 2, 4, 24, 11  # G key heads


def weights(dtype=jnp.float32):
    """Of one layer, heads flat."""
    return draw(
        1,
        dtype,
        wq=(D, H * K),
        wk=(D, G * K),
        wv=(D, G * K),
        wo=(H * K, D),
        w1=(D, F),
        w3=(D, F),
        w2=(F, D),
        g1=(D,),
        g2=(D,),
    )


def x(dtype=jnp.float32):
    """Hidden states."""
    return draw(2, dtype, x=(B, S, D))["x"]


def rms_norm(x, g, eps=1e-6):
    """As in Meta's code: the norm in float32, cast, then the gain."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
    return y.astype(x.dtype) * g


def angles(positions, width=K):
    """``position · 10000^(−2i/width)``, half the width."""
    inverse = 1.0 / 10000 ** (jnp.arange(0, width, 2) / width)
    return positions[..., None].astype(jnp.float32) * inverse


def rotate_half(x):
    """(−second half, first half)."""
    lo, hi = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return jnp.concatenate((-hi, lo), axis=-1)


def swiglu(w, h):
    """silu(x·w1) · x·w3, down by w2."""
    return (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"]


@block(rms_norm=2, rope=2, flash_attn=1)
def bshd_einsum():
    """Heads beside the sequence, einsum throughout, keys repeated."""
    causal = jnp.tril(jnp.ones((S, S), bool))

    def layer(w, x):
        h = rms_norm(x, w["g1"])
        q = jnp.einsum("bsd,dhk->bshk", h, w["wq"].reshape(D, H, K))
        k = jnp.einsum("bsd,dhk->bshk", h, w["wk"].reshape(D, G, K))
        v = jnp.einsum("bsd,dhk->bshk", h, w["wv"].reshape(D, G, K))
        a = angles(jnp.arange(S))
        cos, sin = (jnp.concatenate([f(a), f(a)], -1)[:, None] for f in (jnp.cos, jnp.sin))
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        k, v = (jnp.repeat(t, H // G, axis=2) for t in (k, v))
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(K)
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, jnp.finfo(scores.dtype).min)
        p = jax.nn.softmax(scores, axis=-1)
        o = jnp.einsum("bhqs,bshk->bqhk", p, v)
        x = x + jnp.einsum("bqhk,hkd->bqd", o, w["wo"].reshape(H, K, D))
        return x + swiglu(w, rms_norm(x, w["g2"]))

    del causal
    return layer, (weights(), x())


@block(rms_norm=2, rope=2, flash_attn=1)
def bhsd_matmul():
    """Heads first, matmul throughout, half tables, queries in groups, an additive mask."""

    def layer(w, x, cos, sin):
        h = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * w["g1"]
        q = (h @ w["wq"]).reshape(B, S, H, K).transpose(0, 2, 1, 3)
        k = (h @ w["wk"]).reshape(B, S, G, K).transpose(0, 2, 1, 3)
        v = (h @ w["wv"]).reshape(B, S, G, K).transpose(0, 2, 1, 3)

        def rope(t):
            lo, hi = jnp.split(t, 2, axis=-1)
            return jnp.concatenate([lo * cos - hi * sin, lo * sin + hi * cos], axis=-1)

        q, k = rope(q), rope(k)
        q = q.reshape(B, G, H // G, S, K)
        scores = jnp.matmul(q, k[:, :, None].swapaxes(-1, -2)) * K**-0.5
        i, j = jnp.arange(S)[:, None], jnp.arange(S)[None, :]
        scores = scores + jnp.where(j > i, -1e9, 0.0)
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        p = e / e.sum(-1, keepdims=True)
        o = (p @ v[:, :, None]).reshape(B, H, S, K)
        x = x + o.transpose(0, 2, 1, 3).reshape(B, S, H * K) @ w["wo"]
        h = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * w["g2"]
        return x + swiglu(w, h)

    a = angles(jnp.arange(S))
    return layer, (weights(), x(), jnp.cos(a), jnp.sin(a))


def one_example(w, x, positions):
    """A sequence alone, ``[s, d]``, and where its tokens stand."""
    h = rms_norm(x, w["g1"])
    q = (h @ w["wq"]).reshape(S, H, K)
    k, v = ((h @ w[n]).reshape(S, G, K) for n in ("wk", "wv"))
    a = angles(positions)[:, None]
    cos, sin = jnp.cos(a), jnp.sin(a)

    def rope(t):
        lo, hi = jnp.split(t, 2, axis=-1)
        return jnp.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)

    q, k = rope(q), rope(k)
    causal = jnp.arange(S)[:, None] >= jnp.arange(S)

    def head(q, k, v):
        s = jnp.where(causal, q @ k.T / math.sqrt(K), -jnp.inf)
        return jax.nn.softmax(s) @ v

    k, v = (jnp.repeat(t, H // G, axis=1) for t in (k, v))
    o = jax.vmap(head, 1, 1)(q, k, v).reshape(S, H * K)
    x = x + o @ w["wo"]
    return x + swiglu(w, rms_norm(x, w["g2"]))


@block(rms_norm=2, rope=2, flash_attn=1)
def per_example_under_vmap():
    """Each sequence by itself, with its own positions; each head by itself."""
    layer = jax.vmap(one_example, (None, 0, 0))
    positions = jnp.arange(S) + jnp.asarray([[0], [3]])
    return layer, (weights(), x(), positions)


@block(rms_norm=2, rope=2, flash_attn=1)
def in_bfloat16_as_hugging_face():
    """Norm, angles and softmax in float32, everything else in bfloat16."""

    def norm(h, g):
        dtype = h.dtype
        h = h.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
        return g * jnp.asarray(h, dtype)

    def layer(w, x):
        h = norm(x, w["g1"])
        q = (h @ w["wq"]).reshape(B, S, H, K).swapaxes(1, 2)
        k, v = ((h @ w[n]).reshape(B, S, G, K).swapaxes(1, 2) for n in ("wk", "wv"))
        a = angles(jnp.arange(S))
        a = jnp.concatenate([a, a], -1)
        cos, sin = jnp.cos(a).astype(x.dtype), jnp.sin(a).astype(x.dtype)
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        repeat = lambda t: jnp.broadcast_to(t[:, :, None], (B, G, H // G, S, K)).reshape(B, H, S, K)
        k, v = repeat(k), repeat(v)
        scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(K))
        mask = jnp.triu(jnp.full((S, S), jnp.finfo(x.dtype).min, x.dtype), k=1)
        p = jax.nn.softmax((scores + mask).astype(jnp.float32), axis=-1).astype(x.dtype)
        o = (p @ v).swapaxes(1, 2).reshape(B, S, -1)
        x = x + o @ w["wo"]
        return x + swiglu(w, norm(x, w["g2"]))

    return layer, (weights(jnp.bfloat16), x(jnp.bfloat16))


@block(rms_norm=5, rope=4, flash_attn=2, cross_entropy=1)
def language_model():
    """Embedding, two layers, a last norm, an output matrix, the mean loss of the next token."""

    def layer(w, x, cos, sin):
        h = rms_norm(x, w["g1"])
        split = lambda t: t.reshape(B, S, -1, K).transpose(0, 2, 1, 3)
        q, k, v = (split(h @ w[n]) for n in ("wq", "wk", "wv"))
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        q = q.reshape(B, G, -1, S, K)
        s = jnp.einsum("bgrqd,bgkd->bgrqk", q, k) / math.sqrt(K)
        s = jnp.where(jnp.tril(jnp.ones((S, S))) == 0, -jnp.inf, s)
        o = jnp.einsum("bgrqk,bgkd->bgrqd", jax.nn.softmax(s, -1), v).reshape(B, H, S, K)
        x = x + o.transpose(0, 2, 1, 3).reshape(B, S, H * K) @ w["wo"]
        return x + swiglu(w, rms_norm(x, w["g2"]))

    def loss(params, ids):
        x = params["embedding"][ids]
        a = jnp.concatenate([angles(jnp.arange(S))] * 2, -1)
        for w in params["layers"]:
            x = layer(w, x, jnp.cos(a), jnp.sin(a))
        logits = rms_norm(x, params["g"]) @ params["out"]
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0].mean()

    params = draw(5, embedding=(V, D), g=(D,), out=(D, V))
    return loss, ({**params, "layers": [weights(), weights()]}, tokens(3, (B, S), V))


def deep(layers):
    """A model unrolled in Python, for timing ``fuse`` itself."""
    layer, (w, hidden, cos, sin) = bhsd_matmul()

    def model(stack, x, cos, sin):
        for w in stack:
            x = layer(w, x, cos, sin)
        return rms_norm(x, stack[0]["g1"])

    return model, ([w] * layers, hidden, cos, sin)
