"""llama.cpp's gguf package as a witness of qmatmul: its decoders, and what encoders it has.

A weight is read off the op as the product with the identity, which is exact.  (It hides the sign of
a zero, so equality is of values; and a scale that is inf or NaN, so there is none here.)
"""

import jax
import numpy as np
import pytest

import fuel_jax

gguf = pytest.importorskip("gguf", reason="gguf is not installed: no witness of qmatmul's weights")

# name in gguf -> weights and bytes of a block, where its halves stand
LAYOUT = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q8_1": (32, 36, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
NO_DECODER = {"Q8_K", "Q1_0"}
NOT_BLOCKS = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
KNOWN = {kind.name for kind in gguf.GGMLQuantizationType}
every_type = pytest.mark.parametrize("quant_type", LAYOUT)


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("gguf has no decoder, nor Fuel the type", NO_DECODER & KNOWN),
        ("no block formats, cast and matmul serve them", NOT_BLOCKS & KNOWN),
        ("Fuel has none of them", KNOWN - LAYOUT.keys() - NO_DECODER - NOT_BLOCKS),
    ],
)
def test_types_left_out(reason, names):
    for name in names:
        with pytest.raises(fuel_jax.ArgumentError, match=f"'quant_type' is '{name}'"):
            product(np.zeros((1, 256), np.float32), np.zeros((1, 4), np.uint8), name)
    pytest.skip(f"{reason}: {', '.join(sorted(names))}")


@every_type
def test_sizes_of_blocks(quant_type):
    if quant_type == "Q8_1":
        pytest.skip("gguf 0.19 gives Q8_1 40 bytes, as they were once; in ggml they are 36")
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant_type]] == LAYOUT[quant_type][:2]


def decoded(rows, quant_type):
    """``[n, bytes]`` as gguf decodes them, float32 ``[n, k]``."""
    if quant_type == "Q8_1":  # it cannot; but that is Q8_0 with a sum after the scale
        without = np.delete(rows.reshape(-1, 36), (2, 3), axis=1)
        return decoded(without.reshape(len(rows), -1), "Q8_0")
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[quant_type])


def product(a, rows, quant_type):
    """a @ Wᵀ of the op, for a weight ``[n, bytes]``."""
    loose = rows.reshape(-1)
    words = np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)
    return fuel_jax.qmatmul(a, words, quant_type=quant_type, k=a.shape[-1], n=rows.shape[0])


def near(got, want, bound=2e-6):
    """Within ``bound`` of the largest."""
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


# -- blocks, all of one shape -------------------------------------------------------------------

ROWS, K = 48, 512


def halves(blocks, quant_type):
    """The halves of the blocks: views, to be written."""
    return [blocks[..., at : at + 2].view("<f2") for at in LAYOUT[quant_type][2]]


def random_bytes(quant_type, n=ROWS, k=K):
    """Any bytes, but that the halves are finite: exponents below the highest."""
    weights, width, _ = LAYOUT[quant_type]
    blocks = np.random.default_rng(14).integers(0, 256, (n, k // weights, width), np.uint8)
    for half in halves(blocks, quant_type):
        half[~np.isfinite(half)] = 2.0**-24
    return blocks


def extreme_codes(quant_type):
    """One byte everywhere, beside scales from the smallest half to the largest."""
    blocks = random_bytes(quant_type)
    scales = (1, -1, 65504, -65504, 2.0**-24, -(2.0**-14))
    each = [(code, d) for code in (0, 0x0F, 0xF0, 0x55, 0x7F, 0x80, 0xAA, 0xFF) for d in scales]
    for row, (code, d) in zip(blocks, each, strict=True):
        row[:] = code
        for half in halves(row, quant_type):
            half[:] = d
    return blocks


def zeros(quant_type):
    """Nothing but zero bytes; any codes, with scales of 0 and of −0."""
    blocks = random_bytes(quant_type)
    blocks[:16] = 0
    for half in halves(blocks, quant_type):
        half[16:32], half[32:] = 0.0, -0.0
    return blocks


@pytest.mark.parametrize("blocks", [random_bytes, extreme_codes, zeros], ids=lambda f: f.__name__)
@every_type
def test_weights_are_exact(quant_type, blocks):
    rows = blocks(quant_type).reshape(ROWS, -1)
    want = decoded(rows, quant_type)
    assert want.dtype == np.float32
    assert np.isfinite(want).all()
    assert want.any() == (blocks is not zeros)
    got = product(np.eye(K, dtype=np.float32), rows, quant_type)
    np.testing.assert_array_equal(np.asarray(got).T, want)


# -- products -----------------------------------------------------------------------------------


def trained(quant_type, n, k):
    """The rows of a weight of a layer's size: encoded by gguf, or of random codes."""
    w = np.random.default_rng(15).normal(0, 0.3, (n, k)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[quant_type]
    try:
        rows = gguf.quants.quantize(w, kind)
    except NotImplementedError:  # Q8_1 and the K types
        blocks = random_bytes(quant_type, n, k)
        for half in halves(blocks, quant_type):
            half[:] = np.random.default_rng(16).normal(0, 2.0**-8, half.shape)
        return blocks.reshape(n, -1)
    assert np.abs(decoded(rows, quant_type) - w).max() < 0.3  # so it has decoded the right thing
    return rows


@pytest.mark.parametrize(
    ("quant_type", "n", "k"),
    [
        *((quant_type, 33, 512) for quant_type in LAYOUT),
        *((quant_type, 67, 32768) for quant_type in ("Q5_0", "Q3_K", "Q4_K")),  # blocks of rows
    ],
)
def test_products_against_float64(quant_type, n, k, draw):
    rows = trained(quant_type, n, k)
    w = decoded(rows, quant_type).astype(np.float64)
    a, g = draw((2, 3, k)), draw((2, 3, n))
    y, pull = jax.vjp(lambda a: product(a, rows, quant_type), a)
    near(y, np.asarray(a, np.float64) @ w.T)
    near(pull(g)[0], np.asarray(g, np.float64) @ w)
