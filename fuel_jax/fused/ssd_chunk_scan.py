"""Mamba-2's state-space recurrence by chunks, and its backward.

Within a chunk the recurrence is a masked matrix product, between chunks it is a recurrence of
states.  No array holds the states of all steps, in either direction.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .._op import Precision
from ..numerics import product_precision, wide, zeros
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Wide
from .selective_scan import wrong_state

PRECISION = Precision(float32=5e-6)


def examples():
    """A head a group, heads that share one and continue a sequence, a single step."""
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    for b, l, h, p, g, n, chunk, continued in (
        (2, 6, 2, 3, 2, 4, 3, False),
        (1, 8, 6, 2, 2, 3, 4, True),
        (1, 1, 1, 1, 1, 1, 1, True),
    ):
        yield {
            **{"x": f32(b, l, h, p), "dt": f32(b, l, h), "a": f32(h)},
            **{"b": f32(b, l, g, n), "c": f32(b, l, g, n)},
            "initial_state": f32(b, h, p, n) if continued else None,
            "chunk_size": chunk,
        }


def rejects(x, dt, a, b, c, initial_state, *, chunk_size) -> str | None:
    """Chunks that do not tile the sequence, groups that do not share out the heads."""
    length, heads, groups = x.shape[1], x.shape[2], b.shape[2]
    if chunk_size < 1 or length % chunk_size:
        return (
            f"parameter 'chunk_size' is {chunk_size} and the sequence has {length} steps; it must "
            f"be positive and divide them. Pad with steps of dt = 0, or pass another: it does not "
            f"change the result."
        )
    if heads % groups if groups else heads:
        return (
            f"'b' has {groups} groups and 'x' has {heads} heads; the heads must share the groups "
            f"equally. Repeat b and c to one group a head."
        )
    return wrong_state(x, initial_state)


def prefix_sums(x: Array) -> tuple[Array, Array]:
    """Sums of x from the start to each step, over the last axis, as unrounded pairs (high, low).

    A sum over a stretch is the difference of two of these.  Rounded they would lose what a strong
    decay before the stretch has left of their digits.
    """

    def add(left, right):
        high = left[0] + right[0]
        taken = high - left[0]
        lost = (left[0] - (high - taken)) + (right[0] - taken)
        return high, left[1] + right[1] + lost

    return lax.associative_scan(add, (x, jnp.zeros_like(x)), axis=-1)


def product(indices: str, x: Array, y: Array) -> Array:
    """A batch of matrix products."""
    return jnp.einsum(indices, x, y, precision=product_precision())


def chunk(h: Array, x: Array, dt: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """One chunk of t steps, of r heads in each of g groups.

    Args:
        h: state before it, ``[batch, g, r, n, p]``.
        x: input, ``[batch, g, r, t, p]``.
        dt: step sizes, ``[batch, g, r, t]``.
        a: decay, ``[g, r]``.
        b: input projection, ``[batch, g, t, n]``.
        c: output projection, ``[batch, g, t, n]``.

    Returns:
        The state after it, and the output ``[batch, g, r, t, p]``.
    """
    high, low = prefix_sums(dt * a[..., None])
    between = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    past = jnp.tri(dt.shape[-1], dtype=bool)
    decay = jnp.exp(jnp.where(past, between, -jnp.inf))  # from step s to step t: [… t, s]
    since_start = jnp.exp(high + low)[..., None]
    fed = x * dt[..., None]
    scores = product("bgtn,bgsn->bgts", c, b)[:, :, None] * decay
    y = product("bgrts,bgrsp->bgrtp", scores, fed)
    y += product("bgtn,bgrnp->bgrtp", c, h) * since_start
    to_end = decay[..., -1, :, None]
    after = since_start[..., -1:, :] * h + product("bgsn,bgrsp->bgrnp", b, fed * to_end)
    return after, y


def by_chunk(x: Array, groups: int, size: int) -> Array:
    """``[batch, l, heads, …]`` as ``[chunks, batch, g, r, t, …]``, in the dtype of the state."""
    batch, length, heads, *rest = x.shape
    split = wide(x).reshape(batch, length // size, size, groups, heads // max(groups, 1), *rest)
    return jnp.moveaxis(split, (1, 3, 4, 2), (0, 2, 3, 4))


def along_sequence(x: Array) -> Array:
    """The inverse of :func:`by_chunk`."""
    x = jnp.moveaxis(x, (0, 2, 3, 4), (1, 3, 4, 2))
    batch, chunks, size, groups, heads, *rest = x.shape
    return x.reshape(batch, chunks * size, groups * heads, *rest)


def in_chunks(x, dt, a, b, c, size):
    """Operands of :func:`chunk`, of every chunk, but a; and a."""
    groups = b.shape[2]
    one_a_group = lambda x: by_chunk(x, groups, size)[:, :, :, 0] if groups else None
    by_head = wide(a).reshape(groups, -1)
    return (
        by_chunk(x, groups, size),
        by_chunk(dt, groups, size),
        one_a_group(b),
        one_a_group(c),
    ), by_head
