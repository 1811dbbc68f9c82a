"""``python -m fuel_jax profile``: ops beside their peers, with the error of each."""

from __future__ import annotations

import functools
import gc
import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, _environment
from .._pages import server
from .device_time import (
    PROFILED,
    Burst,
    in_kernels,
    interleaved,
    jax_lowered,
    joined,
    torch_burst,
)
from .h200 import Case
from .suite import reason
from .workload import Peer, Work, directed, filled, pull_of

LARGE = 2 * 2**30  # bytes of operands of which one set is enough
MOST_TEMPORARY = 70 * 2**30  # bytes beside operands and results, on a card of 139 GiB


class Program(NamedTuple):
    """Something to time, and what it computes."""

    burst: Burst
    outputs: Callable[[], list[Any]]  # the parts that are compared
    launches: int = 0  # of the op, for a profiler to watch; 0 where a device's own clock was read


class Data(NamedTuple):
    """Sets of operands, and the cotangents of the outputs."""

    sets: list[tuple[Any, ...]]
    cotangents: Any


class Suite(NamedTuple):
    """How the cases of a suite are measured and shown."""

    name: str
    said: str  # what the numbers are
    measured: Callable[..., dict[str, Any]]  # the row of (case, tiny)
    lines: Callable[[dict[str, Any]], list[str]]  # of a row


def profile(cases: Sequence[Case], rows: str | None = None, tiny: bool = False) -> int:
    """The suite h200."""
    said = "µs of device time, error against float64"
    return run(Suite("h200", said, measured, lines), cases, rows, tiny)


def run(suite: Suite, cases: Sequence[Any], rows: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if ours failed in one of them, else 0."""
    where = conditions() | {"suite": suite.name}
    failed, began = [], time.perf_counter()
    print(f"{len(cases)} cases on {where['device']}; {suite.said}")
    for i, case in enumerate(cases):
        since = time.perf_counter()
        print(f"\n[{i + 1}/{len(cases)}] {case.name}", flush=True)
        row = suite.measured(case, tiny)
        for line in suite.lines(row):
            print(line)
        took = time.perf_counter() - since
        print(f"  {took:.0f} s; {time.perf_counter() - began:.0f} s in all", flush=True)
        if rows:
            with open(rows, "a") as file:
                file.write(json.dumps(where | row | ({"tiny": True} if tiny else {})) + "\n")
        failed += [case.name] * ("us" not in row)
        jax.clear_caches()
        gc.collect()
    for name in failed:
        print(f"failed: {name}")
    return bool(failed)


def measured(case: Case, tiny: bool) -> dict[str, Any]:
    """A case's row."""
    work = case.work(tiny)
    join = joined(case.floor_us) if not tiny else 2
    data = prepared(work, join)
    programs, failures = {}, {}
    # Compiled at once, and nothing runs meanwhile: XLA tries products on the device, one by one.
    made: dict[str, Callable[[], Program]] = {}
    with ThreadPoolExecutor() as pool:
        for name, lower in makers(case, work, data, join).items():
            try:
                made[name] = pool.submit(lower()).result
            except Exception as error:  # whatever a compiler or a library may raise is a finding
                failures[name] = reason(error)
    for name, make in (made | torch_makers(case, work, data, join)).items():
        try:
            programs[name] = make()
            programs[name].burst(1)
        except Exception as error:
            programs.pop(name, None)
            failures[name] = reason(error)
    wanted = reference(case, work, data)
    bursts = {name: program.burst for name, program in programs.items()}
    times = interleaved(bursts, rounds=1, seconds=0) if tiny else interleaved(bursts)
    for name, program in programs.items():
        times[name]["error"] = off(program.outputs(), wanted)
        times[name]["wall_us"] = times[name]["us"]
        if program.launches and (us := in_kernels(program.burst, program.launches)):
            times[name]["us"] = us
    row = {"case": case.name, "goal_us": case.goal_us, "floor_us": case.floor_us}
    row |= {"kernel": kernel(case, work, data), **times.pop("ours", {}), "peers": times}
    return row | ({"failed": failures} if failures else {})


def lines(row: dict[str, Any]) -> list[str]:
    """What is printed of a row."""
    shown = [f"  {'floor':<20}{row['floor_us']:>10.1f}", f"  {'goal':<20}{row['goal_us']:>10.1f}"]
    ours = {f"ours ({row['kernel']})": row} if "us" in row else {}
    for name, got in (ours | row["peers"]).items():
        share = 100 * row["floor_us"] / got["us"]
        spread = f"{got['least_us']:.1f}–{got['most_us']:.1f}"
        shown.append(
            f"  {name:<20}{got['us']:>10.1f}  {share:>3.0f} % of the floor; from launch to launch "
            f"{got['wall_us']:.1f} ({spread}); error {got['error']:.1e}"
        )
    return shown + [f"  {name:<20} {why}" for name, why in row.get("failed", {}).items()]


def prepared(work: Work, join: int) -> Data:
    """The data; sets that no cache holds from one launch to the next."""
    key = jax.random.key(0)
    draw = jax.jit(lambda key: tuple(filled(s, jax.random.fold_in(key, i)) for i, s in specs))
    specs = list(enumerate(work.specs))
    size = sum(np.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in work.specs)
    count = join if join > 1 else 1 if size > LARGE else 2
    sets = [draw(jax.random.fold_in(key, 1000 + i)) for i in range(count)]
    outputs = jax.eval_shape(lambda *xs: work.op(*xs, **work.params), *sets[0])
    normal = lambda y: jax.random.normal(key, y.shape, y.dtype) if y.shape else jnp.ones_like(y)
    return Data(sets, jax.tree.map(normal, outputs))


def makers(
    case: Case, work: Work, data: Data, join: int
) -> dict[str, Callable[[], Callable[[], Program]]]:
    """What lowers each program of JAX: ours, our decomposition under XLA, and the peers."""
    ours: dict[str, Any] = {"ours": Peer(lambda *xs: work.op(*xs, **work.params))}
    if len(work.op.kernels) > 1:
        pinned = work.op.using("xla")
        ours["xla"] = Peer(lambda *xs: pinned(*xs, **work.params))
    alone = case.direction == "backward"  # a peer's may keep far more than the card holds
    peers = ours | ({} if alone else work.peers)
    return {
        name: functools.partial(jax_program, peer, case, work, data, join)
        for name, peer in peers.items()
    }


def torch_makers(case: Case, work: Work, data: Data, join: int) -> dict[str, Callable[[], Program]]:
    """What makes each program of PyTorch, where that is installed."""
    if case.direction == "backward":  # it may keep far more than the card holds
        return {}
    try:
        from . import peers_torch
    except ImportError:
        return {}
    return {
        name: functools.partial(torch_program, f, case, work, data, join)
        for name, f in peers_torch.functions(work).items()
    }


def jax_program(peer: Peer, case: Case, work: Work, data: Data, join: int) -> Callable[[], Program]:
    """What compiles a program of JAX."""
    arrange = jax.jit(peer.arrange) if peer.arrange else lambda *xs: xs
    restore = peer.restore or (lambda outputs: outputs)
    sets, cotangents = [arrange(*operands) for operands in data.sets], data.cotangents
    if peer.arrange and case.direction != "forward":
        cotangents = restore(cotangents)  # swapping two axes undoes itself
    if case.direction == "backward":
        make = jax.jit(lambda xs: pull_of(peer.run, xs, work.wrt))
        f, given = (lambda pull, ct: pull(ct)), [(make(xs), cotangents) for xs in sets]
    else:
        f = directed(peer.run, case.direction, work.wrt)
        given = [(xs, cotangents) for xs in sets]
    compiled = jax_lowered(f, given, join, MOST_TEMPORARY)
    launches = join * -(-PROFILED // join)

    def program() -> Program:
        burst, first = compiled()
        return Program(burst, lambda: parts(work, case.direction, restore(first())), launches)

    return program


def torch_program(f: Any, case: Case, work: Work, data: Data, join: int) -> Program:
    """A program of PyTorch, on the same arrays."""
    from . import peers_torch

    arrange = work.peers["dense"].arrange if "dense" in work.peers else None
    sets = [jax.jit(arrange)(*operands) if arrange else operands for operands in data.sets]
    jax.block_until_ready(sets)
    cotangent = peers_torch.tensor(data.cotangents)
    given = [(peers_torch.tensors(work, operands), cotangent) for operands in sets]
    run = peers_torch.directed(f, case.direction, work.wrt)
    first = lambda: parts(work, case.direction, run(*given[0]))
    return Program(torch_burst(run, given, join), lambda: [*map(peers_torch.array, first())])


def parts(work: Work, direction: str, result: Any, cut: bool = True) -> list[Any]:
    """What is compared of a result: what ``work`` cuts of each output and gradient."""
    value, gradient = {"forward": (result, ())}.get(direction, ((), result))
    if direction == "both":
        value, gradient = result
    kept = [*zip(jax.tree.leaves(value), work.outputs, strict=False)]
    kept += [
        (g, work.cuts[place])
        for g, place in zip(gradient, work.wrt, strict=False)
        if place not in work.summed
    ]
    return [x[index] if cut else x for x, index in kept]


def reference(case: Case, work: Work, data: Data) -> list[np.ndarray]:
    """The same parts in float64, by the op's definition."""
    operands, cotangents = data.sets[0], data.cotangents
    with jax.enable_x64(True):
        if work.exact:
            result = jax.jit(functools.partial(work.exact, case.direction, work.cuts[0]))(
                operands, cotangents
            )
        else:
            wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            part = [wide(x[cut]) for x, cut in zip(operands, work.cuts, strict=True)]
            leaves, tree = jax.tree.flatten(cotangents)
            leaves = [wide(x[cut]) for x, cut in zip(leaves, work.outputs, strict=True)]
            define = lambda *xs: work.op.decompose(*xs, **work.params)
            way = "gradient" if case.direction == "backward" else case.direction
            result = jax.jit(directed(define, way, work.wrt))(part, tree.unflatten(leaves))
        return [np.asarray(x, np.float64) for x in parts(work, case.direction, result, cut=False)]


def off(got: Sequence[Any], wanted: Sequence[np.ndarray]) -> float:
    """The largest relative error of an output, in the Euclidean norm."""
    errors = []
    for g, w in zip(got, wanted, strict=True):
        difference = np.asarray(g).astype(np.float64) - w
        errors.append(float(np.linalg.norm(difference) / (np.linalg.norm(w) or 1)))
    return max(errors)


def kernel(case: Case, work: Work, data: Data) -> str:
    """Which implementation of ours serves here, forward or in the gradient."""
    said = work.op.explain(*data.sets[0], **work.params)
    choices = said.forward if case.direction in ("forward", "both") else said.backward
    if isinstance(choices, str):
        return choices
    serves = server(choices, _check.platform_here())
    return serves.kernel.name if serves else ""


def conditions() -> dict[str, Any]:
    """What the times hold for."""
    here = pathlib.Path(__file__).parent
    git = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {
        **{"suite": "h200", "device": jax.devices()[0].device_kind},
        **{"driver": _environment.answer(query)[0], "jax": jax.__version__},
        **{"torch": _environment.version("torch"), "commit": commit},
        **{"date": time.strftime("%Y-%m-%d")},
    }
