"""Recurrences in bounded memory: a sequence in chunks, of whose states only the first is kept.

A ``chunk(state, shared, inputs) -> (state, outputs)`` advances the state over a few steps.  Inputs
and outputs are trees of ``[batch, length, …]``; a state is ``[batch, …]``.  The backward goes over
the chunks from the last to the first, and runs each again from its kept state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..types import Array

Tree = Any
Chunk = Callable[[Array, Tree, Tree], tuple[Array, Tree]]


def cut(x: Array, size: int) -> Array:
    """``[batch, length, …]`` as ``[chunks, batch, size, …]``, the last one zero-padded."""
    batch, length, *rest = x.shape
    padded = jnp.pad(x, [(0, 0), (0, -length % size), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(padded.reshape(batch, -1, size, *rest), 1, 0)


def join(x: Array, length: int) -> Array:
    """The inverse of :func:`cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return lax.slice_in_dim(x.reshape(x.shape[0], -1, *x.shape[3:]), 0, length, axis=1)


def forward(
    chunk: Chunk, state: Array, shared: Tree, inputs: Tree, size: int
) -> tuple[Array, Tree, Array]:
    """The last state, the outputs, and the state each chunk begins with, ``[batch, chunks, …]``.

    A chunk must leave the state alone over the zeros that pad the last one.
    """
    length = jax.tree.leaves(inputs)[0].shape[1]

    def step(state, inputs):
        after, outputs = chunk(state, shared, inputs)
        return after, (outputs, state)

    last, (outputs, starts) = lax.scan(step, state, jax.tree.map(lambda x: cut(x, size), inputs))
    return last, jax.tree.map(lambda y: join(y, length), outputs), jnp.moveaxis(starts, 0, 1)


def backward(
    chunk: Chunk,
    starts: Array,
    shared: Tree,
    inputs: Tree,
    d_outputs: Tree,
    d_last: Array,
    d_starts: Array | None,
    size: int,
) -> tuple[Array, Tree, Tree]:
    """Cotangents of the first state, of what the chunks share, and of the inputs."""
    length = jax.tree.leaves(inputs)[0].shape[1]
    chunks = lambda tree: jax.tree.map(lambda x: cut(x, size), tree)
    along = (jnp.moveaxis(starts, 1, 0), chunks(inputs), chunks(d_outputs))
    if d_starts is not None:
        along += (jnp.moveaxis(d_starts, 1, 0),)

    def step(carry, at):
        d_state, d_shared = carry
        state, inputs, d_outputs, *d_start = at
        _, pull = jax.vjp(chunk, state, shared, inputs)
        d_state, more, d_inputs = pull((d_state, d_outputs))
        d_state = sum(d_start, d_state)
        return (d_state, jax.tree.map(jnp.add, d_shared, more)), d_inputs

    nothing = jax.tree.map(jnp.zeros_like, shared)
    (d_state, d_shared), d_inputs = lax.scan(step, (d_last, nothing), along, reverse=True)
    return d_state, d_shared, jax.tree.map(lambda x: join(x, length), d_inputs)
