"""How a JAX user without fuel_jax would write the fused ops, scans and quantised weights apart."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .row import LARGE, ODD, SMALL, SQUARE, TOKEN, WIDE, Row, calls


def normed(x, eps, centre):
    """RMS norm, or layer norm."""
    if centre:
        x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def pulled(f):
    """The gradient of a plain spelling, as a function of its operand and the cotangent."""
    return lambda x, g, **params: jax.vjp(functools.partial(f, **params), x)[1](g)[0]


def rope(x, cos, sin):
    """Half-split rotation."""
    lo, hi = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-hi, lo], -1) * sin


def attention(q, k, v, *, causal=False):
    """Scores, mask, softmax, product: the naive form."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        seen = jnp.tril(jnp.ones(s.shape[-2:], bool), k.shape[2] - q.shape[2])
        s = jnp.where(seen, s, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)


def attention_gradient(which):
    """dq, dk or dv of the naive form."""

    def f(q, k, v, do, **params):
        return jax.vjp(functools.partial(attention, **params), q, k, v)[1](do)[which]

    return f


def paged(q, k_cache, v_cache, table, lengths, **params):
    """Gather the pages, then attend."""
    k, v = (
        c[table].reshape(q.shape[0], -1, *c.shape[2:]).swapaxes(1, 2) for c in (k_cache, v_cache)
    )
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    ends = lengths.astype(jnp.int32)[:, None] - jnp.arange(q.shape[2])[::-1]  # of each query
    seen = jnp.arange(k.shape[2]) < ends[..., None]
    s = jnp.where(seen[:, None], s, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)


def cross_entropy(logits, targets):
    """Mean negative log-likelihood."""
    logp = jax.nn.log_softmax(logits, -1)
    return -jnp.mean(jnp.take_along_axis(logp, targets[..., None].astype(jnp.int32), -1))


def conv2d(x, w, bias, *, stride=(1, 1), padding=(0, 0)):
    """lax's convolution and a bias."""
    y = lax.conv_general_dilated(x, w, stride, [(p, p) for p in padding])
    return y + bias[:, None, None]


def conv_transpose2d(x, w, bias, *, stride, padding):
    """lax's convolution with dilated input."""
    kernel = jnp.flip(w.swapaxes(0, 1), (2, 3))
    widths = [(k - 1 - p, k - 1 - p) for k, p in zip(w.shape[2:], padding, strict=True)]
    y = lax.conv_general_dilated(x, kernel, (1, 1), widths, lhs_dilation=stride)
    return y + bias[:, None, None]


def causal_conv1d(x, w, bias, *, use_silu=False):
    """Depthwise convolution."""
    y = lax.conv_general_dilated(x, w, (1,), [(0, 0)], feature_group_count=x.shape[1])
    y = y + bias[:, None]
    return jax.nn.silu(y) if use_silu else y


def heads(b, h, hk, sq, sk, d, **params):
    """A call of flash_attn."""
    return [f"f32 {b} {h} {sq} {d}", *[f"f32 {b} {hk} {sk} {d}"] * 2], params


def twice(made):
    """The calls with their first array once more, as a cotangent."""
    return [([*arrays, arrays[0]], params) for arrays, params in made]


ATTENTION = [
    heads(1, 8, 8, 512, 512, 64),
    heads(1, 8, 8, 512, 512, 64, causal=True),
    heads(1, 8, 8, 2048, 2048, 64),
    heads(1, 8, 8, 2048, 2048, 64, causal=True),
    heads(1, 8, 2, 2048, 2048, 64, causal=True),
    heads(2, 4, 2, 128, 128, 32, causal=True),
    heads(1, 3, 3, 197, 333, 40),
    heads(1, 8, 2, 1, 4096, 64),
]
LONG = [heads(1, 8, 8, 8192, 8192, 64), heads(1, 8, 8, 8192, 8192, 64, causal=True)]
BACKWARD = twice([ATTENTION[i] for i in (2, 3, 4, 5, 6)])
ROWS = calls(TOKEN, SMALL, LARGE, WIDE, "f32 8192 768")
NORM = [(arrays, {"eps": 1e-6}) for arrays, _ in ROWS]
WIDTHS = {"padding": (1, 1)}

FUSED: dict[str, Row] = {
    "softmax_last_dim": Row(lambda x: jax.nn.softmax(x, -1), ROWS, torch=1.0),
    "softmax_last_dim_backward": Row(
        lambda y, g: y * (g - jnp.sum(y * g, -1, keepdims=True)), twice(ROWS), torch=1.0
    ),
    "log_softmax_last_dim": Row(lambda x: jax.nn.log_softmax(x, -1), ROWS, torch=1.0),
    "log_softmax_last_dim_backward": Row(
        lambda y, g: g - jnp.exp(y) * jnp.sum(g, -1, keepdims=True), twice(ROWS), torch=1.0
    ),
    "rms_norm_last_dim": Row(functools.partial(normed, centre=False), NORM, torch=1.0),
    "rms_norm_last_dim_backward": Row(
        pulled(functools.partial(normed, centre=False)), twice(NORM), torch=1.0
    ),
    "layer_norm_last_dim": Row(functools.partial(normed, centre=True), NORM, torch=1.0),
    "layer_norm_last_dim_backward": Row(
        pulled(functools.partial(normed, centre=True)), twice(NORM), torch=1.0
    ),
    "rope": Row(
        rope,
        [
            (["f32 1 8 2048 64", "f32 2048 64", "f32 2048 64"], {}),
            (["f32 2 4 1 128", "f32 1 128", "f32 1 128"], {}),
            (["f32 2 3 197 40", "f32 197 40", "f32 197 40"], {}),
        ],
        at=(0,),
    ),
    "flash_attn": Row(attention, ATTENTION, torch=1.0),
    "flash_attn long": Row(attention, LONG, at=(), torch=1.0),  # the naive gradient: 16 GiB
    "flash_attn_backward_q": Row(attention_gradient(0), BACKWARD),
    "flash_attn_backward_k": Row(attention_gradient(1), BACKWARD),
    "flash_attn_backward_v": Row(attention_gradient(2), BACKWARD),
    "paged_attn": Row(
        paged,
        [
            (["f32 8 8 1 64", *["f32 256 16 2 64"] * 2, "u32<256 8 32", "u32<500 8"], {}),
            (["f32 3 6 2 40", *["f32 64 8 3 40"] * 2, "u32<64 3 13", "u32<100 3"], {}),
            (["f32 1 32 1 128", *["f32 256 16 8 128"] * 2, "u32<256 1 256", "u32<4000 1"], {}),
        ],
    ),
    "fused_softmax_cross_entropy": Row(
        cross_entropy,
        [
            (["f32 2048 50257", "u32<50257 2048"], {}),
            (["f32 512 256", "u32<256 512"], {}),
            (["f32 64 32000", "u32<32000 64"], {}),
            (["f32 1 50257", "u32<50257 1"], {}),
        ],
        torch=1.0,
    ),
    "fused_linear": Row(
        lambda a, b, c: a @ b + c,
        [
            (["f32 512 1024", "f32 1024 1024", "f32 1024"], {}),
            (["f32 1 512", "f32 512 512", "f32 512"], {}),
            (["f32 7 333", "f32 333 1001", "f32 1001"], {}),
        ],
    ),
    "conv2d": Row(
        conv2d,
        [
            (["f32 8 64 56 56", "f32 64 64 3 3", "f32 64"], WIDTHS),
            (["f32 2 3 64 64", "f32 16 3 7 7", "f32 16"], {"stride": (2, 2), "padding": (3, 3)}),
            (["f32 1 17 31 29", "f32 33 17 3 3", "f32 33"], WIDTHS),
            (["f32 8 64 56 56", "f32 256 64 1 1", "f32 256"], {}),
        ],
        torch=1.3,
    ),
    "conv_transpose2d": Row(
        conv_transpose2d,
        [
            (["f32 4 32 28 28", "f32 32 16 4 4", "f32 16"], {"stride": (2, 2), **WIDTHS}),
            (["f32 1 5 17 13", "f32 5 7 3 3", "f32 7"], {"stride": (1, 1), **WIDTHS}),
            (["f32 8 64 14 14", "f32 64 64 2 2", "f32 64"], {"stride": (2, 2), "padding": (0, 0)}),
        ],
    ),
    "causal_conv1d": Row(
        causal_conv1d,
        [
            (["f32 2 512 1027", "f32 512 1 4", "f32 512"], {"use_silu": True}),
            (["f32 1 2048 4", "f32 2048 1 4", "f32 2048"], {"use_silu": True}),
            (["f32 3 37 101", "f32 37 1 3", "f32 37"], {}),
        ],
    ),
    "powi_backward": Row(
        lambda x, g, *, exp: exp * x ** (exp - 1) * g,
        calls(SMALL, SQUARE, ODD, operands=2, exp=3),
    ),
    "inplace_affine": Row(
        lambda x, *, mul, add: x * mul + add, calls(SMALL, SQUARE, ODD, mul=2.5, add=0.5)
    ),
    "reduce_max_to_backward": Row(
        pulled(lambda x: jnp.max(x, 1, keepdims=True)),
        [([SQUARE, "f32 1024 1"], {}), ([SMALL, "f32 64 1"], {}), ([WIDE, "f32 2 1"], {})],
    ),
}
