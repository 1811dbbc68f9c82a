"""Hopper's packed products on a simulated multiprocessor, against float64, and lowered for one."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.fused import _packed_hopper as shipped
from fuel_jax.fused.nf4_matmul import LEVELS
from pallas_kernels import _fragments, quantised_hopper
from pallas_kernels.quantised_hopper import Cut
from pallas_kernels.quantised_runs import HALVES

from . import hopper
from .test_launch import lowered
from .test_quantised import awq_weight, nf4_weight

RNG = np.random.default_rng(0)


def operands(words, parts, dtype, table=None):
    """What the instructions make, in NumPy."""
    found = []
    for part in np.split(words, parts, axis=1):
        if table is None:
            fields = [part >> 4 * i & 15 | HALVES[np.dtype(dtype).name].bits for i in range(4)]
        else:  # each lane reads its own column, and these are alike
            pairs = np.ascontiguousarray(part).view(np.uint32)
            found_by = lambda i, pairs=pairs: table.array[pairs >> 8 * i & 255, 0]
            fields = [np.ascontiguousarray(found_by(i)).view(np.uint16) for i in range(4)]
        found.append(np.concatenate(fields, axis=1).astype(np.uint16))
    return tuple(found)


def assembled(text, memory, **registers):
    """What such instructions leave in registers $0 to $3."""
    registers = {f"${name[1:]}": value for name, value in registers.items()}
    value = lambda x: registers[x] if x in registers else int(x, 0)
    run = {
        "shr.u32": lambda a, n: a >> n,
        "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
        "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
        "prmt.b32": lambda a, b, places: int.from_bytes(
            (a | b << 32).to_bytes(8, "little")[places >> 4 * i & 7] for i in (3, 2, 1, 0)
        ),
        "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
        "ld.shared.b32": lambda at: int(memory[at // 4]),
    }
    for line in filter(None, map(str.strip, text.replace("\n", "").split(";"))):
        name, to, *operands = line.replace(",", " ").replace("[", "").replace("]", "").split()
        registers[to] = run[name](*map(value, operands))
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_instructions(dtype):
    """A register of words becomes what NumPy makes of it, in every lane."""
    pairs = _fragments.pairs_of(LEVELS.astype(jnp.dtype(dtype)), False)
    for lane, copies in itertools.product(range(32), (32, 64)):
        words = RNG.integers(0, 2**16, (1, 2), np.uint16)
        (register,) = words.view(np.uint32)[0].tolist()
        got = assembled(_fragments.of_nibbles(dtype), (), r4=register)
        want = operands(words, 1, dtype)[0].view(np.uint32)[0]
        np.testing.assert_array_equal(got, want)
        table = np.repeat(pairs[:, None], copies, 1)
        memory = np.concatenate([[0] * 8, table.reshape(-1).view(np.uint32)])
        registers = {"r4": register, "r5": 32, "r6": 4 * lane}
        got = assembled(_fragments.of_bytes(copies), memory, **registers)
        want = operands(words, 1, dtype, hopper.Memory(table))[0].view(np.uint32)[0]
        np.testing.assert_array_equal(got, want)


@contextlib.contextmanager
def simulated(monkeypatch):
    with monkeypatch.context() as m, hopper.simulated(m):
        for name in hopper.NAMES.keys() & vars(quantised_hopper).keys():
            m.setattr(quantised_hopper, name, hopper.NAMES[name])
        m.setattr(quantised_hopper, "operands", operands)
        m.setattr(_fragments, "mosaic", lambda: hopper.GPU)
        yield


def packed(name, n, k, group, dtype):
    """Arrays, how they are packed, and the weight with its levels in halves, in float64."""
    if name == "awq":
        arrays, _, weight = awq_weight(n, k, group)
        return arrays, _fragments.awq(group, dtype), weight
    low_first = name.endswith("low first")
    arrays, _, weight = nf4_weight(n, k, group, low_first)
    scales = np.repeat(arrays[1].astype(np.float64), group, 1)
    near = np.abs(weight[..., None] / scales[..., None] - LEVELS).argmin(-1)
    levels = LEVELS.astype(jnp.dtype(dtype)).astype(np.float64)
    return arrays, _fragments.nf4(group, low_first, LEVELS, dtype), levels[near] * scales


CASES = {  # groups, shares, columns, step, stages, parts, ahead
    "awq": ("awq", 128, 512, 128, 16, "bfloat16", Cut(2, 1, 16, 128, 3, 1, False)),
    "awq, two groups a step": ("awq", 64, 1280, 128, 9, "float16", Cut(1, 2, 16, 256, 4, 1, False)),
    "awq, many steps a group": (
        "awq",
        64,
        1024,
        512,
        20,
        "float16",
        Cut(2, 2, 32, 128, 4, 1, False),
    ),
    "awq, ahead": ("awq", 192, 640, 64, 40, "bfloat16", Cut(2, 1, 32, 128, 3, 1, True)),
    "awq, ahead in parts": ("awq", 64, 1280, 128, 16, "bfloat16", Cut(1, 2, 16, 128, 6, 2, True)),
    "nf4": ("nf4", 192, 512, 64, 40, "bfloat16", Cut(2, 1, 32, 128, 2, 1, False)),
    "nf4 in parts": ("nf4", 192, 896, 64, 16, "bfloat16", Cut(2, 1, 16, 128, 2, 3, False)),
    "nf4, low first": (
        "nf4, low first",
        64,
        768,
        64,
        16,
        "float16",
        Cut(1, 4, 16, 128, 4, 1, False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(monkeypatch, name):
    kind, n, k, group, m, dtype, cut = CASES[name]
    arrays, how, weight = packed(kind, n, k, group, dtype)
    x = RNG.normal(size=(m, k)).astype(jnp.dtype(dtype))
    with simulated(monkeypatch):
        y = quantised_hopper.times_transposed(x, arrays, n, packed=how, name="test", cut=cut)
    want = x.astype(np.float64) @ weight.T
    eps, off = float(jnp.finfo(dtype).eps), 1e-6 * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=eps / 2, atol=off)


@pytest.mark.parametrize("name", ["awq, two groups a step", "nf4"])
def test_what_is_not_finite(monkeypatch, name):
    """Of a row alone: infinite with the sign of the weight it meets, NaN where that is 0."""
    kind, n, k, group, m, dtype, cut = CASES[name]
    arrays, how, weight = packed(kind, n, k, group, dtype)
    x = RNG.normal(size=(m, k)).astype(jnp.dtype(dtype))
    x[0, 1], x[1, k - 1], x[2, 2] = np.inf, np.nan, -np.inf
    with simulated(monkeypatch):
        y = quantised_hopper.times_transposed(x, arrays, n, packed=how, name="test", cut=cut)
    y = np.asarray(y, np.float64)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[0], np.sign(weight[:, 1]) * np.inf)
        np.testing.assert_array_equal(y[2], -np.sign(weight[:, 2]) * np.inf)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[3:]).all()


@pytest.mark.parametrize("name", ["awq", "nf4"])
def test_every_cut_fits(name):
    """Into memory; parts have steps, and groups that share rows turns of their own."""
    _, how, _ = packed(
        name, 64, 128 if name == "awq" else 64, 128 if name == "awq" else 64, "bfloat16"
    )
    sizes = 64, 1024, 2048, 4096, 5120, 8192, 11008, 14336, 28672, 128256
    for m, n, k in itertools.product(
        (1, 9, 16, 17, 33, 65, 129, 256), sizes, (*range(128, 2049, 128), *sizes[2:])
    ):
        cut = quantised_hopper.cut(m, n, k, how)
        table = 0 if how.table is None else quantised_hopper.copies(cut)
        assert quantised_hopper.bytes_of(cut, table) <= quantised_hopper.MEMORY, (m, n, k, cut)
        steps = k // cut.step
        assert k % cut.step == 0
        assert cut.stages % cut.shares == 0
        assert (cut.parts - 1) * -(-steps // cut.parts) < steps
        assert cut.stages >= 3 * cut.shares or not cut.ahead


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 finds no layouts for it")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((m, 14336, 4096) for m in (9, 32, 64, 100, 256)),
        *((m, 4096, 14336) for m in (16, 64, 128)),
        *((m, 4096, 4096) for m in (16, 32, 128, 256)),
        (128, 2048, 2048),
    ],
)
def test_lowers(m, n, k, dtype):
    x = jax.ShapeDtypeStruct((m, k), dtype)
    codes = jax.ShapeDtypeStruct((n, k // 2), "uint8")
    absmax = jax.ShapeDtypeStruct((n, k // 64), "float32")
    f = lambda *xs: fuel_jax.nf4_matmul(*xs, block_size=64)
    assert "fuel_nf4_matmul_hopper" in lowered(f, x, codes, absmax)
    weight, zeros = (jax.ShapeDtypeStruct((n, words), "uint32") for words in (k // 8, k // 1024))
    scales = jax.ShapeDtypeStruct((n, k // 128), "float16")
    f = lambda *xs: fuel_jax.awq_matmul(*xs, group_size=128)
    assert "fuel_awq_matmul_hopper" in lowered(f, x, weight, zeros, scales)


@pytest.mark.parametrize(
    ("name", "m", "reason"),
    [
        ("awq", 1, "one by one"),
        ("awq", 2, None),
        ("nf4", 2, "one by one"),
        ("nf4", 3, None),
        ("nf4", 256, None),
        ("nf4", 257, "decodes too often"),
    ],
)
def test_choice(name, m, reason):
    """What a Hopper GPU would be told."""
    n, k, of = 14336, 4096, jax.ShapeDtypeStruct
    x = of((m, k), "bfloat16")
    if name == "awq":
        weight = of((n, k // 8), "uint32"), of((n, 4), "uint32"), of((n, 32), "float16")
        said = shipped.declines_awq(x, *weight, group_size=128, split_k_iters=1)
    else:
        weight = of((n, k // 2), "uint8"), of((n, k // 64), "float32")
        said = shipped.declines_nf4(x, *weight, block_size=64, low_nibble_first=False)
    assert said is None if reason is None else reason in said
