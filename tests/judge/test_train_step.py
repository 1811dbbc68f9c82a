"""``profile --suite train-step``, on a model that a CPU trains at once."""

import functools
import json

import jax
import numpy as np
import pytest

from fuel_jax import fuse
from fuel_jax.__main__ import main
from fuel_jax.errors import UnknownName
from fuel_jax.judge import llama, mesh_step, train_step

CONFIG = llama.Config(**train_step.TINY | {"width": 16, "hidden": 24, "length": 12})


pytestmark = pytest.mark.usefixtures("as_users_run_it")


@functools.cache
def slopes(written, fused=False):
    """The loss of the first weights, and their gradients."""
    f = functools.partial(llama.loss, CONFIG, written)
    params = llama.init(CONFIG, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (CONFIG.batch, CONFIG.length), 0, 96)
    return jax.jit(jax.value_and_grad(fuse(f) if fused else f))(params, tokens)


@pytest.mark.parametrize(
    ("written", "fused"),
    [
        (llama.OPS, False),
        (llama.OPS._replace(stack=llama.halves_stacked), False),
        (train_step.DENSE, True),
    ],
    ids=["ops", "half gradients", "fused"],
)
def test_every_way_trains_the_same_model(written, fused):
    (expected, wanted), (value, got) = slopes(train_step.DENSE), slopes(written, fused)
    assert value == pytest.approx(float(expected), abs=5e-3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)  # halves in between


def test_fuse_finds_the_parts():
    f = functools.partial(llama.loss, CONFIG, train_step.DENSE)
    params = jax.eval_shape(lambda: llama.init(CONFIG, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.length), "int32")
    found = sorted(site.op for site in fuse.report(f)(params, tokens).replaced)
    norms, ropes = ["rms_norm_last_dim"] * 3, ["rope"] * 2
    assert found == ["flash_attn", "fused_softmax_cross_entropy", *norms, *ropes]


def test_a_row_says_what_was_measured(tmp_path, monkeypatch, capsys):
    ways = {n: train_step.FORMS[n] for n in (train_step.OURS, "cuDNN")}
    monkeypatch.setattr(train_step, "WAYS", tuple(ways))
    file = tmp_path / "rows.jsonl"
    arguments = ["profile", "--suite", "train-step", "--tiny", "--rows", str(file)]
    assert main([*arguments, "llama 1.1B B4 S4096 bf16 V32000"]) == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["suite"] == "train-step"
    assert row["tiny"]
    assert row["us"] > 0
    assert row["loss"] == pytest.approx(np.log(96), rel=0.3)
    assert row["peers"] == {}  # a CPU has no cuDNN
    assert "tokens/s" in capsys.readouterr().out


def test_kernels_are_named_by_what_they_do():
    took = {"nvjet_tst_128x256": 5.0, "gemm_fusion_dot_3": 2.0, "loop_add_fusion_12": 1.0}
    took |= {"loop_add_fusion": 1.5, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 3.0}
    assert train_step.shares(took) == {"products": 7, "cuDNN attention": 3, "loop_add_fusion": 2}


def test_a_mesh_trains_as_one_device_does(tmp_path, capsys):
    """What is sent are sums: of gradients, and of what the halves of a layer add to the stream."""
    over = "data=2,model=2"
    file = tmp_path / "rows.jsonl"
    arguments = ["profile", "--suite", "train-step", "--mesh", over, "--tiny", "--rows", str(file)]
    assert main([*arguments, "llama 1.1B B4 S4096 bf16 V32000"]) == 0
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["case"] == f"train_step {over} llama 1.1B B4 S4096 bf16 V32000"
    (first, second), losses = row["losses"]
    assert losses == pytest.approx([first, second], rel=1e-3)
    assert first - second > 5e-3 * first  # so that a wrong gradient shows
    assert row["temporary_bytes"] < row["peers"]["one device"]["temporary_bytes"]
    most = 2 * row["predicted_bytes"]  # a CPU sums halves in float32
    # And sums what five products of a layer give back one by one, where two would do.
    config = llama.Config()._replace(**train_step.TINY)
    most += config.layers * 3 * config.tokens // 2 * config.width * 4
    assert row["sent"].keys() == {"all-reduce"}
    assert row["predicted_bytes"] <= row["sent"]["all-reduce"] <= most + 16
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ("rows=2", "no mesh 'rows=2'; wanted data=N, model=N or data=N,model=N"),
        ("data=2,data=2", "no mesh 'data=2,data=2'; wanted"),
        ("data=8,model=8", "it takes 64 devices and there are"),
    ],
)
def test_a_mesh_that_is_none(over, says):
    with pytest.raises(UnknownName, match=says):
        mesh_step.chosen([], over)
