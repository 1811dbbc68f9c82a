"""The file of a report: what is kept, what is passed over, what is refused and left alone."""

import json
import os

import jax.numpy as jnp
import pytest

from fuel_jax._json_file import MOST_BYTES
from fuel_jax.errors import FileError
from fuel_jax.judge import Entry, ProfileReport, Timing
from fuel_jax.judge.report import pattern, plain, settings, size_class

MACHINE = {"platform": "cpu", "device": "cpu", "jax": "0.10.2", "date": "2026-12-01"}
ENTRY = Entry(
    "softmax_last_dim",
    ("float32[4,512]", None),
    {"eps": 1e-6, "dim": -1, "mode": "constant", "padding": [[1, 2], [0, 3]]},
    {"xla": Timing(12.5, 12.0, 14.0, 0.25, "00ff"), "triton": Timing(3.0, 2.5, 3.5, 0.5)},
    {"other": "RuntimeError: out of shared memory"},
    flops=2**40,
    bytes=16384,
)


def a_file(path, **changes):
    """A report of one entry, its document changed."""
    report = ProfileReport(MACHINE)
    report.add(ENTRY)
    report.document.update(changes)
    report.save(path)
    return path


def document(path):
    return json.loads(path.read_text())


class TestRoundTrip:
    def test_what_is_written_is_read(self, tmp_path):
        report = ProfileReport.load(a_file(tmp_path / "r.json"))
        assert report.entries == [ENTRY]
        assert report.machine == MACHINE
        assert report.passed_over == 0
        assert report.get(ENTRY.key) == ENTRY

    def test_an_entry_takes_the_place_of_its_call_s(self, tmp_path):
        report = ProfileReport.load(a_file(tmp_path / "r.json"))
        again = Entry(ENTRY.op, ENTRY.operands, ENTRY.params, {"xla": Timing(1, 1, 1, 0)})
        other = Entry(ENTRY.op, ("float32[4,513]", None), ENTRY.params, {})
        for entry in (again, other):
            report.add(entry)
        assert report.entries == [again, other]
        report.save(tmp_path / "r.json")
        assert ProfileReport.load(tmp_path / "r.json").entries == [again, other]

    def test_the_file_keeps_its_mode_and_its_link(self, tmp_path):
        (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
        a_file(tmp_path / "link.json")
        assert (tmp_path / "link.json").is_symlink()
        assert len(ProfileReport.load(tmp_path / "r.json").entries) == 1

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        before = a_file(tmp_path / "r.json").read_bytes()

        def full(*paths):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            ProfileReport(MACHINE).save(tmp_path / "r.json")
        assert (tmp_path / "r.json").read_bytes() == before
        assert os.listdir(tmp_path) == ["r.json"]


class TestForward:
    """What a later version may have written."""

    def test_unknown_fields_and_ops_of_a_newer_minor_version_are_kept(self, tmp_path):
        path = a_file(tmp_path / "r.json", version="1.7", climate={"room": 21.5})
        given = document(path)
        given["entries"][0]["watts"] = 350
        given["entries"][0]["kernels"]["xla"]["joules"] = [1, 2]
        given["entries"].append(given["entries"][0] | {"op": "holographic_attn"})
        given["entries"].append({"graph": "of another kind"})
        path.write_text(json.dumps(given))

        report = ProfileReport.load(path)
        assert [entry.op for entry in report.entries] == ["softmax_last_dim", "holographic_attn"]
        assert report.passed_over == 1
        report.add(Entry("exp", ("float32[3]",), {}, {"xla": Timing(1, 1, 1, 0)}))
        report.save(path)
        saved = document(path)
        assert saved["entries"].pop()["op"] == "exp"
        assert saved == given

    def test_fields_of_an_entry_survive_being_measured_again(self, tmp_path):
        path = a_file(tmp_path / "r.json")
        given = document(path)
        given["entries"][0]["watts"] = 350
        path.write_text(json.dumps(given))
        report = ProfileReport.load(path)
        report.add(ENTRY)
        report.save(path)
        assert document(path)["entries"][0]["watts"] == 350

    def test_an_older_file_lacks_what_came_later(self, tmp_path):
        path = a_file(tmp_path / "r.json", version="0.9")
        given = document(path)
        for name in ("failed", "flops", "bytes"):
            del given["entries"][0][name]
        del given["entries"][0]["kernels"]["xla"]["revision"]
        path.write_text(json.dumps(given))
        (entry,) = ProfileReport.load(path).entries
        assert entry.kernels["xla"] == Timing(12.5, 12.0, 14.0, 0.25)
        assert (entry.failed, entry.flops) == ({}, 0)

    def test_a_newer_major_version_is_an_error(self, tmp_path):
        path = a_file(tmp_path / "r.json", version="2.0")
        with pytest.raises(FileError, match=r"version 2\.0; this fuel_jax reads 1\.x"):
            ProfileReport.load(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"op": "rm -rf"},
            {"op": 3},
            {"op": "x" * 200},
            {"operands": ["float32[2"]},
            {"operands": ["float32[99999999999999999999]"]},
            {"operands": "float32[2]"},
            {"params": None},
            {"kernels": []},
            {"kernels": {"xla": {"us": 0, "least_us": 1, "most_us": 1, "error": 0}}},
            {"kernels": {"xla": {"us": -1, "least_us": 1, "most_us": 1, "error": 0}}},
            {"kernels": {"xla": {"us": "1", "least_us": 1, "most_us": 1, "error": 0}}},
            {"kernels": {"xla": {"us": True, "least_us": 1, "most_us": 1, "error": 0}}},
            {"kernels": {"xla": {"us": 1}}},
            {"kernels": {"<b>": {"us": 1, "least_us": 1, "most_us": 1, "error": 0}}},
            {"flops": -5},
        ],
        ids=str,
    )
    def test_an_entry_that_cannot_be_read_is_passed_over_and_kept(self, change, tmp_path):
        path = a_file(tmp_path / "r.json")
        given = document(path)
        given["entries"].append(given["entries"][0] | change)
        path.write_text(json.dumps(given))
        report = ProfileReport.load(path)
        assert (report.entries, report.passed_over) == ([ENTRY], 1)
        report.save(path)
        assert document(path) == given


class TestDamaged:
    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "Expecting value"),
            (b'{"version": "1.0", "machine"', "delimiter"),
            (b"\xff\xfe\x00", "utf"),
            (b"[1, 2]", "holds a list"),
            (b"{}", "'version' is None"),
            (b'{"version": 1.0}', "'version' is 1.0"),
            (b'{"version": "one"}', "'version' is 'one'"),
            (b'{"version": "1.0", "entries": []}', "'machine' is missing"),
            (b'{"version": "1.0", "machine": {}, "entries": {}}', "not a list"),
            (b'{"version": "1.0", "x": NaN}', "not a number"),
            (b'{"version": "1.0", "x": 1e999}', "not a number"),
            (b'{"version": ' + b"9" * 5000 + b"}", "digits"),
            (b"[" * 200_000, "nested"),
            (b'{"version": "1.0", "x": ' + b"[" * 50 + b"]" * 50 + b"}", "nested"),
            (b"null", "null"),
        ],
        ids=lambda x: str(x)[:30],
    )
    def test_is_an_error_and_stays_as_it_is(self, content, why, tmp_path):
        path = tmp_path / "r.json"
        path.write_bytes(content)
        with pytest.raises(FileError, match=f"r.json: damaged, or no profile report: .*{why}"):
            ProfileReport.load(path)
        assert path.read_bytes() == content

    def test_half_of_a_file(self, tmp_path):
        path = a_file(tmp_path / "r.json")
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(FileError, match="damaged"):
            ProfileReport.load(path)

    def test_huge_files_and_what_is_no_file_are_not_read(self, tmp_path):
        with open(tmp_path / "huge.json", "wb") as file:
            file.truncate(MOST_BYTES + 1)  # a hole: takes no room
        os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
        for name in ("huge.json", "pipe", "."):
            with pytest.raises(FileError, match="at most" if name == "huge.json" else "not a file"):
                ProfileReport.load(tmp_path / name)

    def test_a_missing_file_is_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            ProfileReport.load(tmp_path / "none.json")


class TestCalls:
    def test_sizes_are_logarithms_of_extents(self):
        given = ("float32[0,1,2,3]", None, "int32[]", "bfloat16[1023,1024]")
        assert size_class(given) == (0, 0, 1, 1, 9, 10)

    @pytest.mark.parametrize(
        ("a", "b", "alike"),
        [
            ("float32[2,3]", "float32[64,9]", True),
            ("float32[2,3]", "float32[64]", False),
            ("float32[]", "float32[1]", False),
            ("float32[2]", "bfloat16[2]", False),
            ("int32[2]", "int64[2]", True),
            ("int32[2]", "uint32[2]", False),
            ("int32[2]", None, False),
        ],
    )
    def test_calls_are_alike_in_all_but_extents(self, a, b, alike):
        assert (pattern("op", [a], {}) == pattern("op", [b], {})) is alike

    @pytest.mark.parametrize(
        ("a", "b", "alike"),
        [(1e-5, 1e-6, True), (1, 2, False), (1.0, 1, False), (None, 1.0, False), (1, True, False)],
    )
    def test_and_in_parameters_but_for_what_floats_are(self, a, b, alike):
        assert (settings({"p": a}) == settings({"p": b})) is alike
        assert settings({"p": a}, exact=True) != settings({"p": b}, exact=True)

    def test_parameters_are_json(self):
        given = {"dtype": jnp.dtype("bfloat16"), "pad": ((1, 2),), "x": float("-inf"), "n": 3}
        assert json.loads(settings({n: plain(v) for n, v in given.items()}, exact=True)) == {
            **{"dtype": "bfloat16", "pad": [[1, 2]], "x": "-inf", "n": 3}
        }

    def test_its_line_leaves_out_what_is_not_there(self):
        assert ENTRY.call.startswith("softmax_last_dim(float32[4,512], eps=1e-06, dim=-1")
        assert ENTRY.dtype == "float32"
        assert "triton 3.0 µs" in ENTRY.line
        assert "other failed" in ENTRY.line

    def test_what_a_report_says_of_itself(self):
        report = ProfileReport(MACHINE)
        assert repr(report) == "<profile report: 0 calls on cpu, 2026-12-01>"
