"""What was measured, as a file that people read and later versions understand.

    {"version": "1.0",
     "machine": {"platform": "cuda", "device": "NVIDIA H200", "driver": …, "jax": …, "date": …},
     "entries": [
        {"op": "softmax_last_dim", "operands": ["bfloat16[16384,8192]"], "params": {},
         "kernels": {"triton": {"us": 134.1, "error": 0.87, …}, "xla": {"us": 165.3, …}},
         "failed": {}, "flops": …, "bytes": …}, …]}

A file of a newer minor version, a field or an op that nobody here knows are kept and written back;
an entry that cannot be read is passed over.  A newer major version and a damaged file are errors,
and the file stays as it is.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._choose import describe
from .._json_file import dumps, named, number, opened, save, text

MAJOR, MINOR = 1, 0
OPERAND = re.compile(r"([a-z]\w{1,20})\[((?:\d{1,15}(?:,\d{1,15}){0,15})?)\]")
SAME = ("platform", "device", "processor", "jax")  # what a machine must share to go on with a file

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Timing:
    """How one implementation did: microseconds, and its error in units of the op's promise."""

    us: float  # of the device, where a profiler sees it; else from launch to launch, the median
    least_us: float  # of rounds by the clock, of launches by a profiler
    most_us: float
    error: float  # 1.0 is the most that the op promises
    revision: str = ""  # of the kernel's source; "" is untracked


@dataclass(frozen=True)
class Entry:
    """A call that was measured, and how each implementation did that could serve it."""

    op: str
    operands: tuple[str | None, ...]  # "float32[2,8]"; None where left out
    params: dict[str, Any]
    kernels: dict[str, Timing]
    failed: dict[str, str] = field(default_factory=dict)  # kernels that raised or broke the promise
    flops: int = 0
    bytes: int = 0

    @property
    def key(self) -> Key:
        """What an entry is found by: the call."""
        return self.op, self.operands, settings(self.params, exact=True)

    @property
    def call(self) -> str:
        """``rms_norm_last_dim(float32[4,512], eps=1e-06)``, without what is None or False."""
        shown = [x for x in self.operands if x]
        shown += [f"{n}={v!r}" for n, v in self.params.items() if v is not None and v is not False]
        return f"{self.op}({', '.join(shown)})"

    @property
    def line(self) -> str:
        """The call and its times, in short."""
        times = [f"{n} {t.us:.1f} µs" for n, t in self.kernels.items()]
        return "  ".join([self.call, *times, *(f"{n} failed" for n in self.failed)])

    @property
    def dtype(self) -> str:
        """Of the first operand that holds floats, else of the first."""
        names = [x.partition("[")[0] for x in self.operands if x]
        return next((n for n in names if "float" in n), names[0] if names else "")

    @classmethod
    def read(cls, given: Any) -> Entry | None:
        """An entry of a file, or None where it says something this version does not understand."""
        try:
            kernels = {named(name): timing(got) for name, got in given["kernels"].items()}
            operands = tuple(None if x is None else described(x) for x in given["operands"])
            params = {named(n): v for n, v in given["params"].items()}
            failed = {named(n): text(why) for n, why in given.get("failed", {}).items()}
            flops, moved = (int(number(given.get(n, 0), zero=True)) for n in ("flops", "bytes"))
            return cls(named(given["op"]), operands, params, kernels, failed, flops, moved)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def written(self) -> dict[str, Any]:
        """For a file."""
        return vars(self) | {
            "operands": list(self.operands),
            "kernels": {name: vars(timing) for name, timing in self.kernels.items()},
        }


class ProfileReport:
    """Entries measured on one machine, in memory and in a file."""

    def __init__(self, machine: dict[str, Any], document: dict[str, Any] | None = None) -> None:
        """Begin a report, or hold the one that a file had."""
        version = f"{MAJOR}.{MINOR}"
        begun = {"version": version, "machine": machine, "entries": []}
        self.document: dict[str, Any] = document or begun
        self.machine: dict[str, Any] = self.document["machine"]
        self._raw: list[Any] = self.document["entries"]
        read = [(at, entry) for at, raw in enumerate(self._raw) if (entry := Entry.read(raw))]
        self._at: dict[Key, int] = {entry.key: at for at, entry in read}
        self._entries: dict[Key, Entry] = {entry.key: entry for _, entry in read}

    @property
    def entries(self) -> list[Entry]:
        """Those that this version understands."""
        return list(self._entries.values())

    @property
    def passed_over(self) -> int:
        """How many entries it does not understand, or has twice."""
        return len(self._raw) - len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry of a call."""
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        """Enter a call, in place of what was measured of it before."""
        at = self._at.setdefault(entry.key, len(self._raw))
        if at == len(self._raw):
            self._raw.append({})
        self._raw[at] = self._raw[at] | entry.written()
        self._entries[entry.key] = entry

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ProfileReport:
        """The report of a file.

        Raises:
            FileError: it is no report, is damaged, or comes from a newer major version.
            OSError: it cannot be opened.
        """
        return cls({}, opened(path, "profile report", MAJOR, "entries"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: whoever reads it sees the old one or the new one."""
        save(path, self.dumps())

    def dumps(self) -> str:
        """The file's text: an entry a line."""
        return dumps(self.document, "entries")

    def continues(self, machine: dict[str, Any]) -> bool:
        """Whether ``machine`` is one whose measurements belong here."""
        return all(self.machine.get(n) == machine.get(n) for n in SAME)

    def __repr__(self) -> str:
        device, date = self.machine.get("device"), self.machine.get("date")
        return f"<profile report: {len(self._entries)} calls on {device}, {date}>"

    def _repr_html_(self) -> str:
        from .pages import html_tables

        return html_tables(self)


def timing(given: dict[str, Any]) -> Timing:
    """How a kernel did."""
    us, least, most = (number(given[name]) for name in ("us", "least_us", "most_us"))
    error = number(given["error"], zero=True)
    return Timing(us, least, most, error, text(given.get("revision", "")))


def described(value: Any) -> str:
    """An operand."""
    if not OPERAND.fullmatch(value):
        raise ValueError
    return value


# -- calls ---------------------------------------------------------------------------------


def operands(avals: Sequence[Any]) -> tuple[str | None, ...]:
    """The operands of a call, as an entry names them."""
    return tuple(None if x is None else describe(x) for x in avals)


def plain(value: Any) -> Any:
    """A parameter as JSON has it."""
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def settings(params: dict[str, Any], exact: bool = False) -> str:
    """The parameters as text.  Floats, which do not change how fast an op is, by kind alone."""
    kept = {n: v if exact or not isinstance(v, float) else "float" for n, v in params.items()}
    return json.dumps(kept, sort_keys=True)


def pattern(op: str, given: Sequence[str | None], params: dict[str, Any]) -> Key:
    """What calls must share for one to tell of the other: all but the extents.

    Integers of all widths are alike: they are as wide as ``jax_enable_x64`` makes them.
    """
    kinds = []
    for x in given:
        dtype, _, dims = (x or "").partition("[")
        kinds.append((re.sub(r"(int)\d+$", r"\1", dtype), len(re.findall(r"\d+", dims))))
    return op, tuple(kinds), settings(params)


def size_class(given: Sequence[str | None]) -> tuple[int, ...]:
    """⌊log₂⌋ of every extent of every operand; 0 for extents of 0."""
    extents = (n for x in given if x for n in re.findall(r"\d+", x.partition("[")[2]))
    return tuple(max(int(n).bit_length() - 1, 0) for n in extents)
