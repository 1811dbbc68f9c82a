"""What the registry says of itself, as text: the list, an op's page, the table of the docs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._check import platform_here
from ._choose import describe, server
from ._examples import dtypes_of, filled
from ._fused import FusedOp
from ._op import Op
from .op_kind import FusedOps, OpKind
from .registry import FUSED, OPS

Rows = Iterable[Sequence[str]]


# -- facts ---------------------------------------------------------------------------------


def formula(op: Any) -> str:
    """The first line of its page."""
    line = inspect.cleandoc(op.__doc__ or "").partition("\n")[0]
    return line.replace(":func:", "").replace("``", "`").replace("  ", " ")


def gradient(op: Any) -> str:
    """The operands that have one, and the op that computes it if it is not JAX's own."""
    if not op.wrt or not gives_floats(op):
        return "none"
    by = f", by {op.backward.name}" if isinstance(getattr(op, "backward", None), FusedOp) else ""
    return ", ".join(op.wrt) + by


def gives_floats(op: Op) -> bool:
    """Whether any of its results is one."""
    (example, *_) = op.examples()
    arrays, params = filled(op, example, dtypes_of(op)[0])
    results = jax.tree.leaves(op.out(*arrays, **params))
    return any(jnp.issubdtype(y.dtype, jnp.floating) for y in results)


def kernels(op: Any) -> str:
    """Its implementations, in order of preference."""
    return ", ".join(k.name for k in op.kernels)


# -- the list ------------------------------------------------------------------------------


def listing() -> str:
    """Every fused op by id, and every kind in the vocabulary's order."""
    fused = [
        (str(i.value), op.name, op.family, kernels(op), gradient(op))
        for i in FusedOps
        if (op := FUSED[i])
    ]
    kinds = [(k.value, k.as_str(), formula(op)) for k in OpKind if (op := OPS[k])]
    return "\n".join(
        [
            f"{len(fused)} fused ops",
            "",
            *columns([("id", "op", "family", "kernels", "gradient of"), *fused]),
            "",
            f"{len(kinds)} kinds",
            "",
            *columns([("OpKind", "op", "what it computes"), *kinds]),
            "",
            "One op's page: python -m fuel_jax OP.  What else there is: python -m fuel_jax --help.",
        ]
    )


def columns(rows: Rows, indent: str = "  ") -> Iterator[str]:
    """Rows aligned by column; the last one is as wide as it likes."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()


# -- a page --------------------------------------------------------------------------------


def page(op: Any) -> str:
    """Signature, documentation, facts, and who would run its examples here."""
    facts = []
    if op.kind:
        facts.append(("kind", op.kind.value))
    if isinstance(op, FusedOp):
        facts.append(("fused op", f"id {op.id}, family {op.family}"))
    if isinstance(op, Op):
        facts += [
            ("outputs", ", ".join(op.outputs)),
            ("gradient", gradient(op)),
            ("precision", precision(op)),
        ]
    doc = [f"    {line}".rstrip() for line in inspect.cleandoc(op.__doc__ or "").splitlines()]
    return "\n".join([op.usage(), "", *doc, "", *columns(facts), *who_runs(op)])


def precision(op: Op) -> str:
    """The promise in every dtype."""
    promised = ", ".join(f"{d} {op.precision.tolerance(d):.2g}" for d in dtypes_of(op))
    return f"{promised}: the largest error, relative to the largest element"


def who_runs(op: Any) -> Iterator[str]:
    """Every implementation on every example, with the reason it would or wouldn't run here."""
    here = platform()
    for i, example in enumerate(op.examples()):
        if not i:
            yield from ("", f"  who would run here, on {here} (→)")
        operands = [x for n in op.inputs if n in example for x in several(op, example[n])]
        params = {n: v for n, v in example.items() if n not in op.inputs}
        shown = [describe(x) for x in operands] + [f"{n}={v!r}" for n, v in params.items()]
        said = op.explain(*operands, **params)
        yield from ("", f"    {op.name}({', '.join(shown)})")
        for direction, choices in (("forward", said.forward), ("backward", said.backward)):
            if isinstance(choices, str):
                yield f"        {direction:<8}  {choices}"
            else:
                serving = server(choices, here)
                for choice in choices:
                    yield f"      {'→' if choice is serving else ' '} {direction:<8}  {choice}"


def several(op: Op, x: Any) -> Sequence[Any]:
    """The arrays of one operand: more than one where the op takes any number."""
    return x if op.signature.variadic else [x]


def platform() -> str:
    """This machine's, or what keeps JAX from telling: a page is readable without a driver."""
    try:
        return platform_here()
    except Exception as error:
        return f"no device ({str(error).partition(chr(10))[0]})"


# -- the table of the docs -----------------------------------------------------------------

HEAD = """\
# Ops

Made by `make docs` from the registry.  Arrays go by position, parameters by keyword.  In a
signature, axes of one name have one extent; `?` marks an operand that may be `None` or left out.
A gradient is JAX's own derivative where no op is named.  "Error" is the promise in float32,
relative to the largest element of the float64 result: `python -m fuel_jax check` measures it on
your device, and `python -m fuel_jax OP` shows an op's whole page.
"""


def table() -> str:
    """docs/ops.md: fused ops by id, then the other kinds by the module they live in."""
    fused = [op for i in FusedOps if (op := FUSED[i])]
    lines = [
        HEAD,
        *section("Fused ops", "An op with an id, declared gradient and kernels of its own."),
        *markdown(("id", "op", "what it computes", "gradient of", "kernels", "error")),
        *(
            row(op.id, code(op.usage()), formula(op), gradient(op), kernels(op), promise(op))
            for op in fused
        ),
    ]
    rest = [(k, op) for k in OpKind if (op := OPS[k]) and op not in fused]
    homes = dict.fromkeys(op.__module__ for _, op in rest)
    for module in homes:
        lines += section(module.rpartition(".")[2].replace("_", " ").capitalize(), about(module))
        lines += markdown(("OpKind", "op", "what it computes", "gradient of", "error"))
        lines += [
            row(kind.value, code(op.usage()), formula(op), gradient(op), promise(op))
            for kind, op in rest
            if op.__module__ == module
        ]
    return "\n".join(lines)


def about(module: str) -> str:
    """The first line of a module's documentation."""
    return (sys.modules[module].__doc__ or "").partition("\n")[0]


def promise(op: Any) -> str:
    """Its error bound in float32."""
    if not isinstance(op, Op):
        return "its op's"
    return f"{op.precision.float32:.0e}" if op.precision.float32 else "exact"


def section(title: str, text: str) -> list[str]:
    """A heading and a line under it."""
    return ["", f"## {title}", "", text, ""]


def markdown(heads: Sequence[str]) -> list[str]:
    """The head of a Markdown table."""
    return [row(*heads), row(*["---"] * len(heads))]


def row(*cells: Any) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def code(text: str) -> str:
    """In a monospaced font."""
    return f"`{text}`"
