"""The notebooks: kept as run, and their programs do what they say."""

import json
import pathlib

import jax
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(path):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_was_run_from_top_to_bottom_without_an_error(path):
    cells = code_cells(path)
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    assert not [o for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    assert path.stat().st_size < 200_000


def test_the_flax_model_has_what_its_notebook_says():
    """Five norms, thirteen linear layers, two attentions, and the loss."""
    for package in ("flax", "optax", "matplotlib"):
        pytest.importorskip(package, reason=f"the notebook uses {package}")
    (path,) = (p for p in NOTEBOOKS if p.stem == "fuse")
    build, report, *_ = ("".join(c["source"]) for c in code_cells(path))
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        exec(build, names)
        found = [r.op for r in eval(report, names).replaced]
    counts = {op: found.count(op) for op in found}
    assert counts == {
        "layer_norm_last_dim": 3,
        "rms_norm_last_dim": 2,
        "fused_linear": 13,
        "flash_attn": 2,
        "fused_softmax_cross_entropy": 1,
    }


def test_the_mamba_notebook_runs_and_both_forms_of_its_blocks_agree():
    pytest.importorskip("optax", reason="the notebook uses optax")
    (path,) = (p for p in NOTEBOOKS if p.stem == "mamba")
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        for cell in code_cells(path):
            exec("".join(cell["source"]), names)
    assert set(names["apart"]) == {"Mamba", "Mamba-2"}
    assert max(names["apart"].values()) < 1e-5
    taken = names["memory"]["Mamba"]
    assert taken["fuel"] < taken["plain"] / 2
    for name in names["models"]:
        fuel, plain = (names["curves"][name, kind] for kind in ("fuel", "plain"))
        assert fuel == pytest.approx(plain, rel=1e-3)
        assert fuel[-1] < fuel[0] - 1
