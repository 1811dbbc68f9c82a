"""What is true of qmatmul in particular: its weights are ggml's, and are never held whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused import _lanes
from fuel_jax.fused.qmatmul import qmatmul

from ..refused import refused

# name -> weights and bytes of a block, where its halves stand
LAYOUT = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q8_1": (32, 36, (0, 2)),
    "Q2K": (256, 84, (80, 82)),
    "Q3K": (256, 110, (108,)),
    "Q4K": (256, 144, (0, 2)),
    "Q5K": (256, 176, (0, 2)),
    "Q6K": (256, 210, (208,)),
}
every_type = pytest.mark.parametrize("quant_type", LAYOUT)


# -- ggml's dequantize_row_*, statement by statement ----------------------------------------


def half(b, at):
    return b[at : at + 2].view("<f2")[0].astype(np.float32)


def legacy(b, codes_at, fifth_at=None):
    """32 unsigned codes."""
    q = np.zeros(32, np.int32)
    qh = 0 if fifth_at is None else int(b[fifth_at : fifth_at + 4].view("<u4")[0])
    for j in range(16):
        byte = int(b[codes_at + j])
        q[j] = (byte & 0x0F) | (((qh >> j) << 4) & 0x10)
        q[j + 16] = (byte >> 4) | ((qh >> (j + 12)) & 0x10)
    return q


def q2k(b):
    y, d, dmin = [], half(b, 80), half(b, 82)
    scales, q, i = b[:16].astype(int), b[16:80].astype(int), 0
    for n in (0, 1):
        for shift in (0, 2, 4, 6):
            for start in (0, 16):
                low, high = np.float32(scales[i] & 0xF), np.float32(scales[i] >> 4)
                for code in q[32 * n + start :][:16]:
                    y.append(d * low * np.float32((code >> shift) & 3) - dmin * high)
                i += 1
    return y


def q3k(b):
    y, d, i, bit = [], half(b, 108), 0, 1
    hmask, q = b[:32].astype(int), b[32:96].astype(int)
    a, c, t = (int(w) for w in b[96:108].view("<u4"))
    two, four = 0x03030303, 0x0F0F0F0F
    words = (
        (a & four) | ((t & two) << 4),
        (c & four) | (((t >> 2) & two) << 4),
        ((a >> 4) & four) | (((t >> 4) & two) << 4),
        ((c >> 4) & four) | (((t >> 6) & two) << 4),
    )
    scales = np.array(words, "<u4").view(np.int8).astype(int)
    for n in (0, 1):
        for shift in (0, 2, 4, 6):
            for start in (0, 16):
                dl = d * np.float32(scales[i] - 32)
                for at in range(start, start + 16):
                    code = (q[32 * n + at] >> shift) & 3
                    y.append(dl * np.float32(code - (0 if hmask[at] & bit else 4)))
                i += 1
            bit <<= 1
    return y


def scale_min(j, q):
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 0xF) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def q45k(b, fifth):
    y, d, dmin = [], half(b, 0), half(b, 2)
    scales, qs = b[4:16].astype(int), b[48 if fifth else 16 :].astype(int)
    qh = b[16:48].astype(int) if fifth else np.zeros(32, int)
    for j in range(4):
        for high in (0, 1):
            scale, minimum = (np.float32(s) for s in scale_min(2 * j + high, scales))
            for at in range(32):
                code = (qs[32 * j + at] >> 4) if high else (qs[32 * j + at] & 0xF)
                code += 16 if qh[at] & (1 << (2 * j + high)) else 0
                y.append(d * scale * np.float32(code) - dmin * minimum)
    return y


def q6k(b):
    y, d = np.zeros(256, np.float32), half(b, 208)
    for n in (0, 1):
        ql, qh = b[64 * n :].astype(int), b[128 + 32 * n :].astype(int)
        s = b[192 + 8 * n : 208].view(np.int8).astype(int)
        for at in range(32):
            group = at // 16
            codes = (
                (ql[at] & 0xF) | ((qh[at] & 3) << 4),
                (ql[at + 32] & 0xF) | (((qh[at] >> 2) & 3) << 4),
                (ql[at] >> 4) | (((qh[at] >> 4) & 3) << 4),
                (ql[at + 32] >> 4) | (((qh[at] >> 6) & 3) << 4),
            )
            for quarter, code in enumerate(codes):
                scale = d * np.float32(s[group + 2 * quarter])
                y[128 * n + at + 32 * quarter] = scale * np.float32(code - 32)
    return y


ORACLE = {
    "Q4_0": lambda b: (legacy(b, 2) - 8).astype(np.float32) * half(b, 0),
    "Q4_1": lambda b: legacy(b, 4).astype(np.float32) * half(b, 0) + half(b, 2),
    "Q5_0": lambda b: (legacy(b, 6, 2) - 16).astype(np.float32) * half(b, 0),
    "Q5_1": lambda b: legacy(b, 8, 4).astype(np.float32) * half(b, 0) + half(b, 2),
    "Q8_0": lambda b: b[2:].view(np.int8).astype(np.float32) * half(b, 0),
    "Q8_1": lambda b: b[4:].view(np.int8).astype(np.float32) * half(b, 0),
    "Q2K": q2k,
    "Q3K": q3k,
    "Q4K": lambda b: q45k(b, fifth=False),
    "Q5K": lambda b: q45k(b, fifth=True),
    "Q6K": q6k,
}


# -- streams --------------------------------------------------------------------------------


def blocks(quant_type, n, k, seed=0, size=2.0**-8, code=None):
    """Random bytes, or one byte everywhere; halves of the given size.  ``[n, blocks, bytes]``"""
    weights, width, halves = LAYOUT[quant_type]
    rng = np.random.default_rng(seed)
    b = rng.integers(0, 256, (n, k // weights, width), np.uint8)
    if code is not None:
        b[:] = code
    for at in halves:
        scale = (rng.normal(size=(n, k // weights, 1)) * size).astype("<f2")
        b[..., at : at + 2] = scale.view(np.uint8)
    return b


def words(b):
    """The blocks as a stream, little-endian, padded with zeros."""
    loose = b.reshape(-1)
    return np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)


def oracle(quant_type, b):
    """``[n, k]`` float32."""
    each = [np.asarray(ORACLE[quant_type](block), np.float32) for row in b for block in row]
    return np.concatenate(each).reshape(b.shape[0], -1)


def weight(quant_type, b, k):
    """The weight as the op sees it: the product with the identity is exact."""
    identity = np.eye(k, dtype=np.float32)
    return np.asarray(qmatmul(identity, words(b), quant_type=quant_type, k=k, n=b.shape[0])).T


# -- weights --------------------------------------------------------------------------------


@every_type
def test_weights_are_ggml_s(quant_type):
    k = 2 * LAYOUT[quant_type][0]
    b = blocks(quant_type, 3, k)
    np.testing.assert_array_equal(weight(quant_type, b, k), oracle(quant_type, b))


@every_type
@pytest.mark.parametrize("code", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("scale", [1.0, -65504.0, 2.0**-24])
def test_extreme_codes_and_scales(quant_type, code, scale):
    """candle#1526: an integer accumulator overflowed.  Also the largest and the smallest half."""
    k, _, halves = LAYOUT[quant_type]
    b = blocks(quant_type, 1, k, code=code)
    for at in halves:
        b[..., at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    want = oracle(quant_type, b)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(weight(quant_type, b, k), want)


@every_type
def test_zero_blocks_are_zero(quant_type):
    """Blocks that quantisers write for rows of zeros: scale 0, any code."""
    k, _, halves = LAYOUT[quant_type]
    b = blocks(quant_type, 2, k)
    for at in halves:
        b[..., at : at + 2] = 0
    assert not weight(quant_type, b, k).any()
    assert not weight(quant_type, np.zeros_like(b), k).any()


def test_the_sum_in_a_q8_1_block_is_not_read():
    b = blocks("Q8_1", 1, 32)
    want = weight("Q8_1", b, 32)
    b[..., 2:4] = np.array([np.nan], "<f2").view(np.uint8)
    np.testing.assert_array_equal(weight("Q8_1", b, 32), want)


def test_the_padding_of_the_last_word_is_not_read():
    b = blocks("Q4_0", 3, 32)
    stream = words(b)
    given = dict(quant_type="Q4_0", k=32, n=3)
    x = np.ones((1, 32), np.float32)
    want = np.asarray(qmatmul(x, stream, **given))
    stream[-1] |= 0xFFFF0000
    np.testing.assert_array_equal(qmatmul(x, stream, **given), want)


@pytest.mark.parametrize(
    ("name", "also"),
    [("Q4K", "Q4_K_M"), *((f"Q{bits}K", f"Q{bits}_K") for bits in (2, 3, 4, 5, 6))],
)
def test_second_spellings(name, also):
    b = blocks(name, 2, 256)
    np.testing.assert_array_equal(weight(name, b, 256), weight(also, b, 256))


def near(got, want, bound=2e-6):
    """Within ``bound`` of the largest."""
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


# -- products -------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 7, 64])
@pytest.mark.parametrize(("quant_type", "k"), [("Q8_0", 288), ("Q5_1", 96), ("Q4K", 512)])
def test_products_against_float64(m, quant_type, k, draw):
    """candle#2509, ik_llama.cpp#1005: rows that are no multiple of a tile or of 256."""
    n = 33
    b = blocks(quant_type, n, k)
    a = draw((m, k))
    want = np.asarray(a, np.float64) @ oracle(quant_type, b).astype(np.float64).T
    got = qmatmul(a, words(b), quant_type=quant_type, k=k, n=n)
    assert got.dtype == jnp.float32
    near(got, want)


@pytest.mark.parametrize(("quant_type", "k"), [("Q4_0", 32 * 1025), ("Q6K", 256 * 129)])
def test_blocks_of_rows_give_the_same(quant_type, k, draw):
    """Rows that end inside a word, the last block of them shorter and odd."""
    n = 101
    b = blocks(quant_type, n, k, size=2.0**-5)
    each = b.reshape(-1, 1, b.shape[-1])  # one block a row; those have met the oracle above
    w = weight(quant_type, each, LAYOUT[quant_type][0]).reshape(n, k).astype(np.float64)
    stream, given = words(b), dict(quant_type=quant_type, k=k, n=n)
    for m in (1, 3):
        a, g = draw((m, k)), draw((m, n))
        y, pull = jax.vjp(lambda a: qmatmul.using("blocked")(a, stream, **given), a)
        near(y, np.asarray(a, np.float64) @ w.T)
        near(pull(g)[0], np.asarray(g, np.float64) @ w)


@pytest.mark.parametrize(
    ("quant_type", "k"),
    [
        *((q, k) for q in ("Q4_0", "Q8_0") for k in (64, 192, 512)),
        *(("Q4K", 768), ("Q5K", 512), ("Q6K", 512), ("Q6K", 1536)),
    ],
)
def test_word_by_word_against_float64(quant_type, k, draw, monkeypatch):
    """Pairs of blocks by eights and one by one; parts of the rows, the last one shorter."""
    n = 45
    monkeypatch.setattr(_lanes, "WORDS", 16 * k // 4)
    b = blocks(quant_type, n, k)
    w, stream = oracle(quant_type, b).astype(np.float64), words(b)
    given = dict(quant_type=quant_type, k=k, n=n)
    for m in (1, 3) if k == 512 else (3,):
        a = draw((m, k))
        near(qmatmul.using("lanes")(a, stream, **given), np.asarray(a, np.float64) @ w.T)


@pytest.mark.parametrize("quant_type", ["Q4_0", "Q8_0", "Q4K", "Q5K", "Q6K"])
def test_word_by_word_infinite_activations_are_those_of_the_weight(quant_type):
    """Not NaN, where parts of a weight are multiplied apart."""
    k, n = 512, 8
    stream = words(blocks(quant_type, n, k))
    given = {"quant_type": quant_type, "k": k, "n": n}
    a = np.ones((3, k), np.float32)
    a[0, 5], a[1, 300], a[2, 7] = np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(
        np.sign(qmatmul.using("lanes")(jnp.asarray(a), stream, **given)),
        np.sign(qmatmul.decompose(jnp.asarray(a), stream, **given)),
    )


@pytest.mark.parametrize(("m", "kernel"), [(1, "lanes"), (4, "lanes"), (5, "blocked")])
def test_who_serves(m, kernel):
    """One row of activations need not have the weight written down; several share it."""
    a = jax.ShapeDtypeStruct((m, 4096), jnp.float32)
    stream = jax.ShapeDtypeStruct((4096 * 4096 // 256 * 144 // 4,), jnp.uint32)
    asked = qmatmul.explain(a, stream, quant_type="Q4K", k=4096, n=4096).forward
    assert [choice.kernel.name for choice in asked if "cpu" in choice.serves] == [kernel]


def test_the_weight_is_never_held_whole():
    n = k = 4096
    whole = 4 * n * k
    a = jax.ShapeDtypeStruct((4, k), jnp.float32)
    stream = jax.ShapeDtypeStruct((n * k // 256 * 144 // 4,), jnp.uint32)
    f = lambda a, w: qmatmul(a, w, quant_type="Q4K", k=k, n=n).sum()
    for program in (f, jax.grad(f)):
        memory = jax.jit(program).lower(a, stream).compile().memory_analysis()
        assert memory.temp_size_in_bytes < whole / 3


def test_float64_activations_are_summed_in_float64(draw):
    b = blocks("Q4K", 4, 512)
    a = draw((3, 512), "float64")
    got = qmatmul(a, words(b), quant_type="Q4K", k=512, n=4)
    want = np.asarray(a) @ oracle("Q4K", b).astype(np.float64).T
    assert got.dtype == jnp.float64
    near(got, want, 1e-12)


@pytest.mark.parametrize("kernel", ["lanes", "blocked", "rounded", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_summed_in_float32(dtype, kernel, draw):
    """And rounded once; or each weight is as well, on a GPU."""
    b, given = blocks("Q4K", 33, 512), {"quant_type": "Q4K", "k": 512, "n": 33}
    a, g = draw((3, 512), dtype), draw((3, 33), dtype)
    w, stream = oracle("Q4K", b).astype(np.float64), words(b)
    if kernel == "rounded":
        w = np.asarray(jnp.asarray(w, jnp.float32).astype(dtype), np.float64)
    run = functools.partial(qmatmul.using(kernel), **given)
    y, pull = jax.vjp(lambda a: run(a, stream), a)
    half = float(jnp.finfo(dtype).eps) / 2 + 4e-6
    for got, want in (
        (y, np.asarray(a, np.float64) @ w.T),
        (*pull(g), np.asarray(g, np.float64) @ w),
    ):
        assert got.dtype == dtype
        near(got, want, half)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 32, 2), (2, 32, 0), (2, 0, 3)])
def test_nothing(m, k, n):
    a = jnp.ones((m, k), "float32")
    stream = words(blocks("Q4_0", n, k))
    y, pull = jax.vjp(lambda a: qmatmul(a, stream, quant_type="Q4_0", k=k, n=n), a)
    assert y.shape == (m, n)
    assert not y.any()
    assert pull(y)[0].shape == a.shape


def test_bad_calls(draw):
    a = draw((2, 256))
    stream = words(blocks("Q4K", 3, 256))
    given = dict(quant_type="Q4K", k=256, n=3)
    bad = lambda match, a=a, w=stream, **other: refused(
        qmatmul, a, w, match=match, **(given | other)
    )
    bad("'quant_type' is 'Q9'; it must be one of 'Q4_0'", quant_type="Q9")
    bad("'k' is 100; Q4K packs 256 weights of a row together", a=draw((2, 100)), k=100)
    bad("'a' has rows of 256 and parameter 'k' is -256; they must be equal", k=-256)
    bad("'n' is -1; it must be at least 0", n=-1)
    bad("'w_q_bytes' has 108 words; 4 x 256 weights in Q4K fill 144", n=4)
    bad("'w_q_bytes' has 107 words; 3 x 256", w=stream[:-1])
    bad("'a' has rows of 128 and parameter 'k' is 256", a=draw((2, 128)))
    bad("'a' is int32.*bfloat16", a=draw((2, 256)).astype("int32"))
    bad("'w_q_bytes' is uint8.*uint32", w=stream.view(np.uint8))
    bad("'a' is float32\\[256\\]; it has 1 axes", a=a[0])
    refused(qmatmul, a, match="array 'w_q_bytes' is missing", **given)
