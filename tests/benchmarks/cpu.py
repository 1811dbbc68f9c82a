"""Is any op slower than its plain jax.numpy spelling, or than PyTorch, on this CPU?

    python -m tests.benchmarks.cpu [op ...] [--direction forward|gradient] [--rows FILE] [--peak]

Our program, every plain spelling and PyTorch's take turns; a ratio is the median over rounds of the
ratio within a round, to the fastest plain spelling.  ``row.py`` says what is promised, the exit
status whether it was kept.  A name is an op's or a row's: ``matmul``, ``"matmul M1"``.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import jax

from .peak import peaks
from .plain import ROW
from .programs import Case, Program, cases, compiled, torch_program
from .timing import TORCH, append, machine, ratio, taking_turns, timed

DIRECTIONS = ("forward", "gradient")
COMPILE = 2.0  # seconds, promised
HOPELESS = 3.0  # a plain spelling that takes this many times another's time is timed once
MEMORY = 8 * 2**30  # nor is one run that needs more


def plain_programs(case: Case) -> tuple[dict[str, Program], dict[str, Any]]:
    """The plain spellings worth timing; of the others, what they took."""
    programs = {name: compiled(f, case) for name, f in case.row.spellings.items()}
    if len(programs) == 1:
        return programs, {}
    fits = {name: p for name, p in programs.items() if p.temp_bytes <= MEMORY}
    once = {name: min(timed(p.run) for _ in range(2)) for name, p in fits.items()}
    fastest = min(once.values())
    out = {f"{name}_temp_bytes": p.temp_bytes for name, p in programs.items()}
    out |= {f"{name}_us": s * 1e6 for name, s in once.items()}
    return {n: p for n, p in fits.items() if once[n] <= HOPELESS * fastest}, out


def measured(case: Case) -> dict[str, Any]:
    """The case's row."""
    ours = compiled(case.op, case)
    plain, others = plain_programs(case)
    peer = torch_program(case)
    programs = {"ours": ours, **plain} | ({"torch": peer} if peer else {})
    took = taking_turns({name: p.run for name, p in programs.items()})
    us = {name: statistics.median(times) * 1e6 for name, times in took.items()}
    best = min(plain, key=us.__getitem__)
    row = {"op": case.label, "direction": case.direction, "arrays": case.specs}
    row |= {"params": case.params, "us": us["ours"], "plain_us": us[best]}
    row |= {"ratio": ratio(took["ours"], took[best]), "limit": case.row.limit}
    if others:
        row |= {"plain": best, "others": others}
    if peer:
        row |= {"torch_us": us["torch"], "torch_ratio": ratio(took["ours"], took["torch"])}
        row |= {"torch_limit": case.row.torch}
    row |= {"compile_s": ours.compile_s, "temp_bytes": ours.temp_bytes}
    return row | {"plain_temp_bytes": plain[best].temp_bytes}


def misses(row: dict[str, Any]) -> list[str]:
    """The promises a row breaks."""
    said = []
    if row["ratio"] > row["limit"]:
        said.append(f"{row['ratio']:.2f} of plain, promised {row['limit']:g}")
    limit = row.get("torch_limit")
    if limit and row["torch_ratio"] > limit:
        said.append(f"{row['torch_ratio']:.2f} of PyTorch, promised {limit:g}")
    if row["compile_s"] > COMPILE:
        said.append(f"compiled in {row['compile_s']:.1f} s, promised {COMPILE:g}")
    return said


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    peer = "torch_us" in row
    cells = [f"{row['op']:<30} {row['direction']:<8}", f"{row['us']:>11.1f}"]
    cells += [f"{row['plain_us']:>11.1f}", f"{row['ratio']:>5.2f}"]
    cells += [f"{row['torch_us']:>11.1f} {row['torch_ratio']:>5.2f}" if peer else f"{'':>17}"]
    cells += [f"{row['compile_s']:>5.1f}", f"{row['temp_bytes'] / 2**20:>8.1f}"]
    cells += [f"{row['plain_temp_bytes'] / 2**20:>8.1f}", "MISS" if misses(row) else "    "]
    return " ".join([*cells, brief(row)])


def brief(row: dict[str, Any]) -> str:
    """Which call it was."""
    shapes = " ".join(x.replace(" ", "x") for x in row["arrays"])
    params = " ".join(f"{name}={value}" for name, value in row["params"].items())
    return f"{shapes[:60]} {params[:40]}"


HEADER = (
    f"{'op':<30} {'':<8} {'µs':>11} {'plain':>11} {'ratio':>5} {'PyTorch':>11} {'ratio':>5} "
    f"{'comp.':>5} {'temp MiB':>8} {'plain':>8}"
)


def asked_for(names: list[str], cli: argparse.ArgumentParser) -> list[str]:
    """The rows of the names."""
    chosen = [label for label in ROW if not names or {label, label.split()[0]} & set(names)]
    known = set(ROW) | {label.split()[0] for label in ROW}
    if unknown := set(names) - known:
        cli.error(f"no plain spelling of {', '.join(sorted(unknown))}")
    return chosen


def rows(labels: list[str], directions: tuple[str, ...], peak: bool) -> Iterator[dict[str, Any]]:
    """A row for each call and direction."""
    for label in labels:
        for i, call in enumerate(ROW[label].calls):
            for case in cases(label, ROW[label], call, directions):
                row = measured(case)
                yield row | (peaks(label, i, case.direction) if peak else {})
            jax.clear_caches()


def main() -> int:
    """Measure, print, keep; the exit status says whether the promises hold."""
    cli = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cli.add_argument("op", nargs="*", help="all when omitted")
    cli.add_argument("--rows", help="file to append to, one JSON object a line")
    cli.add_argument("--direction", choices=DIRECTIONS, help="both when omitted")
    peak = "also the peak of a process that runs nothing else, for each program: slow"
    cli.add_argument("--peak", action="store_true", help=peak)
    asked = cli.parse_args()
    labels = asked_for(asked.op, cli)
    directions = (asked.direction,) if asked.direction else DIRECTIONS
    where, missed = machine(), []
    if not TORCH:
        print("PyTorch is not installed: its column stays empty.")
    print(HEADER)
    for row in rows(labels, directions, asked.peak):
        print(shown(row), flush=True)
        if asked.peak:
            mib = {name: f"{row[name] / 2**20:.0f} MiB" for name in row if name.endswith("peak")}
            print("    ", ", ".join(f"{name} {size}" for name, size in mib.items()), flush=True)
        if asked.rows:
            append(asked.rows, where | row)
        missed += [(row, said) for said in misses(row)]
    print(f"\n{len(missed)} promises missed")
    for row, said in missed:
        print(f"  {row['op']} {row['direction']} {brief(row)}: {said}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
