"""``python -m fuel_jax``: what it prints, and what it returns."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax import FUSED, OPS, FusedOps, OpKind, _check, _environment, _pages
from fuel_jax.__main__ import found, main
from fuel_jax.registry import builtin

ROOT = pathlib.Path(__file__).parents[1]
OPS_BY_NAME = sorted((op for op in builtin()), key=lambda op: op.name)


def command(*arguments, **environment):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fuel_jax", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


class TestList:
    def test_names_every_kind_and_every_fused_op(self, capsys):
        assert main([]) == 0
        words = set(capsys.readouterr().out.split())
        assert {k.value for k in OpKind if OPS[k]} <= words
        assert {FUSED[i].name for i in FusedOps if FUSED[i]} <= words

    def test_needs_neither_rich_nor_matplotlib(self, capsys, monkeypatch):
        for package in ("rich", "matplotlib"):
            monkeypatch.setitem(sys.modules, package, None)
        assert main([]) == 0
        assert main(["relu"]) == 0

    def test_a_closed_pipe_is_no_error(self):
        shell = f"{sys.executable} -m fuel_jax | head -n 1"
        done = subprocess.run(shell, shell=True, capture_output=True, text=True, cwd=ROOT)
        assert done.stderr == ""

    def test_help_names_every_command(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["--help"])
        assert stopped.value.code == 0
        said = capsys.readouterr().out
        assert all(
            f"fuel_jax {name}" in said
            for name in ("check", "profile", "report", "compare", "env", "table")
        )


class TestPage:
    @pytest.mark.parametrize("op", OPS_BY_NAME, ids=lambda op: op.name)
    def test_shows_signature_and_who_runs(self, op, capsys):
        assert main([op.name]) == 0
        said = capsys.readouterr().out
        assert said.startswith(op.usage())
        if isinstance(op, fuel_jax.Op):
            assert "→ forward" in said
            assert "gradient" in said
            assert "float32 " in said

    @pytest.mark.parametrize(
        "spelling", ["rms_norm_last_dim", "RmsNormLastDim", "RMS_NORM_LAST_DIM", "3"]
    )
    def test_any_spelling_finds_it(self, spelling):
        assert found(spelling) is fuel_jax.rms_norm_last_dim

    def test_several_at_once(self, capsys):
        assert main(["relu", "exp"]) == 0
        said = capsys.readouterr().out
        assert "relu(x" in said
        assert "exp(x" in said

    def test_an_unknown_name_gets_suggestions_and_exit_2(self, capsys):
        assert main(["rms_norm"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "did you mean rms_norm_last_dim" in said.err

    def test_an_unknown_flag_is_exit_2(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            main(["--nonsense"])
        assert stopped.value.code == 2

    def test_is_readable_without_a_device(self, monkeypatch, capsys):
        def broken():
            raise RuntimeError("CUDA_ERROR_NO_DEVICE\nand a long trace")

        monkeypatch.setattr(_pages, "platform_here", broken)
        assert main(["relu"]) == 0
        assert "no device (CUDA_ERROR_NO_DEVICE)" in capsys.readouterr().out

    def test_the_platform_of_a_named_kernel_wins_over_default(self):
        from fuel_jax._choose import Choice, Kernel

        choices = [
            Choice(Kernel("triton", abs), ("cuda",)),
            Choice(Kernel("xla", abs), ("default",)),
        ]
        assert _pages.server(choices, "cuda").kernel.name == "triton"
        assert _pages.server(choices, "cpu").kernel.name == "xla"


def test_the_op_table_of_the_docs_is_current(capsys):
    assert main(["table"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/ops.md").read_text(), "run `make docs`"


class TestCheck:
    def test_a_kept_promise_is_exit_0(self, capsys):
        assert main(["check", "softmax_last_dim", "RmsNormLastDim"]) == 0
        said = capsys.readouterr().out
        assert "every promise kept: 2 rows" in said
        assert said.count("✓") == 2

    def test_only_the_dtypes_asked_for(self, capsys):
        assert main(["check", "exp", "--dtype", "BF16", "--dtype", "float32"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if "✓" in line)
        assert row.split()[-2:] == ["-", "-"]  # float16, float64
        assert "-" not in row.split()[3:5]

    def test_unknown_names_are_exit_2(self, capsys):
        assert main(["check", "exq"]) == 2
        assert "did you mean eq, exp" in capsys.readouterr().err
        assert main(["check", "exp", "--dtype", "float33"]) == 2
        assert "did you mean" in capsys.readouterr().err

    def op(self, **contract):
        """An op of no vocabulary, with one example."""
        example = {"x": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
        contract = {"precision": fuel_jax.Precision(2e-6), "examples": lambda: [example]} | contract

        def twice(x: fuel_jax.types.Floats[jax.Array, "*shape"]):
            return 2 * x

        return fuel_jax.Op(twice, **contract)

    def test_a_kernel_that_is_off_is_exit_1(self, capsys):
        op = self.op()
        op.kernel("off")(lambda x: x * 2.0001)
        assert _check.check([op], ["float32"]) == 1
        said = capsys.readouterr().out
        assert "✗ twice" in said
        assert "✓ twice" in said  # its xla form
        assert "on x=float32[3,5]" in said
        assert "1 of 2 rows BROKEN" in said

    def test_a_kernel_that_raises_is_a_finding(self, capsys):
        op = self.op()

        @op.kernel("raises")
        def _(x):
            raise RuntimeError("out of shared memory")

        assert _check.check([op], ["float32"]) == 1
        assert "RuntimeError: out of shared memory" in capsys.readouterr().out

    def test_a_kernel_of_another_platform_or_dtype_is_not_run(self, capsys):
        op = self.op()
        op.kernel("elsewhere", platforms=("nowhere",))(lambda x: x)
        op.kernel("picky", refuses=lambda x: "never")(lambda x: x)
        assert _check.check([op], ["float32"]) == 0
        said = capsys.readouterr().out
        assert "elsewhere" not in said
        assert "picky" not in said

    def test_the_same_data_on_every_run(self):
        op = fuel_jax.softmax_last_dim
        (example, *_) = op.examples()
        (a,), _ = _check.filled(op, example, "float32")
        (b,), _ = _check.filled(op, example, "float32")
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32
        assert np.std(a) > 0.3

    @pytest.mark.parametrize(
        ("got", "want", "units"),
        [
            ([1.0, 2.0], [1.0, 2.0], 0),
            ([1.0, 2.5], [1.0, 2.0], 2.5),  # half of 0.1 · 2
            ([0.0, np.nan], [0.0, 2.0], np.inf),
            ([0.0, np.inf], [0.0, -np.inf], np.inf),
            ([1.0, np.nan], [1.0, np.nan], 0),
            ([1.0, np.inf], [1.0, np.inf], 0),
            ([0.1], [0.0], np.inf),
            ([], [], 0),
        ],
    )
    def test_errors_are_in_units_of_the_promise(self, got, want, units):
        assert _check.excess(np.array(got), np.array(want), lambda dtype: 0.1) == units

    def test_integers_must_be_exact(self):
        exact = lambda dtype: 0.0
        assert _check.excess(np.array([3, 4]), np.array([3, 4]), exact) == 0
        assert _check.excess(np.array([3, 4]), np.array([3, 5]), exact) == np.inf


class TestEnvironment:
    def test_prints_versions_and_devices(self, capsys):
        assert main(["env"]) == 0
        said = capsys.readouterr().out
        assert f"jax {jax.__version__}" in said
        assert "jax_enable_x64" in said
        assert "Python 3." in said

    def test_survives_a_device_that_is_not_there(self):
        done = command("env", JAX_PLATFORMS="cuda", PATH="")
        assert done.returncode == 0
        assert "failed: exit 1" in done.stdout
        assert "no nvidia-smi here" in done.stdout

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            ("import os; os.abort()", "failed: signal 6"),
            ("raise SystemExit('driver mismatch')", "driver mismatch"),
            ("pass", "nothing"),
            ("print(b'\\xff')", "xff"),
        ],
    )
    def test_survives_whatever_a_driver_does(self, program, said):
        assert said in " ".join(_environment.answer([sys.executable, "-c", program]))

    def test_survives_a_driver_that_hangs(self, monkeypatch):
        monkeypatch.setattr(_environment, "PATIENCE", 0.2)
        hang = [sys.executable, "-c", "import time; time.sleep(60)"]
        assert _environment.answer(hang) == ["no answer within 0.2 s"]

    def test_a_section_that_raises_leaves_the_others(self, monkeypatch, capsys):
        def broken():
            raise OSError("no such file")

        monkeypatch.setitem(_environment.SECTIONS, "machine", broken)
        monkeypatch.setitem(_environment.SECTIONS, "devices, as JAX sees them", list)
        assert main(["env"]) == 0
        said = capsys.readouterr().out
        assert "unknown: OSError: no such file" in said
        assert "packages" in said

    def test_names_what_is_missing(self, monkeypatch):
        monkeypatch.setattr(_environment, "PACKAGES", ("numpy", "no-such-package"))
        assert "no-such-package MISSING" in _environment.packages()[0]
