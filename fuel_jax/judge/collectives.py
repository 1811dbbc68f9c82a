"""What a compiled program sends between devices, and what an op's rule says it must."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from .._sharding import Rule, Split

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
CALL = re.compile(rf"= (\(?[^=]*?\)?) ({KINDS})(?:-start)?\(")
ARRAY = re.compile(r"([a-z]+\d+|pred)\[([\d,]*)\]")
WIDTHS = {"pred": 1, "bf16": 2}
COMMENT = re.compile(r"/\*.*?\*/")  # the number of each fifth result
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
CALLED = re.compile(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ALONE = re.compile(r"replica_groups=(?:\{\{\d+\}(?:,\{\d+\})*\}|\[\d+,1\]<=)")  # nothing is sent


def sent(program: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective on one device, of a program as text.

    One that has been started is printed with its operands, as a tuple, before its results.
    """
    found = Counter()
    lines = (COMMENT.sub("", x) for x in program.splitlines() if not ALONE.search(x))
    for results, kind in CALL.findall("\n".join(lines)):
        arrays = ARRAY.findall(results)
        if results.startswith("(("):
            arrays = arrays[len(arrays) // 2 :]
        for dtype, shape in arrays:
            width = WIDTHS.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8
            found[kind] += width * math.prod(int(n) for n in shape.split(",") if n)
    return dict(found)


def sent_in_all(program: str) -> dict[str, int]:
    """The same, with what is in a loop as often as the loop runs, where the program says so."""
    parts = {name: body for name, body in COMPUTATION.findall(program)}

    @functools.cache
    def of(name: str) -> Counter[str]:
        found = Counter(sent(parts.get(name, "")))
        for line in parts.get(name, "").splitlines():
            runs = TRIPS.search(line)
            for called in CALLED.findall(line):
                for kind, n in of(called).items():
                    found[kind] += n * (int(runs[1]) if runs else 1)
        return found

    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", program, re.MULTILINE)
    return dict(of(entry))


def collectives(program: Any, *arrays: Any) -> dict[str, int]:
    """The same of a function, compiled for arrays that are laid out so."""
    return sent(jax.jit(program).lower(*arrays).compile().as_text() or "")


def predicted(rule: Rule, split: Split, mesh: Any, results: Sequence[Any]) -> int:
    """Bytes of the parts that are summed over devices, by the rule."""
    leaves = [y for y in results if y is not None]
    total = 0
    for y, spec, axes in zip(
        leaves, rule.specs(rule.results, split), rule.sums(split), strict=True
    ):
        used = [a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())]
        if axes:
            total += y.size * y.dtype.itemsize // math.prod(mesh.shape[a] for a in used)
    return total
