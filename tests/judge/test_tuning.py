"""Tiles: which setting a kernel gets, what a table may say, and how one is measured."""

import contextlib
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import fuel_jax
from fuel_jax import __main__ as command, _tuned, judge
from fuel_jax._tuned import SHIPPED, Key, Row, Table, plain
from fuel_jax.errors import FileError
from fuel_jax.judge import tuning
from fuel_jax.types import Array, Floats
from pallas_kernels._tiles import Tiles, around, bucket, varied
from pallas_kernels.cumsum import Tile

MACHINE = {"platform": "cpu", "device": "a processor", "jax": "0.10.2", "date": "2026-12-01"}
X = jnp.arange(8, dtype="float32")


class Added(NamedTuple):
    """What the kernel adds, and a switch that it has no use for."""

    rows: int
    fast: bool = False


ONE, TWO, THREE = Added(1), Added(2), Added(2, True)


def row(tile, n=8, op="added", **other):
    return {
        **{"op": op, "kernel": "some", "dtype": "float32", "extents": {"n": n}},
        **{"tile": tile, "us": 12.5, "date": "2026-12-01"},
        **other,
    }


def written(path, *rows, **changes):
    document = {"version": "1.0", "machine": MACHINE, "rows": list(rows)} | changes
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def op():
    """A kernel that adds what its tile says: by rule 1, or else 2."""

    def added(x: Floats[Array, " n"], *, most: int = 9) -> Array:
        return x

    tiles = lambda x, **params: Tiles.of({"n": x.size}, *(ONE, TWO, THREE)[: params["most"]])
    made = fuel_jax.register_fused("added", added)
    made.kernel("some", platforms=("cpu",), tiles=tiles)(lambda x, *, most, tile: x + tile.rows)
    yield made
    fuel_jax.unregister_fused("added")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiles.json"


def added_by(op, x=X, **params):
    return int(np.asarray(op(x, **params) - x).ravel()[0])


class TestChoice:
    def test_by_rule_where_there_is_no_table(self, op):
        assert added_by(op) == 1
        assert str(op.explain(X).forward[0]).endswith("serves cpu; 1 row, not fast (heuristic)")

    def test_by_a_table(self, op, path):
        with judge.tuned(written(path, row({"rows": 2, "fast": True}))):
            assert added_by(op) == 2
            said = str(op.explain(X).forward[0])
        assert said.endswith("2 rows, fast (tuned on 2026-12-01 for a processor)")
        assert added_by(op) == 1

    def test_a_row_may_leave_out_what_it_does_not_care_for(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}))):
            assert op.explain(X).forward[0].tile.tile == TWO
        with judge.tuned(written(path, row({"fast": True}))):
            assert op.explain(X).forward[0].tile.tile == THREE

    def test_one_without_a_time_does_not_say_that_it_was_tuned(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}, us=None))):
            assert "(set on 2026-12-01 for a processor)" in str(op.explain(X))

    @pytest.mark.parametrize("tile", [{"rows": 3}, {"rows": 2, "new": 1}, {"rows": {"x": 1}}])
    def test_what_the_kernel_does_not_have_for_the_call_is_said_and_not_taken(self, op, path, tile):
        with judge.tuned(written(path, row(tile))):
            assert added_by(op) == 1
            said = str(op.explain(X))
        assert "(heuristic: " in said
        assert "of tiles.json is not among the settings for this call)" in said

    def test_a_setting_of_other_calls_is_none_of_this(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}))):
            assert [added_by(op, most=n) for n in (1, 2)] == [1, 2]

    def test_extents_count_up_to_powers_of_two(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}, n=6))):
            found = [added_by(op, jnp.zeros(n, "float32")) for n in (4, 5, 8, 9)]
        assert found == [1, 2, 2, 1]

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_dtypes_are_not_alike(self, op, path, dtype):
        with judge.tuned(written(path, row({"rows": 2}))):
            assert added_by(op, X.astype(dtype)) == 1

    def test_of_two_rows_the_later(self, op, path):
        with judge.tuned(written(path, row({"rows": 1}), row({"rows": 2}))):
            assert added_by(op) == 2

    def test_a_table_speaks_for_its_platform(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}), machine=MACHINE | {"platform": "cuda"})):
            assert added_by(op) == 1

    def test_a_table_in_a_table_and_none_at_all(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}))):
            with judge.untuned():
                assert added_by(op) == 1
            assert added_by(op) == 2

    def test_a_pinned_kernel_has_its_tile(self, op, path):
        with judge.tuned(written(path, row({"rows": 2}))):
            assert added_by(op.using("some")) == 2
            assert added_by(op.using("xla")) == 0

    def test_it_is_part_of_the_cache_key(self, op, path):
        traces = []

        @jax.jit
        def model(x):
            traces.append(op.explain(x).forward[0].tile.tile.rows)
            return op(x)

        for _ in range(2):
            assert int(model(X)[0]) == 1
            with judge.tuned(written(path, row({"rows": 2}))):
                assert int(model(X)[0]) == 2
            with judge.tuned(written(path, row({"rows": 2}))):  # the same, read again
                model(X)
        assert traces == [1, 2]
        with judge.tuned(written(path, row({"rows": 1}))):  # edited
            assert int(model(X)[0]) == 1
        assert traces == [1, 2, 1]

    def test_the_device_s_own_table_needs_no_asking(self, op, tmp_path, monkeypatch):
        logits = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
        said = lambda: str(fuel_jax.softmax_last_dim.explain(logits).forward[0])
        monkeypatch.setattr(_tuned, "lowered_for", lambda: "NVIDIA H200")
        assert said().endswith("8 warps (tuned on 2026-11-29 for NVIDIA H200)")
        with judge.untuned():
            assert said().endswith("8 warps (heuristic)")
        monkeypatch.setattr(_tuned, "lowered_for", lambda: "../NVIDIA H9000")
        assert said().endswith("8 warps (heuristic)")

    def test_a_table_of_a_gpu_is_in_what_is_lowered_for_one(self, path):
        x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
        asked = {"op": "cumsum", "kernel": "triton", "dtype": "float32"}
        asked |= {"extents": {"rows": 1024, "columns": 1024}, "tile": {"warps": 16}}
        table = written(path, asked, machine=MACHINE | {"platform": "cuda"})
        h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")

        def lowered():
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
                traced = jax.jit(lambda x: fuel_jax.cumsum(x, dim=-1)).trace(x)
                return traced.lower(lowering_platforms=("cuda",)).as_text()

        assert "num_warps = 4" in lowered()
        with judge.tuned(table):
            assert "num_warps = 16" in lowered()


class TestFile:
    def test_what_nobody_knows_is_passed_over(self, path):
        strange = [{"op": "added"}, 7, None, row({"rows": 1.5}), row({}, extents=[8])]
        strange += [row({"rows": 2}, n=True), row({"rows": 2}, dtype="../.."), row(None)]
        known = row({"rows": 2}, colour="red", us=None)
        table = Table.load(written(path, *strange, known, version="1.9", more={"a": [1]}))
        assert [r.tile for r in table.rows.values()] == [{"rows": 2}]
        assert (table.platform, table.device, table.name) == ("cpu", "a processor", "tiles.json")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("", "Expecting value"),
            ("[]", "holds a list"),
            ('{"version": "1.0"}', "'machine' is missing"),
            ('{"version": "1.0", "machine": {}, "rows": {}}', "'rows' is missing or not a list"),
            ('{"version": 1}', "'version' is 1"),
            ('{"version": "1.0", "machine": {}, "rows": [NaN]}', "not a number of JSON's"),
            ("[" * 10**5, "nested too deeply"),
        ],
    )
    def test_damaged(self, path, content, why):
        path.write_text(content)
        with (
            pytest.raises(FileError, match=rf"tiles.json: damaged, or no table of tiles: .*{why}"),
            judge.tuned(path),
        ):
            pass
        assert path.read_text() == content

    def test_a_newer_major_version(self, path):
        with pytest.raises(FileError, match=r"a table of tiles of version 2.0; .* reads 1.x"):
            Table.load(written(path, version="2.0"))

    @settings(max_examples=60)
    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3) | st.booleans(),
            lambda x: (
                st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("ab"), x, max_size=2)
            ),
            max_leaves=6,
        ),
        st.sampled_from(["op", "dtype", "extents", "tile", "us", "date"]),
    )
    def test_whatever_a_row_says(self, value, field):
        found = Row.read(row({"rows": 2}) | {field: value})
        assert found is None or found.key.op


class TestShipped:
    ROWS = json.loads((SHIPPED / "nvidia_h200.json").read_text())["rows"]

    @pytest.mark.parametrize("raw", ROWS, ids=lambda raw: f"{raw['op']} {raw['operands'][0]}")
    def test_every_row_is_what_a_kernel_asks_for_and_can_do(self, raw):
        """For the operands that it says it was measured on."""
        known = Row.read(raw)
        assert known is not None
        ops = fuel_jax.registry.builtin()
        ops = [*ops, *(op.backward for op in ops if isinstance(op, fuel_jax.FusedOp))]
        (op, *_) = (op for op in ops if getattr(op, "name", "") == raw["op"])
        shape = lambda x: jax.ShapeDtypeStruct(
            tuple(map(int, filter(None, x.partition("[")[2][:-1].split(",")))), x.partition("[")[0]
        )
        avals = [None if x is None else shape(x) for x in raw["operands"]]
        params, held = op._bind(avals, raw["params"])
        (kernel,) = (k for k in op.kernels if k.name == raw["kernel"])
        extents, tiles = kernel.tiles(*held, **params)
        assert Key.of(op.name, kernel.name, _tuned.dtype_of(held), extents) == known.key
        assert any(_tuned.has(plain(tile), known.tile) for tile in tiles)
        assert raw["from"].startswith("docs/performance/")
        for tried in raw.get("tried", []):
            assert any(_tuned.has(plain(tile), tried["tile"]) for tile in tiles)

    def test_of_what_was_tried_the_best(self):
        for raw in self.ROWS:
            for tried in raw.get("tried", [])[1:]:
                assert tried["us"] > raw["us"]


class TestMeasured:
    """Of an op whose kernel takes as long as it has rows, and is wrong where it is ``fast``."""

    SETTINGS = (Added(20), Added(10), Added(1, True), Added(5), Added(41))

    @pytest.fixture
    def op(self, monkeypatch):
        def slow(x: Floats[Array, " n"]) -> Array:
            return x

        def run(x, *, tile):
            if tile.rows > 40:
                raise MemoryError("too many rows\nfor this machine")
            return x + np.float32(tile.fast)

        def tiles(x):
            return Tiles.of({"n": x.size}, *self.SETTINGS[: 5 if x.size > 5 else 1])

        def timed(bursts):
            return {name: {"us": 1000.0 * self.SETTINGS[int(name)].rows} for name in bursts}

        shapes = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (4, 6))
        examples = [{"x": x} for x in shapes]
        made = fuel_jax.register_fused("slow", slow, examples=lambda: examples)
        made.kernel("some", platforms=("cpu",), tiles=tiles)(run)
        monkeypatch.setattr(judge.suite, "timed", timed)
        yield made
        fuel_jax.unregister_fused("slow")

    def calls(self, op):
        return tuning.calls([op], ["float32"], [1])

    def tuned(self, op, path):
        table = tuning.TileFile.opened(path)
        return [line for _, line in tuning.tune(table, path, self.calls(op))]

    def test_the_fastest_that_is_right_wins(self, op, path):
        (line,) = self.tuned(op, path)
        assert "slow some float32[6]" in line
        assert line.endswith("  5000.0 µs: 5 rows, not fast, by rule 20.0 ms")
        (found,) = json.loads(path.read_text())["rows"]
        assert found["tile"] == {"rows": 5, "fast": False}
        assert found["extents"] == {"n": 6}
        first, ten, wrong, five, many = found["tried"]
        assert [first["us"], ten["us"], five["us"], found["us"]] == [20_000, 10_000, 5_000, 5_000]
        assert wrong["failed"].startswith("off by ")
        assert many["failed"] == "MemoryError: too many rows"
        with judge.tuned(path):
            said = str(op.explain(jnp.zeros(7, "float32")).forward[0])
        assert "5 rows, not fast (tuned on " in said

    def test_what_is_there_is_not_measured_again(self, op, path):
        written(path, {"op": "of tomorrow"}, row({"rows": 2}), machine=judge.machine.machine())
        assert len(self.tuned(op, path)) == 1
        first = path.read_text()
        assert [r["op"] for r in json.loads(first)["rows"]] == ["of tomorrow", "added", "slow"]
        assert self.tuned(op, path) == []
        assert path.read_text() == first

    def test_a_row_is_measured_again_where_there_are_more_settings(self, op, path):
        self.tuned(op, path)
        document = json.loads(path.read_text())
        document["rows"][0]["tried"].pop()
        document["rows"][0]["note"] = "mine"
        path.write_text(json.dumps(document))
        assert len(self.tuned(op, path)) == 1
        (found,) = json.loads(path.read_text())["rows"]
        assert (len(found["tried"]), found["note"]) == (5, "mine")

    def test_what_repeats_by_less_than_two_percent_is_no_faster(self, op, path, monkeypatch):
        us = iter([100.0, 99.0, 98.5])
        monkeypatch.setattr(
            judge.suite, "timed", lambda bursts: {n: {"us": next(us)} for n in bursts}
        )
        (line,) = self.tuned(op, path)
        assert line.endswith("100.0 µs: the rule's")
        assert json.loads(path.read_text())["rows"][0]["tile"] == {"rows": 20, "fast": False}

    def test_no_row_where_no_setting_keeps_the_promise(self, op, path, monkeypatch):
        monkeypatch.setattr(tuning._check, "excess", lambda *_: np.nan)
        (line,) = self.tuned(op, path)
        assert "no setting keeps the promise: off by nan" in line
        assert not path.exists()

    def test_another_machine_s_table_is_not_continued(self, op, path):
        written(path, machine=judge.machine.machine() | {"jax": "0.1"})
        with pytest.raises(FileError, match=r"tiles.json: measured on another machine .*0\.1\)"):
            self.tuned(op, path)


class TestCommand:
    def test_tunes_and_goes_on(self, path, capsys, monkeypatch):
        monkeypatch.setattr(judge.suite, "ROUNDS", 1)
        given = "profile --tune --op cumsum --dtype float32 --size 2000 --out".split()
        assert command.main([*given, str(path)]) == 0
        out = capsys.readouterr().out
        assert "calls into" in out
        assert out.endswith(f"done: 1 rows in {path}\n")
        (found,) = json.loads(path.read_text())["rows"]
        assert len(found["tried"]) == 3
        assert all(tried["error"] <= 1 for tried in found["tried"])

        def stopped(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(tuning, "tune", stopped)
        assert command.main([*given, str(path)]) == 130
        assert "stopped: 1 are in" in capsys.readouterr().out

    def test_lists(self, capsys):
        given = "profile --tune --tiny --list --dtype float32 --op qmatmul --op gelu"
        assert command.main(given.split()) == 0
        said = capsys.readouterr().out
        assert "gradient of qmatmul(" in said
        assert "gelu" not in said

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ("--tune --op gelu", "none of gelu has a kernel for cpu that can be cut in several"),
            ("--tune --op gelu --size 0", "'0' is no number of elements"),
            ("--suite h200 --tune", "--tune and --size belong to the default suite"),
        ],
    )
    def test_says_what_it_cannot(self, given, says, capsys):
        with contextlib.suppress(SystemExit):  # what the parser of arguments says
            assert command.main(["profile", *given.split()]) == 2
        assert says in capsys.readouterr().err


def test_settings_of_a_kernel():
    first = Tile(1, 4096, 4)
    tiles = Tiles.of({"n": 3}, first, *varied(first, warps=(4, 8), rows=around(1)))
    assert tiles.settings == (first, Tile(1, 4096, 8), Tile(2, 4096, 4))
    assert [bucket(n) for n in (0, 1, 5, 8, "Q4K")] == [0, 1, 8, 8, "Q4K"]


def test_every_setting_of_running_sums_gives_the_sums(path):
    """Interpreted."""
    x = np.random.default_rng(0).normal(size=(3, 50)).astype("float32")
    (kernel,) = (k for k in fuel_jax.cumsum.kernels if k.name == "triton")
    extents, tiles = kernel.tiles(jax.ShapeDtypeStruct(x.shape, x.dtype), dim=-1)
    assert len(tiles) >= 3
    for tile in tiles:
        asked = row(plain(tile), op="cumsum", kernel="triton", extents=extents)
        with judge.tuned(written(path, asked, machine=MACHINE | {"platform": "cuda"})):
            got = np.asarray(fuel_jax.cumsum.using("triton")(x, dim=-1))
        want = np.cumsum(x, -1, dtype="float64")
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()
