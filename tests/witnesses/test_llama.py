"""``transformers``' Llama beside ours: files that it writes, its weights in a GGUF file."""

import jax
import jax.numpy as jnp
import llama_files  # pyproject puts notebooks/ on the path
import llama_model
import numpy as np
import pytest

CONTEXT = 64
TOKENS = np.random.default_rng(5).integers(0, 96, 33)
SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    },
}


@pytest.fixture(scope="module")
def transformers():
    # Imported here, not above: it takes seconds, and in each process that collects this file.
    pytest.importorskip("torch", reason="the judge runs on it")
    pytest.importorskip("safetensors", reason="what reads its files")
    transformers = pytest.importorskip("transformers", reason="the judge")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def theirs(model):
    import torch

    with torch.no_grad():
        return model.double()(torch.tensor(TOKENS)[None]).logits[0].numpy()


def ours(path):
    config, params = llama_files.load(path, CONTEXT)

    @jax.jit
    def run(params, tokens):
        empty = llama_model.empty_cache(config)
        x, _ = llama_model.hidden(config, params, empty, tokens, jnp.int32(0))
        return llama_model.logits(config, params, x)[0]

    return np.asarray(run(params, jnp.asarray(TOKENS[None])), np.float64)


def random_model(transformers, **settings):
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.2, **settings)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:  # gains and biases, which begin as ones and zeros
                p.copy_(torch.rand_like(p) + 0.5 * name.endswith("weight"))
    return model


@pytest.mark.parametrize("rope", ROPES)
def test_what_it_saves(transformers, tmp_path, rope):
    settings = {"attention_bias": rope == "linear", "tie_word_embeddings": rope == "plain"}
    model = random_model(transformers, rope_parameters=ROPES[rope], **settings)
    model.save_pretrained(tmp_path)
    got, want = ours(tmp_path), theirs(model)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_head_of_its_own_width(transformers, tmp_path):
    model = random_model(transformers, head_dim=32)
    model.save_pretrained(tmp_path)
    got, want = ours(tmp_path), theirs(model)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def neighbours(w, heads):
    """Rows of queries and keys as llama.cpp's converter puts them: rotary pairs side by side."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def test_its_weights_in_a_gguf_file(transformers, tmp_path):
    """Packed by the gguf package, under its names; the judge computes with what they then are."""
    import torch

    gguf = pytest.importorskip("gguf", reason="what packs the weights and writes the file")
    model = random_model(transformers, rope_parameters=ROPES["plain"])
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(1000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, w in model.state_dict().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if w.ndim == 2 else gguf.GGMLQuantizationType.F32
        rows = gguf.quants.quantize(w.numpy(), kind)
        w.copy_(torch.tensor(gguf.quants.dequantize(rows, kind)))
        if "q_proj" in name or "k_proj" in name:
            rows = neighbours(rows, 4 if "q_proj" in name else 2)
        writer.add_tensor(names.get_name(name, (".weight",)), rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got, want = ours(tmp_path / "model.gguf"), theirs(model)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
