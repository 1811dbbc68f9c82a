"""A report as people see it."""

import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from fuel_jax.__main__ import main
from fuel_jax.judge import Entry, ProfileReport, Timing, pages, plots, progress

HOSTILE = "<script>alert(1)</script>\x1b[31m"
MACHINE = {"platform": "cuda", "device": f"NVIDIA H200 {HOSTILE}", "driver": "580.1"}
MACHINE |= {"jax": "0.11.2", "commit": "abc1234", "date": "2026-12-01"}
MACHINE |= {"ceilings": {"copy": 4e12, "float32": 5e13, "bfloat16": 7e14}}


def timing(us, error=0.25):
    return Timing(us, us * 0.9, us * 1.1, error)


def report_of(scale=1.0, **machine):
    report = ProfileReport(MACHINE | machine)
    shape = ("bfloat16[16384,8192]",)
    kernels = {"xla": timing(165.0), "triton": timing(134.0 * scale)}
    failed = {"mosaic": "RuntimeError: | pipes\nand lines"}
    moved = 2 * 2 * 16384 * 8192
    report.add(Entry("softmax_last_dim", shape, {}, kernels, failed, 10**9, moved))
    report.add(Entry("copy", ("float32[1024]",), {}, {"xla": timing(3.0, 0.0)}, {}, 0, 8192))
    report.add(Entry("odd", (None, "float32[2]"), {"mode": HOSTILE}, {"xla": timing(1.0)}))
    return report


@pytest.fixture
def file(tmp_path):
    report_of().save(tmp_path / "r.json")
    return tmp_path / "r.json"


class TestTables:
    def test_every_implementation_the_fastest_first(self):
        rows = pages.table(report_of())
        call = "softmax_last_dim(bfloat16[16384,8192])"
        assert rows[0] == (call, "triton", "134.0 µs", "121–147", "0.81", "100%", "0.25")
        assert rows[1][:3] == ("", "xla", "165.0 µs")
        assert rows[2][1:3] == ("mosaic", "failed")

    def test_shares_are_of_what_bounds_the_call(self):
        report = report_of()
        copied, computed = report.entries[0], Entry("exp", ("float32[2]",), {}, {}, {}, 10**9, 8)
        assert plots.share(report, copied, timing(100.0)) == pytest.approx(134.2 / 100, rel=1e-3)
        assert plots.share(report, computed, timing(40.0)) == pytest.approx(0.5)
        halves = Entry("exp", ("bfloat16[2]",), {}, {}, {}, 7 * 10**9, 8)
        assert plots.share(report, halves, timing(40.0)) == pytest.approx(0.25)

    @pytest.mark.parametrize("ceilings", [None, 3, {}, {"copy": "fast"}, {"copy": -1}])
    def test_without_ceilings_there_are_no_shares(self, ceilings):
        report = report_of(ceilings=ceilings)
        assert plots.share(report, report.entries[0], timing(1.0)) is None
        assert "Roofline" not in plots.pictures(report)
        assert "ceiling:" not in pages.about(report)

    def test_with_some_of_them_there_are_some(self):
        report = report_of(ceilings={"copy": 4e12, "bfloat16": 7e14})
        assert plots.share(report, report.entries[0], timing(100.0)) > 1
        assert plots.share(report, report.entries[1], timing(100.0)) is None
        if plots.pictures(report):  # with matplotlib
            assert "Roofline" in plots.pictures(report)

    def test_as_text(self, file, capsys):
        assert main(["report", str(file)]) == 0
        said = capsys.readouterr().out
        assert re.search(r"NVIDIA H200 .*, driver 580.1, JAX 0.11.2, commit abc1234, 2026", said)
        assert "a copy moves 4,000 GB/s" in said
        assert re.search(r"\n  triton  134.0 µs  121–147 +0.81 +100% +0.25\n", said)
        assert "\x1b" not in said

    def test_what_was_passed_over_is_counted(self, file, capsys):
        given = json.loads(file.read_text())
        given["entries"].append({"op": "of another kind"})
        file.write_text(json.dumps(given))
        assert main(["report", str(file)]) == 0
        assert "3 calls. 1 entries were passed over." in capsys.readouterr().out


class TestHtml:
    def test_a_page_with_pictures_tables_and_footer(self, file, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        assert main(["report", str(file), str(file), "--html", str(tmp_path / "o.html")]) == 0
        assert capsys.readouterr().out == ""
        page = (tmp_path / "o.html").read_text()
        assert page.count("<svg") == 4
        assert page.count("<footer>") == 2
        assert "color-scheme: light dark" in page
        assert "currentColor" in page.lower() or "currentColor" in page
        assert plots.INK not in page

    def test_what_a_file_says_is_text(self, tmp_path):
        page = pages.as_html([report_of()]) + pages.html_tables(report_of())
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "\x1b" not in page

    def test_in_a_notebook_the_choices_first_and_not_everything(self):
        report = report_of()
        for n in range(1, 60):
            report.add(Entry("exp", (f"float32[{n}]",), {}, {"xla": timing(1.0)}))
        shown = report._repr_html_()
        assert shown.index("softmax_last_dim") < shown.index("exp(")
        assert shown.count("<tr>") == pages.SHOWN + 1
        assert "rows more" in shown

    def test_pictures_are_xml_and_name_who_was_measured(self):
        pytest.importorskip("matplotlib")
        pictures = plots.pictures(report_of())
        assert list(pictures) == ["Roofline", "Beside XLA"]
        for svg in pictures.values():
            ET.fromstring(svg)
            assert "2026-12-01" in svg
        assert "triton" in pictures["Roofline"]
        assert "softmax_last_dim" in pictures["Beside XLA"]


class TestMarkdown:
    def test_a_page_and_its_pictures(self, file, tmp_path):
        pytest.importorskip("matplotlib")
        assert main(["report", str(file), "--md", str(tmp_path / "o.md")]) == 0
        page = (tmp_path / "o.md").read_text()
        for name in re.findall(r"!\[.*\]\((.*)\)", page):
            assert (tmp_path / name).read_text().startswith("<svg")
        assert page.count("![") == 2
        rows = [line for line in page.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1


class TestWithoutExtras:
    def test_without_matplotlib_tables_remain_and_the_extra_is_named(
        self, file, tmp_path, capsys, monkeypatch
    ):
        for name in ("matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)
        target = tmp_path / "o.html"
        assert main(["report", str(file), "--html", str(target), "--md", str(target) + ".md"]) == 0
        assert "fuel_jax[report]" in capsys.readouterr().out
        assert "fuel_jax[report]" in target.read_text()
        assert "134.0 µs" in target.read_text()

    @pytest.mark.parametrize("rich", [True, False])
    def test_on_a_terminal(self, rich, capsys, monkeypatch):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        if rich:
            pytest.importorskip("rich")
        else:
            monkeypatch.setitem(sys.modules, "rich.progress", None)
        with progress.shown(2) as told:
            told(1, "exp(float32[3])  xla 1.0 µs")
            told(2, "exp(float32[[/4])  xla 2.0 µs")
        said = capsys.readouterr().out
        assert ("fuel_jax[report]" in said) is not rich
        assert ("[2/2] exp(float32[[/4])  xla 2.0 µs\n" in said) is not rich
        assert ("2/2" in said) is True

    def test_in_a_pipe_a_line_each(self, capsys):
        with progress.shown(2) as told:
            told(1, "exp")
        assert capsys.readouterr().out == "[1/2] exp\n"


class TestCompare:
    def test_what_became_faster_or_slower(self, file, tmp_path, capsys):
        report_of(1.5, commit="def5678").save(tmp_path / "b.json")
        assert main(["compare", str(file), str(tmp_path / "b.json")]) == 0
        said = capsys.readouterr().out
        assert "4 times in both; B takes 1.107 of A's" in said
        assert "3 are within the spread" in said
        assert re.search(r"softmax_last_dim\(.*\)  triton  134.0 µs  201.0 µs  1.50", said)
        assert said.index("abc1234") < said.index("def5678")

    def test_nothing_in_both(self, file, tmp_path, capsys):
        ProfileReport(MACHINE).save(tmp_path / "b.json")
        assert main(["compare", str(file), str(tmp_path / "b.json")]) == 0
        assert "No call is in both" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["report", "compare"])
    def test_what_is_no_report_is_exit_2(self, command, file, tmp_path, capsys):
        files = [str(file), str(tmp_path / "none.json")]
        assert main([command, *files]) == 2
        assert "none.json: No such file or directory. Name a profile report." in (
            capsys.readouterr().err
        )
        (tmp_path / "none.json").write_text("[]")
        assert main([command, *files]) == 2
        assert "damaged" in capsys.readouterr().err
