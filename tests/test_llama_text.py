"""Tokenizers from GGUF files: SentencePiece by its rules, byte pairs by the tokenizers package."""

import json
import pathlib

import llama_text  # pyproject puts notebooks/ on the path
import pytest

import fuel_jax

gguf = pytest.importorskip("gguf", reason="the package that writes such files")


def test_sentence_pieces(tmp_path):
    """The best pair first, not the longest piece; what is unknown, byte by byte."""
    pieces = {"<unk>": 0, "<s>": 0, "</s>": 0}
    pieces |= {f"<0x{b:02X}>": 0 for b in range(256)}
    pieces |= {"▁": -9, "a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1, "abc": -5, "▁a": -3}
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(pieces))
    writer.add_token_scores([float(score) for score in pieces.values()])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 8])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    t = llama_text.tokenizer(path)
    spelled = lambda text: [list(pieces)[i] for i in t.encode(text)]
    assert spelled("abc") == ["<s>", "▁a", "bc"]
    assert spelled("cab abc") == ["<s>", "▁", "c", "ab", "▁a", "bc"]
    assert spelled("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert t.decode(t.encode("cab é abc")) == " cab é abc"
    assert t.decode([10**9, 2]) == ""
    assert t.stops == {2}


def test_byte_pairs_are_those_of_the_tokenizers_package(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the package that pairs bytes")
    text = "The cat's 12345 über-tokens:\n\n  the end. The cat sat.  然后"
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator([text] * 4, vocab_size=300, min_frequency=2)
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*tokens, "<|begin|>", "<|end|>"])
    writer.add_token_types([1] * len(tokens) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    t = llama_text.tokenizer(path)
    ids = t.encode(text + "<|end|>")
    assert t.decode(ids) == text
    assert ids[0] == len(tokens)
    assert ids[-1] == len(tokens) + 1
    assert t.stops == {len(tokens) + 1}
    at = ids[1:].index(model["vocab"]["Ġ"]) if "Ġ" in model["vocab"] else 0
    assert len(ids) < len(text.encode()), at  # pairs were merged


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "'tokenizer.ggml.model' is None; known are"),
        ({"model": "bert"}, "'tokenizer.ggml.model' is 'bert'"),
        ({"model": "gpt2", "pre": "qwen2"}, "'tokenizer.ggml.pre' is 'qwen2'; known is llama-bpe"),
        ({"model": "llama", "tokens": ["a"]}, "'tokenizer.ggml.scores' must be 1 float"),
        ({"model": "llama", "tokens": [1]}, "'tokenizer.ggml.tokens' must be  ?str"),
    ],
)
def test_tokenizers_that_are_not_known(monkeypatch, metadata, said):
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    file = llama_text.gguf.File(None, 3, named, {})
    monkeypatch.setattr(llama_text.gguf, "read", lambda path: file)
    with pytest.raises(fuel_jax.FileError, match=said):
        llama_text.tokenizer(pathlib.Path("model.gguf"))
