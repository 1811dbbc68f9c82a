"""What the threads of a warp tell each other, in programs of one warp.

An array ``[rows, columns]`` of 32 elements has one in each thread, in order; one with a third axis
has that in the thread of the first two.  So an operation between threads is one on rows or columns.
Sums of several arrays are cheaper than as many sums: at each halving a thread keeps half of what it
has and gives the rest away.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._launch import INTERPRETED, WARP, packed, triton, unpacked
from ._rows import counted

EVERY = "0xffffffff"  # thread takes part


def shuffled(x: jax.Array, mode: str, of: int, within: int) -> jax.Array:
    """PTX's ``shfl``."""
    (y,) = triton().elementwise_inline_asm(
        f"shfl.sync.{mode}.b32 $0, $1, {of}, {within}, {EVERY};",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def of_row(x: jax.Array, k: int) -> jax.Array:
    """Row ``k`` of ``x``, f32[rows, columns], in every row."""
    columns = x.shape[1]
    if INTERPRETED.value or columns == WARP:
        return jnp.broadcast_to(x[k : k + 1], x.shape)
    return shuffled(x, "idx", k * columns, (columns - 1) << 8 | WARP - 1)


def swapped(x: jax.Array, axis: int, m: int) -> jax.Array:
    """Rows or columns i and i ^ m of ``x``, f32[rows, columns], change places."""
    if INTERPRETED.value:
        pairs = x.reshape(*x.shape[:axis], -1, 2, m, *x.shape[axis + 1 :])
        return jnp.flip(pairs, axis + 1).reshape(x.shape)
    return shuffled(x, "bfly", m * (1 if axis else x.shape[1]), WARP - 1)


def over_rows(op: Callable[..., jax.Array], x: jax.Array, rows: int) -> jax.Array:
    """The first 1, 2, 4, … ``rows`` of ``x``, after which they repeat, in one: in every row."""
    m = 1
    while m < rows:
        x = op(x, swapped(x, 0, m))
        m *= 2
    return x


def summed(xs: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """Σ over rows (axis 0) or columns of each ``x``, f32[rows, columns]; of as many as 1, 2, 4, ….

    Fewer arrays than given: of n rows, row i of the k-th has the sum of ``xs[k · n + i]``; where
    there are fewer sums than rows they begin again.
    """
    xs, m = list(xs), 1
    first = counted(xs[0].shape[axis])
    first = first[None, :] if axis else first[:, None]
    while m < xs[0].shape[axis]:
        if len(xs) == 1:
            xs = [xs[0] + swapped(xs[0], axis, m)]
        else:
            mine = jnp.broadcast_to(first & m == 0, xs[0].shape)
            pairs = list(zip(xs[::2], xs[1::2], strict=True))
            keep = [jnp.where(mine, x, y) for x, y in pairs]
            give = [jnp.where(mine, y, x) for x, y in pairs]
            xs = [x + swapped(y, axis, m) for x, y in zip(keep, give, strict=True)]
        m *= 2
    return xs


def parts(x: jax.Array) -> list[jax.Array]:
    """The elements along the last axis, of which a thread has all."""
    n = x.shape[-1]
    return [y.reshape(x.shape[:-1]) for y in lax.split(x, [1] * n, axis=x.ndim - 1)]


def halves(pairs: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The two halves in each of some words of 32 bits, the lower one first, in float32."""
    if dtype != jnp.bfloat16:
        return unpacked(pairs, dtype)
    # One instruction each: bfloat16 is the upper half of float32.
    whole = lambda x: lax.bitcast_convert_type(x, jnp.float32)
    return whole(pairs << 16), whole(pairs & np.int32(-(2**16)))


def joined(xs: Sequence[jax.Array]) -> jax.Array:
    """The other way; 1, 2, 4, … of them."""
    if len(xs) == 1:
        return xs[0][..., None]
    first, second = (joined(half) for half in (xs[::2], xs[1::2]))
    pairs = lax.concatenate([first[..., None], second[..., None]], first.ndim)
    return pairs.reshape(*xs[0].shape, len(xs))


def narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 rounded to a dtype; to halves by the instruction that rounds two."""
    if INTERPRETED.value or jnp.dtype(dtype).itemsize != 2:
        return x.astype(dtype)
    words = packed(x, jnp.zeros_like(x), dtype)
    return lax.bitcast_convert_type(words.astype(jnp.int16), dtype)
