"""What fuel_jax costs before any arithmetic: an eager call, and the import.

    python -m tests.benchmarks.overhead [--rows docs/performance/cpu.jsonl]

Promised: an eager fused-op call at most 60 µs over an eager call of a jitted jax.numpy function,
and ``import fuel_jax`` at most 0.25 s over ``import jax``, from bytecode, as after the first time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import fuel_jax

from .timing import machine, taking_turns

IMPORT = """
import time, jax
before = time.perf_counter()
import fuel_jax
print(time.perf_counter() - before)
"""


def microseconds(*programs: Callable[..., Any], arrays: Sequence[Any]) -> list[float]:
    """Median times of calls that take turns, dispatch and result included."""
    runs = {str(i): lambda f=f: jax.block_until_ready(f(*arrays)) for i, f in enumerate(programs)}
    return [statistics.median(took) * 1e6 for took in taking_turns(runs).values()]


def seconds_of_import(repeats: int = 5) -> list[float]:
    """The first, which compiles the source to bytecode, then the others, which read it."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORT]
    with tempfile.TemporaryDirectory() as folder:
        env = kept | {"PYTHONPYCACHEPREFIX": folder}
        return [float(subprocess.check_output(command, env=env)) for _ in range(1 + repeats)]


def main() -> None:
    """Measure and print."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    cli.add_argument("--rows", help="file to append to, one JSON object a line")
    asked = cli.parse_args()
    x = jnp.ones((8, 8), jnp.float32)
    heads = jnp.ones((1, 2, 4, 8), jnp.float32)
    jitted = jax.jit(fuel_jax.rms_norm_last_dim.body)
    attention = jax.jit(fuel_jax.flash_attn.body)
    rows = []
    for name, ours, plain, arrays in (
        ("rms_norm_last_dim", fuel_jax.rms_norm_last_dim, jitted, [x]),
        ("flash_attn", fuel_jax.flash_attn, attention, [heads] * 3),
    ):
        mine, theirs = microseconds(ours, plain, arrays=arrays)
        rows.append({"op": name, "what": "eager call", "us": mine, "jitted_us": theirs})
        print(f"{name:<20} eager {mine:.1f} µs, jitted {theirs:.1f} µs: {mine - theirs:+.1f} µs")
    first, *times = seconds_of_import()
    took = statistics.median(times)
    rows.append({"what": "import fuel_jax over import jax", "s": took, "first_s": first})
    print(f"import fuel_jax      {took:.3f} s over import jax, {first:.3f} s the first time")
    if asked.rows:
        with open(asked.rows, "a") as file:
            file.writelines(json.dumps(machine() | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
