"""What is true of awq_matmul in particular: AutoAWQ's GEMV layout, padding included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.fused import _lanes
from fuel_jax.fused.awq_matmul import awq_matmul

from ..refused import refused


def padded_words(k, group_size):
    """Words of zero points in a row, as AutoAWQ pads them (modules/linear/gemv.py)."""
    multiple = {32: 4, 64: 2}.get(group_size, 1)
    words = -(-(k // group_size) // 8)
    return -(-words // multiple) * multiple


def pack(codes):
    """``[n, k]`` codes to ``[n, k / 8]`` words, element i of a word in nibble i."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= codes[:, i::8].astype(np.uint32) << np.uint32(4 * i)
    return words


def data(n, k, group_size, seed=0):
    """Operands, and the weight they stand for.  What pads them is garbage."""
    rng = np.random.default_rng(seed)
    groups, zeros_w = k // group_size, padded_words(k, group_size)
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, 8 * zeros_w))
    scales = rng.uniform(-0.06, 0.06, (n, 8 * zeros_w)).astype(np.float16)
    scales[:, groups:] = np.nan
    w = np.zeros((n, k))
    for row in range(n):
        for j in range(k):
            g = j // group_size
            w[row, j] = (int(codes[row, j]) - int(zeros[row, g])) * float(scales[row, g])
    return (pack(codes), pack(zeros), scales), w


def near(got, want, bound=2e-6):
    """Within ``bound`` of the largest."""
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize(("k", "group_size"), [(256, 128), (192, 64), (96, 32), (24, 3), (8, 8)])
def test_weights_are_exact(k, group_size):
    """The product with the identity: code minus zero, times a half, fits float32."""
    arrays, w = data(5, k, group_size)
    got = awq_matmul(np.eye(k, dtype=np.float32), *arrays, group_size=group_size)
    np.testing.assert_array_equal(got, w.T.astype(np.float32))


@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_codes(code, zero):
    weight = np.full((1, 1), code * 0x11111111, np.uint32)
    zeros = np.full((1, 1), zero * 0x11111111, np.uint32)
    scales = np.full((1, 8), 65504, np.float16)
    got = awq_matmul(np.eye(8, dtype=np.float32), weight, zeros, scales, group_size=8)
    np.testing.assert_array_equal(got, np.full((8, 1), (code - zero) * 65504.0, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 7])
def test_products_against_float64(dtype, m, draw):
    arrays, w = data(33, 256, 64)
    a = draw((2, m, 256), dtype)
    got = awq_matmul(a, *arrays, group_size=64)
    assert got.dtype == a.dtype
    bound = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 2**-8, "float16": 2**-11 + 2e-6}[dtype]
    near(got, np.asarray(a, np.float64) @ w.T, bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_word_by_word_against_float64(dtype, draw, monkeypatch):
    """Parts of the rows, the last one shorter; weights exact."""
    monkeypatch.setattr(_lanes, "WORDS", 8 * 64)
    arrays, w = data(19, 512, 128)
    a = draw((3, 512), dtype)
    got = awq_matmul.using("lanes")(a, *arrays, group_size=128)
    assert got.dtype == a.dtype
    near(got, np.asarray(a, np.float64) @ w.T, 2e-6 if dtype == "float32" else 2.0**-8)
    identity = np.eye(512, dtype=np.float32)
    exact = awq_matmul.using("lanes")(identity, *arrays, group_size=128)
    np.testing.assert_array_equal(exact.T, w.astype(np.float32))


def test_split_k_iters_changes_nothing(draw):
    arrays, _ = data(5, 128, 128)
    a = draw((3, 128))
    one, eight = (awq_matmul(a, *arrays, split_k_iters=s) for s in (1, 8))
    np.testing.assert_array_equal(one, eight)


def test_blocks_of_rows_give_the_same(draw):
    n, k, group_size = 101, 32768, 128
    rng = np.random.default_rng(1)
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // group_size))
    scales = rng.uniform(0.02, 0.06, zeros.shape).astype(np.float16)
    w = (codes.reshape(n, -1, group_size) - zeros[..., None]) * scales[..., None].astype(float)
    w, arrays = w.reshape(n, k), (pack(codes), pack(zeros), scales)
    for m in (1, 3):
        a, g = draw((m, k)), draw((m, n))
        y, pull = jax.vjp(lambda a: awq_matmul.using("blocked")(a, *arrays), a)
        near(y, np.asarray(a, np.float64) @ w.T)
        near(pull(g)[0], np.asarray(g, np.float64) @ w)


def test_the_weight_is_never_held_whole():
    n = k = 4096
    shapes = {"uint32": ((n, k // 8), (n, k // 1024)), "float16": ((n, k // 128),)}
    arrays = [jax.ShapeDtypeStruct(s, dtype) for dtype in shapes for s in shapes[dtype]]
    a = jax.ShapeDtypeStruct((4, k), jnp.bfloat16)
    f = lambda *arrays: awq_matmul(*arrays).sum().astype("float32")
    for program in (f, jax.grad(f)):
        memory = jax.jit(program).lower(a, *arrays).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * n * k / 3


def test_scales_are_frozen(draw):
    (weight, zeros, scales), w = data(3, 128, 128)
    a = draw((2, 128))
    scales[:, 1:] = 0  # no NaN, so that finiteness says nothing
    f = lambda a, scales: awq_matmul(a, weight, zeros, scales).sum()
    with pytest.raises(fuel_jax.NotDifferentiable, match="no gradient for 'scales'"):
        jax.grad(f, 1)(a, scales)
    near(jax.grad(f)(a, scales), np.tile(w.sum(0), (2, 1)))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 128, 2), (2, 128, 0), (2, 0, 3)])
def test_nothing(m, k, n):
    arrays, _ = data(n, k, 128)
    a = jnp.ones((m, k), "float32")
    y, pull = jax.vjp(lambda a: awq_matmul(a, *arrays), a)
    assert y.shape == (m, n)
    assert not y.any()
    assert pull(y)[0].shape == a.shape


def test_bad_calls(draw):
    (weight, zeros, scales), _ = data(3, 96, 32)
    arrays = [draw((2, 96)), weight, zeros, scales]

    def bad(match, at=None, to=None, **params):
        given = [to if i == at else x for i, x in enumerate(arrays)]
        refused(awq_matmul, *given, match=match, **({"group_size": 32} | params))

    bad("'group_size' is 64 and 'weight' has 96 weights a row", group_size=64)
    bad("'group_size' is 0", group_size=0)
    bad("'group_size' is -1 .* Pass group_size=96 if a row is one group", group_size=-1)
    bad("'split_k_iters' is 0; it must be at least 1", split_k_iters=0)
    bad("'split_k_iters' is 2.5; it must be an int", split_k_iters=2.5)
    bad("'zeros' has 4 words a row, for 32 groups; 96 .* in groups of 1 make 96", group_size=1)
    bad("'scales' has 3 columns and 'zeros' has 4 words a row", at=3, to=scales[:, :3])
    bad("'activations' has rows of 88 and 'weight' has 96", at=0, to=arrays[0][:, :88])
    bad("its axis n is 2, but n is 3", at=2, to=zeros[:2])
    bad("'weight' is int32.*uint32", at=1, to=weight.view(np.int32))
    bad("it has 1 axes, wanted at least 2", at=0, to=arrays[0][0])
    refused(awq_matmul, *arrays[:3], match="array 'scales' is missing", group_size=32)
