"""Several devices beside one: what the ops' rules promise, and how much faster it is.

First every op with an admissible split, each axis in turn, under plain ``jax.jit`` on split arrays
and by ``shard_map``: values and gradients are those of one device, and the compiled program sends
what the rule says is a sum and nothing else.  Then what takes more than a rule, timed: ring
attention, a loss whose vocabulary is split, products by columns and rows; and a step of training.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from .. import _check
from .._choose import PIN, Kernel
from .._examples import dtypes_of, filled
from .._op import Op, as_tuple
from .._sharding import Rule
from ..errors import UnknownName
from ..parallel import sharded
from . import mesh_step, spread
from .collectives import sent
from .h200 import fits
from .mesh_step import Step
from .profile import conditions
from .spread import AXIS, Scaling
from .suite import accepted, every, reason

TWICE = 2.0  # errors: both results may be off, and a half may be rounded before it is summed
WIDER = 2  # sums of halves may be made in float32; of a body XLA may sum two terms apart as well


@dataclass(frozen=True, eq=False)
class Split:
    """An op on an example, with an axis that is to be split over all devices."""

    op: Op
    kernel: Kernel
    factor: str
    arrays: list[Any]
    params: dict[str, Any]
    rule: Rule

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"rule {self.op.name} {self.factor} {self.kernel.name}"

    @functools.cached_property
    def results(self) -> tuple[Any, ...]:
        """Their shapes and dtypes."""
        return as_tuple(self.op.out(*self.arrays, **self.params))

    @property
    def present(self) -> list[int]:
        """Places of the operands that are arrays."""
        return [i for i, x in enumerate(self.arrays) if hasattr(x, "dtype")]

    def wrt(self) -> list[int]:
        """Which of those have a gradient; none of a gradient's, nor where the op has none."""
        none = getattr(self.op, "backward", None) == "none" or "_backward" in self.op.name
        if none or not all(jnp.issubdtype(y.dtype, jnp.floating) for y in self.results):
            return []
        frozen = getattr(self.op, "frozen", ())
        names = [n for n in self.op.wrt if n not in frozen]
        name = lambda at: self.op.inputs[0 if self.op.signature.variadic else at]
        return [i for i, at in enumerate(self.present) if name(at) in names]

    def cotangents(self) -> list[Any]:
        """Of the results, where there are gradients."""
        rng = np.random.default_rng(0)
        return [rng.normal(size=y.shape).astype(y.dtype) for y in self.results if self.wrt()]

    def predicted(self) -> int:
        """Bytes of the sums over devices: results and gradients that lack the axis that is split.

        A gradient is as large as its operand.
        """
        given = [(self.rule.operands[i], self.arrays[self.present[i]]) for i in self.wrt()]
        of = [*zip(self.rule.results, self.results, strict=True), *given]
        lacks = lambda dims: all(self.factor not in factors for factors in dims)
        return sum(x.size * x.dtype.itemsize for dims, x in of if lacks(dims))


Case = Split | Scaling | Step


def splits(devices: int) -> list[Split]:
    """Every op, and every axis of its first example that may be split."""
    platform, found = _check.platform_here(), []
    for op in every():
        if not op.by_parts:
            continue
        dtypes = dtypes_of(op)
        dtype = "bfloat16" if "bfloat16" in dtypes else dtypes[0]
        example = next(iter(op.examples()))
        for factor in free(op, example, dtype):
            larger = stretched(op, example, dtype, {factor: devices})
            if not accepted(op, larger):
                continue
            arrays, params = filled(op, larger, dtype)
            kernels = [
                kernel
                for kernel in op.kernels
                if _check.serves(op, kernel, platform, arrays, params)
            ]
            rule = op.sharding(*arrays, **params)
            found.append(Split(op, kernels[0], factor, arrays, params, rule))
    return found


def free(op: Op, example: dict[str, Any], dtype: str) -> tuple[str, ...]:
    """The factors of an example that its rule lets split, those of one element included."""
    arrays, params = filled(op, example, dtype)
    return op.sharding(*arrays, **params).free


def stretched(
    op: Op, example: dict[str, Any], dtype: str, devices: dict[str, int]
) -> dict[str, Any]:
    """The example with so many times as much of factors; of numbers every other part turned."""
    arrays, params = filled(op, example, dtype)
    rule = op.sharding(*arrays, **params)
    variadic = op.signature.variadic
    given = example[op.inputs[0]] if variadic else [example.get(n) for n in op.inputs]
    present = [i for i, x in enumerate(given) if hasattr(x, "dtype")]
    larger: list[Any] = list(given)
    for i, dims in zip(present, rule.operands, strict=False):  # numbers come last
        x = larger[i]
        for axis, (factor, *_) in enumerate(dims):
            count = devices.get(factor, 1)
            if isinstance(x, jax.ShapeDtypeStruct):
                shape = [n * count if i == axis else n for i, n in enumerate(x.shape)]
                x = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
            elif count > 1:
                turned = [np.flip(x, axis) if i % 2 else x for i in range(count)]
                x = np.concatenate(turned, axis)
        larger[i] = x
    params = {n: x for n, x in example.items() if n not in op.inputs}
    params = rule.part(params, *(larger[i] for i in present))  # of the whole, of which it was one
    named = {op.inputs[0]: larger} if variadic else dict(zip(op.inputs, larger, strict=True))
    return {n: named[n] for n in op.inputs if n in example} | params


# -- the rules ---------------------------------------------------------------------------------


def with_gradient(f: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Results, and gradients of operands at some places, as a function of cotangents, too."""

    def run(arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        if not places:
            return f(*arrays), ()

        def of(*given: Any) -> tuple[Any, ...]:
            merged = dict(enumerate(arrays)) | dict(zip(places, given, strict=True))
            return as_tuple(f(*merged.values()))

        y, pull = jax.vjp(of, *(arrays[i] for i in places))
        return y, pull(tuple(cotangents))

    return run


def operands(case: Split) -> tuple[list[Any], list[Any]]:
    """Arrays and cotangents."""
    return [case.arrays[i] for i in case.present], case.cotangents()


def layouts(case: Split, mesh: Mesh) -> tuple[list[Any], list[Any]]:
    """Of the same."""
    over = {case.factor: (AXIS,)}
    laid = lambda dims: [NamedSharding(mesh, spec) for spec in case.rule.specs(dims, over)]
    return laid(case.rule.operands), laid(case.rule.results)[: len(case.cotangents())]


def compiled(case: Split, mesh: Mesh) -> dict[str, Any]:
    """The case's program on one device and on all, in both ways."""
    one = SingleDeviceSharding(mesh.devices.flat[0])
    split = layouts(case, mesh)
    specs = dict(zip(case.present, (layout.spec for layout in split[0]), strict=True))

    def program(f: Callable[..., Any], layouts: Any) -> Any:
        def whole(*given: Any) -> Any:
            merged = dict(enumerate(case.arrays)) | dict(zip(case.present, given, strict=True))
            with PIN(case.kernel.name):
                return f(*merged.values(), **case.params)

        struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        given = jax.tree.map(struct, operands(case), layouts)
        return jax.jit(with_gradient(whole, case.wrt())).lower(*given).compile()

    by_hand = sharded(case.op, mesh, [specs.get(i) for i in range(len(case.arrays))])
    return {
        "one": program(case.op, jax.tree.map(lambda x: one, operands(case))),
        "jit": program(case.op, split),
        "shard_map": program(by_hand, split),
    }


def held(case: Split, mesh: Mesh, programs: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way."""
    first = mesh.devices.flat[0]
    wanted = jax.device_get(programs["one"](*jax.device_put(operands(case), first)))
    promised, rows = case.predicted(), []
    most = promised * WIDER * (WIDER if case.kernel is case.op.kernels[-1] else 1)
    for way in ("jit", "shard_map"):
        got = programs[way](*jax.device_put(operands(case), layouts(case, mesh)))
        error = _check.excess(jax.device_get(got), wanted, case.op.precision.tolerance)
        moved = sent(programs[way].as_text() or "")
        kept = set(moved) <= {"all-reduce"} and sum(moved.values()) <= most and error <= TWICE
        row = {"way": way, "kernel": case.kernel.name, "rule": str(case.rule), "error": error}
        rows.append(row | {"sent": moved, "promised_bytes": promised, "kept": kept})
    return rows


# -- all of it -----------------------------------------------------------------------------------


def chosen(asked: Sequence[str], devices: int | None = None) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    count = devices or jax.device_count()
    cases: list[Case] = [*spread.CASES, *mesh_step.steps(count)]
    heads = [re.split("[ *?]", pattern)[0] for pattern in asked]
    if not asked or any("rule".startswith(head) for head in heads):  # they take seconds to find
        cases = [*splits(count), *cases]
    for pattern in asked:
        if not any(fits(case.name, pattern) for case in cases):
            raise UnknownName(f"no case {pattern!r} in the suite; --list prints their names")
    return [c for c in cases if not asked or any(fits(c.name, pattern) for pattern in asked)]


def profile(
    cases: Sequence[Case],
    rows: str | None = None,
    tiny: bool = False,
    devices: Sequence[Any] | None = None,
) -> int:
    """Run the cases, printing as they are known; 1 if a promise was broken in one, else 0."""
    devices = devices or jax.devices()
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    where = conditions() | {"suite": "several", "devices": len(devices)}
    began, failed = time.perf_counter(), []
    print(f"{len(cases)} cases on {len(devices)} × {where['device']}", flush=True)
    for case, row in measured(cases, mesh, tiny):
        print(f"{line(row)}  {time.perf_counter() - began:.0f} s", flush=True)
        if rows:
            with open(rows, "a") as file:
                file.write(json.dumps(where | row | ({"tiny": True} if tiny else {})) + "\n")
        failed += [case.name] * (not row.get("kept", "failed" not in row))
    print("\n".join(f"failed: {name}" for name in dict.fromkeys(failed)))
    return bool(failed)


def measured(
    cases: Sequence[Case], mesh: Mesh, tiny: bool
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The rows of each case.  Many compile at once; programs of several devices must not run so."""
    rules = [case for case in cases if isinstance(case, Split)]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        waiting = [(case, pool.submit(compiled, case, mesh)) for case in rules]
        for case, programs in waiting:
            try:
                for row in held(case, mesh, programs.result()):
                    yield case, {"case": case.name} | row
            except Exception as failure:  # whatever a compiler or a driver may raise is a finding
                yield case, {"case": case.name, "failed": reason(failure)}
    for case in cases:
        if not isinstance(case, Split):
            try:
                if isinstance(case, Step):
                    row = mesh_step.measured(case, mesh, tiny)
                else:
                    row = spread.measured(case, mesh, tiny)
            except Exception as failure:
                row = {"failed": reason(failure)}
            yield case, {"case": case.name} | row
            jax.clear_caches()


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    if "failed" in row:
        return f"✗ {row['case']}  {row['failed']}"
    if "kept" in row:
        moved = ", ".join(f"{kind} {n} B" for kind, n in row["sent"].items()) or "nothing"
        mark = "✓" if row["kept"] else "✗"
        return (
            f"{mark} {row['case']} {row['way']}: {row['error']:.2f} promised errors from one "
            f"device, sends {moved} of {row['promised_bytes']} B"
        )
    shown = {"one": row["one_us"], "all": row["us"], "sending": row["sending_us"]}
    times = ", ".join(f"{name} {us:,.0f} µs" for name, us in shown.items() if us is not None)
    hidden = "" if row["hidden"] is None else f", {row['hidden']:.0%} of that during compute"
    gib = lambda n: f"{n / 2**30:.2f}"
    return (
        f"  {row['case']}: {times}{hidden}; efficiency {row['efficiency']:.0%}; "
        f"{gib(row['one_bytes'])} GiB → {gib(row['bytes'])} each; error {row['error']:.1e}"
    )
