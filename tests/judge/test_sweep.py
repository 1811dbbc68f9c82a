"""``profile --suite sweep``, on shapes that a CPU runs at once; no time is judged here."""

import contextlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.__main__ import main
from fuel_jax.judge import device_time, shapes, sweep
from fuel_jax.judge.h200 import BOTH, FORWARD
from fuel_jax.judge.workload import Peer, Spec, Work
from tests.benchmarks import page

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture
def run(doubling, monkeypatch, tmp_path):
    """The sweep over two shapes of that op, with times that are given by name."""

    def family(*, r, c):
        return Work(doubling, (Spec((r, c), "float32"),), peers={"jnp": Peer(lambda x: x + x)})

    grid = shapes.along("r", 2), shapes.along("c", 3, 5)
    case = shapes.Case("twice forward f32", FORWARD, family, *grid, grid)
    monkeypatch.setattr(shapes, "CASES", [case])

    def run(**us):
        watched = lambda work: [(turn, turn and us[turn.name] * turn.launches) for turn in work]
        monkeypatch.setattr(sweep, "stretches", watched)
        file = tmp_path / "rows.jsonl"
        status = main(["profile", "--suite", "sweep", "--rows", str(file)])
        return status, [json.loads(line) for line in file.read_text().splitlines()]

    return run


class TestChoice:
    def test_one_that_is_the_best_is_exit_0(self, doubling, run, capsys):
        doubling.kernel("fast")(lambda x: x + x)
        status, rows = run(fast=10.0, xla=20.0, jnp=16.0)
        assert status == 0
        assert [row["across"] for row in rows] == [{"c": 3}, {"c": 5}]
        assert rows[0]["us"] == {"fast": 10.0, "xla": 20.0, "jnp": 16.0}
        assert (rows[0]["chosen"], rows[0]["ratio"]) == ("fast", 0.625)
        assert {"device", "jax", "commit", "date", "timer"} <= set(rows[0])
        said = capsys.readouterr().out
        assert "R2 C3: fast 10, jnp 16, xla 20; ×0.62" in said
        assert "2 shapes; in 0 another is faster" in said

    @pytest.mark.parametrize("better", ["fast", "jnp"])
    def test_one_that_is_not_is_exit_1(self, doubling, run, better, capsys):
        doubling.kernel("fast", declines=lambda x: "said to be slower")(lambda x: x + x)
        status, rows = run(**{"fast": 25.0, "xla": 20.0, "jnp": 25.0} | {better: 10.0})
        assert status == 1
        assert rows[0]["chosen"] == "xla"
        assert rows[0]["ratio"] == 2.0
        assert "2 shapes; in 2 another is faster" in capsys.readouterr().out

    @pytest.mark.parametrize(("ours", "best"), [(1.9, 1.0), (104.0, 100.0)])
    def test_little_is_forgiven(self, run, ours, best):
        assert run(xla=ours, jnp=best)[0] == 0

    def test_what_refuses_is_not_asked(self, doubling, run):
        doubling.kernel("picky", refuses=lambda x: "never")(lambda x: x)
        doubling.kernel("elsewhere", platforms=("nowhere",))(lambda x: x)
        _, rows = run(xla=1.0, jnp=1.0)
        assert set(rows[0]["us"]) == {"xla", "jnp"}


class TestFailures:
    def test_one_that_is_not_chosen_is_told_and_the_rest_is_timed(self, doubling, run):
        @doubling.kernel("broken", declines=lambda x: "it is broken")
        def _(x):
            raise RuntimeError("out of shared memory\nand a long trace")

        status, rows = run(xla=1.0, jnp=1.0)
        assert status == 0
        assert rows[0]["failed"] == {"broken": "RuntimeError: out of shared memory"}
        assert set(rows[0]["us"]) == {"xla", "jnp"}

    def test_the_chosen_one_is_exit_1(self, doubling, run, capsys):
        @doubling.kernel("broken")
        def _(x):
            raise RuntimeError("out of shared memory")

        status, rows = run(xla=1.0, jnp=1.0)
        assert status == 1
        assert rows[0]["chosen"] == "broken"
        assert rows[0]["ratio"] is None
        assert "✗ R2 C3: broken –, jnp 1, xla 1; broken: RuntimeError" in capsys.readouterr().out

    @pytest.mark.parametrize("wrong", [lambda x: 2.0001 * x, lambda x: x * jnp.nan])
    def test_what_is_off_has_failed(self, doubling, run, wrong):
        doubling.kernel("off")(wrong)
        status, rows = run(xla=1.0, jnp=1.0)
        assert status == 1
        assert "2e-06 promised" in rows[0]["failed"]["off"]

    def test_a_shape_that_nobody_can_run_misses_nothing(self, run, monkeypatch):
        def full(*_):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(sweep, "drawing", full)
        status, rows = run()
        assert status == 0
        assert set(rows[0]["failed"]) == {"xla", "jnp"}


@pytest.mark.parametrize(
    ("case", "served"),
    [
        ("softmax_last_dim value+gradient bf16", {"xla", "jnp"}),
        ("log_softmax_last_dim gradient f32", {"xla", "jnp"}),
        ("nf4_matmul gradient bf16", {"xla", "blocked", "parts", "jnp"}),
        ("causal_conv1d forward f32", {"xla", "jnp"}),
    ],
)
def test_everybody_who_can_serve_is_timed(case, served, tmp_path):
    file = tmp_path / "rows.jsonl"
    assert main(["profile", "--suite", "sweep", "--tiny", "--rows", str(file), case]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["tiny"]
        assert row["timer"] == "clock"
        assert row["failed"] == {}
        assert set(row["us"]) == served
        assert all(us > 0 for us in row["us"].values())


def test_forward_and_gradient_are_both_named_where_they_differ(monkeypatch):
    monkeypatch.setattr(sweep._check, "platform_here", lambda: "cuda")
    named = set()
    for shape in shapes.chosen(["softmax_last_dim value+gradient bf16"])[0].shapes():
        operands = tuple(map(sweep.struct, shape.work.specs))
        named.add(sweep.implementations(shape.work, BOTH, operands)[0])
    assert named == {"xla", "triton", "xla+triton", "triton+xla"}


def test_cases_are_listed_and_their_shapes_fit(capsys):
    assert main(["profile", "--suite", "sweep", "--list"]) == 0
    assert len(capsys.readouterr().out.split("\n")) == len(shapes.CASES) + 1
    assert len({case.name for case in shapes.CASES}) == len(shapes.CASES)
    largest = max(s.work.specs[0].shape for c in shapes.CASES[:2] for s in c.shapes())
    assert np.prod(largest) <= shapes.MOST


class TestStretches:
    def seen(self, monkeypatch, events, work):
        @contextlib.contextmanager
        def traced():
            yield events

        monkeypatch.setattr(device_time, "traced", traced)
        return device_time.stretches(work)

    def test_kernels_are_counted_to_what_was_yielded_before(self, monkeypatch):
        kernels = [(1, "mark", 9), (5, "mark", 9), (2, "a", 3), (6, "b", 4), (7, "a", 1)]
        assert self.seen(monkeypatch, kernels, "xy") == [("x", 3), ("y", 5)]

    @pytest.mark.parametrize("events", [[], [(1, "mark", 9), (2, "a", 3)]])
    def test_nothing_is_told_where_kernels_are_missing(self, monkeypatch, events):
        assert self.seen(monkeypatch, events, "xy") == []


def test_the_page_begins_with_what_misses(tmp_path, monkeypatch):
    where = {"device": "H200", "driver": "1", "jax": "2", "commit": "3", "date": "4"}

    def row(case, c, chosen, ratio, failed=(), **us):
        place = {"case": case, "down": {"r": 1}, "across": {"c": c}, "failed": dict(failed)}
        return where | place | {"chosen": chosen, "ratio": ratio, "us": us}

    rows = [
        row("good forward f32", 64, "triton", 0.5, triton=2.0, xla=4.0),
        row("bad forward f32", 64, "xla", 9.0, triton=1.0, xla=9.0),  # measured again
        row("bad forward f32", 64, "xla", 2.0, triton=4.0, xla=8.0),
        row("bad forward f32", 128, "xla", None, [("triton", "OOM")], xla=8.0),
    ]
    file = tmp_path / "nvidia-h200-sweep.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(page, "HERE", tmp_path)
    said = page.sweep()
    assert "Of 3 shapes 1 miss" in said
    assert "| bad forward f32 | R1 C64 | 2.00 | xla 8.0, triton 4.0 |  |" in said
    assert said.index("## bad") < said.index("## good")
    assert "|  | C64 | C128 |" in said
    assert "| R1 | **xla 2.00** | xla |" in said
    assert "* bad forward f32: triton: OOM" in said
