"""What is true of a product with a bias in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.linear import fused_linear

from ..refused import refused


def test_literally():
    a = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    b = jnp.array([[1.0, 0], [0, 1], [1, 1]])
    y = fused_linear(a, b, jnp.array([10.0, 20]))
    np.testing.assert_array_equal(y, [[14, 25], [20, 31]])


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_values_and_gradients_are_numpy_s(batch, draw):
    a, b, bias = (
        draw((*batch, 5, 4), "float64"),
        draw((*batch, 4, 6), "float64"),
        draw((6,), "float64"),
    )
    y, pull = jax.vjp(fused_linear, a, b, bias)
    np.testing.assert_allclose(y, np.matmul(a, b) + np.asarray(bias), rtol=1e-12)
    g = draw(y.shape, "float64")
    da, db, dbias = pull(g)
    np.testing.assert_allclose(da, np.matmul(g, np.swapaxes(b, -1, -2)), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(db, np.matmul(np.swapaxes(a, -1, -2), g), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(dbias, np.asarray(g).reshape(-1, 6).sum(0), rtol=1e-11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_rounded_once_after_the_bias(dtype, draw):
    """The product rounded first would lose what the bias leaves of it."""
    a, b = draw((32, 64), dtype), draw((64, 32), dtype)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    bias = -exact.mean(0).astype(a.dtype)
    want = (exact + bias.astype(np.float64)).astype(a.dtype)
    got = np.asarray(fused_linear(a, b, jnp.asarray(bias)))
    assert np.mean(got == want) > 0.98
    twice = (exact.astype(a.dtype).astype(np.float64) + bias.astype(np.float64)).astype(a.dtype)
    assert np.mean(twice == want) < 0.9


def test_a_long_bias_gradient_in_half_precision():
    """Ten thousand ones: a sum in bfloat16 would stop at 256."""
    a, b = jnp.zeros((10_000, 1), "bfloat16"), jnp.zeros((1, 2), "bfloat16")
    f = lambda bias: fused_linear(a, b, bias).astype("float32").sum()
    g = jax.grad(f)(jnp.zeros((2,), "bfloat16"))
    np.testing.assert_array_equal(g, jnp.asarray(10_000, "bfloat16"))


def test_the_gradient_multiplies_halves():
    """Not float32 beside half operands: on a GPU that product has no tensor cores."""
    a, b, bias = (jnp.ones(s, "bfloat16") for s in ((4, 8), (8, 2), (2,)))
    pull = jax.vjp(fused_linear, a, b, bias)[1]
    text = str(jax.make_jaxpr(pull)(jnp.ones((4, 2), "bfloat16")))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert not [line for line in products if "f32[" in line]


def test_a_product_of_nothing_is_the_bias():
    y = fused_linear(jnp.ones((2, 0)), jnp.ones((0, 3)), jnp.arange(3.0))
    np.testing.assert_array_equal(y, [[0, 1, 2], [0, 1, 2]])
    assert fused_linear(jnp.ones((0, 2)), jnp.ones((2, 3)), jnp.arange(3.0)).shape == (0, 3)


def test_bad_calls(draw):
    a, b, bias = draw((2, 3)), draw((3, 4)), draw((4,))
    refused(fused_linear, a, b.T, bias, match="its axis k is 4, but k is 3 in 'a'")
    refused(fused_linear, a, b, bias[:3], match="its axis n is 3, but n is 4 in 'b'")
    refused(fused_linear, a, b, bias[None], match="'bias' is float32\\[1,4\\]; it has 2 axes")
    refused(fused_linear, a[0], b, bias, match="it has 1 axes, wanted at least 2")
    refused(fused_linear, a[None], b, bias, match="nothing is broadcast")
    refused(fused_linear, a, b, bias.astype("bfloat16"), match="operands share one dtype")
    refused(fused_linear, a, b, match="array 'bias' is missing")
    refused(fused_linear, *(jnp.ones(s, "int8") for s in ((2, 3), (3, 4), (4,))), match="its dtype")
