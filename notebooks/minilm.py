"""all-MiniLM-L6-v2, a sentence encoder of six layers, made of fuel_jax ops.

    params = load(path)                             weights as sentence-transformers published them
    embed(params, path, sentences)                  [sentences, 384], rows of norm 1
    embed(pack(params, nf4), path, sentences)       the same with linear layers in 4 bits

Post-norm; bidirectional attention that sees the tokens of a sentence and not its padding; the mean
of the last layer's tokens is the embedding.  Arrays are ``[batch, sequence, width]``.
"""

import dataclasses
import functools
import pydoc_data.topics
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
from jax import Array

from fuel_jax import (
    awq_matmul,
    flash_attn,
    fused_linear,
    gelu,
    index_select,
    layer_norm_last_dim,
    nf4_matmul,
    qmatmul,
)
from fuel_jax.formats.quantize import QuantType, quantize, quantize_awq, quantize_nf4

LAYERS, HEADS, EPS = 6, 12, 1e-12  # of the model's config.json

Params = dict[str, Any]

# -- the file --------------------------------------------------------------------------------


def load(folder: Path) -> Params:
    """The weights in ``model.safetensors``, by layer; linear ones ``w [in, out]`` and ``b``."""
    flat = safetensors.numpy.load_file(folder / "model.safetensors")

    def linear(name: str) -> Params:
        return {"w": jnp.asarray(flat[f"{name}.weight"].T), "b": jnp.asarray(flat[f"{name}.bias"])}

    def norm(name: str) -> Params:
        return {k: jnp.asarray(flat[f"{name}.LayerNorm.{k}"]) for k in ("weight", "bias")}

    def layer(at: str) -> Params:
        return {
            "query": linear(f"{at}.attention.self.query"),
            "key": linear(f"{at}.attention.self.key"),
            "value": linear(f"{at}.attention.self.value"),
            "out": linear(f"{at}.attention.output.dense"),
            "attention_norm": norm(f"{at}.attention.output"),
            "up": linear(f"{at}.intermediate.dense"),
            "down": linear(f"{at}.output.dense"),
            "norm": norm(f"{at}.output"),
        }

    table = lambda name: jnp.asarray(flat[f"embeddings.{name}_embeddings.weight"])
    return {
        "word": table("word"),
        "position": table("position"),
        "type": table("token_type"),
        "norm": norm("embeddings"),
        "layers": [layer(f"encoder.layer.{i}") for i in range(LAYERS)],
    }


def tokenize(folder: Path, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids ``[sentences, longest]``, padded, and how many of each row are real."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_to_multiple_of=32)  # so that few lengths are compiled
    rows = tokenizer.encode_batch(list(sentences))
    ids = np.array([row.ids for row in rows], np.int32)
    return ids, np.array([sum(row.attention_mask) for row in rows], np.int32)


# -- the encoder -------------------------------------------------------------------------------


def linear(p: Params, x: Array) -> Array:
    """``x @ w + b`` over the last axis, whether ``w`` is packed or not."""
    if isinstance(p["w"], Packed):
        return p["w"].product(x, *p["w"].operands) + p["b"]
    rows = fused_linear(x.reshape(-1, x.shape[-1]), p["w"], p["b"])
    return rows.reshape(*x.shape[:-1], -1)


def norm(p: Params, x: Array) -> Array:
    """Layer normalisation with gain and bias."""
    return layer_norm_last_dim(x, eps=EPS) * p["weight"] + p["bias"]


def attention(p: Params, x: Array, lengths: Array) -> Array:
    """Each token looks at the first ``lengths[b]`` of its sentence."""
    heads = lambda y: y.reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2)
    q, k, v = (heads(linear(p[name], x)) for name in ("query", "key", "value"))
    y = flash_attn(q, k, v, k_len=lengths)
    return linear(p["out"], y.swapaxes(1, 2).reshape(x.shape))


@jax.jit
def encode(params: Params, ids: Array, lengths: Array) -> Array:
    """Embeddings of norm 1, ``[batch, width]``, of ``ids [batch, sequence]``."""
    words = index_select(params["word"], ids.reshape(-1), dim=0).reshape(*ids.shape, -1)
    x = norm(params["norm"], words + params["position"][: ids.shape[1]] + params["type"][0])
    for p in params["layers"]:
        x = norm(p["attention_norm"], x + attention(p, x, lengths))
        x = norm(p["norm"], x + linear(p["down"], gelu(linear(p["up"], x))))
    real = jnp.arange(ids.shape[1], dtype=lengths.dtype) < lengths[:, None]
    mean = jnp.sum(jnp.where(real[..., None], x, 0), 1) / lengths[:, None].astype(x.dtype)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def embed(params: Params, folder: Path, sentences: Sequence[str], batch: int = 50) -> np.ndarray:
    """Embeddings of any number of sentences, those of similar length together."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    embedding = np.empty((len(sentences), params["word"].shape[1]), np.float32)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        embedding[rows] = encode(params, *tokenize(folder, [sentences[i] for i in rows]))
    return embedding


# -- packed weights --------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight W in few bits:  ``product(x, *operands)`` is x @ Wᵀ."""

    operands: tuple[Any, ...]
    product: Callable[..., Array] = dataclasses.field(metadata={"static": True})


def nf4(w: np.ndarray) -> Packed:
    """``W [n, k]`` in 4-bit NormalFloat, 64 weights a scale."""
    return Packed(quantize_nf4(w), nf4_matmul)


def awq(w: np.ndarray) -> Packed:
    """In 4 bits with a scale and a zero point for 128 weights."""
    return Packed(quantize_awq(w), awq_matmul)


def gguf(blocks: QuantType, instead: QuantType | None = None) -> Callable[[np.ndarray], Packed]:
    """In llama.cpp's blocks; ``instead`` where rows do not fill those, as llama.cpp does."""

    def packed(w: np.ndarray) -> Packed:
        n, k = w.shape
        form = instead if instead and k % 256 else blocks
        product = functools.partial(qmatmul, quant_type=form, k=k, n=n)
        return Packed((quantize(w, form),), product)

    return packed


FORMS = {
    "NF4": nf4,
    "AWQ": awq,
    "Q8_0": gguf("Q8_0"),
    "Q4K, Q5_0": gguf("Q4K", "Q5_0"),  # five of six matrices have rows of 384
    "Q6K, Q8_0": gguf("Q6K", "Q8_0"),
}


def is_linear(p: Any) -> bool:
    """Whether ``p`` is a linear layer's weight and bias."""
    return isinstance(p, dict) and "w" in p


def pack(params: Params, form: Callable[[np.ndarray], Packed]) -> Params:
    """The linear layers packed; the rest stays float32."""

    def packed(p: Any) -> Any:
        if not is_linear(p):
            return p
        return {**p, "w": jax.tree.map(jnp.asarray, form(np.asarray(p["w"]).T))}

    return params | {"layers": jax.tree.map(packed, params["layers"], is_leaf=is_linear)}


def linear_bytes(params: Params) -> int:
    """Bytes of the linear layers' weights, scales and zero points included."""
    layers = jax.tree.leaves(params["layers"], is_leaf=is_linear)
    return sum(x.nbytes for p in layers if is_linear(p) for x in jax.tree.leaves(p["w"]))


# -- something to encode -----------------------------------------------------------------------


def python_sentences(count: int) -> list[str]:
    """Sentences of Python's language reference, as ``help()`` shows it, in its order."""
    text = " ".join(" ".join(pydoc_data.topics.topics.values()).split())
    found = re.findall(r"(?<=[.] )[A-Z][A-Za-z ,'-]{40,160}[.](?= [A-Z])", text)
    found = list(dict.fromkeys(found))
    return found[:: len(found) // count][:count]
