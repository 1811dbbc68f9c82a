"""Text from a model of Llama's architecture, straight from its file; weights stay packed.

python notebooks/llama.py model.gguf --prompt "The sky is"      llama.cpp's files
python notebooks/llama.py checkpoint/ --prompt "The sky is"     AutoAWQ's, bitsandbytes' NF4

config, params = llama_files.load(path, context=2048)
for token in Writer(config, params).write(prompt, Sampling(temperature=0.8)): ...
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import llama_files
import llama_text
from jax import Array
from llama_model import Cache, Config, Params, empty_cache, hidden, logits

from fuel_jax import FuelError, argmax_dim, cumsum, index_select, softmax_last_dim

# -- choosing a token ------------------------------------------------------------------------


class Sampling(NamedTuple):
    """How the next token is drawn; at temperature 0 it is the most probable one."""

    temperature: float = 0.0
    top_k: int = 0  # of the most probable ones; 0 is all
    top_p: float = 1.0  # of the most probable ones that together have this probability
    seed: int = 0


def drawn(scores: Array, key: Array, temperature: Array, top_k: Array, top_p: Array) -> Array:
    """A token drawn from ``scores [V]``: by temperature, of the top k, of the top p of those."""
    order = jnp.argsort(scores, descending=True)
    ranked = index_select(scores, order, dim=0) / temperature
    rank = jnp.arange(ranked.shape[0], dtype=jnp.int32)
    ranked = jnp.where((top_k == 0) | (rank < top_k), ranked, -jnp.inf)
    p = softmax_last_dim(ranked)
    more_probable = cumsum(p, dim=0) - p  # so the first one always stays
    ranked = jnp.where((rank == 0) | (more_probable < top_p), ranked, -jnp.inf)
    return order[jax.random.categorical(key, ranked)].astype(jnp.int32)


# -- writing -----------------------------------------------------------------------------------


class Writer:
    """Writes token by token.  Compiles a step once, and a prompt once for each power of two."""

    def __init__(self, config: Config, params: Params):
        self.config, self.params = config, params
        self.compilations = 0

        def read(params: Params, cache: Cache, tokens: Array, last: Array):
            self.compilations += 1  # Python runs while JAX traces, and only then
            x, cache = hidden(config, params, cache, tokens, jnp.int32(0))
            return logits(config, params, index_select(x, last[None], dim=1))[0, 0], cache

        def step(greedy: bool, params: Params, cache: Cache, scores: Array, at: Array, how: Any):
            """Choose a token by the scores so far, and compute those after it."""
            self.compilations += 1
            if greedy:
                token = argmax_dim(scores, dim=0).astype(jnp.int32)
            else:
                key, *rest = how
                token = drawn(scores, jax.random.fold_in(key, at), *rest)
            x, cache = hidden(config, params, cache, token[None, None], at)
            return token, logits(config, params, x)[0, 0], cache

        # The cache is updated in its own memory.
        self.read = jax.jit(read, donate_argnums=1)
        self.step = jax.jit(step, static_argnums=0, donate_argnums=2)

    def write(self, prompt: Sequence[int], how: Sampling = Sampling()) -> Iterator[int]:
        """The tokens after a prompt, until nobody asks for more or the context is full."""
        config, length = self.config, len(prompt)
        if not 0 < length < config.context:
            raise ValueError(
                f"write: the prompt has {length} tokens; it must have from 1 to "
                f"{config.context - 1}, one less than the context."
            )
        if not all(0 <= token < config.vocabulary for token in prompt):
            raise ValueError(f"write: tokens must be from 0 to {config.vocabulary - 1}.")
        # Padding writes keys that nobody sees: what comes later overwrites them.
        padded = min(1 << (length - 1).bit_length(), config.context)
        tokens = (
            jnp.zeros((1, padded), jnp.int32).at[0, :length].set(jnp.asarray(prompt, jnp.int32))
        )
        scores, cache = self.read(self.params, empty_cache(config), tokens, jnp.int32(length - 1))
        greedy = how.temperature == 0
        draw = (
            *(jax.random.key(how.seed), jnp.float32(how.temperature)),
            *(jnp.int32(how.top_k), jnp.float32(how.top_p)),
        )
        for at in range(length, config.context):
            token, scores, cache = self.step(
                greedy, self.params, cache, scores, jnp.int32(at), draw
            )
            yield int(token)


class Progress:
    """A line on a terminal: how many tokens, how many a second, and the end of the text."""

    def __init__(self, total: int):
        self.total, self.count, self.began = total, 0, time.perf_counter()
        self.settled = self.began  # once the first token is there, and all is compiled

    def rate(self) -> float:
        """Tokens a second, after the first."""
        return (self.count - 1) / max(time.perf_counter() - self.settled, 1e-9)

    def __call__(self, text: str) -> None:
        self.count += 1
        if self.count == 1:
            self.settled = time.perf_counter()
        if sys.stderr.isatty():
            said = f"{self.count} of {self.total} tokens, {self.rate():.1f} tokens/s  "
            room = max(shutil.get_terminal_size().columns - len(said) - 2, 0)
            tail = " ".join(text[-4 * room :].split())[-room:] if room else ""
            print(f"\r\033[K{said}{tail}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        """What it came to."""
        first = self.settled - self.began
        wiped = "\r\033[K" * sys.stderr.isatty()
        print(
            f"{wiped}{self.count} tokens, {self.rate():.1f} tokens/s "
            f"(the first after {first:.1f} s: compilation and prompt)",
            file=sys.stderr,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, load, write; 1 if the file cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="a GGUF file, or a folder with safetensors")
    parser.add_argument("--prompt", help="a text; its tokenizer must be in the file or the folder")
    parser.add_argument("--tokens", help="the prompt as numbers, 1,306,763; prints numbers then")
    parser.add_argument("--length", type=int, default=128, help="tokens to write; 128")
    parser.add_argument("--context", type=int, default=2048, help="tokens in all, at most; 2048")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0, the default, is all")
    parser.add_argument("--top-p", type=float, default=1.0, help="1, the default, is all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    if (asked.prompt is None) == (asked.tokens is None):
        parser.error("give --prompt or --tokens")
    if asked.length < 1 or asked.context < 2 or asked.temperature < 0 or asked.top_k < 0:
        parser.error("a length is at least 1, a context 2, temperature and top-k 0")
    if not 0 < asked.top_p <= 1:
        parser.error("--top-p is above 0 and at most 1")
    try:
        config, params = llama_files.load(asked.path, asked.context)
        if asked.tokens is None:
            tokenizer = llama_text.tokenizer(asked.path)
            prompt, show = tokenizer.encode(asked.prompt), tokenizer.decode
            stops = tokenizer.stops
        else:
            prompt, stops = [int(token) for token in asked.tokens.split(",")], frozenset()
            show = lambda tokens: ",".join(map(str, tokens))
        how = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        progress, written = Progress(asked.length), []
        for token in Writer(config, params).write(prompt, how):
            if token in stops:
                break
            written.append(token)
            progress(show(written[-64:]))
            if len(written) == asked.length:
                break
        progress.done()
        print(show(written))
    except (FuelError, OSError, ValueError, ImportError) as error:
        print(f"llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
