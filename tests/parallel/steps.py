"""One process of several: a layer trained a few steps, its loss printed.

``python steps.py PROCESS COUNT PORT [DIES_AFTER]``: data split over processes, the vocabulary over
the devices of each.  The process that is told to die does so after so many steps.
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

STEPS, BATCH, STEPS_OF_TEXT, WIDTH, CLASSES = 4, 4, 8, 8, 16


def losses(mesh):
    """The loss at each step, the same on any mesh."""
    import fuel_jax
    from fuel_jax import parallel

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {n: draw(WIDTH, WIDTH) for n in "qkv"} | {"out": draw(WIDTH, CLASSES)}
    x, y = draw(BATCH, STEPS_OF_TEXT, WIDTH), rng.integers(0, CLASSES, (BATCH, STEPS_OF_TEXT))
    put = lambda a, spec: jax.make_array_from_callback(
        a.shape, NamedSharding(mesh, spec), lambda at: a[at]
    )
    params = {n: put(w, P(None, "model") if n == "out" else P()) for n, w in params.items()}
    x, y = put(x, P("data")), put(y.astype(np.int32), P("data"))

    def loss(params, x, y):
        h = fuel_jax.rms_norm_last_dim(x)
        q, k, v = ((h @ params[n])[:, None] for n in "qkv")
        h = x + fuel_jax.flash_attn.using("chunked")(q, k, v, causal=True)[:, 0]
        rows = functools.partial(parallel.cross_entropy, axis="model", reduction="none")
        specs = (P("data", None, "model"), P("data"))
        mapped = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P("data"))
        return jnp.mean(mapped(h @ params["out"], y))

    @jax.jit
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    for _ in range(STEPS):
        value, params = step(params, x, y)
        yield float(value)


def main():
    process, count, port = map(int, sys.argv[1:4])
    dies_after = int(sys.argv[4]) if len(sys.argv) > 4 else None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=count,
        process_id=process,
        heartbeat_timeout_seconds=10,
    )
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((count, jax.local_device_count()), ("data", "model"), axis_types=types)
    for i, value in enumerate(losses(mesh)):
        print(f"loss {value:.7f}", flush=True)
        if i + 1 == dies_after:
            os._exit(17)


if __name__ == "__main__":
    main()
