"""Blocks of well-known models, as people write them: what ``fuse`` finds, and what comes out."""

import collections

import jax
import pytest

import fuel_jax

from . import (  # noqa: F401  they enter their blocks
    blocks_bert,
    blocks_gemma,
    blocks_gpt2,
    blocks_hidden,
    blocks_llama,
    blocks_mamba,
    blocks_vit,
)
from .blocks import BLOCKS, SHORT
from .blocks_llama import deep
from .compared import assert_agree

SEEN = {}
BY_NAME = {block.name: block for block in BLOCKS}
by_name = pytest.mark.parametrize("name", BY_NAME)


@pytest.fixture(autouse=True)
def as_most_people_run_jax():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


@by_name
def test_what_is_counted_by_hand_is_found(name):
    block = BY_NAME[name]
    fn, args = block.build()
    report = fuel_jax.fuse.report(fn)(*args)
    SEEN[name] = dict(collections.Counter(r.op for r in report.replaced))
    assert SEEN[name] == block.sites, report
    assert {SHORT.get(n, n) for n in block.near} <= {m.op for m in report.missed}, report


@by_name
def test_values_and_gradients_agree(name):
    block = BY_NAME[name]
    if block.sites:  # without, the program is run as it is
        assert_agree(*block.build())


def test_many_layers_are_found_layer_by_layer():
    """How long 48 of them take is measured in ``benchmarks/fuse_layers.py``."""
    model, args = deep(6)
    assert len(fuel_jax.fuse.report(model)(*args).replaced) == 6 * 5 + 1


def test_table(capsys):
    """Prints ``program | by hand | found``."""
    if not SEEN:
        pytest.skip("no program was looked at")
    listed = lambda counts: ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "none"
    with capsys.disabled():
        print(f"\n\n{'block':<44} {'ops, by hand':<80} found")
        for name, here in SEEN.items():
            verdict = "all" if here == BY_NAME[name].sites else listed(here)
            print(f"{name:<44} {listed(BY_NAME[name].sites):<80} {verdict}")
