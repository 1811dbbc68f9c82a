"""PyTorch where its own samples do not go: infinities, NaN, ties, repeated indices.

Values and gradients against ``torch.autograd`` in float64.  Where ours is decided to differ, the
decided value is tested, and a line says so.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax as F

from .against_torch import agree, by_torch, by_us, near, seeded, slope_of, torch

nn = torch.nn.functional
INF, NAN = np.inf, np.nan


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
