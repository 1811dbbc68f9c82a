"""What README and docs say is so: their code runs, their excerpts and tables are the source's."""

import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from fuel_jax import FusedOps, OpKind

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
OPTIONAL = re.compile(r"^(?:import|from) (equinox|flax|gguf|safetensors|torch)\b", re.MULTILINE)
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page, language):
    """``(title, code)`` of a page's fenced blocks."""
    found = FENCE.findall(page.read_text())
    return [(title, code) for lang, title, code in found if lang == language]


RUN = [
    pytest.param(page, code, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (title, code) in enumerate(blocks(page, "python"))
    if not title and not code.startswith("# ")
]


@pytest.mark.parametrize(("page", "code"), RUN)
def test_code_runs_as_it_stands(page, code):
    for package in OPTIONAL.findall(code):
        pytest.importorskip(package, reason=f"the example uses {package}")
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # as readers have it
        exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


def test_excerpts_are_the_source_s():
    excerpts = [c for page in PAGES for _, c in blocks(page, "python") if c.startswith("# ")]
    assert excerpts
    for excerpt in excerpts:
        path, _, code = excerpt.removeprefix("# ").partition("\n")
        assert code in (ROOT / path).read_text()


def test_the_example_is_ten_lines():
    (_, code), *_ = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line]) <= 10


def test_the_readme_s_table_names_every_op_once():
    rows = [line for line in README.splitlines() if line.startswith("|")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*(kind.as_str() for kind in OpKind), "awq_matmul"])
    assert f"{len(OpKind)} kinds of op and {len(FusedOps)} fused ops" in README.replace("\n", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_worked_example_of_adding_an_op(tmp_path):
    """Its edits, made to a copy of the source; then the suite on the new op, and its page."""
    for name in ("fuel_jax", "pallas_kernels", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = ROOT / "docs/adding_an_op.md"
    for title, code in blocks(page, "python"):
        if title:
            assert not (tmp_path / title).exists()
            (tmp_path / title).write_text(code)
    for title, diff in blocks(page, "diff"):
        apply(diff, tmp_path / title)

    contract = [f"tests/{name}.py" for name in ("test_every_op", "test_transformations")]
    for module, *arguments in (
        ["pytest", "-q", "-k", "swiglu", *contract, "tests/fused/test_swiglu.py"],
        ["fuel_jax", "swiglu"],
        ["fuel_jax", "check", "swiglu"],
    ):
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise kept" in done.stdout


def apply(diff, path):
    """Insert the added lines beside the one context line that the file has once."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines)
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))
