"""The contract of an op: values, gradients, its page.

A new op is covered the moment it is declared with ``examples``: nothing here names an op.
"""

import contextlib
import copy
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax

from .contract import (
    CASES,
    OPS,
    THOROUGH,
    TWINS,
    close,
    compiled,
    differentiable,
    dtypes_of,
    every_output,
    fill,
    floats,
    loss,
    pins,
    to64,
    weighted,
)


def case(op, example, dtype):
    """The op with every output, and its data."""
    f, arrays = fill(op, example, dtype)
    return every_output(op, f), arrays


def example_is_first(op, example):
    return str(example) == str(next(iter(op.examples())))


def needs_gradient(op, f, arrays):
    if not differentiable(op, f, arrays):
        pytest.skip(f"{op.name} has no gradient")


@contextlib.contextmanager
def told(dtype):
    """A failure says in which dtype."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"in {dtype}")
        raise


REFERENCES: dict[str, object] = {}  # compiled once for all dtypes


def reference(op, f, at=None):
    """The decomposition, or its gradient at some operands, compiled."""
    key = f"{op.name} {f.keywords} {at}"
    if key not in REFERENCES:
        plain = functools.partial(op.decompose, **f.keywords)
        REFERENCES[key] = jax.jit(plain if at is None else jax.grad(weighted(plain), at))
    return REFERENCES[key]


def side_by_side(op, f, program):
    """``program`` of the op and of its decomposition, compiled as one."""
    plain = functools.partial(op.decompose, **f.keywords)
    return jax.jit(lambda *xs: (program(f)(*xs), program(plain)(*xs)))


def as_users_have_it(dtype, kernel):
    """Whether code compiled in full is what anybody runs; an interpreted kernel is not."""
    interpreted = bool(kernel.platforms) and "cpu" not in kernel.platforms
    return dtype in ("float32", "bfloat16") and not interpreted


def at_once(op, cases, program, in_full=lambda dtype, kernel: False):
    """``(dtype, case, implementation's result)`` of some dtypes: one program compiles sooner.

    What is to be compiled in full (see ``conftest.py``) is one of its own.
    """
    data = {dtype: arrays for dtype, (_, arrays) in cases.items()}
    each = {compiled: [], jax.jit: []}
    for dtype, of in cases.items():
        for kernel, pin in pins(op, *of):
            each[compiled if in_full(dtype, kernel) else jax.jit].append((dtype, pin))
    for jit, some in [(jit, some) for jit, some in each.items() if some]:
        results = jit(lambda data, some=some: [program(pin)(*data[d]) for d, pin in some])(data)
        for (dtype, _), result in zip(some, results, strict=True):
            yield dtype, *cases[dtype], jax.tree.leaves(result)


@pytest.mark.parametrize(("op", "example"), CASES)
class TestValues:
    def test_every_implementation_keeps_its_promise(self, op, example):
        """Promised shapes and dtypes, within the declared precision of float64, in every dtype."""
        cases = {dtype: case(op, example, dtype) for dtype in dtypes_of(op)}
        if not example_is_first(op, example):
            cases.pop("float16", None)  # bfloat16 takes the same casts; the range shows on one
        for dtype, f, arrays, got in at_once(op, cases, lambda pin: pin, as_users_have_it):
            promised = jax.tree.leaves(op.out(*arrays, **f.keywords))
            assert [(y.shape, y.dtype) for y in got] == [(y.shape, y.dtype) for y in promised]
            with told(dtype):
                close(got, reference(op, f)(*to64(arrays)), op.precision.tolerance)

    def test_gradient_is_the_decomposition_s(self, op, example):
        """In float32; a fused op, which has casts of its own, in bfloat16 on its first example.

        bfloat16 stands for both halves, and float64 meets finite differences.
        """
        f, arrays = case(op, example, "float32")
        needs_gradient(op, f, arrays)
        if op in TWINS:
            pytest.skip("the gradient of its functional twin, which is tested")
        at = floats(op, arrays)
        cases = {"float32": (f, arrays)}
        if isinstance(op, fuel_jax.FusedOp) and example_is_first(op, example):
            cases |= {d: case(op, example, d) for d in dtypes_of(op) if d == "bfloat16"}
        slope = lambda pin: jax.grad(weighted(pin), at)
        for dtype, f, arrays, got in at_once(op, cases, slope):
            want = reference(op, f, at)(*to64(arrays))
            assert [g.dtype for g in got] == [arrays[i].dtype for i in at]
            # What a backward reads of the forward's result was rounded too; gradients may cancel.
            with told(dtype):
                close(got, want, lambda dtype: 8 * op.precision.tolerance(dtype), at_least=1)


@pytest.mark.parametrize(("op", "example"), THOROUGH)
class TestGradients:
    def test_finite_differences_twice(self, op, example):
        if not example_is_first(op, example):
            pytest.skip("the body is JAX's to differentiate; once is enough to check that")
        f, arrays = case(op, example, "float64")
        needs_gradient(op, f, arrays)
        at = floats(op, arrays)
        outputs = jax.tree.leaves(jax.eval_shape(f, *arrays))
        if any(y.dtype == jnp.float32 for y in outputs):
            pytest.skip(f"{op.name} rounds its result to float32: differences are too coarse")

        rng = np.random.default_rng(20_26)
        xs = tuple(np.asarray(arrays[i]) for i in at)
        along = tuple(rng.normal(size=x.shape) for x in xs)

        def value(xs):
            given = dict(zip(at, xs, strict=True))
            return loss(f)(*(given.get(i, x) for i, x in enumerate(arrays)))

        def slope(xs):
            y, grads = jax.value_and_grad(value)(xs)
            return sum(jnp.vdot(g, v) for g, v in zip(grads, along, strict=True)), (y, grads)

        twice = jax.jit(jax.grad(slope, has_aux=True))  # one program for all there is to know
        moved = lambda by: tuple(x + by * v for x, v in zip(xs, along, strict=True))
        (curved, (_, grads)), (_, ahead), (_, behind) = map(twice, (xs, moved(1e-4), moved(-1e-4)))
        sloped = sum(np.vdot(g, v) for g, v in zip(grads, along, strict=True))
        of_value, of_grads = jax.tree.map(
            lambda a, b: (a - b) / 2e-4, *jax.tree.map(np.asarray, (ahead, behind))
        )
        for got, want in zip((sloped, *curved), (of_value, *of_grads), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4, equal_nan=False)

    def test_second_derivative_is_the_decomposition_s(self, op, example):
        if not isinstance(op, fuel_jax.FusedOp):
            pytest.skip("the same program")
        f, arrays = case(op, example, "float64")
        needs_gradient(op, f, arrays)
        at = floats(op, arrays)

        def slope(f):
            grads = lambda *xs: jax.tree.map(jnp.sin, jax.grad(loss(f), at)(*xs))
            return jax.grad(lambda *xs: sum(map(jnp.sum, grads(*xs))), at)

        got, want = side_by_side(op, f, slope)(*arrays)
        close(got, want, 1e4 * op.precision.tolerance("float64"), at_least=1)

    def test_unused_outputs_are_free(self, op, example):
        """Differentiating through one output of several needs no cotangent of the others."""
        f, arrays = case(op, example, "float64")
        needs_gradient(op, f, arrays)
        at = floats(op, arrays)
        outputs = jax.tree.leaves(jax.eval_shape(f, *arrays))
        if len(outputs) == 1:
            pytest.skip("one output")

        def slopes(f):
            only = [lambda *xs, i=i: jax.tree.leaves(f(*xs))[i] for i in range(len(outputs))]
            return lambda *xs: [jax.grad(loss(y), at)(*xs) for y in only]

        got, want = side_by_side(op, f, slopes)(*arrays)
        for g, w in zip(got, want, strict=True):
            close(g, w, 8 * op.precision.tolerance("float64"), at_least=1)

    def test_frozen_operands_raise_and_integers_do_not(self, op, example):
        f, arrays = fill(op, example, "float64")
        if op.signature.variadic:
            pytest.skip("operands have no names of their own")
        at = floats(op, arrays)
        for i, (name, x) in enumerate(zip(op.inputs, arrays, strict=False)):
            if not hasattr(x, "dtype"):
                continue
            if not jnp.issubdtype(x.dtype, jnp.floating):
                if at:
                    zero = jax.grad(loss(f), i, allow_int=True)(*arrays)
                    assert zero.dtype == jax.dtypes.float0
            elif name not in op.wrt:
                with pytest.raises(fuel_jax.NotDifferentiable, match=f"no gradient for '{name}'"):
                    jax.grad(loss(f), i)(*arrays)
                with pytest.raises(fuel_jax.NotDifferentiable, match=name):
                    jax.jit(jax.grad(loss(f), i))(*arrays)


@pytest.mark.parametrize(("op", "example"), THOROUGH)
class TestAsking:
    def test_explain_serves_somebody(self, op, example):
        f, arrays = fill(op, example, "float32")
        said = op.explain(*arrays, **f.keywords)
        assert said.forward[-1].kernel.name == "xla"
        assert any("default" in choice.serves for choice in said.forward)
        assert str(said).startswith(op.name)
        with fuel_jax.using("xla"):
            assert op.explain(*arrays, **f.keywords).forward[-1].serves == ("default",)

    def test_cost_counts_bytes(self, op, example):
        f, arrays = fill(op, example, "float32")
        assert op.cost(*arrays, **f.keywords).bytes >= sum(getattr(x, "nbytes", 0) for x in arrays)

    def test_output_views_name_every_output(self, op, example):
        f, arrays = fill(op, example, "float32")
        views = op.output_views(*arrays, **f.keywords)
        promised = jax.tree.leaves(op.out(*arrays, **f.keywords))
        assert [(v.shape, v.dtype) for v in views] == [(y.shape, y.dtype) for y in promised]
        assert {v.name for v in views} <= set(op.outputs)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
class TestPage:
    def test_has_examples(self, op):
        assert list(op.examples())

    def test_has_the_signature_of_its_body(self, op):
        assert inspect.signature(op) == inspect.signature(op.adapt or op.body)
        assert op.__name__ == op.name

    def test_is_copied_and_pickled_by_name(self, op):
        assert pickle.loads(pickle.dumps(op)) is op
        assert copy.deepcopy({"op": op})["op"] is op

    def test_docstring_covers_every_argument(self, op):
        doc = inspect.getdoc(op)
        assert "Args:" in doc
        assert "Returns:" in doc
        for name in inspect.signature(op).parameters:
            assert f"{name}: " in doc

    def test_declares_a_bound_the_house_allows(self, op):
        fused = isinstance(op, fuel_jax.FusedOp)
        assert op.precision.float32 <= (5e-6 if fused else 2e-6)

    def test_unknown_arguments_are_an_error_of_ours(self, op):
        with pytest.raises(fuel_jax.SignatureError, match=op.name):
            op(nonsense=1)


@pytest.mark.parametrize(
    "op", [op for op in OPS if isinstance(op, fuel_jax.FusedOp)], ids=lambda op: op.name
)
class TestFused:
    def test_is_a_custom_vjp_function(self, op):
        assert isinstance(op, jax.custom_vjp)

    def test_backward_asks_only_for_what_exists(self, op):
        if isinstance(op.backward, str):
            pytest.skip("derived")
        known = {*op.inputs, *op.outputs, *(f"d{n}" for n in op.outputs), "upstream"}
        assert known.issuperset(op.backward.inputs)
        assert set(op.params).issuperset(op.backward.params)
