"""The count on paper is that of compiled programs; the page has the numbers that it gives."""

import functools
import pathlib

import jax
import many_devices
import pytest
import step_on_paper as paper
import tiny_transformer as model
import training
from jax.sharding import NamedSharding, PartitionSpec as P

from . import steps
from .counted import sent

AXES = many_devices.AXES
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 2, 2)])
def test_a_step_is_one_device_s_and_sends_and_holds_what_the_paper_says(sizes, monkeypatch, curve):
    """No gather; the bytes of all sums, and of keys and values; weights and AdamW's means."""
    for name, value in steps.SHORT.items():
        monkeypatch.setattr(training, name, value)
    config, mesh = steps.SMALL, many_devices.make_mesh(",".join(map("{}={}".format, AXES, sizes)))
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        weights = model.init(config, jax.random.key(0))
        state = many_devices.start(mesh, many_devices.even(weights, sizes[1]))
        tokens = jax.ShapeDtypeStruct((4, 9), "int32", sharding=NamedSharding(mesh, P()))
        loss = functools.partial(many_devices.loss, config, mesh)
        compiled = training.train_step.lower(loss, steps.STEPS, state, tokens).compile()
        losses, batches = [], training.batches(steps.TEXT.train, seed=0)
        for _, tokens in zip(range(steps.STEPS), batches, strict=False):
            state, value = compiled(state, *many_devices.placed((tokens,), (P(),), mesh))
            losses.append(float(value))
    assert losses == pytest.approx(curve, rel=1e-5)
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
