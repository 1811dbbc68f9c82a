"""The tables of docs/performance, written from the rows that were measured.

    python -m tests.benchmarks.page

The latest row of every op, direction and call; what breaks a promise comes first.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from fuel_jax.judge.h200 import fits
from fuel_jax.judge.sweep import label, missed, ordered

from .cpu import brief, misses

HERE = pathlib.Path(__file__).parents[2] / "docs" / "performance"
Line = dict[str, Any]


def read(file: pathlib.Path) -> list[Line]:
    """The rows, oldest first."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def latest(rows: Iterable[Line], *key: str) -> list[Line]:
    """The last row of each key, in the order of the keys."""
    return list({json.dumps([row.get(k) for k in key]): row for row in rows}.values())


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Markdown; every column but the first two is of numbers."""
    names = head.split("|")
    lines = [names, [*["---"] * 2, *["--:"] * (len(names) - 2)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(x: float | None, form: str = ".2f") -> str:
    """A cell; empty where nothing was measured."""
    return "" if x is None else format(x, form)


def micros(us: float | None) -> str:
    """Microseconds, to three digits."""
    return "" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def machines(rows: list[Line], *keys: str) -> str:
    """What the numbers hold for, each once."""
    kinds = latest(rows, *keys)
    return "\n".join("* " + ", ".join(f"{k} {row[k]}" for k in keys if k in row) for row in kinds)


def cpu() -> str:
    """cpu.md."""
    rows = [row for row in read(HERE / "cpu.jsonl") if "compile_s" in row]
    rows = latest(rows, "op", "direction", "arrays", "params")
    rows.sort(key=lambda row: (not misses(row), row["op"], row["direction"]))
    missed = sum(bool(misses(row)) for row in rows)
    mib = lambda row, key: number(row[key] / 2**20, ",.1f")
    cells = (
        [
            *(f"`{row['op']}` {row['direction']}", brief(row)),
            *(micros(row["us"]), micros(row["plain_us"]), number(row["ratio"])),
            *(micros(row.get("torch_us")), number(row.get("torch_ratio"))),
            *(number(row["compile_s"], ".1f"), mib(row, "temp_bytes")),
            *(mib(row, "plain_temp_bytes"), "; ".join(misses(row))),
        ]
        for row in rows
    )
    head = "op|call|µs|plain µs|ratio|PyTorch µs|ratio|compile s|temp MiB|plain|missed"
    return f"""# Measured on a CPU

Written by `python -m tests.benchmarks.page` from `cpu.jsonl`; `tests/benchmarks/cpu.py` says how it
was measured.  A gradient's row is value and gradient.  Of {len(rows)} rows {len(rows) - missed}
keep what is promised; those that do not come first.

{machines(rows, "device", "cores", "processor", "jax", "torch", "commit", "date")}

{table(head, cells)}
"""


def limits(rows: Iterable[Line]) -> str:
    """What keeps each case from its goal, where it misses one: a list."""
    known = json.loads((HERE / "nvidia-h200-limits.json").read_text())
    why = lambda name: next(
        (said for words, said in known.items() if fits(name, words)), "Unknown."
    )
    return "\n".join(f"* {row['case']}: {why(row['case'])}" for row in rows)


def h200() -> str:
    """nvidia-h200.md."""
    rows = [row for row in read(HERE / "nvidia-h200.jsonl") if "tiny" not in row]
    rows = latest(rows, "case")
    behind = lambda row: row.get("us", math.inf) / row["goal_us"]
    rows.sort(key=lambda row: (behind(row) <= 1, row["case"]))
    late = [row for row in rows if behind(row) > 1]

    def peer(name: str, got: Line) -> str:
        return f"{name} {micros(got['us'])}"

    cells = (
        [
            *(row["case"], row["kernel"]),
            *(micros(row.get("us")), micros(row["goal_us"]), micros(row["floor_us"])),
            *("" if "us" not in row else f"{row['floor_us'] / row['us']:.0%}",),
            number(row.get("error"), ".1e"),
            ", ".join(peer(*item) for item in sorted(row["peers"].items(), key=fastest)),
            "; ".join(f"{name}: {why}" for name, why in row.get("failed", {}).items()),
        ]
        for row in rows
    )
    head = "case|kernel|µs|goal|floor|of the floor|error|peers, µs|failed"
    return f"""# Measured on an NVIDIA H200

Written by `python -m tests.benchmarks.page` from `nvidia-h200.jsonl`, which
`python -m fuel_jax profile --suite h200 --rows docs/performance/nvidia-h200.jsonl` appends to.
Microseconds of device time, median of interleaved rounds; the error is relative to float64, in the
Euclidean norm.  Goals met: {len(rows) - len(late)} of {len(rows)}; the others come first.

{machines(rows, "device", "driver", "jax", "torch", "commit", "date")}

{table(head, cells)}

What limits those that miss their goal:

{limits(late)}
"""


def several(file: pathlib.Path) -> str:
    """nvidia-h200-x2.md and its like."""
    rows = [row for row in read(file) if "tiny" not in row]
    rules = latest((row for row in rows if row["case"].startswith("rule ")), "case", "way")
    rules.sort(key=lambda row: (row.get("kept", False), row["case"]))
    timed = latest((row for row in rows if not row["case"].startswith("rule ")), "case")
    kept = sum(row.get("kept", False) for row in rules)
    share = lambda x: "" if x is None else f"{x:.0%}"
    gib = lambda row, key: number(row[key] / 2**30 if key in row else None)
    moved = lambda row: ", ".join(f"{kind} {n:,}" for kind, n in row.get("sent", {}).items())
    times = (
        [
            *(row["case"], row.get("kernel", ""), micros(row.get("one_us")), micros(row.get("us"))),
            *(
                share(row.get("efficiency")),
                micros(row.get("sending_us")),
                share(row.get("hidden")),
            ),
            *(gib(row, "one_bytes"), gib(row, "bytes"), number(row.get("error"), ".1e")),
            *(moved(row), row.get("failed", "")),
        ]
        for row in timed
    )
    promises = (
        [
            *(row["case"].removeprefix("rule "), row.get("way", "")),
            *("yes" if row.get("kept") else "no", number(row.get("error"))),
            *(moved(row) or "nothing", str(row.get("promised_bytes", "")), row.get("failed", "")),
        ]
        for row in rules
    )
    head = "case|kernel|µs, one|µs, all|efficiency|µs sending|hidden|GiB, one|GiB, each|error"
    return f"""# Measured on several devices

Written by `python -m tests.benchmarks.page` from `{file.name}`, which
`python -m fuel_jax profile --suite several --rows docs/performance/{file.name}` appends to.

{machines(rows, "devices", "device", "driver", "jax", "commit", "date")}

Microseconds by the clock on one device and on all, median of interleaved rounds.  The efficiency is
their ratio over the number of devices.  Sending, and the share of it that a device computes
meanwhile, are the profiler's; waiting for the other device counts as sending.  Memory is that of
operands, results and what is between, on each device.  The error is relative to one device, in the
Euclidean norm; that of a step of training is of its loss.  Bytes sent are those of the compiled
program, what is in a loop once; of a step of training as often as the loop runs.

{table(head + "|bytes sent|failed", times)}

What the rules of the ops promise: {kept} of {len(rules)} kept.  The error is from one device, in
units of what the op promises; values and gradients.  Promised bytes are in the dtype of the
operands; sums of halves may be sent in float32.

{table("op, axis, kernel|by|kept|error|bytes sent|promised|failed", promises)}
"""


def sweep() -> str:
    """nvidia-h200-sweep.md."""
    rows = [row for row in read(HERE / "nvidia-h200-sweep.jsonl") if "tiny" not in row]
    rows = latest(rows, "case", "down", "across")
    wrong = sorted(filter(missed, rows), key=lambda row: -(row["ratio"] or math.inf))
    grids: dict[str, list[Line]] = {row["case"]: [] for row in [*wrong, *rows]}
    for row in rows:
        grids[row["case"]].append(row)
    shown = "\n\n".join(f"## {case}\n\n{grid(found)}" for case, found in grids.items())
    why = lambda row: "; ".join(f"{name}: {why}" for name, why in row["failed"].items())
    cells = (
        [
            *(row["case"], f"{label(row['down'])} {label(row['across'])}", number(row["ratio"])),
            ", ".join(f"{name} {micros(us)}" for name, us in ordered(row)),
            why(row),
        ]
        for row in wrong
    )
    broken = sorted({f"{row['case']}: {why(row)}" for row in rows if row["failed"]})
    listed = "\n".join(f"* {line}" for line in broken) or "None."
    return f"""# The choices, over many shapes

Written by `python -m tests.benchmarks.page` from `nvidia-h200-sweep.jsonl`, which
`python -m fuel_jax profile --suite sweep --rows docs/performance/nvidia-h200-sweep.jsonl` appends
to.  Who is chosen, and its time by that of the best of the others: implementations of the op that
could have served, those that decline included, and what people write in plain JAX (`jnp`,
`lax.scan`, `lax.associative_scan`).  Device time, launches on the same operands, median of three
rounds in turns.  Forward and gradient are both named where they differ.

Of {len(rows)} shapes {len(wrong)} miss: something else is faster by more than 5 % and 1 µs.  In the
grids they are bold, and the cases that have any come first.

{machines(rows, "device", "driver", "jax", "commit", "date")}

{table("case|shape|ratio|µs, the chosen one first|failed", cells)}

{shown}

## What failed

{listed}
"""


def grid(rows: list[Line]) -> str:
    """A case's extents down and across: who is chosen, by the best of the others."""
    at = {(label(row["down"]), label(row["across"])): row for row in rows}
    down, across = (list(dict.fromkeys(place[i] for place in at)) for i in range(2))

    def cell(row: Line | None) -> str:
        if row is None:
            return ""
        said = f"{row['chosen']} {number(row['ratio'])}".strip()
        return f"**{said}**" if missed(row) else said

    return table(
        "|".join(["", *across]), ([d, *(cell(at.get((d, a))) for a in across)] for d in down)
    )


def train_step() -> str:
    """train-step.md."""
    found: list[Line] = []
    for row in read(HERE / "train-step.jsonl"):
        if "tiny" not in row:
            said = {k: row[k] for k in (*WHERE, "case", "tokens")}
            ways = {"ops": row} if "us" in row else {}
            base = {"base": row["peers"]["cuDNN"]} if "cuDNN" in row["peers"] else {}
            ways |= row["peers"]
            found += [said | base | got | {"way": way} for way, got in ways.items()]
    rows = latest(found, "device", "case", "way")
    first = {(r["device"], r["case"]): r for r in rows if r["way"] == "cuDNN"}
    rows.sort(key=lambda row: (row["device"], row["case"], row["us"]))

    def cells(row: Line) -> list[str]:
        base = row.get("base") or first.get((row["device"], row["case"]), {})  # its own run's
        of = lambda a, b: number(a / b if base else None)
        total = sum(row["kernels_us"].values())
        parts = [f"{kind} {us / total:.0%}" for kind, us in row["kernels_us"].items()]
        return [
            *(row["case"], row["way"]),
            f"{row['tokens'] / row['us'] * 1e6:,.0f}",
            of(base.get("us", 0), row["us"]),
            number(row["temporary_bytes"] / 2**30),
            of(row["temporary_bytes"], base.get("temporary_bytes", 1)),
            *(number(row["loss"], ".4f"), ", ".join(parts)),
        ]

    head = "model|way|tokens/s|of cuDNN's|GiB|of cuDNN's|first loss|time in kernels"
    return f"""# A training step

Written by `python -m tests.benchmarks.page` from `train-step.jsonl`, which
`python -m fuel_jax profile --suite train-step --rows docs/performance/train-step.jsonl` appends to.
`fuel_jax/judge/llama.py` is the model: weights in float32, cast to bfloat16 in every layer, each
layer computed again in the backward pass, Adam.  Tokens a second by the clock, the median of three
rounds in which the ways of a run take turns; memory is what the compiled step takes beside weights
and averages.

* cuDNN: plain JAX with `jax.nn.dot_product_attention(implementation="cudnn")`; dense: with the
  default one.  Fused: the same through `fuel_jax.fuse`.
* ops: written with the ops, attention ours or cuDNN's.
* kept: a checkpoint policy keeps attention's result.  Half gradients: those of the layers stay
  bfloat16, as the products give them, until Adam reads them.  Both are there with and without ops.

{machines(rows, *WHERE)}

{table(head, map(cells, rows))}
"""


def decode() -> str:
    """decode.md."""
    found: list[Line] = []
    for row in read(HERE / "decode.jsonl"):
        if "tiny" not in row:
            said = {k: row[k] for k in (*WHERE, "case", "tokens")}
            forms = ({"NF4": row} if "us" in row else {}) | row["peers"]
            halves = {"halves": row["peers"].get("bfloat16", {}).get("us")}
            found += [said | halves | got | {"form": form} for form, got in forms.items()]
    rows = latest(found, "device", "case", "form")
    rows.sort(key=lambda row: (row["device"], row["tokens"], row["us"]))

    def cells(row: Line) -> list[str]:
        total = sum(row["kernels_us"].values())
        parts = [f"{kind} {us / total:.0%}" for kind, us in row["kernels_us"].items()]
        return [
            *(row["case"], row["form"], f"{row['tokens'] / row['us'] * 1e6:,.0f}"),
            number(row["halves"] / row["us"] if row["halves"] else None),
            *(micros(row["us"]), number(row["weight_bytes"] / 2**30)),
            *(number(row["temporary_bytes"] / 2**20, ".0f"), number(row["compile_s"], ".0f")),
            ", ".join(parts),
        ]

    head = "model|weights|tokens/s|of bfloat16's|µs a step|GiB of weights|temporary MiB"
    return f"""# Decoding

Written by `python -m tests.benchmarks.page` from `decode.jsonl`, which
`python -m fuel_jax profile --suite decode --rows docs/performance/decode.jsonl` appends to.
A step of a decoder of 8 billion weights (`fuel_jax/judge/decode.py`) for 1 and 16 sequences at the
end of their context: the next token of each, the cache with it, one compiled program.  By the
clock, the median of five rounds in which the forms of the weights take turns.

{machines(rows, *WHERE)}

{table(head + "|compiled in, s|time in kernels", map(cells, rows))}
"""


WHERE = ("device", "driver", "jax", "torch", "commit", "date")


def fastest(item: tuple[str, Line]) -> float:
    """Peers in the order of their times."""
    return item[1]["us"]


PAGES: dict[str, Callable[[], str]] = {
    **{"cpu.md": cpu, "nvidia-h200.md": h200, "nvidia-h200-sweep.md": sweep},
    **{"train-step.md": train_step, "decode.md": decode},
}


def main() -> None:
    """Write the pages of what was measured."""
    for name, page in PAGES.items():
        if (HERE / name).with_suffix(".jsonl").exists():
            (HERE / name).write_text(page())
    for file in HERE.glob("nvidia-h200-x*.jsonl"):
        file.with_suffix(".md").write_text(several(file))


if __name__ == "__main__":
    main()
