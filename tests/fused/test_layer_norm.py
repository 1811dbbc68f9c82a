"""What is true of layer normalisation in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.layer_norm import layer_norm_last_dim, layer_norm_last_dim_backward

from ..refused import refused


def oracle(x, eps):
    """The definition, row by row, in NumPy, in float64."""
    x = np.asarray(x, np.float64)
    y = np.zeros(x.shape)
    for row in np.ndindex(x.shape[:-1]):
        mean = sum(x[row]) / len(x[row])
        variance = sum((v - mean) ** 2 for v in x[row]) / len(x[row])
        y[row] = (x[row] - mean) / np.sqrt(variance + eps)
    return y


def backward_oracle(x, g, eps):
    """The product with the Jacobian of a row, written out."""
    x, g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    y, dx, n = oracle(x, eps), np.zeros(x.shape), x.shape[-1]
    for row in np.ndindex(x.shape[:-1]):
        rstd = 1 / np.sqrt(x[row].var() + eps)
        jacobian = rstd * (np.eye(n) - 1 / n - np.outer(y[row], y[row]) / n)
        dx[row] = jacobian @ g[row]
    return dx


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 2, 33), (7,), (2, 1)])
def test_agrees_with_the_definition(dtype, shape, draw):
    x, g = draw(shape, dtype), draw(shape, dtype)
    tolerance = layer_norm_last_dim.precision.tolerance(dtype)
    forward, backward = layer_norm_last_dim, layer_norm_last_dim_backward
    both = lambda x, g: [(forward(x, eps=eps), backward(x, g, eps=eps)) for eps in (1e-5, 0.5)]
    for eps, (y, dx) in zip((1e-5, 0.5), jax.jit(both)(x, g), strict=True):
        np.testing.assert_allclose(np.float64(y), oracle(x, eps), atol=4 * tolerance)
        want = backward_oracle(x, g, eps)
        bound = 8 * tolerance * max(abs(want).max(), 1)
        np.testing.assert_allclose(np.float64(dx), want, atol=bound)


@pytest.mark.parametrize("offset", [1e3, 1e4, 1e5])
def test_a_common_offset_does_not_cost_the_variance(offset, draw):
    """E[x²] − E[x]² would lose it: 1e8 + 1 is 1e8 in float32."""
    x = jnp.round(draw((4, 256)) * 8) / 8 + jnp.float32(offset)
    np.testing.assert_allclose(layer_norm_last_dim(x), oracle(x, 1e-5), atol=1e-4)


def test_a_constant_row_is_zero_with_a_finite_gradient():
    x = jnp.full((2, 8), 3.0, "float32")
    y, pull = jax.vjp(layer_norm_last_dim, x)
    assert not y.any()
    assert jnp.isfinite(pull(jnp.arange(16.0, dtype="float32").reshape(2, 8))[0]).all()


def test_rows_of_half_precision_do_not_overflow():
    x = jnp.tile(jnp.array([300, -300], "float16"), 2048)  # x² exceeds float16's 65504
    np.testing.assert_array_equal(layer_norm_last_dim(x), jnp.sign(x))


def test_very_large_rows_follow_the_range_of_the_dtype():
    """pytorch#178123: squares beyond 3.4e38 are inf in float32, and the row 0; not in float64."""
    x = jnp.array([1, 2, 3, 4], "float32") * 1e30
    assert not layer_norm_last_dim(x).any()
    want = [-1.3416407864998738, -0.4472135954999579, 0.4472135954999579, 1.3416407864998738]
    np.testing.assert_allclose(layer_norm_last_dim(x.astype("float64")), want, rtol=1e-6)
    np.testing.assert_allclose(layer_norm_last_dim(x / 1e12), want, rtol=1e-6)


def test_the_gradient_neither_shifts_nor_scales_a_row(draw):
    """Adding a constant to a row leaves its image, and with eps = 0 so does scaling it."""
    x, g = draw((5, 16), "float64"), draw((5, 16), "float64")
    dx = layer_norm_last_dim_backward(x, g, eps=0.0)
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-13)
    np.testing.assert_allclose((dx * x).sum(-1), 0, atol=1e-13)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_is_nan_alone(special, draw):
    y = layer_norm_last_dim(draw((3, 8)).at[1, 2].set(special))
    np.testing.assert_array_equal(jnp.isnan(y).all(-1), [False, True, False])
    np.testing.assert_array_equal(jnp.isnan(y).any(-1), [False, True, False])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_of_nothing_is_nothing(shape):
    x = jnp.zeros(shape, "float32")
    assert layer_norm_last_dim(x).shape == shape
    assert jax.grad(lambda x: layer_norm_last_dim(x).sum())(x).shape == shape


def test_bad_calls(draw):
    x = draw((2, 3))
    refused(layer_norm_last_dim, jnp.float32(1), match="'x' is float32\\[\\]; it has 0 axes")
    refused(layer_norm_last_dim, jnp.arange(3), match="its dtype must be one of float32")
    refused(layer_norm_last_dim, x, eps=-1e-5, match="'eps' is -1e-05; it must be at least 0")
    refused(layer_norm_last_dim, x, eps=float("nan"), match="'eps' is nan; it must be at least 0")
    refused(layer_norm_last_dim, x, eps="small", match="'eps' is 'small'; it must be a number")
    refused(layer_norm_last_dim_backward, x, x[:1], match="axes \\*batch are")
    refused(layer_norm_last_dim_backward, x, x.astype("float64"), match="operands share one dtype")
