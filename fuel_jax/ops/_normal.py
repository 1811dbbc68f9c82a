"""The normal distribution, in float32 by one exponential and one polynomial; and erf in parts."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from .._parts import splitting
from ..types import Array, Floats

# Φ(−y) = e^(−y²/2) · tP(t),  t = 1 / (1 + 0.325y),  y ≥ 0.  (The form is Hastings', 1955; a minimax
# fit of the relative error for y up to 13.5, where it is 6e-8, and P(1) is ½ to the last bit.)
TAIL_SCALE = 0.325
TAIL = (
    *(-0.017932085320353508, 0.11323076486587524, -0.2607440948486328, 0.23374629020690918),
    *(-0.06248150393366814, 0.12532855570316315, 0.1088029071688652, 0.13042820990085602),
    0.1296209841966629,
)

DENSITY = 1 / math.sqrt(2 * math.pi)  # of the middle


def bell(x: Array) -> Array:
    """e^(−x²/2)."""
    return jnp.exp(-0.5 * (x * x))


@jax.custom_jvp
def normal_cdf(x: Array) -> Array:
    """Φ(x), its tail kept.  XLA's erfc evaluates three polynomials and selects."""
    t = 1 / (1 + TAIL_SCALE * jnp.abs(x))
    p = functools.reduce(lambda p, c: p * t + c, TAIL[1:], TAIL[0])
    tail = bell(x) * (t * p)
    return jnp.where(x > 0, 1 - tail, tail)


@normal_cdf.defjvp
def normal_cdf_jvp(primals, tangents):
    """The density."""
    (x,), (t,) = primals, tangents
    return normal_cdf(x), t * (bell(x) * DENSITY)


@splitting("*shape")
def erf(x: Floats[Array, "*shape"]) -> Floats[Array, "*shape"]:
    """2/√π ∫₀ˣ e^(−t²) dt.  With JAX 0.10 XLA gathers its operand, as that of no other function."""
    return lax.erf(x)


def erf_jvp(x: Array, y: Array, t: Array) -> Array:
    """2/√π e^(−x²)."""
    return t * (2 / math.sqrt(math.pi) * jnp.exp(-(x * x)))
