"""The peers in PyTorch, on the very arrays of the case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

from .workload import Work

Function = Callable[..., Any]


def attention(backend: SDPBackend | None, *, causal: bool = False) -> Function:
    """Scaled dot product attention by a backend; on a CPU by its own."""

    def run(q, k, v):
        grouped = q.shape[1] != k.shape[1]
        if backend is None or not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return run


def flash_attn(work: Work) -> dict[str, Function]:
    """cuDNN's and FlashAttention 2, for what they can do."""
    if len(work.specs) > 3 or work.params.keys() - {"causal"}:
        return {}
    return {
        "torch cudnn": attention(SDPBackend.CUDNN_ATTENTION, **work.params),
        "torch flash": attention(SDPBackend.FLASH_ATTENTION, **work.params),
    }


def width(x: torch.Tensor) -> tuple[int]:
    """Of a row."""
    return (x.shape[-1],)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of unsigned targets."""
    return F.cross_entropy(logits, targets.long())


def conv2d(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Padded to the same size, channels last as cuDNN prefers; the layout is made beforehand."""
    return F.conv2d(x, w, bias, padding=w.shape[-1] // 2)


def conv1d(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Depthwise, then SiLU."""
    return F.silu(F.conv1d(x, w, bias, groups=x.shape[1]))


ONE: dict[str, Function] = {
    "softmax_last_dim": lambda x: torch.softmax(x, -1),
    "log_softmax_last_dim": lambda x: torch.log_softmax(x, -1),
    "rms_norm_last_dim": lambda x: F.rms_norm(x, width(x), eps=1e-6),
    "layer_norm_last_dim": lambda x: F.layer_norm(x, width(x), eps=1e-6),
    "fused_softmax_cross_entropy": cross_entropy,
    "causal_conv1d": conv1d,
    "fused_linear": lambda a, b, bias: torch.addmm(bias, a, b),
    "conv2d": conv2d,
}


def functions(work: Work) -> dict[str, Function]:
    """PyTorch's ways to the result, by name."""
    if "dense" in work.peers:
        return {"torch dense": F.linear}
    if work.op.name == "flash_attn":
        return flash_attn(work)
    return {"torch": ONE[work.op.name]} if work.op.name in ONE else {}


def tensors(work: Work, operands: Sequence[jax.Array]) -> list[torch.Tensor]:
    """The operands, sharing their memory."""
    given = [tensor(x) for x in operands]
    if work.op.name == "conv2d":
        return [x.contiguous(memory_format=torch.channels_last) for x in given[:2]] + given[2:]
    return given


def tensor(x: jax.Array) -> torch.Tensor:
    """One array; unsigned words read as signed ones, which PyTorch computes with."""
    if x.dtype == jnp.uint32:
        x = x.astype(jnp.int32)
    return torch.from_dlpack(x)


def array(x: torch.Tensor) -> np.ndarray:
    """Float64 on the host."""
    return x.detach().double().cpu().numpy()


def directed(f: Function, direction: str, wrt: Sequence[int]) -> Function:
    """``f`` in a direction, as a function of (operands, cotangent)."""
    if direction == "forward":

        def forward(operands, cotangent):
            with torch.inference_mode():
                return f(*operands)

        return forward

    def pulled(operands, cotangent):
        leaves = list(operands)
        for i in wrt:
            leaves[i] = leaves[i].detach().requires_grad_()
        value = f(*leaves)
        gradient = torch.autograd.grad(value, [leaves[i] for i in wrt], cotangent)
        return gradient if direction == "gradient" else (value, gradient)

    return pulled
