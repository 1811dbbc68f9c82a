"""The attention kernels for GPUs with the ops' signatures, and where they serve.

Which tile, and where another form is as fast, was measured on an H200; docs/performance has the
numbers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._attention import Rules, Tile
from pallas_kernels._launch import GRID, cdiv, power_of_two, unavailable
from pallas_kernels.attention import attend
from pallas_kernels.attention_gradients import gradients

from ..types import Array
from . import _attention as maths

WIDEST = 256  # of a head, for its rows to fit on the chip
TOGETHER = 64  # rows of a group's heads that one program takes at once, at most
PROGRAMS = 264  # two on each of 132 multiprocessors
PART = 256  # keys that are worth a program of their own

# Whether result and log-sum-exp are of more keys than a gradient is given, as in ring attention.
OF_MORE = jax.make_user_context(False)

# By the width of a head, up to:
FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 4, 2), 256: Tile(128, 32, 8, 3)}
KEYS = {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 64, 8, 1)}
QUERIES = {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)}


def by_width(tiles: dict[int, Any], width: int) -> Any:
    """The tile for heads of a width."""
    return next(tile for most, tile in tiles.items() if width <= most)


def refuses(q, k, v, *operands, **params) -> str | None:
    """What the kernels cannot do."""
    if q.dtype.itemsize != 2:
        return f"{q.dtype.name} is left to XLA; tensor cores take halves"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads wider than {WIDEST} do not fit on the chip"
    if max(q.shape[1], 2 * q.shape[0]) > GRID:  # where parts are more, sequences are few
        return f"{q.shape[0]} sequences of {q.shape[1]} heads are more than a grid has"
    return unavailable(q, k, v)


def refuses_paged(q, k_cache, v_cache, *operands, **params) -> str | None:
    """The same, for keys in pages."""
    return refuses(q, k_cache, v_cache)


def rules_of(q, sk, *, softmax_scale, softcap, **windows) -> Rules:
    """What a row sees of ``sk`` keys."""
    rules = maths.Rules.of(q.shape[2], sk, softcap=softcap, **windows)
    return Rules(maths.scale_of(q, softmax_scale), rules.left, rules.right, softcap)


def lengths_of(k_len: Any, b: int, sk: int) -> Array | None:
    """Keys in use, ``[b]``; −1 where there is no such number of keys."""
    length, valid = maths.keys_in_use(k_len, sk)
    if length is None or valid is None:
        return None
    return jnp.broadcast_to(jnp.where(valid, length, -1), (b,))


def forward_plan(b: int, h: int, hk: int, sq: int, sk: int, width: int) -> dict[str, Any]:
    """Tile, whether a group's heads share a program, and how many programs share the keys."""
    rows = sq * (h // hk)
    packed = rows <= TOGETHER
    tile = Tile(power_of_two(max(rows, 16)), 64, 4, 3) if packed else by_width(FORWARD, width)
    programs = b * (hk if packed else h * cdiv(sq, tile.rows))
    parts = min(max(1, PROGRAMS // programs), cdiv(sk, PART))
    return {"tile": tile, "packed": packed, "parts": parts}


def paged_plan(q, k_cache, v_cache, block_table) -> dict[str, Any]:
    """The same, for keys in pages."""
    (b, h, sq, d), (_, size, hk, dv), m = q.shape, v_cache.shape, block_table.shape[1]
    plan = forward_plan(b, h, hk, sq, m * size, max(d, dv))
    if plan["packed"]:  # every page is looked up: more programs with less to do hide that
        rows = plan["tile"].rows
        # Programs of two warps leave a second round with little to do at 64 × 8 heads: 290 µs, 245.
        tile = Tile(rows, 32, 1 if rows == 16 else 2, 4)
        plan |= {"tile": tile, "parts": max(plan["parts"], 2)}
    return plan


def cut(plan: dict[str, Any], tile: Any) -> dict[str, Any]:
    """The plan with what a setting of ``_attention_tiles`` changes."""
    return plan if tile is None else plan | tile._asdict()


def forward(q, k, v, alibi, k_len, *, return_lse, tile=None, interpret=False, **params):
    """``flash_attn``."""
    (b, h, sq, d), (_, hk, sk, dv) = q.shape, v.shape
    o, lse = attend(
        *(q, k, v, alibi, lengths_of(k_len, b, sk)),
        rules=rules_of(q, sk, **params),
        **cut(forward_plan(b, h, hk, sq, sk, max(d, dv)), tile),
        interpret=interpret,
    )
    return (o, lse) if return_lse else o


def backward(q, k, v, o, lse, do, dlse, alibi, k_len, *, tile=None, interpret=False, **params):
    """``flash_attn_backward``."""
    b, (sk, dv) = len(q), v.shape[2:]
    width = max(q.shape[-1], dv)
    plan = {"of_keys": by_width(KEYS, width), "of_queries": by_width(QUERIES, width)}
    dq, dk, dv, dslopes = gradients(
        *(q, k, v, o, lse, do, dlse, alibi, lengths_of(k_len, b, sk)),
        rules=rules_of(q, sk, **params),
        **cut(plan, tile),
        whole=not OF_MORE.value,
        interpret=interpret,
    )
    return dq, dk, dv, None if dslopes is None else dslopes.sum((0, 2)).astype(alibi.dtype)


def paged(
    q,
    k_cache,
    v_cache,
    block_table,
    context_lens,
    alibi,
    *,
    block_size,
    tile=None,
    interpret=False,
    **params,
):
    """``paged_attn``."""
    from .paged_attn import Pages  # which registers this

    (n, size), m = v_cache.shape[:2], block_table.shape[1]
    plan = cut(paged_plan(q, k_cache, v_cache, block_table), tile)
    pages = Pages.of(n, size, block_table, context_lens)
    every = {"causal": True, "window_size_left": None, "window_size_right": None}
    o, _ = attend(
        *(q, k_cache, v_cache, alibi, jnp.where(pages.valid, pages.lengths, -1)),
        rules=rules_of(q, m * size, **params, **every),
        table=pages.ids,
        **plan,
        interpret=interpret,
    )
    return o
