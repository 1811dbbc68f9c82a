"""``python -m fuel_jax profile``: every case runs, on shapes that a CPU can hold."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.__main__ import main
from fuel_jax.judge import profile
from fuel_jax.judge.device_time import interleaved, jax_burst
from fuel_jax.judge.h200 import CASES, chosen

BOUND = {"bf16": 2e-2, "f32": 2e-5}  # of tiny cases; a wrong peer or a wrong cut is off by far more


@pytest.fixture(autouse=True)
def as_users_run_it():
    """The suite is stricter than the settings a measurement is for."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def known(case):
    """Cases that differ in nothing but extents are one."""
    options = {k: v for k, v in case.extents.items() if not isinstance(v, int) or v is True}
    return case.family, case.direction, tuple(sorted(options.items())), str(case.tiny.get("hk"))


@pytest.mark.parametrize(
    "case", {known(case): case for case in CASES}.values(), ids=lambda c: c.name
)
def test_every_case_runs_and_everybody_computes_the_same(case, monkeypatch):
    with contextlib.suppress(ImportError):  # without PyTorch there are none of its peers
        monkeypatch.setattr("fuel_jax.judge.peers_torch.functions", lambda work: {})
    row = profile.measured(case, tiny=True)
    assert "failed" not in row
    bound = BOUND["f32" if case.name.endswith("f32") else "bf16"]
    errors = {"ours": row["error"]} | {name: got["error"] for name, got in row["peers"].items()}
    assert {name: e for name, e in errors.items() if not 0 <= e < bound} == {}


@pytest.mark.parametrize("name", ["rms_norm_last_dim gradient", "flash_attn fwd+bwd causal"])
def test_pytorch_computes_the_same(name):
    pytest.importorskip("torch")
    row = profile.measured(chosen([name])[0], tiny=True)
    assert "failed" not in row
    theirs = [got["error"] for peer, got in row["peers"].items() if "torch" in peer]
    assert theirs
    assert max(theirs) < BOUND["bf16"]


def test_rows_are_appended_and_say_where(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    case = "causal_conv1d"
    arguments = ["profile", "--suite", "h200", "--tiny", "--rows", str(file), case]
    assert main(arguments) == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["case"].startswith(case)
    assert row["tiny"]
    assert {"device", "driver", "jax", "commit", "date", "goal_us", "floor_us", "us"} <= set(row)
    assert "[1/1] causal_conv1d" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["lowered", "compiled"])
def test_a_failure_is_reported_and_exit_1(when, capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of shared memory\nand a long trace")

    monkeypatch.setattr(profile, "jax_lowered", {"lowered": broken}.get(when, lambda *_: broken))
    assert main(["profile", "--suite", "h200", "--tiny", "fused_linear"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: out of shared memory\n" in said
    assert "failed: fused_linear" in said


class TestNames:
    def test_beginnings_patterns_and_whole_names(self):
        assert len(chosen([])) == len(CASES)
        assert all(c.name.startswith("nf4_matmul M1 ") for c in chosen(["nf4_matmul M1"]))
        assert {c.direction for c in chosen(["flash_attn fwd+bwd*"])} == {"both"}
        assert chosen([CASES[0].name]) == [CASES[0]]

    def test_are_listed(self, capsys):
        assert main(["profile", "--suite", "h200", "--list", "qmatmul"]) == 0
        assert capsys.readouterr().out.count("qmatmul") == 5

    def test_unknown_ones_are_exit_2(self, capsys):
        assert main(["profile", "--suite", "h200", "softmax"]) == 2
        assert "no case 'softmax'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--suite", "b200"],
            ["softmax_last_dim"],
            ["--rows", "rows.jsonl"],
            ["--suite", "h200", "--op", "exp"],
            ["--suite", "h200", "--out", "report.json"],
        ],
    )
    def test_what_no_suite_has_is_exit_2(self, arguments, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["profile", *arguments])
        assert stopped.value.code == 2


class TestTime:
    def test_joined_runs_are_neither_merged_nor_dropped(self):
        sets = [(jnp.full((64, 64), i, jnp.float32),) for i in (1, 1, 1)]
        burst, first = jax_burst(jnp.linalg.qr, sets, len(sets), np.inf)
        assert burst(3) > 0
        assert len(first()) == 2

    def test_what_does_not_fit_is_not_run(self):
        sets = [(jnp.ones((64, 64)),)]
        with pytest.raises(MemoryError, match="beside its results"):
            jax_burst(lambda x: jnp.sort(x @ x) @ x, sets, 1, 1)

    def test_programs_take_turns(self):
        order = []
        bursts = {name: lambda n, name=name: order.append(name) or 1e-3 for name in "ab"}
        times = interleaved(bursts, rounds=2)
        assert order[-4:] == ["b", "a", "a", "b"]
        assert times["a"]["us"] == pytest.approx(1e3)
