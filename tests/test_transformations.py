"""The contract of an op under JAX's transformations and tools, for each op on each example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AbstractDevice, AbstractMesh

import fuel_jax

from .contract import THOROUGH, as_arrays, close, differentiable, every_output, fill, floats, loss

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
TOLERANCE = 1e-12  # one program, rearranged, in float64
FIRST = [case for case in THOROUGH if case.id.endswith("-0")]


def same(got, want, tolerance=TOLERANCE):
    close(got, want, tolerance, at_least=1)


def copies(arrays):
    """Arrays of their own, for a call that may give one up."""
    given = lambda x: x is None or isinstance(x, int)
    return [x if given(x) else jax.device_put(np.array(x)) for x in arrays]  # compiles nothing


def checkify_accepts(program, arrays, want):
    """No check fails on valid arrays, and the result is the same."""
    checked = checkify.checkify(program, errors=checkify.all_checks)
    error, got = jax.jit(checked)(*arrays)
    assert error.get() is None, error.get()
    same(got, want, 1e-9)


GRADIENTS: dict[str, object] = {}  # compiled once for all that compares with it


def gradient(op, f, arrays):
    """The gradient of ``loss``, with no transformation around it."""
    key = f"{op.name} {f.keywords}"
    if key not in GRADIENTS:
        GRADIENTS[key] = jax.jit(jax.grad(loss(f), floats(op, arrays)))
    return GRADIENTS[key](*arrays)


def half(x):
    """Another scalar of the same kind."""
    return x // 2 if jnp.issubdtype(x.dtype, jnp.integer) else x * 0.75


@pytest.mark.parametrize(("op", "example"), THOROUGH)
class TestTransformations:
    def test_jit_is_eager_and_repeats_to_the_bit(self, op, example):
        f, arrays = fill(op, example, "float64")
        y, again = f(*copies(arrays)), f(*copies(arrays))
        for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(again), strict=True):
            assert a.tobytes() == b.tobytes()
        same(jax.jit(f)(*copies(arrays)), y)

    def test_vmap_over_all_operands_is_a_loop(self, op, example):
        self.check_vmap(op, example, lambda n: [tuple(range(n))])

    def check_vmap(self, op, example, choices):
        """Values and gradients; outputs that do not depend on the batched operand included."""
        f, arrays = fill(op, example, "float64")
        f, arrays = every_output(op, f), as_arrays(arrays)
        at = floats(op, arrays) if differentiable(op, f, arrays) else ()
        both = lambda *xs: (f(*xs), jax.grad(loss(f), at)(*xs) if at else ())
        alone = jax.jit(both)
        arrays = [None if x is None else np.asarray(x) for x in arrays]  # which compiles nothing
        other = [None if x is None else x[::-1] if x.ndim else half(x) for x in arrays]
        for batched in choices(len(arrays)):
            batched = [i for i in batched if arrays[i] is not None]
            if not batched:
                continue
            axes = tuple(0 if i in batched else None for i in range(len(arrays)))
            pairs = [
                (x, y if i in batched else x)
                for i, (x, y) in enumerate(zip(arrays, other, strict=True))
            ]
            given = [np.stack(pair) if i in batched else pair[0] for i, pair in enumerate(pairs)]
            want = [alone(*xs) for xs in zip(*pairs, strict=True)]
            got = jax.jit(jax.vmap(both, axes))(*given)
            same(got, jax.tree.map(lambda *xs: np.stack(xs), *want), 1e-9)

    def test_is_traceable_without_a_device_of_its_own(self, op, example):
        f, arrays = fill(op, example, "float32")
        out = jax.eval_shape(f, *arrays)
        assert jax.tree.leaves(out) == jax.tree.leaves(op.out(*arrays, **f.keywords))

    def test_lowers_for_cuda(self, op, example):
        """On a machine without a GPU; the gradient too."""
        f, arrays = fill(op, example, "float32")
        programs = [jax.jit(f)]
        if differentiable(op, f, arrays):
            programs.append(jax.jit(jax.grad(loss(f), floats(op, arrays))))
        for program in programs:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
                program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()

    def test_checkify_passes_through(self, op, example):
        f, arrays = fill(op, example, "float64")
        checkify_accepts(f, arrays, f(*copies(arrays)))

    def test_without_x64(self, op, example):
        f, arrays = fill(op, example, "float32")
        with jax.enable_x64(False):
            out = f(*arrays)
        assert all(y.dtype.itemsize <= 4 for y in jax.tree.leaves(out))


@pytest.mark.parametrize(("op", "example"), FIRST)
class TestOnce:
    """Costly, and true of an op if it is true of one example."""

    def test_without_jit(self, op, example):
        f, arrays = fill(op, example, "float64")
        y = f(*copies(arrays))
        with jax.disable_jit():
            same(f(*copies(arrays)), y)

    def test_scan_and_checkpoint(self, op, example):
        f, arrays = fill(op, example, "float64")
        want = f(*copies(arrays))
        step = lambda carry, _: (carry, f(*arrays))
        same(jax.tree.map(lambda y: np.asarray(y)[1], lax.scan(step, 0.0, None, 2)[1]), want)
        if not differentiable(op, f, arrays):
            return
        at = floats(op, arrays)
        want = gradient(op, f, arrays)
        same(jax.jit(jax.grad(loss(jax.checkpoint(f)), at))(*arrays), want, 1e-10)
        if not isinstance(op, fuel_jax.FusedOp):
            return

        def scanned(*xs):
            return lax.scan(lambda c, _: (c + loss(f)(*xs), None), jnp.zeros(()), None, 2)[0]

        same(
            jax.jit(jax.grad(scanned, at))(*arrays),
            jax.tree.map(lambda g: 2 * np.asarray(g), want),
            1e-10,
        )

    def test_checkify_passes_through_the_gradient(self, op, example):
        f, arrays = fill(op, example, "float64")
        if not differentiable(op, f, arrays):
            pytest.skip("nothing to differentiate")
        if not isinstance(op, fuel_jax.FusedOp):
            pytest.skip("JAX's own derivative of the body")
        program = jax.grad(loss(f), floats(op, arrays))
        checkify_accepts(program, arrays, gradient(op, f, arrays))

    def test_vmap_over_each_operand_is_a_loop(self, op, example):
        if not isinstance(op, fuel_jax.FusedOp):
            pytest.skip("plain jax.numpy, batched by JAX")
        check = TestTransformations().check_vmap
        check(op, example, lambda n: [(i,) for i in range(n)] if n > 1 else [])

    def test_forward_mode_is_the_decomposition_s(self, op, example):
        f, arrays = fill(op, example, "float64")
        if not differentiable(op, f, arrays):
            pytest.skip("nothing to differentiate")
        if not isinstance(op, fuel_jax.FusedOp):
            pytest.skip("plain jax.numpy: forward mode is its own")
        at = floats(op, arrays)
        x = arrays[at[0]]
        put = lambda g: lambda x: g(*arrays[: at[0]], x, *arrays[at[0] + 1 :])
        jax.jvp(put(functools.partial(op.decompose, **f.keywords)), (x,), (x,))
        with pytest.raises(TypeError, match="forward-mode") as caught:
            jax.jvp(put(f), (x,), (x,))
        assert f"{op.name}.decompose" in str(caught.value.__notes__)

    def test_a_changing_integer_does_not_recompile(self, op, example):
        f, arrays = fill(op, example, "float64")
        traces = []
        counted = jax.jit(lambda *xs: (traces.append(1), f(*xs))[1])
        counts = [i for i, o in enumerate(op.signature.operands.values()) if o.may_be_int]
        if not counts:
            pytest.skip("takes no count")
        for n in (2, 3):
            counted(*(n if i in counts else x for i, x in enumerate(arrays)))
        assert len(traces) == 1
