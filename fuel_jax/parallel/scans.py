"""State-space recurrences over a sequence that is split: only states travel.

Every device runs its part from zero, which tells the state it adds and what it leaves of the one
before.  Those are gathered, each device finds the state before its part, and runs it from there.
"""

import jax.numpy as jnp
from jax import lax

from ..fused import selective_scan as mamba, ssd_chunk_scan as mamba2
from ..fused.selective_scan import step_size
from ..numerics import wide
from ..types import Array


def state_before(added: Array, kept: Array, initial: Array | None, axis: str) -> Array:
    """The state this device starts from: those before it, each decayed by those between.

    ``added`` and ``kept`` of all devices are gathered: twice the size of a state, times devices.
    """
    every_added, every_kept = (lax.all_gather(x, axis) for x in (added, kept))
    me = lax.axis_index(axis)
    state = jnp.zeros_like(added) if initial is None else initial
    for i in range(lax.axis_size(axis)):
        state = jnp.where(i < me, every_kept[i] * state + every_added[i], state)
    return state


def of_last(state: Array, axis: str) -> Array:
    """The state after the whole sequence, on all devices."""
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    return lax.psum(jnp.where(last, state, 0), axis)


def selective_scan(
    u: Array,
    delta: Array,
    a: Array,
    b: Array,
    c: Array,
    initial_state: Array | None = None,
    *,
    axis: str,
    delta_softplus: bool = False,
) -> tuple[Array, Array]:
    """:func:`fuel_jax.selective_scan` with l split over a mesh axis.

    One gather of states and one sum of the last; the parts of the sequence stay where they are.
    Each is run twice.

    Args:
        u: this device's steps of the input, ``[batch, l/devices, d]``; in order of the axis.
        delta: its step sizes, ``[batch, l/devices, d]``.
        a: decay of each state, ``[d, n]``.
        b: its input projection, ``[batch, l/devices, n]``.
        c: its output projection, ``[batch, l/devices, n]``.
        initial_state: h before the first step of all, ``[batch, d, n]``; zero when None.
        axis: name of the mesh axis that splits l.
        delta_softplus: as in the op.

    Returns:
        The pair ``(y, last_state)``: this device's steps, and h after the last step of all.
    """
    run = mamba.selective_scan
    _, added = run(u, delta, a, b, c, delta_softplus=delta_softplus)
    total = jnp.sum(step_size(delta, delta_softplus), 1)
    kept = jnp.exp(total[..., None] * wide(a))
    start = state_before(added, kept, initial_state, axis)
    y, last = run(u, delta, a, b, c, start, delta_softplus=delta_softplus)
    return y, of_last(last, axis)


def ssd_chunk_scan(
    x: Array,
    dt: Array,
    a: Array,
    b: Array,
    c: Array,
    initial_state: Array | None = None,
    *,
    axis: str,
    chunk_size: int = 64,
) -> tuple[Array, Array]:
    """:func:`fuel_jax.ssd_chunk_scan` with l split over a mesh axis.

    One gather of states and one sum of the last; the parts of the sequence stay where they are.
    Each is run twice.

    Args:
        x: this device's steps of the input, ``[batch, l/devices, h, p]``; in order of the axis.
        dt: its step sizes, ``[batch, l/devices, h]``.
        a: decay of each head, ``[h]``.
        b: its input projection, ``[batch, l/devices, g, n]``.
        c: its output projection, ``[batch, l/devices, g, n]``.
        initial_state: H before the first step of all, ``[batch, h, p, n]``; zero when None.
        axis: name of the mesh axis that splits l.
        chunk_size: as in the op; divides l/devices.

    Returns:
        The pair ``(y, last_state)``: this device's steps, and H after the last step of all.
    """
    run = mamba2.ssd_chunk_scan
    _, added = run(x, dt, a, b, c, chunk_size=chunk_size)
    kept = jnp.exp(jnp.sum(wide(dt), 1) * wide(a))[..., None, None]
    start = state_before(added, kept, initial_state, axis)
    y, last = run(x, dt, a, b, c, start, chunk_size=chunk_size)
    return y, of_last(last, axis)
