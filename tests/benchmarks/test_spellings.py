"""Every program of a comparison computes the same thing, or the comparison means nothing."""

import math

import jax
import numpy as np
import pytest

from .plain import ROW
from .programs import cases, compiled, torch_program
from .timing import TORCH

ELSEWHERE = {  # what eager PyTorch is asked for is not what the op returns
    **dict.fromkeys(("qmatmul", "nf4_matmul", "awq_matmul"), "a dense layer of other weights"),
    "nonzero_indices": "as many as there are, in a matrix",
}


@pytest.fixture(autouse=True)
def as_users_run_it():
    """The suite is stricter than the settings a benchmark is for."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


def smallest(label):
    """The cheapest call of a row, in the direction that says most."""
    row = ROW[label]
    elements = lambda call: sum(math.prod(map(int, x.split()[1:])) for x in call[0])
    call = min(row.calls, key=elements)
    if elements(call) > 2**22:
        pytest.skip("too large for a test")
    return list(cases(label, row, call, ("forward", "gradient")))[-1]


def leaves(result):
    """Arrays of any framework, in float64 where they are floats."""
    for x in jax.tree.leaves(result):
        x = x.detach().float().numpy() if hasattr(x, "detach") else np.asarray(x)
        yield x.astype(np.float64)


def close(got, wanted):
    """Within rounding of each other, in the measure of the largest element."""
    pairs = list(zip(leaves(got), leaves(wanted), strict=True))
    for g, w in pairs:
        assert g.shape == w.shape
        finite = np.isfinite(w)
        scale = np.abs(w[finite]).max(initial=1e-30)
        np.testing.assert_allclose(g[finite], w[finite], rtol=0, atol=2e-3 * scale)
    return bool(pairs)


@pytest.mark.parametrize("label", ROW)
def test_plain_spellings_agree_with_the_op(label):
    case = smallest(label)
    ours = compiled(case.op, case).run()
    for f in case.row.spellings.values():
        assert close(compiled(f, case).run(), ours)


@pytest.mark.skipif(not TORCH, reason="PyTorch is not installed")
@pytest.mark.parametrize("label", ROW)
def test_pytorch_agrees_with_the_op(label):
    if why := ELSEWHERE.get(label.split()[0]):
        pytest.skip(why)
    case = smallest(label)
    peer = torch_program(case)
    if peer is None:
        pytest.skip("PyTorch has no word for it")
    assert close(peer.run(), compiled(case.op, case).run())
