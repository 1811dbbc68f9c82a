"""A function, and the same function through ``fuse``."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

import fuel_jax

# Both sides keep their ops within 5e-6 of float64, relative to the largest value; a few ops follow
# one another in each program, and their differences add up.  A wrong op is off by far more.
# Halves: a few units in the last place of what the program rounds in between, and the op does not.
WITHIN = {"f32": 1e-5, "bf16": 0.04, "f16": 5e-3}

# The maths is judged, not the code: most of the time would go into optimising it.
QUICKLY = {"xla_backend_optimization_level": 0}


def found(fn, args):
    """How many of each op ``fuse`` puts into the program."""
    return dict(collections.Counter(r.op for r in fuel_jax.fuse.report(fn)(*args).replaced))


def filled(tree, seed=20_26):
    """Every float array by normal numbers: a gain of 1 or a bias of 0 would hide what is wrong."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if not is_float(x):
            return x
        return jax.device_put((0.5 * rng.normal(size=x.shape)).astype(x.dtype))  # compiles nothing

    return jax.tree.map(fill, tree)


def is_float(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def assert_agree(fn, args):
    """Values, and gradients with regard to every float array, agree."""
    expected, actual = (evaluated(f, args) for f in (fn, fuel_jax.fuse(fn)))
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    program = str(jax.make_jaxpr(fn)(*args))
    within = next((WITHIN[t] for t in ("bf16", "f16") if f"{t}[" in program), WITHIN["f32"])
    # What a bias of the keys contributes cancels in a softmax; so a gradient that is 0 but for
    # rounding is held to the others.
    for theirs, ours in zip(expected, actual, strict=True):
        scale = max((np.abs(x).max(initial=0) for x in theirs), default=0)
        for a, b in zip(theirs, ours, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.float64(b), np.float64(a), rtol=0, atol=within * scale)


def evaluated(fn, args):
    """Float results, and the gradient of a weighted sum of them."""
    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, x in enumerate(leaves) if is_float(x)]

    def weighted(given):
        some = list(leaves)
        for i, x in zip(floats, given, strict=True):
            some[i] = x
        results = [y for y in jax.tree.leaves(fn(*tree.unflatten(some))) if is_float(y)]
        total = jnp.float32(0)
        for y in results:
            weights = jnp.cos(1 + jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            total += jnp.sum(y.astype(jnp.float32) * weights)
        return total, results

    both = jax.jit(jax.grad(weighted, has_aux=True), compiler_options=QUICKLY)
    grads, results = both([leaves[i] for i in floats])
    return results, grads
