"""The equations by which programs are brought into one form, each a row; and what they must not
equate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from fuel_jax._fuse.program import flatten
from fuel_jax._fuse.rules import Reader
from fuel_jax._fuse.terms import Terms

ROWS, WIDTH = 3, 8


def view(terms, f, *avals):
    """How the terms see the result of ``f``."""
    program = flatten(jax.make_jaxpr(f)(*avals))
    reader = Reader(terms)
    given = [reader.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(avals)]
    return reader.read(program, given)[0]


def causal(n, m):
    return jnp.arange(m) <= jnp.arange(n)[:, None] + (m - n)


mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
W = jax.ShapeDtypeStruct((WIDTH, 5), "float32")
Y = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
S = jax.ShapeDtypeStruct((6, 6), "float32")
Q = jax.ShapeDtypeStruct((2, ROWS, WIDTH), "float32")
N = jax.ShapeDtypeStruct((4,), "int32")

EQUAL = {
    # numbers in sums and products
    "x·x = x²": (lambda x: x * x, lambda x: jnp.square(x), X),
    "x² = integer_pow": (lambda x: x**2, lambda x: jnp.square(x), X),
    "a/√v = a·rsqrt(v)": (
        lambda x, y: x / jnp.sqrt(y * y + 1),
        lambda x, y: x * lax.rsqrt(jnp.square(y) + 1),
        X,
        Y,
    ),
    "x/c = x·(1/c)": (lambda x: x / 8, lambda x: x * 0.125, X),
    "c·(d·x) = (c·d)·x": (lambda x: 2 * (3 * x), lambda x: x * 6, X),
    "a − b = −b + a": (lambda x, y: x - y, lambda x, y: -y + x, X, Y),
    "(a + b) + c in any order": (lambda x, y: (x + 1) + y, lambda x, y: y + (x + 1), X, Y),
    "c·(a + d) = c·a + c·d": (lambda x: 2 * (x + 3), lambda x: 2 * x + 6, X),
    "a·b = b·a": (lambda x, y: x * y, lambda x, y: y * x, X, Y),
    "√ of a number": (lambda x: x / jnp.sqrt(jnp.float32(64)), lambda x: x * 0.125, X),
    # means and sums
    "mean = Σ/n": (mean, lambda x: jnp.sum(x, -1, keepdims=True) / WIDTH, X),
    "Σ c·x = c·Σ x": (lambda x: jnp.sum(3 * x, -1), lambda x: 3 * jnp.sum(x, -1), X),
    "Σ of what does not vary": (
        lambda x: jnp.sum(jnp.broadcast_to(x[0], (4, WIDTH)), 0),
        lambda x: 4 * x[0],
        X,
    ),
    "var = mean of squares of what is left": (
        lambda x: jnp.var(x, -1, keepdims=True),
        lambda x: mean(jnp.square(x - mean(x))),
        X,
    ),
    # products of matrices
    "x@w = (wᵀ@xᵀ)ᵀ": (lambda x, w: x @ w, lambda x, w: (w.T @ x.T).T, X, W),
    "x@w = Σ x·w": (
        lambda x, w: x @ w,
        lambda x, w: jnp.sum(x[:, :, None] * w[None], 1),
        X,
        W,
    ),
    "(c·x)@w = c·(x@w)": (lambda x, w: (2 * x) @ w, lambda x, w: 2 * (x @ w), X, W),
    "einsum in another layout": (
        lambda q, k: jnp.einsum("bsd,btd->bst", q, k),
        lambda q, k: jnp.einsum("bsd,btd->tsb", q, k).transpose(2, 1, 0),
        Q,
        Q,
    ),
    "vmap": (
        lambda x, w: jax.vmap(lambda row: row @ w)(x),
        lambda x, w: x @ w,
        X,
        W,
    ),
    # layout
    "keepdims": (
        lambda x: x - jnp.max(x, -1)[:, None],
        lambda x: x - jnp.max(x, -1, keepdims=True),
        X,
    ),
    "split(merge(x)) = x": (
        lambda q: q.reshape(2, -1).reshape(2, ROWS, WIDTH) + 1,
        lambda q: q + 1,
        Q,
    ),
    "merge(split(x)) = x": (
        lambda x: x.reshape(ROWS, 2, 4).reshape(ROWS, WIDTH) + 1,
        lambda x: x + 1,
        X,
    ),
    "transposes": (lambda q: jnp.exp(q.transpose(2, 0, 1)).transpose(1, 2, 0), jnp.exp, Q),
    "split = slices": (
        lambda x: jnp.split(x, 2, -1)[1],
        lambda x: x[:, WIDTH // 2 :],
        X,
    ),
    "squeeze(expand(x)) = x": (lambda x: jnp.tanh(x[:, None])[:, 0], jnp.tanh, X),
    # a subtracted maximum
    "max(−∞, m) = m": (
        lambda x: x - jnp.max(x, -1, keepdims=True, initial=-jnp.inf),
        lambda x: x - jnp.max(x, -1, keepdims=True),
        X,
    ),
    "stop_gradient(max) = max": (
        lambda x: x - lax.stop_gradient(jnp.max(x, -1, keepdims=True)),
        lambda x: x - jnp.max(x, -1, keepdims=True),
        X,
    ),
    "logsumexp = max + ln Σ exp": (
        lambda x: jax.nn.logsumexp(x, -1),
        lambda x: jnp.log(jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)) + jnp.max(x, -1),
        X,
    ),
    # functions
    "custom_jvp is its body": (jax.nn.relu, lambda x: jnp.maximum(x, 0), X),
    "jit is its body": (jax.jit(jax.nn.silu), lambda x: x * jax.nn.sigmoid(x), X),
    "casts between floats": (
        lambda x: jnp.exp(x.astype("float64")).astype("float32"),
        jnp.exp,
        X,
    ),
    # masks
    "tril = where(j ≤ i)": (
        lambda s: jnp.where(jnp.tril(jnp.ones((6, 6), bool)), s, -jnp.inf),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "tril of numbers": (
        lambda s: jnp.where(jnp.tril(jnp.ones((6, 6), "float32")) == 0, -1e30, s),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "¬(j > i) = j ≤ i": (
        lambda s: jnp.where(~(jnp.arange(6) > jnp.arange(6)[:, None]), s, -jnp.inf),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "s + (mask ? 0 : −∞)": (
        lambda s: s + jnp.where(causal(6, 6), 0, -1e9).astype("float32"),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "s + (1 − mask)·(−10⁹)": (
        lambda s: s + (1 - causal(6, 6).astype("float32")) * -1e9,
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "where(¬m, a, b) = where(m, b, a)": (
        lambda x: jnp.where(~(x > 0), 1, x),
        lambda x: jnp.where(x > 0, x, 1),
        X,
    ),
    "integers in any order": (
        lambda n: n[:, None] - jnp.arange(5) >= 1,
        lambda n: jnp.arange(5) < n[:, None],
        N,
    ),
}

DIFFERENT = {
    "softmax without its maximum": (
        lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True),
        jax.nn.softmax,
        X,
    ),
    "another axis": (
        lambda x: jnp.sum(x, 0),
        lambda x: jnp.sum(x, 1),
        jax.ShapeDtypeStruct((8, 8), "float32"),
    ),
    "a transpose": (lambda s: s @ s, lambda s: s @ s.T, S),
    "√(x²) and x": (lambda x: jnp.sqrt(x * x), lambda x: x, X),
    "x/x and 1": (lambda x: x / x, jnp.ones_like, X),
    "stop_gradient of anything else": (lambda x: x * lax.stop_gradient(x), lambda x: x * x, X),
    "−10⁴ hides not": (
        lambda s: jnp.where(causal(6, 6), s, -1e4),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "the diagonal": (
        lambda s: jnp.where(jnp.arange(6) < jnp.arange(6)[:, None], s, -jnp.inf),
        lambda s: jnp.where(causal(6, 6), s, -jnp.inf),
        S,
    ),
    "another epsilon": (lambda x: x + 1e-6, lambda x: x + 1e-5, X),
    "halves the other way round": (
        lambda x: jnp.concatenate([x[:, 4:], x[:, :4]], -1),
        lambda x: jnp.concatenate([x[:, :4], x[:, 4:]], -1),
        X,
    ),
    "an integer division": (lambda n: n // 2 * 2, lambda n: n, N),
    "a cast to integers and back": (
        lambda x: x.astype("int32").astype("float32"),
        lambda x: x,
        X,
    ),
    "repeat and tile": (
        lambda x: jnp.repeat(x, 2, axis=0) + 1,
        lambda x: jnp.tile(x, (2, 1)) + 1,
        X,
    ),
    "merging in another order": (
        lambda q: q.reshape(-1, WIDTH) + 1,
        lambda q: q.transpose(1, 0, 2).reshape(-1, WIDTH) + 1,
        Q,
    ),
}


@pytest.fixture(autouse=True)
def as_people_have_it():
    """Without the suite's strict promotion, which ordinary programs do not know."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", EQUAL)
def test_both_sides_are_one_term(name):
    left, right, *avals = EQUAL[name]
    terms = Terms()
    a, b = view(terms, left, *avals), view(terms, right, *avals)
    assert a.term is b.term
    assert (a.axes, a.shape) == (b.axes, b.shape)


@pytest.mark.parametrize("name", EQUAL)
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-2, 1.0, 30.0]))
def test_both_sides_are_equal(name, seed, scale):
    """On any data, up to rounding; a mask of −10⁹ hides as well as −∞ once exponentiated."""
    left, right, *avals = EQUAL[name]
    rng = np.random.default_rng(seed)
    draw = lambda a: (
        rng.integers(-3, 9, a.shape) if a.dtype == "int32" else rng.normal(size=a.shape) * scale
    )
    arrays = [draw(a).astype(a.dtype) for a in avals]
    shown = lambda y: np.where(np.asarray(y) <= -1e8, -np.inf, np.asarray(y))
    a, b = shown(left(*arrays)), shown(right(*arrays))
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * scale)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_two_terms(name):
    left, right, *avals = DIFFERENT[name]
    terms = Terms()
    a, b = view(terms, left, *avals), view(terms, right, *avals)
    assert (a.term, a.axes) != (b.term, b.axes)


def test_a_value_read_twice_is_not_opened():
    """It is computed once in the program, so its parts are nobody's operands."""
    terms = Terms()
    once = view(terms, lambda x, y: (x + y) + 1, X, Y)
    assert once.term.params == ((1, 1), 1)
    twice = view(terms, lambda x, y: (lambda s: s + jnp.exp(s))(x + y), X, Y)
    assert sorted(t.op for t, _ in twice.term.args) == ["exp", "sum"]
