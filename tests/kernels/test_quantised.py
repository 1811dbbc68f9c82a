"""Products with packed weights alone, interpreted: every packing, and what is not finite.

The weights are those of the op's own page, which tests of their own compare with other
libraries'.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused import awq_matmul as awq, nf4_matmul as nf4, qmatmul as gguf
from fuel_jax.fused._gguf_blocks import FORMATS
from pallas_kernels import (
    quantised,
    quantised_dot,
    quantised_gguf,
    quantised_gguf_runs,
    quantised_rows,
    quantised_runs,
)
from pallas_kernels.quantised_rows import Cut

from .test_launch import lowered

RNG = np.random.default_rng(0)
HALVES = {"Q2K": (80, 82), "Q3K": (108,), "Q6K": (208,)}  # where a block keeps them; the rest:
IN_FRONT = {True: (0, 2), False: (0,)}  # with a second one or without
SECOND = ("Q4_1", "Q5_1", "Q8_1", "Q4K", "Q5K")


def gguf_weight(n, k, quant_type):
    """Packed, its packing, and in float64."""
    form = FORMATS[quant_type]
    blocks = RNG.integers(0, 256, (n * k // form.weights, form.bytes), np.uint8)
    for at in HALVES.get(quant_type, IN_FRONT[quant_type in SECOND]):
        half = RNG.normal(0, 2**-8, (len(blocks), 1)).astype("<f2")
        blocks[:, at : at + 2] = half.view(np.uint8)
    loose = blocks.reshape(-1)
    words = np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)
    rows = gguf.decoder(jnp.asarray(words), jnp.float32, quant_type=quant_type, k=k, n=n)
    return (words,), quantised_gguf.GGUF[quant_type](k), np.asarray(rows(0, n), np.float64)


def awq_weight(n, k, group_size):
    """Packed, its packing, and in float64."""
    groups = -(-k // group_size)
    weight = RNG.integers(0, 2**32, (n, k // 8), np.uint32)
    zeros = RNG.integers(0, 2**32, (n, -(-groups // 8)), np.uint32)
    scales = RNG.uniform(0.02, 0.06, (n, 8 * zeros.shape[1])).astype(np.float16)
    arrays = (weight, zeros, scales)
    codes, points, steps = map(jnp.asarray, arrays)
    rows = awq.decoder(codes, points, steps, jnp.float32, group_size=group_size)
    return arrays, quantised.awq(k // 8, group_size), np.asarray(rows(0, n), np.float64)


def nf4_weight(n, k, block_size, low_nibble_first):
    """Packed, its packing, and in float64."""
    codes = RNG.integers(0, 256, (n, k // 2), np.uint8)
    absmax = RNG.uniform(0.5, 1.5, (n, k // block_size)).astype(np.float32)
    order = {"low_nibble_first": low_nibble_first}
    rows = nf4.decoder(jnp.asarray(codes), jnp.asarray(absmax), jnp.float32, **order)
    packing = quantised.nf4(k // 8, block_size, low_nibble_first, nf4.LEVELS)
    return (codes.view(np.uint32), absmax), packing, np.asarray(rows(0, n), np.float64)


WEIGHTS = {
    "awq": functools.partial(awq_weight, 5, 384, 128),
    "awq, a group a row": functools.partial(awq_weight, 2, 512, 512),
    "awq, small groups": functools.partial(awq_weight, 3, 216, 8),
    "nf4": functools.partial(nf4_weight, 3, 320, 64, False),
    "nf4, low nibbles first": functools.partial(nf4_weight, 2, 128, 16, True),
    **{
        name: functools.partial(
            gguf_weight, 3, form.weights * (3 if form.weights == 256 else 11), name
        )
        for name, form in FORMATS.items()
        if name[-2:] != "_K" and name != "Q4_K_M"
    },
}


ONE_AHEAD = ("awq", "nf4, low nibbles first", "Q4_0", "Q4K")  # the others two


@pytest.mark.parametrize("name", WEIGHTS)
def test_against_float64(name):
    """Two tiles of 32 units, or more, the last one not full; rows that are not."""
    packed, packing, weight = WEIGHTS[name]()
    n, k = weight.shape
    cut = Cut(2, 32, 1 if name in ONE_AHEAD else 2)
    run = jax.jit(
        lambda x, *packed: quantised_rows.times_transposed(
            x, packed, n, packing=packing, name="test", interpret=True, cut=cut
        )
    )
    x = RNG.normal(size=(3, k)).astype(np.float32)  # a pair, and the last one twice

    def near(x):
        got, want = np.asarray(run(x, *packed), np.float64), x.astype(np.float64) @ weight.T
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())

    near(x)
    near(x * 1e-30)  # products of subnormal codes are lost
    near(x * 1e30)  # activations times a power of two overflow
    assert not np.asarray(run(0 * x, *packed)).any()

    infinite = x.copy()
    infinite[0, 1], infinite[1, k - 1] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = np.sign(weight[:, 1]) * np.inf  # NaN where the weight is 0
    np.testing.assert_array_equal(run(infinite, *packed)[0], want)
    assert np.isnan(run(infinite, *packed)[1]).all()


def runs_of(name, k):
    """How tensor cores read a weight of WEIGHTS."""
    group = {"awq": 128, "awq, a group a row": 512, "awq, small groups": 8}
    if name in group:
        return quantised_runs.awq(k // 8, group[name])
    if name in quantised_gguf_runs.RUNS:
        return quantised_gguf_runs.RUNS[name](k)
    low_nibble_first = "low" in name
    block_size = 16 if low_nibble_first else 64
    return quantised_runs.nf4(k // 8, block_size, low_nibble_first, nf4.LEVELS)


BOUND = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11 + 2e-6}
CUTS = [quantised_dot.Cut(16, 16, 1, 1, 4, 2), quantised_dot.Cut(16, 16, 2, 3, 4, 2)]


def on_tensor_cores(name, x, cut, packed, n):
    """The kernel alone."""
    options = {"runs": runs_of(name, x.shape[1]), "name": "test", "interpret": True, "cut": cut}
    return quantised_dot.times_transposed(x, packed, n, **options)


def halves_of_levels(name, packed, weight, dtype):
    """The weight that activations of a dtype meet: in halves, levels of NF4 are rounded to them."""
    if "nf4" not in name or dtype == "float32":
        return weight
    order = {"low_nibble_first": "low" in name}
    levels = np.asarray(jnp.asarray(nf4.LEVELS, dtype), np.float32)
    codes, absmax = packed[0].view(np.uint8), jnp.asarray(packed[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nf4, "LEVELS", levels)
        rows = nf4.decoder(jnp.asarray(codes), absmax, jnp.float32, **order)
        return np.asarray(rows(0, len(codes)), np.float64)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", WEIGHTS)
def test_on_tensor_cores_against_float64(name, dtype):
    """Blocks of which none is full; parts of which the last one is not, or is not there."""
    packed, _, weight = WEIGHTS[name]()
    n, k = weight.shape
    x = jnp.asarray(RNG.normal(size=(5, k)), dtype)
    want = np.asarray(x, np.float64) @ halves_of_levels(name, packed, weight, dtype).T
    for cut in CUTS:
        got = on_tensor_cores(name, x, cut, packed, n)
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=BOUND[dtype], atol=2e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in ("awq", "nf4", "Q4_1", "Q6K")), ("Q4_1", "bfloat16")],
)
def test_on_tensor_cores_what_is_not_finite(name, dtype):
    """Minima and parts of a float32 are multiplied apart; the weight times infinity is not."""
    packed, _, weight = WEIGHTS[name]()
    n, k = weight.shape
    x = RNG.normal(size=(4, k)).astype(np.float32)
    x[0, 1], x[1, k - 1], x[2, 2] = np.inf, np.nan, -np.inf
    x[3] = 0  # codes overflow, weights do not
    x[3, 0] = 3e38 / max(np.abs(weight[:, 0]).max(), 1)
    x = np.asarray(jnp.asarray(x, dtype), np.float32)
    got = on_tensor_cores(name, jnp.asarray(x, dtype), CUTS[0], packed, n)
    got = np.asarray(got, np.float64)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got[0], np.sign(weight[:, 1]) * np.inf)
        np.testing.assert_array_equal(got[2], -np.sign(weight[:, 2]) * np.inf)
    assert np.isnan(got[1]).all()
    want = x[3].astype(np.float64) @ weight.T
    np.testing.assert_allclose(got[3], want, rtol=0, atol=BOUND[dtype] * np.abs(want).max())


@pytest.mark.parametrize(("m", "dtype"), [(16, "float32"), (128, "float32"), (16, "bfloat16")])
@pytest.mark.parametrize("name", FORMATS)
def test_on_tensor_cores_lowers(name, m, dtype):
    """Every format, cut as calls are."""
    form, k, n, of = FORMATS[name], 4096, 14336, jax.ShapeDtypeStruct
    words = of((n * k // form.weights * form.bytes // 4,), "uint32")
    run = functools.partial(gguf.qmatmul.using("triton"), quant_type=name, k=k, n=n)
    assert f"fuel_qmatmul_{name.lower()}" in lowered(run, of((m, k), dtype), words)


def test_words_made_of_bytes_are_read_in_pairs():
    """XLA would join both conversions into one that it then refuses."""
    words = jnp.arange(64, dtype="uint8").reshape(2, 32)
    pairs = jax.jit(lambda x: quantised_runs.in_pairs(nf4.in_words(x)))(words)
    np.testing.assert_array_equal(pairs, np.asarray(words).view("<u2"))


OPS = {
    "awq": (awq.awq_matmul, {"group_size": 128}),
    "nf4": (nf4.nf4_matmul, {"block_size": 64}),
    "Q6K": (gguf.qmatmul, {"quant_type": "Q6K", "k": 4096, "n": 14336}),
    "Q3K": (gguf.qmatmul.using("triton"), {"quant_type": "Q3K", "k": 4096, "n": 14336}),
}


def operands(name, m, k, n, dtype):
    """Shapes of a call."""
    of = jax.ShapeDtypeStruct
    weight = {
        "awq": lambda: (
            of((n, k // 8), "uint32"),
            of((n, k // 1024), "uint32"),
            of((n, k // 128), "float16"),
        ),
        "nf4": lambda: (of((n, k // 2), "uint8"), of((n, k // 64), "float32")),
        "Q6K": lambda: (of((n * k // 256 * 210 // 4,), "uint32"),),
        "Q3K": lambda: (of((n * k // 256 * 110 // 4,), "uint32"),),
    }[name]()
    return of((m, k), dtype), *weight


@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        *(("awq", 1, "bfloat16"), ("nf4", 4, "float16"), ("Q6K", 1, "float32")),
        *(("awq", 100, "bfloat16"), ("nf4", 16, "bfloat16"), ("Q6K", 8, "float32")),
        *(("awq", 256, "float16"), ("nf4", 33, "bfloat16"), ("Q6K", 100, "float32")),
        ("Q3K", 1, "float32"),
    ],
)
def test_lowers(name, m, dtype):
    op, params = OPS[name]
    arrays = operands(name, m, 4096, 14336, dtype)
    assert f"fuel_{op.__name__}" in lowered(functools.partial(op, **params), *arrays)


@pytest.mark.parametrize(
    ("name", "m", "k", "n", "dtype", "reason"),
    [
        ("awq", 1, 4096, 14336, "bfloat16", None),
        ("nf4", 128, 4096, 14336, "float16", None),
        ("awq", 256, 4096, 14336, "bfloat16", None),
        ("awq", 257, 4096, 14336, "bfloat16", "decodes too often"),
        ("awq", 1, 1024, 512, "bfloat16", "decoded as fast by XLA"),
        ("Q6K", 8, 4096, 14336, "float32", None),
        ("Q6K", 128, 4096, 14336, "float32", None),
        ("Q6K", 129, 4096, 14336, "float32", "decodes too often"),
        ("awq", 128, 4096, 14336, "float32", None),
        ("nf4", 257, 4096, 14336, "float32", "decodes too often"),
        ("Q6K", 64, 4096, 14336, "bfloat16", None),
        ("Q6K", 65, 4096, 14336, "bfloat16", "decodes too often"),
        ("nf4", 1, 4096, 14336, "float64", "float64 is left to XLA"),
        ("nf4", 2**18, 1024, 8192, "float16", "2³¹ elements and more"),
    ],
)
def test_choice(name, m, k, n, dtype, reason):
    """What ``explain`` says."""
    op, params = OPS[name]
    with jax.enable_x64(dtype == "float64"):
        (choice,) = (
            c
            for c in op.explain(*operands(name, m, k, n, dtype), **params).forward
            if c.kernel.name == "triton"
        )
    if reason is None:
        assert choice.serves == ("cuda",)
    else:
        assert reason in choice.why_not


def test_small_groups_are_left_to_xla():
    """Their codes would be multiplied once for each group of a tile."""
    n, k = 14336, 4096
    shapes = ((16, k), "bfloat16"), ((n, k // 2), "uint8"), ((n, k // 32), "float32")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    choices = nf4.nf4_matmul.explain(*arrays, block_size=32).forward
    assert "groups of 32" in next(c.why_not for c in choices if c.kernel.name == "triton")


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        (
            awq.awq_matmul,
            [("float32", 96), ("uint32", 12), ("uint32", 1), ("float16", 8)],
            {"group_size": 24},
            "groups of 24",
        ),
        (
            nf4.nf4_matmul,
            [("float32", 2), ("uint8", 1), ("float32", 1)],
            {"block_size": 2},
            "not whole words",
        ),
        (
            gguf.qmatmul,
            [("float32", 256), ("uint32", 55)],
            {"quant_type": "Q3_K", "k": 256, "n": 2},
            "2 x 256 weights are decoded as fast by XLA",
        ),
    ],
)
def test_refusals(op, arrays, params, reason):
    flat = op is gguf.qmatmul
    shapes = [
        jax.ShapeDtypeStruct((columns,) if flat and dtype == "uint32" else (4, columns), dtype)
        for dtype, columns in arrays
    ]
    choices = op.explain(*shapes, **params).forward
    assert reason in next(c.why_not for c in choices if c.kernel.name == "triton")
