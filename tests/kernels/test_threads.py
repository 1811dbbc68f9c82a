"""What the threads of a warp tell each other, interpreted."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _threads
from pallas_kernels._launch import INTERPRETED


@pytest.fixture(autouse=True)
def interpreted():
    with INTERPRETED(True):
        yield


def drawn(n, *shape):
    return [jnp.asarray(x) for x in np.random.default_rng(n).normal(size=(n, *shape))]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 8, 16])
@pytest.mark.parametrize("shape", [(8, 4), (1, 32), (32, 1)])
def test_sums_of_several(shape, n, axis):
    """Fewer than a row has threads begin again; more are several arrays."""
    xs = drawn(n, *shape)
    size = shape[axis]
    found = _threads.summed(xs, axis)
    assert len(found) == max(n // size, 1)
    for k, y in enumerate(found):
        for i in range(size):
            want = xs[(k * size + i) % n].sum(axis)
            np.testing.assert_allclose(jnp.take(y, i, axis), want, rtol=1e-5, atol=1e-6)


def test_rows_in_one():
    (x,) = drawn(1, 8, 4)
    four = jnp.concatenate([x[:4], x[:4]])
    for op, of_all in ((jnp.add, jnp.sum), (jnp.minimum, jnp.min)):
        found = _threads.over_rows(op, four, 4)
        want = jnp.broadcast_to(of_all(x[:4], 0), (8, 4))
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(_threads.of_row(x, 3), jnp.broadcast_to(x[3], (8, 4)))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_apart_and_joined(n):
    xs = drawn(n, 4, 2)
    whole = _threads.joined(xs)
    np.testing.assert_array_equal(whole, jnp.stack(xs, -1))
    for x, y in zip(xs, _threads.parts(whole), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_of_pairs(dtype):
    xs = [jnp.asarray(x, dtype) for x in ([1.5, -2.0, np.inf], [0.1, 3e-5, np.nan])]
    pairs = jnp.stack(xs, -1).view(jnp.int32)[..., 0]
    for x, y in zip(xs, _threads.halves(pairs, jnp.dtype(dtype)), strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y)
    narrow = functools.partial(_threads.narrowed, dtype=jnp.dtype(dtype))
    np.testing.assert_array_equal(narrow(xs[0].astype(jnp.float32)), xs[0])
