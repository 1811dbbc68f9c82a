"""Rows of packed weights: those that the product reads, from anywhere in the stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.formats.rows import take_rows
from fuel_jax.fused._gguf_blocks import FORMATS

PLAIN = [name for name in FORMATS if "_K" not in name]


def stream(quant_type, n, k):
    """Random codes; scales that are finite."""
    form = FORMATS[quant_type]
    blocks = np.random.default_rng(4).integers(
        0, 256, (n * k // form.weights, form.bytes), np.uint8
    )
    halves = {"Q2K": (80, 82), "Q3K": (108,), "Q6K": (208,), "Q4K": (0, 2), "Q5K": (0, 2)}
    for at in halves.get(quant_type, (0, 2) if quant_type.endswith("_1") else (0,)):
        blocks[:, at + 1] = 0x28  # 2^-5 or so
    loose = blocks.reshape(-1)
    return np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)


@pytest.mark.parametrize("quant_type", PLAIN)
def test_rows_are_those_of_the_product(quant_type):
    k, n = FORMATS[quant_type].weights, 5  # one block a row: every other may begin within a word
    words = stream(quant_type, n, k)
    identity = np.eye(k, dtype=np.float32)
    w = np.asarray(fuel_jax.qmatmul(identity, words, quant_type=quant_type, k=k, n=n)).T
    ids = np.array([[4, 0, 3], [1, 2, 4]])
    f = jax.jit(lambda words, ids: take_rows(words, ids, quant_type=quant_type, k=k))
    got = f(words, ids)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, w[ids])
    np.testing.assert_array_equal(f(words, ids.astype(np.uint32)), w[ids])
    np.testing.assert_array_equal(f(words, np.array([[-9, 99]])), w[[[0, 4]]])
    assert f(words, np.zeros((0,), np.int32)).shape == (0, k)


def test_one_row_alone():
    words = stream("Q4_0", 1, 32)
    got = take_rows(words, jnp.int32(0), quant_type="Q4_0", k=32)
    identity = np.eye(32, dtype=np.float32)
    want = fuel_jax.qmatmul(identity, words, quant_type="Q4_0", k=32, n=1)[:, 0]
    np.testing.assert_array_equal(got, want)


def test_it_reads_these_rows_and_no_others():
    words = stream("Q4K", 4096, 512)
    f = jax.jit(lambda words, ids: take_rows(words, ids, quant_type="Q4K", k=512))
    compiled = f.lower(words, np.zeros(2, np.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < words.nbytes / 50


@pytest.mark.parametrize(
    ("words", "ids", "params", "said"),
    [
        (np.zeros(9, np.int32), [0], {}, r"'words' is int32\[9\]; it must be uint32"),
        (np.zeros((9, 1), np.uint32), [0], {}, r"'words' is uint32\[9, 1\]"),
        (np.zeros(9, np.uint32), [0.5], {}, "'ids' is float"),
        (np.zeros(9, np.uint32), [0], {"quant_type": "Q9"}, "'quant_type' is 'Q9'; it must be"),
        (np.zeros(9, np.uint32), [0], {"k": 48}, "'k' is 48; Q4_0 packs 32 weights"),
        (np.zeros(9, np.uint32), [0], {"k": 0}, "'k' is 0"),
        (
            np.zeros(4, np.uint32),
            [0],
            {},
            "'words' has 4 words; a row of 32 weights in Q4_0 has",
        ),
    ],
)
def test_bad_calls(words, ids, params, said):
    with pytest.raises(fuel_jax.ArgumentError, match=said):
        take_rows(words, np.array(ids), **{"quant_type": "Q4_0", "k": 32} | params)
