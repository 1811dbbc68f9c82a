"""Time on the device, and time from launch to launch of programs that take turns.

The first is what a profiler saw the device do: the sum of a program's kernels.  The second is a
clock's: it holds the gaps between kernels, too.  For it JAX programs are launched many times before
the host waits once, over operands that change from launch to launch so that no cache keeps them.
Where a launch is short beside what the host needs to enqueue it, one program runs the op on many
sets of operands, one after the other: a barrier makes each wait for the previous, so that the
compiler neither merges them nor runs them side by side, and every result is returned, so that none
is dropped.  PyTorch runs the same number of launches between two events, recorded as a graph where
they are short.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

ROUNDS = 7
ROUND = 20e-3  # seconds of a program in a round
MOST = 300  # launches in a round
HOST = 600.0  # microseconds: launches shorter than this are joined
MOST_JOINED = 24

PROFILED = 8  # launches of a program that the profiler watches

Burst = Callable[[int], float]  # seconds of n launches
T = TypeVar("T")


def joined(floor_us: float) -> int:
    """How many runs of the op one program makes."""
    return max(1, min(MOST_JOINED, round(HOST / floor_us)))


def one_after_another(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` on each set of operands, the next only when the last is done."""

    def program(sets):
        results = []
        for operands in sets:
            if results:
                operands, results[-1] = lax.optimization_barrier((operands, results[-1]))
            results.append(f(*operands))
        return results

    return program


def jax_burst(
    f: Callable[..., Any], sets: Sequence[Any], join: int, most_bytes: float
) -> tuple[Burst, Callable[[], Any]]:
    """Seconds of n launches of ``f`` compiled, one at a time or ``join`` in a program.

    And what computes its result on the first set, with the same program.
    """
    return jax_lowered(f, sets, join, most_bytes)()


def jax_lowered(
    f: Callable[..., Any], sets: Sequence[Any], join: int, most_bytes: float
) -> Callable[[], tuple[Burst, Callable[[], Any]]]:
    """What is left of :func:`jax_burst` when it is traced and lowered: any thread may compile it.

    Settings of JAX hold for the thread that they were made in.
    """
    groups = [tuple(sets)] if join > 1 else [(operands,) for operands in sets]
    lowered = jax.jit(one_after_another(f)).lower(groups[0])

    def compiled() -> tuple[Burst, Callable[[], Any]]:
        program = lowered.compile()
        needs = program.memory_analysis()
        if needs is not None and needs.temp_size_in_bytes > most_bytes:
            gib = needs.temp_size_in_bytes / 2**30
            raise MemoryError(f"needs {gib:.0f} GiB beside its results")

        def burst(n: int) -> float:
            start = time.perf_counter()
            results = None
            for i in range(max(1, n // join)):
                results = program(groups[i % len(groups)])
            jax.block_until_ready(results)
            return (time.perf_counter() - start) / max(1, n // join) / join

        return burst, lambda: program(groups[0])[0]

    return compiled


def interleaved(
    bursts: dict[str, Burst], rounds: int = ROUNDS, seconds: float = ROUND, least: int = 3
) -> dict[str, dict[str, float]]:
    """Microseconds of a launch of each: the median over rounds, and the least and most.

    A round has ``seconds`` of each, but ``least`` launches.
    """
    counts = {}
    for name, burst in bursts.items():
        burst(1)  # first launches load code and set up workspaces
        once = burst(least)
        counts[name] = max(least, min(MOST, int(seconds / once)))
    took: dict[str, list[float]] = {name: [] for name in bursts}
    for i in range(rounds):
        for name in list(bursts)[:: 1 if i % 2 else -1]:
            took[name].append(bursts[name](counts[name]) * 1e6)
    return {
        name: {"us": statistics.median(us), "least_us": min(us), "most_us": max(us)}
        for name, us in took.items()
    }


def in_kernels(burst: Burst, launches: int) -> float | None:
    """Microseconds of a launch that the device was at work; None where no profiler sees one."""
    return sum(kernels(burst, launches).values()) or None


def kernels(burst: Burst, launches: int) -> dict[str, float]:
    """Microseconds of a launch that the device was at each kernel; none where no profiler sees."""
    took: dict[str, float] = {}
    for _, name, us in watched(burst, launches):
        took[name] = took.get(name, 0.0) + us / launches
    return took


def launched(burst: Burst, launches: int) -> list[float]:
    """Microseconds that the device was at work in each launch; none where no profiler sees.

    Launches of one program have equally many kernels; where they seem not to, their mean, once.
    """
    took = [us for _, _, us in sorted(watched(burst, launches))]
    each, rest = divmod(len(took), launches)
    if rest:
        return [sum(took) / launches]
    return [sum(took[i : i + each]) for i in range(0, len(took), each or 1)]


def watched(burst: Burst, launches: int) -> list[tuple[float, str, float]]:
    """When each kernel began, its name, and its microseconds; none where no profiler sees."""
    with traced() as events:
        burst(launches)
    return events


def stretches(work: Iterable[T]) -> list[tuple[T, float]]:
    """Microseconds of the kernels that ``work`` runs, and waits for, after each thing it yields.

    None where no profiler sees.  One trace for all, since to start and read one takes as long as
    many launches.  Before each stretch the device counts the bits of three numbers, which nothing
    else here does: that kernel tells where one ends.
    """
    mark = jax.jit(lax.population_count).lower(numbers := jnp.arange(3)).compile()
    jax.block_until_ready(mark(numbers))
    keys: list[T] = []
    with traced() as events:
        for key in work:
            jax.block_until_ready(mark(numbers))
            keys.append(key)
    took: list[float] = []
    counted = min(events)[1] if events else ""
    for _, name, us in sorted(events):
        if name == counted:
            took.append(0.0)
        else:
            took[-1] += us
    return [*zip(keys, took, strict=True)] if len(took) == len(keys) else []


@contextlib.contextmanager
def traced() -> Iterator[list[tuple[float, str, float]]]:
    """The device's kernels in a block, known when it ends."""
    events: list[tuple[float, str, float]] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # what Python does meanwhile nobody reads
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield events
        events += [
            (event.start_ns, event.name, event.duration_ns * 1e-3)
            for file in pathlib.Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


def torch_burst(f: Callable[..., Any], sets: Sequence[Any], join: int) -> Burst:
    """Seconds of n launches of a PyTorch function."""
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():

        def on_host(n: int) -> float:
            start = time.perf_counter()
            for i in range(n):
                f(*sets[i % len(sets)])
            return (time.perf_counter() - start) / n

        return on_host

    run, each = functools.partial(through, f, sets), 1
    if join > 1:
        run, each = recorded(f, sets), len(sets)

    def burst(n: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(max(1, n // each)):
            run(i)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / max(1, n // each) / each

    return burst


def through(f: Callable[..., Any], sets: Sequence[Any], i: int) -> None:
    """One launch, over the sets in turn."""
    f(*sets[i % len(sets)])


def recorded(f: Callable[..., Any], sets: Sequence[Any]) -> Callable[[int], None]:
    """A graph of ``f`` on each set, replayed."""
    import torch  # pyright: ignore[reportMissingImports]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for operands in sets[:2]:
            f(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [f(*operands) for operands in sets]
    return lambda i, kept=kept: graph.replay()
