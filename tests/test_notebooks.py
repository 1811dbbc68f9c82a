"""The notebooks: kept without outputs, and everything they claim holds when they are run."""

import ast
import importlib.util
import json
import pathlib

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    found = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@each
def test_is_kept_without_outputs(path):
    code = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] or c["execution_count"] for c in code)
    assert cells(path, "markdown")[0].startswith("# ")


def test_the_index_names_each_once():
    index = (FOLDER / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if index.count(f"]({path.name})") != 1] == []


def absent(code):
    """Packages that a notebook imports and that are not here."""
    trees = [node for cell in code for node in ast.walk(ast.parse(cell))]
    names = [a.name for node in trees if isinstance(node, ast.Import) for a in node.names]
    names += [node.module for node in trees if isinstance(node, ast.ImportFrom) and node.module]
    packages = {name.partition(".")[0] for name in names}
    return sorted(name for name in packages if importlib.util.find_spec(name) is None)


def shown(value):
    """What a notebook would show: a page's markup where there is one."""
    return getattr(value, "_repr_html_", value.__repr__)()


def run(cell, name, names):
    """A cell as a notebook runs it: the last expression is shown."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is not None:
        shown(eval(compile(ast.Expression(last.value), name, "eval"), names))


@pytest.mark.filterwarnings("ignore:.*IProgress")
@each
def test_runs_from_top_to_bottom(path, monkeypatch):
    code = cells(path, "code")
    if missing := absent(code):
        pytest.skip(f"the notebook uses {', '.join(missing)}")
    plt = pytest.importorskip("matplotlib.pyplot", reason="the notebooks draw with matplotlib")
    plt.switch_backend("agg")

    def show():
        """Draw what there is, as a page would, and forget it."""
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # as readers have it
        for i, cell in enumerate(code, 1):
            run(cell, f"{path.name}, cell {i}", names)
            show()
