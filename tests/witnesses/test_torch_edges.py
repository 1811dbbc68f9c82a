"""PyTorch where its own samples do not go: infinities, NaN, ties, masks, repeated indices.

Values and gradients against ``torch.autograd`` in float64.  Where ours is decided to differ, the
decided value is tested, and a line says so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax as F

from .torch_adapters import QUICKLY

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn.functional
INF, NAN = np.inf, np.nan


def by_torch(f, *arrays, cotangent=None):
    """Value, and the gradient of every float array; None where there is none."""
    tensors = [torch.tensor(x) for x in arrays]
    wrt = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    y = f(*tensors)
    if not y.requires_grad:
        return y.numpy(), [None] * len(wrt)
    ct = torch.ones_like(y) if cotangent is None else torch.tensor(cotangent)
    grads = torch.autograd.grad(y, wrt, ct, allow_unused=True)
    return y.detach().numpy(), [None if g is None else g.numpy() for g in grads]


def by_us(f, *arrays, cotangent=None):
    """The same of a function of arrays."""
    arrays = [jnp.asarray(x) for x in arrays]
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(arrays, ct):
        def ours(*active):
            return f(
                *[dict(zip(floats, active, strict=True)).get(i, x) for i, x in enumerate(arrays)]
            )

        y, pull = jax.vjp(ours, *[arrays[i] for i in floats])
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return y, [None] * len(floats)
        return y, pull(jnp.ones_like(y) if ct is None else ct.astype(y.dtype))

    return both(arrays, None if cotangent is None else jnp.asarray(cotangent))


def near(got, want, bound, where=True):
    """Within ``bound`` of each wanted value, or of 1 where that is smaller; infinities equal."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(got - want) <= bound * np.maximum(np.abs(want), 1))
    off &= ~((got == want) | (np.isnan(got) & np.isnan(want))) & where
    assert not off.any(), [
        (tuple(map(int, i)), got[tuple(i)], want[tuple(i)]) for i in np.argwhere(off)
    ]


def agree(op, ours, theirs, *arrays, cotangent=None):
    """Value and gradients, by our promise of precision relative to the largest."""
    bound = op.precision.tolerance(np.float64)
    y, grads = by_us(ours, *arrays, cotangent=cotangent)
    want, wanted = by_torch(theirs, *arrays, cotangent=cotangent)
    for got, right in zip((y, *grads), (want, *wanted), strict=True):
        if right is not None:
            scale = np.abs(np.where(np.isfinite(right), right, 0)).max(initial=0) or 1
            near(np.asarray(got) / scale, right / scale, bound)


def seeded(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def slope_of(*shape):
    """A cotangent; the operand itself would be none: much of a norm's gradient cancels then."""
    return seeded(*shape, seed=1)


# -- elementwise ---------------------------------------------------------------------------

HALVES = [0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 7, 20, 100, 1e10, INF]
UNARY = {
    "abs": torch.abs, "neg": torch.neg, "sqr": torch.square, "sqrt": torch.sqrt,
    "recip": torch.reciprocal, "tanh": torch.tanh, "exp": torch.exp, "log": torch.log,
    "sin": torch.sin, "cos": torch.cos, "sigmoid": torch.sigmoid, "silu": nn.silu, "gelu": nn.gelu,
    "gelu_tanh": lambda x: nn.gelu(x, approximate="tanh"), "relu": nn.relu, "floor": torch.floor,
    "ceil": torch.ceil, "round": torch.round, "sign": torch.sign, "erf": torch.erf,
    "rsqrt": torch.rsqrt,
}  # fmt: skip
TOP = np.finfo(np.float64).max
DECIDED = {"sign": {NAN: NAN}}  # PyTorch has 0
SLOPES = {  # of what is x or 0 far out; PyTorch has NaN
    "silu": {INF: 1, -INF: 0}, "gelu": {INF: 1, -INF: 0},
    "gelu_tanh": {INF: 1, -INF: 0, TOP: 1, -TOP: 0},
}  # fmt: skip
UNSIGNED = {"sign", "maximum", "minimum"}  # whose zeros have no sign in PyTorch, or another


def grid(dtype):
    top = np.finfo(dtype).max
    return np.array([*HALVES, top, *(-np.array([*HALVES, top])), NAN], dtype)


def corrected(want, x, table):
    for at, value in table.items():
        want = np.where(np.isnan(x) if np.isnan(at) else x == at, value, want)
    return want


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    """PyTorch in float64, also of float32: its own float32 GELU is NaN at inf, and 0 below −6."""
    x, op = grid(dtype), getattr(F, name)
    y, (slope,) = by_us(op, x)
    want, (wanted,) = by_torch(UNARY[name], x.astype(np.float64))
    with np.errstate(over="ignore"):
        want, wanted = (v.astype(dtype).astype(np.float64) for v in (want, wanted))
    want = corrected(want, x, DECIDED.get(name, {}))
    near(y, want, op.precision.tolerance(dtype))
    if name not in UNSIGNED:
        zero = want == 0
        np.testing.assert_array_equal(np.signbit(y)[zero], np.signbit(want)[zero])
    wanted = corrected(wanted, x, SLOPES.get(name, {}))
    # Where the value is NaN there is no slope to agree on.
    bounded = ~np.isnan(want) | np.isin(x, list(SLOPES.get(name, {})))
    near(slope, wanted, op.precision.tolerance(dtype), bounded)


def test_step():
    """PyTorch's Heaviside function is NaN at NaN."""
    x = grid(np.float64)
    want = torch.heaviside(torch.tensor(x), torch.zeros(1, dtype=torch.float64)).numpy()
    np.testing.assert_array_equal(F.step(x), corrected(want, x, {NAN: 0}))
    assert not by_us(F.step, x)[1][0].any()


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum, "rem": torch.remainder, "eq": torch.eq,
    "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    """Every pair of edge values; ties are among them, and both signs of zero, inf and remainder.

    Left out: remainders of a quotient that overflows, NaN in PyTorch and exact here as in
    NumPy, and the slope of ±inf / ±max, for 1 / max is subnormal and XLA flushes it to 0.
    """
    a, b = (v.ravel() for v in np.meshgrid(*[np.append(grid(np.float64), [0.1, -0.3])] * 2))
    op = getattr(F, name)
    bound = op.precision.tolerance(np.float64)
    y, slopes = by_us(op, a, b)
    want, wanted = by_torch(BINARY[name], a, b)
    with np.errstate(all="ignore"):
        overflows = np.isfinite(a) & (b != 0) & np.isinf(a / b) & (name == "rem")
        want = np.where(overflows, np.remainder(a, b), want)
    near(y, want, bound)
    if name not in UNSIGNED:
        zero = (want == 0) & ~overflows
        np.testing.assert_array_equal(np.signbit(y)[zero], np.signbit(want)[zero])
    sloping = ~np.isnan(want) & ~overflows
    sloping &= ~(np.isinf(a) & (np.abs(b) == np.finfo(b.dtype).max) & (name == "div"))
    for got, slope in zip(slopes, wanted, strict=True):
        if slope is not None:
            near(got, slope, bound, sloping)


@pytest.mark.parametrize("bounds", [(-1.5, 2.5), (1, 1), (-INF, 0), (0, INF), (-INF, INF)])
def test_clamp(bounds):
    """A bound passes the whole gradient, in PyTorch as well."""
    x, (low, high) = grid(np.float64)[:-1], bounds
    agree(F.clamp, lambda x: F.clamp(x, min=low, max=high), lambda x: x.clamp(low, high), x)
    assert np.isnan(F.clamp(jnp.array([NAN]), min=low, max=high)).all()


@pytest.mark.parametrize("exp", [-3, -1, 0, 1, 2, 5])
def test_powers(exp):
    x = np.array([0.0, -0.0, 0.5, -0.5, 1, -2, 3.5, INF, -INF, NAN])
    want, (slope,) = by_torch(lambda x: x**exp, x)
    y, (got,) = by_us(lambda x: F.powi(x, exp=exp), x)
    for ours, theirs in ((y, want), (got, slope)):
        near(ours, theirs, 1e-14)
    near(F.powi_backward(x, jnp.ones_like(x), exp=exp), slope, 1e-14)
    np.testing.assert_array_equal(np.signbit(y)[want == 0], np.signbit(want)[want == 0])


def test_what_is_not_selected_does_not_leak():
    a, b = np.array([1.0, INF, NAN, 2]), np.array([NAN, 3.0, INF, -INF])
    mask = np.array([True, False, True, True])
    agree(F.where, F.where, torch.where, mask, a, b)
    filled = (
        lambda x, m: F.masked_fill(x, m, value=-1.5),
        lambda x, m: x.masked_fill(m, -1.5),
    )
    agree(F.masked_fill, *filled, a, mask)
    behind = (  # a slope of 0 times the inf behind it
        lambda x, m: F.where(m, x, F.log(x)),
        lambda x, m: torch.where(m, x, torch.log(x)),
    )
    agree(F.where, *behind, np.array([1.0, 2, 3, 4]), mask)


# -- reductions ----------------------------------------------------------------------------

TIES = np.array([[3.0, 1, 3, 3], [2, 2, 2, 2], [-0.0, 0, -1, 0], [INF, 1, INF, 0], [-INF] * 4])
WITH_NAN = np.array([[1.0, NAN, 3, NAN], [NAN, 5, 5, 1], [INF, -INF, NAN, 0]])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_ties_share_the_gradient(dim):
    """As in ``torch.amax``; ``torch.max`` along an axis gives it to one of them."""
    cotangent = slope_of(*np.delete(TIES.shape, dim))
    for op, theirs in ((F.max_reduce, torch.amax), (F.min_reduce, torch.amin)):
        ours = lambda x, op=op: op(x, dims=dim)
        agree(op, ours, lambda x, f=theirs: f(x, dim), TIES, cotangent=cotangent)
    shape = tuple(1 if a == dim % 2 else n for a, n in enumerate(TIES.shape))
    theirs = lambda x: torch.amax(x, dim, keepdim=True)
    g = np.expand_dims(cotangent, dim)
    agree(F.reduce_max_to, lambda x: F.reduce_max_to(x, shape=shape), theirs, TIES, cotangent=g)
    want = by_torch(theirs, TIES, cotangent=g)[1][0]
    near(F.reduce_max_to_backward(TIES, g), want, 1e-14)


@pytest.mark.parametrize("x", [TIES, WITH_NAN], ids=["ties", "nan"])
@pytest.mark.parametrize("dim", [0, 1])
def test_extremes_and_where_they_are(x, dim):
    """The first of equals, and the first NaN."""
    t = torch.tensor(x)
    np.testing.assert_array_equal(F.max_reduce(x, dims=dim), torch.amax(t, dim))
    np.testing.assert_array_equal(F.min_reduce(x, dims=dim), torch.amin(t, dim))
    np.testing.assert_array_equal(F.argmax_dim(x, dim=dim), torch.argmax(t, dim))
    np.testing.assert_array_equal(F.argmin_dim(x, dim=dim), torch.argmin(t, dim))


@pytest.mark.parametrize("x", [TIES, WITH_NAN, seeded(3, 0)], ids=["ties", "nan", "empty"])
def test_sums(x):
    cotangent = slope_of(*x.shape)
    agree(F.sum_reduce, lambda x: F.sum_reduce(x, dims=1), lambda x: x.sum(1), x)
    agree(F.cumsum, lambda x: F.cumsum(x, dim=1), lambda x: x.cumsum(1), x, cotangent=cotangent)
    to = (lambda x: F.reduce_sum_to(x, shape=(1, x.shape[1])), lambda x: x.sum(0, keepdim=True))
    agree(F.reduce_sum_to, *to, x)
    if x.size:
        agree(F.mean_reduce, lambda x: F.mean_reduce(x, dims=1), lambda x: x.mean(1), x)


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


# -- indices and positions -----------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_repeated_indices(dim):
    """Added up where written, and in the gradient where read."""
    x, src = seeded(4, 5), slope_of(4, 5)
    line, points = np.array([1, 1, 3, 1]), np.array([[1, 0, 1, 1, 3]] * 3)
    lines = src[:, :4] if dim else src
    of = lambda f: lambda *a: f(a[0], dim, *a[1:])
    by = lambda op: lambda *a: op(*a, dim=dim)
    agree(F.index_add, by(F.index_add), of(torch.index_add), x, line, lines, cotangent=src)
    agree(
        F.scatter_add, by(F.scatter_add), of(torch.scatter_add), x, points, src[:3], cotangent=src
    )
    agree(F.index_select, by(F.index_select), of(torch.index_select), x, line, cotangent=lines)
    agree(F.gather, by(F.gather), of(torch.gather), x, points, cotangent=src[:3])


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [((0, 0), (2, 1), (3, 0)), ((0, 0), (0, 0), (0, 3))])
def test_padding(mode, padding):
    x = seeded(2, 4, 5)
    g = slope_of(*(n + a + b for n, (a, b) in zip(x.shape, padding, strict=True)))
    flat = [p for pair in padding[:0:-1] for p in pair]
    theirs = lambda x: nn.pad(x[None], flat, mode=mode)[0]
    agree(F.pad, lambda x: F.pad(x, padding=padding, mode=mode), theirs, x, cotangent=g)
    want = by_torch(theirs, x, cotangent=g)[1][0]
    near(F.pad_backward(g, padding=padding, mode=mode), want, 1e-12)


MOVES = {
    "roll far": (lambda x: F.roll(x, dim=1, shift=-13), lambda x: x.roll(-13, 1)),
    "roll none": (lambda x: F.roll(x, dim=-1, shift=10), lambda x: x.roll(10, -1)),
    "flip": (lambda x: F.flip(x, dim=-2), lambda x: x.flip(-2)),
    "triu far": (lambda x: F.triu(x, diagonal=100), lambda x: x.triu(100)),
    "triu": (lambda x: F.triu(x, diagonal=-3), lambda x: x.triu(-3)),
    "tril far": (lambda x: F.tril(x, diagonal=100), lambda x: x.tril(100)),
    "tril": (lambda x: F.tril(x, diagonal=-2), lambda x: x.tril(-2)),
    "concat": (lambda x: F.concat(x, x, dim=-1), lambda x: torch.cat([x, x], -1)),
    "copy": (F.copy, torch.clone),
    "cast": (lambda x: F.cast(x, dtype="F64"), lambda x: x.double()),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    """NaN and inf move as they are, and are dropped without a trace."""
    x = np.where(seeded(2, 4, 5) > 0.5, INF, seeded(2, 4, 5))
    x[0, 3, 0] = x[1, 0, 4] = NAN
    ours, theirs = MOVES[name]
    agree(F.roll, ours, theirs, x, cotangent=slope_of(*theirs(torch.tensor(x)).shape))


@pytest.mark.parametrize("capacity", [None, 2, 9])
def test_nonzero(capacity):
    """NaN is not zero, −0 is."""
    x = np.array([[0.0, -0.0, NAN], [INF, 1e-300, 0]])
    want = torch.tensor(x).flatten().nonzero()[:, 0].numpy()
    indices, count = F.nonzero_indices(x, capacity=capacity)
    width = x.size if capacity is None else capacity
    assert indices.tolist() == [*want, *[x.size] * width][:width]
    assert count.tolist() == [len(want)]
