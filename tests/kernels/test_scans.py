"""Running sums and positions of extremes alone, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pallas_kernels import arg_extreme, cumsum as sums


@functools.partial(jax.jit, static_argnames=("dim", "tile"))
def running_sums(x, dim, tile):
    """With what is around the kernel compiled as one program."""
    return sums.cumsum(x, dim=dim, interpret=True, tile=tile)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    data=st.data(),
    tile=st.sampled_from([None, sums.Tile(2, 8, 1), sums.Tile(1, 16, 1)]),
)
def test_running_sums(shape, data, tile):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.asarray(np.random.default_rng(0).normal(size=shape), np.float32)
    got = running_sums(x, dim=dim, tile=tile)
    want = np.cumsum(x.astype(np.float64), dim)
    np.testing.assert_allclose(got, want, atol=2e-6 * max(np.abs(want).max(), 1))


def test_what_a_running_sum_does_not_reach_is_untouched():
    x = np.ones((3, 20), np.float32)
    x[0, 9], x[1, 3] = np.nan, np.inf
    tile = sums.Tile(2, 8, 1)
    got = running_sums(x, dim=1, tile=tile)
    np.testing.assert_array_equal(got, np.cumsum(x, 1))


def test_running_sums_are_differentiable_in_both_modes_and_batched():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)))
    f = functools.partial(sums.cumsum, dim=0, interpret=True)
    plain = functools.partial(jnp.cumsum, axis=0)
    square = lambda f: lambda x: jnp.sum(jnp.square(f(x)))
    for derivative in (jax.grad, jax.jacfwd, lambda g: jax.jacrev(jax.grad(g))):
        want, got = (jax.jit(derivative(square(g)))(x) for g in (plain, f))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(f)(x[None])[0], plain(x), rtol=1e-5, atol=1e-6)


SPECIAL = {
    "ties": lambda x: np.round(x),
    "lowest": lambda x: np.full_like(x, -np.inf),
    "highest": lambda x: np.full_like(x, np.inf),
    "NaN in the middle": lambda x: np.where(np.arange(x.shape[1]) >= x.shape[1] // 2, np.nan, x),
    "NaN beside inf": lambda x: np.where(
        np.arange(x.size).reshape(x.shape) % 3 == 1, np.nan, np.inf
    ),
}


@jax.jit
def positions(x):
    """Of the largest and of the smallest."""
    position = functools.partial(arg_extreme.position, interpret=True, tile=arg_extreme.Tile(16, 1))
    return [position(x, dim=1, largest=largest) for largest in (True, False)]


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("n", [1, 7, 16, 50, 128])
def test_positions(n, special):
    """Of the first NaN, else of the first to tie; 128 in tiles of 16 are cut into eight pieces."""
    x = SPECIAL[special](np.random.default_rng(n).normal(size=(3, n)) * 3).astype(np.float32)
    for got, want in zip(positions(x), (np.argmax(x, 1), np.argmin(x, 1)), strict=True):
        assert got.dtype == jnp.uint32
        np.testing.assert_array_equal(got, want)
