"""Blocks of well-known models as people write them, each with the ops that stand in it by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SHORT = {
    "softmax": "softmax_last_dim",
    "log_softmax": "log_softmax_last_dim",
    "rms_norm": "rms_norm_last_dim",
    "layer_norm": "layer_norm_last_dim",
    "linear": "fused_linear",
    "cross_entropy": "fused_softmax_cross_entropy",
}


@dataclasses.dataclass(frozen=True)
class Block:
    """A program, and how often each op stands in it."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    sites: dict[str, int]
    near: tuple[str, ...]  # ops that are reported as near misses


BLOCKS: list[Block] = []


def block(near: tuple[str, ...] = (), **sites: int) -> Callable[[Any], Any]:
    """Decorator: a builder of a function and its arguments; ``sites`` were counted by hand."""

    def enter(build: Any) -> Any:
        module = build.__module__.rsplit("blocks_", 1)[-1]
        full = {SHORT.get(n, n): k for n, k in sites.items()}
        BLOCKS.append(Block(f"{module}.{build.__name__}", build, full, near))
        return build

    return enter


def draw(seed: int, dtype: Any = jnp.float32, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Arrays by name, normal and small enough that nothing saturates."""
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(0.5 * rng.standard_normal(s), dtype) for n, s in shapes.items()}


def tokens(seed: int, shape: tuple[int, ...], vocabulary: int) -> jax.Array:
    """Token ids."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocabulary, shape), jnp.int32)
