"""Mamba-2's state-space recurrence by chunks, and its backward.

Within a chunk the recurrence is a masked matrix product, between chunks it is a recurrence of
states.  No array holds the states of all steps, in either direction.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import ssd as kernels, ssd_gradient as gradient_kernels

from .._op import Precision
from ..numerics import product_precision, uncontracted, wide, zeros
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Wide
from .selective_scan import wrong_state

PRECISION = Precision(float32=5e-6)


def examples() -> Iterator[dict[str, Any]]:
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


def rejects(
    x: Any, dt: Any, a: Any, b: Any, c: Any, initial_state: Any, *, chunk_size: int
) -> str | None:
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

    The high parts are multiples of one power of two, so large that their sums are exact; the low
    parts are what is left.  Both are products with a triangle of ones: a parallel prefix of pairs
    would take XLA seconds to compile, in both directions.
    """
    steps, kind = x.shape[-1], jnp.finfo(x.dtype)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), -1, keepdims=True, initial=0))
    unit = jnp.ldexp(jnp.ones((), x.dtype), exponent + steps.bit_length() - kind.nmant)
    unit = jnp.maximum(unit, kind.tiny)  # below it nothing is rounded
    high = lax.stop_gradient(jnp.round(x / unit) * unit)
    past = jnp.tri(steps, dtype=x.dtype).T
    sums = lambda part: jnp.matmul(part, past, precision=lax.Precision.HIGHEST)
    return sums(high), sums(x - high)


def product(indices: str, x: Array, y: Array) -> Array:
    """A batch of matrix products."""
    return jnp.einsum(indices, x, y, precision=product_precision())


# A chunk is: the state before it h[batch, g, r, n, p], of r heads in each of g groups; the decay
# a[g, r]; and of its t steps x[batch, g, r, t, p], dt[batch, g, r, t], b and c[batch, g, t, n].
Chunk = tuple[Array, Array, Array, Array]  # x, dt, b, c


def decays(dt: Array, a: Array) -> tuple[Array, Array]:
    """What is left of the state before the chunk after each step, and of step s after step t."""
    high, low = prefix_sums(uncontracted(dt * a[..., None]))
    between = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    past = jnp.tri(dt.shape[-1], dtype=bool)
    return jnp.exp(high + low), jnp.exp(jnp.where(past, between, -jnp.inf))


def state_after(h: Array, a: Array, chunk: Chunk) -> Array:
    """The state after a chunk, like the one before it."""
    x, dt, b, _ = chunk
    kept, decay = decays(dt, a)
    fed = x * (dt * decay[..., -1, :])[..., None]
    return kept[..., -1, None, None] * h + product("bgsn,bgrsp->bgrnp", b, fed)


def outputs(h: Array, a: Array, chunk: Chunk) -> Array:
    """The outputs of a chunk, like its x."""
    x, dt, b, c = chunk
    kept, decay = decays(dt, a)
    scores = product("bgtn,bgsn->bgts", c, b)[:, :, None] * decay
    of_state = product("bgtn,bgrnp->bgrtp", c, h) * kept[..., None]
    return of_state + product("bgrts,bgrsp->bgrtp", scores, x * dt[..., None])


def step(h: Array, a: Array, chunk: Chunk) -> tuple[Array, Array]:
    """Both."""
    return state_after(h, a, chunk), outputs(h, a, chunk)


def causal_step(h: Array, a: Array, chunk: Chunk) -> tuple[Array, Array]:
    """Both, of numbers that may not be finite; the same as :func:`step` of those that are.

    A product with a score of 0 would bring NaN and infinities to steps before their own.  So they
    are taken as 0, and from their own step on the outputs are NaN.
    """
    x, dt, b, c = chunk
    steps = jnp.arange(dt.shape[-1])
    least = functools.partial(jnp.min, initial=steps.size)  # no axis need have an element
    first = lambda fine, *axes: least(
        jnp.where(fine, steps.size, jnp.expand_dims(steps, axes)), -1 - len(axes), keepdims=True
    )
    fine_x, fine_dt, fine_b = (jnp.isfinite(v) for v in (x, dt * a[..., None], b))
    per_head = first(fine_dt)[..., None]
    per_group = least(first(fine_b, 1), -1)[:, :, None, :, None]
    bad = jnp.minimum(jnp.minimum(first(fine_x, 1), per_head), per_group)
    dt_ = jnp.where(fine_dt, dt, 0)
    finite = jnp.where(fine_x, x, 0), dt_, jnp.where(fine_b, b, 0), c
    y = outputs(h, a, finite) + jnp.where(steps[:, None] < bad, 0, jnp.nan).astype(x.dtype)
    return state_after(h, a, (jnp.where(fine_dt[..., None], x, jnp.nan), dt_, b, c)), y


def by_chunk(x: Array, size: int, heads: int) -> Array:
    """``[batch, l, *heads, …]`` as ``[chunks, batch, *heads, t, …]``, in the dtype of the state."""
    batch, length, *rest = x.shape
    split = wide(x).reshape(batch, length // size, size, *rest)
    return jnp.moveaxis(split, (1, 2), (0, 2 + heads))


def along_sequence(x: Array, heads: int) -> Array:
    """The inverse of :func:`by_chunk`."""
    x = jnp.moveaxis(x, (0, 2 + heads), (1, 2))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def by_group(x: Array, axis: int, groups: int) -> Array:
    """The axis of heads split in (groups, heads in a group)."""
    heads = x.shape[axis]
    return x.reshape(*x.shape[:axis], groups, heads // max(groups, 1), *x.shape[axis + 1 :])


def steps_at_once(length: int, chunk_size: int) -> int:
    """The fewest whole chunks of 32 steps or more that tile the sequence, if 256 are enough.

    A state is rounded after each: where states grow, 16,384 chunks of 4 lose a digit to that.
    """
    sizes = range(chunk_size, 257, chunk_size)
    return next((size for size in sizes if size >= 32 and length % size == 0), chunk_size)


def chunks(x: Array, dt: Array, b: Array, c: Array, size: int) -> Chunk:
    """Every chunk, in order, along the first axis."""
    groups = b.shape[2]
    return (
        by_chunk(by_group(x, 2, groups), size, 2),
        by_chunk(by_group(dt, 2, groups), size, 2),
        by_chunk(b, size, 1),
        by_chunk(c, size, 1),
    )


def state_by_group(state: Array | None, x: Array, b: Array) -> Array:
    """``[batch, heads, p, n]``, zero when None, as ``[batch, g, r, n, p]``."""
    if state is None:
        state = zeros((x.shape[0], *x.shape[2:], b.shape[-1]), wide(x))
    return jnp.swapaxes(by_group(state, 1, b.shape[2]), -1, -2)


def state_by_head(h: Array) -> Array:
    """The inverse of :func:`state_by_group`."""
    h = jnp.swapaxes(h, -1, -2)
    return h.reshape(h.shape[0], h.shape[1] * h.shape[2], *h.shape[3:])


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dx", "ddt", "da", "db", "dc", "dinitial_state"),
    splits="batch g r h=g*r",
    matchable=False,
)
def ssd_chunk_scan_backward(
    x: Floats[Array, "batch l h p"],
    dt: Floats[Array, "batch l h"],
    a: Floats[Array, " h"],
    b: Floats[Array, "batch l g n"],
    c: Floats[Array, "batch l g n"],
    upstream: Floats[Array, "batch l h p"],
    initial_state: Wide[Array, "batch h p n"] | None = None,
    dlast_state: Wide[Array, "batch h p n"] | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Array, ...]:
    """Gradient of :func:`ssd_chunk_scan`, chunk by chunk from the last.

    The states between chunks are computed again and kept; what is inside a chunk only while its
    gradient is taken.

    Args:
        x: as in the forward, ``[batch, l, h, p]``.
        dt: as in the forward, ``[batch, l, h]``.
        a: as in the forward, ``[h]``.
        b: as in the forward, ``[batch, l, g, n]``.
        c: as in the forward, ``[batch, l, g, n]``.
        upstream: the cotangent of ``y``, ``[batch, l, h, p]``.
        initial_state: as in the forward, ``[batch, h, p, n]``; zero when None.
        dlast_state: the cotangent of ``last_state``, ``[batch, h, p, n]``; zero when None.
        chunk_size: as in the forward.

    Returns:
        The cotangents of ``x``, ``dt``, ``a``, ``b``, ``c`` and ``initial_state``.
    """
    groups = b.shape[2]
    size = steps_at_once(x.shape[1], chunk_size)
    decay = by_group(wide(a), 0, groups)
    given = chunks(x, dt, b, c, size)
    g = by_chunk(by_group(upstream, 2, groups), size, 2)

    def edge(h, chunk):
        return state_after(h, decay, chunk), h

    def back(carry, at):
        dh, ddecay = carry
        h, chunk, g = at
        dh, part, dchunk = jax.vjp(step, h, decay, chunk)[1]((dh, g))
        return (dh, ddecay + part), dchunk

    _, edges = lax.scan(edge, state_by_group(initial_state, x, b), given)
    start = (state_by_group(dlast_state, x, b), zeros(decay.shape, wide(x)))
    (dh, ddecay), grads = lax.scan(back, start, (edges, given, g), reverse=True)
    dx, ddt, db, dc = (
        along_sequence(d, heads) for d, heads in zip(grads, (2, 2, 1, 1), strict=True)
    )
    found = (dx.reshape(x.shape), ddt.reshape(dt.shape), ddecay.reshape(a.shape), db, dc)
    return (*(d.astype(x.dtype) for d in found), state_by_head(dh))


@fused_op(
    OpKind.SsdChunkScan,
    id=FusedOps.SSD_CHUNK_SCAN,
    family="Forward",
    precision=PRECISION,
    backward=ssd_chunk_scan_backward,
    outputs=("y", "last_state"),
    splits="batch g r h=g*r",
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def ssd_chunk_scan(
    x: Floats[Array, "batch l h p"],
    dt: Floats[Array, "batch l h"],
    a: Floats[Array, " h"],
    b: Floats[Array, "batch l g n"],
    c: Floats[Array, "batch l g n"],
    initial_state: Wide[Array, "batch h p n"] | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Floats[Array, "batch l h p"], Wide[Array, "batch h p n"]]:
    """Run  H ← exp(dt·a)·H + dt·x bᵀ,  y = H c  along the sequence, for each head.

    The state H is float32 (float64 for float64 operands) and is returned unrounded, so a sequence
    may be cut anywhere and continued.  ``dt`` and ``a`` are used as given: no softplus, and a
    negative in a stable model.  A step with dt = 0 leaves the state as it is.

    Args:
        x: the input, ``[batch, l, h, p]``.
        dt: step sizes, ``[batch, l, h]``.
        a: decay of each head, ``[h]``.
        b: input projection, ``[batch, l, g, n]``; h/g neighbouring heads share one of g groups.
        c: output projection, ``[batch, l, g, n]``.
        initial_state: H before the first step, ``[batch, h, p, n]``; zero when None.
        chunk_size: steps taken at once; divides l.  It changes speed and memory, not the result.
            (Of less than 32 several are taken at once.)

    Returns:
        The pair ``(y, last_state)``: ``[batch, l, h, p]`` in the dtype of ``x``, and H after the
        last step, ``[batch, h, p, n]`` in F32 (F64 for F64).

    Raises:
        ShapeError: ranks, axes or dtypes disagree.
        ArgumentError: ``chunk_size`` does not divide l, or the groups the heads; or
            ``initial_state`` is not in the dtype of the state.

    Source: Dao & Gu 2024, arXiv:2405.21060, §6 and listing 1.
    """
    decay = by_group(wide(a), 0, b.shape[2])
    last, y = lax.scan(
        lambda h, chunk: causal_step(h, decay, chunk),
        state_by_group(initial_state, x, b),
        chunks(x, dt, b, c, steps_at_once(x.shape[1], chunk_size)),
    )
    return along_sequence(y, 2).reshape(x.shape).astype(x.dtype), state_by_head(last)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

ssd_chunk_scan.kernel(
    "triton",
    platforms=("cuda",),
    refuses=kernels.refuses,
    declines=kernels.declines,
    tiles=kernels.tiles,
)(kernels.scan)
ssd_chunk_scan_backward.kernel(
    "triton",
    platforms=("cuda",),
    refuses=gradient_kernels.refuses_gradient,
    declines=gradient_kernels.declines_gradient,
    tiles=gradient_kernels.tiles_gradient,
)(gradient_kernels.cut_gradient)
