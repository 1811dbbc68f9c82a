"""How a JAX user without fuel_jax would write each op: the other side of every speed comparison.

One row per op: its plain spelling, and the calls that are timed.  A call's arrays are described as
``"f32 4096 1024"`` (normal), ``"u32<100 512"`` (integers below 100), ``"u8 …"`` and so on.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Row(NamedTuple):
    """An op's plain spelling, the arrays of its calls, and their parameters."""

    plain: Callable[..., Any]
    calls: list[tuple[list[str], dict[str, Any]]]
    at: tuple[int, ...] | None = None  # operands differentiated; None: every float one


SQUARE, ROWS, BATCH = "f32 1024 1024", "f32 64 128", "f32 4 16 33 65"
UNARY = [([x], {}) for x in (SQUARE, ROWS, BATCH)]
BINARY = [([x, x], {}) for x in (SQUARE, ROWS, BATCH)]
POSITIVE = [([x.replace("f32", "f32+")], {}) for x in (SQUARE, ROWS, BATCH)]


def mask(f):
    """A comparison as a mask."""
    return lambda a, b: f(a, b).astype(jnp.uint8)


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
    seen = jnp.arange(k.shape[2]) < lengths[:, None].astype(jnp.int32)
    s = jnp.where(seen[:, None, None], s, -jnp.inf)
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


def selective_scan(u, delta, a, b, c):
    """The recurrence, step by step."""

    def step(h, at_t):
        u, dt, b, c = at_t
        h = jnp.exp(dt[..., None] * a) * h + (dt * u)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    along = [x.swapaxes(0, 1) for x in (u, delta, b, c)]
    h, y = lax.scan(step, jnp.zeros((u.shape[0], *a.shape)), along)
    return y.swapaxes(0, 1), h


def ssd_chunk_scan(x, dt, a, b, c, *, chunk_size):
    """The recurrence, step by step."""

    def step(h, at_t):
        x, dt, b, c = at_t
        decay = jnp.exp(dt * a)[..., None, None]
        h = decay * h + (dt[..., None] * x)[..., None] * b[:, :, None]
        return h, jnp.einsum("bhpn,bhn->bhp", h, c)

    along = [z.swapaxes(0, 1) for z in (x, dt, b, c)]
    h, y = lax.scan(step, jnp.zeros((*x.shape[::2], x.shape[3], b.shape[3])), along)
    return y.swapaxes(0, 1), h


def nf4_matmul(x, packed, absmax, *, block_size):
    """Dequantise, then multiply."""
    from fuel_jax.fused.nf4_matmul import LEVELS

    codes = jnp.stack([packed >> 4, packed & 15], -1).reshape(packed.shape[0], -1)
    levels = jnp.asarray(LEVELS)[codes].reshape(*absmax.shape, block_size)
    return x @ (levels * absmax[..., None]).reshape(packed.shape[0], -1).T


def awq_matmul(x, weight, zeros, scales, *, group_size):
    """Dequantise, then multiply."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
    unpack = lambda w: ((w[..., None] >> shifts) & 15).reshape(w.shape[0], -1).astype(jnp.float32)
    q, z = unpack(weight), unpack(zeros)
    groups = q.shape[1] // group_size
    spread = lambda s: jnp.repeat(s[:, :groups].astype(jnp.float32), group_size, 1)
    return x @ ((q - spread(z)) * spread(scales)).T


def q4_0_matmul(a, words, *, quant_type, k, n):
    """Dequantise Q4_0 blocks, then multiply."""
    raw = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: n * k // 32 * 18]
    blocks = raw.reshape(n, k // 32, 18)
    d = lax.bitcast_convert_type(blocks[..., :2], jnp.float16).astype(jnp.float32)
    qs = blocks[..., 2:]
    q = jnp.concatenate([qs & 15, qs >> 4], -1).astype(jnp.float32) - 8
    return a @ (q * d[..., None]).reshape(n, k).T


QKV = lambda b, h, hk, sq, sk, d: [f"f32 {b} {h} {sq} {d}", *([f"f32 {b} {hk} {sk} {d}"] * 2)]
HEADS = [
    (QKV(1, 8, 8, 2048, 2048, 64), {"causal": True}),
    (QKV(2, 4, 2, 128, 128, 32), {"causal": True}),
    (QKV(1, 8, 2, 1, 4096, 64), {}),
]
HEADS_BACK = [([*x, x[0]], p) for x, p in HEADS[:2]]
CAST = [([x], {"dtype": "bfloat16"}) for x in (SQUARE, ROWS, BATCH)]
LAST, FIRST = {"dim": -1}, {"dim": 0}
WIDE_ROWS = [([x], {}) for x in ("f32 4096 4096", "f32 64 128", "f32 2 50257", "f32 8192 768")]
WIDE_PAIRS = [([*x, *x], p) for x, p in WIDE_ROWS]
EPS = [(x, {"eps": 1e-6}) for x, _ in WIDE_ROWS]
EPS_PAIRS = [(x, {"eps": 1e-6}) for x, _ in WIDE_PAIRS]
PICK = ["f32 4096 512", "u32<4096 1000"]
ADD_ROWS = [*PICK, "f32 1000 512"]
POINTS = ["f32 1024 512", "u32<1024 300 512"]
ADD_POINTS = [*POINTS, "f32 300 512"]

ROW: dict[str, Row] = {
    "relu": Row(jax.nn.relu, UNARY),
    "neg": Row(jnp.negative, UNARY),
    "sqr": Row(jnp.square, UNARY),
    "sqrt": Row(jnp.sqrt, POSITIVE),
    "recip": Row(lambda x: 1 / x, POSITIVE),
    "abs": Row(jnp.abs, UNARY),
    "tanh": Row(jnp.tanh, UNARY),
    "exp": Row(jnp.exp, UNARY),
    "log": Row(jnp.log, POSITIVE),
    "sin": Row(jnp.sin, UNARY),
    "cos": Row(jnp.cos, UNARY),
    "sigmoid": Row(jax.nn.sigmoid, UNARY),
    "silu": Row(jax.nn.silu, UNARY),
    "gelu_tanh": Row(functools.partial(jax.nn.gelu, approximate=True), UNARY),
    "gelu": Row(functools.partial(jax.nn.gelu, approximate=False), UNARY),
    "step": Row(lambda x: (x > 0).astype(x.dtype), UNARY),
    "floor": Row(jnp.floor, UNARY),
    "ceil": Row(jnp.ceil, UNARY),
    "round": Row(jnp.round, UNARY),
    "sign": Row(jnp.sign, UNARY),
    "erf": Row(lax.erf, UNARY),
    "rsqrt": Row(lax.rsqrt, POSITIVE),
    "add": Row(jnp.add, BINARY),
    "sub": Row(jnp.subtract, BINARY),
    "mul": Row(jnp.multiply, BINARY),
    "div": Row(jnp.divide, BINARY),
    "maximum": Row(jnp.maximum, BINARY),
    "minimum": Row(jnp.minimum, BINARY),
    "pow": Row(jnp.power, [(x * 2, p) for x, p in POSITIVE]),
    "rem": Row(jnp.remainder, BINARY),
    "eq": Row(mask(jnp.equal), BINARY),
    "ne": Row(mask(jnp.not_equal), BINARY),
    "lt": Row(mask(jnp.less), BINARY),
    "le": Row(mask(jnp.less_equal), BINARY),
    "gt": Row(mask(jnp.greater), BINARY),
    "ge": Row(mask(jnp.greater_equal), BINARY),
    "where": Row(
        lambda c, a, b: jnp.where(c != 0, a, b), [(["u8<2 1024 1024", SQUARE, SQUARE], {})]
    ),
    "affine": Row(lambda x, *, mul, add: x * mul + add, [([SQUARE], {"mul": 2.5, "add": 0.5})]),
    "clamp": Row(
        lambda x, *, min, max: jnp.clip(x, min, max), [([SQUARE], {"min": -1.0, "max": 1.0})]
    ),
    "powi": Row(lambda x, *, exp: x**exp, [([SQUARE], {"exp": 3}), ([SQUARE], {"exp": -2})]),
    "powi_backward": Row(
        lambda x, g, *, exp: exp * x ** (exp - 1) * g, [([SQUARE] * 2, {"exp": 3})]
    ),
    "inplace_affine": Row(
        lambda x, *, mul, add: x * mul + add, [([SQUARE], {"mul": 2.5, "add": 0.5})]
    ),
    "sum_reduce": Row(
        lambda x, *, dims: jnp.sum(x, dims),
        [([SQUARE], {"dims": (1,)}), ([SQUARE], {"dims": (0,)}), ([BATCH], {"dims": (0, 2)})],
    ),
    "max_reduce": Row(
        lambda x, *, dims: jnp.max(x, dims),
        [([SQUARE], {"dims": (1,)}), ([SQUARE], {"dims": (0,)})],
    ),
    "min_reduce": Row(
        lambda x, *, dims: jnp.min(x, dims),
        [([SQUARE], {"dims": (1,)}), ([SQUARE], {"dims": (0,)})],
    ),
    "mean_reduce": Row(
        lambda x, *, dims: jnp.mean(x, dims),
        [([SQUARE], {"dims": (1,)}), ([SQUARE], {"dims": (0,)})],
    ),
    "reduce_sum_to": Row(
        lambda x, *, shape: jnp.sum(x, 0, keepdims=True), [([SQUARE], {"shape": (1, 1024)})]
    ),
    "reduce_max_to": Row(
        lambda x, *, shape: jnp.max(x, 1, keepdims=True), [([SQUARE], {"shape": (1024, 1)})]
    ),
    "reduce_max_to_backward": Row(
        pulled(lambda x: jnp.max(x, 1, keepdims=True)), [([SQUARE, "f32 1024 1"], {})]
    ),
    "argmax_dim": Row(lambda x, *, dim: jnp.argmax(x, dim), [([SQUARE], LAST), ([SQUARE], FIRST)]),
    "argmin_dim": Row(lambda x, *, dim: jnp.argmin(x, dim), [([SQUARE], LAST), ([SQUARE], FIRST)]),
    "cumsum": Row(lambda x, *, dim: jnp.cumsum(x, dim), [([SQUARE], LAST), ([SQUARE], FIRST)]),
    "cast": Row(lambda x, *, dtype: x.astype(dtype), CAST),
    "flip": Row(lambda x, *, dim: jnp.flip(x, dim), [([SQUARE], LAST), ([SQUARE], FIRST)]),
    "roll": Row(
        lambda x, *, dim, shift: jnp.roll(x, shift, dim), [([SQUARE], {"dim": 1, "shift": 100})]
    ),
    "pad": Row(
        lambda x, *, padding: jnp.pad(x, padding), [([SQUARE], {"padding": ((1, 2), (3, 4))})]
    ),
    "pad_backward": Row(
        lambda g, *, padding: g[1:-2, 3:-4], [([SQUARE], {"padding": ((1, 2), (3, 4))})]
    ),
    "triu": Row(lambda x: jnp.triu(x), UNARY),
    "tril": Row(lambda x: jnp.tril(x), UNARY),
    "masked_fill": Row(
        lambda x, m, *, value: jnp.where(m != 0, value, x),
        [([SQUARE, "u8<2 1024 1024"], {"value": -1.0})],
    ),
    "concat": Row(
        lambda *xs, dim: jnp.concatenate(xs, dim),
        [([SQUARE] * 3, {"dim": 1}), ([SQUARE] * 2, FIRST)],
    ),
    "copy": Row(lambda x: jnp.copy(x), [([SQUARE], {})]),
    "index_select": Row(
        lambda x, i, *, dim: jnp.take(x, i, dim), [(PICK, FIRST), (["f32 512 4096", PICK[1]], LAST)]
    ),
    "gather": Row(
        lambda x, i, *, dim: jnp.take_along_axis(x, i.astype(jnp.int32), dim), [(POINTS, FIRST)]
    ),
    "index_add": Row(lambda x, i, s, *, dim: x.at[i].add(s), [(ADD_ROWS, FIRST)]),
    "scatter_add": Row(
        lambda x, i, s, *, dim: x.at[i, jnp.arange(512)].add(s), [(ADD_POINTS, FIRST)]
    ),
    "nonzero_indices": Row(
        lambda x: (jnp.flatnonzero(x, size=x.size, fill_value=x.size), jnp.count_nonzero(x)),
        [(["u32<2 65536"], {})],
    ),
    "write_slice": Row(
        lambda d, s, *, ranges: d.at[10:20, 5:9].set(s),
        [([SQUARE, "f32 10 4"], {"ranges": ((10, 20), (5, 9))})],
    ),
    "write_slice_doff": Row(
        lambda d, s, o, *, axis: lax.dynamic_update_slice(d, s, (o.astype(jnp.int32), 0)),
        [([SQUARE, "f32 1 1024", "u32<100"], {"axis": 0})],
    ),
    "write_slice_rotating": Row(
        lambda d, s, p, *, axis, modulus: d.at[(p + jnp.arange(2)) % modulus].set(s),
        [([SQUARE, "f32 2 1024", "u32<100"], {"axis": 0, "modulus": 1000})],
    ),
    "matmul": Row(
        jnp.matmul,
        [
            (["f32 1024 1024", "f32 1024 1024"], {}),
            (["f32 8 64 128", "f32 8 128 96"], {}),
            (["f32 1 4096", "f32 4096 4096"], {}),
        ],
    ),
    "fused_linear": Row(
        lambda a, b, c: a @ b + c,
        [
            (["f32 512 1024", "f32 1024 1024", "f32 1024"], {}),
            (["f32 1 512", "f32 512 512", "f32 512"], {}),
        ],
    ),
    "conv2d": Row(
        conv2d,
        [
            (["f32 8 64 56 56", "f32 64 64 3 3", "f32 64"], {"padding": (1, 1)}),
            (["f32 2 3 64 64", "f32 16 3 7 7", "f32 16"], {"stride": (2, 2), "padding": (3, 3)}),
        ],
    ),
    "conv_transpose2d": Row(
        conv_transpose2d,
        [(["f32 4 32 28 28", "f32 32 16 4 4", "f32 16"], {"stride": (2, 2), "padding": (1, 1)})],
    ),
    "softmax_last_dim": Row(lambda x: jax.nn.softmax(x, -1), WIDE_ROWS),
    "softmax_last_dim_backward": Row(
        lambda y, g: y * (g - jnp.sum(y * g, -1, keepdims=True)), WIDE_PAIRS
    ),
    "log_softmax_last_dim": Row(lambda x: jax.nn.log_softmax(x, -1), WIDE_ROWS),
    "log_softmax_last_dim_backward": Row(
        lambda y, g: g - jnp.exp(y) * jnp.sum(g, -1, keepdims=True), WIDE_PAIRS
    ),
    "rms_norm_last_dim": Row(functools.partial(normed, centre=False), EPS),
    "rms_norm_last_dim_backward": Row(pulled(functools.partial(normed, centre=False)), EPS_PAIRS),
    "layer_norm_last_dim": Row(functools.partial(normed, centre=True), EPS),
    "layer_norm_last_dim_backward": Row(pulled(functools.partial(normed, centre=True)), EPS_PAIRS),
    "rope": Row(
        rope,
        [
            (["f32 1 8 2048 64", "f32 2048 64", "f32 2048 64"], {}),
            (["f32 2 4 1 128", "f32 1 128", "f32 1 128"], {}),
        ],
        at=(0,),
    ),
    "flash_attn": Row(attention, HEADS),
    "flash_attn_backward_q": Row(attention_gradient(0), HEADS_BACK),
    "flash_attn_backward_k": Row(attention_gradient(1), HEADS_BACK),
    "flash_attn_backward_v": Row(attention_gradient(2), HEADS_BACK),
    "paged_attn": Row(
        paged,
        [
            (
                ["f32 8 8 1 64", *["f32 256 16 2 64"] * 2, "u32<256 8 32", "u32<500 8"],
                {},
            )
        ],
    ),
    "fused_softmax_cross_entropy": Row(
        cross_entropy,
        [(["f32 2048 50257", "u32<50257 2048"], {}), (["f32 512 256", "u32<256 512"], {})],
    ),
    "causal_conv1d": Row(
        causal_conv1d, [(["f32 2 512 1027", "f32 512 1 4", "f32 512"], {"use_silu": True})]
    ),
    "selective_scan": Row(
        selective_scan,
        [
            (
                [
                    "f32 1 1024 256",
                    "f32+ 1 1024 256",
                    "f32- 256 16",
                    "f32 1 1024 16",
                    "f32 1 1024 16",
                ],
                {},
            )
        ],
    ),
    "ssd_chunk_scan": Row(
        ssd_chunk_scan,
        [
            (
                ["f32 1 1024 8 64", "f32+ 1 1024 8", "f32- 8", *["f32 1 1024 8 64"] * 2],
                {"chunk_size": 64},
            )
        ],
    ),
    "qmatmul": Row(
        q4_0_matmul,
        [
            (["f32 1 4096", f"q4_0 {4096 * 4096}"], {"quant_type": "Q4_0", "k": 4096, "n": 4096}),
            (["f32 128 1024", f"q4_0 {1024 * 1024}"], {"quant_type": "Q4_0", "k": 1024, "n": 1024}),
        ],
    ),
    "nf4_matmul": Row(
        nf4_matmul,
        [
            (["f32 1 4096", "u8<256 4096 2048", "f32+ 4096 64"], {"block_size": 64}),
            (["f32 128 1024", "u8<256 1024 512", "f32+ 1024 16"], {"block_size": 64}),
        ],
        at=(0,),
    ),
    "awq_matmul": Row(
        awq_matmul,
        [
            (
                ["f32 1 4096", "u32 4096 512", "u32 4096 4", "f16+ 4096 32"],
                {"group_size": 128},
            ),
            (["f32 128 1024", "u32 1024 128", "u32 1024 1", "f16+ 1024 8"], {"group_size": 128}),
        ],
        at=(0,),
    ),
}
