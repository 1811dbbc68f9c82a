"""The same training step in PyTorch, each layer compiled by itself and computed again backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import Tensor  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportMissingImports]

from .llama import EPS, Config, Params, tables

HALF = torch.bfloat16


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """Root mean square, in float32."""
    return (F.rms_norm(x.float(), (x.shape[-1],), eps=EPS) * gain).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of ``[batch, head, sequence, width]``, in float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def layer(x: Tensor, p: dict[str, Tensor], cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """One layer; weights are cast here."""
    p = {name: w.to(HALF) if w.ndim > 1 else w for name, w in p.items()}
    heads = lambda y: y.unflatten(-1, (-1, width)).transpose(1, 2)
    h = norm(x, p["attention_norm"])
    q, k, v = (heads(h @ p[name]) for name in "qkv")
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + y.transpose(1, 2).reshape(x.shape) @ p["out"]
    h = norm(x, p["norm"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def last(x: Tensor, gain: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """The loss."""
    logits = norm(x, gain) @ head.to(HALF)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten().long())


class Training:
    """Weights of ours, Adam's averages, and a step."""

    device: str
    layers: list[dict[str, Tensor]]
    embedding: Tensor
    norm: Tensor
    head: Tensor
    tables: list[Tensor]
    tokens: Tensor
    width: int
    adam: torch.optim.Adam
    layer: Callable[..., Tensor]
    last: Callable[..., Tensor]

    def __init__(self, config: Config, params: Params, tokens: jax.Array) -> None:
        take = lambda x: torch.from_dlpack(x).clone().requires_grad_()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        layers = [{n: w[i] for n, w in params["layers"].items()} for i in range(config.layers)]
        self.layers = [{n: take(w) for n, w in p.items()} for p in layers]
        self.embedding, self.norm, self.head = (
            take(params[name]) for name in ("embedding", "norm", "head")
        )
        self.tables = [torch.from_dlpack(x) for x in tables(config)]
        self.tokens, self.width = torch.from_dlpack(tokens), config.head_width
        weights = [self.embedding, self.norm, self.head]
        weights += [w for p in self.layers for w in p.values()]
        self.adam = torch.optim.Adam(weights, 1e-4, betas=(0.9, 0.99), fused=True)
        self.layer, self.last = layer, last
        if self.device == "cuda":  # on a CPU compiling takes longer than anybody waits
            self.layer, self.last = torch.compile(layer), torch.compile(last)

    def step(self) -> Any:
        """The loss before it."""
        x = F.embedding(self.tokens, self.embedding).to(HALF)
        for p in self.layers:
            x = checkpoint(self.layer, x, p, *self.tables, self.width, use_reentrant=False)
        loss = self.last(x, self.norm, self.head, self.tokens)
        loss.backward()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return loss.detach()

    def temporary(self) -> int:
        """Bytes of a step beside what stays; 0 where nobody counts."""
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        stays = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - stays

    def burst(self, n: int) -> float:
        """Seconds of each of n steps."""
        since = time.perf_counter()
        for _ in range(n):
            self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - since) / n
