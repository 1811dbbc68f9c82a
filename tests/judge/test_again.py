"""``profile --suite again``, on an op whose kernels do as they are told."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from fuel_jax.__main__ import main
from fuel_jax.judge import again, shapes, sweep
from fuel_jax.judge.h200 import FORWARD
from fuel_jax.judge.workload import Spec, Work

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture
def run(doubling, monkeypatch, tmp_path):
    """The suite over one shape of that op."""
    family = lambda *, r, c: Work(doubling, (Spec((r, c), "float32"),))
    grid = shapes.along("r", 2), shapes.along("c", 3)
    case = shapes.Case("twice forward f32", FORWARD, family, *grid, grid)
    monkeypatch.setattr(again, "CASES", [case])

    def run():
        file = tmp_path / "rows.jsonl"
        status = main(["profile", "--suite", "again", "--rows", str(file)])
        (row,) = map(json.loads, file.read_text().splitlines())
        return status, row

    return run


def test_the_same_bits_are_exit_0(doubling, run, capsys):
    doubling.kernel("fast")(lambda x: x + x)
    status, row = run()
    assert status == 0
    assert (row["at"], row["same"], row["failed"]) == ({"r": 2, "c": 3}, ["xla", "fast"], {})
    assert "R2 C3: xla, fast" in capsys.readouterr().out


def test_other_bits_are_exit_1_though_they_are_right(doubling, run, capsys):
    calls = itertools.count()

    @doubling.kernel("moving", declines=lambda x: "it moves")
    def _(x):
        told = jax.ShapeDtypeStruct((), jnp.float32)
        step = jax.pure_callback(lambda: jnp.float32(next(calls) == 7), told)
        return 2 * x * (1 + 1e-6 * step)

    status, row = run()
    assert status == 1
    assert row["same"] == ["xla"]
    assert row["failed"] == {"moving": "other bits in 1 of 20 runs"}
    assert "1 shapes; in 1 somebody failed" in capsys.readouterr().out


def test_wrong_results_and_errors_are_exit_1(doubling, run):
    doubling.kernel("off")(lambda x: 2.0001 * x)

    @doubling.kernel("broken")
    def _(x):
        raise RuntimeError("out of shared memory\nand a long trace")

    status, row = run()
    assert status == 1
    assert row["failed"].keys() == {"off", "broken"}
    assert "2e-06 promised" in row["failed"]["off"]


def test_every_case_has_shapes_that_the_op_takes():
    assert len({case.name for case in again.CASES}) == len(again.CASES)
    for case in again.chosen(["*forward bf16"]):
        for shape in case.shapes():
            operands = map(sweep.struct, shape.work.specs)
            assert shape.work.op.out(*operands, **shape.work.params) is not None


def test_one_on_this_machine(tmp_path):
    file = tmp_path / "rows.jsonl"
    given = ["nf4_matmul value+gradient bf16", "--tiny", "--rows", str(file)]
    assert main(["profile", "--suite", "again", *given]) == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert {"xla", "blocked"} <= set(row["same"])
