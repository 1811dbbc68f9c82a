"""bitsandbytes as a witness of nf4_matmul, on the CPU: quantise with it, multiply with ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax

torch = pytest.importorskip("torch", reason="torch is not installed: bitsandbytes needs it")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

N, K = 7, 512
HALF_ULP = {"float32": 2e-6, "float16": 2**-11 + 2e-6, "bfloat16": 2**-8}  # of a result, rounded
every_dtype = pytest.mark.parametrize("dtype", HALF_ULP)
every_block_size = pytest.mark.parametrize("block_size", [32, 64, 128, 256])


def quantised(dtype, block_size, **options):
    """A weight with a block of zeros, tiny and huge blocks, as bitsandbytes quantises it."""
    w = np.random.default_rng(3).normal(size=(N, K))
    w[0, :4] = -9, 9, 0, 1e-4
    w[1], w[2], w[3] = 0, w[2] * 1e-3, w[3] * 1e2
    w = torch.tensor(w, dtype=getattr(torch, dtype))
    return bnb.functional.quantize_4bit(w, blocksize=block_size, quant_type="nf4", **options)


def operands(packed, absmax):
    """What is flat in bitsandbytes, by rows."""
    return packed.numpy().reshape(N, -1), absmax.numpy().reshape(N, -1)


def multiply(a, packed, state):
    return fuel_jax.nf4_matmul(a, *operands(packed, state.absmax), block_size=state.blocksize)


def f64(x):
    """A tensor or an array in float64."""
    return np.asarray(x.double() if isinstance(x, torch.Tensor) else x, np.float64)


def error(got, want):
    """The largest, beside the largest value."""
    return np.abs(f64(got) - want).max() / np.abs(want).max()


@every_dtype
@every_block_size
def test_weights_are_exact(block_size, dtype):
    """It rounds them to the dtype it dequantises to; ours are float32, and round to the same."""
    packed, state = quantised(dtype, block_size)
    want = bnb.functional.dequantize_4bit(packed, state)
    assert want.dtype == getattr(torch, dtype)
    got = np.asarray(multiply(np.eye(K, dtype=np.float32), packed, state)).T
    np.testing.assert_array_equal(f64(torch.tensor(got).to(want.dtype)), f64(want))


@every_dtype
@every_block_size
def test_products_against_float64(block_size, dtype, draw):
    packed, state = quantised("float32", block_size)
    w = f64(bnb.functional.dequantize_4bit(packed, state))
    a, g = draw((2, 3, K), dtype), draw((2, 3, N), dtype)
    y, pull = jax.vjp(lambda a: multiply(a, packed, state), a)
    assert y.dtype == a.dtype
    for row in range(N):  # each of its own size; row 1 is of zeros
        assert np.abs(f64(y)[..., row] - f64(a) @ w[row]).max() <= (
            HALF_ULP[dtype] * np.abs(f64(a) @ w[row]).max()
        )
    assert error(pull(g)[0], f64(g) @ w) <= HALF_ULP[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_further_from_float64_than_its_own_product(dtype, draw):
    """Its product on a CPU rounds the weights to ``dtype`` first; ours rounds the result only."""
    packed, state = quantised(dtype, 64)
    w = f64(state.code)[np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], -1)]
    w = (w.reshape(-1, 64) * f64(state.absmax)[:, None]).reshape(N, K)
    a = draw((16, K), dtype)
    want = f64(a) @ w.T
    theirs = bnb.matmul_4bit(torch.tensor(f64(a)).to(getattr(torch, dtype)), packed.t(), state)
    assert error(multiply(a, packed, state), want) <= error(theirs, want)


def test_scales_that_are_quantised_themselves():
    """``compress_statistics``: its own function restores them."""
    packed, state = quantised("float32", 64, compress_statistics=True)
    assert state.nested
    absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    got = fuel_jax.nf4_matmul(jnp.eye(K, dtype="float32"), *operands(packed, absmax))
    want = bnb.functional.dequantize_4bit(packed, state)
    np.testing.assert_array_equal(np.asarray(got).T, want.numpy())


@pytest.mark.parametrize(
    "what",
    [
        "fp4: Fuel has no such weights",
        "blocks that run over the end of a row: nf4_matmul refuses them, see its own tests",
    ],
)
def test_left_out(what):
    pytest.skip(what)
