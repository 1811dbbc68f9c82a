"""The attention kernel for Hopper GPUs with the op's signature, and where it serves.

Measured on an H200; docs/performance has the numbers.
"""

from __future__ import annotations

from pallas_kernels._attention import Tile
from pallas_kernels._launch import not_hopper
from pallas_kernels.attention_hopper import GROUPS, attend

from . import _attention_triton as triton

ROWS = 64  # of a group of warps: one product of tensor cores
WIDTHS = (64, 128, 192, 256)
KEYS = {64: 128, 128: 128, 256: 64}  # by the width of a head, up to; as many as fit, twice


def refuses(q, k, v, *operands, **params) -> str | None:
    """What the kernel cannot do."""
    if reason := triton.refuses(q, k, v):
        return reason
    d, dv = q.shape[-1], v.shape[-1]
    if d != dv or d not in WIDTHS:
        return f"keys and values are both {WIDTHS} wide, not {d} and {dv}"
    if q.shape[2] % 8 or k.shape[2] % 8:
        return f"rows are copied by the eight, not {q.shape[2]} queries of {k.shape[2]} keys"
    return not_hopper()


def declines(q, k, v, *operands, **params) -> str | None:
    """Where another one is taken: anywhere, unless it is asked for by name or by measurements.

    Its form before this one took 1,602 µs where Triton's takes 2,155 and cuDNN 1,641, and 899 to
    1,294 and 939 under causality (B4 H32 S4096 D128, bfloat16).  That one waited for keys and
    values the same way, and took whole blocks of both without lengths alone.
    """
    return "it has yet to be compared on a card; flash_attn.using('mosaic') runs it"


def forward(q, k, v, alibi, k_len, *, return_lse, **params):
    """``flash_attn``."""
    b, sk, d = len(q), k.shape[2], q.shape[-1]
    o, lse = attend(
        *(q, k, v, alibi, triton.lengths_of(k_len, b, sk)),
        rules=triton.rules_of(q, sk, **params),
        tile=Tile(ROWS, triton.by_width(KEYS, d), 4 * GROUPS, 2),
        mending=triton.by_width(triton.FORWARD, d),
    )
    return (o, lse) if return_lse else o
