"""Several devices beside one: rules that are kept and one that is not, and what overlaps."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax.errors import UnknownName
from fuel_jax.judge import several, spread
from fuel_jax.judge.collectives import sent, sent_in_all
from fuel_jax.types import Array, Floats

DEVICES = jax.devices()[:2]


def rows_of(tmp_path, cases):
    """What a run says, and whether it failed."""
    path = tmp_path / "rows.jsonl"
    failed = several.profile(cases, str(path), tiny=True, devices=DEVICES)
    return [json.loads(line) for line in path.read_text().splitlines()], failed


@pytest.fixture(scope="module")
def splits():
    return several.splits(len(DEVICES))


def test_rules_are_kept(tmp_path, splits):
    names = "rule rms_norm_last_dim batch_0", "rule fused_linear m"
    cases = [case for case in splits if case.name.startswith(names)]
    rows, failed = rows_of(tmp_path, cases)
    assert not failed
    assert [(r["case"], r["way"]) for r in rows] == [
        (case.name, way) for case in cases for way in ("jit", "shard_map")
    ]
    for row in rows:
        weights = (8 * 2 + 1) * 4 * 2 if "linear" in row["case"] else 0  # of b and bias, in halves
        assert row["promised_bytes"] == (weights and (16 * 4 + 4) * 2)
        assert bool(row["sent"]) == bool(weights)
        assert row["kept"]
        assert row["devices"] == len(DEVICES)


def test_every_op_with_a_split_is_there(splits):
    found = {case.op.name for case in splits}
    ops = {op.name for op in several.every() if op.by_parts}
    assert found == ops
    assert {"flash_attn", "cumsum", "nf4_matmul"} <= ops


def test_a_rule_that_is_not_so_is_found(tmp_path):
    """Parts of a mean are not the mean of the whole."""

    def centred(x: Floats[Array, "m n"]) -> Floats[Array, "m n"]:
        return x - jnp.mean(x, -1, keepdims=True)

    op = fuel_jax.Op(centred, precision=fuel_jax.Precision(2e-6), splits="m n", name="centred")
    op.kernel("again")(lambda x, *, interpret=False: centred(x))
    x = np.arange(12, dtype="float32").reshape(2, 6)
    case = several.Split(op, op.kernels[0], "n", [x], {}, op.sharding(x))
    rows, failed = rows_of(tmp_path, [case])
    assert failed
    assert [row["kept"] for row in rows] == [False, False]


def test_names(monkeypatch):
    monkeypatch.setattr(several, "splits", lambda devices: [])
    assert len(several.chosen(["ring_attention*"])) == 2
    with pytest.raises(UnknownName, match="no case 'nothing'"):
        several.chosen(["nothing"])


def test_work_that_is_spread(tmp_path):
    """The same result as one device's, and nothing of the logits' or weights' size is sent."""
    names = "cross_entropy by vocabulary", "linear by rows fwd M"
    cases = [case for case in spread.CASES if case.name.startswith(names)]
    (loss, linear), failed = rows_of(tmp_path, cases)
    assert not failed
    assert loss["error"] < 1e-5
    assert linear["error"] < 1e-2
    assert loss["sent"] == {"all-reduce": 3 * 16 * 4}  # three numbers a row
    assert linear["sent"] == {"all-reduce": 16 * 32 * 4}
    assert loss["bytes"] < loss["one_bytes"]
    assert loss["hidden"] is None  # no profiler sees a CPU


def test_what_was_started_is_counted_once():
    program = """
      %a = ((f32[15]{0}), f32[15]{0}) all-reduce-start(%x), channel_id=4
      %b = f32[15]{0} all-reduce-done(%a)
      %c = (bf16[4,3]{1,0}, bf16[4,3]{1,0}) all-gather(%p, %q), dimensions={0}
      %d = pred[8]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
    """
    assert sent(program) == {"all-reduce": 60, "all-gather": 48, "collective-permute": 8}


def test_what_a_loop_sends_is_counted_as_often_as_it_runs():
    program = """HloModule jit_f

    %body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
      %sum = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
      ROOT %t = (s32[], f32[4]) tuple(%i, %sum)
    }

    %condition.1 (p: (s32[], f32[4])) -> pred[] {
      ROOT %c = pred[] compare(%i, %n), direction=LT
    }

    ENTRY %main (x: f32[4]) -> f32[4] {
      %w = (s32[], f32[4]) while(%t), condition=%condition.1, body=%body.1, TRIPS
      ROOT %b = f32[8]{0} all-gather(%y), replica_groups={{0,1}}, dimensions={0}
    }
    """
    program = program.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"22"}}')
    program = "\n".join(line.removeprefix("    ") for line in program.splitlines())
    assert sent(program) == {"all-reduce": 16, "all-gather": 32}
    assert sent_in_all(program) == {"all-reduce": 22 * 16, "all-gather": 32}


def test_what_is_sent_during_compute():
    event = lambda name, start, end: types.SimpleNamespace(
        name=name, start_ns=start, duration_ns=end - start
    )
    lines = [
        ("Stream #1", [event("fuel_attention", 0, 10), event("fusion", 8, 12)]),
        ("Stream #2", [event("ncclDevKernel_SendRecv", 5, 20), event("MemcpyP2P", 30, 31)]),
        ("XLA Ops", [event("fuel_attention", 0, 40)]),
    ]
    plane = types.SimpleNamespace(
        lines=[types.SimpleNamespace(name=name, events=events) for name, events in lines]
    )
    sends, computes = spread.halves(plane)
    assert (sends, computes) == ([(5, 20), (30, 31)], [(0, 12)])
    assert spread.common(sends, computes) == [(5, 12)]
    assert spread.length(sends) == 16
