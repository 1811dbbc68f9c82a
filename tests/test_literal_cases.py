"""Fuel's own literal cases: inputs, parameters and results written down in its tests.

``cases/literal_cases.json`` holds them as Fuel names things.  Where a decision departs from Fuel,
the case has the decided value and a ``note`` that says so.  A result with ``checked`` belongs to a
call whose values are out of range: under checkify it reports an access out of bounds.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import fuel_jax
from fuel_jax import OPS, OpKind

CASES = json.loads(Path(__file__).with_name("cases").joinpath("literal_cases.json").read_text())


def softcap(x, *, cap):
    """cap · tanh(x / cap)."""
    inner = fuel_jax.tanh(fuel_jax.affine(x, mul=1 / cap, add=0))
    return fuel_jax.affine(inner, mul=cap, add=0)


def capacity_matmul(a, b, *, m_compute):
    """The product of the first rows, zeros below."""
    y = fuel_jax.matmul(a[:m_compute], b)
    return fuel_jax.pad(y, padding=((0, a.shape[0] - m_compute), (0, 0)))


COMPOSED = {  # what Fuel's tests call by a name that is no OpKind
    "MatMul(capacity)": capacity_matmul,
    "softcap(tanh(x/c)*c)": softcap,
}
RENAMED = {"to": "dtype", "target": "shape"}  # Fuel's parameter -> ours
DERIVED = {"count_sym", "in_shape"}  # Fuel's bookkeeping, known from the operands here


def function(case):
    """The public function of the case, its parameters given."""
    op = COMPOSED.get(case["op"]) or OPS[OpKind(case["op"])]
    params = {}
    for name, value in case["params"].items():
        if name in DERIVED:
            continue
        if name in ("mode", "reduction"):
            value = value.lower()
        params[RENAMED.get(name, name)] = value
    return functools.partial(op, **params)


def array(tensor):
    """A stored tensor as a JAX array of exactly that dtype."""
    dtype = fuel_jax.types.FUEL_DTYPES[tensor["dtype"]]
    integer = np.issubdtype(jnp.dtype(dtype), np.integer)
    data = [int(v) if integer else float(v) for v in tensor["data"]]
    stored = np.array(data, np.int64 if integer else np.float64).reshape(tensor["shape"])
    x = jnp.asarray(stored.astype(dtype) if integer else stored).astype(dtype)
    assert x.dtype == dtype
    return x


def inputs(case):
    return [array(tensor) for tensor in case["inputs"].values()]


def named(case):
    number = CASES.index(case)
    return f"{number}-{case['op']}"


VALUES = [case for case in CASES if "error" not in case["expected"]]
ERRORS = [case for case in CASES if "error" in case["expected"]]
CHECKED = [case for case in VALUES if "checked" in case["expected"]]


@pytest.mark.parametrize("case", VALUES, ids=named)
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_values(case, how):
    f, wanted = function(case), case["expected"]
    got = (jax.jit(f) if how == "jit" else f)(*inputs(case))
    wanted = wanted if isinstance(wanted, list) else [wanted]
    for y, tensor in zip(jax.tree.leaves(got), wanted, strict=True):
        want = array(tensor)
        assert (y.shape, y.dtype) == (want.shape, want.dtype)
        y, want = (np.asarray(t).astype(np.float64) for t in (y, want))
        np.testing.assert_allclose(y, want, **case["tol"])
        if case["tol"]["atol"] == 0 and case["op"] == "ReluElementwise":
            np.testing.assert_array_equal(np.signbit(y), np.signbit(want))


@pytest.mark.parametrize("case", ERRORS, ids=named)
def test_errors(case):
    f, arrays = function(case), inputs(case)
    for call in (lambda: f(*arrays), lambda: jax.eval_shape(f, *arrays)):
        with pytest.raises(fuel_jax.ArgumentError) as caught:
            call()
        assert str(caught.value).startswith(f.func.name)


@pytest.mark.parametrize("case", CHECKED, ids=named)
def test_checkify_reports_values_out_of_range(case):
    checked = checkify.checkify(jax.jit(function(case)), errors=checkify.all_checks)
    error, _ = checked(*inputs(case))
    assert error.get()


def test_every_case_runs_under_a_name_that_is_known():
    assert len(VALUES) + len(ERRORS) == len(CASES) == 114
    known = {kind.value for kind in OpKind} | COMPOSED.keys()
    assert {case["op"] for case in CASES} <= known
