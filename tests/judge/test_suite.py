"""What is measured, and what is left of it when the measuring is stopped."""

import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.__main__ import main
from fuel_jax.errors import FileError, UnsupportedKernel
from fuel_jax.judge import Entry, ProfileReport, by_report, device_time, suite
from fuel_jax.judge.machine import machine
from fuel_jax.types import Array, Floats

ROOT = pathlib.Path(fuel_jax.__file__).parents[1]
MACHINE = {"platform": "cpu", "device": "cpu", "jax": "0.10.2", "date": "2026-12-01"}


def op_of(*kernels, **contract):
    """An op of no vocabulary that doubles, with more implementations."""

    def twice(x: Floats[Array, "*batch n"]) -> Array:
        return 2 * x

    example = {"x": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
    contract = {"precision": fuel_jax.Precision(2e-6), "examples": lambda: [example]} | contract
    made = fuel_jax.Op(twice, **contract)
    for name, run in kernels:
        made.kernel(name)(run)
    return made


def entry_of(op, path, dtype="float32", report=None):
    """What a run measures of its first example."""
    report = report or ProfileReport(MACHINE)
    found = list(suite.profile(report, path, [suite.Call(op, next(iter(op.examples())), dtype)]))
    return found[0][1] if found else None


class TestSizes:
    @pytest.mark.parametrize(
        ("op", "shapes"),
        [
            (fuel_jax.softmax_last_dim, [(20, 3000)]),
            (fuel_jax.fused_linear, [(176, 352), (352, 4), (4,)]),
            (fuel_jax.rope, [(8, 12, 20, 32), (20, 32), (20, 32)]),
            (fuel_jax.causal_conv1d, [(2, 3, 10920), (3, 1, 4), (3,)]),
            (fuel_jax.flash_attn, [(2, 4, 70, 112), (2, 2, 98, 112), (2, 2, 98, 84)]),
            (fuel_jax.gather, [(180, 360), (180, 270)]),
            (fuel_jax.qmatmul, [(255, 256), (180,)]),
            (fuel_jax.ssd_chunk_scan, [(60, 6, 60, 3), (60, 6, 60), (60,), *[(60, 6, 2, 4)] * 2]),
        ],
        ids=lambda x: getattr(x, "name", ""),
    )
    def test_examples_grow_in_proportion_or_by_rows(self, op, shapes):
        grown = suite.grown(op, next(iter(op.examples())), 2**16)
        assert suite.shapes(op, grown) == shapes

    def test_every_call_of_the_default_suite_is_one_the_op_takes(self):
        calls = suite.calls(dtypes=("float32",), sizes=(2**10,))
        assert {call.op for call in calls} == set(suite.every())
        for call in calls:
            arrays, params = suite.arguments(call.op, call.example)
            call.op.out(*arrays, **params)
            largest = suite.elements(call.op, call.example)
            own = suite.elements(call.op, next(iter(call.op.examples())))
            assert largest <= max(2**10, own), str(call)

    def test_values_of_indices_are_repeated(self):
        (example, *_) = fuel_jax.index_select.examples()
        grown = suite.grown(fuel_jax.index_select, example, 2**10)
        assert set(np.unique(grown["indices"])) == set(np.unique(example["indices"]))
        assert len(grown["indices"]) > len(example["indices"])

    def test_work_is_bounded_where_it_grows_with_the_square(self):
        example = list(fuel_jax.flash_attn.examples())[1]
        grown = suite.grown(fuel_jax.flash_attn, example, 2**20)
        assert suite.elements(fuel_jax.flash_attn, grown) > 2**10
        assert suite.work(fuel_jax.flash_attn, grown) <= suite.MOST_WORK

    def test_named_ops_have_all_their_examples(self):
        op = fuel_jax.sum_reduce
        calls = suite.calls([op], ("float32",), (2**4,))
        assert len(calls) == len(list(op.examples()))
        assert str(calls[0]).startswith("sum_reduce(float32[3,37], dims=None) in float32")


class TestMeasured:
    def test_every_implementation_with_times_errors_and_work(self, tmp_path):
        op = op_of(("other", lambda x: x + x), ("off", lambda x: x * 2.00001))
        entry = entry_of(op, tmp_path / "r.json")
        assert entry.operands == ("float32[3,5]",)
        assert list(entry.kernels) == ["other", "off", "xla"]
        for timing in entry.kernels.values():
            assert 0 < timing.least_us <= timing.us <= timing.most_us
            assert len(timing.revision) == 16
        assert entry.kernels["other"].error == entry.kernels["xla"].error == 0
        assert entry.kernels["off"].error > 1
        assert (entry.flops, entry.bytes) == (15, 2 * 15 * 4)
        assert ProfileReport.load(tmp_path / "r.json").entries == [entry]

    def test_what_raises_or_loses_a_number_has_failed(self, tmp_path):
        def raises(x):
            raise RuntimeError("out of shared memory\nand a long trace")

        op = op_of(("raises", raises), ("nan", lambda x: x / 0), ("wide", lambda x: x[0]))
        entry = entry_of(op, tmp_path / "r.json")
        assert list(entry.kernels) == ["xla"]
        assert entry.failed["raises"] == "RuntimeError: out of shared memory"
        assert "NaN or an infinity" in entry.failed["nan"]
        assert "NaN or an infinity" in entry.failed["wide"]  # another shape

    def test_who_cannot_serve_is_not_asked(self, tmp_path):
        op = op_of()
        op.kernel("elsewhere", platforms=("nowhere",))(lambda x: x)
        op.kernel("picky", refuses=lambda x: "never")(lambda x: x)
        op.kernel("declining", declines=lambda x: "too small")(lambda x: 2 * x)
        entry = entry_of(op, tmp_path / "r.json")
        assert (list(entry.kernels), entry.failed) == (["declining", "xla"], {})

    def test_a_reference_that_cannot_be_had_is_said(self, tmp_path, monkeypatch):
        def out_of_memory(*arguments):
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        monkeypatch.setattr(suite, "reference", out_of_memory)
        entry = entry_of(op_of(), tmp_path / "r.json")
        assert entry.kernels == {}
        assert entry.failed["xla"].startswith("float64 on the host: RuntimeError: RESOURCE")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
    def test_other_dtypes(self, dtype, tmp_path):
        with jax.enable_x64(False):
            entry = entry_of(op_of(), tmp_path / "r.json", dtype)
        assert entry.operands == (f"{dtype}[3,5]",)
        assert entry.kernels["xla"].error <= 1


class TestGradients:
    def test_a_backward_outside_the_vocabulary_is_measured_on_what_the_op_saves(self, tmp_path):
        op = fuel_jax.fused_softmax_cross_entropy
        (example, *_) = op.examples()
        report = ProfileReport({"platform": "cpu", "date": "2026-12-01"})
        calls = [suite.Call(op, example, "float32", gradient=True)]
        ((_, entry),) = suite.profile(report, tmp_path / "r.json", calls)
        assert entry.op == op.backward.name
        assert {"rows", "xla"} <= set(entry.kernels)
        # The log-sum-exps are the op's: with others its kernels would be off by millions.
        assert all(timing.error <= 1 for timing in entry.kernels.values())
        logits, targets = jnp.zeros((4, 11), "float32"), jnp.zeros(4, "int32")
        with by_report(report):
            backward = op.explain(logits, targets).backward
        assert any("(report of 2026-12-01)" in str(choice) for choice in backward)

    def test_which_ops_have_one(self):
        named = {op.name for op in suite.every() if suite.has_own_backward(op)}
        assert {"flash_attn", "conv2d", "qmatmul"} <= named
        assert named.isdisjoint({"softmax_last_dim", "exp", "sum_reduce"})
        found = suite.calls([fuel_jax.conv2d], ("float32",), (2**4,))
        assert [call.gradient for call in found].count(True) == len(found) / 2
        assert any(str(call).startswith("gradient of conv2d(") for call in found)


class TestDeviceTime:
    """On a GPU a profiler tells; where it sees one program and not another, nobody is asked."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        monkeypatch.setattr(suite._check, "platform_here", lambda: "cuda")
        return op_of(("other", lambda x: x + x))

    def test_is_the_time(self, gpu, tmp_path, monkeypatch):
        monkeypatch.setattr(suite, "launched", lambda burst, launches: [0.5, 0.25, 0.125])
        entry = entry_of(gpu, tmp_path / "r.json")
        assert {(t.us, t.least_us, t.most_us) for t in entry.kernels.values()} == {
            (0.25, 0.125, 0.5)
        }

    def test_of_all_or_of_none(self, gpu, tmp_path, monkeypatch):
        seen = iter([[0.25], []])
        monkeypatch.setattr(suite, "launched", lambda burst, launches: next(seen))
        entry = entry_of(gpu, tmp_path / "r.json")
        assert all(t.us > 0.25 for t in entry.kernels.values())

    @pytest.mark.parametrize(
        ("seen", "us"),
        [
            ([(1, "a", 1.0), (9, "b", 5.0), (4, "b", 2.0), (7, "a", 4.0)], [3.0, 9.0]),
            ([(1, "a", 1.0), (2, "a", 2.0), (3, "a", 6.0)], [4.5]),
            ([], []),
        ],
        ids=["in order of time", "unequal", "unseen"],
    )
    def test_of_each_launch(self, seen, us, monkeypatch):
        monkeypatch.setattr(device_time, "watched", lambda burst, launches: seen)
        assert device_time.launched(lambda n: 0.0, 2) == us


class TestFaults:
    def test_of_a_device_end_the_run_and_are_kept(self, tmp_path, monkeypatch):
        """So that the next run leaves the kernel out, and no later call is called broken."""

        def faulty(x):
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

        monkeypatch.setattr(suite, "answers", lambda: False)
        report = ProfileReport(MACHINE)
        asked = [suite.Call(op_of(("other", faulty)), {"x": np.ones(4)}, "float32")]
        run = suite.profile(report, tmp_path / "r.json", asked)
        _, entry = next(run)
        assert list(entry.failed) == ["other"]
        with pytest.raises(UnsupportedKernel, match="does not answer since"):
            next(run)
        assert list(suite.profile(ProfileReport.load(tmp_path / "r.json"), "", asked)) == []

    def test_while_timing_are_findings(self, tmp_path, monkeypatch):
        def lost(bursts):
            raise RuntimeError("RESOURCE_EXHAUSTED")

        monkeypatch.setattr(suite, "timed", lost)
        entry = entry_of(op_of(), tmp_path / "r.json")
        assert not entry.kernels
        assert set(entry.failed.values()) == {"RuntimeError: RESOURCE_EXHAUSTED"}

    def test_a_device_that_computes_answers(self):
        assert suite.answers()


class TestGoingOn:
    def test_what_is_there_is_not_measured_again(self, tmp_path):
        report, op = ProfileReport(MACHINE), op_of(("other", lambda x: x + x))
        assert entry_of(op, tmp_path / "r.json", report=report)
        assert entry_of(op, tmp_path / "r.json", report=report) is None
        assert entry_of(op, tmp_path / "r.json", "bfloat16", report)
        assert len(report.entries) == 2

    def test_a_new_implementation_or_another_source_is(self, tmp_path):
        report = ProfileReport(MACHINE)
        entry = entry_of(op_of(), tmp_path / "r.json", report=report)
        more = entry_of(op_of(("other", lambda x: x + x)), tmp_path / "r.json", report=report)
        assert list(more.kernels) == ["other", "xla"]
        (timing,) = entry.kernels.values()
        old = type(timing)(timing.us, timing.least_us, timing.most_us, 0.0, "00" * 8)
        report.add(Entry(entry.op, entry.operands, entry.params, {"xla": old}))
        assert entry_of(op_of(), tmp_path / "r.json", report=report)
        assert len(report.entries) == 1

    def test_the_report_of_another_machine_is_refused(self, tmp_path):
        ProfileReport(MACHINE | {"device": "NVIDIA H200"}).save(tmp_path / "r.json")
        with pytest.raises(FileError, match="another machine or JAX"):
            suite.opened(tmp_path / "r.json")


OPS = "exp", "neg", "abs", "sqr", "log", "sin", "cos", "erf"
COMMAND = ["profile", "--tiny", *(w for op in OPS for w in ("--op", op)), "--out"]


def profiling(path):
    """The command in a process of its own, which Ctrl-C reaches also if this one ignores it."""
    command = [sys.executable, "-m", "fuel_jax", *COMMAND, str(path)]
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
    finally:
        signal.signal(signal.SIGINT, heard)


def after(process, rows, sent):
    """What it said, a signal being sent when it had told of some rows; its exit status."""
    said = [line for line, _ in zip(process.stdout, range(rows + 1), strict=False)]
    process.send_signal(sent)
    rest, _ = process.communicate(timeout=100)
    return "".join([*said, rest]), process.returncode


def test_killed_and_interrupted_it_goes_on_from_there(tmp_path, capsys):
    path = tmp_path / "r.json"
    ProfileReport(machine()).save(path)
    said, status = after(profiling(path), 2, signal.SIGKILL)
    assert status == -signal.SIGKILL
    first = ProfileReport.load(path).entries
    assert len(first) >= said.count("µs") >= 2, said

    said, status = after(profiling(path), 1, signal.SIGINT)
    assert status == 130, said
    second = ProfileReport.load(path).entries
    assert f"stopped: {len(second)} are in" in said
    assert "Traceback" not in said
    assert second[: len(first)] == first
    assert len(second) > len(first)

    assert main([*COMMAND, str(path)]) == 0
    said = capsys.readouterr().out
    assert f"done: {path}" in said
    final = ProfileReport.load(path).entries
    assert final[: len(second)] == second
    assert f"{len(final)} calls into" in said
    assert said.count("µs") == len(final) - len(second)


class TestCommand:
    def test_lists_without_measuring(self, capsys, tmp_path):
        arguments = ["--list", "--op", "exp", "--tiny", "--dtype", "F32"]
        assert main(["profile", *arguments, "--out", str(tmp_path / "r.json")]) == 0
        assert capsys.readouterr().out.startswith("exp(float32[9,111]) in float32\n")
        assert not (tmp_path / "r.json").exists()

    def test_a_damaged_report_is_exit_2_and_stays(self, capsys, tmp_path):
        (tmp_path / "r.json").write_text("{")
        arguments = ["--op", "exp", "--tiny", "--out", str(tmp_path / "r.json")]
        assert main(["profile", *arguments]) == 2
        assert "damaged" in capsys.readouterr().err
        assert (tmp_path / "r.json").read_text() == "{"

    def test_a_report_that_cannot_be_written_is_exit_2_at_once(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setattr(suite, "ceilings", dict)
        monkeypatch.setattr(suite, "profile", lambda *arguments: pytest.fail("measured"))
        (tmp_path / "file").touch()
        arguments = ["--op", "exp", "--tiny", "--out", str(tmp_path / "file" / "r.json")]
        assert main(["profile", *arguments]) == 2
        assert "Name another file with --out." in capsys.readouterr().err

    def test_an_unknown_op_is_exit_2(self, capsys):
        assert main(["profile", "--op", "exq"]) == 2
        assert "did you mean" in capsys.readouterr().err

    def test_failures_are_told_and_exit_1(self, capsys, tmp_path, monkeypatch):
        def broken(*arguments):
            raise RuntimeError("no workspace")

        monkeypatch.setattr(suite, "jax_burst", broken)
        monkeypatch.setattr(suite, "ceilings", dict)
        arguments = ["--op", "exp", "--tiny", "--dtype", "float32"]
        assert main(["profile", *arguments, "--out", str(tmp_path / "r.json")]) == 1
        assert "xla: RuntimeError: no workspace" in capsys.readouterr().out
