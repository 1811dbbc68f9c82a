"""The count on paper is that of compiled programs; the page has the numbers that it gives."""

import functools
import pathlib

import jax
import many_devices
import pytest
import step_on_paper as paper
import tiny_transformer as model
import training

from .counted import sent

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_a_step_sends_and_holds_what_the_paper_says(sizes, monkeypatch):
    """No gather; the bytes of all sums, and of keys and values; weights and AdamW's means."""
    monkeypatch.setattr(training, "SEQUENCE", 8)
    monkeypatch.setattr(training, "BATCH", 4)
    config = model.Config(14, width=16, layers=1, hidden=24, context=8)
    mesh = many_devices.make_mesh("data={},model={},sequence={}".format(*sizes))
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        weights = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), weights)
        state = many_devices.start(mesh, many_devices.even(zeros, sizes[1]))
        tokens = jax.ShapeDtypeStruct((4, 9), "int32")
        loss = functools.partial(many_devices.loss, config, mesh)
        compiled = training.train_step.lower(loss, 4, state, tokens).compile()
    on_paper = paper.Mesh(*sizes)
    assert sent(compiled.as_text()) == paper.sent(config, on_paper, batch=4, steps=8)
    held = compiled.memory_analysis().argument_size_in_bytes
    held -= 4 * 9 * 4 + 4  # tokens, the number of the step
    assert held == pytest.approx(paper.state(config, on_paper), abs=128)


def test_the_page_has_the_numbers():
    assert paper.table() in (ROOT / "docs/parallel_70b.md").read_text()
    ours = sum(
        x.size
        for x in jax.tree.leaves(jax.eval_shape(lambda: model.init(paper.LARGE, jax.random.key(0))))
    )
    assert paper.weights(paper.LARGE, paper.Mesh()) == ours
