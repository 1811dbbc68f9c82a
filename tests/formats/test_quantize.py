"""Quantisers: what the products read back is within the format's step of every weight."""

import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

import fuel_jax
from fuel_jax.formats.quantize import quantize, quantize_awq, quantize_nf4
from fuel_jax.fused.nf4_matmul import LEVELS

gguf = pytest.importorskip("gguf", reason="it packs blocks of 32, and decodes all of them")

BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS = {name: 32 for name in BY_GGUF} | {f"Q{bits}K": 256 for bits in (2, 3, 4, 5, 6)}
ALIASES = {"Q4_K_M": "Q4K"} | {f"Q{bits}_K": f"Q{bits}K" for bits in (2, 3, 4, 5, 6)}
every_type = pytest.mark.parametrize("name", BLOCKS)

HALF = np.float32(2**-11)  # how far a float16 is off, relative
TINY = 2.0**-24  # the smallest float16: no step but 0 is smaller


def drawn(n, k, seed=0):
    """Weights with outliers, as trained ones have."""
    return (np.random.default_rng(seed).standard_t(3, (n, k)) * 0.05).astype(np.float32)


# -- reading back ---------------------------------------------------------------------------


def ggml_type(name):
    return gguf.GGMLQuantizationType[re.sub(r"(\d)K", r"\1_K", name)]


def read_back(name, words, n, k):
    """The weights as the gguf package decodes them."""
    weights, size = gguf.GGML_QUANT_SIZES[ggml_type(name)]
    count = n * k // weights * size
    assert (words.dtype, words.shape) == (np.uint32, (-(-count // 4),))
    loose = words.astype("<u4").view(np.uint8)
    assert not loose[count:].any()
    return gguf.quants.dequantize(loose[:count].reshape(n, -1), ggml_type(name))


def allowed(name, w):
    """By how much each weight may be off: half a step, and what the scale's rounding adds."""
    size = {"Q2K": 16, "Q3K": 16, "Q6K": 16}.get(name, 32)
    groups = w.reshape(-1, BLOCKS[name] // size, size)
    low, high = np.maximum(-groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    each, most = np.maximum(low, high), lambda x: x.max(-1, keepdims=True)
    up = 1 + 2.0**-9  # a float16 rounded up

    if name in ("Q4_0", "Q5_0"):  # one side is clipped by a code
        bound = each / 2 ** (int(name[1]) - 1) + each * HALF
    elif name in ("Q4_1", "Q5_1"):
        span = groups.max(-1) - groups.min(-1)
        bound = span / (2 ** int(name[1]) - 1) / 2 + (span + np.abs(groups.min(-1))) * HALF
    elif name == "Q8_0":
        bound = each / 127 / 2 + each * HALF
    elif name in ("Q3K", "Q6K"):
        codes, grades = {"Q3K": (4, 31), "Q6K": (32, 127)}[name]
        step = np.maximum(each / codes, np.minimum(low, high) / (codes - 1))
        bound = (step + most(step) * up / grades) * up / 2
    else:
        codes, grades = {"Q2K": (3, 15), "Q4K": (15, 63), "Q5K": (31, 63)}[name]
        below = low + most(low) * up / grades + TINY
        step = (groups.max(-1) + below) / codes
        bound = (step + most(step) * up / grades) * up / 2
    return np.repeat(bound, size).reshape(w.shape) * (1 + 1e-6) + TINY * 128


@every_type
def test_every_weight_is_within_the_format_s_step(name):
    w = drawn(8, 1024)
    back = read_back(name, quantize(w, name), *w.shape)
    off = np.abs(back - w)
    assert (off <= allowed(name, w)).all()
    assert off.max() > 0.3 * allowed(name, w).max()  # the bound is no loose one


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(BLOCKS)),
    w=arrays.arrays(np.float32, (1, 256), elements=st.floats(-65504, 65504, width=32)),
    exponent=st.integers(-40, 0),
)
def test_whatever_the_weights(name, w, exponent):
    w = w * np.float32(2.0**exponent)
    back = read_back(name, quantize(w, name), *w.shape)
    assert (np.abs(back - w) <= allowed(name, w)).all()


@pytest.mark.parametrize("name", BY_GGUF)
def test_blocks_of_32_are_those_of_the_gguf_package(name):
    w = drawn(3, 96)
    want = gguf.quants.quantize(w, ggml_type(name)).tobytes()
    assert quantize(w, name).tobytes()[: len(want)] == want


@pytest.mark.parametrize("name", [*BLOCKS, *ALIASES])
def test_the_product_reads_the_same_weights(name):
    w = drawn(5, 512)
    words = quantize(w, name)
    plain = ALIASES.get(name, name)
    identity = np.eye(512, dtype=np.float32)
    got = fuel_jax.qmatmul(identity, words, quant_type=name, k=512, n=5)
    np.testing.assert_array_equal(np.asarray(got).T, read_back(plain, words, 5, 512))


@every_type
def test_zeros_stay_zeros(name):
    w = np.zeros((3, 512), np.float32)
    w[1, :256] = drawn(1, 256)
    back = read_back(name, quantize(w, name), 3, 512)
    assert np.isfinite(back).all()
    assert not back[[0, 2]].any()
    assert not back[1, 256:].any()
    one_side = np.abs(drawn(1, 256))  # a group whose range does not reach 0 must still hold it
    for w in (one_side, -one_side):
        assert (np.abs(read_back(name, quantize(w, name), 1, 256) - w) <= allowed(name, w)).all()


@every_type
def test_the_largest_scale_is_a_half_s(name):
    codes = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127, "Q3K": 4 * 31, "Q6K": 32 * 127}
    w = np.zeros((1, 256), np.float32)
    w[0, 0] = 65504.0 * codes.get(name, 1)
    back = read_back(name, quantize(w, name), 1, 256)
    assert (np.abs(back - w) <= allowed(name, w)).all()
    for sign in (1, -1):
        with pytest.raises(fuel_jax.ArgumentError, match="quantize: 'w' holds weights whose scale"):
            quantize(np.float32(sign * 1e12) * (w != 0), name)


@every_type
def test_the_smallest_weights(name):
    for size in (2.0**-24, 2.0**-126, 2.0**-149):
        w = np.float32(size) * np.sign(drawn(1, 256))
        back = read_back(name, quantize(w, name), 1, 256)
        assert (np.abs(back - w) <= allowed(name, w)).all()


@every_type
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0)])
def test_nothing(name, shape):
    words = quantize(np.zeros(shape, np.float32), name)
    assert (words.dtype, words.shape) == (np.uint32, (0,))


@pytest.mark.parametrize("name", ["Q8_0", "Q4K"])
def test_more_blocks_than_are_packed_at_once(name):
    w = np.tile(drawn(3, 512), (3000, 1))
    words = quantize(w, name).reshape(3000, -1)
    assert (words == words[0]).all()
    np.testing.assert_array_equal(words[0], quantize(w[:3], name))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_packed_from_their_float32_values(dtype):
    w = jnp.asarray(drawn(2, 256)).astype(dtype)
    narrow = np.asarray(w.astype("float32"))
    np.testing.assert_array_equal(quantize(w, "Q6K"), quantize(narrow, "Q6K"))
    for pack in (quantize_nf4, quantize_awq):
        for got, want in zip(pack(w), pack(narrow), strict=True):
            np.testing.assert_array_equal(got, want)


# -- four bits ------------------------------------------------------------------------------


def nf4_weights(packed, absmax):
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(*absmax.shape, -1)
    return LEVELS[codes] * absmax[..., None]


@pytest.mark.parametrize("block_size", [2, 64, 96])
def test_nf4_takes_the_nearest_level(block_size):
    w = drawn(5, 192)
    w[0] = 0
    packed, absmax = quantize_nf4(w, block_size)
    assert (packed.dtype, packed.shape) == (np.uint8, (5, 96))
    assert (absmax.dtype, absmax.shape) == (np.float32, (5, 192 // block_size))
    blocks = w.reshape(5, -1, block_size)
    np.testing.assert_array_equal(absmax, np.abs(blocks).max(-1))
    levels = LEVELS.astype(np.float64) * absmax[..., None, None].astype(np.float64)
    nearest = np.abs(levels - blocks[..., None]).min(-1)
    back = nf4_weights(packed, absmax)
    assert (np.abs(back - blocks) <= nearest + 1e-7 * absmax[..., None]).all()
    assert not back[0].any()


def test_nf4_is_that_of_bitsandbytes():
    torch = pytest.importorskip("torch", reason="bitsandbytes needs it")
    functional = pytest.importorskip("bitsandbytes.functional", reason="the reference")
    w = drawn(32, 512)
    codes, state = functional.quantize_4bit(torch.tensor(w), blocksize=64, quant_type="nf4")
    packed, absmax = quantize_nf4(w)
    np.testing.assert_array_equal(absmax, state.absmax.numpy().reshape(absmax.shape))
    np.testing.assert_array_equal(packed, codes.numpy().reshape(packed.shape))


@pytest.mark.parametrize("low_nibble_first", [False, True])
def test_the_nf4_product_reads_the_same_weights(low_nibble_first):
    w = drawn(3, 128)
    operands = quantize_nf4(w, 32, low_nibble_first=low_nibble_first)
    identity = np.eye(128, dtype=np.float32)
    params = {"block_size": 32, "low_nibble_first": low_nibble_first}
    got = fuel_jax.nf4_matmul(identity, *operands, **params)
    np.testing.assert_array_equal(np.asarray(got).T.reshape(3, -1, 32), nf4_weights(
        *quantize_nf4(w, 32)))  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    w=arrays.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**16), 2.0**16, width=32)),
    group=st.sampled_from([1, 2, 8, 16, 32]),
)
def test_awq_is_within_half_a_step(w, group):
    weight, zeros, scales = quantize_awq(w, group)
    nibbles = lambda x: (x[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(2, -1)
    groups = 32 // group
    assert weight.shape == (2, 4)
    assert zeros.shape == (2, -(-groups // 8))
    assert scales.shape == (2, 8 * zeros.shape[1])
    assert not scales[:, groups:].any()
    assert (weight.dtype, zeros.dtype, scales.dtype) == (np.uint32, np.uint32, np.float16)
    step = scales[:, :groups, None].astype(np.float64)
    blocks = w.reshape(2, groups, group).astype(np.float64)
    codes, zero = nibbles(weight).reshape(2, groups, group), nibbles(zeros)[:, :groups, None]
    back = (codes.astype(int) - zero.astype(int)) * step
    assert (np.abs(back - blocks) <= step / 2 * (1 + 1e-5)).all()
    span = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    assert (step[..., 0] <= span / 15 * (1 + 2.0**-9) + TINY).all()


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
def test_nothing_in_four_bits(shape):
    n, k = shape
    x = np.zeros((2, k), np.float32)
    for pack, product in ((quantize_nf4, fuel_jax.nf4_matmul), (quantize_awq, fuel_jax.awq_matmul)):
        y = product(x, *pack(np.zeros(shape, np.float32)))
        assert y.shape == (2, n)
        assert not y.any()


def test_the_awq_product_reads_the_same_weights():
    w = drawn(3, 384)
    weight, zeros, scales = quantize_awq(w, 32)
    identity = np.eye(384, dtype=np.float32)
    got = np.asarray(fuel_jax.awq_matmul(identity, weight, zeros, scales, group_size=32)).T
    step = np.repeat(scales[:, :12].astype(np.float32), 32, axis=1)
    assert (np.abs(got - w) <= step / 2 * (1 + 1e-5)).all()


# -- bad calls ------------------------------------------------------------------------------

PACK = {
    "quantize": lambda w: quantize(w, "Q4K"),
    "quantize_nf4": quantize_nf4,
    "quantize_awq": quantize_awq,
}


@pytest.mark.parametrize("name", PACK)
def test_weights_that_cannot_be_packed(name):
    pack, w = PACK[name], drawn(2, 256)

    def refused(w, match, error=fuel_jax.ArgumentError):
        with pytest.raises(error, match=match) as caught:
            pack(w)
        assert str(caught.value).startswith(f"{name}: 'w' ")

    refused(w.astype(np.int8), "is int8; it must be one of float32", fuel_jax.ShapeError)
    refused(w.astype(np.complex64), "is complex64", fuel_jax.ShapeError)
    refused(w[0], "has 1 axes; it must have 2", fuel_jax.ShapeError)
    for value in (np.nan, np.inf, -np.inf):
        bad = w.copy()
        bad[1, 7] = value
        refused(bad, rf"at \[1, 7\] is {value}; .*1 of 512")
    wide = w.astype(np.float64)
    wide[0, 3] = 1e39
    refused(wide, r"at \[0, 3\] is 1e\+39; packed weights are finite in float32")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: quantize(drawn(2, 384), "Q4K"), "'w' has rows of 384; Q4K packs 256 weights"),
        (lambda: quantize(drawn(2, 48), "Q8_0"), "'w' has rows of 48; Q8_0 packs 32 weights"),
        (
            lambda: quantize(drawn(2, 32), "Q9"),
            "'quant_type' is 'Q9'; it must be one of Q4_0, Q4_1",
        ),
        (lambda: quantize(drawn(2, 32), "Q8_1"), "Q8_1 is for activations; Q8_0 holds the same"),
        (lambda: quantize_nf4(drawn(2, 96)), "'block_size' is 64 and 'w' has rows of 96; groups"),
        (lambda: quantize_nf4(drawn(2, 96), 0), "'block_size' is 0"),
        (lambda: quantize_nf4(drawn(2, 9), 3), "'w' has rows of 9; two weights share a byte"),
        (lambda: quantize_awq(drawn(2, 96)), "'group_size' is 128 and 'w' has rows of 96; groups"),
        (lambda: quantize_awq(drawn(2, 12), 4), "'w' has rows of 12; a word holds 8 weights"),
        (lambda: quantize_awq(drawn(2, 128) * np.float32(1e9)), "'w' holds weights whose scale"),
    ],
)
def test_bad_calls(call, match):
    with pytest.raises(fuel_jax.ArgumentError, match=re.escape(match)):
        call()


def test_without_the_gguf_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"Q8_0 is packed by the gguf package.*pip install"):
        quantize(drawn(1, 32), "Q8_0")
    assert quantize(drawn(1, 256), "Q4K").size == 36
