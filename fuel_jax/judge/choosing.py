"""Choosing kernels by what was measured: asked for, never by itself.

    with judge.by_report(judge.ProfileReport.load("h200.json")):
        y = jax.jit(model)(x)              # in this block

    judge.populate_dispatch_table()        # measure what is missing, then choose by it everywhere
    judge.cached()                         # choose by what was measured earlier, if anything was
    judge.invalidate()                     # choose as if nothing had been

A report speaks for the platform it was measured on.  It is asked for the call at hand, or for the
nearest that differs in extents alone, none of them by more than a factor of about four.  It prefers
one implementation to another if it knows both, their sources are what they were, both can serve the
call, and neither was off by more than the op promises.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .._choose import MEASURED, Kernel, Verdict
from .._tuned import TUNED, Table
from .machine import machine
from .report import Entry, Key, ProfileReport, Timing, operands, pattern, plain, size_class

REACH = 2  # powers of two between an extent and that of the measurement used for it


class Criterion(StrEnum):
    """What makes an implementation the best."""

    Fastest = "fastest"
    MostAccurate = "most_accurate"
    Balanced = "balanced"

    def rank(self, timing: Timing) -> Any:
        """Least for the best.  Balanced: all of the promised error used up costs as much again."""
        balanced = timing.us * (1 + timing.error)
        ranks = {"fastest": timing.us, "most_accurate": (timing.error, timing.us)}
        return ranks.get(self.value, balanced)


@dataclass(frozen=True)
class Measurements:
    """A report as kernels are chosen by it.  Equal ones are one in JAX's caches."""

    digest: str
    criterion: Criterion
    platform: str
    date: str
    found: dict[Key, list[Entry]] = field(compare=False, repr=False)

    @classmethod
    def of(cls, report: ProfileReport, criterion: Criterion) -> Measurements:
        """What a report says now; what is added to it later does not count."""
        found: dict[Key, list[Entry]] = {}
        for entry in report.entries:
            key = pattern(entry.op, entry.operands, entry.params)
            found.setdefault(key, []).append(entry)
        digest = hashlib.sha256(report.dumps().encode()).hexdigest()
        platform, date = (str(report.machine.get(n, "")) for n in ("platform", "date"))
        return cls(digest, Criterion(criterion), platform, date[:40], found)

    def nearest(self, op: str, avals: Sequence[Any], params: dict[str, Any]) -> Entry | None:
        """The entry nearest in size; of two as near, the larger."""
        given = operands(avals)
        key = pattern(op, given, {n: plain(v) for n, v in params.items()})
        asked = size_class(given)

        def distance(entry: Entry) -> tuple[int, int, int]:
            its = size_class(entry.operands)
            apart = [abs(a - b) for a, b in zip(asked, its, strict=True)]
            return max(apart, default=0), sum(apart), -sum(its)

        best = min(self.found.get(key, ()), key=distance, default=None)
        return best if best is not None and distance(best)[0] <= REACH else None

    def verdict(
        self, op: str, able: Sequence[Kernel], avals: Sequence[Any], params: dict[str, Any]
    ) -> Verdict | None:
        """Which of the kernels that could serve is the best, if two of them are known."""
        entry = self.nearest(op, avals, params)
        known = {k.name: t for k in able if entry and (t := usable(entry, k))}
        if len(known) < 2:
            return None
        best, second = sorted(known, key=lambda name: self.criterion.rank(known[name]))[:2]
        says = {n: self.compared(t, known[second if n == best else best]) for n, t in known.items()}
        return Verdict(best, says)

    def compared(self, ours: Timing, theirs: Timing) -> str:
        """``measured 12.4 µs against 31.0 µs (report of 2026-12-01)``."""
        errors = f", error {ours.error:.2g} against {theirs.error:.2g} of what is promised"
        shown = "" if self.criterion is Criterion.Fastest else errors
        times = f"{microseconds(ours.us)} against {microseconds(theirs.us)}"
        return f"measured {times}{shown} (report of {self.date})"


def usable(entry: Entry, kernel: Kernel) -> Timing | None:
    """How the kernel did, if it is still the same and kept the promise."""
    timing = entry.kernels.get(kernel.name)
    if timing is None or timing.error > 1 or kernel.name in entry.failed:
        return None
    return timing if timing.revision in ("", revision(kernel)) else None


def revision(kernel: Kernel) -> str:
    """The kernel's, as an entry has it."""
    return f"{kernel.revision:016x}" if kernel.revision else ""


def microseconds(us: float) -> str:
    """``12.4 µs``; seconds and milliseconds where those read better."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= 10 * size:
            return f"{us / size:.1f} {unit}"
    return f"{us:.1f} µs"


@contextlib.contextmanager
def by_report(
    report: ProfileReport, criterion: Criterion | str = Criterion.Fastest
) -> Iterator[None]:
    """Choose by a report in a block: part of the cache key of every ``jax.jit`` around an op.

    The report may be of another machine than this, for programs that are lowered or exported for
    that one.  A pin (``fuel_jax.using``) goes before it.

    Args:
        report: measurements, of this machine or of the one to lower for.
        criterion: what makes an implementation the best.
    """
    with MEASURED(Measurements.of(report, Criterion(criterion))):
        yield


@contextlib.contextmanager
def tuned(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Cut kernels by a table of tiles in a block, instead of by the one that is shipped.

    Part of the cache key of every ``jax.jit`` around an op.  The table speaks for the platform it
    was measured on, also where a program is lowered or exported for that one from elsewhere.

    Args:
        path: the table; this machine's own (:func:`tiles_path`) if None.

    Raises:
        FileError: the file is damaged or of a newer major version.
        OSError: it cannot be opened.
    """
    with TUNED(Table.load(tiles_path() if path is None else path)):
        yield


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Cut kernels by rule in a block, as if there were no table."""
    with TUNED(Table.of({}, ())):
        yield


# -- for the process -----------------------------------------------------------------------


def default_path() -> pathlib.Path:
    """Where this machine's report is kept: in ``$XDG_CACHE_HOME/fuel_jax``, or ``~/.cache``."""
    here = machine()
    name = f"{here.get('processor') or here['device']} jax {here['jax']}"
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    return pathlib.Path(cache) / "fuel_jax" / f"{slug}.json"


def tiles_path() -> pathlib.Path:
    """Where this machine's table of tiles is kept: beside its report."""
    return default_path().with_suffix(".tiles.json")


def populate_dispatch_table(
    path: str | os.PathLike[str] | None = None,
    *,
    ops: Sequence[Any] | None = None,
    criterion: Criterion | str = Criterion.Fastest,
    say: Callable[[str], None] = lambda line: None,
) -> ProfileReport:
    """Measure what the file lacks, then choose by it in this process.

    Args:
        path: the report; this machine's own (:func:`default_path`) if None.
        ops: those to measure, on all their examples; the default suite if None.
        criterion: what makes an implementation the best.
        say: gets a line for each call measured.

    Returns:
        The report, with what was measured now.

    Raises:
        FileError: the file is damaged, of a newer major version, or of another machine.
    """
    from .suite import calls, opened, profile

    path = default_path() if path is None else path
    report = opened(path)
    for _, entry in profile(report, path, calls(ops)):
        say(entry.line)
    MEASURED.set_global(Measurements.of(report, Criterion(criterion)))
    return report


def cached(
    path: str | os.PathLike[str] | None = None, *, criterion: Criterion | str = Criterion.Fastest
) -> ProfileReport | None:
    """Choose by an earlier report in this process, measuring nothing.

    Args:
        path: the report; this machine's own (:func:`default_path`) if None.
        criterion: what makes an implementation the best.

    Returns:
        The report, or None if there is none or it is of another machine: then nothing changes.

    Raises:
        FileError: the file is damaged or of a newer major version.
    """
    path = default_path() if path is None else path
    try:
        report = ProfileReport.load(path)
    except FileNotFoundError:
        return None
    if not report.continues(machine()):
        return None
    MEASURED.set_global(Measurements.of(report, Criterion(criterion)))
    return report


def invalidate() -> None:
    """Choose as if nothing had been measured, and delete this machine's own report."""
    MEASURED.set_global(None)
    default_path().unlink(missing_ok=True)
