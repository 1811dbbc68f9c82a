"""Text, AdamW, and two models trained side by side: what ``demo.py`` shows."""

import functools
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tiny_transformer as fuel
import tiny_transformer_plain as plain
from jax import Array

SEQUENCE, BATCH = 128, 8
LEARNING_RATE, WARM_UP, WEIGHT_DECAY = 2e-3, 30, 0.1  # twice the rate, and rounding grows to 1e-2

# -- the text ------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text as character ids, its end held out."""

    characters: str
    train: np.ndarray
    held_out: np.ndarray

    def encode(self, text: str) -> list[int]:
        return [self.characters.index(c) for c in text]


def python_documentation() -> Text:
    """Python's language reference as ``help()`` shows it: half a million characters of English."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    characters = "".join(sorted(set(text)))
    ids = np.searchsorted(list(characters), list(text)).astype(np.int32)
    cut = len(ids) - len(ids) // 20
    return Text(characters, ids[:cut], ids[cut:])


def batches(ids: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """``[BATCH, SEQUENCE + 1]`` from anywhere in the text; the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(ids) - SEQUENCE, BATCH)
        yield ids[starts[:, None] + np.arange(SEQUENCE + 1)]


# -- one step ------------------------------------------------------------------------------

Loss = Callable[[fuel.Params, Array], Array]


class State(NamedTuple):
    """Weights, and AdamW's running means of the gradient and of its square."""

    params: fuel.Params
    mean: fuel.Params
    square: fuel.Params
    step: Array


def start(params: fuel.Params) -> State:
    """The state before the first step; a copy, since steps give their state up."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like, params)
    return State(jax.tree.map(jnp.array, params), zeros(), zeros(), jnp.int32(0))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(loss: Loss, steps: int, state: State, tokens: Array) -> tuple[State, Array]:
    """One step of AdamW down the gradient of ``loss``, whichever model's it is."""
    value, gradient = jax.value_and_grad(loss)(state.params, tokens)
    step = state.step + 1
    t = step.astype(jnp.float32)
    rate = learning_rate(t, steps)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, state.square, gradient)

    def updated(p: Array, m: Array, s: Array) -> Array:
        descent = (m / (1 - 0.9**t)) / (jnp.sqrt(s / (1 - 0.98**t)) + 1e-8)
        return p - rate * (descent + (WEIGHT_DECAY * p if p.ndim > 1 else 0))  # biases are free

    return State(jax.tree.map(updated, state.params, mean, square), mean, square, step), value


def learning_rate(step: Array, steps: int) -> Array:
    """Linear warm-up, then half a cosine down to a twentieth."""
    cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * step / steps)
    return LEARNING_RATE * jnp.minimum(step / WARM_UP, 0.05 + 0.95 * cosine)


# -- both models ---------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step of both models gave; the pairs are (fuel_jax, plain jax.numpy)."""

    losses: tuple[float, float]
    seconds: tuple[float, float]
    params: fuel.Params  # of the fuel_jax model, until the next step


def train(
    config: fuel.Config, params: fuel.Params, text: Text, steps: int, seed: int
) -> Iterator[Step]:
    """Train both from the same weights on the same batches, in turns."""
    losses = [functools.partial(model.loss, config) for model in (fuel, plain)]
    states = [start(params), start(params)]
    for i, tokens in zip(range(steps), batches(text.train, seed), strict=False):
        values, seconds = [0.0, 0.0], [0.0, 0.0]
        for which in (0, 1) if i % 2 else (1, 0):  # neither is always the one that comes second
            began = time.perf_counter()
            states[which], value = train_step(losses[which], steps, states[which], tokens)
            values[which] = float(value)
            seconds[which] = time.perf_counter() - began
        yield Step((values[0], values[1]), (seconds[0], seconds[1]), states[0].params)


def held_out_loss(config: fuel.Config, params: fuel.Params, text: Text) -> float:
    """Mean loss on the text that nobody trained on."""
    rows = len(text.held_out) // (SEQUENCE + 1)
    tokens = text.held_out[: rows * (SEQUENCE + 1)].reshape(rows, -1)
    return float(jax.jit(functools.partial(fuel.loss, config))(params, tokens))
