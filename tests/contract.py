"""What the contract tests share: cases, data, comparison."""

import functools
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax
from fuel_jax import _examples
from fuel_jax._examples import filled
from fuel_jax.registry import builtin

for module in filter(None, os.environ.get("FUEL_JAX_ALSO", "").split(",")):
    importlib.import_module(module)  # an op under construction, not exported yet

OPS = sorted((op for op in builtin() if isinstance(op, fuel_jax.Op)), key=lambda op: op.name)
CASES = [
    pytest.param(op, example, id=f"{op.name}-{i}")
    for op in OPS
    for i, example in enumerate(op.examples())
]


FULL = {"xla_backend_optimization_level": 3}
if jax.__version__.startswith("0.10."):
    FULL["xla_cpu_use_fusion_emitters"] = True


def compiled(f):
    """``jit``, optimised as users have it; the rest of the suite is not (``conftest.py``)."""
    return jax.jit(f, compiler_options=FULL)


def is_twin(op):
    """In-place rows share the body of a functional op, which has met the whole contract."""
    return any(other.body is op.body for other in OPS if other is not op)


def thorough(case):
    """Whether a case runs what is costly: a fused op on all its examples, a plain one on one."""
    op = case.values[0]
    first = isinstance(op, fuel_jax.FusedOp) or case.id.endswith("-0")
    return first and op not in TWINS


TWINS = [op for op in OPS if op.destructive_input is not None and is_twin(op)]
THOROUGH = [case for case in CASES if thorough(case)]


def dtypes_of(op):
    """The float dtypes under test."""
    return ("float32",) if op in TWINS else _examples.dtypes_of(op)


def fill(op, example, dtype):
    """The op with its parameters given, and data: drawn for abstract operands, cast for floats."""
    arrays, params = filled(op, example, dtype)
    return functools.partial(op, **params), [
        jax.device_put(x) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in arrays  # ``asarray`` would compile a program for each shape
    ]


def floats(op, arrays):
    """Positions of the operands a gradient can be taken of."""
    names = op.signature.names(arrays) if not op.signature.variadic else ["arrays"] * len(arrays)
    return tuple(
        i
        for i, (n, x) in enumerate(zip(names, arrays, strict=False))
        if n in op.wrt and x is not None and jnp.issubdtype(x.dtype, jnp.floating)
    )


def differentiable(op, f, arrays):
    """Whether there is anything to differentiate, and with respect to what."""
    outputs = jax.tree.leaves(jax.eval_shape(f, *arrays))
    return bool(floats(op, arrays)) and any(jnp.issubdtype(y.dtype, jnp.floating) for y in outputs)


def loss(f):
    """A scalar of every float output, in float64, ignoring −inf (the lse of an empty row)."""

    def of(*arrays):
        ys = [y for y in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(y.dtype, jnp.floating)]
        ys = [y.astype("float64") for y in ys]
        return sum(
            jnp.sum(jnp.sin(jnp.where(jnp.isneginf(y), 0, y)) * (1 + i)) for i, y in enumerate(ys)
        )

    return of


def weighted(f):
    """A scalar linear in every float output, its weights exact in any dtype: the gradient of an op
    in half precision is then compared at the same point, not at a rounded one."""

    def of(*arrays):
        ys = [y for y in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(y.dtype, jnp.floating)]
        total = jnp.zeros((), "float64")
        for i, y in enumerate(ys):
            weights = (np.arange(y.size).reshape(y.shape) * 5 + i) % 17 / 8 - 1
            y = jnp.where(jnp.isneginf(y), 0, y).astype("float64")
            total += jnp.sum(y * weights)
        return total

    return of


def to64(arrays):
    """Float operands in float64, the rest as they are.  NumPy compiles nothing for it."""
    is_float = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return [np.asarray(x, np.float64) if is_float(x) else x for x in arrays]


def close(got, want, tolerance, at_least=1e-30):
    """Compare trees by largest error, relative to the largest wanted value (or ``at_least``).

    NaN and the infinities must stand at the same places.  ``tolerance`` is a number, or a function
    of the dtype of what was got.
    """
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        bound = tolerance(g.dtype) if callable(tolerance) else tolerance
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert g.shape == w.shape
        special = ~np.isfinite(w)
        np.testing.assert_array_equal(g[special], w[special])
        assert np.isfinite(g[~special]).all(), "NaN or inf where the reference is finite"
        scale = max(np.abs(w[~special]).max(initial=0), at_least)
        error = np.abs(g[~special] - w[~special]).max(initial=0)
        assert error <= bound * scale, (
            f"off by {error / scale:.3g} of the maximum, {bound:.3g} promised"
        )


def every_output(op, f):
    """``f`` returning all the op can return."""
    return functools.partial(f, **{p: True for p in op.params if p.startswith("return_")})


def pins(op, f, arrays):
    """Every implementation that can serve here, and the op pinned to it; Pallas interpreted."""
    params, operands = op._bind(arrays, f.keywords)
    for kernel in op.kernels:
        if kernel.refuses(*operands, **params) is None:
            yield kernel, functools.partial(op.using(kernel.name), **f.keywords)


def as_arrays(arrays):
    """Python ints as the arrays they become."""
    return [np.asarray(x, np.int32) if isinstance(x, int) else x for x in arrays]
