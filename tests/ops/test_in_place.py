"""The in-place ops: the functional op to the bit, and the array passed is given up."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax import OpKind

from ..refused import refused

TWINS = {  # the op, its functional twin, its parameters, where it takes integers too
    **{
        name: ({}, name in ("relu", "neg", "abs", "sqr", "sign"))
        for name in (
            *("relu", "silu", "gelu_tanh", "tanh", "sigmoid", "neg", "abs", "sqr", "sqrt", "rsqrt"),
            *("recip", "exp", "log", "sin", "cos", "sign", "floor", "ceil", "round", "erf", "gelu"),
        )
    },
    "clamp": ({"min": -0.5, "max": 1.5}, True),
    "powi": ({"exp": 3}, False),
}
every_op = pytest.mark.parametrize("name", TWINS)


def both(name):
    """The op in place and the functional one, and their parameters."""
    return getattr(fuel_jax, f"{name}_inplace"), getattr(fuel_jax, name), TWINS[name][0]


def data(dtype="float32"):
    x = np.array([0.5, -1.25, 0.0, -0.0, 3.0, np.inf, -np.inf, np.nan])
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def test_every_op_is_here():
    kinds = {kind for kind in OpKind if kind.name.endswith("Inplace")}
    assert {both(name)[0].kind for name in TWINS} == kinds


@every_op
def test_equals_the_functional_op_to_the_bit(name):
    op, functional, params = both(name)
    xs = [data(dtype) for dtype in ("float32", "float64", "bfloat16", "float16")]
    programs = (jax.jit(lambda xs, f=f: [f(x, **params) for x in xs]) for f in (functional, op))
    for want, got in zip(*(program(xs) for program in programs), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.tobytes() == want.tobytes(), got.dtype


@pytest.mark.parametrize("name", [name for name, (_, integers) in TWINS.items() if integers])
def test_integers(name):
    op, functional, params = both(name)
    params = {"min": -1, "max": 3} if params else {}
    x = np.array([0, 1, -3, 127, -128], np.int8)
    np.testing.assert_array_equal(op(x, **params), functional(x, **params))


@every_op
def test_an_eager_call_deletes_the_array(name):
    """Under any name: a second reference to the buffer raises as well."""
    op, _, params = both(name)
    x = data()
    also, view = x, {"weights": x}
    y = op(x, **params)
    assert also.is_deleted()
    for use in (lambda: also + 1, lambda: np.asarray(view["weights"]), lambda: op(x, **params)):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):  # JAX has both
            use()
    assert y.shape == (8,)


@every_op
def test_a_copy_survives(name):
    op, _, params = both(name)
    x = data()
    copy = jnp.array(x)
    op(x, **params)
    np.testing.assert_array_equal(copy, data())


@every_op
def test_a_numpy_array_keeps_its_values(name):
    op, functional, params = both(name)
    x = np.asarray(data())
    kept = x.copy()
    want = functional(x, **params)
    assert op(x, **params).tobytes() == want.tobytes()
    np.testing.assert_array_equal(x, kept)


@every_op
def test_gradient_is_the_functional_op_s(name):
    """Fuel's GAP-004: the gradient needs values that the op has overwritten."""
    op, functional, params = both(name)
    at = np.array([0.5, 1.25, 0.75], np.float32)
    slope = lambda f: jax.grad(lambda x: jnp.sin(f(x, **params)).sum())
    want = slope(functional)(at)
    x = jnp.asarray(at)
    np.testing.assert_array_equal(slope(op)(x), want)
    want = jax.jit(slope(functional))(at)  # compiled as one, it may round elsewhere than in steps
    np.testing.assert_array_equal(jax.jit(slope(op))(x), want)
    np.testing.assert_array_equal(x, at)  # differentiating gives nothing up


@every_op
def test_a_donated_argument_of_jit_is_aliased(name):
    op, _, params = both(name)
    f = jax.jit(lambda x: op(x, **params), donate_argnums=0)
    x = jnp.linspace(0.5, 2, 64, dtype="float32")
    text = f.lower(x).compile().as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, \{\}", text)
    f(x)
    assert x.is_deleted()


@every_op
def test_inside_jit_nothing_is_given_up_unasked(name):
    op, functional, params = both(name)
    x = jnp.linspace(0.5, 2, 64, dtype="float32")
    f = jax.jit(lambda x: (op(x, **params), x + 1))
    y, more = f(x)
    assert not x.is_deleted()
    np.testing.assert_array_equal(y, functional(x, **params))
    np.testing.assert_array_equal(more, np.asarray(x) + 1)


def test_under_vmap_scan_and_checkpoint():
    x = jnp.linspace(0.5, 2, 6, dtype="float32").reshape(2, 3)
    want = fuel_jax.exp(x)
    np.testing.assert_array_equal(jax.vmap(fuel_jax.exp_inplace)(x), want)
    step = lambda c, row: (c, fuel_jax.exp_inplace(row))
    np.testing.assert_array_equal(jax.lax.scan(step, 0, x)[1], want)
    slope = jax.grad(jax.checkpoint(lambda x: fuel_jax.exp_inplace(x).sum()))(x)
    np.testing.assert_array_equal(slope, want)
    assert not x.is_deleted()


@every_op
def test_a_refused_call_gives_nothing_up(name):
    op, _, params = both(name)
    x = jnp.ones((3,), "complex64")
    refused(op, x, match="'x' is complex64\\[3\\]; its dtype must be one of", **params)
    assert not x.is_deleted()
    refused(op, 1.0, match="'x' is 1.0; it must be an array", **params)
    refused(op, match="array 'x' is missing", **params)


def test_bad_parameters():
    x = data()
    refused(fuel_jax.clamp_inplace, x, min=2.0, max=1.0, match="'min' is 2.0 and 'max' is 1.0")
    refused(fuel_jax.powi_inplace, x, exp=0.5, match="'exp' is 0.5; it must be an int")
    assert not x.is_deleted()
