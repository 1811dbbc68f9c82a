"""What ``fuse`` adds to tracing a Llama of 48 layers, unrolled in Python.

python -m tests.benchmarks.fuse_layers
"""

import statistics
import time

import jax

import fuel_jax

from ..fuse.blocks_llama import deep

REPEATS = 5


def seconds(f, *args):
    """CPU time of the process, and the result."""
    start = time.process_time()
    result = f(*args)
    return time.process_time() - start, result


def measured(layers):
    """Tracing, and tracing and planning; the number of ops found."""
    model, args = deep(layers)
    traced = lambda: jax.make_jaxpr(lambda *a: model(*a))(*args)
    planned = lambda: fuel_jax.fuse.report(model)(*args)
    runs = [(seconds(traced)[0], *seconds(planned)) for _ in range(REPEATS)]
    plain, fused, reports = zip(*runs, strict=True)
    return statistics.median(plain), statistics.median(fused), len(reports[0].replaced)


def main():
    model, args = deep(2)
    first, _ = seconds(fuel_jax.fuse.report(model), *args)
    print(f"first use, spellings traced: {first:.2f} s")
    for layers in (12, 24, 48):
        plain, fused, found = measured(layers)
        print(
            f"{layers} layers: {found} ops found; tracing {plain:.2f} s, tracing and planning "
            f"{fused:.2f} s, {fused - plain:.2f} s more"
        )


if __name__ == "__main__":
    main()
