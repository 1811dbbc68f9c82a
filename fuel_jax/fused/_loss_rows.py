"""The gradient of the cross entropy on the CPU, a few rows of logits at a time."""

import jax.numpy as jnp
from jax import lax

from .._parts import splitting
from ..numerics import wide
from ..types import Array, Floats, Indices, Mask, Wide
from ._rows import Rows


@splitting("*rows")
def slopes_by_rows(
    logits: Floats[Array, "*rows v"],
    label: Indices[Array, "*rows"],
    lse: Wide[Array, "*rows"],
    weight: Wide[Array, "*rows"],
    g: Wide[Array, "*rows"],
    unused: Mask[Array, "*rows"],
) -> Floats[Array, "*rows v"]:
    """Of the logits, from what the cross entropy's ``of_rows`` says.

    exp(logits − lse) sums to 1 within 1e-6 as long as lse is small: the sums are formed only if it
    is not.
    """
    if logits.size == 0:
        return jnp.zeros_like(logits)
    rows = Rows(logits)
    label, lse, weight, g, unused = (x.ravel() for x in (label, lse, weight, g, unused))
    inexact = jnp.isfinite(lse) & (jnp.abs(lse) > 32)
    each = lambda v, lse: (jnp.sum(jnp.exp(v - lse[:, None]), -1),)
    total = lax.cond(
        jnp.any(inexact),
        lambda: jnp.where(inexact, rows.map(each, lse)[0], 1),
        lambda: jnp.ones_like(lse),
    )
    scale = weight / total

    def slope(v: Array, lse: Array, scale: Array, less: Array | float, unused: Array) -> Array:
        v = jnp.maximum(v, jnp.finfo(v.dtype).min)  # as in the body
        return jnp.where(unused, 0, jnp.exp(v - lse) * scale - less).astype(logits.dtype)

    column = lambda x: x[:, None]
    if logits.dtype.itemsize == 2:  # XLA's CPU backend widens what is scattered to
        here = jnp.arange(logits.shape[-1], dtype=jnp.int32) == column(label)
        less = jnp.where(here, column(g), 0)
        v = wide(rows.matrix)
        d = slope(v, column(lse), column(scale), less, column(unused))
    else:
        d = slope(rows.matrix, column(lse), column(scale), 0.0, column(unused))
        place = jnp.where(label < 0, logits.shape[-1], label)
        here = slope(rows.at(jnp.maximum(label, 0)), lse, scale, g, unused)
        d = d.at[jnp.arange(len(d)), place].set(here, mode="drop", unique_indices=True)
    return d.reshape(logits.shape)
