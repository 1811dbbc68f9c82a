"""Softmax, log-softmax and their backwards; ``_rows.py`` has grid, reads and writes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._launch import exp
from ._rows import (
    Block,
    Found,
    RowMaths,
    added,
    are_few,
    by_rows,
    declines_gradient as declines_gradient,
    is_short,
    is_unaligned,
    refuses as refuses,
    tiles as tiles,
    total,
)


def below(x: jax.Array, m: jax.Array) -> jax.Array:
    """exp(x − m); a maximum of −inf counts as 0, so that blocks of nothing else add nothing."""
    return exp(x - jnp.where(m == -jnp.inf, 0, m))


def exponentials(x: Block, *, count: int, inside: Any) -> Found:
    """Maximum, and Σ exp(x − maximum)."""
    m = jnp.max(x, axis=1, keepdims=True)
    return m, total(below(x, m))


def rescaled(a: Found, _: Any, b: Found, __: Any) -> Found:
    """The same of two blocks."""
    (m, s), (m_b, s_b) = a, b
    both = jnp.maximum(m, m_b)
    return both, s * below(m, both) + s_b * below(m_b, both)


SOFTMAX = RowMaths(
    "softmax",
    -jnp.inf,
    exponentials,
    rescaled,
    # A row of −inf: 0 · (1 / 0), which is NaN.
    lambda found, x, *, n: below(x, found[0]) * (1 / found[1]),
)
LOG_SOFTMAX = RowMaths(
    "log_softmax",
    -jnp.inf,
    exponentials,
    rescaled,
    lambda found, x, *, n: x - found[0] - jnp.log(found[1]),
)
SOFTMAX_BACKWARD = RowMaths(
    "softmax_backward",
    0.0,
    lambda y, g, **_: (total(y * g),),
    added,
    lambda found, y, g, *, n: y * (g - found[0]),
)
LOG_SOFTMAX_BACKWARD = RowMaths(
    "log_softmax_backward",
    0.0,
    lambda y, g, **_: (total(g),),
    added,
    lambda found, y, g, *, n: g - exp(y) * found[0],
)


def of(maths: RowMaths) -> Callable[..., jax.Array]:
    """The kernel for some maths, with an op's signature."""

    def run(*arrays: jax.Array, interpret: bool = False, **params: Any) -> jax.Array:
        return by_rows(maths, *arrays, interpret=interpret, **params)

    return run


softmax, log_softmax = of(SOFTMAX), of(LOG_SOFTMAX)
softmax_backward, log_softmax_backward = of(SOFTMAX_BACKWARD), of(LOG_SOFTMAX_BACKWARD)


def declines(x: Any) -> str | None:
    """Where XLA's softmax is as fast."""
    return is_short(x) or is_unaligned(x, 1) or are_few(x, 1)
