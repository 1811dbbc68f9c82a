"""The ops that are measured on an accelerator, each as a function of its extents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import (
    argmax_dim,
    awq_matmul,
    causal_conv1d,
    conv2d,
    cumsum,
    flash_attn,
    fused_linear,
    fused_softmax_cross_entropy,
    layer_norm_last_dim,
    log_softmax_last_dim,
    nf4_matmul,
    paged_attn,
    qmatmul,
    rms_norm_last_dim,
    selective_scan,
    softmax_last_dim,
    ssd_chunk_scan,
)
from . import spellings
from .workload import WHOLE, Peer, Spec, Work

FEW = np.s_[:16]
LEAD = np.s_[:1]
SAME = (WHOLE,)


def dense(f: Any) -> Peer:
    """A product with the weights that the product ``f`` reads from codes, in the dtype of x."""

    def unpacked(x, *packed):
        identity = jnp.eye(x.shape[-1], dtype=x.dtype)
        return x, f(identity, *packed).T

    return Peer(lambda x, w: x @ w.T, unpacked)


def rows(op: Any, plain: Any, *, r: int, c: int, dtype: str = "bfloat16", **params: Any) -> Work:
    """An op on each of r rows of width c."""
    peers = {"jnp": Peer(plain)}
    return Work(op, (Spec((r, c), dtype),), params, (FEW,), (FEW,), peers=peers)


Family = Callable[..., Work]
softmax: Family = functools.partial(rows, softmax_last_dim, lambda x: jax.nn.softmax(x, -1))
log_softmax: Family = functools.partial(
    rows, log_softmax_last_dim, lambda x: jax.nn.log_softmax(x, -1)
)
rms_norm: Family = functools.partial(rows, rms_norm_last_dim, spellings.rms_norm, eps=1e-6)
layer_norm: Family = functools.partial(rows, layer_norm_last_dim, spellings.layer_norm, eps=1e-6)
running_sum: Family = functools.partial(rows, cumsum, lambda x: jnp.cumsum(x, -1), dim=-1)
largest: Family = functools.partial(rows, argmax_dim, lambda x: jnp.argmax(x, -1), dim=-1)


def cross_entropy(*, r: int, v: int, dtype: str = "bfloat16") -> Work:
    """The mean loss of r predictions over v words."""
    specs = (Spec((r, v), dtype), Spec((r,), "uint32", f"below {v}"))
    peers = {"jnp": Peer(spellings.cross_entropy)}
    return Work(
        fused_softmax_cross_entropy,
        specs,
        {},
        (FEW, WHOLE),
        peers=peers,
        exact=spellings.cross_entropy_exact,
    )


def attention(
    *, b: int, h: int, hk: int, s: int, d: int, alibi: bool = False, **params: Any
) -> Work:
    """Attention of s positions to themselves; h heads of queries, hk of keys."""
    kv = Spec((b, hk, s, d))
    specs = (Spec((b, h, s, d)), kv, kv, *([Spec((h,), kind="positive")] if alibi else []))
    group = np.s_[:1, : h // hk]
    cuts = (group, np.s_[:1, :1], np.s_[:1, :1], np.s_[: h // hk])[: len(specs)]
    peers = {}
    if not alibi and "softcap" not in params:
        cudnn = functools.partial(spellings.cudnn_attention, **params)
        peers["cudnn"] = Peer(cudnn, spellings.heads_after, spellings.heads_before)
    summed = (3,) if alibi else ()  # over the sequences
    return Work(flash_attn, specs, params, cuts, (group,), summed, peers)


def decoding(*, b: int, h: int, hk: int, d: int, context: int, page: int) -> Work:
    """One new token of each of b sequences against its cache of pages."""
    pages = context // page
    cache = Spec((b * pages, page, hk, d))
    specs = (
        Spec((b, h, 1, d)),
        *(cache, cache, Spec((b, pages), "uint32", "permutation")),
        Spec((b,), "uint32", f"value {context}"),
    )
    cuts = (LEAD, WHOLE, WHOLE, LEAD, LEAD)
    peers = {"jnp": Peer(spellings.paged)}
    return Work(paged_attn, specs, {}, cuts, (LEAD,), peers=peers)


def nf4(*, m: int, k: int, n: int, dtype: str = "bfloat16") -> Work:
    """m activations times a weight of NF4 codes."""
    specs = (
        Spec((m, k), dtype),
        Spec((n, k // 2), "uint8"),
        Spec((n, k // 64), "float32", "positive"),
    )
    params = {"block_size": 64}
    return Work(
        *(nf4_matmul, specs, params, (FEW, FEW, FEW), (np.s_[:16, :16],)),
        peers={"jnp": Peer(spellings.nf4), "dense": dense(spellings.nf4)},
    )


def awq(*, m: int, k: int, n: int, dtype: str = "bfloat16") -> Work:
    """m activations times a weight of 4-bit codes with zero points."""
    groups = k // 128
    specs = (
        Spec((m, k), dtype),
        Spec((n, k // 8), "uint32"),
        Spec((n, -(-groups // 8)), "uint32"),
        Spec((n, -(-groups // 8) * 8), "float16", "positive"),
    )
    return Work(
        *(awq_matmul, specs, {"group_size": 128}, (FEW,) * 4, (np.s_[:16, :16],)),
        peers={"jnp": Peer(spellings.awq), "dense": dense(spellings.awq)},
    )


def quantised(*, quant_type: Any, m: int, k: int, n: int, dtype: str = "float32") -> Work:
    """m activations times a weight in one of llama.cpp's formats."""
    specs = (Spec((m, k), dtype), Spec((n * k,), "uint32", quant_type))
    params = {"quant_type": quant_type, "k": k, "n": n}
    peers = {"dense": dense(functools.partial(qmatmul, **params))}
    return Work(qmatmul, specs, params, (FEW, WHOLE), (FEW,), peers=peers)


def selective(*, b: int, l: int, d: int, n: int, dtype: str) -> Work:
    """A selective scan of l steps over d channels with n states each."""
    state = Spec((b, l, n), dtype)
    specs = (
        *(Spec((b, l, d), dtype), Spec((b, l, d), dtype, "positive")),
        *(Spec((d, n), dtype, "negative"), state, state),
    )
    cuts = (LEAD, LEAD, WHOLE, LEAD, LEAD)
    peers = {
        "lax.scan": Peer(spellings.selective_scan),
        "lax.associative_scan": Peer(spellings.selective_associative),
    }
    return Work(selective_scan, specs, {}, cuts, (LEAD, LEAD), summed=(2,), peers=peers)


def ssd(*, b: int, l: int, h: int, p: int, n: int, g: int, dtype: str = "bfloat16") -> Work:
    """A state-space scan of l steps: h heads of p channels and n states, g groups."""
    group = Spec((b, l, g, n), dtype)
    specs = (
        *(Spec((b, l, h, p), dtype), Spec((b, l, h), dtype, "positive")),
        *(Spec((h,), dtype, "negative"), group, group),
    )
    cuts = (LEAD, LEAD, WHOLE, LEAD, LEAD)
    return Work(ssd_chunk_scan, specs, {"chunk_size": 64}, cuts, (LEAD, LEAD), summed=(2,))


def conv1d(*, b: int, c: int, l: int, k: int, dtype: str = "bfloat16") -> Work:
    """A depthwise causal convolution of l steps, then SiLU."""
    specs = (Spec((b, c, l + k - 1), dtype), Spec((c, 1, k), dtype), Spec((c,), dtype))
    peers = {"jnp": Peer(spellings.causal_conv1d)}
    params = {"use_silu": True}
    return Work(causal_conv1d, specs, params, (LEAD, *SAME * 2), (LEAD,), peers=peers)


def linear(*, m: int, k: int, n: int) -> Work:
    """A product and a bias."""
    specs = (Spec((m, k)), Spec((k, n)), Spec((n,)))
    peers = {"jnp": Peer(lambda a, b, c: a @ b + c)}
    return Work(fused_linear, specs, {}, (FEW, *SAME * 2), (FEW,), peers=peers)


def conv(*, n: int, c: int, s: int, k: int) -> Work:
    """A padded convolution of n images s × s, c channels to c."""
    specs = (Spec((n, c, s, s)), Spec((c, c, k, k)), Spec((c,)))
    params = {"padding": (k // 2, k // 2)}
    peers = {"jnp": Peer(functools.partial(spellings.conv2d, **params))}
    return Work(conv2d, specs, params, (LEAD, *SAME * 2), (LEAD,), peers=peers)
