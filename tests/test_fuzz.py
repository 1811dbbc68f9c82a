"""Arbitrary calls: each gives a result of the promised shape and dtype, or an error of ours.

A call starts from an example of the op.  Its axes get new extents, its dtypes and parameters new
values, alike where the signature asks for it; then, sometimes, one thing is spoilt.  Calls are
traced and not compiled, so that hundreds take seconds; after work on signatures, some thousand:
``--fuzz-examples 5000``.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import fuel_jax

from .contract import OPS

FAMILIES: dict[str, list] = {}
for op in OPS:
    module = op.body.__module__.rpartition(".")[2]
    FAMILIES.setdefault(getattr(op, "family", module), []).append(op)

EXTENTS = st.integers(0, 6)
DTYPES = (*fuel_jax.types.FLOATS, *fuel_jax.types.INTS, "bool", "complex64", "float8_e4m3fn")
ANYTHING = (
    *(None, True, False, 0, 1, 2, 3, -1, -2, 7, 64, 2**31, -(2**40), 10**30),
    *(0.0, -0.0, 0.5, -1.5, 1e-6, 1e30, float("nan"), float("inf"), -float("inf")),
    *((), (0,), (1, 0), (0, 1), (2, 1), (-1,), (1, 1, 1), ((0, 1), (2, 0)), ((0, 2),), [1, 2]),
    *("mean", "none", "constant", "reflect", "F32", "BF16", "int8", "", "Q4_0", "Q6K", "Q9"),
    *(np.int8(3), np.float32(0.25), np.ones(2), object, b"x", {}),
)


@st.composite
def calls(draw, family):
    """An op, its arrays as avals, its parameters."""
    op = draw(st.sampled_from(FAMILIES[family]))
    example = draw(st.sampled_from(list(op.examples())))
    params = {n: v for n, v in example.items() if n not in op.inputs}
    resize = draw(st.booleans())
    shared = draw(st.sampled_from(DTYPES[:4] if draw(st.integers(0, 3)) else DTYPES))
    axes: dict[str, object] = {}
    arrays = []
    for name in (n for n in op.inputs if n in example):
        given = example[name] if op.signature.variadic else [example[name]]
        operand = op.signature.operands[name]
        arrays += [aval(draw, operand, x, axes if resize else None, shared) for x in given]
    for name in params:
        if draw(st.integers(0, 5)) == 0:
            params[name] = draw(st.sampled_from(ANYTHING))
    if draw(st.integers(0, 2)) == 0:
        spoil(draw, arrays, params)
    return op, arrays, params


def aval(draw, operand, x, axes, shared):
    """One operand, its axes renewed where ``axes`` is given."""
    if x is None or isinstance(x, int):
        return x
    shape, dtype = np.shape(x), x.dtype.name
    if axes is not None and operand.forms:
        shape = ()
        for token in draw(st.sampled_from(operand.forms)).dim_str.split():
            if token.isdigit():
                shape += (int(token),)
            elif token.startswith("*"):
                many = st.lists(EXTENTS, max_size=3).map(tuple)
                shape += axes[token] if token in axes else axes.setdefault(token, draw(many))
            else:
                one = EXTENTS
                shape += (axes[token] if token in axes else axes.setdefault(token, draw(one)),)
    if operand.shared and jnp.issubdtype(x.dtype, jnp.floating):
        dtype = shared
    return jax.ShapeDtypeStruct(shape, dtype)


def spoil(draw, arrays, params):
    """Change one thing, whatever comes of it."""
    what = draw(st.sampled_from(("shape", "dtype", "drop", "add", "word", "scalar")))
    at = draw(st.integers(0, len(arrays) - 1)) if arrays else None
    x = None if at is None else arrays[at]
    if what == "shape" and hasattr(x, "shape"):
        arrays[at] = jax.ShapeDtypeStruct(draw(st.lists(EXTENTS, max_size=5)), x.dtype)
    elif what == "dtype" and hasattr(x, "shape"):
        arrays[at] = jax.ShapeDtypeStruct(x.shape, draw(st.sampled_from(DTYPES)))
    elif what == "drop" and at is not None:
        del arrays[at]
    elif what == "add":
        arrays.append(jax.ShapeDtypeStruct((2,), "float32"))
    elif what == "word":
        params["surprise"] = 1
    elif what == "scalar" and at is not None:
        arrays[at] = draw(st.sampled_from((None, 3, 2.5, "x", [1.0])))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_keeps_its_promise_or_raises_an_error_of_ours(family, request):
    settings = hypothesis.settings(
        max_examples=request.config.getoption("--fuzz-examples"),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(calls(family))
    def check(call):
        op, arrays, params = call
        abstract = {i: x for i, x in enumerate(arrays) if isinstance(x, jax.ShapeDtypeStruct)}

        def run(f, given):
            return f(*(given.get(i, x) for i, x in enumerate(arrays)), **params)

        try:
            got = jax.eval_shape(functools.partial(run, op), abstract)
        except fuel_jax.FuelError as error:
            refusal = str(error)
        else:
            refusal = None
        if refusal is not None:
            assert refusal.startswith(f"{op.name}: ")
            return
        promised = run(op.out, abstract)
        assert jax.tree.leaves(got) == jax.tree.leaves(promised)

    check()
