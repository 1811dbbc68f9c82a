"""The suite ``sweep``: whether the implementation that is chosen is the fastest, over many shapes.

Every implementation that can serve a shape is timed, those that decline it as well, and so is what
people write in plain JAX.  A choice is missed where something else is faster by more than 5 % and
more than 1 µs, or where the chosen one fails and another does not.  What strays from the
decomposition by more than both promise counts as failed; float64 is for ``check`` and ``h200``.

All programs of a case are compiled at once, then run one after another, under one profiler.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check
from .._choose import PIN
from .._op import Op
from .._pages import server
from .device_time import stretches
from .h200 import FORWARD, GRADIENT
from .machine import memory
from .profile import conditions
from .shapes import Case, Extents, Shape
from .suite import reason
from .workload import Spec, Work, directed, filled

Row = dict[str, Any]

SLOWER, MICROSECONDS = 1.05, 1.0  # a miss is slower than the best by this factor and this much
ROUNDS, LAUNCHES = 3, 3  # of every program, in turns
SLOW = 20e-3  # seconds of a launch, from which one is enough
TWICE = 2.0  # errors: both may be as far off as is promised


# -- what is compiled ----------------------------------------------------------------------


class Plan(NamedTuple):
    """A shape's programs, as they are compiled."""

    shape: Shape
    chosen: str
    programs: dict[str, Future[Any]]
    specs: list[Spec]  # of operands, then of cotangents
    cotangents: Any  # how those are nested
    error: Future[Any]  # the program that compares two results


def planned(shape: Shape, pool: ThreadPoolExecutor) -> Plan:
    """Everybody's program for a shape, on its way."""
    work, direction = shape.work, shape.case.direction
    operands = tuple(map(struct, work.specs))
    outputs = work.op.out(*operands, **work.params)
    specs, cotangents = [*work.specs], ()
    if direction != FORWARD:
        specs += [Spec(y.shape, y.dtype.name) for y in jax.tree.leaves(outputs)]
        cotangents = outputs
    gradients = [operands[i] for i in work.wrt] if direction != FORWARD else []
    results = [*(jax.tree.leaves(outputs) if direction != GRADIENT else ()), *gradients]
    for spec in specs:
        pool.submit(drawing, spec)
    named, ways = implementations(work, direction, operands)

    def program(f: Callable[..., Any]) -> Any:
        return compiled(directed(f, direction, work.wrt), operands, cotangents)

    programs = {name: pool.submit(program, f) for name, f in ways.items()}
    error = pool.submit(comparison, tuple((y.shape, y.dtype.name) for y in results))
    return Plan(shape, named, programs, specs, jax.tree.structure(cotangents), error)


def implementations(
    work: Work, direction: str, operands: Sequence[Any]
) -> tuple[str, dict[str, Callable[..., Any]]]:
    """Who is chosen, and all who can serve: ours by what runs, forward and in the gradient."""
    op, params = work.op, work.params
    ours = lambda *xs: op(*xs, **params)
    named = serving(work, direction, operands)
    assert named, "the decomposition serves everything"
    ways: dict[str, Callable[..., Any]] = {named: ours}
    kernels = [*op.kernels, *getattr(getattr(op, "backward", None), "kernels", ())]
    for pin in dict.fromkeys(kernel.name for kernel in kernels):
        with PIN(pin):
            runs = serving(work, direction, operands)
        if runs:
            ways.setdefault(runs, functools.partial(pinned, pin, ours))
    return named, ways | {n: peer.run for n, peer in work.peers.items() if not peer.arrange}


def pinned(pin: str, f: Callable[..., Any], *xs: Any) -> Any:
    """``f`` with its ops pinned, where they have an implementation of that name."""
    with PIN(pin):
        return f(*xs)


def serving(work: Work, direction: str, operands: Sequence[Any]) -> str | None:
    """Who would run here; None if a pin names somebody who cannot."""
    said = work.op.explain(*operands, **work.params)
    derived = isinstance(said.backward, str)  # from the decomposition
    if direction == GRADIENT and derived:
        return work.op.kernels[-1].name
    asked = [said.forward] + [said.backward] * (direction != FORWARD and not derived)
    found = [server(choices, _check.platform_here()) for choices in asked]
    names = [choice.kernel.name for choice in found if choice]
    if len(names) < len(found):
        return None
    if direction == GRADIENT:  # nobody reads the forward's result
        return names[-1]
    return "+".join(dict.fromkeys(names))


def compiled(f: Callable[..., Any], *given: Any) -> Any:
    """The program, if the device has the memory for it."""
    program = jax.jit(f).lower(*given).compile()
    needs = program.memory_analysis()
    if needs is not None and needs.temp_size_in_bytes > memory():
        raise MemoryError(f"needs {needs.temp_size_in_bytes / 2**30:.0f} GiB beside its results")
    return program


@functools.lru_cache(1000)
def drawing(spec: Spec) -> Any:
    """The program that makes an operand."""
    return compiled(functools.partial(filled, spec), jax.random.key(0))


@functools.lru_cache(1000)
def struct(spec: Spec) -> Any:
    """What it makes."""
    return jax.eval_shape(functools.partial(filled, spec), jax.random.key(0))


@functools.lru_cache(1000)
def comparison(results: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    """The program that tells how far results are from others, relative to the largest of them."""

    def off(got: Any, wanted: Any) -> Any:
        g, w = got.astype(jnp.float32), wanted.astype(jnp.float32)
        alike = (g == w) | (jnp.isnan(g) & jnp.isnan(w))
        most = jnp.max(jnp.where(jnp.isfinite(w), jnp.abs(w), 0))
        error = jnp.max(jnp.where(alike, 0, jnp.abs(g - w)))
        return jnp.where(error == 0, 0, error / most)

    def run(got: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
        return [*map(off, got, wanted)]

    structs = [jax.ShapeDtypeStruct(*result) for result in results]
    return compiled(run, structs, structs)


# -- what is run ---------------------------------------------------------------------------


def measured(case: Case, tiny: bool) -> list[Row]:
    """The rows of a case."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # all of it: XLA tries products on the device
        plans = [planned(shape, pool) for shape in case.shapes(tiny)]
    rows: list[Row] = [
        {"case": case.name, "down": plan.shape.down, "across": plan.shape.across}
        | {"chosen": plan.chosen, "us": {}, "failed": {}}
        for plan in plans
    ]
    clock: list[tuple[Turn, float]] = []
    seen = [(turn, us) for turn, us in stretches(turns(plans, rows, clock)) if turn]
    by_profiler = bool(seen) and all(us for _, us in seen)
    took: dict[tuple[int, str], list[float]] = {}
    for turn, us in seen if by_profiler else clock:
        took.setdefault(turn[:2], []).append(us / turn.launches)
    for (at, name), us in took.items():
        rows[at]["us"][name] = float(f"{statistics.median(us):.4g}")
    said = {"timer": "profiler" if by_profiler else "clock"} | ({"tiny": True} if tiny else {})
    return [row | said | {"ratio": ratio(row)} for row in rows]


class Turn(NamedTuple):
    """Some launches of a program."""

    at: int  # its shape
    name: str
    launches: int


def turns(
    plans: Sequence[Plan], rows: Sequence[Row], clock: list[tuple[Turn, float]]
) -> Iterator[Turn | None]:
    """Run everything; yields each turn before it is run, and None before what is not timed.

    Enters in ``clock`` the microseconds of each turn, and in the rows what failed.
    """
    for at, (plan, row) in enumerate(zip(plans, rows, strict=True)):
        yield None
        arrays, programs = prepared(plan, row["failed"])
        for again in range(ROUNDS):
            for name, (program, slow) in [*programs.items()][:: 1 if again % 2 else -1]:
                if not (slow and again):
                    yield (turn := Turn(at, name, 1 if slow else LAUNCHES))
                    since = time.perf_counter()
                    for _ in range(turn.launches):
                        jax.block_until_ready(program(*arrays))
                    clock.append((turn, (time.perf_counter() - since) * 1e6))


def prepared(plan: Plan, failed: dict[str, str]) -> tuple[Any, dict[str, tuple[Any, bool]]]:
    """The data, and the programs that run and are right, each with whether that takes long."""
    work, programs = plan.shape.work, {}
    last = work.op.kernels[-1].name
    try:
        drawn = [drawing(spec)(jax.random.key(i)) for i, spec in enumerate(plan.specs)]
    except Exception as failure:  # whatever a compiler or a driver may raise is a finding
        failed |= dict.fromkeys(plan.programs, reason(failure))
        return (), {}
    count = len(work.specs)
    arrays = tuple(drawn[:count]), plan.cotangents.unflatten(drawn[count:])
    wanted: Any = None
    for name in sorted(plan.programs, key=lambda name: name != last):
        try:
            program = plan.programs[name].result()
            since = time.perf_counter()
            got = jax.block_until_ready(program(*arrays))
            slow = time.perf_counter() - since > SLOW
            if name == last:
                wanted = jax.tree.leaves(got)
            elif wanted and name not in work.peers:
                check(jax.tree.leaves(got), wanted, plan)
        except Exception as failure:
            failed[name] = reason(failure)
            continue
        programs[name] = program, slow
    return arrays, programs


def check(got: Sequence[Any], wanted: Sequence[Any], plan: Plan) -> None:
    """Refuse a result that is off.

    Raises:
        ArithmeticError: by more than twice what the op promises, or its gradient.
    """
    op = plan.shape.work.op
    ops = [x for x in (op, getattr(op, "backward", None)) if isinstance(x, Op)]
    for error, y in zip(plan.error.result()(got, wanted), wanted, strict=True):
        promised = max(op.precision.tolerance(y.dtype) for op in ops)
        if not error <= TWICE * promised:
            raise ArithmeticError(f"{error:.2g} from the decomposition, {promised:.2g} promised")


# -- what is said --------------------------------------------------------------------------


def ratio(row: Row) -> float | None:
    """The time of the chosen one by that of the best of the others; below 1 it is the best."""
    others = [us for name, us in row["us"].items() if name != row["chosen"]]
    ours = row["us"].get(row["chosen"])
    return round(ours / min(others), 3) if ours and others else None


def missed(row: Row) -> bool:
    """Whether another would have been the better choice.  Tiny shapes tell failures only."""
    ours = row["us"].get(row["chosen"])
    best = min(row["us"].values(), default=math.inf)
    if ours is None or "tiny" in row:
        return ours is None and bool(row["us"])
    return ours > max(SLOWER * best, best + MICROSECONDS)


def ordered(row: Row) -> list[tuple[str, float]]:
    """The times, that of the chosen one first, then the fastest."""
    return sorted(row["us"].items(), key=lambda item: (item[0] != row["chosen"], item[1]))


def label(extents: Extents) -> str:
    """``R16``; ``K4096 N14336``."""
    return " ".join(f"{name.upper()}{value}" for name, value in extents.items())


def line(row: Row) -> str:
    """What is printed of a row."""
    times = [f"{name} {us:g}" for name, us in ordered(row)]
    if row["chosen"] not in row["us"]:
        times = [f"{row['chosen']} –", *times]
    shown = [f"{label(row['down'])} {label(row['across'])}: {', '.join(times)}"]
    shown += [f"×{row['ratio']:.2f}"] if row["ratio"] else []
    shown += [f"{name}: {why}" for name, why in row["failed"].items()]
    return "; ".join(shown)


def summary(rows: Sequence[Row]) -> list[str]:
    """How many choices were right, and those that were not, the worst first."""
    wrong = sorted(filter(missed, rows), key=lambda row: -(row["ratio"] or math.inf))
    limit = f"{SLOWER - 1:.0%} and {MICROSECONDS:g} µs"
    said = f"{len(rows)} shapes; in {len(wrong)} another is faster by more than {limit}"
    return [said, *(f"  {row['case']} {line(row)}" for row in wrong)]


def profile(asked: Sequence[Case], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if a choice was missed in one, else 0."""
    where = conditions() | {"suite": "sweep"}
    began, found = time.perf_counter(), []
    print(f"{len(asked)} cases on {where['device']}; µs of device time, the chosen one first")
    for i, case in enumerate(asked):
        print(f"\n[{i + 1}/{len(asked)}] {case.name}", flush=True)
        new = measured(case, tiny)
        for row in new:
            print("✗" if missed(row) else " ", line(row))
        print(f"  {time.perf_counter() - began:.0f} s in all", flush=True)
        if rows:
            with open(rows, "a") as file:
                file.writelines(json.dumps(where | row) + "\n" for row in new)
        found += new
        gc.collect()
    print("\n".join(["", *summary(found)]))
    return any(map(missed, found))
