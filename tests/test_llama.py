"""A model of Llama's architecture from its file, against float64 in NumPy: all at once, one by one.

The models are random and small.  What each weight is, the packages say that pack it.
"""

import dataclasses
import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import llama  # pyproject puts notebooks/ on the path
import llama_files
import llama_model
import numpy as np
import pytest

import fuel_jax
from fuel_jax.formats.quantize import quantize, quantize_nf4
from fuel_jax.fused.nf4_matmul import LEVELS

from .formats.test_gguf import damaged

gguf = pytest.importorskip("gguf", reason="the package that writes such files")

# -- in float64, as published ----------------------------------------------------------------------


@dataclasses.dataclass
class Reference:
    """The model; ``w`` by names of GGUF, ``[n, k]`` float64, as they are in the file."""

    w: dict
    layers: int
    heads: int
    kv_heads: int
    angles: np.ndarray  # radians a token, of each pair of a head
    neighbours: bool  # whether pairs are neighbours (llama.cpp) or half a head apart
    eps: float = 1e-5

    def norm(self, name, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def turned(self, x):
        """``[head, token, d]``, each pair by its angle."""
        phase = np.exp(1j * np.outer(np.arange(x.shape[1]), self.angles))
        pairs, width = len(self.angles), 2 * len(self.angles)
        y = x.copy()
        a, b = (np.s_[..., :width:2], np.s_[..., 1:width:2]) if self.neighbours else (
            np.s_[..., :pairs], np.s_[..., pairs:width])  # fmt: skip
        z = (x[a] + 1j * x[b]) * phase
        y[a], y[b] = z.real, z.imag
        return y

    def attention(self, at, h):
        split = lambda x, n: x.reshape(len(h), n, -1).swapaxes(0, 1)
        q = self.turned(split(self.linear(f"{at}.attn_q", h), self.heads))
        k = self.turned(split(self.linear(f"{at}.attn_k", h), self.kv_heads))
        v = split(self.linear(f"{at}.attn_v", h), self.kv_heads)
        each = self.heads // self.kv_heads
        scores = q @ np.repeat(k, each, 0).swapaxes(1, 2) / np.sqrt(q.shape[-1])
        scores[:, ~np.tri(len(h), dtype=bool)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = p / p.sum(-1, keepdims=True) @ np.repeat(v, each, 0)
        return self.linear(f"{at}.attn_output", y.swapaxes(0, 1).reshape(len(h), -1))

    def logits(self, tokens):
        """``[token, vocabulary]``."""
        x = self.w["token_embd.weight"][tokens]
        for i in range(self.layers):
            at = f"blk.{i}"
            x = x + self.attention(at, self.norm(f"{at}.attn_norm", x))
            h = self.norm(f"{at}.ffn_norm", x)
            gate = self.linear(f"{at}.ffn_gate", h)
            gate = gate / (1 + np.exp(-gate)) * self.linear(f"{at}.ffn_up", h)
            x = x + self.linear(f"{at}.ffn_down", gate)
        head = self.w.get("output.weight", self.w["token_embd.weight"])
        return self.norm("output_norm", x) @ head.T


# -- random models ---------------------------------------------------------------------------------

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, VOCABULARY, CONTEXT = 256, 512, 4, 2, 64, 2, 80, 48
SIZES = {
    "attn_q": (HEADS * HEAD, WIDTH),
    "attn_k": (KV_HEADS * HEAD, WIDTH),
    "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 21)


def drawn(tied, biases=False, layers=LAYERS):
    """Weights, float32, by names of GGUF."""
    rng = np.random.default_rng(8)
    normal = lambda *shape: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
    gain = lambda: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
    w = {"token_embd.weight": 16 * normal(VOCABULARY, WIDTH), "output_norm.weight": gain()}
    if not tied:
        w["output.weight"] = normal(VOCABULARY, WIDTH)
    for i in range(layers):
        w |= {f"blk.{i}.{name}.weight": normal(*size) for name, size in SIZES.items()}
        w |= {f"blk.{i}.{name}.weight": gain() for name in ("attn_norm", "ffn_norm")}
        if biases:
            w |= {f"blk.{i}.attn_{x}.bias": normal(SIZES[f"attn_{x}"][0]) for x in "qkv"}
    return w


# Kinds by the last but one part of a name; everything else is F32.
MIXED = {
    **{"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K"},
    **{"attn_output": "Q3_K", "ffn_gate": "Q4_0", "ffn_up": "Q2_K", "ffn_down": "Q5_1"},
}
MODELS = {
    "mixed, tied, Llama 3.1's frequencies": {"kinds": MIXED, "tied": True, "divided": True},
    "blocks of 32, untied": {
        "kinds": dict.fromkeys((*MIXED, "output"), "Q8_0")
        | {"token_embd": "Q4_0", "attn_v": "Q4_1", "ffn_gate": "Q5_0"},
        "tied": False,
    },
    "not packed; biases; a part of each head turns, scaled": {
        "kinds": {"attn_q": "F16", "attn_k": "BF16", "ffn_up": "F16", "token_embd": "BF16"},
        "tied": False,
        "biases": True,
        "turning": 32,
        "factor": 4.0,
    },
}


def stored(w, kind):
    """An array as the writer takes it, and what it then is."""
    if kind == "F32":
        return w, w
    if kind == "F16":
        return w.astype(np.float16), w.astype(np.float16)
    if kind == "BF16":
        half = np.asarray(jnp.asarray(w, jnp.bfloat16))
        return half.view(np.uint8), half
    rows = quantize(w, kind).view(np.uint8)[: len(w) * row_bytes(kind, w.shape[1])]
    rows = rows.reshape(len(w), -1)
    return rows, gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def row_bytes(kind, k):
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return k // weights * size


def write_gguf(
    path, kinds, tied, biases=False, divided=False, turning=HEAD, factor=None, layers=LAYERS
):
    """A file, and its model in float64."""
    w, base = drawn(tied, biases, layers), 500_000.0 if divided else 10_000.0
    angles = base ** -(np.arange(0, turning, 2) / turning)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(turning)
    writer.add_rope_freq_base(base)
    if divided:
        w["rope_freqs.weight"] = np.linspace(1, 8, turning // 2, dtype=np.float32)
        angles = angles / w["rope_freqs.weight"]
    if factor:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
        angles = angles / factor
    for name, x in w.items():
        plain = name.endswith("bias") or x.ndim == 1
        kind = "F32" if plain else kinds.get(name.split(".")[-2], "F32")
        rows, w[name] = stored(x, kind)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact = {name: np.asarray(x).astype(np.float64) for name, x in w.items()}
    return Reference(exact, layers, HEADS, KV_HEADS, angles, neighbours=True)


# -- GGUF ------------------------------------------------------------------------------------------


def whole(config, params, tokens):
    """Logits of a prompt at once, ``[token, vocabulary]``."""

    @jax.jit
    def f(params, tokens):
        empty = llama_model.empty_cache(config)
        x, _ = llama_model.hidden(config, params, empty, tokens, jnp.int32(0))
        return llama_model.logits(config, params, x)[0]

    return f(params, jnp.asarray(tokens[None]))


def one_by_one(config, params, tokens):
    """The same, a token at a time over the cache."""
    traces = []

    def step(params, cache, token, position):
        traces.append(1)
        x, cache = llama_model.hidden(config, params, cache, token, position)
        return llama_model.logits(config, params, x)[0, 0], cache

    f, cache, rows = jax.jit(step, donate_argnums=1), llama_model.empty_cache(config), []
    for i, token in enumerate(tokens):
        scores, cache = f(params, cache, jnp.asarray([[token]]), jnp.int32(i))
        rows.append(scores)
    assert len(traces) == 1
    return jnp.stack(rows)


def near(got, want, bound=1e-5):
    """Within ``bound`` of the largest."""
    assert got.dtype == np.float32
    assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * np.abs(want).max()


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "model.gguf"
    reference = write_gguf(path, **MODELS[request.param])
    return *llama_files.load(path, CONTEXT), reference, path


def test_gguf_at_once_and_one_by_one(model):
    config, params, reference, _ = model
    want = reference.logits(TOKENS)
    near(whole(config, params, TOKENS), want)
    near(one_by_one(config, params, TOKENS), want)


def test_weights_stay_packed_and_a_tied_head_is_the_embedding(model):
    _, params, reference, path = model
    size = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    assert size <= path.stat().st_size
    tied = "output.weight" not in reference.w
    assert (params["head"].operands[0] is params["embedding"].operands[0]) == tied


# -- folders of safetensors ------------------------------------------------------------------------

FOLDER = {  # GGUF's names -> a checkpoint's
    **{gguf_name: name for gguf_name, name, _ in llama_files.LINEAR.values()},
    **dict(llama_files.NORMS.values()),
}


def checkpoint_name(name):
    """Of a weight."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        return f"model.layers.{match[1]}.{FOLDER[match[2]]}.{match[3]}"
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    return f"{top[name.partition('.')[0]]}.weight"


def as_half(name, w):
    """Not packed, BF16."""
    half = np.asarray(jnp.asarray(w, jnp.bfloat16))
    return {f"{name}.weight": half}, half


def as_awq(name, w, group=64):
    """AutoAWQ's GEMM layout: transposed, eight columns a word, even ones first."""
    rng = np.random.default_rng(len(name))
    codes = rng.integers(0, 16, w.shape)
    zeros = rng.integers(0, 16, (w.shape[0], w.shape[1] // group))
    scales = rng.uniform(0.005, 0.01, zeros.shape).astype(np.float16)
    each = lambda x: np.repeat(x.astype(np.float64), group, 1)

    def words(x):
        mixed = x.T.reshape(x.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
        return np.bitwise_or.reduce(mixed << np.arange(0, 32, 4, dtype=np.uint32), -1).view("i4")

    packed = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.copy()}
    return {f"{name}.{k}": v for k, v in packed.items()}, (codes - each(zeros)) * each(scales)


def nf4_state(w, **more):
    """bitsandbytes' JSON text, as bytes."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(w.shape)}
    return np.frombuffer(json.dumps(state | more).encode(), np.uint8)


def as_nf4(name, w):
    """As bitsandbytes saves a 4-bit layer."""
    codes, absmax = quantize_nf4(w)
    parts = {
        "weight": codes.reshape(-1, 1),
        "weight.absmax": absmax.reshape(-1),
        "weight.quant_map": LEVELS,
        "weight.quant_state.bitsandbytes__nf4": nf4_state(w),
    }
    return {f"{name}.{k}": v for k, v in parts.items()}, nf4_weights(codes, absmax)


def nf4_weights(codes, absmax):
    pairs = np.stack([codes >> 4, codes & 15], -1).reshape(*absmax.shape, 64)
    return (LEVELS[pairs].astype(np.float64) * absmax[..., None]).reshape(len(codes), -1)


def as_nf4_nested(name, w):
    """With scales that are packed, too: 256 levels, in blocks of 256, around their mean."""
    parts, _ = as_nf4(name, w)
    codes, absmax = quantize_nf4(w)
    mean, levels = float(absmax.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
    loose = absmax.reshape(-1) - np.float32(mean)
    largest = np.array(
        [np.abs(part).max() for part in np.split(loose, range(256, loose.size, 256))]
    )
    each = np.repeat(largest, 256)[: loose.size]
    packed = np.rint((loose / each + 1) * 127.5).astype(np.uint8)
    nested = {"nested_blocksize": 256, "nested_offset": mean, "nested_dtype": "float32"}
    more = {
        "weight.absmax": packed,
        "weight.nested_absmax": largest.astype(np.float32),
        "weight.nested_quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": nf4_state(w, **nested),
    }
    scales = (levels[packed].astype(np.float64) * each + mean).reshape(absmax.shape)
    assert np.abs(scales / absmax - 1).max() < 0.02
    return parts | {f"{name}.{k}": v for k, v in more.items()}, nf4_weights(codes, scales)


PACKERS = {f.__name__: f for f in (as_half, as_awq, as_nf4, as_nf4_nested)}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}


def write_folder(folder, packer, tied, rope=None):
    """A checkpoint, in two files with an index, and its model in float64."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="the package of such files")
    w, files = drawn(tied), ({}, {})
    for i, (name, x) in enumerate(w.items()):
        theirs = checkpoint_name(name)
        if x.ndim == 2 and name.startswith("blk"):
            parts, w[name] = packer(theirs.removesuffix(".weight"), x)
            files[i % 2].update(parts)
        else:
            files[i % 2][theirs] = x
    where = {}
    for i, part in enumerate(files):
        name = f"model-{i}.safetensors"
        safetensors.save_file({k: np.ascontiguousarray(v) for k, v in part.items()}, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    settings = {
        **{"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5},
        **{"num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "rope_theta": 10000.0},
        **{"max_position_embeddings": CONTEXT, "tie_word_embeddings": tied},
        **{"head_dim": None, "sliding_window": None},  # as some have it
    }
    angles = 10_000.0 ** -(np.arange(0, HEAD, 2) / HEAD)
    if rope:  # Llama 3.1, as its authors wrote it
        settings["rope_scaling"], original = rope, rope["original_max_position_embeddings"]
        low, high = (original / rope[f"{x}_freq_factor"] for x in ("low", "high"))
        for i, f in enumerate(angles):
            wave = 2 * np.pi / f
            smooth = (original / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            between = (1 - smooth) * f / rope["factor"] + smooth * f
            angles[i] = f if wave < high else f / rope["factor"] if wave > low else between
    (folder / "config.json").write_text(json.dumps(settings))
    exact = {name: np.asarray(x).astype(np.float64) for name, x in w.items()}
    return Reference(exact, LAYERS, HEADS, KV_HEADS, angles, neighbours=False)


@pytest.mark.parametrize(
    ("packer", "tied", "rope"),
    [
        ("as_half", False, LLAMA3),
        ("as_awq", True, None),
        ("as_nf4", False, None),
        ("as_nf4_nested", True, None),
    ],
)
def test_checkpoints_at_once_and_one_by_one(tmp_path, packer, tied, rope):
    reference = write_folder(tmp_path, PACKERS[packer], tied, rope)
    config, params = llama_files.load(tmp_path, CONTEXT)
    want = reference.logits(TOKENS)
    near(whole(config, params, TOKENS), want)
    near(one_by_one(config, params, TOKENS), want)
    packed = {"as_half": jnp.bfloat16, "as_awq": np.uint32}.get(packer, np.uint8)
    assert params["layers"][0]["up"].operands[0].dtype == packed


# -- writing -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A file that is quick to load, and a writer."""
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    kinds = dict.fromkeys((*MIXED, "output"), "Q8_0")
    reference = write_gguf(path, kinds, tied=False, layers=1)
    return path, reference, llama.Writer(*llama_files.load(path, CONTEXT))


def first(n, tokens):
    return [token for token, _ in zip(tokens, range(n), strict=False)]


def test_greedy_writing_is_the_reference_s_and_compiles_a_step_once(small):
    _, reference, writer = small
    prompt, before = TOKENS[:5].tolist(), writer.compilations
    want = list(prompt)
    for _ in range(6):
        want.append(int(reference.logits(np.array(want))[-1].argmax()))
    assert first(6, writer.write(prompt)) == want[5:]
    assert first(3, writer.write(want[:8])) == want[8:]  # as long a prompt, padded
    assert writer.compilations - before == 2  # a prompt of 8, a step


def test_it_writes_until_the_context_is_full(small):
    *_, writer = small
    prompt = TOKENS[:4].tolist() * 10
    written = list(writer.write(prompt))
    assert len(prompt) + len(written) == CONTEXT
    again = list(writer.write(prompt, llama.Sampling(temperature=1.0, seed=3)))
    assert again == list(writer.write(prompt, llama.Sampling(temperature=1.0, seed=3)))
    assert again != list(writer.write(prompt, llama.Sampling(temperature=1.0, seed=4)))
    assert list(writer.write(prompt, llama.Sampling(temperature=1.0, top_k=1))) == written


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "the prompt has 0 tokens; it must have from 1 to 47"),
        ([1] * CONTEXT, "the prompt has 48 tokens"),
        ([VOCABULARY], "tokens must be from 0 to 79"),
        ([-1], "tokens must be from 0 to 79"),
    ],
)
def test_prompts_that_cannot_be_read(small, prompt, said):
    *_, writer = small
    with pytest.raises(ValueError, match=said):
        next(writer.write(prompt))


PROBABILITIES = np.array([0.05, 0.4, 0.0, 0.25, 0.3])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "want"),
    [
        (1.0, 0, 1.0, PROBABILITIES),
        (0.5, 0, 1.0, PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        (1.0, 2, 1.0, [0, 4 / 7, 0, 0, 3 / 7]),
        (1.0, 1, 1.0, [0, 1, 0, 0, 0]),
        (1.0, 0, 0.4, [0, 1, 0, 0, 0]),  # which has 0.4 by itself
        (1.0, 0, 0.5, [0, 4 / 7, 0, 0, 3 / 7]),
        (1.0, 3, 0.75, [0, 8 / 19, 0, 5 / 19, 6 / 19]),  # 0.4, 0.3 have 0.74 of the three
        (1.0, 0, 1e-9, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(temperature, top_k, top_p, want):
    with np.errstate(divide="ignore"):
        scores = jnp.asarray(np.log(PROBABILITIES), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    how = jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)
    tokens = jax.jit(jax.vmap(lambda key: llama.drawn(scores, key, *how)))(keys)
    share = np.bincount(tokens, minlength=5) / len(keys)
    want = np.asarray(want, float)
    assert not share[want == 0].any()
    assert np.abs(share - want).max() < 4 * 0.5 / np.sqrt(len(keys))  # four deviations


# -- files that are other than they should be ------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "gemma", "'general.architecture' is 'gemma'; it must be 'llama'"),
        ("split.count", 3, r"'split.count' is 3; this model knows \[0, 1\]"),
        ("llama.expert_count", 8, r"'llama.expert_count' is 8; this model knows \[0\]"),
        ("llama.attention.head_count", 0, "head_count' is 0; it must be from 1 to 16777216"),
        ("llama.attention.head_count", 2**32 - 1, "head_count' is 4294967295"),
        ("llama.attention.head_count", 2**20, "1048576 heads do not divide a width of 256"),
        ("llama.attention.head_count_kv", 3, "4 heads cannot share 3 heads of keys"),
        ("llama.attention.key_length", 2**24, "'blk.0.attn_q.weight' is .*must be .67108864, 256"),
        ("llama.block_count", 2**24, "no tensor 'blk.1.attn_q.weight'; did you mean"),
        ("llama.block_count", 0, "block_count' is 0; it must be from 1"),
        ("llama.embedding_length", 512, r"'token_embd.weight' is \[80, 256\]; .*\[80, 512\]"),
        ("llama.feed_forward_length", 2**24, "'blk.0.ffn_gate.weight' is"),
        ("llama.context_length", 0, "'llama.context_length' is 0; it must be at least 2"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "is nan; it must be a positive"),
        ("llama.rope.freq_base", 0.0, "freq_base' is 0.0; it must be a positive number"),
        ("llama.rope.dimension_count", 63, "is 63; it must be even, and at most the heads' 64"),
        ("llama.rope.dimension_count", 128, "is 128; it must be even"),
        ("llama.rope.scaling.type", "yarn", "'yarn'; this model knows .'none', 'linear'"),
        ("llama.attention.value_length", 32, "value_length' is 32; this model knows .64"),
    ],
)
def test_gguf_settings_that_do_not_hold(small, monkeypatch, key, value, said):
    path, *_ = small
    file = llama_files.gguf.read(path)
    changed = file._replace(metadata=file.metadata | {key: value})
    monkeypatch.setattr(llama_files.gguf, "read", lambda path: changed)
    with pytest.raises(fuel_jax.FuelError, match=said):
        llama_files.load(path, CONTEXT)


def test_gguf_tensors_that_no_op_takes(small, monkeypatch):
    path, *_ = small
    file = llama_files.gguf.read(path)
    other = file.tensors["blk.0.attn_q.weight"]._replace(kind="IQ4_NL")
    changed = file._replace(tensors=file.tensors | {other.name: other})
    monkeypatch.setattr(llama_files.gguf, "read", lambda path: changed)
    with pytest.raises(fuel_jax.FileError, match=r"'blk.0.attn_q.weight' is IQ4_NL, which no op"):
        llama_files.load(path, CONTEXT)


def test_damaged_files_are_loaded_or_refused(small, tmp_path):
    """Whatever is damaged in the header: sizes, names, numbers."""
    rng, outcomes, path = random.Random(20261130), {True: 0, False: 0}, tmp_path / "model.gguf"
    whole = small[0].read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(whole, 1900, rng))
        try:
            llama_files.load(path, CONTEXT)
            outcomes[True] += 1
        except fuel_jax.FuelError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma"}, "'model_type' is 'gemma'; this model knows"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"vocab_size": 81}, r"'model.embed_tokens.weight' is \[80, 256\]; .*\[81, 256\]"),
        ({"num_hidden_layers": 1}, "tensors that Llama has not: model.layers.1"),
        ({"sliding_window": 16}, "'sliding_window' is 16; give a context no longer"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'rope_type' is 'yarn'; this model knows"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None; it must be a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "'low_freq_factor' is 5.0"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1"),
        ({"num_attention_heads": "4"}, "'num_attention_heads' is '4'"),
        ({"head_dim": 63}, "heads are 63 wide; rotary positions need an even width"),
    ],
)
def test_folder_settings_that_do_not_hold(folder, tmp_path, change, said):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    settings = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(fuel_jax.FileError, match=said):
        llama_files.load(tmp_path, CONTEXT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    write_folder(folder, as_half, tied=True)
    return folder


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_tokens_and_says_how_fast(small, capsys):
    path, reference, _ = small
    prompt = TOKENS[:5].tolist()
    asked = [str(path), "--tokens", ",".join(map(str, prompt)), "--length", "3"]
    assert llama.main([*asked, "--context", str(CONTEXT)]) == 0
    said = capsys.readouterr()
    written = [int(token) for token in said.out.split(",")]
    assert len(written) == 3
    assert written[0] == reference.logits(np.array(prompt))[-1].argmax()
    assert re.search(r"^3 tokens, [\d.]+ tokens/s \(the first after [\d.]+ s", said.err)


def test_a_line_of_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = llama.Progress(total=9)
    for _ in range(2):
        progress("the text\nso far")
    lines = capsys.readouterr().err.split("\r\033[K")
    assert re.fullmatch(r"2 of 9 tokens, [\d.]+ tokens/s  the text so far", lines[-1])
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["none.gguf", "--tokens", "1"], 1, "llama: .*No such file"),
        (["none.gguf"], 2, "give --prompt or --tokens"),
        (["none.gguf", "--tokens", "1", "--prompt", "a"], 2, "give --prompt or --tokens"),
        (["none.gguf", "--tokens", "1", "--top-p", "0"], 2, "--top-p is above 0"),
        (["none.gguf", "--tokens", "1", "--length", "0"], 2, "a length is at least 1"),
        ([__file__, "--tokens", "1"], 1, "llama: .*byte 0: begins with .*a GGUF file begins with"),
    ],
)
def test_bad_commands(arguments, status, said, capsys):
    if status == 1:
        assert llama.main(arguments) == 1
    else:
        with pytest.raises(SystemExit, match="2"):
            llama.main(arguments)
    assert re.search(said, capsys.readouterr().err)
