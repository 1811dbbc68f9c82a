"""Choosing by a report: who serves, what is said of it, and when nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax import judge
from fuel_jax._choose import MEASURED
from fuel_jax.errors import FileError
from fuel_jax.judge import Criterion, Entry, ProfileReport, Timing, choosing, machine as machines
from fuel_jax.types import Array, Floats

MACHINE = {"platform": "cpu", "device": "cpu", "jax": "0.10.2", "date": "2026-12-01"}
X = jnp.arange(8, dtype="float32")


def small(x, **params):
    return "few elements are as fast in XLA" if x.size < 100 else None


@pytest.fixture
def op():
    """Implementations that can serve here, one elsewhere, one that cannot; each adds a number."""

    def steps(x: Floats[Array, "*shape"], *, scale: float = 1.0, axis: int = 0) -> Array:
        return x

    made = fuel_jax.register_fused("steps", steps)
    made.kernel("first", declines=small)(lambda x, **params: x + 1)
    made.kernel("second", platforms=("cpu",))(lambda x, **params: x + 2)
    made.kernel("third")(lambda x, **params: x + 3)
    made.kernel("picky", refuses=lambda x, **params: "odd sizes only")(lambda x, **params: x + 4)
    made.kernel("far", platforms=("cuda",))(lambda x, **params: x + 5)
    yield made
    fuel_jax.unregister_fused("steps")


def report_of(times, shape="8", dtype="float32", errors=None, machine=MACHINE, **params):
    """A report of calls of ``steps`` on one shape, or on several with times each."""
    report = ProfileReport(machine)
    for s, t in times.items() if isinstance(next(iter(times.values())), dict) else [(shape, times)]:
        timings = {n: Timing(us, us, us, (errors or {}).get(n, 0.1)) for n, us in t.items()}
        params = {"scale": 1.0, "axis": 0} | params
        report.add(Entry("steps", (f"{dtype}[{s}]",), params, timings))
    return report


def who(op, report, x=X, criterion="fastest", **params):
    """Which implementation ran, by what it added, in an op that is compiled anew."""
    with judge.by_report(report, criterion):
        return int(np.asarray(op(x, **params) - x).ravel()[0])


class TestChoice:
    def test_without_a_report_the_order_stands(self, op):
        assert int((op(X) - X)[0]) == 2

    def test_the_fastest_that_was_measured(self, op):
        assert who(op, report_of({"second": 5.0, "third": 3.0, "xla": 4.0})) == 3
        assert who(op, report_of({"second": 5.0, "third": 6.0, "xla": 4.0})) == 0

    def test_overrules_what_a_kernel_declines(self, op):
        assert who(op, report_of({"first": 1.0, "second": 2.0})) == 1

    def test_never_what_it_refuses_nor_where_it_cannot_run(self, op):
        assert who(op, report_of({"picky": 0.1, "far": 0.1, "second": 5.0, "third": 4.0})) == 3

    @pytest.mark.parametrize("error", [1.01, 1e9])
    def test_never_one_that_broke_the_op_s_promise(self, op, error):
        times = {"third": 1.0, "second": 5.0, "xla": 4.0}
        assert who(op, report_of(times, errors={"third": error})) == 0

    def test_never_one_whose_source_has_changed(self, op):
        report = report_of({"second": 5.0})
        timing = lambda us, revision: Timing(us, us, us, 0.0, revision)
        kernels = {k.name: choosing.revision(k) for k in op.kernels}
        known = {"second": timing(5.0, kernels["second"]), "third": timing(1.0, "00" * 8)}
        known["xla"] = timing(4.0, kernels["xla"])
        assert len(kernels["third"]) == 16
        report.add(Entry("steps", ("float32[8]",), {"scale": 1.0, "axis": 0}, known))
        assert who(op, report) == 0

    def test_never_one_that_failed(self, op):
        report = report_of({"second": 5.0, "third": 1.0, "xla": 4.0})
        (entry,) = report.entries
        entry.failed["third"] = "RuntimeError: out of shared memory"
        assert who(op, report) == 0

    def test_where_the_op_s_own_choice_was_not_measured_it_stands(self, op):
        assert who(op, report_of({"third": 1.0, "xla": 4.0})) == 2

    def test_one_measurement_compares_nothing(self, op):
        assert who(op, report_of({"second": 1.0})) == 2
        with judge.by_report(report_of({"second": 1.0})):
            assert "measured" not in str(op.explain(X))

    def test_a_report_of_another_platform_says_nothing_here(self, op):
        elsewhere = MACHINE | {"platform": "cuda"}
        assert who(op, report_of({"second": 5.0, "third": 1.0}, machine=elsewhere)) == 2

    def test_and_one_of_here_nothing_there(self, op):
        with judge.by_report(report_of({"second": 5.0, "xla": 1.0})):
            choices = {c.kernel.name: c.serves for c in op.explain(X).forward}
            there = jax.jit(op).trace(X).lower(lowering_platforms=("cuda",)).as_text()
        assert choices == {
            **{"first": (), "second": (), "third": ("default",), "picky": (), "far": ()},
            "xla": ("cpu",),
        }
        assert "3.0" in there

    def test_a_report_may_be_of_the_machine_that_a_program_is_lowered_for(self, op):
        elsewhere = MACHINE | {"platform": "cuda"}
        with judge.by_report(report_of({"far": 1.0, "third": 5.0}, machine=elsewhere)):
            there = jax.jit(op).trace(X).lower(lowering_platforms=("cuda",)).as_text()
        assert "5.0" in there

    @pytest.mark.parametrize(
        ("criterion", "added"), [("fastest", 3), ("most_accurate", 0), ("balanced", 2)]
    )
    def test_criteria(self, op, criterion, added):
        times = {"second": 1.5, "third": 1.2, "xla": 4.0}
        errors = {"second": 0.2, "third": 0.9, "xla": 0.1}
        report = report_of(times, errors=errors)
        assert who(op, report, criterion=criterion) == added
        assert who(op, report, criterion=Criterion(criterion)) == added

    def test_of_two_as_accurate_the_faster(self, op):
        times = {"second": 1.5, "third": 1.2, "xla": 4.0}
        assert who(op, report_of(times), criterion="most_accurate") == 3

    def test_an_unknown_criterion_is_refused(self, op):
        with pytest.raises(ValueError, match="prettiest"):
            who(op, report_of({"xla": 1.0}), criterion="prettiest")


class TestNearest:
    def test_an_extent_may_be_off_by_a_factor_of_four(self, op):
        report = report_of({"second": 5.0, "third": 1.0}, shape="64")
        sizes = (15, 16, 64, 256, 511, 512)
        chosen = [who(op, report, jnp.zeros(n, "float32")) for n in sizes]
        # 100 and more are served by "first" unless the report knows better: it does not know it.
        assert chosen == [2, 3, 3, 1, 1, 1]

    def test_the_nearest_and_of_two_as_near_the_larger(self, op):
        small, large = {"second": 1.0, "third": 5.0}, {"second": 5.0, "third": 1.0}
        report = report_of({"4": small, "64": large})
        assert who(op, report, jnp.zeros(8, "float32")) == 2
        assert who(op, report, jnp.zeros(16, "float32")) == 3
        assert who(op, report, jnp.zeros(32, "float32")) == 3

    @pytest.mark.parametrize(
        ("x", "params", "added"),
        [
            (jnp.zeros(8, "float32"), {"scale": 7.5}, 3),
            (jnp.zeros(8, "float32"), {"axis": 1}, 2),
            (jnp.zeros(8, "bfloat16"), {}, 2),
            (jnp.zeros((8, 8), "float32"), {}, 2),
        ],
        ids=["another float", "another integer", "another dtype", "another rank"],
    )
    def test_only_of_calls_that_are_alike(self, op, x, params, added):
        assert who(op, report_of({"second": 5.0, "third": 1.0}), x, **params) == added


class TestExplanation:
    def test_says_what_was_measured(self, op):
        with judge.by_report(report_of({"second": 31.0, "third": 12.4, "xla": 2e5})):
            said = str(op.explain(X))
        lines = {line.split()[1]: line for line in said.splitlines() if "forward" in line}
        when = "(report of 2026-12-01)"
        assert (
            f"serves cpu, every platform left; measured 12.4 µs against 31.0 µs {when}"
            in (lines["third"])
        )
        assert lines["second"].endswith(f" measured 31.0 µs against 12.4 µs {when}")
        assert lines["xla"].endswith(f" measured 200.0 ms against 12.4 µs {when}")
        assert "few elements" in lines["first"]
        assert "odd sizes only" in lines["picky"]

    def test_of_the_op_s_own_choice_too(self, op):
        with judge.by_report(report_of({"second": 12.4, "third": 31.0})):
            first = op.explain(X).forward[1]
        assert str(first).startswith("second     serves cpu; measured 12.4 µs against 31.0 µs")

    def test_of_who_goes_on_serving_elsewhere(self, op):
        wide = jnp.zeros(128, "float32")
        with judge.by_report(report_of({"first": 31.0, "xla": 12.4}, shape="128")):
            said = [str(c) for c in op.explain(wide).forward]
        assert said[0].startswith("first      serves every platform; not cpu: measured 31.0 µs")
        assert said[-1].startswith("xla        serves cpu; measured 12.4 µs against 31.0 µs")

    def test_errors_where_they_count(self, op):
        errors = {"second": 0.5, "third": 0.25}
        with judge.by_report(report_of({"second": 1.0, "third": 2.0}, errors=errors), "balanced"):
            said = str(op.explain(X))
        assert "measured 1.0 µs against 2.0 µs, error 0.5 against 0.25 of what is promised" in said


class TestContext:
    def test_a_pin_goes_before(self, op):
        with judge.by_report(report_of({"second": 5.0, "third": 1.0})):
            assert int((op.using("second")(X) - X)[0]) == 2
            with fuel_jax.using("xla"):
                assert int((op(X) - X)[0]) == 0

    def test_is_part_of_the_cache_key_and_equal_reports_are_one(self, op):
        traces = []

        @jax.jit
        def model(x):
            traces.append(MEASURED.value)
            return op(x)

        for _ in range(3):
            assert int((model(X) - X)[0]) == 2
            with judge.by_report(report_of({"second": 5.0, "third": 1.0})):
                assert int((model(X) - X)[0]) == 3
            with judge.by_report(report_of({"second": 5.0, "xla": 1.0})):
                assert int((model(X) - X)[0]) == 0
        assert len(traces) == 3

    def test_what_is_added_to_a_report_inside_counts_from_the_next_block(self, op):
        report = report_of({"second": 1.0, "third": 5.0})
        with judge.by_report(report):
            report.add(report_of({"second": 5.0, "third": 1.0}).entries[0])
            assert int((op(X) - X)[0]) == 2
        assert who(op, report) == 3

    def test_transformations_work_inside(self, op):
        with judge.by_report(report_of({"second": 5.0, "third": 1.0})):
            gradient = jax.jit(jax.grad(lambda x: op(x).sum()))(X)
            rows = jax.vmap(op)(jnp.zeros((3, 8), "float32"))
        assert float(gradient.sum()) == 8
        assert (np.asarray(rows) == 3).all()

    @pytest.mark.parametrize("prefer", ["blocks", "steps", "xla"])
    def test_values_stay_within_what_the_op_promises(self, prefer, draw):
        x = draw((30, 1000))
        report = ProfileReport(MACHINE)
        times = {n: Timing(1 + (n != prefer), 1, 2, 0.1) for n in ("blocks", "steps", "xla")}
        report.add(Entry("cumsum", ("float32[30,1000]",), {"dim": -1}, times))
        with judge.by_report(report):
            y = fuel_jax.cumsum(x, dim=-1)
        np.testing.assert_array_equal(y, fuel_jax.cumsum.using(prefer)(x, dim=-1))
        exact = np.cumsum(np.asarray(x, np.float64), -1)
        bound = fuel_jax.cumsum.precision.tolerance("float32") * np.abs(exact).max()
        assert np.abs(np.asarray(y) - exact).max() <= bound


class TestProcess:
    @pytest.fixture(autouse=True)
    def own_cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("fuel_jax.judge.suite.SIZES", (2**4,))
        monkeypatch.setattr("fuel_jax.judge.suite.ceilings", lambda: {"copy": 1e9})
        yield
        MEASURED.set_global(None)

    def test_nothing_happens_unasked(self, op):
        assert judge.cached() is None
        assert MEASURED.value is None
        op(X)
        assert not judge.default_path().exists()

    def test_populate_then_cached_then_invalidate(self, monkeypatch):
        (example, *_) = fuel_jax.argmax_dim.examples()
        monkeypatch.setattr(fuel_jax.argmax_dim, "examples", lambda: [example])
        said = []
        report = judge.populate_dispatch_table(ops=[fuel_jax.argmax_dim], say=said.append)
        assert judge.default_path().exists()
        assert len(said) == len(report.entries) > 0
        assert all({"folded", "xla"} == set(e.kernels) for e in report.entries)
        x = jnp.zeros((2, 131), "float32")
        call = lambda: str(fuel_jax.argmax_dim.explain(x, dim=-1))
        assert "(report of " in call()

        MEASURED.set_global(None)
        assert "report of" not in call()
        assert [e.key for e in judge.cached().entries] == [e.key for e in report.entries]
        assert "(report of " in call()

        again = []
        judge.populate_dispatch_table(ops=[fuel_jax.argmax_dim], say=again.append)
        assert again == []

        judge.invalidate()
        assert "report of" not in call()
        assert judge.cached() is None

    def test_compiled_programs_follow(self, op, tmp_path):
        model = jax.jit(lambda x: op(x) - x)
        assert int(model(X)[0]) == 2
        report_of({"second": 5.0, "third": 1.0}, machine=machines.machine()).save(
            judge.default_path()
        )
        assert judge.cached() is not None
        assert int(model(X)[0]) == 3
        with judge.by_report(report_of({"second": 5.0, "xla": 1.0})):
            assert int(model(X)[0]) == 0
        judge.invalidate()
        assert int(model(X)[0]) == 2
        assert not judge.default_path().exists()

    def test_the_report_of_another_machine_is_not_used_and_not_overwritten(self, tmp_path):
        path = tmp_path / "other.json"
        report_of({"second": 1.0}).save(path)
        before = path.read_bytes()
        assert judge.cached(path) is None
        with pytest.raises(FileError, match=r"other\.json: measured on another machine"):
            judge.populate_dispatch_table(path, ops=[fuel_jax.exp])
        assert path.read_bytes() == before

    def test_a_damaged_one_is_an_error(self, tmp_path):
        judge.default_path().parent.mkdir(parents=True)
        judge.default_path().write_text("{")
        for ask in (judge.cached, judge.populate_dispatch_table):
            with pytest.raises(FileError, match="damaged"):
                ask()
        assert judge.default_path().read_text() == "{"

    def test_its_name_tells_the_machine(self):
        here = machines.machine()
        name = judge.default_path().name
        assert here["jax"] in name
        assert judge.default_path().parent.name == "fuel_jax"
        assert {"platform", "device", "jax", "commit", "date"} <= set(here)
