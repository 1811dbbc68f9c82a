"""The attention kernels for Hopper GPUs with the ops' signatures, and where they serve.

Measured on an H200; docs/performance has the numbers.
"""

from __future__ import annotations

from pallas_kernels._attention import Tile
from pallas_kernels._hopper import GROUPS, multiprocessors
from pallas_kernels._launch import cdiv, not_hopper
from pallas_kernels.attention_hopper import attend
from pallas_kernels.attention_hopper_gradients import gradients

from . import _attention_triton as triton

ROWS = 64  # of a group of warps: one product of tensor cores
WIDTHS = (64, 128, 192, 256)
WARPS = 4 * GROUPS
FEW = 512
PROGRAMS = 99  # three quarters of an H200's multiprocessors
LITTLE = 2**34  # heads × queries × keys × width

# By the width of a head, up to: as many keys as fit, twice.
FORWARD = {n: Tile(ROWS, keys, WARPS, 2) for n, keys in ((64, 128), (128, 128), (256, 64))}
OF_KEYS = {64: Tile(128, ROWS, WARPS, 2), 128: Tile(64, ROWS, WARPS, 2)}
OF_QUERIES = dict.fromkeys((64, 128), Tile(ROWS, 64, WARPS, 4))


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


def refuses_gradient(q, k, v, *operands, **params) -> str | None:
    """What the kernels of the gradient cannot do."""
    if reason := refuses(q, k, v):
        return reason
    if q.shape[-1] not in OF_KEYS:
        return f"sums for keys and values {q.shape[-1]} wide do not fit into registers"
    return None


def declines(
    q, k, v, alibi=None, *operands, causal=False, window_size_right=None, softcap=None, **params
) -> str | None:
    """Where Triton's kernel is as fast."""
    (b, h, sq, d), sk = q.shape, k.shape[2]
    ahead = not causal and window_size_right is None  # keys ahead count
    if d == 64 and ahead and alibi is None and softcap is None:
        return "at a width of 64, where keys ahead are seen, Triton's is as fast"
    if sq < FEW:
        return f"for fewer than {FEW} queries Triton's is as fast"
    if b * h * cdiv(sq, GROUPS * ROWS) < PROGRAMS and sk >= 2 * FEW:
        return "so few rows do not fill the chip; Triton's programs share the keys"
    return None


def declines_gradient(q, k, v, *operands, **params) -> str | None:
    """Where Triton's are as fast: what comes before and after the kernels counts."""
    (b, h, sq, d), sk = q.shape, k.shape[2]
    if b * h * sq * sk * d < LITTLE:
        return "there is little to do: to look for rows to be computed again takes as long"
    return None


def forward(q, k, v, alibi, k_len, *, return_lse, **params):
    """``flash_attn``.

    For wide heads, with slopes from 128 on, a loop over blocks of rows takes registers from the one
    over keys: each block has a program of its own.
    """
    b, sk, d = len(q), k.shape[2], q.shape[-1]
    o, lse = attend(
        *(q, k, v, alibi, triton.lengths_of(k_len, b, sk)),
        rules=triton.rules_of(q, sk, **params),
        tile=triton.by_width(FORWARD, d),
        mending=triton.by_width(triton.FORWARD, d),
        programs=None if d > (192 if alibi is None else 64) else multiprocessors(),
    )
    return (o, lse) if return_lse else o


def backward(q, k, v, o, lse, do, dlse, alibi, k_len, **params):
    """``flash_attn_backward``."""
    b, sk, d = len(q), k.shape[2], q.shape[-1]
    dq, dk, dv, dslopes = gradients(
        *(q, k, v, o, lse, do, dlse, alibi, triton.lengths_of(k_len, b, sk)),
        rules=triton.rules_of(q, sk, **params),
        of_keys=OF_KEYS[d],
        of_queries=OF_QUERIES[d],
        mending=(triton.by_width(triton.KEYS, d), triton.by_width(triton.QUERIES, d)),
        whole=not triton.OF_MORE.value,
    )
    return dq, dk, dv, None if dslopes is None else dslopes.sum((0, 2)).astype(alibi.dtype)
