"""What is measured: the ops' own examples, at several sizes, in several dtypes, by everybody.

Compilation is not in the times.  Implementations take turns, so that whatever else the machine does
falls on all; each round waits for its results once, at the end.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _check
from .._choose import Kernel, describe
from .._examples import dtypes_of, filled
from .._fused import FusedOp
from .._op import Op, abstract
from .._parameters import Call as Static
from ..errors import FileError, FuelError, UnsupportedKernel
from ..registry import builtin
from ..types import x64_enabled
from .choosing import revision
from .device_time import PROFILED, Burst, interleaved, jax_burst, launched
from .machine import ceilings, machine, memory
from .report import Entry, ProfileReport, Timing, operands, plain

MOST_WORK = 2**33  # floating-point operations: seconds, in float64
SIZES = (2**10, 2**16, 2**20)  # elements of the largest operand, at most
DTYPES = ("float32", "bfloat16")
FEW = 4  # extents up to this are taps, groups, states, heads: they stay
# Axes that grow where not all should: a longer recurrence on random data overflows.
GROWING = {"selective_scan": ("batch", "d"), "ssd_chunk_scan": ("batch", "h")}
ROUNDS, ROUND = 7, 4e-3  # seconds of each implementation in a round


class Call(NamedTuple):
    """An op on an example, grown or not, in a dtype; or the op that computes its gradient there."""

    op: Op
    example: dict[str, Any]
    dtype: str
    gradient: bool = False

    def __str__(self) -> str:
        arrays, params = arguments(self.op, self.example)
        shown = [describe(x) for x in arrays] + [f"{n}={v!r}" for n, v in params.items()]
        of = "gradient of " * self.gradient
        return f"{of}{self.op.name}({', '.join(shown)}) in {self.dtype}"


def calls(
    ops: Sequence[Op] | None = None,
    dtypes: Sequence[str] = DTYPES,
    sizes: Sequence[int] = SIZES,
) -> list[Call]:
    """The default suite: every op's first example.  Of ops that are named, all, and gradients."""
    found = []
    for op in every() if ops is None else ops:
        examples = list(op.examples())
        for example in examples if ops is not None else examples[:1]:
            several = [grown(op, example, most) for most in sizes]
            distinct = {str(shapes(op, e)): e for e in several}.values()
            ways = (False, True) if ops is not None and has_own_backward(op) else (False,)
            asked = [d for d in dtypes_of(op) if d in dtypes]
            found += [Call(op, e, d, way) for way in ways for e in distinct for d in asked]
    return found


def has_own_backward(op: Op) -> bool:
    """Whether an op outside the vocabulary computes its gradient: nobody else calls that."""
    backward = getattr(op, "backward", None)
    return isinstance(backward, FusedOp) and backward.kind is None


def every() -> list[Op]:
    """The ops that have examples, by name; not the in-place ones that share another's body."""
    ops = sorted((op for op in builtin() if isinstance(op, Op)), key=lambda op: op.name)
    bodies = [op.body for op in ops if op.destructive_input is None]
    return [op for op in ops if op.destructive_input is None or op.body not in bodies]


# -- sizes ---------------------------------------------------------------------------------


def grown(op: Op, example: dict[str, Any], most: int) -> dict[str, Any]:
    """The example with all its extents multiplied, the largest operand at ``most`` elements.

    What the op rejects is grown along the first axis of its first operand, or left as it is.
    """
    abstract = {n: each(struct, x) if n in op.inputs else x for n, x in example.items()}
    for way in (scaled, lengthened):
        size = lambda factor, way=way: elements(op, way(op, abstract, factor))
        factor = bisect.bisect_right(range(1, most + 1), most, key=size)
        while factor > 1 and accepted(op, larger := way(op, abstract, factor)):
            # Scores of attention grow with the square, and nothing here with more.
            if most**2 <= MOST_WORK or work(op, larger) <= MOST_WORK:
                return way(op, example, factor)
            factor //= 2
    return example


def scaled(op: Op, example: dict[str, Any], factor: int) -> dict[str, Any]:
    """Every extent but small ones times ``factor``."""

    def extents(name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            n * factor if grows(op, axis, n) else n
            for axis, n in zip(axes(op, name, len(shape)), shape, strict=True)
        )

    def grow(name: str, x: Any) -> Any:
        return each(functools.partial(resized, of=functools.partial(extents, name)), x)

    return {n: grow(n, x) if n in op.inputs else x for n, x in example.items()}


def lengthened(op: Op, example: dict[str, Any], factor: int) -> dict[str, Any]:
    """The first operand's first axis times ``factor``."""
    longer = lambda shape: (shape[0] * factor, *shape[1:]) if shape else ()
    name = op.inputs[0]
    return example | {name: each(functools.partial(resized, of=longer), example[name])}


def grows(op: Op, axis: str, n: int) -> bool:
    """Whether an axis is one to be longer in a larger example."""
    if op.name in GROWING:
        return axis in GROWING[op.name]
    return n > (1 if axis == "*" else FEW)


def axes(op: Op, name: str, rank: int) -> list[str]:
    """Names of an operand's axes, ``*`` for those that ``*batch`` and its like stand for."""
    for form in op.signature.operands[name].forms:
        tokens = form.dim_str.split()
        stars = [i for i, token in enumerate(tokens) if token.startswith("*") or token == "..."]
        if not stars and len(tokens) == rank:
            return tokens
        if stars:
            many = rank - len(tokens) + 1
            return [*tokens[: stars[0]], *["*"] * many, *tokens[stars[0] + 1 :]]
    return ["*"] * rank


def each(f: Callable[[Any], Any], x: Any) -> Any:
    """``f`` of an operand, or of each where an op takes any number."""
    return [f(one) for one in x] if isinstance(x, (list, tuple)) else f(x)


def struct(x: Any) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x


def resized(x: Any, of: Callable[[Sequence[int]], tuple[int, ...]]) -> Any:
    """An operand in another shape: abstract, or its values repeated."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(of(x.shape), x.dtype)
    return np.resize(x, of(np.shape(x))) if hasattr(x, "dtype") else x


def shapes(op: Op, example: dict[str, Any]) -> list[Any]:
    """What tells grown examples apart."""
    return [np.shape(x) for n in op.inputs for x in jax.tree.leaves(example.get(n))]


def elements(op: Op, example: dict[str, Any]) -> int:
    """Of the largest operand."""
    return max((math.prod(shape) for shape in shapes(op, example)), default=0)


def accepted(op: Op, example: dict[str, Any]) -> bool:
    """Whether the op takes it."""
    arrays, params = arguments(op, example)
    try:
        op.out(*arrays, **params)
    except (FuelError, TypeError, ValueError):
        return False
    return True


def work(op: Op, example: dict[str, Any]) -> int:
    """Floating-point operations."""
    arrays, params = arguments(op, example)
    return op.cost(*arrays, **params).flops


def arguments(op: Op, example: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The example as a call has it."""
    held = [example[n] for n in op.inputs if n in example]
    params = {n: v for n, v in example.items() if n not in op.inputs}
    return [*held[0]] if op.signature.variadic else held, params


# -- measuring -----------------------------------------------------------------------------


def opened(path: str | os.PathLike[str]) -> ProfileReport:
    """The report of a file to go on with, or a new one.

    Raises:
        FileError: the file is damaged, of a newer major version, or of another machine.
    """
    here = machine()
    try:
        report = ProfileReport.load(path)
    except FileNotFoundError:
        return ProfileReport(here | {"ceilings": ceilings()})
    if not report.continues(here):
        there = ", ".join(str(report.machine.get(n)) for n in ("device", "jax"))
        raise FileError(
            f"{path}: measured on another machine or JAX ({there}), and this is {here['device']}, "
            f"{here['jax']}. Name another file."
        )
    report.machine |= {n: here[n] for n in ("date", "commit")}
    return report


def profile(
    report: ProfileReport, path: str | os.PathLike[str], asked: Iterable[Call]
) -> Iterator[tuple[int, Entry]]:
    """Measure the calls that the report lacks and write each, as soon as it is known.

    Yields how many calls are done, with those that were there already, and the new entry.
    """
    for i, call in enumerate(asked):
        with jax.enable_x64(call.dtype == "float64" or x64_enabled()):
            op, arrays, params, entry = prepared(call)
            kernels = serving(op, arrays, params)
            if is_current(report.get(entry.key), kernels):
                continue
            entry = measured(op, kernels, arrays, params, entry)
        report.add(entry)
        report.save(path)
        yield i + 1, entry
        if entry.failed and not answers():
            raise UnsupportedKernel(
                f"{call}: {next(iter(entry.failed.values()))}. The device does not answer since; "
                f"the same command goes on after this call."
            )


def answers() -> bool:
    """Whether the device still computes: after a fault in a kernel nothing does in this process."""
    try:
        return bool(jax.block_until_ready(jax.device_put(np.ones(3, np.float32)) + 1)[0] == 2)
    except Exception:  # whatever a driver may raise
        return False


def prepared(call: Call) -> tuple[Op, list[Any], dict[str, Any], Entry]:
    """The op to run, data on the device, parameters, and the entry, without times."""
    op: Op = call.op
    arrays, params = filled(op, call.example, call.dtype)
    arrays = [np.asarray(x, np.int32) if isinstance(x, int) else x for x in arrays]
    given = [None if x is None else jax.device_put(x) for x in arrays]
    if call.gradient:
        op, given, params = pulled_back(op, given, params)
    bound, held = op._bind(given, params)
    entry = Entry(op.name, operands(abstract(held)), {n: plain(v) for n, v in bound.items()}, {})
    return op, given, params, entry


def pulled_back(
    op: Any, given: list[Any], params: dict[str, Any]
) -> tuple[Op, list[Any], dict[str, Any]]:
    """What its backward is given after this call: operands, outputs, and random cotangents."""
    backward = op.backward
    asked, held = op._bind(given, params)
    params = asked | op._returning_all()
    pool = op._named(params, held, jax.jit(functools.partial(op.body, **params))(*held))
    rng = np.random.default_rng(0)
    normal = lambda y: jax.device_put(np.asarray(rng.normal(size=y.shape) / 2).astype(y.dtype))
    pool |= op._cotangents(asked, tuple(normal(pool[n]) for n in op._present(asked)))
    return backward, [pool[n] for n in backward.inputs], {n: params[n] for n in backward.params}


def serving(op: Op, arrays: Sequence[Any], params: dict[str, Any]) -> list[Kernel]:
    """The implementations that can serve the call on this device."""
    here = _check.platform_here()
    return [k for k in op.kernels if _check.serves(op, k, here, arrays, params)]


def is_current(entry: Entry | None, kernels: Sequence[Kernel]) -> bool:
    """Whether all of them were measured as they are."""
    if entry is None:
        return False
    known = {name: timing.revision for name, timing in entry.kernels.items()}
    return all(
        kernel.name in entry.failed or known.get(kernel.name) == revision(kernel)
        for kernel in kernels
    )


def measured(
    op: Op, kernels: Sequence[Kernel], arrays: list[Any], params: dict[str, Any], entry: Entry
) -> Entry:
    """The entry, with the times and errors of everybody who could serve the call."""
    programs, failed = {}, {}
    try:
        wanted = reference(op, arrays, params)
    except Exception as failure:
        why = f"float64 on the host: {reason(failure)}"
        return replace(entry, failed={kernel.name: why for kernel in kernels})
    for kernel in kernels:
        run = functools.partial(op.using(kernel.name), **params)
        try:
            burst, first = jax_burst(run, [tuple(arrays)], 1, memory())
            got = jax.device_get(first())
            error = _check.excess(got, wanted, op.precision.tolerance)
        except Exception as failure:  # whatever a compiler or a driver may raise is a finding
            failed[kernel.name] = reason(failure)
            continue
        if not np.isfinite(error):
            failed[kernel.name] = "NaN or an infinity where there should be none, or the reverse"
            continue
        programs[kernel.name] = kernel, burst, error
    try:
        times = timed({name: burst for name, (_, burst, _) in programs.items()})
    except Exception as failure:
        return replace(entry, failed=failed | dict.fromkeys(programs, reason(failure)))
    found = {}
    for name, (kernel, _, error) in programs.items():
        took = {n: float(f"{us:.5g}") for n, us in (times[name] | {"error": error}).items()}
        found[name] = Timing(**took, revision=revision(kernel))
    cost = op.cost(*arrays, **params)
    return replace(entry, kernels=found, failed=failed, flops=cost.flops, bytes=cost.bytes)


def timed(bursts: dict[str, Burst]) -> dict[str, dict[str, float]]:
    """Microseconds of each, in turns: of the device where a profiler sees it, else by the clock."""
    times = interleaved(bursts, ROUNDS, ROUND, least=1)
    if _check.platform_here() != "cpu":
        seen = {name: launched(burst, PROFILED) for name, burst in bursts.items()}
        if all(map(sum, seen.values())):  # or else clocks and profilers would be compared
            return {
                name: {"us": statistics.median(us), "least_us": min(us), "most_us": max(us)}
                for name, us in seen.items()
            }
    return times


def reason(failure: Exception) -> str:
    """The first line of an error."""
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"


def reference(op: Op, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
    """The decomposition in float64 on the host."""
    bound, held = op._bind(arrays, params)
    with jax.enable_x64(True), jax.default_device(_check.host()):
        given = [None if x is None else _check.to_float64(np.asarray(x)) for x in held]
        return jax.device_get(definition(op, Static.of(bound, None))(*given))


@functools.lru_cache(8)  # compiled once for a call in several dtypes
def definition(op: Op, static: Static) -> Any:
    """The decomposition, compiled."""
    return jax.jit(functools.partial(op.body, **static.params))
