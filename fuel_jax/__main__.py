"""The command line: ``python -m fuel_jax``."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import Op
from ._check import check, platform_here
from ._environment import environment
from ._examples import FLOATS
from ._pages import listing, page, table
from .errors import FileError, UnknownName, UnsupportedKernel
from .op_kind import FusedOps, unknown
from .registry import builtin
from .types import FUEL_DTYPES

PROGRAM = "python -m fuel_jax"
USAGE = f"""
  {PROGRAM}                  list every kind of op and every fused op
  {PROGRAM} OP [OP ...]      what an op computes, its gradient and precision, who would run here
  {PROGRAM} check [OP ...]   run the ops on this device against float64
  {PROGRAM} profile          measure every implementation of the ops, for this machine's report
  {PROGRAM} report FILE ...  what was measured, as text, HTML or Markdown
  {PROGRAM} compare A B      what became faster or slower between two reports
  {PROGRAM} env              versions, devices, settings: for bug reports; never fails
  {PROGRAM} table            the op table of the documentation, as Markdown"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for a broken promise, 2 for a bad command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(given[0]) if given else None
    try:
        return command(given[1:]) if command else show(given)
    except (FileError, UnknownName, UnsupportedKernel) as error:
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
    """Implementations of ops beside each other, or cases of a suite beside their peers."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} profile",
        description="Time every implementation of the ops that can serve on this device, with its "
        "error against float64, and keep what is found in a report.  Stopped and started again, "
        "it goes on where it was.  Nothing chooses by the report until asked to (docs/judge.md).",
    )
    parser.add_argument(
        "--op",
        action="append",
        metavar="OP",
        help="this op, on all its examples, and its gradient; repeatable.  Otherwise every op once",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="DTYPE",
        help=f"one of {', '.join(FLOATS)}; repeatable.  Otherwise float32 and bfloat16",
    )
    parser.add_argument("--out", metavar="FILE", help="the report; otherwise this machine's own")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="try the settings of each kernel instead, and keep the best in a table of tiles",
    )
    parser.add_argument(
        "--size",
        action="append",
        type=elements,
        metavar="N",
        help="elements of the largest operand, at most; repeatable.  Otherwise three sizes",
    )
    parser.add_argument("--list", action="store_true", help="print what is there and do nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes only: to try it out")
    parser.add_argument(
        "--suite",
        choices=["default", "h200", "sweep", "again", "several", "train-step", "decode"],
        default="default",
        help="h200: cases beside XLA, cuDNN and PyTorch; sweep: whether the fastest implementation "
        "is chosen, over many shapes; again: whether all implementations give the same bits "
        "every time, and the right ones; several: all devices beside one, what is "
        "sent and how it scales; train-step: a decoder's training step in several ways; "
        "decode: tokens a second in halves and in four bits.  "
        "All exit with 1 if ours failed, sweep if another was faster",
    )
    parser.add_argument(
        "--rows", metavar="FILE", help="suites: append a line of JSON for each case"
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N",
        help="train-step: its batch or its weights over N devices, beside one: data=2, model=2, "
        "data=2,model=4",
    )
    parser.add_argument("case", nargs="*", help="suites: names or their beginning words, * for any")
    asked = parser.parse_args(given)
    if asked.mesh and asked.suite != "train-step":
        parser.error("--mesh belongs to --suite train-step")
    if asked.suite == "default":
        if asked.case or asked.rows:
            parser.error("cases and --rows belong to the other suites; name an op with --op")
        return profile_ops(asked)
    if asked.op or asked.out or asked.dtype or asked.tune or asked.size:
        parser.error("--op, --dtype, --out, --tune and --size belong to the default suite")
    # PyTorch's memory comes from the same card; JAX would take most of it beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    suite: Any
    runner: Any
    if asked.suite == "several":
        from .judge import several as runner, several as suite
    elif asked.mesh:
        from .judge import mesh_step as runner, mesh_step as suite
    elif asked.suite == "train-step":
        from .judge import train_step as runner, train_step as suite
    elif asked.suite == "decode":
        from .judge import decode as runner, decode as suite
    elif asked.suite == "sweep":
        from .judge import shapes as suite, sweep as runner
    elif asked.suite == "again":
        from .judge import again as runner, again as suite
    else:
        from .judge import h200 as suite, profile as runner

    cases = suite.chosen(asked.case, asked.mesh) if asked.mesh else suite.chosen(asked.case)
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    return runner.profile(cases, asked.rows, asked.tiny)


def elements(given: str) -> int:
    """A number of elements."""
    if not given.isdecimal() or not int(given):
        raise argparse.ArgumentTypeError(f"{given!r} is no number of elements, such as 1048576")
    return int(given)


def profile_ops(asked: argparse.Namespace) -> int:
    """Measure what the report lacks, or the table of tiles."""
    from .judge import default_path, progress, suite, tiles_path, tuning

    ops = [found(name) for name in asked.op] if asked.op else None
    dtypes = read_dtypes(asked.dtype) if asked.dtype else suite.DTYPES
    sizes = asked.size or (suite.SIZES[:1] if asked.tiny else suite.SIZES)
    calls = (tuning if asked.tune else suite).calls(ops, dtypes, sizes)
    if asked.tune and not calls:
        raise UnsupportedKernel(
            f"none of {', '.join(asked.op or ['the ops'])} has a kernel for "
            f"{platform_here()} that can be cut in several ways. Nothing was measured."
        )
    if asked.list:
        print("\n".join(map(str, calls)))
        return 0
    path = asked.out or (tiles_path() if asked.tune else default_path())
    try:
        report: Any = tuning.TileFile.opened(path) if asked.tune else suite.opened(path)
        report.save(path)  # now, rather than fail to after the first minute
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}. Name another file with --out.") from None
    if asked.tune:
        return tune_ops(report, calls, path)
    print(f"{len(calls)} calls into {path}; {len(report.entries)} are there", flush=True)
    try:
        with progress.shown(len(calls)) as told:
            for done, entry in suite.profile(report, path, calls):
                told(done, entry.line)
    except KeyboardInterrupt:
        print(f"stopped: {len(report.entries)} are in {path}; the same command goes on from there")
        return 130
    failed = [f"{e.call}  {n}: {why}" for e in report.entries for n, why in e.failed.items()]
    print("\n".join([f"failed: {line}" for line in failed] + [f"done: {path}"]))
    return bool(failed)


def tune_ops(table: Any, calls: Sequence[Any], path: str | os.PathLike[str]) -> int:
    """Measure what a table of tiles lacks."""
    from .judge import progress, tuning

    print(f"{len(calls)} calls into {path}; {len(table)} rows are there", flush=True)
    try:
        with progress.shown(len(calls)) as told:
            for done, line in tuning.tune(table, path, calls):
                told(done, line)
    except KeyboardInterrupt:
        print(f"stopped: {len(table)} are in {path}; the same command goes on from there")
        return 130
    print(f"done: {len(table)} rows in {path}")
    return 0


def run_report(given: Sequence[str]) -> int:
    """Tables and pictures of reports."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} report",
        description="Every call and implementation of profile reports, as text, or as files with "
        "a roofline and bars beside XLA (those need matplotlib: pip install 'fuel_jax[report]').",
    )
    parser.add_argument("file", nargs="+", help="a report")
    parser.add_argument("--html", metavar="OUT", help="write one page")
    parser.add_argument("--md", metavar="OUT", help="write Markdown, pictures in files beside it")
    asked = parser.parse_args(given)
    from .judge import pages, plots

    reports = [loaded(file) for file in asked.file]
    if not (asked.html or asked.md):
        print("\n\n".join(map(pages.as_text, reports)))
    if asked.html:
        pathlib.Path(asked.html).write_text(pages.as_html(reports), encoding="utf-8")
    if asked.md:
        pages.write_markdown(reports, pathlib.Path(asked.md))
    if (asked.html or asked.md) and not any(map(plots.pictures, reports)):
        print(plots.ABSENT)
    return 0


def run_compare(given: Sequence[str]) -> int:
    """Two reports."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} compare",
        description="What is faster or slower in B than in A, where the spreads do not meet.",
    )
    parser.add_argument("a", help="a report")
    parser.add_argument("b", help="another")
    asked = parser.parse_args(given)
    from .judge import pages

    print(pages.compared(loaded(asked.a), loaded(asked.b)))
    return 0


def loaded(file: str) -> Any:
    """The report of a file."""
    from .judge import ProfileReport

    try:
        return ProfileReport.load(file)
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}. Name a profile report.") from None


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
    "report": run_report,
    "compare": run_compare,
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
