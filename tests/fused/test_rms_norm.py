"""What is true of RMS normalisation in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import rms_norm_last_dim, rms_norm_last_dim_backward

from ..refused import refused


def oracle(x, eps):
    """The definition, row by row, in NumPy, in float64."""
    x = np.asarray(x, np.float64)
    y = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        y[row] = x[row] / np.sqrt(sum(v * v for v in x[row]) / len(x[row]) + eps)
    return y


def backward_oracle(x, g, eps):
    """The product with the Jacobian of a row, written out."""
    x, g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    dx, n = np.zeros(x.shape), x.shape[-1]
    for row in np.ndindex(x.shape[:-1]):
        r = 1 / np.sqrt(np.mean(x[row] ** 2) + eps)
        dx[row] = (r * np.eye(n) - r**3 * np.outer(x[row], x[row]) / n) @ g[row]
    return dx


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 2, 33), (7,), (2, 1)])
def test_agrees_with_the_definition(dtype, shape, draw):
    x, g = draw(shape, dtype), draw(shape, dtype)
    tolerance = rms_norm_last_dim.precision.tolerance(dtype)
    forward, backward = rms_norm_last_dim, rms_norm_last_dim_backward
    both = lambda x, g: [(forward(x, eps=eps), backward(x, g, eps=eps)) for eps in (1e-6, 0.5)]
    for eps, (y, dx) in zip((1e-6, 0.5), jax.jit(both)(x, g), strict=True):
        np.testing.assert_allclose(np.float64(y), oracle(x, eps), atol=4 * tolerance)
        want = backward_oracle(x, g, eps)
        bound = 8 * tolerance * max(abs(want).max(), 1)
        np.testing.assert_allclose(np.float64(dx), want, atol=bound)


def test_a_constant_row_becomes_ones():
    x = jnp.full((2, 7), -3, "float32")
    np.testing.assert_allclose(rms_norm_last_dim(x, eps=0.0), -1, rtol=1e-6)


def test_rows_of_half_precision_do_not_overflow():
    x = jnp.full((1, 4096), 300, "float16")  # x² alone exceeds float16's 65504
    np.testing.assert_array_equal(rms_norm_last_dim(x), 1)


def test_small_rows_of_half_precision_are_squared_in_float32(draw):
    """pytorch#189581: bf16 squares of 0.058 lose what eps is compared with."""
    x = draw((2, 4, 1, 32), "bfloat16") * jnp.bfloat16(0.058)
    got = rms_norm_last_dim(x).astype("float64")
    want = oracle(x, 1e-6)
    np.testing.assert_allclose(got, want, atol=2**-8 * abs(want).max() * 1.01)


def test_a_row_of_zeros_is_zero_with_a_finite_gradient():
    x = jnp.zeros((1, 8), "float32")
    y, pull = jax.vjp(rms_norm_last_dim, x)
    assert not y.any()
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], 1e3, rtol=1e-6)
    assert jnp.isnan(rms_norm_last_dim(x, eps=0.0)).all()


def test_the_gradient_has_no_part_along_the_row(draw):
    """Scaling a row does not move its image where eps is 0."""
    x, g = draw((5, 16), "float64"), draw((5, 16), "float64")
    dx = rms_norm_last_dim_backward(x, g, eps=0.0)
    np.testing.assert_allclose((dx * x).sum(-1), 0, atol=1e-13)


def test_very_large_rows_follow_the_range_of_the_dtype():
    """Squares beyond 3.4e38 are inf in float32, and the row 0; not in float64."""
    x = jnp.array([3, 4], "float32") * 1e30
    assert not rms_norm_last_dim(x).any()
    want = np.array([3, 4]) / np.sqrt(12.5)
    np.testing.assert_allclose(rms_norm_last_dim(x.astype("float64")), want, rtol=1e-6)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(special, draw):
    y = rms_norm_last_dim(draw((3, 8)).at[1, 2].set(special))
    assert jnp.isnan(y[1, 2])
    assert jnp.isfinite(y[jnp.array([0, 2])]).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_of_nothing_is_nothing(shape):
    x = jnp.zeros(shape, "float32")
    assert rms_norm_last_dim(x).shape == shape
    assert jax.jit(jax.grad(lambda x: rms_norm_last_dim(x).sum()))(x).shape == shape


def test_cost_is_bound_by_memory():
    cost = rms_norm_last_dim.cost(jax.ShapeDtypeStruct((128, 256), jnp.bfloat16))
    assert cost.bytes == 2 * 128 * 256 * 2
    assert 3 * 128 * 256 <= cost.flops <= 6 * 128 * 256


def test_bad_calls(draw):
    x = draw((2, 3))
    refused(rms_norm_last_dim, jnp.float32(1), match="'x' is float32\\[\\]; it has 0 axes")
    refused(rms_norm_last_dim, jnp.arange(3), match="its dtype must be one of float32")
    refused(rms_norm_last_dim, x, eps=-1.0, match="'eps' is -1.0; it must be at least 0")
    refused(rms_norm_last_dim, x, eps=True, match="'eps' is True; it must be a number")
    refused(rms_norm_last_dim_backward, x, x[:1], match="axes \\*batch are")
    refused(rms_norm_last_dim_backward, x, match="array 'upstream' is missing")
