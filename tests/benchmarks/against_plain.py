"""Is any op slower than its plain jax.numpy spelling?  One interleaved run, forward and gradient.

    python -m tests.benchmarks.against_plain [op ...] [--rows docs/performance/cpu.jsonl]

Each pair of programs (ours, plain; both under ``jit``) is timed alternately and the median of the
ratios of neighbours is printed: what else the machine does falls on both.  Rows are appended, with
versions and commit, when ``--rows`` names a file.
"""

import argparse
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuel_jax.registry import builtin

from .plain import ROW

LIMIT = 1.05  # the promise
SECONDS = 0.6  # spent on each pair of programs
OPS = {op.name: op for op in builtin()}


def array(spec: str, rng: np.random.Generator) -> jax.Array:
    """The array that ``"f32 4096 1024"`` and its like describe."""
    what, *extents = spec.split()
    shape = tuple(map(int, extents))
    kind, _, below = what.partition("<")
    if kind == "q4_0":  # blocks of 32 codes under one finite f16 scale
        blocks = rng.integers(0, 256, (shape[0] // 32, 18), np.uint8)
        blocks[:, 1] = 0x20
        return jnp.asarray(np.frombuffer(blocks.tobytes(), np.uint32))
    dtypes = {"f32": "float32", "f16": "float16", "u32": "uint32", "u8": "uint8"}
    dtype = dtypes[kind.rstrip("+-")]
    if kind[0] == "u":
        return jnp.asarray(rng.integers(0, int(below or 2**32), shape).astype(dtype))
    x = rng.normal(size=shape)
    if kind[-1] in "+-":
        x = (0.05 + np.abs(x) / 10) * (1 if kind[-1] == "+" else -1)
    return jnp.asarray(x.astype(dtype))


def timed(f, arrays) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(f(*arrays))
    return time.perf_counter() - start


def compare(ours, plain, arrays) -> tuple[float, float, float]:
    """Median seconds of each, and the median ratio of neighbouring runs."""
    for f in (ours, plain):
        timed(f, arrays)
    once = timed(ours, arrays) + timed(plain, arrays)
    pairs = []
    for i in range(max(9, min(400, int(SECONDS / once)))):
        first, second = (ours, plain) if i % 2 else (plain, ours)
        a, b = timed(first, arrays), timed(second, arrays)
        pairs.append((a, b) if i % 2 else (b, a))
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return mine, theirs, statistics.median(a / b for a, b in pairs)


def gradient(f, at, arrays):
    """A program that returns the gradient of a weighted sum of what ``f`` returns."""
    outputs = jax.tree.leaves(jax.eval_shape(f, *arrays))
    weights = [jnp.cos(jnp.arange(math.prod(y.shape))).reshape(y.shape) for y in outputs]

    def loss(*xs):
        ys = jax.tree.leaves(f(*xs))
        return sum(jnp.sum(y * w.astype(y.dtype)) for y, w in zip(ys, weights, strict=True))

    return jax.jit(jax.grad(loss, at))


def programs(op, row, arrays, params):
    """(direction, ours, plain) for each direction the op has."""
    ours, plain = (functools.partial(f, **params) for f in (op, row.plain))
    yield "forward", jax.jit(ours), jax.jit(plain)
    outputs = jax.tree.leaves(jax.eval_shape(ours, *arrays))
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
    at = row.at or tuple(floating)
    if op.wrt and at and all(jnp.issubdtype(y.dtype, jnp.floating) for y in outputs):
        yield "gradient", gradient(ours, at, arrays), gradient(plain, at, arrays)


def measure(name: str) -> list[dict[str, Any]]:
    """A row for each call and direction of an op."""
    rng = np.random.default_rng(0)
    rows = []
    for specs, params in ROW[name].calls:
        arrays = [array(spec, rng) for spec in specs]
        for direction, ours, plain in programs(OPS[name], ROW[name], arrays, params):
            mine, theirs, ratio = compare(ours, plain, arrays)
            rows.append(
                {
                    **{"op": name, "direction": direction, "arrays": specs, "params": params},
                    **{"us": mine * 1e6, "plain_us": theirs * 1e6, "ratio": ratio},
                }
            )
    return rows


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **{"device": jax.devices()[0].device_kind, "cores": os.cpu_count()},
        **{"processor": platform.processor() or platform.machine(), "jax": jax.__version__},
        **{"commit": commit, "date": time.strftime("%Y-%m-%d")},
    }


def main() -> int:
    """Measure, print, keep; the exit status says whether the promise holds."""
    cli = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cli.add_argument("op", nargs="*", help="all ops when omitted")
    cli.add_argument("--rows", help="file to append to, one JSON object a line")
    asked = cli.parse_args()
    if unknown := set(asked.op) - ROW.keys():
        cli.error(f"no plain spelling of {', '.join(sorted(unknown))}")
    slow, where = [], machine()
    for name in asked.op or ROW:
        for row in measure(name):
            shapes = " ".join(x.replace(" ", "x") for x in row["arrays"])[:60]
            late = row["ratio"] > LIMIT
            slow += [row] * late
            times = f"{row['us']:>11.1f} µs {row['plain_us']:>11.1f} µs {row['ratio']:>6.2f}"
            print(f"{name:<30} {row['direction']:<9}{times} {'SLOW' if late else '    '} {shapes}")
            sys.stdout.flush()
            if asked.rows:
                with open(asked.rows, "a") as file:
                    file.write(json.dumps(where | row) + "\n")
    print(f"\n{len(slow)} slower than {LIMIT} times the plain spelling")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
