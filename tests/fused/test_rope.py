"""What is true of rotary embedding in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.rope import rope

from ..refused import refused


def formula(x, cos, sin):
    """The seed's, in NumPy, in float64."""
    x, cos, sin = (np.asarray(v, np.float64) for v in (x, cos, sin))
    h = x.shape[-1] // 2
    lo = x[..., :h] * cos[..., :h] - x[..., h:] * sin[..., :h]
    hi = x[..., h:] * cos[..., h:] + x[..., :h] * sin[..., h:]
    return np.concatenate([lo, hi], -1)


def tables(positions, d, base=10_000.0):
    """Cosines and sines of the usual frequencies, in float64."""
    angle = np.asarray(positions, np.float64)[:, None] * base ** (-np.arange(0, d, 2) / d)
    return np.cos(np.tile(angle, 2)), np.sin(np.tile(angle, 2))


def test_halves_are_split_in_the_middle():
    """Pairs (1, 3) and (2, 4), not (1, 2) and (3, 4); a quarter turn each."""
    x = jnp.array([[1.0, 2, 3, 4]])
    y = rope(x, jnp.zeros((1, 4)), jnp.ones((1, 4)))
    np.testing.assert_array_equal(y, [[-3, -4, 1, 2]])
    np.testing.assert_array_equal(rope(x, jnp.ones((1, 4)), jnp.zeros((1, 4))), x)


@pytest.mark.parametrize(
    ("leading", "table"),
    [((), ()), ((3,), ()), ((2, 3), ()), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 3), (2, 3))],
)
def test_value_and_every_gradient_for_tables_of_unequal_halves(leading, table, draw):
    x = draw((*leading, 5, 6), "float64")
    cos, sin = (draw((*table, 5, 6), "float64") for _ in range(2))
    y, pull = jax.vjp(rope, x, cos, sin)
    np.testing.assert_allclose(y, formula(x, cos, sin), rtol=1e-12, atol=1e-12)
    g = np.asarray(draw(y.shape, "float64"))
    x, cos, sin = map(np.asarray, (x, cos, sin))
    h = 3
    turned = np.concatenate([-x[..., h:], x[..., :h]], -1)
    lo = g[..., :h] * cos[..., :h] + g[..., h:] * sin[..., h:]
    hi = g[..., h:] * cos[..., h:] - g[..., :h] * sin[..., :h]

    def summed(full):
        new = full.ndim - cos.ndim
        ones = tuple(new + i for i, n in enumerate(cos.shape) if n != full.shape[new + i])
        return full.sum((*range(new), *ones)).reshape(cos.shape)

    want = (np.concatenate([lo, hi], -1), summed(g * x), summed(g * turned))
    for got, w in zip(pull(jnp.asarray(g)), want, strict=True):
        np.testing.assert_allclose(got, w, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("position", [0, 4000, 100_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_far_positions(position, dtype, draw):
    """candle#3005: the angle of a table made in bfloat16 is off by radians."""
    x = draw((2, 4, 128), dtype)
    cos, sin = tables(range(position, position + 4), 128, 1e6)
    got = rope(x, *(jnp.asarray(t).astype(dtype) for t in (cos, sin)))
    error = np.abs(np.asarray(got, np.float64) - formula(x, cos, sin)).max()
    assert error < (2e-2 if dtype == "bfloat16" else 1e-6) * np.abs(np.asarray(x, np.float64)).max()


def test_a_rotation_keeps_lengths_and_turns_back(draw):
    x, (cos, sin) = draw((3, 7, 8), "float64"), map(jnp.asarray, tables(range(7), 8))
    y = rope(x, cos, sin)
    np.testing.assert_allclose(jnp.sum(y**2, -1), jnp.sum(x**2, -1), rtol=1e-12)
    np.testing.assert_allclose(rope(y, cos, -sin), x, rtol=1e-10, atol=1e-12)
    dx = jax.vjp(lambda x: rope(x, cos, sin), x)[1](y)[0]
    np.testing.assert_allclose(dx, x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_table_gradients_sum_in_float32(dtype):
    """Over a thousand heads: a sum in bfloat16 would stop at 256."""
    x, table = jnp.ones((1000, 1, 2), dtype), jnp.ones((1, 2), dtype)
    f = lambda cos: rope(x, cos, table).astype("float32").sum()
    np.testing.assert_array_equal(jax.grad(f)(table).astype("float32"), 1000)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (0, 3, 4), (3, 0)])
def test_of_nothing(shape):
    x, table = jnp.zeros(shape), jnp.zeros(shape[-2:])
    grads = jax.grad(lambda *xs: rope(*xs).sum(), (0, 1, 2))(x, table, table)
    assert [g.shape for g in grads] == [shape, shape[-2:], shape[-2:]]
    assert rope(x, table, table).shape == shape


def test_bad_calls(draw):
    x, table = draw((2, 3, 4)), draw((3, 4))
    refused(rope, *(draw((1, 3)) for _ in range(3)), match="'x' has rows of 3; .* even width")
    refused(rope, x, table[:2], table[:2], match="its axis s is 2, but s is 3 in 'x'")
    refused(rope, x, table[:, :2], table[:, :2], match="its axis d is 2, but d is 4 in 'x'")
    refused(rope, x, table, draw((2, 3, 4)), match="'sin' is float32\\[2,3,4\\]")
    refused(rope, x, *[draw((3, 3, 4))] * 2, match="'cos' has leading axes \\(3,\\)")
    refused(rope, x[0], *[draw((1, 3, 4))] * 2, match="'cos' has leading axes \\(1,\\)")
    refused(rope, x[0, 0], table[0], table[0], match="wanted at least 2")
    refused(rope, x, table, table.astype("float64"), match="operands share one dtype")
    refused(rope, x, table, match="array 'sin' is missing")
