"""The suite ``again``: whether implementations give the same bits every time, and the right ones.

Everybody who can serve, also those that decline, runs on awkward sizes: odd ones, single rows, rows
that see nothing, ends in the middle of a block.  What they give is compared with what the
decomposition gives, by what is promised, and with what they give the next times, bit by bit.

Under ``compute-sanitizer --tool memcheck`` the same command tells who reads or writes where nothing
is his.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..fused.flash_attn import flash_attn
from . import families, h200
from .h200 import BOTH, FORWARD
from .profile import conditions
from .shapes import FLOATS, HALVES, Case, Extents, along, cases
from .suite import reason
from .sweep import Row, planned, prepared
from .workload import Spec, Work

RUNS = 20

# -- what is run ---------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size_left": 50},
    "both ways": {"window_size_left": 30, "window_size_right": 17},
    "cap": {"causal": True, "softcap": 20.0},
    "slopes": {"causal": True},
    "lengths": {"causal": True, "k_len": 131},
    "slopes, lengths": {},
}


def attention(*, d: int, options: str, dtype: str) -> Work:
    """200 queries of the last of 264 keys, or of as many as are in use."""
    b, h, hk, sq, sk = 2, 4, 2, 200, 264
    keys = Spec((b, hk, sk, d), dtype)
    specs = [Spec((b, h, sq, d), dtype), keys, keys]
    if "slopes" in options:
        specs.append(Spec((h,), dtype, "positive"))
    if options == "slopes, lengths":
        specs.append(Spec((b,), "uint32", f"below {sk + 1}"))
    return Work(flash_attn, tuple(specs), OPTIONS[options])


def entered(name: str, family: Callable[..., Work], *grid: Sequence[Extents], **how: Any) -> None:
    """Enter an op without its peers, in every direction and dtype; of tiny shapes the first."""
    alone = lambda **extents: dataclasses.replace(family(**extents), peers={})
    down, across = grid
    CASES.extend(cases(name, alone, down=down, across=across, tiny=(down[:1], across[:1]), **how))


CASES: list[Case] = []
EACH: dict[str, Any] = {"directions": (FORWARD, BOTH), "dtypes": FLOATS}
NAMED = [{"options": name} for name in OPTIONS]
entered("flash_attn", attention, along("d", 64, 40, 128, 256), NAMED, **EACH)
ROWS: Any = along("r", 5, 1, 1030), along("c", 300, 1, 1001, 20000)
for name, family in (
    ("softmax_last_dim", families.softmax),
    ("log_softmax_last_dim", families.log_softmax),
    ("rms_norm_last_dim", families.rms_norm),
    ("layer_norm_last_dim", families.layer_norm),
    ("cumsum", families.running_sum),
):
    entered(name, family, *ROWS, **EACH)
entered("argmax_dim", families.largest, *ROWS, directions=(FORWARD,), dtypes=FLOATS)
CLASSES = along("v", 300, 1, 1001, 20000)
entered("fused_softmax_cross_entropy", families.cross_entropy, ROWS[0], CLASSES, **EACH)

PRODUCTS: Any = along("m", 5, 1, 3, 16, 33, 130)
# The second of each is in blocks of 64 × 128, as Hopper's kernels want it.
WEIGHTS = {"nf4": ((448, 200), (768, 320)), "awq": ((384, 200), (640, 192))}
for name, sizes in WEIGHTS.items():
    across = [{"k": k, "n": n} for k, n in sizes]
    entered(f"{name}_matmul", getattr(families, name), PRODUCTS, across, **EACH)
for quant in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2K", "Q3K", "Q4K", "Q5K", "Q6K"):
    family = functools.partial(families.quantised, quant_type=quant)
    entered(f"qmatmul {quant}", family, PRODUCTS, [{"k": 768, "n": 200}], **EACH)

STEPS = along("l", 37, 1, 107, 2050)
entered("selective_scan", families.selective, along("n", 5, 16), STEPS, b=2, d=70, **EACH)
HEADS = {"b": 2, "h": 4, "p": 64, "n": 64}
CHUNKS = along("l", 64, 192, 1088)
entered("ssd_chunk_scan", families.ssd, along("g", 1, 2), CHUNKS, **HEADS, **EACH)
SHORT: Any = {"directions": (FORWARD,), "dtypes": FLOATS, "b": 3, "k": 4}
entered("causal_conv1d", families.conv1d, along("c", 50), along("l", 37, 1029, 2048), **SHORT)
PAGES = along("page", 8, 16, 64)
CACHE = {"b": 3, "h": 8, "hk": 2, "context": 192}
HALF: Any = {"directions": (FORWARD,), "dtypes": HALVES}
of_pages = lambda dtype, **extents: families.decoding(**extents)
entered("paged_attn", of_pages, along("d", 64, 128), PAGES, **CACHE, **HALF)


def chosen(asked: Sequence[str]) -> list[Case]:
    """The cases of the names, their beginning words, or patterns with ``*``; all for none."""
    return h200.chosen(asked, CASES)


# -- how it is run -------------------------------------------------------------------------


def measured(case: Case, tiny: bool) -> list[Row]:
    """For each shape who gave the same bits in all runs, and who failed, and how."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        plans = [planned(shape, pool) for shape in case.shapes(tiny)]
    found: list[Row] = []
    for plan in plans:
        failed: dict[str, str] = {}
        arrays, programs = prepared(plan, failed)
        for name, (program, _) in programs.items():
            try:
                first = bits(program(*arrays))
                moved = sum(bits(program(*arrays)) != first for _ in range(RUNS - 1))
            except Exception as failure:  # whatever a driver may raise is a finding
                failed[name] = reason(failure)
                continue
            if moved:
                failed[name] = f"other bits in {moved} of {RUNS} runs"
        same = [name for name in programs if name not in failed]
        at = plan.shape.down | plan.shape.across
        found.append({"case": case.name, "at": at, "runs": RUNS, "same": same, "failed": failed})
    return found


def bits(results: Any) -> list[bytes]:
    """Of all results."""
    return [np.asarray(y).tobytes() for y in jax.tree.leaves(results)]


def line(row: Row) -> str:
    """What is printed of a row."""
    said = (
        value if isinstance(value, str) else f"{name.upper()}{value}"
        for name, value in row["at"].items()
    )
    failed = [f"{name}: {why}" for name, why in row["failed"].items()]
    mark = "✗" if failed else " "
    return "; ".join([f"{mark} {' '.join(said)}: {', '.join(row['same'])}", *failed])


def profile(asked: Sequence[Case], file: str | None = None, tiny: bool = False) -> int:
    """Run the cases, printing as they are known; 1 if one failed, else 0."""
    where = conditions() | {"suite": "again"}
    began, count, failed = time.perf_counter(), 0, []
    print(f"{len(asked)} cases on {where['device']}; who gives the same bits in {RUNS} runs")
    for i, case in enumerate(asked):
        print(f"\n[{i + 1}/{len(asked)}] {case.name}", flush=True)
        found = measured(case, tiny)
        for row in found:
            print(line(row))
        print(f"  {time.perf_counter() - began:.0f} s in all", flush=True)
        if file:
            with open(file, "a") as lines:
                lines.writelines(json.dumps(where | row) + "\n" for row in found)
        count += len(found)
        failed += [row for row in found if row["failed"]]
        gc.collect()
    print(f"\n{count} shapes; in {len(failed)} somebody failed")
    for row in failed:
        print(f"  {row['case']} {line(row)}")
    return bool(failed)
