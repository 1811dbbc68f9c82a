"""Rows of a packed weight: an embedding that stays packed."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..errors import ArgumentError, ShapeError
from ..fused._gguf_blocks import FORMATS, QuantType


def take_rows(words: Array, ids: Array, *, quant_type: QuantType, k: int) -> Array:
    """Rows ``ids`` of a weight W[n, k] in GGUF blocks:  W[ids], decoded as ``qmatmul`` decodes it.

    Only these rows are read.  Under ``jit`` an id outside takes the nearest row.

    Args:
        words: the packed weight, as for :func:`fuel_jax.qmatmul`.
        ids: integers of any shape, from 0 to n − 1.
        quant_type: the weight's block format.
        k: columns of the weight.

    Returns:
        ``[*ids, k]`` float32.

    Raises:
        ShapeError: ``words`` are no vector of uint32, or ``ids`` no integers.
        ArgumentError: no such format, or ``k`` makes no whole blocks.
    """
    words, ids = jnp.asarray(words), jnp.asarray(ids)
    if words.dtype != jnp.uint32 or words.ndim != 1:
        raise ShapeError(
            f"take_rows: 'words' is {words.dtype}{list(words.shape)}; it must be uint32[words]."
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ShapeError(f"take_rows: 'ids' is {ids.dtype}; they must be integers.")
    if quant_type not in FORMATS:
        raise ArgumentError(
            f"take_rows: parameter 'quant_type' is {quant_type!r}; it must be one of "
            f"{', '.join(FORMATS)}."
        )
    form = FORMATS[quant_type]
    if k < 1 or k % form.weights:
        raise ArgumentError(
            f"take_rows: parameter 'k' is {k}; {quant_type} packs {form.weights} weights of a row "
            f"together."
        )
    row_bytes = k // form.weights * form.bytes  # even, so a row may begin in the middle of a word
    n = 4 * words.shape[0] // row_bytes
    if not n:
        raise ArgumentError(
            f"take_rows: 'words' has {words.shape[0]} words; a row of {k} weights in {quant_type} "
            f"has {row_bytes} bytes."
        )
    window = min(row_bytes // 4 + 1, words.shape[0])

    def row(i: Array) -> Array:
        half = jnp.clip(i, 0, n - 1).astype(jnp.uint32) * jnp.uint32(row_bytes // 2)
        first = jnp.minimum(half // 2, words.shape[0] - window)
        part = lax.dynamic_slice_in_dim(words, first, window)
        loose = lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)  # lowest byte first
        blocks = lax.dynamic_slice_in_dim(loose, 2 * (half - 2 * first), row_bytes)
        blocks = blocks.reshape(-1, form.bytes)
        d, m = form.scales(blocks)
        w = form.codes(blocks).astype(jnp.float32).reshape(*d.shape, -1) * d[..., None]
        return (w if m is None else w + m[..., None]).reshape(k)

    decoded = jax.vmap(row)(ids.reshape(-1))
    return decoded.reshape(*ids.shape, k)
