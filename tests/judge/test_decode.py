"""``profile --suite decode``, on a model that a CPU runs at once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.__main__ import main
from fuel_jax.judge import decode

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.parametrize("form", ["NF4", "Q4K"])
def test_a_packed_weight_multiplies_as_its_unpacked_one(form):
    w = decode.weight(form, 256, 48, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 256)).astype("bfloat16")
    whole = jnp.eye(256, dtype="float32") @ w  # exact: one code in each sum
    got, wanted = np.float32(x @ w), np.matmul(np.float32(x), np.float32(whole))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2**-7 * np.abs(wanted).max())


def test_a_row_says_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "FORMS", ("bfloat16", "NF4"))
    file = tmp_path / "rows.jsonl"
    arguments = ["profile", "--suite", "decode", "--tiny", "--rows", str(file)]
    assert main([*arguments, "llama 8B B16 context 1024"]) == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["suite"] == "decode"
    assert row["tokens"] == 16
    assert row["us"] > 0
    assert row["compile_s"] > 0
    assert row["temporary_bytes"] > 0
    assert row["weight_bytes"] < row["peers"]["bfloat16"]["weight_bytes"]
    assert "failed" not in row


def test_what_there_is_no_memory_for_is_said_and_the_rest_measured(monkeypatch):
    made = decode.init

    def scarce(config, form, key):
        if form == "bfloat16":
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand where")
        return made(config, form, key)

    monkeypatch.setattr(decode, "FORMS", ("bfloat16", "NF4"))
    monkeypatch.setattr(decode, "init", scarce)
    row = decode.measured(decode.CASES[0], tiny=True)
    assert row["us"] > 0
    assert row["failed"] == {"bfloat16": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    assert "Out of memory" in "".join(decode.lines(row))
