"""What is true of powi_backward in particular: it is the gradient of powi, at zero as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import powi
from fuel_jax.fused.powi_backward import powi_backward

from ..refused import refused

INF, NAN = np.inf, np.nan
EXPONENTS = (-3, -2, -1, 0, 1, 2, 3, 7)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("exp", EXPONENTS)
def test_against_float64(exp, dtype, draw):
    x, g = draw((37,), dtype) + jnp.asarray(2, dtype), draw((37,), dtype)
    v = np.asarray(x, np.float64)
    want = np.asarray(g, np.float64) * exp * v ** float(exp - 1)
    got = powi_backward(x, g, exp=exp)
    assert got.dtype == x.dtype
    bound = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    least = 2.0**-25 if dtype == "float16" else 0  # half a step among its subnormals
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=bound, atol=least)


@pytest.mark.parametrize(
    ("exp", "slope_at_0"), [(0, 0), (1, 1), (2, 0), (3, 0), (-1, -INF), (-2, -INF)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_at_zero(exp, slope_at_0, dtype):
    """Fuel evaluates 0 · 0⁻¹ for exponent 0: NaN."""
    zero, one = jnp.zeros((1,), dtype), jnp.ones((1,), dtype)
    assert powi_backward(zero, one, exp=exp)[0] == slope_at_0


def test_at_the_other_zero():
    x = jnp.float32(-0.0)
    assert powi_backward(x, jnp.float32(1), exp=-2) == INF
    assert powi_backward(x, jnp.float32(1), exp=-1) == -INF


def test_exponent_0_gives_0_whatever_the_operands():
    x = jnp.array([0.0, INF, NAN, 1.0, -2.0])
    for g in (x, x[::-1]):
        np.testing.assert_array_equal(powi_backward(x, g, exp=0), np.zeros(5))


@pytest.mark.parametrize("exp", EXPONENTS)
def test_is_the_gradient_of_powi(exp):
    """Everywhere, NaN and the infinities included."""
    x = jnp.array([0.0, -0.0, 1.5, -0.25, 3.0, INF, -INF, NAN], "float32")
    want = jax.vjp(lambda x: powi(x, exp=exp), x)[1](jnp.full_like(x, 1.25))[0]
    got = powi_backward(x, jnp.full_like(x, 1.25), exp=exp)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("exp", [2**31 - 1, -(2**31)])
def test_the_ends_of_i32(exp):
    x, g = jnp.array([1.0, 0.5, 2.0], "float32"), jnp.ones(3, "float32")
    want = [exp, 0.0, INF] if exp > 0 else [exp, -INF, 0.0]
    np.testing.assert_allclose(powi_backward(x, g, exp=exp), want, rtol=1e-6)


def test_nothing():
    x = jnp.zeros((2, 0), "float32")
    assert powi_backward(x, x, exp=3).shape == (2, 0)


def test_bad_calls(draw):
    x = draw((2, 3))
    refused(powi_backward, x, x[:1], exp=2, match="'upstream' is float32\\[1,3\\]; its axes")
    refused(powi_backward, x, x.astype("float64"), exp=2, match="operands share one dtype")
    refused(powi_backward, x, x, exp=2**31, match="'exp' is 2147483648; it must fit in I32")
    refused(powi_backward, x, x, exp=2.0, match="'exp' is 2.0; it must be an int")
    refused(powi_backward, x, exp=2, match="array 'upstream' is missing")
    refused(powi_backward, x, x, match="parameter 'exp' is missing")
    ints = jnp.ones((2, 3), "int32")
    refused(powi_backward, ints, ints, exp=2, match="its dtype must be one of float32")
