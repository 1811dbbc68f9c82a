"""Checkpoints of AutoAWQ and bitsandbytes in safetensors: read to the bit, or refused."""

import json
import os
import random
import re
import struct
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.formats import safetensors
from fuel_jax.formats.quantize import quantize_nf4
from fuel_jax.fused.nf4_matmul import LEVELS

theirs = pytest.importorskip("safetensors.numpy", reason="the package that reads such files")

# -- files -----------------------------------------------------------------------------------------


def saved(folder, tensors):
    path = folder / "model.safetensors"
    theirs.save_file(tensors, path)
    return path


def by_hand(path, header, data=bytes(64), length=None):
    loose = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(loose) if length is None else length) + loose + data)
    return path


def entry(kind="F32", shape=(16,), at=(0, 64)):
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(at)}


def test_tensors_are_read_when_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        **{name: (9 * rng.normal(size=(3, 4))).astype(name) for name in ("float64", "float16")},
        **{name: rng.integers(0, 99, 5).astype(name) for name in ("uint8", "int32", "int64")},
        "bfloat16": np.asarray(jnp.asarray(rng.normal(size=(2, 3)), jnp.bfloat16)),
        "scalar": np.float32(3),
        "empty": np.zeros((0, 4), np.float32),
    }
    tensors = {name: np.asarray(x) for name, x in tensors.items()}
    path = saved(tmp_path, tensors)
    for where in (path, tmp_path, str(tmp_path)):
        got = safetensors.read(where)
        assert set(got) == set(tensors)
        assert len(got) == len(tensors)
        for name, x in tensors.items():
            assert got[name].dtype == x.dtype
            np.testing.assert_array_equal(got[name], x)
    with pytest.raises(fuel_jax.UnknownName, match="safetensors: no tensor 'floats'; did you mean"):
        got["floats"]


def test_several_files_and_their_index(tmp_path):
    for i in range(2):
        theirs.save_file({f"w{i}": np.full(3, i, np.float32)}, tmp_path / f"part-{i}.safetensors")
    theirs.save_file({"w0": np.zeros(1, np.float32)}, tmp_path / "other.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    weights = {"w0": "part-0.safetensors", "w1": "part-1.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    got = safetensors.read(tmp_path)
    assert {name: got[name].tolist() for name in got} == {"w0": [0] * 3, "w1": [1] * 3}

    def refused(text, said):
        index.write_text(text)
        with pytest.raises(fuel_jax.FileError, match=said):
            safetensors.read(tmp_path)

    inside = lambda name: json.dumps({"weight_map": {"w0": name}})
    refused(inside("../elsewhere.safetensors"), "names '../elsewhere.safetensors'; it must be a f")
    refused(inside("/etc/passwd"), "names '/etc/passwd'; it must be a file in")
    refused(inside("part-7.safetensors"), "names 'part-7.safetensors'; it must be a file in")
    refused(inside(7), "'weight_map' must be an object of file names")
    refused("{}", "'weight_map' must be an object")
    refused("[]", "index.json: is a JSON list; it must be an object")
    refused("[" * 100_000, "index.json: is no JSON")
    refused("{", "index.json: is no JSON")
    both = {"w0": "part-0.safetensors", "x": "other.safetensors"}
    refused(json.dumps({"weight_map": both}), "'w0' is in another file of")


# -- AutoAWQ ---------------------------------------------------------------------------------------


def awq_layer(n=16, k=64, group=32):
    rng, groups = np.random.default_rng(1), k // group
    words = lambda rows: rng.integers(-(2**31), 2**31, (rows, n // 8)).astype(np.int32)
    scales = rng.uniform(0.01, 0.06, (groups, n)).astype(np.float16)
    return {"l.qweight": words(k), "l.qzeros": words(groups), "l.scales": scales}


def test_awq_layers(tmp_path):
    """Column j of a row stands in nibble 0, 4, 1, 5, 2, 6, 3, 7 of its word."""
    layer = awq_layer()
    got = safetensors.read(saved(tmp_path, layer))
    assert safetensors.is_awq(got, "l")
    assert not safetensors.is_awq(got, "m")
    operands, params = safetensors.awq(got, "l")
    assert params == {"group_size": 32}
    w = np.zeros((16, 64))
    for i in range(16):
        shift = 4 * [0, 4, 1, 5, 2, 6, 3, 7][i % 8]
        nibble = lambda words: words.view(np.uint32)[:, i // 8] >> shift & 15  # noqa: B023
        zeros, scales = nibble(layer["l.qzeros"]), layer["l.scales"][:, i]
        each = lambda x: np.repeat(x.astype(float), 32)
        w[i] = (nibble(layer["l.qweight"]) - each(zeros)) * each(scales)
    y = fuel_jax.awq_matmul(np.eye(64, dtype=np.float32), *operands, **params)
    np.testing.assert_array_equal(np.asarray(y).T, w.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"l.qzeros": np.zeros((2, 3), np.int32)}, "'l' is no layer in AutoAWQ's GEMM layout"),
        ({"l.scales": np.zeros((2, 16), np.float32)}, "'scales' is float32.* must be float16"),
        ({"l.scales": np.zeros((3, 16), np.float16)}, r"'scales' is \[3, 16\]"),
        ({"l.qweight": np.zeros((60, 2), np.int32)}, "'qweight' has 60 rows"),
        ({"l.qweight": np.zeros(8, np.int32)}, "must be int32 or uint32 and have 2 axes"),
        ({x: np.zeros((0, 0), np.int32) for x in ("l.qweight", "l.qzeros")}
         | {"l.scales": np.zeros((0, 0), np.float16)}, "it must not be empty"),
    ],
)  # fmt: skip
def test_awq_layers_that_do_not_fit(tmp_path, change, said):
    got = safetensors.read(saved(tmp_path, awq_layer() | change))
    with pytest.raises(fuel_jax.FileError, match=said):
        safetensors.awq(got, "l")


# -- bitsandbytes ----------------------------------------------------------------------------------

W = np.random.default_rng(2).normal(0, 0.3, (6, 128)).astype(np.float32)
STATE = "l.weight.quant_state.bitsandbytes__nf4"


def text(**changes):
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [6, 128]}
    return np.frombuffer(json.dumps(state | changes).encode(), np.uint8)


def nf4_layer():
    codes, absmax = quantize_nf4(W)
    parts = {"l.weight": codes.reshape(-1, 1), "l.weight.absmax": absmax.reshape(-1)}
    return parts | {"l.weight.quant_map": LEVELS, STATE: text()}


def nested_layer():
    """Scales as codes, in blocks of 8: map[code] · nested_absmax + offset."""
    rng = np.random.default_rng(3)
    more = {"nested_blocksize": 8, "nested_offset": 0.25, "nested_dtype": "float32"}
    parts = {
        "l.weight.absmax": rng.integers(0, 256, 12, np.uint8),
        "l.weight.nested_absmax": rng.uniform(0.1, 0.2, 2).astype(np.float32),
        "l.weight.nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32),
    }
    return nf4_layer() | parts | {STATE: text(**more)}


def test_nf4_layers(tmp_path):
    codes, absmax = quantize_nf4(W)
    got = safetensors.read(saved(tmp_path, nf4_layer()))
    assert safetensors.is_nf4(got, "l")
    (packed, scales), params = safetensors.nf4(got, "l")
    assert params == {"block_size": 64}
    np.testing.assert_array_equal(packed, codes)
    np.testing.assert_array_equal(scales, absmax)
    y = fuel_jax.nf4_matmul(np.eye(128, dtype=np.float32), packed, scales, **params)
    levels = LEVELS[np.stack([codes >> 4, codes & 15], -1).reshape(6, 2, 64)]
    np.testing.assert_array_equal(np.asarray(y).T, (levels * absmax[..., None]).reshape(6, 128))


def test_nf4_layers_in_another_storage(tmp_path):
    """Bytes that say they are BF16, as training in shards wants them."""
    layer = nf4_layer()
    layer["l.weight"] = layer["l.weight"].reshape(-1).view(jnp.bfloat16).reshape(-1, 1)
    (packed, _), _ = safetensors.nf4(safetensors.read(saved(tmp_path, layer)), "l")
    np.testing.assert_array_equal(packed, quantize_nf4(W)[0])


def test_nf4_layers_with_packed_scales(tmp_path):
    layer = nested_layer()
    (_, scales), _ = safetensors.nf4(safetensors.read(saved(tmp_path, layer)), "l")
    codes, absmax = layer["l.weight.absmax"], layer["l.weight.nested_absmax"].astype(float)
    want = (codes / 127.5 - 1) * np.repeat(absmax, 8)[:12] + 0.25
    assert np.abs(scales.reshape(-1) - want).max() < 1e-7
    assert scales.shape == (6, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_saves(tmp_path, nested):
    torch = pytest.importorskip("torch", reason="bitsandbytes needs it")
    functional = pytest.importorskip("bitsandbytes.functional", reason="the package that saves so")
    w = torch.tensor(np.tile(W, (4, 4)))
    how = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": nested}
    codes, state = functional.quantize_4bit(w, **how)
    parts = {"l.weight": codes, **{f"l.weight.{k}": v for k, v in state.as_dict(True).items()}}
    got = safetensors.read(saved(tmp_path, {k: v.numpy() for k, v in parts.items()}))
    assert (got["l.weight.absmax"].dtype == np.uint8) == nested
    operands, params = safetensors.nf4(got, "l")
    y = fuel_jax.nf4_matmul(np.eye(512, dtype=np.float32), *operands, **params)
    want = functional.dequantize_4bit(codes, state).numpy()
    assert np.abs(np.asarray(y).T - want).max() <= 2e-7 * np.abs(want).max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({STATE: text(shape=[6, 130])}, "has 384 bytes for 6 x 130 weights in blocks of 64"),
        (
            {STATE: text(blocksize=96)},
            "in blocks of 96; two weights share a byte, and blo",
        ),
        ({STATE: text(blocksize=0)}, "has shape .6, 128. and blocksize 0; not .n, k. and a number"),
        ({STATE: text(blocksize=True)}, "blocksize True"),
        ({STATE: text(blocksize=2**63)}, "blocksize 9223372036854775808"),
        ({STATE: text(shape=[2**40, 2**40])}, "has shape"),
        ({STATE: text(shape=[768])}, "has shape .768. and"),
        ({STATE: text(shape="all")}, "has shape 'all'"),
        ({STATE: text(shape=[-6, -128])}, "has shape .-6, -128."),
        ({STATE: text()[:-1]}, "is no JSON"),
        ({STATE: np.frombuffer(b"[" * 100_000, np.uint8)}, "is no JSON"),
        ({STATE: np.frombuffer(b"7", np.uint8)}, "is a JSON int; it must be an object"),
        ({STATE: None}, "'l' no quant_state; it must be nf4"),
        ({STATE: None, STATE[:-3] + "fp4": text()}, "'l' is fp4; it must be nf4"),
        ({"l.weight.quant_map": -LEVELS}, "has levels of its own"),
        ({"l.weight.absmax": np.ones(11, np.float32)}, "has 11 scales; its weights need 12"),
        ({"l.weight": np.zeros((3, 1), np.uint8)}, "has 3 bytes for 6 x 128 weights"),
    ],
)
def test_nf4_layers_that_do_not_fit(tmp_path, change, said):
    layer = {k: v for k, v in (nf4_layer() | change).items() if v is not None}
    with pytest.raises(fuel_jax.FileError, match=said):
        safetensors.nf4(safetensors.read(saved(tmp_path, layer)), "l")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"l.weight.nested_absmax": np.ones(3, np.float32)},
            "256 nested levels and 3 nested",
        ),
        ({"l.weight.nested_quant_map": np.ones(9, np.float32)}, "has 9 nested levels"),
        ({STATE: text(nested_blocksize=0, nested_offset=0.0)}, "nested_blocksize 0"),
        ({STATE: text(nested_blocksize=8)}, "nested_offset None"),
        ({STATE: text(nested_blocksize=2**62, nested_offset=0.0)}, "2 nested scales; 12 scales in"),
    ],
)
def test_packed_scales_that_do_not_fit(tmp_path, change, said):
    got = safetensors.read(saved(tmp_path, nested_layer() | change))
    with pytest.raises(fuel_jax.FileError, match=said):
        safetensors.nf4(got, "l")


# -- hostile ---------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": (b"", b"", 0),
    "a header of 2^63": ({"a": entry()}, bytes(64), 2**63),
    "a header of 2^64": ({"a": entry()}, bytes(64), 2**64 - 1),
    "no header": (b"", bytes(64), 0),
    "overlap": ({"a": entry(), "b": entry()}, bytes(64), None),
    "a hole": ({"a": entry(shape=[8], at=[32, 64])}, bytes(64), None),
    "sizes that wrap": ({"a": entry(shape=[2**32, 2**32])}, bytes(64), None),
    "nothing, 2^62 times": ({"a": entry(shape=[0, 2**62], at=[0, 0])}, b"", None),
    "more than there is": ({"a": entry(shape=[32], at=[0, 128])}, bytes(64), None),
    "backwards": ({"a": entry(at=[64, 0])}, bytes(64), None),
    "a negative size": ({"a": entry(shape=[-16])}, bytes(64), None),
    "an unknown type": ({"a": entry("F99")}, bytes(64), None),
    "a type that NumPy has not": ({"a": entry("F8_E4M3", [64])}, bytes(64), None),
    "70 axes": ({"a": entry(shape=[1] * 69 + [16])}, bytes(64), None),
    "lists in lists": (b"[" * 100_000, bytes(64), None),
    "no text": (b"\xff\xfe", bytes(64), None),
}


def attempt(path):
    """Read all of it; the error, if there was one.  Any but ours fails the test."""
    began, error = time.process_time(), None
    try:
        tensors = safetensors.read(path)
        for name in tensors:
            assert tensors[name].nbytes <= path.stat().st_size
        for form in (safetensors.awq, safetensors.nf4):
            form(tensors, "l")
    except fuel_jax.FuelError as refused:
        error = refused
    assert time.process_time() - began < 1
    return error


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(tmp_path, case):
    path = by_hand(tmp_path / "model.safetensors", *HOSTILE[case])
    if case == "nothing":
        os.truncate(path, 0)
    error = attempt(path)
    assert isinstance(error, fuel_jax.FileError)
    assert str(error).startswith(f"{path}: ")


def test_damaged_files_are_read_or_refused(tmp_path):
    """Bytes of the header changed, put in or left out, or the end cut."""
    path = saved(tmp_path, nested_layer())
    whole, rng, said = path.read_bytes(), random.Random(20261130), set()
    header = 8 + struct.unpack_from("<Q", whole)[0]
    state = whole.index(b'{"quant_type')
    for _ in range(400):
        loose = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.choice((rng.randrange(header), state + rng.randrange(150)))
            match rng.randrange(4) if at < len(loose) else 3:
                case 0:
                    loose[at] = rng.randrange(256)
                case 1:
                    loose[at] = rng.choice(b"0123456789[]{},:")
                case 2:
                    del loose[at : at + rng.randrange(1, 9)]
                case 3:
                    del loose[rng.randrange(len(loose) + 1) :]
        path.write_bytes(loose)
        said.add(re.sub(r"'.*'|\d+|\[.*\]", "…", str(attempt(path)).rpartition(f"{path}")[2]))
    assert len(said) > 10


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"safetensors package.*install 'fuel-jax\[formats\]'"):
        safetensors.read(tmp_path)
