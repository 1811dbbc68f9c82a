"""Slices and pads along an axis: programs with the same term have the same values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fuel_jax._fuse.program import flatten
from fuel_jax._fuse.rules import Reader
from fuel_jax._fuse.terms import Terms

X = np.arange(1.0, 6.0, dtype=np.float32)


def moves():
    """Ways to cut and fill a vector; None where they do not apply."""
    for start, stop in itertools.product((0, 1), (0, -2)):
        yield lambda x, a=start, b=stop: x[a : x.shape[0] + b]
    for low, high in itertools.product((-2, 0, 1, 3), repeat=2):
        yield lambda x, a=low, b=high: lax.pad(x, jnp.float32(0), [(a, b, 0)])
    yield lambda x: jnp.concatenate([jnp.zeros(2), x, jnp.zeros(1)])
    yield lambda x: jnp.concatenate([jnp.ones(1), x])
    yield lambda x: jnp.pad(x, (1, 1), constant_values=1)
    yield lambda x: lax.pad(x, jnp.float32(0), [(1, 0, 1)])
    yield lambda x: x[::2]


def test_equal_terms_are_equal_values():
    terms, seen, merged = Terms(), {}, 0
    for chain in itertools.product(moves(), repeat=2):

        def program(x, chain=chain):
            for move in chain:
                x = move(x)
                if x.shape[0] < 2:
                    raise ValueError
            return x

        try:
            flat = flatten(jax.make_jaxpr(program)(X))
        except (ValueError, TypeError):  # nothing left
            continue
        reader = Reader(terms)
        (view,) = reader.read(flat, [reader.input("x", X.shape, X.dtype)])
        value = np.asarray(program(X))
        key = view.term, view.axes
        if key in seen:
            merged += 1
            np.testing.assert_array_equal(value, seen[key])
        seen.setdefault(key, value)
    assert merged > 100, merged
