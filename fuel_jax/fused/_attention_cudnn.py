"""NVIDIA's attention, by ``jax.nn``, with the op's signature, and where it can serve.

Without gradients: it gives its log-sum-exp rounded to halves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._launch import kind_of_gpu, not_hopper

from . import _attention as maths
from ._attention import Rules


def refuses(q, k, v, alibi, k_len, *, softmax_scale, softcap, return_lse, **windows) -> str | None:
    """What it cannot do, as ``jax.nn`` calls it."""
    d, dv, sq, sk = q.shape[-1], v.shape[-1], q.shape[2], k.shape[2]
    widest = 128 if not_hopper() else 256
    left, right, _ = Rules.of(sq, sk, softcap=None, **windows)
    bounded = left is not None or right is not None
    wrong = {
        f"{q.dtype.name} is not a half type": q.dtype.itemsize != 2,
        "there is nothing to compute": 0 in (*q.shape, *k.shape, *v.shape),
        "it has no soft cap": softcap is not None,
        "slopes would be a matrix of biases": alibi is not None,
        f"values are as wide as keys, not {dv} and {d}": d != dv,
        f"heads are a multiple of 8 and up to {widest} wide, not {d}": d % 8 or d > widest,
        "its windows end at the query": right not in (None, 0) or (left is not None and right != 0),
        f"its positions count from the first key, of {sk} to {sq} queries": bounded and sq != sk,
        "nor do its positions know of lengths": bounded and k_len is not None,
        "its log-sum-exp is rounded to halves, which no gradient can use": return_lse,
        "JAX asks for its version when it traces, and here is no GPU": kind_of_gpu() == "none",
    }
    return next((reason for reason, is_so in wrong.items() if is_so), None)


def declines(*operands, **params) -> str | None:
    """Where another one is taken: anywhere, unless it is asked for by name or by measurements."""
    return (
        "it wants heads behind the sequence, which copies every operand, and promises nothing of "
        "NaN in hidden keys; flash_attn.using('cudnn') runs it"
    )


def forward(q, k, v, alibi, k_len, *, softmax_scale, softcap, return_lse, **windows):
    """``flash_attn``."""
    sk = k.shape[2]
    left, right, _ = Rules.of(q.shape[2], sk, softcap=None, **windows)
    length, valid = maths.keys_in_use(k_len, sk)
    if length is not None:
        length = jnp.broadcast_to(length, len(q))
    o = jax.nn.dot_product_attention(
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)),
        scale=maths.scale_of(q, softmax_scale),
        is_causal=right == 0,
        key_value_seq_lengths=length,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )
    o = jnp.swapaxes(o, 1, 2)
    if length is not None:
        o = jnp.where((length > 0).reshape(-1, 1, 1, 1), o, 0)
    return maths.nan_unless(valid, o)
