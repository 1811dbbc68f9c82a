"""The command line: ``python -m fuel_jax``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from . import Op
from ._check import check
from ._environment import environment
from ._examples import FLOATS
from ._pages import listing, page, table
from .errors import UnknownName, UnsupportedKernel
from .op_kind import FusedOps, unknown
from .registry import builtin
from .types import FUEL_DTYPES

PROGRAM = "python -m fuel_jax"
USAGE = f"""
  {PROGRAM}                  list every kind of op and every fused op
  {PROGRAM} OP [OP ...]      what an op computes, its gradient and precision, who would run here
  {PROGRAM} check [OP ...]   run the ops on this device against float64
  {PROGRAM} profile          time ops beside their peers, on the device a suite is for
  {PROGRAM} env              versions, devices, settings: for bug reports; never fails
  {PROGRAM} table            the op table of the documentation, as Markdown"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for a broken promise, 2 for a bad command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(given[0]) if given else None
    try:
        return command(given[1:]) if command else show(given)
    except (UnknownName, UnsupportedKernel) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def show(given: Sequence[str]) -> int:
    """The list, or the pages of the ops named."""
    parser = argparse.ArgumentParser(prog=PROGRAM, usage=USAGE)
    parser.add_argument("op", nargs="*", help="rope, or Rope, ROPE, 5: name, kind, constant or id")
    names = parser.parse_args(given).op
    print("\n\n\n".join(page(found(name)) for name in names) if names else listing())
    return 0


def run_check(given: Sequence[str]) -> int:
    """Every op, or those named, against float64."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} check",
        description="Run ops on this device and compare them with float64 on the CPU.  "
        "Prints the error in units of each op's promise; exits with 1 if one was broken.",
    )
    parser.add_argument("op", nargs="*", help="as above; every op if none is named")
    parser.add_argument(
        "--dtype", action="append", metavar="DTYPE", help=f"one of {', '.join(FLOATS)}; repeatable"
    )
    asked = parser.parse_args(given)
    ops = [found(name) for name in asked.op] or sorted(builtin(), key=lambda op: op.name)
    return check([op for op in ops if isinstance(op, Op)], read_dtypes(asked.dtype or FLOATS))


def read_dtypes(given: Sequence[str]) -> list[str]:
    """Canonical names of float dtypes; Fuel's are understood."""
    names = [FUEL_DTYPES.get(name, name) for name in given]
    for name in names:
        if name not in FLOATS:
            raise unknown("float dtype", name, list(FLOATS))
    return names


def run_profile(given: Sequence[str]) -> int:
    """Cases of a suite, timed beside their peers."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} profile",
        description="Time ops on this device beside XLA, cuDNN and PyTorch, as far as they are "
        "here, with the error of each against float64.  Exits with 1 if an op of ours failed.",
    )
    parser.add_argument("case", nargs="*", help="names or their beginning words, * for any; or all")
    parser.add_argument("--suite", required=True, choices=["h200"], help="whose cases")
    parser.add_argument("--rows", metavar="FILE", help="append a line of JSON for each case")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes: tries the cases out")
    asked = parser.parse_args(given)
    # PyTorch's memory comes from the same card; JAX would take most of it beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from .judge.h200 import chosen
    from .judge.profile import profile

    cases = chosen(asked.case)
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    return profile(cases, asked.rows, asked.tiny)


def run_environment(given: Sequence[str]) -> int:
    """Versions and devices."""
    argparse.ArgumentParser(
        prog=f"{PROGRAM} env", description="Versions, devices and settings; never fails."
    ).parse_args(given)
    environment()
    return 0


def run_table(given: Sequence[str]) -> int:
    """docs/ops.md."""
    argparse.ArgumentParser(
        prog=f"{PROGRAM} table", description="The op table as Markdown: docs/ops.md."
    ).parse_args(given)
    print(table())
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": run_check,
    "profile": run_profile,
    "env": run_environment,
    "table": run_table,
}


def found(name: str) -> Op:
    """The op of a name in any of its spellings: ``rope``, ``Rope``, ``ROPE``, ``5``."""
    ops = builtin()
    for op in ops:
        if name in spellings(op):
            return op
    raise unknown("op", name, [spelling for op in ops for spelling in spellings(op)])


def spellings(op: Op) -> list[str]:
    """Its name, its kind, its constant and its id."""
    number = getattr(op, "id", None)
    kind = [op.kind.value] if op.kind else []
    return [op.name, *kind, *([FusedOps(number).name, str(number)] if number is not None else [])]


if __name__ == "__main__":
    sys.exit(main())
