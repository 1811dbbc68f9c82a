"""What is true of the matrix product in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.ops.linalg import matmul

from ..refused import refused


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *[((), ()), ((2,), (2,)), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((1, 3), (2, 1))],
        *[((0,), (1,)), ((2, 1, 3), (1, 4, 1))],
    ],
)
def test_leading_axes_broadcast_as_numpy_s(a, b, draw):
    """Values and, summed over what was repeated, gradients."""
    a, b = draw((*a, 3, 4), "float64"), draw((*b, 4, 5), "float64")
    want = np.matmul(np.asarray(a), np.asarray(b))
    g = np.asarray(draw(want.shape, "float64"))
    y, da, db = jax.jit(lambda a, b, g: (matmul(a, b), *jax.vjp(matmul, a, b)[1](g)))(a, b, g)
    np.testing.assert_allclose(y, want, rtol=1e-12)
    back = (np.matmul(g, np.swapaxes(b, -1, -2)), np.matmul(np.swapaxes(a, -1, -2), g))
    for got, full in zip((da, db), back, strict=True):
        new = full.ndim - got.ndim
        ones = tuple(new + i for i, n in enumerate(got.shape) if n != full.shape[new + i])
        want = full.sum((*range(new), *ones)).reshape(got.shape)
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_bytes_sum_in_i32_and_saturate():
    product = lambda a, b, dtype: int(
        matmul(jnp.full((1, 4), a, dtype), jnp.full((4, 1), b, dtype))[0, 0]
    )
    assert product(127, 127, "int8") == 127
    assert product(-128, 127, "int8") == -128
    assert product(255, 255, "uint8") == 255
    assert product(5, -6, "int8") == -120
    rng = np.random.default_rng(0)
    for dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        a, b = (rng.integers(limits.min, limits.max, s).astype(dtype) for s in ((7, 33), (33, 5)))
        a[:3] //= 32  # some sums fit, some do not
        b //= 16
        want = np.clip(a.astype(int) @ b.astype(int), limits.min, limits.max)
        got = matmul(a, b)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kernel", ["xla", "float_sums"])
def test_sums_of_bytes_are_exact_however_long(kernel):
    """Partial sums of 3 · 10⁷, beyond what float32 counts to, that all but cancel."""
    a, b = np.full((1, 4097), 127, np.int8), np.full((4097, 1), -128, np.int8)
    a[0, 2048:4096] = -127
    a[0, 4096], b[4096] = 3, 5
    assert matmul.using(kernel)(jnp.asarray(a), jnp.asarray(b)).tolist() == [[15]]
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 2, s).astype(np.uint8) for s in ((3, 700), (700, 2)))
    want = np.clip(a.astype(int) @ b.astype(int), 0, 255)
    assert (want < 255).any()
    np.testing.assert_array_equal(matmul.using(kernel)(jnp.asarray(a), jnp.asarray(b)), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_sum_in_float32_and_round_once(dtype, draw):
    """A sum of halves would stall at 256 or 2048; rounding twice would show beside NumPy's."""
    long = matmul(jnp.full((1, 40_000), 0.5, dtype), jnp.ones((40_000, 1), dtype))
    assert long[0, 0] == jnp.asarray(20_000, dtype)
    a, b = draw((16, 300), dtype), draw((300, 16), dtype)
    want = (np.asarray(a, np.float64) @ np.asarray(b, np.float64)).astype(a.dtype)
    assert np.mean(np.asarray(matmul(a, b)) == want) > 0.98  # the rest are ties of the f32 sum


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_multiplies_halves(dtype):
    """Not float32 beside half operands: on a GPU that product has no tensor cores."""
    a, b = jnp.ones((4, 8), dtype), jnp.ones((8, 4), dtype)
    text = str(jax.make_jaxpr(lambda a, b, g: jax.vjp(matmul, a, b)[1](g))(a, b, matmul(a, b)))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 2
    assert not [line for line in products if "f32[" in line]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
def test_a_sum_of_nothing_is_zero(dtype):
    y = matmul(jnp.ones((2, 0), dtype), jnp.ones((0, 3), dtype))
    assert (y.shape, y.dtype) == ((2, 3), dtype)
    np.testing.assert_array_equal(np.asarray(y).astype(float), 0)
    assert matmul(jnp.ones((0, 2), dtype), jnp.ones((2, 3), dtype)).shape == (0, 3)


def test_zero_times_infinity_is_nan():
    y = matmul(jnp.array([[0.0, 1.0], [1.0, 1.0]]), jnp.array([[np.inf], [1.0]]))
    assert jnp.isnan(y[0, 0])
    assert y[1, 0] == np.inf


def test_operands_laid_out_the_other_way_round(draw):
    a, b = draw((4, 3)), draw((6, 4))
    want = np.asarray(a, np.float64).T @ np.asarray(b, np.float64).T
    np.testing.assert_allclose(matmul(a.T, b.T), want, rtol=1e-5)
    np.testing.assert_allclose(matmul(a.T[1:], b.T[:, ::2]), want[1:, ::2], rtol=1e-5)


def test_the_user_s_precision_is_respected():
    a = jnp.ones((2, 2), "float32")
    assert "HIGHEST" in str(jax.make_jaxpr(matmul)(a, a))
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in str(jax.make_jaxpr(matmul)(a, a))


def test_bad_calls(draw):
    a = draw((2, 3))
    refused(matmul, a, a, match="its axis k is 2, but k is 3 in 'a'")
    refused(matmul, a[0], a.T, match="'a' is float32\\[3\\]; it has 1 axes, wanted at least 2")
    refused(matmul, a, a.T.astype("float16"), match="operands share one dtype")
    refused(matmul, draw((2, 2, 3)), draw((3, 3, 2)), match="'b' has leading axes \\(3,\\)")
    refused(matmul, jnp.ones((2, 2), "int32"), jnp.ones((2, 2), "int32"), match="its dtype must be")
    refused(matmul, a, match="array 'b' is missing")
