"""Hopper's kernel on a simulated multiprocessor, against float64, and lowered for a real one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused import _attention_hopper as hopper, _attention_triton as triton
from fuel_jax.fused.flash_attn import flash_attn
from pallas_kernels import _hopper_order, _launch, attention_hopper
from pallas_kernels._attention import Rules, Sizes, Tile

from .hopper import simulated
from .test_attention import OPTIONS, draw, error, exactly, half_a_unit

TILES = {"tile": Tile(64, 64, 8, 2), "mending": Tile(32, 32, 1, 1)}
CASES = {
    "more blocks than slots": ((1, 1, 1, 136, 328), {}),
    "causal, shared keys": ((1, 2, 1, 200, 200), {"causal": True}),
    "more queries than keys": ((1, 1, 1, 256, 72), {"causal": True}),
    "soft cap, more queries than keys": ((1, 1, 1, 256, 72), {"causal": True, "softcap": 30.0}),
    "windows": ((1, 1, 1, 136, 264), {"window_size_left": 70, "window_size_right": 3}),
    "soft cap and slopes": ((1, 2, 2, 64, 192), {"causal": True, "softcap": 2.0}),
    "slopes both ways": ((1, 2, 2, 264, 392), {}),
    "lengths": ((3, 1, 1, 64, 192), {"causal": True}),
}


def operands(name, dtype="bfloat16", width=64):
    (b, h, hk, sq, sk), options = CASES[name]
    q, k, v = draw(sk, dtype, (b, h, sq, width), (b, hk, sk, width), (b, hk, sk, width))
    slopes = jnp.asarray(np.linspace(0.1, 0.3, h), dtype) if "slopes" in name else None
    lengths = jnp.asarray([192, 0, 100], "int32") if name == "lengths" else None
    return (q, k, v, slopes, lengths), OPTIONS | options


def attend(monkeypatch, q, k, v, slopes, lengths, programs=None, **params):
    rules = triton.rules_of(q, k.shape[2], **params)
    arrays = (None if x is None else np.asarray(x) for x in (q, k, v, slopes, lengths))
    with simulated(monkeypatch):
        return attention_hopper.attend(*arrays, rules=rules, programs=programs, **TILES)


@pytest.mark.parametrize("programs", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(monkeypatch, name, programs):
    arrays, params = operands(name)
    o, lse = attend(monkeypatch, *arrays, programs=programs, **params)
    want, want_lse = exactly(flash_attn, *arrays, **params, return_lse=True)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
    v = np.asarray(arrays[2], np.float64)
    assert error(o, want) < 2 * half_a_unit("bfloat16", want) + half_a_unit("bfloat16", v) / 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_values_stay_hidden(monkeypatch, value):
    (q, k, v, *rest), params = operands("causal, shared keys")
    v = v.at[0, 0, 150].set(value)
    o, _ = attend(monkeypatch, q, k, v, *rest, **params)
    o = np.asarray(o, np.float32)
    assert np.isfinite(o[:, :, :150]).all()
    assert not np.isfinite(o[:, :, 150:]).any()


def test_no_number_of_keys(monkeypatch):
    (q, k, v, *_), params = operands("lengths")
    o, lse = attend(monkeypatch, q, k, v, None, jnp.asarray([192, -1, 5], "int32"), **params)
    assert np.isnan(np.asarray(o[1], np.float32)).all()
    assert np.isnan(lse[1]).all()
    assert np.isfinite(np.asarray(o[::2], np.float32)).all()


def test_heads_too_wide_for_results_of_their_own(monkeypatch):
    """They lie where queries did, and a program goes on to other rows all the same."""
    arrays, params = operands("causal, shared keys", width=256)
    o, _ = attend(monkeypatch, *arrays, programs=1, **params)
    want, _ = exactly(flash_attn, *arrays, **params, return_lse=True)
    v = np.asarray(arrays[2], np.float64)
    assert error(o, want) < 2 * half_a_unit("bfloat16", want) + half_a_unit("bfloat16", v) / 2


@pytest.mark.parametrize("rules", [(None, 0), (1024, 0), (None, None)])
def test_programs_share_the_work(rules):
    """Every block of rows once, and nobody has much more to do than another."""
    sizes = Sizes(4, 32, 32, 4096, 4096, False)
    counts = _hopper_order.met(sizes, 128, 128, Rules(1.0, *rules, None))
    table = _hopper_order.shares(counts, 128, 8, 132)
    lists = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(lists)) == list(range(128 * 32))
    done = np.asarray([sum(counts[i % 32] for i in numbers) for numbers in lists])
    assert done.max() < done.mean() * (1.01 if rules == (None, 0) else 1.04)
    alone = _hopper_order.shares(counts, 128, 8, 10**9)
    assert alone.shape == (4096, 2)


@pytest.mark.parametrize(
    ("sq", "sk", "left", "right", "counts"),
    [
        (256, 256, None, 0, (1, 2)),
        (256, 256, None, None, (2, 2)),
        (256, 64, None, 0, (1, 1)),  # the first 192 rows see nothing
        (384, 384, 128, 0, (1, 2, 2)),
        (128, 512, 10, 10, (2,)),
    ],
)
def test_blocks_of_keys_are_counted(sq, sk, left, right, counts):
    sizes = Sizes(1, 1, 1, sq, sk, False)
    assert _hopper_order.met(sizes, 128, 128, Rules(1.0, left, right, None)) == counts


def test_a_cap_divides_by_bits():
    """As Mosaic is given it: to 4 units in the last place, also far out."""
    x = np.concatenate([np.linspace(-99, 30, 10_001), [-1e9, -np.inf, np.inf, np.nan]])
    x = x.astype(np.float32)
    with _launch.INTERPRETED(True), _launch.BY_BITS(True):
        y = np.asarray(_launch.logistic(jnp.asarray(x)), np.float64)
    want = 1 / (1 + np.asarray(jnp.exp2(-x), np.float64))  # what the power of two is off by aside
    np.testing.assert_allclose(y, want, rtol=4 * 2.0**-24, atol=2.0**-99)


def test_a_missed_phase_is_found(monkeypatch):
    """That the simulation fails a kernel that waits once too seldom."""
    from . import hopper as simulation

    monkeypatch.setattr(simulation, "PATIENCE", 0.5)
    wait, forgotten = attention_hopper.Copies.wait, set()

    def forget(self, slot):
        key = simulation.here.group, id(self.ready)
        if key in forgotten:
            return wait(self, slot)
        forgotten.add(key)
        return self.blocks.at[slot]

    monkeypatch.setattr(attention_hopper.Copies, "wait", forget)
    arrays, params = operands("more blocks than slots")
    with pytest.raises(AssertionError):
        attend(monkeypatch, *arrays, **params)


@pytest.mark.parametrize(
    ("shape", "dv", "reason"),
    [
        ((1, 2, 512, 96), 96, "wide, not 96"),
        ((1, 2, 512, 128), 64, "not 128 and 64"),
        ((1, 2, 500, 64), 64, "rows are copied by the eight"),
        ((1, 2, 512, 64), 64, "written for Hopper GPUs"),
    ],
)
def test_what_it_does_not_take(shape, dv, reason):
    q = jax.ShapeDtypeStruct(shape, "bfloat16")
    v = jax.ShapeDtypeStruct((*shape[:-1], dv), "bfloat16")
    assert reason in hopper.refuses(q, q, v)


@pytest.mark.parametrize(
    ("width", "options", "served"),
    [
        (128, {}, True),
        (64, {}, False),
        (64, {"window_size_left": 100}, False),
        (64, {"causal": True}, True),
        (64, {"window_size_right": 5}, True),
        (64, {"softcap": 30.0}, True),
        (64, {"alibi": jax.ShapeDtypeStruct((16,), "bfloat16")}, True),
    ],
)
def test_narrow_heads_that_see_all_are_left_to_triton(width, options, served):
    q = jax.ShapeDtypeStruct((4, 16, 1024, width), "bfloat16")
    assert (hopper.declines(q, q, q, **options) is None) == served
