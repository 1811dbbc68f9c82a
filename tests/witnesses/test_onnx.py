"""ONNX's node cases through our ops.

``python -m tests.witnesses.test_onnx`` runs them all and writes docs/witnesses/onnx.md.
"""

import collections
import pathlib
import sys

import pytest

pytest.importorskip("onnx", reason="ONNX's node cases come with the package onnx")

import jax
import onnx

import fuel_jax as fj

from .onnx_cases import Case, cases, on_host
from .onnx_table import TABLE, Row

COMMITTED = pathlib.Path(__file__).parents[2] / "docs" / "witnesses" / "onnx.md"
PAIRS = [
    (row, case)
    for row in TABLE
    for case in cases()[row.node]
    if row.when(*case.inputs, **case.attributes)
]
HEAD = f"""# ONNX's node cases

Made by `python -m tests.witnesses.test_onnx`, which runs them: what the package `onnx`
{onnx.__version__} builds to test backends with, one node each, and the convolutions that it stores,
at the case's own tolerance (10⁻³ of each element, integers exactly).  A case can serve several ops;
one that needs what an op does not have is skipped, and the reason is counted.

In BF16, whose rounding alone exceeds that tolerance, ours must be at least as near to float64 as
the expected output, where it is not within it.  A mask, which `flash_attn` does not have, is given
to it as features of queries and keys whose product is the mask.
"""


def reason(row: Row, case: Case) -> str | None:
    """Why our op cannot make this node."""
    return row.beyond(*case.inputs, **case.attributes)


def run(row: Row, case: Case) -> None:
    case.check(row.adapt(on_host(getattr(fj, row.op)), *case.inputs, **case.attributes))


@pytest.mark.parametrize(
    ("row", "case"), [pytest.param(r, c, id=f"{r.op}-{r.node}-{c.name}") for r, c in PAIRS]
)
def test_case(row: Row, case: Case):
    if why := reason(row, case):
        pytest.skip(why)
    run(row, case)


def test_no_case_is_left_out():
    """Whatever no row's ``when`` claims would be dropped in silence."""
    claimed = {case.name for _, case in PAIRS}
    of_these_nodes = {case.name for row in TABLE for case in cases()[row.node]}
    assert of_these_nodes == claimed


def page(passed: collections.Counter) -> str:
    """The table, given how many cases each pair of an op and a node passed."""
    total, why = collections.Counter(), collections.defaultdict(collections.Counter)
    for row, case in PAIRS:
        total[row.op, row.node] += 1
        if (because := reason(row, case)) is not None:
            why[row.op, row.node][because] += 1
    skipped = sum(n for reasons in why.values() for n in reasons.values())
    lines = [
        HEAD,
        f"{total.total()} pairs of an op and a case: {total.total() - skipped} run, "
        f"{passed.total()} pass, {skipped} are skipped.",
        "",
        "| op | node | run | passed | skipped, and why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for pair, n in total.items():
        reasons = "; ".join(f"{m}: {because}" for because, m in why[pair].items())
        ran = n - why[pair].total()
        lines.append(f"| {' | '.join(pair)} | {ran} | {passed[pair]} | {reasons} |")
    return "\n".join(lines) + "\n"


def test_committed_table():
    """What passes is each case's own test; here: every case that is run passed when it was made."""
    committed = COMMITTED.read_text()
    if f"\n{onnx.__version__} builds" not in committed:
        pytest.skip(f"the table was made with another onnx than {onnx.__version__}")
    assert committed == page(
        collections.Counter((row.op, row.node) for row, case in PAIRS if not reason(row, case))
    ), f"write it anew: python -m {__name__}"


def main() -> None:
    """Run every case, write the table, name what failed."""
    jax.config.update("jax_enable_x64", True)
    passed, failed = collections.Counter(), []
    for row, case in PAIRS:
        if reason(row, case):
            continue
        try:
            run(row, case)
            passed[row.op, row.node] += 1
        except Exception as error:  # a failure is a number in the table
            failed.append(f"{row.op}: {case.name}: {error}")
    COMMITTED.parent.mkdir(exist_ok=True)
    COMMITTED.write_text(page(passed))
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
