"""Attention over a paged key-value cache, for decoding.

Axes: b sequences, h query heads, hk key heads, sq queries, d width of q and k, dv width of v; the
cache has n blocks of bs tokens, a sequence at most m of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._op import Precision
from ..numerics import wide, zeros
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Indices
from . import _attention as maths, _attention_tiles as tiles, _attention_triton as triton
from ._attention import Places, Rules

STEP = 512  # tokens of a sequence that the kernel reads at a time
DENSE_BYTES = 4 << 20  # a copy of the sequences' keys and values up to this size is made at once


def examples() -> Iterator[dict[str, Any]]:
    """Two sequences that share a block, in blocks of 3; every option, and an empty sequence."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    off = {"alibi": None, "softmax_scale": None, "block_size": None, "softcap": None}
    yield {
        **{"q": f32(2, 4, 1, 8), "k_cache": f32(6, 3, 2, 8), "v_cache": f32(6, 3, 2, 5)},
        "block_table": np.array([[4, 1, 0], [4, 3, 2**32 - 1]], np.uint32),
        "context_lens": np.array([8, 5], np.uint32),
        **off,
    }
    yield {
        **{"q": f32(3, 2, 3, 4), "k_cache": f32(4, 2, 1, 4), "v_cache": f32(4, 2, 1, 4)},
        "block_table": np.array([[0, 3], [99, -1], [2, -7]], np.int32),
        "context_lens": np.array([4, 0, 2], np.int32),
        **{**off, "alibi": f32(2), "softmax_scale": 0.7, "block_size": 2, "softcap": 2.0},
    }


def rejects(
    q: Any, k_cache: Any, v_cache: Any, *rest: Any, block_size: int | None, **params: Any
) -> str | None:
    """A block size other than the cache's, and what any attention rejects."""
    if block_size is not None and block_size != k_cache.shape[1]:
        return (
            f"parameter 'block_size' is {block_size}, and 'k_cache' has blocks of "
            f"{k_cache.shape[1]}; they must agree. Leave it out."
        )
    # Heads are the third axis of a cache, and the second of everything else.
    k = jax.ShapeDtypeStruct((*k_cache.shape[:1], k_cache.shape[2]), k_cache.dtype)
    reason = maths.rejects(q, k, k, **params)
    return None if reason is None else reason.replace("'k'", "'k_cache'")


class Pages(NamedTuple):
    """Where the tokens of each sequence lie."""

    ids: Array  # [b, m] I32; any block where there is nothing to read
    lengths: Array  # [b] I32; 0 where invalid
    valid: Array  # [b]

    @classmethod
    def of(cls, blocks: int, size: int, table: Array, lens: Array) -> Pages:
        """Check what will be read, and forget what won't."""
        m = table.shape[1]
        lengths, fits = maths.within(lens, m * size + 1)
        used = maths.count(m) * size < lengths[:, None]
        ids, known = maths.within(table, blocks)
        valid = fits & jnp.all(known | ~used, 1)
        return cls(jnp.where(used & known, ids, 0), jnp.where(valid, lengths, 0), valid)


def expects(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    context_lens: Any,
    *rest: Any,
    **params: Any,
) -> Any:
    """Lengths that the table holds, and blocks that are there."""
    (n, size), m = k_cache.shape[:2], block_table.shape[1]
    lengths, fits = maths.within(context_lens, m * size + 1)
    used = maths.count(m) * size < lengths[:, None]
    _, known = maths.within(block_table, n)
    return jnp.all(fits) & jnp.all(known | ~used)


def read(cache: Array, ids: Array) -> Array:
    """Blocks ``[b, m]`` of a cache as ``[b, hk, m·bs, d]``."""
    (b, m), (n, size, hk, d) = ids.shape, cache.shape
    if n == 0:
        return jnp.zeros((b, hk, m * size, d), cache.dtype)
    pages = cache.at[ids].get(mode="promise_in_bounds")
    return jnp.moveaxis(pages.reshape(b, m * size, hk, d), 2, 1)


@fused_op(
    OpKind.PagedAttn,
    id=FusedOps.PAGED_ATTN,
    family="Attention",
    precision=Precision(float32=5e-6),
    backward="none",
    outputs=("o",),
    splits="b hk r h=hk*r",
    rejects=rejects,
    expects=expects,
    matchable=False,
    examples=examples,
)
def paged_attn(
    q: Floats[Array, "b h sq d"],
    k_cache: Floats[Array, "n bs hk d"],
    v_cache: Floats[Array, "n bs hk dv"],
    block_table: Indices[Array, "b m"],
    context_lens: Indices[Array, " b"],
    alibi: Floats[Array, " h"] | None = None,
    *,
    softmax_scale: float | None = None,
    block_size: int | None = None,
    softcap: float | None = None,
) -> Floats[Array, "b h sq dv"]:
    """softmax(mask(cap(q·kᵀ·scale) − alibi·|distance|)) · v,  keys and values read by block.

    Scores and sums in float32 (float64 for float64 operands), rounded once; on NVIDIA GPUs weights
    are rounded to halves before they meet values in halves.  Token t of a sequence lies in its
    block ``block_table[t // bs]``, at ``t % bs``.  Causal: query i stands at position
    i + context_len − sq.  One that stands before the first token, or in an empty sequence, gives 0.
    Entries of the table and tokens of a block beyond the length are never read.  Blocks may be
    shared.  Not differentiable.

    Args:
        q: the newest tokens' queries, ``[b, h, sq, d]``.
        k_cache: ``[n, bs, hk, d]``; query head i reads key head i // (h / hk).
        v_cache: ``[n, bs, hk, dv]``.
        block_table: blocks of each sequence in order, ``[b, m]``.  Where one in use is outside
            0 … n − 1 the result of the sequence is NaN (an error under checkify).
        context_lens: tokens of each sequence, the newest included, ``[b]``.  Beyond m · bs the
            result of the sequence is NaN (an error under checkify).
        alibi: slope of each query head, ``[h]``, or None.
        softmax_scale: factor on q·kᵀ; None is 1/√d.
        block_size: tokens in a block; None is what the cache has, and nothing else fits.
        softcap: bound c on scores, c·tanh(s/c); None is off.

    Returns:
        ``[b, h, sq, dv]`` like ``q``.

    Raises:
        ShapeError: operands that do not fit.
        ArgumentError: another block size than the cache's, heads that do not divide, a soft cap of
            0 or less.

    Source: Kwon et al. 2023, arXiv:2309.06180.
    """
    sq, (n, size, hk, _), m = q.shape[2], k_cache.shape, block_table.shape[1]
    pages = Pages.of(n, size, block_table, context_lens)
    o, _ = maths.normalised(
        *maths.attend(
            wide(maths.grouped(q, hk)) * maths.scale_of(q, softmax_scale),
            wide(read(k_cache, pages.ids)),
            wide(read(v_cache, pages.ids)),
            maths.slopes_of(alibi, hk),
            Places.of(sq, m * size, pages.lengths),
            Rules(None, 0, softcap),
        )
    )
    return maths.nan_unless(pages.valid, maths.ungrouped(o).astype(q.dtype))


# -- a kernel in bounded memory ----------------------------------------------------------------


def declines(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, *rest: Any, **params: Any
) -> str | None:
    """Why one copy of all keys and values will do."""
    _, size, hk, d = k_cache.shape
    tokens = block_table.shape[0] * block_table.shape[1] * size
    copied = tokens * hk * (d + v_cache.shape[-1]) * 4
    if copied > DENSE_BYTES:
        return None
    return f"a copy takes {copied / 2**20:.2g} MiB; steps begin at {DENSE_BYTES >> 20} MiB"


def refuses(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, *rest: Any, **params: Any
) -> str | None:
    """Nothing to step over."""
    empty = 0 in (*k_cache.shape, *v_cache.shape, *block_table.shape, *q.shape)
    return "an operand is empty" if empty else None


paged_attn.kernel("triton", platforms=("cuda",), refuses=triton.refuses_paged, tiles=tiles.paged)(
    triton.paged
)


@paged_attn.kernel("stepwise", refuses=refuses, declines=declines)
def stepwise(
    q, k_cache, v_cache, block_table, context_lens, alibi, *, softmax_scale, block_size, softcap
):
    """STEP tokens of every sequence at a time, under a running maximum; none past the longest.

    Milakov & Gimelshein 2018, arXiv:1805.02867.
    """
    (b, _, sq, _), (n, size, hk, _), m = q.shape, k_cache.shape, block_table.shape[1]
    pages = Pages.of(n, size, block_table, context_lens)
    each = min(m, max(1, STEP // size))  # blocks
    ids = jnp.pad(pages.ids, [(0, 0), (0, -m % each)])
    x = wide(maths.grouped(q, hk)) * maths.scale_of(q, softmax_scale)
    slopes, rules = maths.slopes_of(alibi, hk), Rules(None, 0, softcap)
    whole = Places.of(sq, each * size, pages.lengths)
    qpos = maths.count(sq)[:, None] + pages.lengths.reshape(-1, 1, 1, 1, 1) - sq
    longest = jnp.max(pages.lengths)

    def step(carry, block):
        first, ids = block

        def read_on(carry):
            at = Places(qpos, whole.k + first, whole.length)
            k, v = wide(read(k_cache, ids)), wide(read(v_cache, ids))
            return maths.merged(carry, maths.attend(x, k, v, slopes, at, rules))

        return lax.cond(first < longest, read_on, lambda carry: carry, carry), None

    ids = jnp.moveaxis(ids.reshape(b, -1, each), 1, 0)
    none = zeros((*x.shape[:-1], 1), x)
    start = zeros((*x.shape[:-1], v_cache.shape[-1]), x), none, none - jnp.inf
    parts, _ = lax.scan(step, start, (maths.count(len(ids)) * (each * size), ids))
    o, _ = maths.normalised(*parts)
    return maths.nan_unless(pages.valid, maths.ungrouped(o).astype(q.dtype))
