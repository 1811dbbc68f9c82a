"""Fused ops under the tools of JAX that people reach for later: on the smallest example of each."""

import functools
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax

from .contract import OPS, close, differentiable, every_output, fill, floats, loss

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all but": jax.checkpoint_policies.save_anything_except_these_names("x"),
}


def size(example):
    return sum(np.prod(np.shape(x), dtype=int) for x in example.values())


SMALLEST = [
    pytest.param(op, min(op.examples(), key=size), id=op.name)
    for op in OPS
    if isinstance(op, fuel_jax.FusedOp)
]
pytestmark = pytest.mark.parametrize(("op", "example"), SMALLEST)


def case(op, example):
    """The op with every output, its data, and one operand to differentiate by."""
    f, arrays = fill(op, example, "float64")
    f = every_output(op, f)
    if not differentiable(op, f, arrays):
        return f, arrays, None
    return f, arrays, floats(op, arrays)[0]


def of_one(f, arrays, at):
    """``f`` as a function of one operand."""
    return lambda x: f(*arrays[:at], x, *arrays[at + 1 :])


def test_checkpoint_policies(op, example):
    f, arrays, at = case(op, example)
    if at is None:
        pytest.skip("no gradient")
    kept = [jax.checkpoint(loss(f), policy=policy) for policy in POLICIES.values()]
    slopes = jax.jit(lambda *xs: [jax.grad(g, at)(*xs) for g in (loss(f), *kept)])
    want, *got = slopes(*arrays)
    for slope in got:
        close(slope, want, 1e-12, at_least=1)


def test_jacobians_and_hessians(op, example):
    """``jacrev`` of the op is that of its decomposition, which has a ``hessian`` too."""
    f, arrays, at = case(op, example)
    if at is None:
        pytest.skip("no gradient")
    plain = functools.partial(op.decompose, **f.keywords)
    x = arrays[at]
    ours, theirs = both = [of_one(loss(g), arrays, at) for g in (f, plain)]
    each = jax.jit(lambda x: ([g(x) for g in both], [jax.jacrev(g)(x) for g in both]))
    values, jacobians = each(x)
    close(*jacobians, 1e-11, at_least=1)
    value, push = jax.linearize(jax.jit(theirs), x)
    close(push(jnp.ones_like(x)), jnp.sum(jacobians[1]), 1e-9, at_least=1)
    close(value, values[0], 1e-11, at_least=1)
    if x.size <= 40:
        second = jax.jit(lambda x: (jax.jacrev(jax.grad(ours))(x), jax.hessian(theirs)(x)))
        twice, hessian = second(x)
        rounded = any(y.dtype == jnp.float32 for y in jax.tree.leaves(jax.eval_shape(f, *arrays)))
        close(twice, hessian, 1e-6 if rounded else 1e-8, at_least=1)  # a loss is float32 always


def test_export_round_trip(op, example):
    """Serialised with its gradient, called again elsewhere."""
    f, arrays, at = case(op, example)
    program = f if at is None else jax.value_and_grad(loss(f), at)
    exported = jax.export.export(jax.jit(program))(*arrays)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(*arrays), jax.jit(program)(*arrays), 1e-13, at_least=1)


def test_donated_operands(op, example):
    f, arrays, _ = case(op, example)
    want = jax.jit(f)(*arrays)
    first = next(i for i, x in enumerate(arrays) if hasattr(x, "shape"))
    given = [jnp.array(x) if i == first else x for i, x in enumerate(arrays)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        close(jax.jit(f, donate_argnums=first)(*given), want, 1e-13, at_least=1)


def test_debug_nans(op, example):
    """No NaN on the way to a result without one, in either direction."""
    f, arrays, at = case(op, example)
    with jax.debug_nans(True):
        f(*(jnp.array(x) if hasattr(x, "shape") else x for x in arrays))  # it may give one up
        if at is not None:
            jax.jit(jax.grad(loss(f), at))(*arrays)
