"""Ops registered by a user are ops like any other."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax import FUSED, FusedOp, Kernel, OpKind, register_fused, unregister_fused


def swiglu(gate, up, bias=None, *, beta=1.0):
    """gate · sigmoid(beta · gate) · up + bias."""
    y = gate * jax.nn.sigmoid(beta * gate) * up
    return y if bias is None else y + bias


@pytest.fixture
def op():
    yield register_fused("swiglu", swiglu)
    unregister_fused("swiglu")


def slope(f, *arrays):
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), tuple(range(len(arrays))))(*arrays)


def test_has_an_id_a_name_and_a_gradient(op, draw):
    gate, up = draw((3, 4)), draw((3, 4))
    assert op.id >= 0x8000
    assert FUSED[op.id] is op
    assert isinstance(op, jax.custom_vjp)
    assert isinstance(op, FusedOp)
    want = swiglu(gate, up, beta=2.0)
    for got in (
        op(gate, up, beta=2.0),
        jax.jit(lambda a, b: op(a, b, beta=2.0))(gate, up),
        fuel_jax.runtime_fused("swiglu", gate, up, beta=2.0),
        fuel_jax.runtime_fused(op.id, gate, up, beta=2.0),
        fuel_jax.OPS[OpKind.RuntimeFused]("swiglu", gate, up, beta=2.0),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(slope(op, gate, up), slope(swiglu, gate, up), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert jax.vmap(op, (0, None, None))(gate, up[0], up[1]).shape == (3, 4)


def test_answers_what_a_built_in_one_answers(op, draw):
    gate, up = draw((3, 4)), draw((3, 4))
    asked = fuel_jax.runtime_fused
    assert asked.out(op.id, gate, up) == op.out(gate, up) == jax.ShapeDtypeStruct((3, 4), "float32")
    assert asked.cost("swiglu", gate, up) == op.cost(gate, up)
    assert str(asked.explain("swiglu", gate, up)) == str(op.explain(gate, up))
    assert asked.output_views("swiglu", gate, up)[0].name == "y"
    np.testing.assert_array_equal(asked.decompose("swiglu", gate, up), swiglu(gate, up))
    np.testing.assert_array_equal(asked.using("xla")("swiglu", gate, up), op(gate, up))
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.deepcopy(op) is op
    with pytest.raises(fuel_jax.SignatureError, match="swiglu: got an argument 'gamma'"):
        op(gate, up, gamma=1)


def test_annotations_are_checked_as_the_built_in_ones_are():
    def scaled(
        x: fuel_jax.types.Floats[jax.Array, "*rows d"],
        gain: fuel_jax.types.Floats[jax.Array, " d"],
        *,
        power: int = 1,
    ):
        return x * gain**power

    op = register_fused("scaled", scaled)
    try:
        with pytest.raises(fuel_jax.ShapeError, match=r"scaled: 'gain' .* its axis d is 3, but"):
            op(jnp.ones((2, 4)), jnp.ones(3))
        with pytest.raises(fuel_jax.ArgumentError, match=r"scaled: parameter 'power' is 0.5"):
            op(jnp.ones((2, 4)), jnp.ones(4), power=0.5)
    finally:
        unregister_fused("scaled")


def test_takes_kernels_and_pins(op, draw):
    gate, up = draw((3, 4)), draw((3, 4))
    op(gate, up)  # traced before the kernel exists

    one_row = lambda gate, *rest, **params: "one row" if gate.shape[0] == 1 else None

    @op.kernel("negated", refuses=one_row)
    def _(gate, up, bias, *, beta):
        return -swiglu(gate, up, bias, beta=beta)

    np.testing.assert_array_equal(op(gate, up), -op.using("xla")(gate, up))
    with fuel_jax.using("xla"):
        np.testing.assert_array_equal(op(gate, up), op.using("xla")(gate, up))
    assert op.explain(gate[:1], up[:1]).forward[0].why_not == "one row"
    with pytest.raises(
        fuel_jax.UnsupportedKernel,
        match=r"swiglu: kernel 'negated' cannot serve float32\[1,4\].*one row",
    ):
        op.using("negated")(gate[:1], up[:1])
    with pytest.raises(fuel_jax.ArgumentError, match="swiglu: kernel 'negated' is registered"):
        op.add(Kernel("negated", swiglu))
    with pytest.raises(fuel_jax.UnsupportedKernel, match="using: no op has a kernel 'tritn'"):
        fuel_jax.using("tritn")


def test_a_backward_of_its_own(draw):
    def twice(x):
        return 2 * x

    def backward(upstream):
        return 3 * upstream  # so that it can be told from the derivative

    op = register_fused("twice", twice, backward=backward, kernels=(Kernel("b", twice),))
    try:
        assert jax.grad(op)(1.0 * jnp.ones(())) == 3
        assert op.backward_kind == "Fused(backward)"
        assert [k.name for k in op.kernels] == ["b", "xla"]
    finally:
        unregister_fused("twice")


def test_a_backward_of_the_wrong_arity_says_so():
    op = register_fused("product", lambda a, b: a * b, backward=lambda a, upstream: (a * upstream,))
    try:
        with pytest.raises(fuel_jax.ArgumentError, match="product: its backward returned 1 grad"):
            jax.grad(op)(jnp.ones(()), jnp.ones(()))
    finally:
        unregister_fused("product")


def test_no_gradient_is_an_error_only_when_asked_for():
    op = register_fused("frozen", lambda x: x + 1, backward="none")
    try:
        assert op(jnp.zeros(())) == 1
        with pytest.raises(fuel_jax.NotDifferentiable, match="frozen: no gradient for 'x'"):
            jax.grad(op)(jnp.zeros(()))
        assert jax.grad(lambda x: x * op(jax.lax.stop_gradient(x)))(jnp.ones(())) == 2
    finally:
        unregister_fused("frozen")


def cell(gain):
    """What a notebook cell does each time it runs: define the function anew."""

    def scaled(x, *, by=2.0):
        return x * by * gain

    return scaled


def test_equal_bodies_are_one_op_whatever_the_name():
    first = register_fused("scaled", cell(1.5))
    try:
        assert register_fused("scaled", cell(1.5)) is first
        assert register_fused("scaled_again", cell(1.5)) is first
        assert fuel_jax.runtime_fused("scaled_again", jnp.ones(())) == 3
        for changed in (cell(1.25), lambda x, *, by=2.0: x * by):
            with pytest.raises(fuel_jax.ArgumentError, match="'scaled' is an op already"):
                register_fused("scaled", changed)
        with pytest.raises(fuel_jax.ArgumentError, match="another body or backward"):
            register_fused("scaled", cell(1.5), backward="none")
        other = register_fused("rescaled", cell(1.25))
        assert other.id != first.id
        unregister_fused("rescaled")
    finally:
        unregister_fused("scaled")
    assert first.id not in FUSED
    with pytest.raises(fuel_jax.UnknownName, match="no 'scaled_again'"):
        fuel_jax.runtime_fused("scaled_again", jnp.ones(()))


def test_a_changed_function_behind_an_equal_body_is_another_body(monkeypatch):
    def outer(x):
        return helper(x)  # noqa: F821  (set below)

    monkeypatch.setitem(globals(), "helper", lambda x: x + 1)
    first = register_fused("outer", outer)
    try:
        monkeypatch.setitem(globals(), "helper", lambda x: x + 1)
        assert register_fused("outer", outer) is first
        monkeypatch.setitem(globals(), "helper", lambda x: x + 2)
        with pytest.raises(fuel_jax.ArgumentError, match="another body"):
            register_fused("outer", outer)
    finally:
        unregister_fused("outer")


@pytest.mark.parametrize(
    ("name", "body", "match"),
    [
        ("softmax_last_dim", swiglu, "'softmax_last_dim' is an op already"),
        ("relu", swiglu, "'relu' is an op already"),
        ("two words", swiglu, "must be a Python identifier"),
        ("nothing", 3, "'body' is 3; it must be a function"),
        ("mixed", lambda x, *xs: x, "an op takes arrays by position"),
        ("rest", lambda x, **params: x, "an op takes arrays by position"),
    ],
)
def test_bad_registrations(name, body, match):
    with pytest.raises(fuel_jax.ArgumentError, match=match):
        register_fused(name, body)
    assert name not in [op.name for op in FUSED.values() if op.id >= 0x8000]


def test_an_unknown_op_lists_the_nearest(op):
    with pytest.raises(fuel_jax.UnknownName, match="fused op: no 'swiglo'; did you mean swiglu"):
        fuel_jax.runtime_fused("swiglo")
    with pytest.raises(fuel_jax.UnknownName, match="runtime op: no 'relu'"):
        unregister_fused("relu")


def test_parameters_that_compare_equal_are_told_apart():
    op = register_fused("shifted", lambda x, *, by: jnp.full(x.shape, by))
    try:
        zero = jnp.zeros(())
        assert op(zero, by=1).dtype == jnp.int64
        assert op(zero, by=1.0).dtype == jnp.float64
        assert not jnp.signbit(op(zero, by=0.0))
        assert jnp.signbit(op(zero, by=-0.0))
        size = op._jitted._cache_size()
        for _ in range(3):
            assert jnp.isnan(op(zero, by=float("nan")))
        assert op._jitted._cache_size() == size + 1
    finally:
        unregister_fused("shifted")
