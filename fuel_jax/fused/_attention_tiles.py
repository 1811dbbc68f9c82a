"""The tiles that are worth a try for the attention kernels of ``_attention_triton``."""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels._attention import Tile
from pallas_kernels._launch import cdiv
from pallas_kernels._tiles import Tiles, around, varied

from . import _attention_triton as triton


class Shares(NamedTuple):
    """How the forward pass is cut: its tile, and programs that share the keys of some rows."""

    tile: Tile
    parts: int


class Pair(NamedTuple):
    """How the gradients are cut: that of k and v, and that of q."""

    of_keys: Tile
    of_queries: Tile


MANY = 256  # heads: whether there are more changes no tile
SIZES: dict[str, tuple[int, ...]] = {"keys": (32, 64, 128), "stages": (1, 2, 3, 4)}


def of_plan(plan: dict[str, Any], q: Any, hk: int, sk: int, width: int) -> Tiles:
    """More or less of everything at a time.  What heads of a group share has its rows fixed."""
    first, parts = plan["tile"], plan["parts"]
    (b, h, sq), packed = q.shape[:3], plan["packed"]
    extents: dict[str, int | str] = {"heads": min(b * (hk if packed else h), MANY)}
    extents |= {"rows": sq * (h // hk) if packed else sq, "keys": sk, "width": width}
    extents |= {"together": "group" if packed else "head"}
    if packed:
        ways = [Shares(tile, parts) for tile in varied(first, **SIZES, warps=(1, 2, 4, 8))]
        ways += [Shares(first, p) for p in around(parts, 1, cdiv(sk, first.keys))]
    else:
        tiles = [*varied(first, **SIZES, rows=(64, 128), warps=(4, 8))]
        tiles += [Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 64, 4, 3)]
        tiles += [Tile(128, 64, 8, 3), Tile(128, 128, 4, 2), Tile(128, 128, 8, 2)]
        ways = [Shares(tile, parts) for tile in tiles]
    return Tiles.of(extents, Shares(first, parts), *ways)


def forward(q, k, v, *operands, **params) -> Tiles:
    """Of ``flash_attn``."""
    (b, h, sq, d), (_, hk, sk, dv) = q.shape, v.shape
    width = max(d, dv)
    return of_plan(triton.forward_plan(b, h, hk, sq, sk, width), q, hk, sk, width)


def paged(q, k_cache, v_cache, block_table, *operands, **params) -> Tiles:
    """Of ``paged_attn``."""
    (_, size, hk, dv), m = v_cache.shape, block_table.shape[1]
    plan = triton.paged_plan(q, k_cache, v_cache, block_table)
    return of_plan(plan, q, hk, m * size, max(q.shape[-1], dv))


def backward(q, k, v, *operands, **params) -> Tiles:
    """Of ``flash_attn_backward``."""
    (b, h, sq, d), (sk, dv) = q.shape, v.shape[2:]
    width = max(d, dv)
    first = Pair(triton.by_width(triton.KEYS, width), triton.by_width(triton.QUERIES, width))
    extents: dict[str, int | str] = {"heads": min(b * h, MANY), "rows": sq}
    extents |= {"keys": sk, "width": width}
    shapes = SIZES | {"rows": (64, 128), "warps": (4, 8)}
    both = {name: [*varied(tile, **shapes)] for name, tile in first._asdict().items()}
    return Tiles.of(extents, first, *varied(first, **both))
