"""Mamba's selective state-space recurrence, and its backward.

Inside, states are ``[batch, n, d]``: d is the long axis, and contiguous.  No array holds the states
of all steps, in either direction.
"""

import math
from collections.abc import Iterable, Iterator
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


# Where hardly anything is forgotten exp(Δ·a) is a number near 1, and what it is rounded by goes one
# way at every step if Δ is constant: in 65,536 steps of Δ·a near -5e-4 that adds up to 1e-4, and so
# does what sums of states are rounded by.  So a state, or its cotangent, is a sum (base, rest).
# Over a stretch of the sequence in which it forgets little the base stays, and steps change the
# rest, which is small and rounded by less.  Where more is forgotten so are errors; the base is 0.
State = tuple[Array, Array]

STRETCH = 64  # steps
LITTLE = 4.0  # the largest Σ |Δ·a| of a stretch
LARGE = 1e30  # nothing overflows that begins below it and forgets little
NEAR = 1 / 16  # exponents of which exp - 1 is off by too much
TERMS = {"float32": 4, "float64": 10}  # of its series, which is right to a rounding up to there


def begun(state: State, decay: Array, step: Array, came: Array) -> State:
    """The state at the beginning of a stretch; the base holds what forgets little in it.

    Args:
        state: as the last stretch has left it.
        decay: a, ``[n, d]``.
        step: Δ, ``[t, b, d]``.
        came: a bound of what is added, ``[b, d]``.  0 · ∞ is no 0, so that what may grow beyond all
            bounds has no base.
    """
    base, rest = state
    high = base + rest
    low = rest - (high - base)
    forgotten = jnp.sum(jnp.abs(step), 0)[:, None, :] * jnp.abs(decay)
    slow = (forgotten <= LITTLE) & (jnp.abs(high) < LARGE) & (came < LARGE)[:, None, :]
    return jnp.where(slow, high, 0), jnp.where(slow, low, high)


def decayed(base: Array, rest: Array, exponent: Array) -> Array:
    """exp(Δ·a) · (base + rest) - base, where there is a base by exp(Δ·a) - 1."""
    slow, keep = base != 0, jnp.exp(exponent)
    series = jnp.zeros_like(exponent)
    for i in range(TERMS[exponent.dtype.name], 0, -1):
        series = exponent * (series + 1 / math.factorial(i))
    less = jnp.where(slow, keep - 1, keep)
    less = jnp.where(slow & (jnp.abs(exponent) < NEAR), series, less)
    return jnp.where(slow, rest, 0) + less * (base + rest)


def advance(base: Array, rest: Array, decay: Array, step: Array, u: Array, b: Array) -> Array:
    """The rest after a step."""
    return decayed(base, rest, step[:, None, :] * decay) + (step * u)[:, None, :] * b[:, :, None]


def largest(x: Array, y: Array) -> Array:
    """What Σ over steps of x·y cannot exceed, ``[b, d]``, of ``x[t, b, d]`` and ``y[t, b, n]``."""
    of_y = jnp.max(jnp.abs(y), (0, 2), initial=0)
    return jnp.sum(jnp.abs(x), 0) * of_y[:, None]


def stretches(size: int, xs: tuple[Array, ...]) -> list[tuple[Array, ...]]:
    """The steps ``[stretch, t, …]``: stretches of that size, then the steps that are left."""
    length = len(xs[0])
    whole = length - length % size
    many = tuple(x[:whole].reshape(whole // size, size, *x.shape[1:]) for x in xs)
    few = tuple(x[None, whole:] for x in xs)
    return ([many] if whole else []) + ([few] if whole < length or not length else [])


def near_root(length: int) -> int:
    """A divisor from √length on, before 2√length, so that no steps are left, which would be another
    program to compile; if there is none, √length.
    """
    root = max(math.isqrt(length), 1)
    return next((n for n in range(root, 2 * root) if length % n == 0), root)


def joined(parts: Iterable[Array]) -> Array:
    """``[b, t, …]`` of what was found for each step of the stretches."""
    steps = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in parts]
    return jnp.swapaxes(jnp.concatenate(steps), 0, 1)


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

    λ is the cotangent of the state.  The states are computed twice: once to keep about every √l-th,
    then again between two of those on the way back.

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

    def edge(state, given):
        """The states at the end of a stretch, and how it was begun."""
        step, u, b, *_ = given
        base, rest = first = begun(state, decay, step, largest(step * u, b))
        after = lambda rest, at: (advance(base, rest, decay, *at), None)
        return (base, lax.scan(after, rest, given[:3])[0]), first

    def stretch(carry, at):
        """The gradients of a stretch, and λ at its beginning."""
        lam, da = carry
        given, (base, rest) = at
        step, _, _, c, g = given

        def forward(rest, at):
            after = advance(base, rest, decay, *at)
            return after, (base + rest, base + after)

        _, states = lax.scan(forward, rest, given[:3])
        base_lam, rest = begun(lam, decay, step, largest(g, c))

        def back(carry, at):
            rest, da = carry
            (step, u, b, c, g), (before, after) = at
            rest = rest + c[:, :, None] * g[:, None, :]
            lam = base_lam + rest
            along_b = total("bnd,bn->bd", lam, b)
            db = total("bnd,bd->bn", lam, step * u)
            dc = total("bnd,bd->bn", after, g)
            rest = decayed(base_lam, rest, step[:, None, :] * decay)
            dkeep = (base_lam + rest) * before
            dstep = u * along_b + total("bnd,n->bd", dkeep * decay, ones)
            return (rest, da + dkeep * step[:, None, :]), (step * along_b, dstep, db, dc)

        (rest, part), grads = lax.scan(back, (rest, start), (given, states), reverse=True)
        return ((base_lam, rest), da + part), grads

    parts = stretches(near_root(length), given)
    state, edges = (start, first), []
    for part in parts:
        state, found = lax.scan(edge, state, part)
        edges.append(found)
    carry, grads = ((start, dlast), start), []
    for part in reversed(list(zip(parts, edges, strict=True))):
        carry, found = lax.scan(stretch, carry, part, reverse=True)
        grads.insert(0, found)
    lam, da = carry
    du, dstep, db, dc = map(joined, zip(*grads, strict=True))
    ddelta = dstep * lax.logistic(wide(delta)) if delta_softplus else dstep
    da, dfirst = jnp.sum(da, 0).T, jnp.swapaxes(lam[0] + lam[1], 1, 2)
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

    def stretch(state, given):
        step, u, b, c = given
        # A base of 0 times an infinite c would be NaN.
        came = jnp.where(jnp.all(jnp.isfinite(c), (0, 2))[:, None], largest(step * u, b), jnp.inf)
        base, rest = begun(state, decay, step, came)

        def forward(rest, at):
            *given, c = at
            rest = advance(base, rest, decay, *given)
            return rest, total("bnd,bn->bd", rest, c)

        rest, y = lax.scan(forward, rest, given)
        return (base, rest), y + total("bnd,tbn->tbd", base, jnp.where(jnp.isfinite(c), c, 0))

    state, found = (start, first), []
    for part in stretches(STRETCH, along_time(step, u, b, c)):
        state, y = lax.scan(stretch, state, part)
        found.append(y)
    base, rest = state
    return joined(found).astype(u.dtype), jnp.swapaxes(base + rest, 1, 2)


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
