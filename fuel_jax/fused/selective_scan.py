"""Mamba's selective state-space recurrence, and its backward.

Inside, states are ``[batch, n, d]``: d is the long axis, and contiguous.  No array holds the states
of all steps, in either direction.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import selective_scan as kernels, selective_scan_gradient as gradient_kernels

from .._op import Precision
from ..numerics import product_precision, wide, zeros
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Wide

PRECISION = Precision(float32=5e-6)


def examples() -> Iterator[dict[str, Any]]:
    """A fresh sequence, a continued one, and a single step."""
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    for b, l, d, n, softplus, continued in (
        (2, 7, 3, 4, True, False),
        (1, 5, 2, 3, False, True),
        (1, 1, 1, 1, True, True),
    ):
        yield {
            **{"u": f32(b, l, d), "delta": f32(b, l, d), "a": f32(d, n)},
            **{"b": f32(b, l, n), "c": f32(b, l, n)},
            "initial_state": f32(b, d, n) if continued else None,
            "delta_softplus": softplus,
        }


def rejects(u: Any, delta: Any, a: Any, b: Any, c: Any, initial_state: Any, **_: Any) -> str | None:
    """A state of another width than sums are taken in."""
    return wrong_state(u, initial_state)


def wrong_state(u: Any, state: Any) -> str | None:
    """What is wrong with an ``initial_state`` beside ``u``."""
    width = "float64" if u.dtype == jnp.float64 else "float32"
    if state is None or state.dtype == width:
        return None
    return (
        f"'initial_state' is {state.dtype.name}; beside {u.dtype.name} operands the state is "
        f"{width}. Cast it: initial_state.astype({width!r})."
    )


def step_size(delta: Array, softplus: bool) -> Array:
    """Δ."""
    return jax.nn.softplus(wide(delta)) if softplus else wide(delta)


def along_time(*arrays: Array) -> tuple[Array, ...]:
    """Time first, as ``scan`` goes; in the dtype of the state."""
    return tuple(jnp.swapaxes(wide(x), 0, 1) for x in arrays)


# A state, or its cotangent, is a sum (high, low).  Where hardly anything is forgotten exp(Δ·a) is a
# number near 1, and what it is rounded by goes one way at every step if Δ is constant: in 65,536
# steps of Δ·a near -5e-4 that adds up to 1e-4, and so does what sums of states are rounded by.
State = tuple[Array, Array]


def plus(state: State, x: Array) -> State:
    """state + x, and what rounding it has lost, by Knuth's sum of two numbers."""
    high, low = state
    x = x + low
    total = high + x
    of_x = total - high
    lost = (high - (total - of_x)) + (x - of_x)
    return total, jnp.where(jnp.isfinite(total), lost, 0)


def decayed(state: State, exponent: Array) -> State:
    """exp(Δ·a) · state: near 1 as the state and (exp(Δ·a) - 1) of it."""
    high, low = state
    keep = jnp.exp(exponent)
    slow = (jnp.abs(exponent) < 0.5) & jnp.isfinite(high)  # 0 · inf is not inf
    kept, low = plus((high, keep * low), jnp.expm1(jnp.where(slow, exponent, 0)) * high)
    return jnp.where(slow, kept, keep * high), low


def advance(h: State, decay: Array, step: Array, u: Array, b: Array) -> State:
    """The next state."""
    return plus(decayed(h, step[:, None, :] * decay), (step * u)[:, None, :] * b[:, :, None])


def total(products: str, x: Array, y: Array) -> Array:
    """A sum of products.  As a matrix product: XLA's CPU backend computes the factors once."""
    return jnp.einsum(products, x, y, precision=product_precision())


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("du", "ddelta", "da", "db", "dc", "dinitial_state"),
    splits="batch d",
    matchable=False,
)
def selective_scan_backward(
    u: Floats[Array, "batch l d"],
    delta: Floats[Array, "batch l d"],
    a: Floats[Array, "d n"],
    b: Floats[Array, "batch l n"],
    c: Floats[Array, "batch l n"],
    upstream: Floats[Array, "batch l d"],
    initial_state: Wide[Array, "batch d n"] | None = None,
    dlast_state: Wide[Array, "batch d n"] | None = None,
    *,
    delta_softplus: bool = False,
) -> tuple[Array, ...]:
    """Gradient of :func:`selective_scan`:  λₜ = cₜ·gₜ + exp(Δₜ₊₁·a)·λₜ₊₁,  backwards in time.

    λ is the cotangent of the state.  The states are computed twice: once to keep every √l-th, then
    again between two of those on the way back.

    Args:
        u: as in the forward, ``[batch, l, d]``.
        delta: as in the forward, ``[batch, l, d]``.
        a: as in the forward, ``[d, n]``.
        b: as in the forward, ``[batch, l, n]``.
        c: as in the forward, ``[batch, l, n]``.
        upstream: the cotangent ``g`` of ``y``, ``[batch, l, d]``.
        initial_state: as in the forward, ``[batch, d, n]``; zero when None.
        dlast_state: the cotangent of ``last_state``, ``[batch, d, n]``; zero when None.
        delta_softplus: as in the forward.

    Returns:
        The cotangents of ``u``, ``delta``, ``a``, ``b``, ``c`` and ``initial_state``.
    """
    length, step, decay = u.shape[1], step_size(delta, delta_softplus), wide(a).T
    given = along_time(step, u, b, c, upstream)
    start = zeros((u.shape[0], *decay.shape), step)
    first = start if initial_state is None else jnp.swapaxes(initial_state, 1, 2)
    dlast = start if dlast_state is None else jnp.swapaxes(dlast_state, 1, 2)
    ones = jnp.ones(decay.shape[0], decay.dtype)

    def forward(h, at):
        after = advance(h, decay, *at)
        return after, (h[0], after[0])

    def back(carry, at):
        state, da = carry
        (step, u, b, c, g), (before, after) = at
        state = plus(state, c[:, :, None] * g[:, None, :])
        along_b = total("bnd,bn->bd", state[0], b)
        db = total("bnd,bd->bn", state[0], step * u)
        dc = total("bnd,bd->bn", after, g)
        state = decayed(state, step[:, None, :] * decay)
        dkeep = state[0] * before
        dstep = u * along_b + total("bnd,n->bd", dkeep * decay, ones)
        return (state, da + dkeep * step[:, None, :]), (step * along_b, dstep, db, dc)

    def chunk(carry, at):
        """The gradients of a stretch of the sequence, and λ at its beginning."""
        lam, da = carry
        given, h = at
        _, states = lax.scan(forward, h, given[:3])
        (lam, part), grads = lax.scan(back, (lam, start), (given, states), reverse=True)
        return (lam, da + part), grads

    def edge(h, given):
        return lax.scan(lambda h, at: (forward(h, at)[0], None), h, given[:3])[0], h

    size = max(math.isqrt(length), 1)
    whole = length - length % size
    chunks = tuple(x[:whole].reshape(whole // size, size, *x.shape[1:]) for x in given)
    h, edges = lax.scan(edge, (first, start), chunks)
    carry, rest = chunk(((dlast, start), start), (tuple(x[whole:] for x in given), h))
    ((lam, _), da), grads = lax.scan(chunk, carry, (chunks, edges), reverse=True)
    whole_of = lambda x, y: jnp.concatenate([x.reshape(whole, *x.shape[2:]), y])
    du, dstep, db, dc = (
        jnp.swapaxes(whole_of(x, y), 0, 1) for x, y in zip(grads, rest, strict=True)
    )
    ddelta = dstep * lax.logistic(wide(delta)) if delta_softplus else dstep
    da, dfirst = jnp.sum(da, 0).T, jnp.swapaxes(lam, 1, 2)
    narrow = [x.astype(u.dtype) for x in (du, ddelta, da, db, dc)]
    return (*narrow, dfirst)


@fused_op(
    OpKind.SelectiveScan,
    id=FusedOps.SELECTIVE_SCAN,
    family="Forward",
    precision=PRECISION,
    backward=selective_scan_backward,
    outputs=("y", "last_state"),
    splits="batch d",
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def selective_scan(
    u: Floats[Array, "batch l d"],
    delta: Floats[Array, "batch l d"],
    a: Floats[Array, "d n"],
    b: Floats[Array, "batch l n"],
    c: Floats[Array, "batch l n"],
    initial_state: Wide[Array, "batch d n"] | None = None,
    *,
    delta_softplus: bool = False,
) -> tuple[Floats[Array, "batch l d"], Wide[Array, "batch d n"]]:
    """Run  h ← exp(Δ·a)·h + Δ·b·u,  y = Σₙ h·c  along the sequence.

    The state is float32 (float64 for float64 operands) and is returned unrounded, so a sequence may
    be cut anywhere and continued.  ``a`` is used as given, negative in a stable model; a step with
    Δ = 0 leaves the state as it is (with ``delta_softplus`` no finite ``delta`` does: to pad a
    sequence, take ``last_state`` before the padding).

    Args:
        u: the input, ``[batch, l, d]``.
        delta: step sizes Δ, ``[batch, l, d]``.
        a: decay of each state, ``[d, n]``.
        b: input projection, ``[batch, l, n]``.
        c: output projection, ``[batch, l, n]``.
        initial_state: h before the first step, ``[batch, d, n]``; zero when None.
        delta_softplus: take Δ = ln(1 + e^delta).

    Returns:
        The pair ``(y, last_state)``: ``[batch, l, d]`` in the dtype of ``u``, and h after the last
        step, ``[batch, d, n]`` in F32 (F64 for F64).

    Raises:
        ShapeError: ranks, axes or dtypes disagree.
        ArgumentError: ``initial_state`` is not in the dtype of the state.

    Source: Gu & Dao 2023, arXiv:2312.00752, algorithm 2, without D, z and the bias of Δ.
    """
    step, decay = step_size(delta, delta_softplus), wide(a).T
    start = zeros((u.shape[0], *decay.shape), step)
    first = start if initial_state is None else jnp.swapaxes(initial_state, 1, 2)

    def forward(h, at):
        step, u, b, c = at
        h = advance(h, decay, step, u, b)
        return h, total("bnd,bn->bd", h[0], c)

    (last, _), y = lax.scan(forward, (first, start), along_time(step, u, b, c))
    return jnp.swapaxes(y, 0, 1).astype(u.dtype), jnp.swapaxes(last, 1, 2)


# -- kernels -------------------------------------------------------------------------------


def several_steps(u: Any, *rest: Any, **params: Any) -> str | None:
    """A sequence that it does not take."""
    return None if u.shape[1] == 1 else f"{u.shape[1]} steps; it takes one"


@selective_scan.kernel("one_step", platforms=("cpu",), refuses=several_steps)
def one_step(u, delta, a, b, c, initial_state, *, delta_softplus):
    """As when decoding: the state stays in the caller's order, no axis is moved for one step."""
    step, x, b, c = (wide(z)[:, 0] for z in (delta, u, b, c))
    step = step_size(step, delta_softplus)
    h = (step * x)[:, :, None] * b[:, None]
    if initial_state is not None:
        h = jnp.exp(step[:, :, None] * wide(a)) * initial_state + h
    y = total("bdn,bn->bd", h, c)
    return y[:, None].astype(u.dtype), h


# -- on NVIDIA GPUs ------------------------------------------------------------------------

selective_scan.kernel(
    "triton",
    platforms=("cuda",),
    refuses=kernels.refuses,
    declines=kernels.declines,
    tiles=kernels.tiles,
)(kernels.forward)
selective_scan_backward.kernel(
    "triton",
    platforms=("cuda",),
    refuses=gradient_kernels.refuses_gradient,
    declines=kernels.declines,
    tiles=gradient_kernels.tiles_gradient,
)(gradient_kernels.cut_backward)


# -- as people write it --------------------------------------------------------------------


def from_zero(u: Any, delta: Any, a: Any, b: Any, c: Any, *, factors: Any, sums: Any) -> Any:
    """The op's sequence."""
    return selective_scan(u, delta, a, b, c)[0]


AXES = {"u": "b l d", "delta": "b l d", "a": "d n", "b": "b l n", "c": "b l n"}
AT_ONCE = ("in the loop", "at once")


@selective_scan.spelling(
    axes=AXES,
    call=from_zero,
    variants=[{"factors": x, "sums": y} for x in AT_ONCE for y in AT_ONCE],
    needs=("scan", "carry", "exp"),
)
def by_scan(u, delta, a, b, c, *, factors, sums):
    """By ``lax.scan``; factors, and sums over states, in the loop or for all steps at once."""

    def discrete(u, delta, b):
        return jnp.exp(delta[..., None] * a), (delta * u)[..., None] * b[..., None, :]

    def step(h, at):
        (keep, add), c = discrete(*at[:3]) if factors == "in the loop" else at[:2], at[-1]
        h = keep * h + add
        return h, jnp.sum(h * c[:, None], -1) if sums == "in the loop" else h

    given = (u, delta, b) if factors == "in the loop" else discrete(u, delta, b)
    start = jnp.zeros((u.shape[0], *a.shape), u.dtype)
    _, y = lax.scan(step, start, tuple(jnp.swapaxes(x, 0, 1) for x in (*given, c)))
    y = jnp.swapaxes(y, 0, 1)
    return y if sums == "in the loop" else jnp.sum(y * c[:, :, None], -1)
