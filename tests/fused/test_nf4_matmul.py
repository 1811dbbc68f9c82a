"""What is true of nf4_matmul in particular: its weights are bitsandbytes'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.fused import _lanes
from fuel_jax.fused.nf4_matmul import nf4_matmul

from ..refused import refused

# Dettmers et al. 2023, appendix E, as bitsandbytes prints them.
LEVELS = np.array(
    """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0""".split(),
    np.float32,
)


def data(n, k, block_size, seed=0):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), np.uint8)
    return packed, rng.uniform(0.5, 1.5, (n, k // block_size)).astype(np.float32)


def oracle(packed, absmax, block_size, low_nibble_first=False):
    """Element by element."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    w = np.zeros((n, k), np.float32)
    for row in range(n):
        for j in range(k):
            byte = packed[row, j // 2]
            low = (j % 2 == 0) == low_nibble_first
            w[row, j] = LEVELS[byte & 15 if low else byte >> 4] * absmax[row, j // block_size]
    return w


def weight(packed, absmax, **params):
    """The weight as the op sees it: the product with the identity is exact."""
    identity = np.eye(2 * packed.shape[1], dtype=np.float32)
    return np.asarray(nf4_matmul(identity, packed, absmax, **params)).T


def near(got, want, bound=2e-6):
    """Within ``bound`` of the largest."""
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("low_nibble_first", [False, True])
@pytest.mark.parametrize(("k", "block_size"), [(64, 64), (96, 32), (6, 3), (4, 1)])
def test_weights_of_every_code(k, block_size, low_nibble_first):
    packed, absmax = data(7, k, block_size)
    packed[0, : min(16, k // 2)] = np.arange(0, 256, 17, np.uint8)[: k // 2]
    got = weight(packed, absmax, block_size=block_size, low_nibble_first=low_nibble_first)
    np.testing.assert_array_equal(got, oracle(packed, absmax, block_size, low_nibble_first))


@pytest.mark.parametrize("low_nibble_first", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_byte_by_byte_against_float64(dtype, low_nibble_first, draw, monkeypatch):
    """Every code, in either nibble; parts of the rows, the last one shorter."""
    monkeypatch.setattr(_lanes, "WORDS", 8 * 512)
    packed, absmax = data(19, 512, 128)
    packed[0] = np.arange(256, dtype=np.uint8)
    params = {"block_size": 128, "low_nibble_first": low_nibble_first}
    w = oracle(packed, absmax, **params).astype(np.float64)
    a = draw((3, 512), dtype)
    got = nf4_matmul.using("lanes")(a, packed, absmax, **params)
    assert got.dtype == a.dtype
    near(got, np.asarray(a, np.float64) @ w.T, 2e-6 if dtype == "float32" else 2.0**-8)
    identity = np.eye(512, dtype=np.float32)
    exact = nf4_matmul.using("lanes")(identity, packed, absmax, **params)
    np.testing.assert_array_equal(exact.T, w.astype(np.float32))


def test_element_0_is_the_high_nibble():
    """bitsandbytes packs −1, 0 as 0x07; Fuel's CPU kernel would read 0, −1."""
    packed, absmax = np.array([[0x07]], np.uint8), np.ones((1, 1), np.float32)
    np.testing.assert_array_equal(weight(packed, absmax, block_size=2), [[-1, 0]])
    low = weight(packed, absmax, block_size=2, low_nibble_first=True)
    np.testing.assert_array_equal(low, [[0, -1]])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_products_against_float64(dtype, draw):
    packed, absmax = data(33, 128, 64)
    a = draw((2, 7, 128), dtype)
    want = np.asarray(a, np.float64) @ oracle(packed, absmax, 64).astype(np.float64).T
    got = nf4_matmul(a, packed, absmax)
    assert got.dtype == a.dtype
    bound = {"float32": 2e-6, "float64": 1e-6, "bfloat16": 2**-8, "float16": 2**-11 + 2e-6}[dtype]
    near(got, want, bound)


def test_float64_scales_are_not_narrowed(draw):
    packed, absmax = data(3, 64, 64)
    absmax = absmax.astype(np.float64) + 1e-9
    a = draw((2, 64), "float64")
    levels = oracle(packed, np.ones((3, 1), np.float32), 64).astype(np.float64)
    near(nf4_matmul(a, packed, absmax), np.asarray(a) @ (levels * absmax).T, 1e-14)


def test_blocks_of_rows_give_the_same(draw):
    n, k = 101, 32768
    packed, absmax = data(n, k, 64)
    w = np.stack([LEVELS[packed >> 4], LEVELS[packed & 15]], -1).reshape(n, -1, 64)
    w = (w * absmax[..., None]).reshape(n, k).astype(np.float64)
    for m in (1, 3):
        a, g = draw((m, k)), draw((m, n))
        y, pull = jax.vjp(lambda a: nf4_matmul.using("blocked")(a, packed, absmax), a)
        near(y, np.asarray(a, np.float64) @ w.T)
        near(pull(g)[0], np.asarray(g, np.float64) @ w)


def test_the_weight_is_never_held_whole():
    n = k = 4096
    a = jax.ShapeDtypeStruct((4, k), jnp.bfloat16)
    packed = jax.ShapeDtypeStruct((n, k // 2), jnp.uint8)
    absmax = jax.ShapeDtypeStruct((n, k // 64), jnp.float32)
    f = lambda *arrays: nf4_matmul(*arrays).sum().astype("float32")
    for program in (f, jax.grad(f)):
        memory = jax.jit(program).lower(a, packed, absmax).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * n * k / 3


def test_scales_are_frozen(draw):
    packed, absmax = data(3, 64, 64)
    a = draw((2, 64))
    f = lambda a, absmax: nf4_matmul(a, packed, absmax).sum()
    with pytest.raises(fuel_jax.NotDifferentiable, match="no gradient for 'absmax'"):
        jax.grad(f, 1)(a, absmax)
    want = np.tile(oracle(packed, absmax, 64).sum(0), (2, 1))
    for _ in range(2):  # refusing once leaves the other gradient as it was, wrapped or not
        near(jax.grad(f)(a, absmax), want)
        near(jax.grad(jax.checkpoint(f))(a, absmax), want)
        with pytest.raises(fuel_jax.NotDifferentiable):
            jax.jit(jax.grad(f, 1))(a, absmax)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 2), (2, 64, 0), (2, 0, 3)])
def test_nothing(m, k, n):
    packed, absmax = data(n, k, 64)
    a = jnp.ones((m, k), "float32")
    y, pull = jax.vjp(lambda a: nf4_matmul(a, packed, absmax), a)
    assert y.shape == (m, n)
    assert not y.any()
    assert pull(y)[0].shape == a.shape


def test_bad_calls(draw):
    packed, absmax = data(3, 96, 32)
    a = draw((2, 96))
    bad = lambda match, *arrays, **params: refused(nf4_matmul, *arrays, match=match, **params)
    bad("'block_size' is 64 and 'w_packed' has 96 weights a row", a, packed, absmax)
    bad("'block_size' is 0", a, packed, absmax, block_size=0)
    bad("'block_size' is 64.0; it must be an int", a, packed, absmax, block_size=64.0)
    bad(
        "'absmax' has 3 blocks a row; 96 weights in blocks of 16 make 6",
        a,
        packed,
        absmax,
        block_size=16,
    )
    bad(
        "'activations' has rows of 64 and 'w_packed' has 96",
        a[:, :64],
        packed,
        absmax,
        block_size=32,
    )
    bad("its axis n is 2, but n is 3", a, packed, absmax[:2], block_size=32)
    bad("'w_packed' is int32.*uint8", a, packed.astype(np.int32), absmax, block_size=32)
    bad("'absmax' is float16.*float32", a, packed, absmax.astype(np.float16), block_size=32)
    bad("it has 1 axes, wanted at least 2", a[0], packed, absmax, block_size=32)
    bad("array 'absmax' is missing", a, packed)
