"""Scaled dot-product attention and its backwards.

Axes: b batch, h query heads, hk key heads, sq queries, sk keys, d width of q and k, dv width of v.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._called import FlashAttn, called
from .._op import Precision
from ..numerics import wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Indices, Wide
from . import (
    _attention as maths,
    _attention_chunked as chunked,
    _attention_cudnn as cudnn,
    _attention_hopper as hopper,
    _attention_tiles as tiles,
    _attention_triton as triton,
    _attention_written as written,
)
from ._attention import Places, Rules

PRECISION = Precision(float32=5e-6)


def examples() -> Iterator[dict[str, Any]]:
    """Grouped heads; every option at once; queries that stand before the first key."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    off = {"alibi": None, "k_len": None, "softmax_scale": None, "causal": False, "softcap": None}
    off |= {"window_size_left": None, "window_size_right": None}

    def qkv(b, h, hk, sq, sk, d, dv):
        return {"q": f32(b, h, sq, d), "k": f32(b, hk, sk, d), "v": f32(b, hk, sk, dv)}

    yield {**qkv(2, 4, 2, 5, 7, 8, 6), **off}
    every = {"alibi": f32(4), "k_len": np.array([7, 2], np.int32), "causal": True, "softcap": 2.0}
    yield {**qkv(2, 4, 1, 6, 9, 4, 4), **off, **every, "window_size_left": 3, "softmax_scale": 0.7}
    yield {**qkv(1, 2, 2, 4, 6, 3, 3), **off, "k_len": 2, "causal": True}


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with the cotangent of its result."""
    for example in examples():
        q, v = example["q"], example["v"]
        do = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        operands = {n: example.pop(n) for n in ("q", "k", "v")}
        yield {**operands, "do": do, **example}


def expects(q: Array, k: Array, *rest: Any, **params: Any) -> Array | None:
    """A ``k_len`` counts keys that are there."""
    k_len = rest[-1]
    return None if k_len is None else maths.keys_in_use(k_len, k.shape[2])[1]


# -- backward ------------------------------------------------------------------------------


@fused_op(
    family="Attention",
    precision=PRECISION,
    outputs=("dq", "dk", "dv", "dalibi"),
    splits="b hk r h=hk*r",
    rejects=lambda q, k, v, o, lse, do, *rest, **params: maths.rejects(q, k, v, **params),
    matchable=False,
)
def flash_attn_backward(
    q: Floats[Array, "b h sq d"],
    k: Floats[Array, "b hk sk d"],
    v: Floats[Array, "b hk sk dv"],
    o: Floats[Array, "b h sq dv"],
    lse: Wide[Array, "b h sq"],
    do: Floats[Array, "b h sq dv"],
    dlse: Wide[Array, "b h sq"] | None = None,
    alibi: Floats[Array, " h"] | None = None,
    k_len: Indices[Array, ""] | Indices[Array, " b"] | int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of :func:`flash_attn`:  p = softmax(s),  ds = p ∘ (do·vᵀ − Σ p∘(do·vᵀ) + dlse).

    dv = pᵀ·do,  dq = ds·k·scale,  dk = dsᵀ·q·scale,  dalibi = −Σ ds·|distance|; a soft cap puts its
    slope 1 − tanh² between ds and dq, dk.  Sums in float32 (float64 for float64 operands), rounded
    once.  A row that sees no key gives 0, whatever its cotangent.  The derivative of this gradient
    is that of the dense form, and takes memory for whole matrices of scores.

    Args:
        q: the forward's operand, ``[b, h, sq, d]``.
        k: the forward's operand, ``[b, hk, sk, d]``.
        v: the forward's operand, ``[b, hk, sk, dv]``.
        o: the forward's result, like ``do``; for kernels that read it, the dense and the chunked
            form do not.
        lse: the forward's log-sum-exp, ``[b, h, sq]``; as ``o``.
        do: cotangent of ``o``.
        dlse: cotangent of ``lse``, or None if nobody used it.
        alibi: the forward's operand, ``[h]``, or None.
        k_len: the forward's operand.
        softmax_scale: as in the forward, like all parameters.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most.
        window_size_right: keys seen after the query, at most.
        softcap: bound on scores.

    Returns:
        ``(dq, dk, dv, dalibi)``, each like its operand; ``dalibi`` is None without ``alibi``.

    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4.
    """
    (sq, hk, sk), scale = (q.shape[2], *k.shape[1:3]), maths.scale_of(q, softmax_scale)
    seen: dict[str, Any] = {"causal": causal, "softcap": softcap}
    seen |= {"window_size_left": window_size_left, "window_size_right": window_size_right}
    rules = Rules.of(sq, sk, **seen)
    length, _ = maths.keys_in_use(k_len, sk)
    do_grouped = wide(maths.grouped(do, hk))
    dlse_grouped = None if dlse is None else wide(maths.grouped(dlse, hk))
    dq, dk, dv, dslopes = maths.gradients(
        wide(maths.grouped(q, hk)) * scale,
        wide(k),
        wide(v),
        do_grouped,
        dlse_grouped,
        maths.slopes_of(alibi, hk),
        Places.of(sq, sk, length),
        rules,
    )
    dalibi = None
    if alibi is not None and dslopes is not None:
        dalibi = dslopes.sum(0).reshape(-1).astype(alibi.dtype)
    dq = maths.ungrouped(dq * scale).astype(q.dtype)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), dalibi


# -- forward -------------------------------------------------------------------------------


@called(like=FlashAttn)
@fused_op(
    OpKind.FlashAttn,
    id=FusedOps.FLASH_ATTN,
    family="Attention",
    precision=PRECISION,
    backward=flash_attn_backward,
    outputs=("o", "lse"),
    splits="b hk r h=hk*r -> b h sq dv, b h sq",
    rejects=maths.rejects,
    expects=expects,
    matchable=False,
    examples=examples,
)
def flash_attn(
    q: Floats[Array, "b h sq d"],
    k: Floats[Array, "b hk sk d"],
    v: Floats[Array, "b hk sk dv"],
    alibi: Floats[Array, " h"] | None = None,
    k_len: Indices[Array, ""] | Indices[Array, " b"] | int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:  # an array, or a pair with return_lse
    """softmax(mask(cap(q·kᵀ·scale) − alibi·|distance|)) · v,  head by head.

    Scores and sums in float32 (float64 for float64 operands), rounded once; on NVIDIA GPUs weights
    are rounded to halves before they meet values in halves.  Query i stands at position
    i + k_len − sq among the keys (the last query at the last key in use), also where that is
    negative.  A row that sees no key is 0, and so are its gradients.  A key that a row does not see
    is not multiplied: NaN or inf stored there stays there.

    The gradient takes no more memory than the forward.  A second derivative is that of the dense
    form: it holds whole matrices of scores.

    Args:
        q: ``[b, h, sq, d]``.
        k: ``[b, hk, sk, d]``; query head i reads key head i // (h / hk).
        v: ``[b, hk, sk, dv]``.
        alibi: slope of each query head, ``[h]``, or None.
        k_len: keys in use, one number or one for each sequence, ``[b]``; None is all.  Those beyond
            are not seen.  Outside 0 … sk the result of the sequence is NaN (an error under
            checkify).  Another number does not recompile.
        softmax_scale: factor on q·kᵀ; None is 1/√d.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most; None is all.
        window_size_right: keys seen after the query, at most; None is all.
        softcap: bound c on scores, c·tanh(s/c); None is off.
        return_lse: also return the log-sum-exp of the scores, differentiable; −inf for empty rows.

    Returns:
        ``[b, h, sq, dv]`` in the dtype of ``q``; with ``return_lse`` also ``[b, h, sq]`` in float32
        (float64 for float64 operands).

    Raises:
        ShapeError: operands that do not fit.
        ArgumentError: heads that do not divide, a soft cap of 0 or less, a negative window.

    Source: Dao et al. 2022, arXiv:2205.14135; ALiBi: Press et al. 2022, arXiv:2108.12409.
    """
    hk, sk = k.shape[1:3]
    seen: dict[str, Any] = {"causal": causal, "softcap": softcap}
    seen |= {"window_size_left": window_size_left, "window_size_right": window_size_right}
    rules = Rules.of(q.shape[2], sk, **seen)
    length, valid = maths.keys_in_use(k_len, sk)
    o, lse = maths.normalised(
        *maths.attend(
            wide(maths.grouped(q, hk)) * maths.scale_of(q, softmax_scale),
            wide(k),
            wide(v),
            maths.slopes_of(alibi, hk),
            Places.of(q.shape[2], sk, length),
            rules,
        )
    )
    o = maths.nan_unless(valid, maths.ungrouped(o).astype(q.dtype))
    return (o, maths.nan_unless(valid, maths.ungrouped(lse))) if return_lse else o


# -- the backwards of the vocabulary -----------------------------------------------------------

BACKWARD: dict[str, Any] = {
    "splits": "b hk r h=hk*r",
    "family": "Attention",
    "precision": PRECISION,
    "rejects": lambda q, k, v, *rest, **params: maths.rejects(q, k, v, **params),
    "matchable": False,
    "examples": backward_examples,
}


@fused_op(
    OpKind.FlashAttnBackwardQ,
    id=FusedOps.FLASH_ATTN_BACKWARD_Q,
    outputs=("dq",),
    expects=expects,
    **BACKWARD,
)
def flash_attn_backward_q(
    q: Floats[Array, "b h sq d"],
    k: Floats[Array, "b hk sk d"],
    v: Floats[Array, "b hk sk dv"],
    do: Floats[Array, "b h sq dv"],
    alibi: Floats[Array, " h"] | None = None,
    k_len: Indices[Array, ""] | Indices[Array, " b"] | int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
) -> Floats[Array, "b h sq d"]:
    """Gradient of :func:`flash_attn` for its queries:  ds·k·scale.

    From the operands alone; ``jax.grad`` of ``flash_attn`` computes all three at once, for less.
    Positions are the forward's.  Differentiable, by the dense form.

    Args:
        q: the forward's operand, ``[b, h, sq, d]``.
        k: the forward's operand, ``[b, hk, sk, d]``.
        v: the forward's operand, ``[b, hk, sk, dv]``.
        do: cotangent of the forward's result, ``[b, h, sq, dv]``.
        alibi: the forward's operand, ``[h]``, or None.
        k_len: the forward's operand.
        softmax_scale: as in the forward, like all parameters.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most.
        window_size_right: keys seen after the query, at most.
        softcap: bound on scores.

    Returns:
        The cotangent of ``q``, like it.
    """
    params = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    params |= {"window_size_left": window_size_left, "window_size_right": window_size_right}
    return flash_attn_backward.body(q, k, v, None, None, do, None, alibi, k_len, **params)[0]


@fused_op(
    OpKind.FlashAttnBackwardK,
    id=FusedOps.FLASH_ATTN_BACKWARD_K,
    outputs=("dk",),
    expects=expects,
    **BACKWARD,
)
def flash_attn_backward_k(
    q: Floats[Array, "b h sq d"],
    k: Floats[Array, "b hk sk d"],
    v: Floats[Array, "b hk sk dv"],
    do: Floats[Array, "b h sq dv"],
    alibi: Floats[Array, " h"] | None = None,
    k_len: Indices[Array, ""] | Indices[Array, " b"] | int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
) -> Floats[Array, "b hk sk d"]:
    """Gradient of :func:`flash_attn` for its keys:  dsᵀ·q·scale.

    From the operands alone; ``jax.grad`` of ``flash_attn`` computes all three at once, for less.
    Positions are the forward's.  Differentiable, by the dense form.

    Args:
        q: the forward's operand, ``[b, h, sq, d]``.
        k: the forward's operand, ``[b, hk, sk, d]``.
        v: the forward's operand, ``[b, hk, sk, dv]``.
        do: cotangent of the forward's result, ``[b, h, sq, dv]``.
        alibi: the forward's operand, ``[h]``, or None.
        k_len: the forward's operand.
        softmax_scale: as in the forward, like all parameters.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most.
        window_size_right: keys seen after the query, at most.
        softcap: bound on scores.

    Returns:
        The cotangent of ``k``, like it.
    """
    params = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    params |= {"window_size_left": window_size_left, "window_size_right": window_size_right}
    return flash_attn_backward.body(q, k, v, None, None, do, None, alibi, k_len, **params)[1]


@fused_op(
    OpKind.FlashAttnBackwardV,
    id=FusedOps.FLASH_ATTN_BACKWARD_V,
    outputs=("dv",),
    expects=expects,
    **BACKWARD,
)
def flash_attn_backward_v(
    q: Floats[Array, "b h sq d"],
    k: Floats[Array, "b hk sk d"],
    v: Floats[Array, "b hk sk dv"],
    do: Floats[Array, "b h sq dv"],
    alibi: Floats[Array, " h"] | None = None,
    k_len: Indices[Array, ""] | Indices[Array, " b"] | int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    softcap: float | None = None,
) -> Floats[Array, "b hk sk dv"]:
    """Gradient of :func:`flash_attn` for its values:  pᵀ·do.

    From the operands alone; ``jax.grad`` of ``flash_attn`` computes all three at once, for less.
    Positions are the forward's.  Differentiable, by the dense form.

    Args:
        q: the forward's operand, ``[b, h, sq, d]``.
        k: the forward's operand, ``[b, hk, sk, d]``.
        v: the forward's operand, ``[b, hk, sk, dv]``.
        do: cotangent of the forward's result, ``[b, h, sq, dv]``.
        alibi: the forward's operand, ``[h]``, or None.
        k_len: the forward's operand.
        softmax_scale: as in the forward, like all parameters.
        causal: hide keys after the query.
        window_size_left: keys seen before the query, at most.
        window_size_right: keys seen after the query, at most.
        softcap: bound on scores.

    Returns:
        The cotangent of ``v``, like it.
    """
    params = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    params |= {"window_size_left": window_size_left, "window_size_right": window_size_right}
    return flash_attn_backward.body(q, k, v, None, None, do, None, alibi, k_len, **params)[2]


# -- kernels ---------------------------------------------------------------------------------


def by_flash_attn(i: int) -> Callable[..., Any]:
    """Gradient ``i`` by whatever serves ``flash_attn`` and its backward.

    XLA drops the rest of the dense form, but not of a loop over blocks: for few scores, all three
    gradients take up to twice the time of the one.
    """

    def run(q, k, v, do, alibi, k_len, **params):
        o, lse = flash_attn(q, k, v, alibi, k_len, **params, return_lse=True)
        return flash_attn_backward(q, k, v, o, lse, do, None, alibi, k_len, **params)[i]

    return run


cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": triton.refuses}
hopper_only: dict[str, Any] = cuda | {"refuses": hopper.refuses, "declines": hopper.declines}
flash_attn.kernel("mosaic", **hopper_only)(hopper.forward)
theirs: dict[str, Any] = cuda | {"refuses": cudnn.refuses, "declines": cudnn.declines}
flash_attn.kernel("cudnn", **theirs)(cudnn.forward)
flash_attn.kernel("triton", **cuda, tiles=tiles.forward)(triton.forward)
hopper_only |= {"refuses": hopper.refuses_gradient, "declines": hopper.declines_gradient}
flash_attn_backward.kernel("mosaic", **hopper_only)(hopper.backward)
flash_attn_backward.kernel("triton", **cuda, tiles=tiles.backward)(triton.backward)
# On the CPU chunks pay sooner, but not in the gradient: at [8, 256, 64] they take 1.25 of the time.
limits: dict[str, Any] = {"refuses": chunked.refuses, "declines": chunked.declines_on_cpu}
limits |= {"tiles": chunked.tiles}
flash_attn.kernel("chunked_cpu", platforms=("cpu",), **limits)(chunked.forward)
limits |= {"declines": chunked.declines}
flash_attn.kernel("chunked", **limits)(chunked.forward)
flash_attn_backward.kernel("chunked", **limits)(chunked.backward)
for i, alone in enumerate((flash_attn_backward_q, flash_attn_backward_k, flash_attn_backward_v)):
    alone.kernel("flash_attn", declines=chunked.declines)(by_flash_attn(i))
written.register(flash_attn)
