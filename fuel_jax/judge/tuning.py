"""Which of a kernel's settings is the fastest on this machine: measured, and kept in a table.

Every setting runs as a user would have it, by a table that says so, on the same data.  One that is
off by more than the op promises, or that a compiler refuses, cannot win; one that wins by less than
what repeats does not, either: then the first, by rule, stays.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _check
from .._choose import Kernel, decide, server
from .._json_file import dumps, opened as read, save
from .._op import Op, abstract
from .._tuned import MAJOR, MINOR, ROWS, TUNED, WHAT, Key, Row, Table, dtype_of, plain, shown
from ..errors import FileError
from ..types import x64_enabled
from . import suite
from .choosing import microseconds
from .device_time import jax_burst
from .machine import machine, memory
from .report import SAME, operands, plain as simple

REPEATS = 0.98  # of the time of the first: a setting that takes more is no faster


class Task(NamedTuple):
    """A kernel that serves a call, and may be cut in several ways."""

    op: Op
    kernel: Kernel
    arrays: list[Any]
    params: dict[str, Any]
    dtype: str
    extents: dict[str, int | str]
    settings: Sequence[Any]

    @property
    def key(self) -> Key:
        """What its row is found by."""
        return Key.of(self.op.name, self.kernel.name, self.dtype, self.extents)

    def table(self, setting: Any) -> Table:
        """In which the kernel gets that setting."""
        tile, here = plain(setting), _check.platform_here()
        row = Row(self.op.name, self.kernel.name, self.dtype, self.extents, tile)
        return Table.of({"platform": here}, [row])


class TileFile:
    """A table of tiles that is being measured."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Hold what a file has."""
        self.document = document
        self._raw: list[Any] = document[ROWS]
        read = [(row.key, at) for at, raw in enumerate(self._raw) if (row := Row.read(raw))]
        self._at: dict[Key, int] = dict(read)

    @classmethod
    def opened(cls, path: str | os.PathLike[str]) -> TileFile:
        """The table of a file to go on with, or a new one.

        Raises:
            FileError: the file is damaged, of a newer major version, or of another machine.
        """
        here = machine()
        try:
            document = read(path, WHAT, MAJOR, ROWS)
        except FileNotFoundError:
            return cls({"version": f"{MAJOR}.{MINOR}", "machine": here, ROWS: []})
        there = document["machine"]
        if any(there.get(name, here.get(name)) != here.get(name) for name in SAME):
            raise FileError(
                f"{path}: measured on another machine or JAX ({there.get('device')}, "
                f"{there.get('jax')}), and this is {here['device']}, {here['jax']}. "
                "Name another file."
            )
        there |= {name: here[name] for name in ("date", "commit")}
        return cls(document)

    def __len__(self) -> int:
        return len(self._at)

    def knows(self, task: Task) -> bool:
        """Whether every setting of the task was tried."""
        at = self._at.get(task.key)
        tried = [] if at is None else self._raw[at].get("tried", [])
        known = [one.get("tile") for one in tried if isinstance(one, dict)]
        return bool(tried) and all(plain(setting) in known for setting in task.settings)

    def add(self, row: dict[str, Any]) -> None:
        """Enter a row, in place of what was measured of the same calls before."""
        entered = Row.read(row)
        assert entered is not None
        at = self._at.setdefault(entered.key, len(self._raw))
        if at == len(self._raw):
            self._raw.append({})
        self._raw[at] = self._raw[at] | row

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step."""
        save(path, dumps(self.document, ROWS))


def calls(
    ops: Sequence[Op] | None = None,
    dtypes: Sequence[str] = suite.DTYPES,
    sizes: Sequence[int] = suite.SIZES,
) -> list[suite.Call]:
    """All examples, grown, of the ops that have kernels of several settings for this platform."""
    every = suite.every() if ops is None else ops
    candidates = suite.calls(every, dtypes, sizes)
    return [call for call in candidates if any(map(tunable, kernels_of(call)))]


def kernels_of(call: suite.Call) -> list[Kernel]:
    """Those of the op, or of the one that computes its gradient."""
    op: Any = call.op
    return (op.backward if call.gradient else op).kernels


def tunable(kernel: Kernel) -> bool:
    """Whether a kernel runs on this platform and has settings."""
    here = kernel.platforms or (_check.platform_here(),)
    return kernel.tiles is not None and _check.platform_here() in here


def tune(
    table: TileFile, path: str | os.PathLike[str], asked: Iterable[suite.Call]
) -> Iterator[tuple[int, str]]:
    """Measure what the table lacks and write each row, as soon as it is known.

    Yields how many calls are done, and what was found.  Where nobody who serves the call has
    settings, or all were tried on a call alike, there is nothing to find.
    """
    for i, call in enumerate(asked):
        with jax.enable_x64(call.dtype == "float64" or x64_enabled()):
            task = task_of(call)
            if task is None or table.knows(task):
                continue
            row, line = measured(task)
        if row is not None:
            table.add(row)
            table.save(path)
        yield i + 1, line


def task_of(call: suite.Call) -> Task | None:
    """The call's, if the kernel that is chosen for it here has several settings."""
    op, arrays, params, _ = suite.prepared(call)
    bound, held = op._bind(arrays, params)
    avals = abstract(held)
    choice = server(decide(op.name, op.kernels, None, avals, bound), _check.platform_here())
    if choice is None or choice.kernel.tiles is None:
        return None
    extents, settings = choice.kernel.tiles(*avals, **bound)
    if len(settings) < 2:
        return None
    return Task(op, choice.kernel, arrays, params, dtype_of(avals), extents, settings)


def measured(task: Task) -> tuple[dict[str, Any] | None, str]:
    """The row, or None where no setting keeps the promise; and a line about it."""
    op, kernel, arrays, params = task[:4]
    avals = abstract(op._bind(arrays, params)[1])
    call = f"{op.name} {kernel.name} {', '.join(x for x in operands(avals) if x)}"
    wanted = suite.reference(op, arrays, params)
    run = functools.partial(op.using(kernel.name), **params)
    tried: list[dict[str, Any]] = [{"tile": plain(setting)} for setting in task.settings]
    bursts, programs = {}, []
    for i, setting in enumerate(task.settings):
        try:
            with TUNED(task.table(setting)):
                burst, first = jax_burst(run, [tuple(arrays)], 1, memory())
            got = jax.device_get(first())
            error = float(_check.excess(got, wanted, op.precision.tolerance))
        except Exception as failure:  # whatever a compiler or a driver may raise is a finding
            tried[i]["failed"] = suite.reason(failure)
            continue
        if np.isfinite(error) and error <= 1:
            bursts[str(i)] = burst
            programs.append(i)
            tried[i]["error"] = float(f"{error:.3g}")
        else:
            tried[i]["failed"] = f"off by {error:.3g} of what is promised"
    for name, took in suite.timed(bursts).items():
        tried[int(name)]["us"] = float(f"{took['us']:.5g}")
    if not programs:
        return None, f"{call}  no setting keeps the promise: {tried[0]['failed']}"
    best = min(programs, key=lambda i: tried[i]["us"])
    if 0 in programs and tried[best]["us"] > REPEATS * tried[0]["us"]:
        best = 0
    here = machine()
    row = {"op": op.name, "kernel": kernel.name, "dtype": task.dtype, "extents": task.extents}
    row |= {"tile": tried[best]["tile"], "us": tried[best]["us"], "date": here["date"]}
    row |= {"jax": here["jax"], "commit": here["commit"], "operands": list(operands(avals))}
    row |= {"params": {n: simple(v) for n, v in params.items()}, "tried": tried}
    against = f"by rule {microseconds(tried[0]['us'])}" if 0 in programs else "the rule's failed"
    says = "the rule's" if best == 0 else f"{shown(tried[best]['tile'])}, {against}"
    return row, f"{call}  {microseconds(tried[best]['us'])}: {says}"
