"""A decoder's training step on a mesh beside one device: its batch split, or its weights.

Under plain ``jax.jit``, by the layout of the arrays alone; but for the loss of a split vocabulary,
which is :func:`fuel_jax.parallel.cross_entropy`.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from .. import parallel
from ..errors import UnknownName
from . import llama, train_step
from .collectives import sent_in_all
from .device_time import interleaved, kernels
from .llama import HALF, Config
from .profile import Suite, run
from .spread import WATCHED, watched
from .train_step import CASES, LEAST, ROUNDS, TINY, Case, shares

DATA, MODEL = "data", "model"
ALONE = "one device"
BY_COLUMNS, BY_ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")
IGNORED = -100
MADE_AGAIN = 1  # of a layer's two sums: what the second goes into is not needed backward


class Step(NamedTuple):
    """A model, and over how many devices its batch and its weights are split."""

    case: Case
    data: int = 1
    model: int = 1

    @property
    def over(self) -> str:
        """The mesh, as it is asked for."""
        sizes = {DATA: self.data, MODEL: self.model}
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or f"{DATA}=1"

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"train_step {self.over} {self.case.name}"

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Of the first devices."""
        types, count = (AxisType.Auto,) * 2, self.data * self.model
        shape = self.data, self.model
        return jax.make_mesh(shape, (DATA, MODEL), axis_types=types, devices=devices[:count])

    def predicted(self, config: Config) -> int:
        """Bytes that each device is to receive the sum of, in the dtypes of the products.

        A split batch: the gradient of every weight it holds, halves for matrices.  Split weights:
        what enters the residual stream and the gradient of what leaves it, of each layer's two
        blocks; forward again in the backward pass; of embedding and head one each; and three
        numbers of each row's loss.
        """
        shapes = jax.eval_shape(functools.partial(llama.init, config), jax.random.key(0))
        rows = config.tokens // self.data
        stream = rows * config.width * HALF.dtype.itemsize
        total = 0
        if self.model > 1:
            total += stream * (config.layers * (2 + MADE_AGAIN + 2) + 2) + 3 * rows * 4
        if self.data > 1:
            for path, x in jax.tree.leaves_with_path(shapes):
                name = path[-1].key
                split = self.model if weights(name) != P() else 1
                total += x.size * (4 if name.endswith("norm") else 2) // split
        return total


STEPS = (DATA, MODEL)


def weights(name: str) -> P:
    """The layout of one array; first products by columns, second ones by rows."""
    if name in BY_COLUMNS:
        return P(None, None, MODEL)
    if name in BY_ROWS or name == "head":
        return P(None, MODEL)
    return P(MODEL) if name == "embedding" else P()


def steps(devices: int) -> list[Step]:
    """The first model's, its batch over all devices and its weights."""
    return [Step(CASES[0], **{axis: devices}) for axis in STEPS]


def written(mesh: Mesh) -> llama.Written:
    """With the ops; a vocabulary that is split has its own loss."""
    if mesh.shape[MODEL] == 1:
        return llama.OPS
    part = functools.partial(
        parallel.cross_entropy, axis=MODEL, reduction="none", ignore_index=IGNORED
    )
    specs = P(DATA, None, MODEL), P(DATA)
    of_rows: Any = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(DATA))

    def cross_entropy(logits: Any, tokens: Any) -> Any:
        told = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        return of_rows(logits, told).sum() / tokens[:, 1:].size

    return llama.OPS._replace(cross_entropy=cross_entropy)


class Training:
    """A state, and the compiled step that overwrites it."""

    def __init__(
        self, config: Config, how: llama.Written, layout: Callable[[str], Any], tokens: Any
    ):
        begin = functools.partial(llama.start, config)
        name = lambda path: path[-1].key
        shapes = jax.eval_shape(begin, jax.random.key(0))
        layouts = jax.tree.map_with_path(lambda path, _: layout(name(path)), shapes)
        self.state: Any = jax.jit(begin, out_shardings=layouts)(jax.random.key(0))
        shape = (config.batch, config.length)
        draw = lambda key: jax.random.randint(key, shape, 0, config.vocabulary)
        self.given: jax.Array = jax.jit(draw, out_shardings=tokens)(jax.random.key(1))
        f = functools.partial(llama.loss, config, how)
        kept = (layouts, None)  # the next step finds the state as this one does
        step = jax.jit(functools.partial(llama.step, f), donate_argnums=0, out_shardings=kept)
        self.step: jax.stages.Compiled = step.lower(self.state, self.given).compile()

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
    def bytes(self) -> tuple[int, int]:
        """What is between; and that with operands and results, what is overwritten once."""
        needs = self.step.memory_analysis()
        if needs is None:
            return 0, 0
        whole = needs.argument_size_in_bytes + needs.output_size_in_bytes
        between = needs.temp_size_in_bytes
        return between, whole + between - needs.alias_size_in_bytes


def measured(step: Step, mesh: Mesh, tiny: bool) -> dict[str, Any]:
    """A step's row, on the mesh's devices; its error is that of the losses, relative."""
    config = step.case.config._replace(**TINY) if tiny else step.case.config
    mesh = step.mesh(list(mesh.devices.flat))
    alone = SingleDeviceSharding(mesh.devices.flat[0])
    laid = lambda spec: NamedSharding(mesh, spec)
    one = Training(config, llama.OPS, lambda name: alone, alone)
    every = Training(config, written(mesh), lambda name: laid(weights(name)), laid(P(DATA)))
    losses = [(a.loss(), a.loss()) for a in (one, every)]
    bursts = {"one": one.burst, "all": every.burst}
    times = interleaved(bursts, 1 if tiny else ROUNDS, 0, LEAST)
    sending, hidden, busy = watched(every.burst, WATCHED)
    error = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    row = {"kernel": "ops", "one_us": times["one"]["us"], **times["all"], "tokens": config.tokens}
    row |= {"efficiency": times["one"]["us"] / times["all"]["us"] / mesh.size, "losses": losses}
    row |= {"sending_us": sending, "hidden": hidden, "busy_us": busy, "error": error}
    (apart, one_bytes), (between, size) = one.bytes, every.bytes
    row |= {"one_bytes": one_bytes, "bytes": size, "temporary_bytes": between}
    row |= {"sent": sent_in_all(every.step.as_text() or ""), "devices": mesh.size}
    row |= {"predicted_bytes": step.predicted(config), "loss": losses[1][0]}
    row["kernels_us"] = of_each(every.burst, mesh.size)
    peer = {"temporary_bytes": apart, "loss": losses[0][0], "kernels_us": of_each(one.burst, 1)}
    return row | {"peers": {ALONE: times["one"] | peer}}


def of_each(burst: Any, devices: int) -> dict[str, int]:
    """Microseconds by kernel, the mean over devices."""
    return shares({name: us / devices for name, us in kernels(burst, 1).items()})


# -- the suite train-step on a mesh --------------------------------------------------------------


def chosen(asked: Sequence[str], over: str) -> list[Step]:
    """The cases of the suite by name, each over that mesh: ``"data=2"``, ``"data=2,model=4"``."""
    sizes = {}
    for word in over.split(","):
        found = re.fullmatch(r"(data|model)=([1-9]\d*)", word)
        if not found or found[1] in sizes:
            raise UnknownName(f"no mesh {over!r}; wanted data=N, model=N or data=N,model=N")
        sizes[found[1]] = int(found[2])
    count, here = math.prod(sizes.values()), jax.device_count()
    if count > here:
        raise UnknownName(
            f"no mesh {over!r} here: it takes {count} devices and there are {here}. On a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} in the environment."
        )
    return [Step(case, **sizes) for case in train_step.chosen(asked)]


def profile(cases: Sequence[Step], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if one failed, else 0."""

    def row(step: Step, tiny: bool) -> dict[str, Any]:
        mesh = step.mesh(jax.devices())
        return {"case": step.name} | measured(step, mesh, tiny)

    said = "tokens a second on a mesh and on one device, and temporaries of each"
    return run(Suite("train-step", said, row, lines), cases, rows, tiny)


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a row."""
    moved = ", ".join(f"{kind} {n / 1e6:,.1f}" for kind, n in row["sent"].items()) or "nothing"
    hidden = "" if row["hidden"] is None else f"; {row['hidden']:.0%} of sending during compute"
    return [
        *train_step.lines(row),
        f"  efficiency {row['efficiency']:.0%} of {row['devices']}{hidden}; losses off by "
        f"{row['error']:.1e}; MB sent {moved}; {row['predicted_bytes'] / 1e6:,.1f} predicted",
    ]
