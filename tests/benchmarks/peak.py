"""How much a process grows while it runs a program once: what was taken, not what XLA plans.

python -m tests.benchmarks.peak LABEL CALL forward|gradient ours|PLAIN|torch
"""

import pathlib
import resource
import subprocess
import sys

from .plain import ROW
from .programs import cases, compiled, torch_program
from .timing import TORCH

PEAK = pathlib.Path("/proc/self/clear_refs")  # writing 5 makes the present size the peak so far


def peaks(label: str, call: int, direction: str) -> dict[str, int]:
    """Growth in bytes, each program in a process of its own."""
    sides = ["ours", *ROW[label].spellings, *(["torch"] if TORCH else [])]
    grown = {}
    for side in sides:
        command = [sys.executable, "-m", __spec__.name, label, str(call), direction, side]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            grown[f"{side}_peak"] = int(done.stdout)
    return grown


def size() -> int:
    """Bytes the process has now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def grown(label: str, call: int, direction: str, side: str) -> int | None:
    """Bytes by which this process's peak passes its size before the run."""
    row = ROW[label]
    (case,) = cases(label, row, row.calls[call], (direction,))
    if side == "torch":
        program = torch_program(case)
    else:
        program = compiled(case.op if side == "ours" else row.spellings[side], case)
    if program is None:
        return None
    PEAK.write_text("5")  # or the compiler's own peak would count
    before = size()
    program.run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


if __name__ == "__main__":
    label, call, direction, side = sys.argv[1:]
    bytes_ = grown(label, int(call), direction, side)
    print("" if bytes_ is None else bytes_)
