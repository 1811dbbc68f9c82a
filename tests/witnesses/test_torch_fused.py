"""PyTorch and the fused ops where its own samples do not go: masked rows, GQA, grouped windows.

Values and gradients against ``torch.autograd`` in float64.  Where ours is decided to differ, the
decided value is tested, and a line says so.
"""

import functools

import numpy as np
import pytest

import fuel_jax as F

from .against_torch import agree, by_torch, by_us, near, seeded, slope_of, torch

nn = torch.nn.functional
INF, NAN = np.inf, np.nan


# -- softmax, norms, loss ------------------------------------------------------------------

ROWS = {
    "plain": seeded(3, 7),
    "one": seeded(3, 1),
    "large": 1e10 + np.arange(12.0).reshape(3, 4),
    "huge": np.array([[1e308, -1e308, 0, 1e308], [-1e308] * 4]),
    "masked": np.array([[1.0, -INF, 2, -INF], [-INF, -INF, -INF, 3]]),
    "nothing": np.full((2, 3), -INF),  # NaN
    "infinite": np.array([[INF, 1.0, 2], [NAN, 1, 2]]),  # NaN
}


@pytest.mark.parametrize("name", ROWS)
def test_softmax(name):
    """Each by its gradient and by its own backward op."""
    x = ROWS[name]
    g = slope_of(*x.shape)
    for op, backward, theirs in (
        (F.softmax_last_dim, F.softmax_last_dim_backward, torch.softmax),
        (F.log_softmax_last_dim, F.log_softmax_last_dim_backward, torch.log_softmax),
    ):
        last = lambda x, f=theirs: f(x, -1)
        agree(op, op, last, x, cotangent=g)
        y, (want,) = by_torch(last, x, cotangent=g)
        near(backward(y, g), want, 1e-12)


NORMS = {
    "plain": (seeded(3, 7), 1e-5),
    "far": (1e4 + seeded(3, 8), 1e-5),
    "large": (1e100 * seeded(3, 8), 1e-5),  # of 1e150 PyTorch's slope of rms_norm is off by a third
    "zero": (np.zeros((2, 5)), 1e-5),
    "small": (1e-8 * seeded(3, 8), 1e-6),
    "without eps": (seeded(2, 3, 6), 0.0),
    "nan": (np.array([[1.0, NAN, 2], [1, 2, 4]]), 1e-5),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    (x, eps), n = NORMS[name], NORMS[name][0].shape[-1]
    g = slope_of(*x.shape)
    for op, backward, theirs in (
        (F.layer_norm_last_dim, F.layer_norm_last_dim_backward, nn.layer_norm),
        (F.rms_norm_last_dim, F.rms_norm_last_dim_backward, nn.rms_norm),
    ):
        last = lambda x, f=theirs: f(x, (n,), eps=eps)
        agree(op, lambda x, op=op: op(x, eps=eps), last, x, cotangent=g)
        want = by_torch(last, x, cotangent=g)[1][0]
        scale = np.nanmax(np.abs(want))
        near(np.asarray(backward(x, g, eps=eps)) / scale, want / scale, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_cross_entropy(reduction, ignore_index):
    """Kept and ignored rows, with masked classes and large logits; the last hits a masked class."""
    x = np.array(
        [[1.0, 2, 3], [0, -INF, 1], [1e10, 0, 1e10], [5, -5, 0.5], [1, -2, 3], [0, -INF, 2]]
    )
    t = np.array([0, 2, 0, ignore_index, ignore_index, 1])
    g = slope_of(6) if reduction == "none" else None
    params = {"reduction": reduction, "ignore_index": ignore_index}
    ours = lambda x, t: F.fused_softmax_cross_entropy(x, t, **params)
    theirs = lambda x, t: nn.cross_entropy(x, t, **params)
    agree(F.fused_softmax_cross_entropy, ours, theirs, x, t, cotangent=g)


def test_cross_entropy_of_ignored_rows_that_hold_anything():
    """Their slope is 0; PyTorch's is NaN, of softmax times 0."""
    x, t = np.array([[1.0, 2, 3], [NAN, INF, 0]]), np.array([1, -100])
    y, (slope,) = by_us(F.fused_softmax_cross_entropy, x, t)
    want, (wanted,) = by_torch(nn.cross_entropy, x, t)
    assert np.isnan(wanted[1]).all()
    near(y, want, 2e-7)
    near(slope, np.stack([wanted[0], np.zeros(3)]), 2e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_nothing_kept(reduction):
    """The mean is 0, as in Fuel; PyTorch has 0/0."""
    x, t = seeded(2, 3), np.array([-100, -100])
    y, (slope,) = by_us(lambda x, t: F.fused_softmax_cross_entropy(x, t, reduction=reduction), x, t)
    want, (wanted,) = by_torch(lambda x, t: nn.cross_entropy(x, t, reduction=reduction), x, t)
    if reduction == "mean":
        assert np.isnan(want)
        want, wanted = np.zeros(()), np.zeros_like(x)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(slope, wanted)


# -- attention -----------------------------------------------------------------------------


def dense(q, k, v, causal=False, left=None, right=None, softcap=None, alibi=None, scale=None):
    """Written out: PyTorch has none of a window, a soft cap and ALiBi."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])
    s = s if alibi is None else s - alibi[:, None, None] * (i - j).abs()
    seen = (j <= i) if causal else torch.full(s.shape[-2:], True)
    seen = seen if left is None else seen & (j >= i - left)
    seen = seen if right is None else seen & (j <= i + right)
    return s.masked_fill(~seen, -INF).softmax(-1) @ v


def sdpa(**options):
    return functools.partial(nn.scaled_dot_product_attention, enable_gqa=True, **options)


def lower_right(q, k, v):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return sdpa(attn_mask=seen)(q, k, v)


ATTENTION = {  # query heads, key heads, queries, keys; our parameters; PyTorch's
    "square": ((4, 4, 5, 5), {"causal": True}, sdpa(is_causal=True)),
    "grouped": ((4, 2, 5, 5), {"causal": True}, sdpa(is_causal=True)),
    "one key head": ((3, 1, 4, 6), {}, sdpa()),
    "scaled": ((2, 2, 4, 6), {"softmax_scale": 0.3}, sdpa(scale=0.3)),
    "decoding": ((2, 2, 1, 6), {"causal": True}, lower_right),
    "lower right": ((4, 2, 3, 6), {"causal": True}, lower_right),
    "window": (
        (2, 1, 5, 5),
        {"causal": True, "window_size_left": 2},
        functools.partial(dense, causal=True, left=2),
    ),
    "both sides": (
        (2, 1, 4, 7),
        {"window_size_left": 1, "window_size_right": 2},
        functools.partial(dense, left=1, right=2),
    ),
    "capped": (
        (2, 2, 4, 4),
        {"causal": True, "softcap": 1.5},
        functools.partial(dense, causal=True, softcap=1.5),
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    (h, hk, sq, sk), params, theirs = ATTENTION[name]
    q, k, v, g = (
        seeded(2, h, sq, 4),
        seeded(2, hk, sk, 4),
        seeded(2, hk, sk, 3),
        seeded(2, h, sq, 3),
    )
    agree(F.flash_attn, lambda *a: F.flash_attn(*a, **params), theirs, q, k, v, cotangent=g)
    if name in ("grouped", "both sides"):
        wanted = by_torch(theirs, q, k, v, cotangent=g)[1]
        backwards = F.flash_attn_backward_q, F.flash_attn_backward_k, F.flash_attn_backward_v
        for backward, want in zip(backwards, wanted, strict=True):
            near(backward(q, k, v, g, **params), want, 1e-12)


def test_alibi():
    """With the gradient of the slopes."""
    shapes = (1, 3, 4, 4), (1, 3, 6, 4), (1, 3, 6, 4), (3,)
    q, k, v, slopes = (seeded(*shape, seed=i) for i, shape in enumerate(shapes))
    theirs = lambda q, k, v, alibi: dense(q, k, v, causal=True, alibi=alibi)
    ours = lambda q, k, v, alibi: F.flash_attn(q, k, v, alibi, causal=True)
    agree(F.flash_attn, ours, theirs, q, k, v, slopes, cotangent=seeded(1, 3, 4, 4, seed=4))


def test_rows_that_see_no_key():
    """0, with gradients of 0, as in FlashAttention; PyTorch's written-out softmax has NaN."""
    shapes = (1, 2, 5, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)
    q, k, v, g = (seeded(*shape, seed=i) for i, shape in enumerate(shapes))
    y, (dq, dk, dv) = by_us(lambda *a: F.flash_attn(*a, causal=True), q, k, v, cotangent=g)
    seeing = functools.partial(dense, causal=True)
    want, (wq, wk, wv) = by_torch(seeing, q[:, :, 2:], k, v, cotangent=g[:, :, 2:])
    assert not y[:, :, :2].any()
    assert not dq[:, :, :2].any()
    for got, wanted in ((y[:, :, 2:], want), (dq[:, :, 2:], wq), (dk, wk), (dv, wv)):
        near(got, wanted, 1e-12)


# -- convolutions --------------------------------------------------------------------------

WINDOWS = {  # x, w; options
    "uneven": ((2, 3, 7, 6), (4, 3, 3, 2), {"stride": (2, 3), "padding": (1, 2)}),
    "dilated": ((1, 2, 9, 7), (3, 2, 3, 2), {"dilation": (2, 3), "padding": (2, 1)}),
    "grouped": ((2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "stride": (2, 1), "dilation": (1, 2)}),
    "depthwise": ((2, 3, 6, 5), (6, 1, 2, 3), {"groups": 3, "padding": (1, 1)}),
    "strided past the end": ((1, 1, 8, 8), (1, 1, 3, 3), {"stride": (3, 4)}),
    "one by one": ((2, 3, 4, 4), (2, 3, 1, 1), {"stride": (2, 2)}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_conv2d(name):
    x, w, options = WINDOWS[name]
    arrays = seeded(*x), seeded(*w, seed=2), seeded(w[0], seed=3)
    theirs = lambda *a: nn.conv2d(*a, **options)
    g = slope_of(*by_torch(theirs, *arrays)[0].shape)
    agree(F.conv2d, lambda *a: F.conv2d(*a, **options), theirs, *arrays, cotangent=g)


SPREADS = {
    "uneven": ((2, 3, 3, 4), (3, 2, 3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    "more at the end": ((1, 2, 3, 3), (2, 3, 2, 3), {"stride": (3, 2), "output_padding": (2, 1)}),
    "grouped": ((2, 4, 3, 3), (4, 3, 2, 2), {"groups": 2, "stride": (2, 2), "dilation": (2, 1)}),
    "output padding below the dilation": (
        (1, 2, 3, 4),
        (2, 1, 2, 2),
        {"dilation": (3, 2), "output_padding": (2, 1), "padding": (2, 1)},
    ),
    "depthwise": ((2, 3, 4, 3), (3, 1, 3, 3), {"groups": 3, "padding": (1, 1)}),
}


@pytest.mark.parametrize("name", SPREADS)
def test_conv_transpose2d(name):
    x, w, options = SPREADS[name]
    arrays = seeded(*x), seeded(*w, seed=2), seeded(w[1] * options.get("groups", 1), seed=3)
    theirs = lambda *a: nn.conv_transpose2d(*a, **options)
    g = slope_of(*by_torch(theirs, *arrays)[0].shape)
    ours = lambda *a: F.conv_transpose2d(*a, **options)
    agree(F.conv_transpose2d, ours, theirs, *arrays, cotangent=g)
