"""Functions with derivatives of their own; x times a sigmoid of x, which needs them most."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..types import Array
from ._normal import DENSITY, bell, normal_cdf

Jvp = Callable[..., Array]  # of x, the result and the tangent


def with_jvp(f: Callable[[Array], Array], jvp: Jvp | None) -> Callable[[Array], Array]:
    """``f`` with a derivative of its own; forward mode and higher orders work."""
    if jvp is None:
        return f
    core = jax.custom_jvp(f)

    @core.defjvp
    def _(primals, tangents):
        y = core(*primals)
        return y, jvp(*primals, y, *tangents)

    return core


def with_partials(f: Callable[..., Array], *partials: Jvp) -> Callable[..., Array]:
    """``f`` of two arrays, with derivatives of its own, each of both, the result and a tangent."""
    core = jax.custom_jvp(f)

    def jvp(primals, tangents):
        y = core(*primals)
        terms = [
            partial(*primals, y, t)
            for partial, t in zip(partials, tangents, strict=True)
            if not isinstance(t, SymbolicZero)  # which is NaN times an infinite slope
        ]
        return y, sum(terms, start=jnp.zeros_like(y))

    core.defjvp(jvp, symbolic_zeros=True)
    return core


def saturating(x: Array, slope: Array) -> Array:
    """x · slope for a slope that falls to 0 where x grows: 0 there, not ∞·0."""
    return jnp.where(slope == 0, 0, x * slope)


# -- SiLU and GELU --------------------------------------------------------------------------


def silu_jvp(x: Array, y: Array, t: Array) -> Array:
    """σ + x·σ(1 − σ); 1 and 0 at ±inf."""
    s = lax.logistic(x)
    return t * (s + saturating(x, s * (1 - s)))


silu_core = jax.custom_jvp(lambda x: x / (1 + jnp.exp(-x)))
# x·σ where σ is needed anyway: one division less.
silu_by_sigmoid = with_jvp(lambda x: x * lax.logistic(x), silu_jvp)
silu_core.defjvp(functools.partial(jax.jvp, silu_by_sigmoid))


def gelu_core(x: Array) -> Array:
    """½x·erfc(−x/√2): 1 + erf would cancel below −4."""
    return 0.5 * x * lax.erfc(-x * math.sqrt(0.5))


def gelu_jvp(x: Array, y: Array, t: Array) -> Array:
    """Φ(x) + x·φ(x); 1 and 0 at ±inf.  XLA shares the exponential with erfc's own."""
    u = -x * math.sqrt(0.5)
    density = jnp.exp(-(u * u)) * (1 / math.sqrt(2 * math.pi))
    return t * (0.5 * lax.erfc(u) + saturating(x, density))


FLAT = {"float32": 10.05, "float64": 21.15}  # e^(2u) is finite there, and 1/e^(2u) flushed to 0
TANH_SCALE, CUBE = math.sqrt(2 / math.pi), 0.044715  # Hendrycks & Gimpel 2016, arXiv:1606.08415


def gelu_tanh_decay(x: Array) -> Array:
    """e^(−2u)."""
    return jnp.exp(x * (-2 * TANH_SCALE - 2 * TANH_SCALE * CUBE * (x * x)))


def gelu_tanh_core(x: Array) -> Array:
    """½x(1 + tanh u),  u = √(2/π)(x + 0.044715x³).  As x·σ(2u): 1 + tanh cancels below −3."""
    return x / (1 + gelu_tanh_decay(x))


def gelu_tanh_bend(x: Array) -> Array:
    """x·2u′."""
    return x * (2 * TANH_SCALE + 6 * TANH_SCALE * CUBE * (x * x))


def gelu_tanh_slope_within(x: Array) -> Array:
    """As ``gelu_tanh_slope``, of x within FLAT: so it has finite derivatives of every order.

    Beyond FLAT e^(−2u) would leave the range of numbers, and the slope is that at infinity.
    """
    end = jnp.asarray(FLAT[x.dtype.name], x.dtype)
    v = lax.clamp(-end, x, end)
    e = gelu_tanh_decay(v)
    s = 1 / (1 + e)
    return s + gelu_tanh_bend(v) * ((e * s) * s)


@jax.custom_jvp
def gelu_tanh_slope(x: Array) -> Array:
    """σ(2u) + x·σ(2u)σ(−2u)·2u′; 1 and 0 at ±inf.

    By the exponential that the value has, stored: XLA's CPU backend wakes a second thread for 4096
    numbers where a loop has more operations than bytes, and that takes longer than the numbers.
    """
    e = gelu_tanh_decay(x)
    s = 1 / (1 + e)
    return s + saturating(gelu_tanh_bend(x), (jnp.minimum(e, jnp.finfo(e.dtype).max) * s) * s)


@gelu_tanh_slope.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return gelu_tanh_slope(*primals), jax.jvp(gelu_tanh_slope_within, primals, tangents)[1]


def gelu_tanh_jvp(x: Array, y: Array, t: Array) -> Array:
    """By ``gelu_tanh_slope``."""
    return t * gelu_tanh_slope(x)


# In float32 on the CPU:


def gelu_by_tail_jvp(x: Array, y: Array, t: Array) -> Array:
    """Φ(x) + x·φ(x); 1 and 0 at ±inf.  XLA shares the exponential."""
    return t * (normal_cdf(x) + saturating(x, bell(x) * DENSITY))


gelu_by_tail: Callable[[Array], Array] = with_jvp(lambda x: x * normal_cdf(x), gelu_by_tail_jvp)
