"""Texts as tokens: the tokenizer that a model's file or folder holds.

GGUF files of the older Llamas have a SentencePiece vocabulary with scores, encoded here.  Those of
Llama 3 on have byte pairs, which the ``tokenizers`` package encodes, as it does the
``tokenizer.json`` of a folder.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fuel_jax import FileError
from fuel_jax.formats import gguf

SPACE = "▁"  # SentencePiece's
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
CONTROL = 3  # a token's type in GGUF

# How Llama 3 cuts a text before it pairs bytes; the name is llama.cpp's.
CUTS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class Tokenizer(NamedTuple):
    """Both directions, and the tokens that end a text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stops: frozenset[int]


def tokenizer(path: Path) -> Tokenizer:
    """That of a GGUF file or of a folder.

    Raises:
        FileError: it has none, or one of another kind.
        ImportError: it needs the ``tokenizers`` package.
    """
    if path.is_dir():
        return of_folder(path)
    metadata = gguf.read(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return sentence_pieces(path, metadata)
    if kind == "gpt2":
        return byte_pairs(path, metadata)
    raise FileError(
        f"{path}: 'tokenizer.ggml.model' is {kind!r}; known are 'llama' and 'gpt2'. "
        f"Give the prompt as numbers, with --tokens."
    )


def entries(path: Path, metadata: dict[str, Any], name: str, of: type, count: int = 0) -> list[Any]:
    """A list of the vocabulary, ``count`` long."""
    found = metadata.get(f"tokenizer.ggml.{name}", [])
    found = found if isinstance(found, list) else getattr(found, "tolist", list)()
    if (count and len(found) != count) or not all(isinstance(x, of) for x in found):
        raise FileError(f"{path}: 'tokenizer.ggml.{name}' must be {count or ''} {of.__name__}.")
    return found


def special(metadata: dict[str, Any], *names: str) -> list[int]:
    """Ids of special tokens, those that there are."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return [i for i in ids if type(i) is int]


def sentence_pieces(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece's: neighbours are joined, the pair of the best score first, while one is known.

    What is not known is spelled in bytes, tokens ``<0x00>`` to ``<0xFF>``.
    """
    tokens = entries(path, metadata, "tokens", str)
    scores = entries(path, metadata, "scores", float, len(tokens))
    kinds = entries(path, metadata, "token_type", int, len(tokens))
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] != CONTROL}
    first = special(metadata, "bos") * bool(metadata.get("tokenizer.ggml.add_bos_token", True))
    prefix = SPACE * bool(metadata.get("tokenizer.ggml.add_space_prefix", True))

    def encode(text: str) -> list[int]:
        pieces = list((prefix + text).replace(" ", SPACE))
        while True:
            joined = enumerate(a + b for a, b in itertools.pairwise(pieces))
            known = ((scores[ids[piece]], -i) for i, piece in joined if piece in ids)
            best = max(known, default=None)
            if best is None:
                break
            i = -best[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        found = list(first)
        for piece in pieces:
            spelled = [piece] if piece in ids else [f"<0x{b:02X}>" for b in piece.encode()]
            if unknown := [p for p in spelled if p not in ids]:
                raise FileError(f"{path}: its vocabulary has no {unknown[0]}, for {piece!r}.")
            found += (ids[p] for p in spelled)
        return found

    def decode(numbers: Sequence[int]) -> str:
        loose = bytearray()
        for i in numbers:
            if i < len(tokens) and kinds[i] != CONTROL:
                byte = BYTE.fullmatch(tokens[i])
                loose += bytes([int(byte[1], 16)]) if byte else tokens[i].encode()
        return loose.decode(errors="replace").replace(SPACE, " ")

    return Tokenizer(encode, decode, frozenset(special(metadata, "eos", "eot")))


def byte_pairs(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    """Llama 3's: byte pairs, by the ``tokenizers`` package."""
    cut = metadata.get("tokenizer.ggml.pre")
    if cut not in CUTS:
        raise FileError(
            f"{path}: 'tokenizer.ggml.pre' is {cut!r}; known is {', '.join(CUTS)}. "
            f"Give the prompt as numbers, with --tokens."
        )
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens = entries(path, metadata, "tokens", str)
    kinds = entries(path, metadata, "token_type", int, len(tokens))
    merges = [tuple(pair.split(" ", 1)) for pair in entries(path, metadata, "merges", str)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, ignore_merges=True)  # pyright: ignore
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
        [
            pre_tokenizers.Split(tokenizers.Regex(CUTS[cut]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    made.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    first = special(metadata, "bos") * bool(metadata.get("tokenizer.ggml.add_bos_token", True))
    encode = lambda text: [*first, *made.encode(text).ids]
    return Tokenizer(encode, made.decode, frozenset(special(metadata, "eos", "eot")))


def of_folder(path: Path) -> Tokenizer:
    """The ``tokenizer.json`` of a checkpoint."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ends = (made.token_to_id(t) for t in ("</s>", "<|end_of_text|>", "<|eot_id|>"))
    return Tokenizer(
        lambda text: made.encode(text).ids, made.decode, frozenset(i for i in ends if i is not None)
    )
