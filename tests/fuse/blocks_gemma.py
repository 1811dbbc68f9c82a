"""Gemma: norm with gain 1 + g, scores and logits capped, layers with a window."""

import jax
import jax.numpy as jnp

from .blocks import block, draw, tokens

B, S, D, H, G, K, F, V, WINDOW, CAP = 2, 7, 16, 4, 2, 4, 24, 11, 3, 5.0


def weights():
    """Of one layer; heads are axes of their own."""
    return draw(
        21,
        q=(H, D, K),
        kv=(2, G, D, K),
        o=(H, K, D),
        gate=(2, D, F),
        down=(F, D),
        **{n: (D,) for n in ("pre", "post", "pre_ffw", "post_ffw")},
    )


def x():
    """Hidden states."""
    return draw(22, x=(B, S, D))["x"]


def rms_norm(x, g):
    """The gain is 1 + g."""
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-6) * (1 + g)


def rope(x, positions):
    """As in DeepMind's code: ``[b, s, h, k]``, positions ``[b, s]``."""
    half = x.shape[-1] // 2
    timescale = 10_000 ** (2 * jnp.arange(half) / x.shape[-1]).astype(jnp.float32)
    a = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    rotated = (
        first * jnp.cos(a) - second * jnp.sin(a),
        second * jnp.cos(a) + first * jnp.sin(a),
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def feed_forward(w, h):
    """gelu(h·gate₀) · h·gate₁, down."""
    gate, up = jnp.einsum("bsd,cdf->cbsf", h, w["gate"])
    return jax.nn.gelu(gate) * up @ w["down"]


@block(rms_norm=4, rope=2, flash_attn=1)
def bshd_einsum():
    """As in DeepMind's code, on a global layer."""

    def layer(w, x, positions):
        h = rms_norm(x, w["pre"])
        q = jnp.einsum("BTD,NDH->BTNH", h, w["q"])
        k, v = jnp.einsum("BSD,CKDH->CBSKH", h, w["kv"])
        q, k = rope(q, positions) * K**-0.5, rope(k, positions)
        q = q.reshape(B, S, G, H // G, K)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k)
        logits = jnp.tanh(logits / CAP) * CAP
        mask = jnp.tril(jnp.ones((S, S), bool))[None, :, None, None, :]
        p = jax.nn.softmax(jnp.where(mask, logits, -2.3819763e38), axis=-1)
        o = jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, S, H, K)
        x = x + rms_norm(jnp.einsum("BTNH,NHD->BTD", o, w["o"]), w["post"])
        return x + rms_norm(feed_forward(w, rms_norm(x, w["pre_ffw"])), w["post_ffw"])

    return layer, (weights(), x(), jnp.arange(S) + jnp.asarray([[0], [5]]))


@block(rms_norm=4, rope=2, flash_attn=1)
def bhsd_matmul_with_a_window():
    """Keys repeated, a window: key > query − WINDOW."""

    def layer(w, x):
        h = rms_norm(x, w["pre"])[:, None]
        q, k, v = h @ w["q"], h @ w["kv"][0], h @ w["kv"][1]
        turn = lambda t: rope(t.swapaxes(1, 2), jnp.arange(S)[None]).swapaxes(1, 2)
        q, k = turn(q), turn(k)
        k, v = jnp.repeat(k, H // G, 1), jnp.repeat(v, H // G, 1)
        s = (q @ k.mT) / 2.0
        s = CAP * jnp.tanh(s / CAP)
        i, j = jnp.arange(S)[:, None], jnp.arange(S)[None, :]
        s = jnp.where((j <= i) & (i - j < WINDOW), s, -1e30)
        o = jax.nn.softmax(s, axis=-1) @ v
        x = x + rms_norm((o @ w["o"]).sum(1), w["post"])
        return x + rms_norm(feed_forward(w, rms_norm(x, w["pre_ffw"])), w["post_ffw"])

    return layer, (weights(), x())


@block(rms_norm=4, rope=2, flash_attn=1)
def per_example_under_vmap():
    """A sequence alone; the window as two triangles."""

    def one(w, x):
        h = rms_norm(x, w["pre"])
        q = jnp.einsum("td,ndh->nth", h, w["q"])
        k, v = jnp.einsum("td,cndh->cnth", h, w["kv"])
        a = jnp.arange(S)[:, None] / 10_000 ** (jnp.arange(0, K, 2) / K)

        def turn(t):
            lo, hi = t[..., : K // 2], t[..., K // 2 :]
            return jnp.concatenate(
                [lo * jnp.cos(a) - hi * jnp.sin(a), hi * jnp.cos(a) + lo * jnp.sin(a)], -1
            )

        seen = jnp.tril(jnp.ones((S, S), bool)) & jnp.triu(jnp.ones((S, S), bool), -WINDOW + 1)

        def attend(q, k, v):
            s = jnp.tanh(q @ k.T * K**-0.5 / CAP) * CAP
            return jax.nn.softmax(jnp.where(seen, s, -jnp.inf)) @ v

        group = jax.vmap(attend, (0, None, None))
        o = jax.vmap(group)(turn(q).reshape(G, H // G, S, K), turn(k), v).reshape(H, S, K)
        x = x + rms_norm(jnp.einsum("nth,nhd->td", o, w["o"]), w["post"])
        gate, up = jnp.einsum("sd,cdf->csf", rms_norm(x, w["pre_ffw"]), w["gate"])
        return x + rms_norm(jax.nn.gelu(gate) * up @ w["down"], w["post_ffw"])

    return jax.vmap(one, (None, 0)), (weights(), x())


@block(rms_norm=1, cross_entropy=1)
def capped_logits():
    """Logits capped at 30 before the loss."""

    def loss(embedding, g, x, labels):
        logits = jnp.einsum("bsd,vd->bsv", rms_norm(x, g), embedding)
        logits = 30.0 * jnp.tanh(logits / 30.0)
        one_hot = jax.nn.one_hot(labels, V)
        return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1))

    given = draw(23, e=(V, D), g=(D,), x=(B, S, D))
    return loss, (*given.values(), tokens(24, (B, S), V))
