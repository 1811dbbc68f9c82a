"""Times of programs that take turns, and what the numbers hold for."""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

SECONDS = 0.6  # spent on each pair of programs
BURST = 1e-3  # seconds without interruption
LEAST = 9  # rounds
TORCH = importlib.util.find_spec("torch") is not None


def timed(run: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds of a run."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def taking_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of a run of each program in each round; what else the machine does falls on all.

    The order goes through all permutations, so that none always profits from what another left in
    the caches.  Short runs are timed in bursts, after one that does not count: the threads of the
    program before may still be spinning.
    """
    for run in runs.values():
        run()
    once = {name: timed(run) for name, run in runs.items()}
    repeats = {name: max(1, int(BURST / s)) for name, s in once.items()}
    took = {name: [] for name in runs}
    orders = itertools.cycle(itertools.permutations(runs))
    a_round = sum(once[name] * repeats[name] for name in runs)
    rounds = int(SECONDS * max(1, len(runs) - 1) / a_round)
    for order in itertools.islice(orders, max(LEAST, rounds)):
        for name in order:
            if repeats[name] > 1:
                runs[name]()
            took[name].append(timed(runs[name], repeats[name]))
    return took


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median ratio of neighbours."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **{"device": jax.devices()[0].device_kind, "cores": os.cpu_count()},
        **{"processor": platform.processor() or platform.machine(), "jax": jax.__version__},
        **({"torch": importlib.metadata.version("torch")} if TORCH else {}),
        **{"commit": commit, "date": time.strftime("%Y-%m-%d")},
    }


def append(file: str, row: dict[str, Any]) -> None:
    """The row as a line of JSON."""
    with open(file, "a") as rows:
        rows.write(json.dumps(row) + "\n")
