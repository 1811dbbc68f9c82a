"""AWQ weights in both layouts of AutoAWQ: an own packer of each, and AutoAWQ's own code."""

import importlib.util
import sys
import types

import jax
import numpy as np
import pytest

import fuel_jax
from fuel_jax.formats import awq

GROUP_SIZES = (32, 64, 128)


def near(got, want, bound=2e-6):
    """Within ``bound`` of the largest."""
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


# -- packed by the published layouts, digit by digit ------------------------------------------


def word(codes):
    """Eight codes as one word, the first in the lowest nibble."""
    return int("".join(f"{code:x}" for code in reversed(codes)), 16)


def pack_gemv(codes):
    """``[n, k]`` codes: a row's neighbours share a word, in order; what is missing is zero."""
    full = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    return np.array([[word(w) for w in row] for row in full.reshape(len(full), -1, 8)], np.uint32)


def pack_gemm(codes):
    """``[n, k]`` codes: transposed, a row's neighbours share a word, even ones first; signed."""
    mixed = codes.T.reshape(codes.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    words = np.array([[word(w) for w in row] for row in mixed], np.uint32)
    return words.view(np.int32)


def quantised(n, k, group_size, seed=0):
    """Codes ``[n, k]``, zero points and scales ``[n, groups]``, and the weight in float64."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // group_size))
    scales = rng.uniform(0.01, 0.06, zeros.shape).astype(np.float16)
    each = lambda x: np.repeat(x.astype(np.float64), group_size, 1)
    return codes, zeros, scales, (codes - each(zeros)) * each(scales)


def gemv(n, k, group_size):
    """Operands as the op takes them, no wider than needed, and the weight."""
    codes, zeros, scales, w = quantised(n, k, group_size)
    words = pack_gemv(zeros)
    wide = np.pad(scales, ((0, 0), (0, 8 * words.shape[1] - scales.shape[1])))
    return (pack_gemv(codes), words, wide), w


def gemm(n, k, group_size):
    """Operands as a checkpoint holds them, and the weight."""
    codes, zeros, scales, w = quantised(n, k, group_size)
    return (pack_gemm(codes), pack_gemm(zeros), scales.T), w


LAYOUTS = {
    "gemv": gemv,
    "gemm": lambda *sizes: (lambda a, w: (awq.from_gemm(*a), w))(*gemm(*sizes)),
}


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_products(layout, group_size, draw):
    n, k = 24, 384
    arrays, w = LAYOUTS[layout](n, k, group_size)
    identity = np.eye(k, dtype=np.float32)
    got = fuel_jax.awq_matmul(identity, *arrays, group_size=group_size)
    np.testing.assert_array_equal(got, w.T.astype(np.float32))  # code · half: 15 bits, exact
    a, g = draw((2, 5, k)), draw((2, 5, n))
    y, pull = jax.vjp(lambda a: fuel_jax.awq_matmul(a, *arrays, group_size=group_size), a)
    near(y, np.asarray(a, np.float64) @ w.T)
    near(pull(g)[0], np.asarray(g, np.float64) @ w)


def test_a_word_of_each_layout():
    """Column 3 of a GEMM word stands in nibble 5; row 3 of a GEMV word in nibble 3."""
    codes = np.zeros((8, 8), int)
    codes[3, 3] = 15
    assert pack_gemm(codes)[3].view(np.uint32) == [0xF << 20]
    assert pack_gemv(codes)[3] == [0xF << 12]
    weight, *_ = awq.from_gemm(pack_gemm(codes), np.zeros((1, 1), np.int32), np.ones((1, 8), "f2"))
    assert weight.tolist() == pack_gemv(codes).tolist()


def test_signed_and_unsigned_words_are_the_same():
    (weight, zeros, scales), _ = gemm(8, 64, 32)
    assert (weight < 0).any()
    unsigned = awq.from_gemm(weight.view(np.uint32), zeros.view(np.uint32), scales)
    for x, y in zip(awq.from_gemm(weight, zeros, scales), unsigned, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("n", "k", "groups"), [(0, 64, 2), (8, 0, 0)])
def test_nothing(n, k, groups):
    empty = np.zeros((k, n // 8), np.int32), np.zeros((groups, n // 8), np.int32)
    weight, zeros, scales = awq.from_gemm(*empty, np.zeros((groups, n), np.float16))
    assert weight.shape == (n, k // 8)
    assert scales.shape == (n, 8 * zeros.shape[1])


def test_bad_calls():
    weight, zeros, scales = gemm(16, 64, 32)[0]

    def bad(match, w=weight, z=zeros, s=scales):
        with pytest.raises(fuel_jax.ShapeError, match=f"^from_gemm: {match}"):
            awq.from_gemm(w, z, s)

    bad(r"'qweight' is int64\[64, 2\]; it must be int32 or uint32", w=weight.astype(np.int64))
    bad(r"'qzeros' is int32\[2\]; .* have 2 axes", z=zeros[:, 0])
    bad(r"'scales' is float32\[2, 16\]; it must be float16", s=scales.astype(np.float32))
    bad(
        "'qweight' has 2 words a row and 'qzeros' has 1; .* GEMV layout, .*, needs no",
        z=zeros[:, :1],
    )
    bad(r"'scales' is \[2, 8\]; beside 'qzeros' \[2, 2\] it must be \[2, 16\]", s=scales[:, :8])
    bad("'qweight' has 60 rows; .* a multiple of 8", w=weight[:60])
    bad(
        "'qweight' has 40 rows and 'qzeros' has 3 groups",
        w=weight[:40],
        z=np.repeat(zeros, 2, 0)[:3],
        s=np.repeat(scales, 2, 0)[:3],
    )
    bad("'qweight' has 64 rows and 'qzeros' has 0 groups", z=zeros[:0], s=scales[:0])


# -- AutoAWQ's own code -----------------------------------------------------------------------


@pytest.fixture
def autoawq(monkeypatch):
    """``autoawq(file)`` -> that module of AutoAWQ, without what importing the package wants."""
    pytest.importorskip("torch", reason="torch is not installed: AutoAWQ needs it")
    found = importlib.util.find_spec("awq")
    if found is None:
        pytest.skip("AutoAWQ is not installed: pip install --no-deps autoawq")
    bare = types.ModuleType("awq")
    bare.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "awq", bare)

    def load(file):
        spec = importlib.util.spec_from_file_location(file, f"{bare.__path__[0]}/{file}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_operands_are_those_of_autoawq_s_gemv(group_size, autoawq):
    """Its packer, padding included, given the weight; ours, given a GEMM checkpoint of it."""
    import torch  # the fixture has skipped where it is absent

    n, k = 24, 384
    module = autoawq("modules/linear/gemv.py")
    _, zeros, scales, w = quantised(n, k, group_size)
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = torch.tensor(w, dtype=torch.float32)
    made = module.WQLinear_GEMV.from_linear(
        linear, 4, group_size, scales=torch.tensor(scales), zeros=torch.tensor(zeros)
    )
    theirs = made.qweight.numpy().view(np.uint32), made.qzeros.numpy().view(np.uint32), made.scales
    for x, y in zip(awq.from_gemm(*gemm(n, k, group_size)[0]), theirs, strict=True):
        np.testing.assert_array_equal(x, np.asarray(y))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_weights_are_those_autoawq_reads_from_a_gemm_checkpoint(group_size, autoawq):
    """Any words at all.  Its weights are rounded to float16, ours are not."""
    import torch

    n, k = 24, 384
    module = autoawq("utils/packing_utils.py")
    rng = np.random.default_rng(7)
    any_words = lambda *shape: rng.integers(-(2**31), 2**31, shape, np.int32)
    weight, zeros = any_words(k, n // 8), any_words(k // group_size, n // 8)
    scales = rng.uniform(0.01, 0.06, (k // group_size, n)).astype(np.float16)
    theirs = module.dequantize_gemm(
        torch.tensor(weight), torch.tensor(zeros), torch.tensor(scales), 4, group_size
    )
    arrays = awq.from_gemm(weight, zeros, scales)
    ours = fuel_jax.awq_matmul(np.eye(k, dtype=np.float32), *arrays, group_size=group_size)
    np.testing.assert_array_equal(np.asarray(ours).astype(np.float16), theirs.numpy())
