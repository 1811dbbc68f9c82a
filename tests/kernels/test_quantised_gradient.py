"""Cotangents times packed weights: interpreted, on any shape, and what is not finite; in parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fuel_jax.fused import awq_matmul as awq, nf4_matmul as nf4, qmatmul as gguf
from fuel_jax.fused._frozen_weight import Block, times_blocked
from pallas_kernels import quantised, quantised_gradient
from pallas_kernels.quantised_gradient import Cut

from .test_launch import lowered
from .test_quantised import RNG, awq_weight, gguf_weight, nf4_weight, operands

WEIGHTS = {
    "awq": lambda n: awq_weight(n, 384, 128),
    "nf4": lambda n: nf4_weight(n, 192, 64, False),
    "Q5_1": lambda n: gguf_weight(n, 160, "Q5_1"),
    "Q6K": lambda n: gguf_weight(n, 256, "Q6K"),
}
BOUND = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11 + 2e-6}


def times(g, weight, packing, cut):
    """The kernel alone."""
    options = {"packing": packing, "name": "test", "interpret": True, "cut": cut}
    return quantised_gradient.times(g, weight, **options)


@settings(max_examples=6)
@given(
    name=st.sampled_from(list(WEIGHTS)),
    m=st.integers(1, 20),
    n=st.integers(1, 70),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    cut=st.sampled_from([Cut(16, 16, 16, 1, 4, 2), Cut(16, 16, 32, 3, 4, 2)]),
)
def test_against_float64(name, m, n, dtype, cut):
    """Units, rows and parts of which the last ones are not full, or are not there at all."""
    packed, packing, weight = WEIGHTS[name](n)
    g = jnp.asarray(np.random.default_rng(m).normal(size=(m, n)), dtype)
    got = times(g, packed, packing, cut)
    assert got.dtype == dtype
    rounded = np.asarray(jnp.asarray(weight, dtype), np.float64)
    want = np.asarray(g, np.float64) @ rounded
    scale = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=BOUND[dtype] * scale)


def test_what_is_not_finite():
    """The last row is read for those beyond the end, too: 0 · inf would be NaN."""
    (codes, absmax), _, _ = nf4_weight(5, 128, 64, False)
    codes[4] = 0xFEDCFEDC  # levels above 0
    absmax[4] = np.inf
    g = np.ones((3, 5), np.float32)
    g[1, 2], g[2] = np.nan, -1
    packing = quantised.nf4(16, 64, False, nf4.LEVELS)
    got = times(jnp.asarray(g), (codes, absmax), packing, Cut(16, 16, 16, 2, 4, 2))
    want = np.broadcast_to([[np.inf], [np.nan], [-np.inf]], (3, 128))
    np.testing.assert_array_equal(got, want)


OPS = {
    "awq": (awq.awq_matmul_backward, {"group_size": 128, "split_k_iters": 8}),
    "nf4": (nf4.nf4_matmul_backward, {"block_size": 64, "low_nibble_first": False}),
    "Q6K": (gguf.qmatmul_backward, {"quant_type": "Q6K"}),
}


@pytest.mark.parametrize("name", OPS)
def test_of_the_op(name):
    """A batch, through the op; halves where it takes them."""
    op, params = OPS[name]
    packed, _, weight = WEIGHTS[name](5)
    n, k = weight.shape
    packed = (packed[0].view(np.uint8), *packed[1:]) if name == "nf4" else packed
    params = params | {"k": k, "n": n} if name == "Q6K" else params
    dtype = "float32" if name == "Q6K" else "bfloat16"
    g = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, n)), dtype)
    got = op.using("triton")(g, *packed, **params)
    assert (got.shape, got.dtype) == ((2, 3, k), dtype)
    want = np.asarray(g, np.float64) @ np.asarray(jnp.asarray(weight, dtype), np.float64)
    bound = BOUND[dtype] * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        *(("awq", 1, "bfloat16"), ("awq", 128, "float16"), ("awq", 2048, "bfloat16")),
        *(("nf4", 16, "bfloat16"), ("nf4", 100, "float32"), ("Q6K", 100, "float32")),
    ],
)
def test_lowers(name, m, dtype):
    k, n = 4096, 14336
    op, params = OPS[name]
    params = params | {"k": k, "n": n} if name == "Q6K" else params
    _, *packed = operands(name, m, k, n, dtype)
    g = jax.ShapeDtypeStruct((m, n), dtype)
    name = "qmatmul_q6k" if name == "Q6K" else f"{name}_matmul"
    run = functools.partial(op.using("triton"), **params)
    assert f"fuel_{name}_backward" in lowered(run, g, *packed)


@pytest.mark.parametrize(
    ("m", "dtype", "serves"),
    [
        (1, "bfloat16", "triton"),
        (256, "bfloat16", "triton"),
        (512, "bfloat16", "rounded"),
        (64, "float32", "parts"),
    ],
)
def test_choice(m, dtype, serves):
    """No dense copy on a GPU either, and the kernel where it was seen to be faster."""
    op, params = OPS["nf4"]
    _, *packed = operands("nf4", m, 4096, 14336, dtype)
    choices = op.explain(jax.ShapeDtypeStruct((m, 14336), dtype), *packed, **params).forward
    here = {c.kernel.name: c for c in choices}
    assert set(here[serves].serves) & {"cuda", "default"}
    assert (
        serves == "triton" or ("256 XLA" if m > 256 else "not compared") in here["triton"].why_not
    )
    assert here["xla"].serves == ()


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        *((name, "parts", "float32") for name in OPS),
        *(("awq", "rounded", "bfloat16"), ("nf4", "rounded", "bfloat16")),
    ],
)
def test_no_dense_copy(name, form, dtype):
    """Of the weight in the dtype it is multiplied in, two fifths at a time."""
    k, n = 4096, 14336
    op, params = OPS[name]
    params = params | {"k": k, "n": n} if name == "Q6K" else params
    _, *packed = operands(name, 1, k, n, dtype)
    g = jax.ShapeDtypeStruct((64, n), dtype)
    run = jax.jit(functools.partial(op.using(form), **params))
    memory = run.lower(g, *packed).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.4 * n * k * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_in_parts(dtype):
    """Each part meets halves, and is added in float32."""
    (codes, absmax), _, weight = nf4_weight(21, 64, 64, False)
    order = {"low_nibble_first": False}
    rows = nf4.decoder(jnp.asarray(codes.view(np.uint8)), jnp.asarray(absmax), jnp.float32, **order)
    g = jnp.asarray(RNG.normal(size=(2, 3, 21)), dtype)
    got = times_blocked(g, rows, 21, 64, Block(8), rounded=True)
    assert got.dtype == dtype
    want = np.asarray(g, np.float64) @ np.asarray(jnp.asarray(weight, dtype), np.float64)
    bound = BOUND[dtype] * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=bound)
