"""Weights of models of Llama's architecture: from GGUF files and from folders of safetensors.

Packed weights go to the device as they lie in the file.  What a file has and this model does not
use is an error: it would be another model.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from llama_model import Config, Linear, Params, dense
from numpy.typing import NDArray

from fuel_jax import FileError, awq_matmul, nf4_matmul, qmatmul
from fuel_jax.formats import gguf, safetensors

LARGEST = 2**24  # of any size of a model: vocabulary, width, layers
NO_ROPE_FREQUENCIES = "rotary_emb.inv_freq"  # a buffer that old checkpoints have saved


def load(path: Path, context: int = 2048) -> tuple[Config, Params]:
    """A model and its weights, on the device.

    Args:
        path: a GGUF file; a folder with ``config.json`` and safetensors.
        context: tokens to make room for, at most; no more than the model was trained for.

    Raises:
        FileError: the file is damaged, or holds another model than this one.
    """
    path = Path(path)
    return from_folder(path, context) if path.is_dir() else from_gguf(path, context)


# -- numbers that a file says of its model -----------------------------------------------------


class Said:
    """Settings by name, checked as they are read."""

    def __init__(self, where: str, settings: Mapping[str, Any]):
        self.where, self.settings = where, settings

    def fail(self, said: str) -> Exception:
        """An error about the file."""
        return FileError(f"{self.where}: {said}")

    def given(self, name: str, default: Any) -> Any:
        """A setting; the default where there is none, or null."""
        value = self.settings.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        value = self.given(name, default)
        if type(value) is not int or not 0 < value <= LARGEST:
            raise self.fail(f"{name!r} is {shown(value)}; it must be from 1 to {LARGEST}.")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.given(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.fail(f"{name!r} is {shown(value)}; it must be a positive number.")
        return float(value)

    def only(self, name: str, *allowed: Any) -> Any:
        """One of a few values, the first if there is none."""
        value = self.given(name, allowed[0])
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise self.fail(f"{name!r} is {shown(value)}; this model knows {list(allowed)}.")
        return value


def shown(value: Any) -> str:
    """A value, in few words."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def config_of(said: Said, names: Mapping[str, str], context: int, **known: int) -> Config:
    """Sizes under the names a kind of file has for them; and what must hold between them."""
    heads = said.size(names["heads"])
    kv_heads = said.size(names["kv_heads"], heads)
    width = said.size(names["width"])
    if heads % kv_heads:
        raise said.fail(f"{heads} heads cannot share {kv_heads} heads of keys.")
    if said.given(names["head_width"], None) is None and width % heads:
        raise said.fail(f"{heads} heads do not divide a width of {width}.")
    head_width = said.size(names["head_width"], max(width // heads, 1))
    if head_width % 2:
        raise said.fail(f"heads are {head_width} wide; rotary positions need an even width.")
    trained = said.given(names["context"], context)
    if type(trained) is not int or trained < 2:
        raise said.fail(f"{names['context']!r} is {shown(trained)}; it must be at least 2.")
    return Config(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        layers=said.size(names["layers"]),
        hidden=said.size(names["hidden"]),
        vocabulary=known["vocabulary"],
        context=min(context, trained),
        eps=said.positive(names["eps"], 1e-6),
    )


def rope_tables(context: int, frequencies: NDArray[np.float64]) -> tuple[Any, Any]:
    """cos and sin of position · frequency, ``[context, 2 · frequencies]``; both halves alike."""
    angles = np.outer(np.arange(context), frequencies)
    angles = np.concatenate([angles, angles], -1)
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def frequencies(base: float, width: int) -> NDArray[np.float64]:
    """base^(−2i / width), in radians a token."""
    return base ** -(np.arange(0, width, 2) / width)


# -- layers ------------------------------------------------------------------------------------

# ours -> name in GGUF, name in a checkpoint, sizes [n, k]
LINEAR: dict[str, tuple[str, str, Callable[[Config], tuple[int, int]]]] = {
    "q": ("attn_q", "self_attn.q_proj", lambda c: (c.heads * c.head_width, c.width)),
    "k": ("attn_k", "self_attn.k_proj", lambda c: (c.kv_heads * c.head_width, c.width)),
    "v": ("attn_v", "self_attn.v_proj", lambda c: (c.kv_heads * c.head_width, c.width)),
    "out": ("attn_output", "self_attn.o_proj", lambda c: (c.width, c.heads * c.head_width)),
    "gate": ("ffn_gate", "mlp.gate_proj", lambda c: (c.hidden, c.width)),
    "up": ("ffn_up", "mlp.up_proj", lambda c: (c.hidden, c.width)),
    "down": ("ffn_down", "mlp.down_proj", lambda c: (c.width, c.hidden)),
}
NORMS = {
    "attention_norm": ("attn_norm", "input_layernorm"),
    "norm": ("ffn_norm", "post_attention_layernorm"),
}


class Taken:
    """Tensors by name; those never taken are reported at the end."""

    def __init__(self, where: Any, tensors: Mapping[str, Any]):
        self.where, self.tensors, self.left = where, tensors, set(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str) -> Any:
        """A tensor."""
        self.left.discard(name)
        return self.tensors[name]

    def vector(self, name: str, width: int, array: Callable[[Any], Any]) -> Any:
        """A gain, a bias: float32 on the device."""
        x = array(self.take(name))
        if x.shape != (width,) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise FileError(
                f"{self.where}: {name!r} is {x.dtype}{list(x.shape)}; it must be floats [{width}]."
            )
        return jnp.asarray(x.astype(np.float32))

    def require_shape(self, name: str, got: Any, want: tuple[int, ...]) -> None:
        """An error where a tensor is not of the size that the settings say."""
        if tuple(got) != want:
            raise FileError(
                f"{self.where}: {name!r} is {list(got)}; by the model's settings it must be "
                f"{list(want)}."
            )

    def require_all(self) -> None:
        """An error where a tensor was not used."""
        if self.left:
            some = ", ".join(sorted(self.left)[:5])
            raise FileError(
                f"{self.where}: holds {len(self.left)} tensors that Llama has not: {some}. "
                f"It is another model."
            )


# -- GGUF --------------------------------------------------------------------------------------

GGUF_NAMES = {
    **{"width": "llama.embedding_length", "layers": "llama.block_count"},
    **{"heads": "llama.attention.head_count", "kv_heads": "llama.attention.head_count_kv"},
    **{"head_width": "llama.attention.key_length", "hidden": "llama.feed_forward_length"},
    **{"context": "llama.context_length", "eps": "llama.attention.layer_norm_rms_epsilon"},
}


def from_gguf(path: Path, context: int) -> tuple[Config, Params]:
    """A model in llama.cpp's format; its architecture must be ``llama``."""
    file = gguf.read(path)
    said, tensors = Said(str(path), file.metadata), Taken(path, file.tensors)
    if (architecture := file.metadata.get("general.architecture")) != "llama":
        raise said.fail(f"'general.architecture' is {shown(architecture)}; it must be 'llama'.")
    said.only("split.count", 0, 1)
    said.only("llama.expert_count", 0)
    table = file.tensors["token_embd.weight"]
    if len(table.shape) != 2 or not table.size:
        raise said.fail(f"'token_embd.weight' is {list(table.shape)}; it must be [tokens, width].")
    config = config_of(said, GGUF_NAMES, context, vocabulary=table.shape[0])
    said.only("llama.attention.value_length", config.head_width)
    turning = said.size("llama.rope.dimension_count", config.head_width)
    if turning % 2 or turning > config.head_width:
        raise said.fail(
            f"'llama.rope.dimension_count' is {turning}; it must be even, and at most the heads' "
            f"{config.head_width}."
        )

    def linear(name: str, n: int, k: int, turns: bool = False) -> Linear:
        t = tensors.take(f"{name}.weight")
        tensors.require_shape(t.name, t.shape, (n, k))
        rows = halves(n, config.head_width, turning) if turns else None
        bias = None
        if f"{name}.bias" in tensors:
            bias = tensors.vector(f"{name}.bias", n, lambda t: t.array())
            bias = bias if rows is None else bias[rows]
        if t.packed:
            words = t.words() if rows is None else rearranged(t, rows)
            layout = tuple(t.layout.items())
            return Linear((jnp.asarray(words),), bias, qmatmul, layout)
        w = floats(t) if rows is None else floats(t)[rows]
        return Linear((jnp.asarray(w),), bias, dense)

    def floats(t: gguf.Tensor) -> NDArray[Any]:
        if t.name in file.unreadable or not jnp.issubdtype(gguf.DTYPES[t.kind], jnp.floating):
            raise said.fail(f"{t.name!r} is {t.kind}, which no op here multiplies by.")
        return t.array()

    def layer(i: int) -> Params:
        p: Params = {}
        for ours, (name, _, sizes) in LINEAR.items():
            p[ours] = linear(f"blk.{i}.{name}", *sizes(config), turns=ours in ("q", "k"))
        for ours, (name, _) in NORMS.items():
            p[ours] = tensors.vector(f"blk.{i}.{name}.weight", config.width, floats)
        return p

    embedding = linear("token_embd", config.vocabulary, config.width)
    head = embedding  # tied, where there is no other
    if "output.weight" in tensors:
        head = linear("output", config.vocabulary, config.width)
    params: Params = {
        "embedding": embedding,
        "layers": [layer(i) for i in range(config.layers)],
        "norm": tensors.vector("output_norm.weight", config.width, floats),
        "head": head,
        "rope": rope_tables(config.context, gguf_frequencies(said, tensors, turning)),
    }
    tensors.require_all()
    return config, params


def halves(n: int, head_width: int, turning: int) -> NDArray[np.intp]:
    """Where rows of a head come from, so that its pairs stand half a head apart.

    llama.cpp rotates neighbours, ``rope`` the halves of a head.
    """
    head = np.arange(head_width)
    head[:turning] = head[:turning].reshape(-1, 2).T.reshape(-1)
    return (np.arange(0, n, head_width)[:, None] + head).reshape(-1)


def rearranged(t: gguf.Tensor, rows: NDArray[np.intp]) -> NDArray[np.uint32]:
    """A packed weight's rows in another order.  Blocks lie along a row, so none is taken apart."""
    moved = t.bytes().reshape(len(rows), -1)[rows].reshape(-1)
    return np.pad(moved, (0, -moved.size % 4)).view("<u4").astype(np.uint32, copy=False)


def gguf_frequencies(said: Said, tensors: Taken, width: int) -> NDArray[np.float64]:
    """As the file says: base, linear scaling, and divisors of each (Llama 3.1's)."""
    per_token = frequencies(said.positive("llama.rope.freq_base", 10000.0), width)
    kind = said.only("llama.rope.scaling.type", "none", "linear")
    if kind == "linear":
        per_token = per_token / said.positive("llama.rope.scaling.factor")
    if "rope_freqs.weight" in tensors:
        array = lambda t: t.array()
        divisors = tensors.vector("rope_freqs.weight", width // 2, array)
        per_token = per_token / np.asarray(divisors, np.float64)
    return per_token


# -- folders of safetensors --------------------------------------------------------------------

FOLDER_NAMES = {
    **{"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
    **{"kv_heads": "num_key_value_heads", "head_width": "head_dim", "hidden": "intermediate_size"},
    **{"context": "max_position_embeddings", "eps": "rms_norm_eps"},
}


def from_folder(path: Path, context: int) -> tuple[Config, Params]:
    """A checkpoint as ``transformers`` saves it: dense, AutoAWQ's or bitsandbytes' NF4."""
    settings = safetensors.json_object((path / "config.json").read_bytes(), f"{path}/config.json")
    said, store = Said(f"{path}/config.json", settings), safetensors.read(path)
    tensors = Taken(path, store)
    said.only("model_type", "llama", "mistral")
    said.only("hidden_act", "silu")
    vocabulary = said.size("vocab_size")
    config = config_of(said, FOLDER_NAMES, context, vocabulary=vocabulary)
    window = settings.get("sliding_window")
    if window is not None and not (type(window) is int and window >= config.context):
        raise said.fail(f"'sliding_window' is {shown(window)}; give a context no longer.")

    def linear(name: str, n: int, k: int) -> Linear:
        bias = None
        if f"{name}.bias" in tensors:
            bias = tensors.vector(f"{name}.bias", n, lambda x: x)
        if safetensors.is_awq(store, name) or safetensors.is_nf4(store, name):
            awq = safetensors.is_awq(store, name)
            operands, params = (safetensors.awq if awq else safetensors.nf4)(store, name)
            shape = operands[0].shape
            tensors.require_shape(name, (shape[0], shape[1] * (8 if awq else 2)), (n, k))
            tensors.left -= {x for x in tensors.left if x.startswith(f"{name}.")}
            product = awq_matmul if awq else nf4_matmul
            on_device = tuple(map(jnp.asarray, operands))
            return Linear(on_device, bias, product, tuple(params.items()))
        w = safetensors.dense(store, f"{name}.weight")
        tensors.left.discard(f"{name}.weight")
        tensors.require_shape(f"{name}.weight", w.shape, (n, k))
        return Linear((jnp.asarray(w),), bias, dense)

    def layer(i: int) -> Params:
        at, p = f"model.layers.{i}", {}
        for ours, (_, name, sizes) in LINEAR.items():
            p[ours] = linear(f"{at}.{name}", *sizes(config))
        for ours, (_, name) in NORMS.items():
            p[ours] = tensors.vector(f"{at}.{name}.weight", config.width, lambda x: x)
        return p

    embedding = linear("model.embed_tokens", config.vocabulary, config.width)
    tied = said.only("tie_word_embeddings", False, True)
    head = embedding if tied else linear("lm_head", config.vocabulary, config.width)
    if tied:
        tensors.left.discard("lm_head.weight")  # the same one, saved twice
    params: Params = {
        "embedding": embedding,
        "layers": [layer(i) for i in range(config.layers)],
        "norm": tensors.vector("model.norm.weight", config.width, lambda x: x),
        "head": head,
        "rope": rope_tables(config.context, folder_frequencies(said, config.head_width)),
    }
    tensors.left = {name for name in tensors.left if not name.endswith(NO_ROPE_FREQUENCIES)}
    tensors.require_all()
    return config, params


def folder_frequencies(said: Said, width: int) -> NDArray[np.float64]:
    """As a configuration says, older or newer: base, linear scaling, Llama 3.1's."""
    settings = dict(said.settings)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(settings.get(name), dict):
            settings |= settings[name]
    rope = Said(said.where, settings)
    per_token = frequencies(rope.positive("rope_theta", 10000.0), width)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return per_token
    if kind == "linear":
        return per_token / rope.positive("factor")
    if kind == "llama3":
        return by_wavelength(rope, per_token)
    raise rope.fail(f"'rope_type' is {shown(kind)}; this model knows default, linear and llama3.")


def by_wavelength(rope: Said, per_token: NDArray[np.float64]) -> NDArray[np.float64]:
    """Llama 3.1's: long waves slower by a factor, short ones as they are, and a ramp between."""
    turns = rope.positive("original_max_position_embeddings") * per_token / (2 * np.pi)
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if not low < high:
        raise rope.fail(f"'low_freq_factor' is {low} and 'high_freq_factor' {high}; not below it.")
    short = np.clip((turns - low) / (high - low), 0, 1)
    return per_token * (short + (1 - short) / rope.positive("factor"))
