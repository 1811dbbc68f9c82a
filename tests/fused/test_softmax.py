"""What is true of softmax in particular: it survives the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import log_softmax_last_dim, log_softmax_last_dim_backward, softmax_last_dim

from ..contract import compiled
from ..refused import refused

PROGRAMS = {  # what XLA may fold into the subtraction of the maximum
    "product": lambda x, c, b: x * c,
    "products": lambda x, c, b: x * c * 0.7,
    "product and sum": lambda x, c, b: x * c + b,
    "bilinear": lambda x, c, b: x * 0.7 + c * b,
    "matrix product": lambda x, c, b: (x @ jnp.eye(x.shape[-1], dtype=x.dtype)) * c,
    "tanh": lambda x, c, b: jnp.tanh(x / 1e20) * 1e20 * c,
    "quotient": lambda x, c, b: x / 3 * c,
    "distance": lambda x, c, b: x * c - jnp.arange(x.shape[-1], dtype=x.dtype) * jnp.float32(c),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_finite_rows_sum_to_one_under_jit(program, draw):
    factors = 0.3, 1 / 3, 0.088388346, 123.4, -0.7  # of one program
    rows = lambda x, b: [PROGRAMS[program](x, c, b) for c in factors]
    f = compiled(lambda x, b: [softmax_last_dim(y) for y in rows(x, b)])
    for shape in ((3, 64), (1, 5)):
        for size in (1e3, 1e8, 1e10, 1e12, 1e20, 1e30):
            x, b = draw(shape) * size, draw(shape) * size
            for y, p in zip(rows(x, b), f(x, b), strict=True):
                if jnp.isfinite(y).all():
                    np.testing.assert_allclose(np.asarray(p, np.float64).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("op", [softmax_last_dim, log_softmax_last_dim])
@pytest.mark.parametrize("row", [[-np.inf, -np.inf], [np.inf, 0.0], [np.nan, 0.0]])
def test_rows_without_a_finite_maximum_are_nan(op, row):
    for kernel in op.kernels:
        if "cpu" in kernel.platforms or kernel.name == "xla":
            assert jnp.isnan(op.using(kernel.name)(jnp.array(row, jnp.float32))).all()


def test_minus_infinity_is_probability_zero():
    x = jnp.array([-np.inf, 3.0])
    np.testing.assert_array_equal(softmax_last_dim(x), [0, 1])
    np.testing.assert_array_equal(log_softmax_last_dim(x), [-np.inf, 0])


@pytest.mark.parametrize("op", [softmax_last_dim, log_softmax_last_dim])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_of_nothing_is_nothing(op, shape):
    x = jnp.zeros(shape, "float32")
    assert op(x).shape == jax.grad(lambda x: op(x).sum())(x).shape == shape


@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 33), (33,)])
def test_a_few_rows_at_a_time_are_all_rows(shape, draw):
    x = draw(shape, "float32") * 3
    x = x.at[..., 5].set(-np.inf).at[..., 0].set(7e4)
    got = log_softmax_last_dim.using("rows")(x)
    v = np.asarray(x, np.float64)
    v = v - v.max(-1, keepdims=True)
    want = v - np.log(np.exp(v).sum(-1, keepdims=True))
    np.testing.assert_allclose(got, want, rtol=3e-7)


def test_rows_that_xla_would_store_are_taken_a_few_at_a_time():
    serves = lambda *shape: (
        log_softmax_last_dim.explain(jax.ShapeDtypeStruct(shape, "float32")).forward[0].serves
    )
    assert serves(3, 50257) == ("cpu",)
    assert serves(2, 50257) == serves(4096, 4096) == ()


def test_the_decomposition_has_the_gradient_at_ties():
    x = jnp.array([1.0, 1.0, 0.0])
    slope = lambda f: jax.jacrev(f)(x)
    np.testing.assert_allclose(
        slope(softmax_last_dim.decompose), slope(softmax_last_dim), rtol=1e-12
    )


def test_a_half_precision_gradient_over_many_elements_is_finite(draw):
    """jax#40409: 2^16 elements and more overflow an f16 sum."""
    x = draw((70_000,), "float16")
    dx = jax.grad(lambda x: log_softmax_last_dim(x).astype("float32").sum())(x)
    want = 1 - x.size * jax.nn.softmax(x.astype("float64"))
    # The result, near −12, was stored in f16 to within 2^-8; its exponential is off by as much.
    np.testing.assert_allclose(dx.astype("float64"), want, atol=2**-7 * abs(want).max())


def test_bad_calls(draw):
    refused(softmax_last_dim, jnp.float32(1), match="'x' is float32\\[\\]; it has 0 axes")
    refused(softmax_last_dim, jnp.arange(3), match="its dtype must be one of float32")
    x = draw((2, 3))
    refused(log_softmax_last_dim_backward, x, x[:1], match="axes \\*batch are")
    refused(log_softmax_last_dim_backward, x, match="array 'upstream' is missing")
