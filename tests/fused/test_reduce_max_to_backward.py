"""What is true of the backward of a maximum: ties, NaN, and that it is the maximum's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.reduce_max_to_backward import reduce_max_to_backward
from fuel_jax.ops.reduce import reduce_max_to

from ..refused import refused

nan, inf = np.nan, np.inf


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_ties_share_equally(dtype):
    """fuel lazy.rs: a tie of two halves an upstream of 10; tensorflow#51681."""
    x = np.array([[1, 3, 3], [7, 7, 7], [0, -0.0, -1]], jnp.dtype(dtype))
    g = np.array([[10], [9], [4]], jnp.dtype(dtype))
    got = reduce_max_to_backward(x, g)
    np.testing.assert_array_equal(got, np.array([[0, 5, 5], [3, 3, 3], [2, 2, 0]], x.dtype))
    assert got.dtype == x.dtype


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "target"),
    [((4, 37), (4, 1)), ((2, 3, 5), (3, 1)), ((2, 3, 5), ()), ((3, 4), (3, 4)), ((), ()),
     ((2, 0), (2, 1)), ((0, 3), (3,)), ((1, 3), (3,))],
)  # fmt: skip
def test_is_the_gradient_of_the_maximum_to_the_bit(shape, target, dtype):
    rng = np.random.default_rng(0)
    x = np.asarray(rng.integers(0, 4, shape)).astype(jnp.dtype(dtype))  # ties in every window
    g = np.asarray(rng.normal(size=target)).astype(jnp.dtype(dtype))
    pull = jax.jit(lambda x, g: jax.vjp(lambda x: reduce_max_to(x, shape=target), x)[1](g))
    np.testing.assert_array_equal(reduce_max_to_backward(x, g), *pull(x, g))


def test_a_window_holding_nan_is_nan_wherever_nan_stands():
    for at in range(3):
        x = jnp.ones((2, 3)).at[0, at].set(nan).at[1, 0].set(2.0)
        got = reduce_max_to_backward(x, jnp.ones((2, 1)))
        np.testing.assert_array_equal(got, [[nan] * 3, [1, 0, 0]])


def test_infinities():
    x = jnp.array([[inf, inf, 1], [-inf, -inf, -inf]])
    got = reduce_max_to_backward(x, jnp.array([[2.0], [3.0]]))
    np.testing.assert_array_equal(got, [[1, 1, 0], [1, 1, 1]])
    got = reduce_max_to_backward(jnp.array([2.0, 1.0]), jnp.array(inf))
    np.testing.assert_array_equal(got, [inf, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_ties_are_counted_exactly(dtype):
    n = 70_000  # beyond float16
    got = reduce_max_to_backward(jnp.zeros((n,), dtype), jnp.ones((), dtype))
    np.testing.assert_array_equal(got, jnp.full((n,), np.float32(1 / n)).astype(dtype))


def test_is_constant_in_x_and_linear_in_the_cotangent():
    x, g = jnp.array([[1.0, 3, 3]]), jnp.array([[8.0]])
    dx, dg = jax.grad(lambda x, g: (reduce_max_to_backward(x, g) * 3).sum(), (0, 1))(x, g)
    np.testing.assert_array_equal(dx, np.zeros((1, 3)))
    np.testing.assert_array_equal(dg, [[3]])


def test_bad_calls():
    x = jnp.zeros((2, 3))
    for shape in ((2,), (1, 2, 3), (4, 1), (0, 3)):
        refused(
            reduce_max_to_backward, x, jnp.zeros(shape), match="each extent must be that of x or 1"
        )
    refused(reduce_max_to_backward, x, jnp.zeros((2, 1), "float32"), match="share one dtype")
    refused(reduce_max_to_backward, jnp.arange(3), jnp.arange(3), match="must be one of float32")
    refused(reduce_max_to_backward, x, match="array 'upstream' is missing")
