"""Few rows of activations times packed weights, interpreted, in what ``test_quantised`` leaves out.

Rows of Q4_0 and Q8_0 that are whole words, as those of every model are: read in order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.qmatmul import qmatmul
from pallas_kernels import quantised_gguf, quantised_rows
from pallas_kernels.quantised_rows import Cut

from .test_launch import lowered
from .test_quantised import awq_weight, gguf_weight, nf4_weight

RNG = np.random.default_rng(1)
WEIGHTS = {
    "awq": functools.partial(awq_weight, group_size=128),
    "nf4": functools.partial(nf4_weight, block_size=64, low_nibble_first=False),
    **{
        name: functools.partial(gguf_weight, quant_type=name)
        for name in ("Q4_0", "Q8_0", "Q4K", "Q6K")
    },
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(
    ("m", "n", "k", "cut"),
    [
        (1, 5, 1024, Cut(4, 64, 3)),  # a row of the weight is computed twice; tiles remain
        (1, 6, 1024, Cut(4, 128, 2, beside=True)),  # several rows in a tile
        (2, 4, 2048, Cut(2, 32, 1, early=True)),  # the next tile while this one is decoded
        (1, 7, 1024, Cut(2, 32, 2, early=True, bounded=True)),
        (4, 4, 512, Cut(2, 128, 1)),  # activations of fewer units than that fit into registers
        (5, 3, 256, Cut(4, 32, 4)),  # fewer rows than a program takes, and fewer tiles
    ],
)
def test_against_float64(name, m, n, k, cut):
    packed, packing, weight = WEIGHTS[name](n, k)
    assert (packing.in_order is not None) == (name in ("Q4_0", "Q8_0"))
    x = RNG.normal(size=(m, k)).astype(np.float32)
    options = {"packing": packing, "name": "test", "interpret": True, "cut": cut}
    run = jax.jit(lambda x, *packed: quantised_rows.times_transposed(x, packed, n, **options))
    want = x.astype(np.float64) @ weight.T
    got = np.asarray(run(x, *packed), np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_in_order_what_is_not_finite(name):
    """Scales meet activations of 0, beside which infinite ones are."""
    (words,), packing, weight = gguf_weight(3, 128, name)
    x = RNG.normal(size=(2, 128)).astype(np.float32)
    x[0, 32], x[1, 127] = np.inf, np.nan
    options = {"packing": packing, "name": "test", "interpret": True, "cut": Cut(2, 32, 2)}
    got = quantised_rows.times_transposed(jnp.asarray(x), (jnp.asarray(words),), 3, **options)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got[0], np.sign(weight[:, 32]) * np.inf)
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("setting", range(3))
@pytest.mark.parametrize(("name", "size"), [("Q4_0", 18), ("Q8_0", 34)])
def test_lowers(name, size, setting):
    """In each of the first settings that are tried."""
    of, (k, n) = jax.ShapeDtypeStruct, (4096, 14335)
    arrays = of((1, k), "float32"), of((n * k // 32 * size // 4,), "uint32")
    (kernel,) = (kernel for kernel in qmatmul.kernels if kernel.name == "triton")
    params = {"quant_type": name, "k": k, "n": n}
    assert kernel.tiles is not None
    tile = kernel.tiles(*arrays, **params).settings[setting]
    text = lowered(functools.partial(kernel.run, tile=tile, **params), *arrays)
    assert f"fuel_qmatmul_{name.lower()}" in text


def test_small_weights_are_cut_into_more_programs():
    """A program for each four of 4096 rows leaves half of an H200 idle."""
    packing = quantised_gguf.GGUF["Q4_0"](4096)
    assert quantised_rows.cut(packing, 14336).rows == 4
    assert quantised_rows.cut(packing, 4096).rows == 2
