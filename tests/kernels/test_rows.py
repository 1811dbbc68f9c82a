"""Softmax and the norms alone, interpreted: any shape, rows read whole and in blocks."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fuel_jax.fused import layer_norm, rms_norm, softmax
from pallas_kernels import norms, softmax as softmaxes
from pallas_kernels._rows import ON_CHIP, Blocks, blocks, by_rows

EPS = 1e-5


def softmax64(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms64(x, g=None):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return x * r if g is None else r * (g - x * r * r * (x * g).mean(-1, keepdims=True))


def layer64(x, g=None):
    d = x - x.mean(-1, keepdims=True)
    if g is None:
        return rms64(d)
    return rms64(d, g - g.mean(-1, keepdims=True))


# name: maths, parameters, number of operands, in float64, the op that promises the precision
KERNELS = {
    "softmax": (softmaxes.SOFTMAX, {}, 1, softmax64, softmax),
    "log_softmax": (softmaxes.LOG_SOFTMAX, {}, 1, lambda x: np.log(softmax64(x)), softmax),
    "softmax_backward": (
        softmaxes.SOFTMAX_BACKWARD,
        {},
        2,
        lambda y, g: y * (g - (y * g).sum(-1, keepdims=True)),
        softmax,
    ),
    "log_softmax_backward": (
        softmaxes.LOG_SOFTMAX_BACKWARD,
        {},
        2,
        lambda y, g: g - np.exp(y) * g.sum(-1, keepdims=True),
        softmax,
    ),
    "rms_norm": (norms.RMS, {"eps": EPS}, 1, rms64, rms_norm),
    "rms_norm_backward": (norms.RMS_BACKWARD, {"eps": EPS}, 2, rms64, rms_norm),
    "layer_norm": (norms.LAYER, {"eps": EPS}, 1, layer64, layer_norm),
    "layer_norm_backward": (norms.LAYER_BACKWARD, {"eps": EPS}, 2, layer64, layer_norm),
}
CUTS = st.sampled_from([None, Blocks(1, 8, 1), Blocks(2, 32, 1), Blocks(4, 4, 1)])


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 9),
    n=st.integers(2, 70),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    cut=CUTS,
)
def test_against_float64(name, rows, n, dtype, cut):
    maths, params, operands, want, op = KERNELS[name]
    rng = np.random.default_rng(rows * 1000 + n)
    draw = lambda: rng.normal(size=(rows, n)).astype(jnp.dtype(dtype))  # which compiles nothing
    arrays = [jnp.asarray(draw()) for _ in range(operands)]
    got = by_rows(maths, *arrays, interpret=True, tile=cut, **params)
    want = want(*(np.asarray(x, np.float64) for x in arrays))
    assert got.shape == want.shape
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= op.PRECISION.tolerance(dtype) * max(np.abs(want).max(), 1)


@pytest.mark.parametrize("cut", [None, Blocks(1, 4, 1)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_special_rows(name, cut):
    """As the op: −inf alone, inf, NaN, and finite ones however large; one block of −inf first."""
    inf, nan = np.inf, np.nan
    rows = [
        [-inf] * 8,
        [0, inf, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, nan, 0],
        [3e38, -3e38, 0, 0, 3e38, 0, 0, 0],
        [-inf, -inf, -inf, -inf, 1, -inf, 2, 3],
        [1e10] * 8,
    ]
    x = jnp.array(rows, "float32")
    op = {"softmax": softmax.softmax_last_dim, "log_softmax": softmax.log_softmax_last_dim}[name]
    got = by_rows(KERNELS[name][0], x, interpret=True, tile=cut)
    np.testing.assert_allclose(got, op.body(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cut", [None, Blocks(1, 16, 1)])
def test_rows_far_from_zero_keep_their_noise(cut):
    """The mean of rows near 10⁴ is rounded by 10⁻³, which is not in the result."""
    rng = np.random.default_rng(0)
    x = np.asarray(1e4 + rng.normal(size=(3, 64)), np.float32)
    got = by_rows(norms.LAYER, jnp.asarray(x), interpret=True, tile=cut, eps=EPS)
    np.testing.assert_allclose(got, layer64(x.astype(np.float64)), atol=5e-6)


def test_a_row_is_read_once_while_it_fits_on_chip():
    for n in (1, 64, 1000, 8192, 16384):
        for operands in (1, 2):
            assert blocks(10**5, n, operands).columns >= n
    cut = blocks(10**5, 2 * ON_CHIP, 1)
    assert cut.columns < ON_CHIP
    assert cut.rows == 1


@pytest.mark.parametrize(
    ("op", "shape", "reason"),
    [
        (softmax.softmax_last_dim, (1024, 64), "less than 768"),
        (softmax.softmax_last_dim, (1024, 1001), "between 16-byte words"),
        (softmax.softmax_last_dim, (1, 65536), "most of the chip idle"),
        (softmax.softmax_last_dim, (1024, 8192), None),
        (softmax.softmax_last_dim_backward, (1024, 64), None),
        (softmax.softmax_last_dim_backward, (1024, 65536), "do not fit on chip"),
        (rms_norm.rms_norm_last_dim, (1024, 8192), "fuses a norm with the gain"),
        (rms_norm.rms_norm_last_dim_backward, (1024, 8192), None),
        (layer_norm.layer_norm_last_dim, (1024, 8192), "fuses a norm with the gain"),
        (layer_norm.layer_norm_last_dim, (1, 8192), None),
        (layer_norm.layer_norm_last_dim, (1, 65536), "fuses a norm with the gain"),
        (layer_norm.layer_norm_last_dim_backward, (1024, 8192), None),
        (layer_norm.layer_norm_last_dim_backward, (1024, 256), "less than 768"),
    ],
)
def test_choice(op, shape, reason):
    """What ``explain`` says: which kernel runs on CUDA, or why XLA does."""
    x = jnp.zeros(shape, "bfloat16")
    choice = op.explain(*[x] * len(op.inputs)).forward[0]
    assert choice.kernel.name == "triton"
    if reason is None:
        assert choice.serves == ("cuda",)
    else:
        assert reason in choice.why_not
