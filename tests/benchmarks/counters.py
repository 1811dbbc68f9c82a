"""What a GPU's own counters say of the kernels in cases of the suite h200: what limits them.

    python -m tests.benchmarks.counters [CASE ...] --rows docs/performance/h200-counters.jsonl

Nsight Compute (``ncu``) runs this file once more, and each kernel of ours several times, some
counters after others.  Clocks stay as they are.  A small kernel goes before each case, so that the
ones after it are known to be the case's.
"""

import argparse
import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fuel_jax.judge import h200
from fuel_jax.judge.profile import conditions, jax_program, prepared
from fuel_jax.judge.workload import Peer

Line = dict[str, str]
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats"),
    *("Occupancy", "LaunchStats"),
)
OURS = "regex:^fuel_|^case_"  # by its name a kernel is ours, or the one before a case
LEAST = 0.02  # of a case's time: kernels that take less are left out
ACTIVE = "sm__inst_executed_pipe_{}.avg.pct_of_peak_sustained_active"
# A row's names, and the counters: the first of several that there is.
COUNTERS = {
    "us": ("gpu__time_duration.sum",),
    "memory": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue": ("sm__inst_issued.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct"),
    "tensor": tuple(map(ACTIVE.format, ("tensor", "tensor_op_gmma", "tensor_op_hmma"))),
    "exponentials": (ACTIVE.format("xu"),),
    "fma": (ACTIVE.format("fma"), ACTIVE.format("fmaheavy")),
    "alu": (ACTIVE.format("alu"),),
    "lsu": (ACTIVE.format("lsu"),),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}
STALL = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


def marker(i: int) -> Any:
    """What runs the kernel before case ``i``."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    def one(ref: Any) -> None:
        triton.store(ref.at[jnp.arange(32)], jnp.zeros(32, jnp.int32))

    out = jax.ShapeDtypeStruct((32,), jnp.int32)
    return jax.jit(pallas.pallas_call(one, out_shape=out, name=f"case_{i}_begins"))


def run(cases: list[h200.Case]) -> None:
    """Each case once, under the counters."""
    for i, case in enumerate(cases):
        work = case.work()
        data = prepared(work, 1)
        ours = Peer(functools.partial(work.op, **work.params))
        program = jax_program(ours, case, work, data._replace(sets=data.sets[:1]), 1)
        jax.block_until_ready(marker(i)())
        program.burst(1)
        jax.clear_caches()


def read(file: Iterable[str]) -> Iterator[Line]:
    """The lines of a raw page, each a kernel's; what is not of the table goes before it."""
    table = csv.reader(line for line in file if line.startswith('"'))
    names = next(table)
    next(table)  # units
    for values in table:
        yield dict(zip(names, values, strict=True))


def number(line: Line, name: str) -> float | None:
    """A counter's value; None where this GPU has it not."""
    value = line.get(name, "").replace(",", "")
    try:
        return float(value)
    except ValueError:
        return None


def counted(line: Line) -> dict[str, Any]:
    """What is kept of a kernel."""
    found: dict[str, Any] = {"kernel": line["Kernel Name"].partition("(")[0]}
    for name, counters in COUNTERS.items():
        values = (number(line, counter) for counter in counters)
        known = [value for value in values if value is not None]
        if known:
            found[name] = round(known[0], 1)
    waits = {
        name.removeprefix(STALL[0]).removesuffix(STALL[1]): number(line, name) or 0.0
        for name in line
        if name.startswith(STALL[0]) and name.endswith(STALL[1])
    }
    total = sum(waits.values())
    worst = sorted(waits, key=lambda name: -waits[name])[:3]
    return found | {"waits": {name: round(waits[name] / total, 2) for name in worst if total}}


def kernels(lines: Iterable[Line], cases: list[h200.Case]) -> list[dict[str, Any]]:
    """A row for each kernel that takes some part of its case's time."""
    each: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["Kernel Name"].startswith("case_"):
            each.append([])
        elif each:
            each[-1].append(counted(line))
    found = []
    for case, rows in zip(cases, each, strict=True):
        total = sum(row["us"] for row in rows)
        found += [{"case": case.name} | row for row in rows if row["us"] >= LEAST * total]
    return found


def main() -> None:
    """Count, and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", nargs="*", help="names of the suite h200, or their beginning words")
    parser.add_argument("--rows", help="append a line of JSON for each kernel")
    parser.add_argument("--run", action="store_true", help="what ncu runs")
    asked = parser.parse_args()
    cases = h200.chosen(asked.case)
    if asked.run:
        return run(cases)
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
        ncu = ["ncu", "--csv", "--page", "raw", "--log-file", file.name]
        ncu += ["--clock-control", "none", "--kernel-name", OURS]
        sections = [word for name in SECTIONS for word in ("--section", name)]
        again = [sys.executable, "-m", "tests.benchmarks.counters", "--run", *asked.case]
        preallocate = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run([*ncu, *sections, *again], check=True, env=os.environ | preallocate)
        rows = kernels(read(file), cases)
    where = conditions()
    for row in rows:
        print(json.dumps(row))
        if asked.rows:
            with open(asked.rows, "a") as out:
                out.write(json.dumps(where | row) + "\n")


if __name__ == "__main__":
    main()
