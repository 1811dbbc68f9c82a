"""The small transformer trained on many devices: data, model and sequence split.

    python many_devices.py --mesh data=2,model=2,sequence=2

``loss`` is ``tiny_transformer.loss``, the same number, computed by ``jax.shard_map``: a device has
its rows of the batch, its piece of every row, its heads and its columns of the hidden layer and of
the vocabulary.  Between devices go

    data, sequence    the gradients of the weights, summed
    sequence          keys and values, round the ring of devices
    model             the results of the products by rows, summed; three numbers a row of the loss

Over several processes it is the same program, after ``jax.distributed.initialize``.
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_transformer as model
import training
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from fuel_jax import parallel, rms_norm_last_dim, rope, silu

AXES = ("data", "model", "sequence")

# -- the model, on its parts -----------------------------------------------------------------


def by_rows(p: model.Params, x: Array) -> Array:
    """A linear layer whose input features are split, ``[B, S, D]``."""
    rows = x.reshape(-1, x.shape[-1])
    y = parallel.row_linear(rows, p["w"], p["b"], axis="model")
    return y.reshape(*x.shape[:-1], -1)


def to_columns(x: Array) -> Array:
    """What all devices of ``model`` are about to read; its gradient is summed over them, once."""
    return lax.pcast(x, ("model",), to="varying")


def layer(config: model.Config, p: model.Params, x: Array, tables: Sequence[Array]) -> Array:
    """``tiny_transformer.layer`` with this device's heads and hidden features."""
    h = to_columns(rms_norm_last_dim(x))
    q, k, v = (model.split_heads(config, model.linear(p[name], h)) for name in "qkv")
    q, k = rope(q, *tables), rope(k, *tables)
    y: Any = parallel.ring_attention(q, k, v, axis="sequence", causal=True)
    x = x + by_rows(p["out"], model.merge_heads(y))

    h = to_columns(rms_norm_last_dim(x))
    return x + by_rows(p["down"], silu(model.linear(p["gate"], h)) * model.linear(p["up"], h))


def part(
    config: model.Config, params: model.Params, tokens: Array, targets: Array, *tables: Array
) -> Array:
    """The mean loss of all devices."""
    x = model.embed(params, tokens)
    for p in params["layers"]:
        x = layer(config, p, x, tables)
    scores = model.linear(params["head"], to_columns(rms_norm_last_dim(x)))
    rows = scores.reshape(-1, scores.shape[-1])
    losses: Any = parallel.cross_entropy(rows, targets.reshape(-1), axis="model", reduction="none")
    return lax.pmean(jnp.mean(losses), ("data", "sequence"))


def layout(params: model.Params) -> Any:
    """How each weight is split: the first product of a pair by columns, the second by rows."""
    columns, rows = {"w": P(None, "model"), "b": P("model")}, {"w": P("model"), "b": P()}
    layer = {n: rows if n in ("out", "down") else columns for n in params["layers"][0]}
    return {"embedding": P(), "layers": [layer] * len(params["layers"]), "head": columns}


def loss(config: model.Config, mesh: Mesh, params: model.Params, tokens: Array) -> Array:
    """``tiny_transformer.loss``, over a mesh."""
    n, steps = mesh.shape["sequence"], tokens.shape[1] - 1
    inputs, targets = (parallel.zigzag(x, n, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
    tables = (parallel.zigzag(t[:steps], n, 0) for t in model.rotary_tables(config))
    rows, places = P("data", "sequence"), P("sequence")
    specs = (layout(params), rows, rows, places, places)
    run = jax.shard_map(functools.partial(part, config), mesh=mesh, in_specs=specs, out_specs=P())
    return run(params, inputs, targets, *tables)


# -- training --------------------------------------------------------------------------------


def make_mesh(asked: str) -> Mesh:
    """``data=2,model=2,sequence=2``; an axis that is not named has one device."""
    sizes = dict.fromkeys(AXES, 1)
    for word in asked.split(","):
        name, _, size = word.partition("=")
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh: {word!r}; wanted data=N, model=N or sequence=N")
        sizes[name] = int(size)
    count, have = math.prod(sizes.values()), len(jax.devices())
    if count > have:
        raise ValueError(
            f"--mesh: {asked} takes {count} devices and there are {have}. On a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    shape = tuple(sizes.values())
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=jax.devices()[:count])


def placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Arrays on the devices; every process gives its own parts."""

    def put(spec: P, x: Any) -> Array:
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda at: np.asarray(x)[at]
        )

    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))


def even(params: model.Params, parts: int) -> model.Params:
    """With classes that nothing is ever of, so that as many go to each device."""
    more = -params["head"]["b"].size % parts
    head = {
        "w": jnp.pad(params["head"]["w"], ((0, 0), (0, more))),
        "b": jnp.pad(params["head"]["b"], (0, more), constant_values=-1e9),
    }
    return params | {"head": head}


def start(mesh: Mesh, params: model.Params) -> training.State:
    """The state before the first step, each weight's as the weight."""
    state, specs = training.start(params), layout(params)
    return training.State(*placed(tuple(state), (specs, specs, specs, P()), mesh))


def train(
    config: model.Config,
    mesh: Mesh,
    text: training.Text,
    steps: int,
    seed: int = 0,
    checkpoint: pathlib.Path | None = None,
) -> Iterator[tuple[int, float]]:
    """Each step and its loss, from the last step in ``checkpoint`` on, which gets every step."""
    weights = model.init(config, jax.random.key(seed))
    state = start(mesh, even(weights, mesh.shape["model"]))
    kept = None if checkpoint is None else Checkpoints(checkpoint)
    if kept is not None:
        state = kept.latest(state)
    first = int(state.step)
    run = functools.partial(loss, config, mesh)
    for i, tokens in zip(range(steps), training.batches(text.train, seed), strict=False):
        if i < first:
            continue
        (tokens,) = placed((tokens,), (P(),), mesh)
        state, value = training.train_step(run, steps, state, tokens)
        yield i + 1, float(value)
        if kept is not None:
            kept.save(state)


class Checkpoints:
    """States on disk, by orbax: every process writes its parts; any mesh reads them."""

    def __init__(self, path: pathlib.Path):
        import orbax.checkpoint as orbax  # of the extra 'libraries'; only who keeps states needs it

        self.orbax = orbax
        options = orbax.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = orbax.CheckpointManager(path.absolute(), options=options)

    def save(self, state: training.State) -> None:
        """Whole or not at all: a name is given when all of it is written."""
        args = self.orbax.args.StandardSave(state)  # pyright: ignore[reportCallIssue]
        self.manager.save(int(state.step), args=args)

    def latest(self, state: training.State) -> training.State:
        """The last one that is whole, laid out like ``state``; ``state`` if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return state
        like = jax.tree.map(self.orbax.utils.to_shape_dtype_struct, state)
        args = self.orbax.args.StandardRestore(like)  # pyright: ignore[reportCallIssue]
        kept: Any = self.manager.restore(step, args=args)
        return kept


def on_one_device(
    config: model.Config, text: training.Text, steps: int, seed: int = 0
) -> Iterator[float]:
    """The loss of ``tiny_transformer`` at each step."""
    state = training.start(model.init(config, jax.random.key(seed)))
    run = functools.partial(model.loss, config)
    for _, tokens in zip(range(steps), training.batches(text.train, seed), strict=False):
        state, value = training.train_step(run, steps, state, tokens)
        yield float(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train over a mesh and on one device; print both curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    axes = "data=2,model=2,sequence=2: devices along each axis; data alone if not given"
    parser.add_argument("--mesh", default="", help=axes)
    parser.add_argument("--steps", type=int, default=20, help="20 if not given")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder of states, to go on from")
    asked = parser.parse_args(arguments)
    try:
        mesh = make_mesh(asked.mesh or f"data={len(jax.devices())}")
    except ValueError as error:
        parser.error(str(error))
    text = training.python_documentation()
    config = model.Config(len(text.characters), context=training.SEQUENCE)
    want = list(on_one_device(config, text, asked.steps))
    print("step   one device   the mesh   difference")
    for step, value in train(config, mesh, text, asked.steps, checkpoint=asked.checkpoint):
        gap = abs(value - want[step - 1])
        print(f"{step:4} {want[step - 1]:12.6f} {value:10.6f} {gap:12.1e}", flush=True)


if __name__ == "__main__":
    main()
