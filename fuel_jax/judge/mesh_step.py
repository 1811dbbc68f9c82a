"""A decoder's training step on a mesh beside one device: its batch split, or its weights.

Under plain ``jax.jit``, by the layout of the arrays alone.
"""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from . import llama
from .collectives import sent
from .device_time import interleaved
from .spread import AXIS, WATCHED, watched
from .train_step import LEAST, ROUNDS, TINY


class Step(NamedTuple):
    """What is split over all devices: "data" or "model"."""

    split: str

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"train_step {self.split} llama 1.1B B4 S4096 bf16 V32000"

    def weights(self, name: str) -> P:
        """The layout of one array; first products by columns, second ones by rows."""
        if self.split == "data":
            return P()
        if name in ("q", "k", "v", "gate", "up"):
            return P(None, None, AXIS)
        return P(None, AXIS) if name in ("out", "down") else P()

    def tokens(self) -> P:
        """The layout of the batch."""
        return P(AXIS) if self.split == "data" else P()


STEPS = [Step("data"), Step("model")]


class Training:
    """A state, and the compiled step that overwrites it."""

    def __init__(self, config: llama.Config, weights: Any, tokens: Any):
        begin = functools.partial(llama.start, config)
        name = lambda path: path[-1].key
        shapes = jax.eval_shape(begin, jax.random.key(0))
        layouts = jax.tree.map_with_path(lambda path, _: weights(name(path)), shapes)
        self.state: Any = jax.jit(begin, out_shardings=layouts)(jax.random.key(0))
        shape = (config.batch, config.length)
        draw = lambda key: jax.random.randint(key, shape, 0, config.vocabulary)
        self.given = jax.jit(draw, out_shardings=tokens)(jax.random.key(1))
        f = functools.partial(llama.loss, config, llama.OPS)
        kept = (layouts, None)  # the next step finds the state as this one does
        step = jax.jit(functools.partial(llama.step, f), donate_argnums=0, out_shardings=kept)
        self.step = step.lower(self.state, self.given).compile()

    def loss(self) -> float:
        """After a step, that of before it."""
        self.state, loss = self.step(self.state, self.given)
        return float(loss)

    def burst(self, n: int) -> float:
        """Seconds of a step, of n."""
        since, loss = time.perf_counter(), None
        for _ in range(n):
            self.state, loss = self.step(self.state, self.given)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - since) / n

    @property
    def bytes(self) -> int:
        """Of operands, results, and what is between; what is overwritten, once."""
        needs = self.step.memory_analysis()
        if needs is None:
            return 0
        whole = needs.argument_size_in_bytes + needs.output_size_in_bytes
        return whole + needs.temp_size_in_bytes - needs.alias_size_in_bytes


def measured(case: Step, mesh: Mesh, tiny: bool) -> dict[str, Any]:
    """A case's row; its error is that of the second loss, relative."""
    config = llama.Config()._replace(**TINY) if tiny else llama.Config()
    alone = SingleDeviceSharding(mesh.devices.flat[0])
    laid = lambda spec: NamedSharding(mesh, spec)
    one = Training(config, lambda name: alone, alone)
    every = Training(config, lambda name: laid(case.weights(name)), laid(case.tokens()))
    losses = [(a.loss(), a.loss()) for a in (one, every)]
    bursts = {"one": one.burst, "all": every.burst}
    times = interleaved(bursts, 1 if tiny else ROUNDS, 0, LEAST)
    sending, hidden, busy = watched(every.burst, WATCHED)
    error = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    row = {"kernel": "ops", "one_us": times["one"]["us"], **times["all"], "tokens": config.tokens}
    row |= {"efficiency": times["one"]["us"] / times["all"]["us"] / mesh.size, "losses": losses}
    row |= {"sending_us": sending, "hidden": hidden, "busy_us": busy, "error": error}
    moved = sent(every.step.as_text() or "")  # that of a loop, once
    return row | {"one_bytes": one.bytes, "bytes": every.bytes, "sent": moved}
