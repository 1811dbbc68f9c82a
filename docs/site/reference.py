"""The op reference: what registry, kernels and measurements say of each op, as Markdown.

One page for each fused op, one for each family of the others.  Nothing here is written twice: a
page is the op's own documentation, its declared contract, what ``explain`` answers for its own
examples, and the rows of ``docs/performance`` that name it.
"""

import functools
import inspect
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fuel_jax._choose import Choice, describe, server
from fuel_jax._examples import dtypes_of
from fuel_jax._fused import FusedOp
from fuel_jax._op import Op
from fuel_jax._pages import gradient, markdown, precision, row
from fuel_jax.judge import suite
from fuel_jax.registry import builtin

PERFORMANCE = pathlib.Path(__file__).parents[1] / "performance"
PLATFORMS = ("cpu", "cuda", "tpu")
SIZES = (2**16, 2**20)  # elements of the largest operand, at most, beside the examples themselves
SECTIONS = ("Args", "Returns", "Raises", "Source")


def pages() -> dict[str, str]:
    """Markdown by page name: ``flash_attn``, ``elementwise``."""
    ops = sorted(builtin(), key=lambda op: op.name)
    fused = [op for op in ops if isinstance(op, FusedOp)]
    found = {op.name: f"# {op.name}\n\n{about(op, '##')}" for op in fused}
    rest = [op for op in ops if not isinstance(op, FusedOp)]
    for module in sorted({op.__module__ for op in rest}):
        family = [op for op in rest if op.__module__ == module]
        found[module.rpartition(".")[2]] = "\n\n".join(
            [
                f"# {title(module)}",
                prose(inspect.cleandoc(sys.modules[module].__doc__ or "")),
                *(f"## {op.name}\n\n{about(op, '###')}" for op in family),
            ]
        )
    return found


def title(module: str) -> str:
    """``fuel_jax.ops.in_place`` → ``In place``."""
    return module.rpartition(".")[2].replace("_", " ").capitalize()


def place(name: str) -> str:
    """Where an op stands in the reference: ``flash_attn.md``, ``elementwise.md#exp``."""
    (op,) = (op for op in builtin() if op.name == name)
    family = op.__module__.rpartition(".")[2]
    return f"{name}.md" if isinstance(op, FusedOp) else f"{family}.md#{name}"


def about(op: Any, heading: str) -> str:
    """Documentation, contract, who serves, what was measured."""
    parts = [
        f"```{{.python .signature}}\n{op.usage()}\n```",
        documentation(op),
        "\n".join([*markdown(("", "")), *(row(*fact) for fact in facts(op))]),
    ]
    if isinstance(op, Op) and len(op.kernels) > 1:
        parts += [f"{heading} Who serves {{#{op.name}-serves}}", *who_serves(op)]
    if measured := [*on_cpu(op.name), *on_h200(op.name)]:
        parts += [f"{heading} Measured {{#{op.name}-measured}}", *measured]
    return "\n\n".join(parts)


# -- documentation -------------------------------------------------------------------------


def documentation(op: Any) -> str:
    """The docstring: its sections as lists."""
    text = inspect.cleandoc(op.__doc__ or "")
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
    told = [prose(parts[0].strip())]
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        body = inspect.cleandoc(f"\n{body}") if body.startswith("\n") else body.strip()
        if name == "Source":
            told.append(f"*Source:* {prose(body)}")
        elif name == "Returns":
            told.append(f"**Returns** {prose(body)}")
        else:
            told.append(f"**{name}**\n\n{items(body)}")
    return "\n\n".join(told)


def items(body: str) -> str:
    """``name: text`` per argument or error, continued on indented lines, as a list."""
    lines = []
    for entry in re.split(r"\n(?=\S)", body):
        name, colon, text = entry.partition(":")
        lines.append(f"- `{name}`: {prose(flat(text))}" if colon else f"- {prose(flat(entry))}")
    return "\n".join(lines)


def flat(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def prose(text: str) -> str:
    """A docstring's text as Markdown: roles as code, and outside of code nothing is markup."""
    text = re.sub(r":(?:func|class|mod|meth):`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    pieces = text.split("`")
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([*_<])", r"\\\1", pieces[i])
    return "`".join(pieces)


# -- contract ------------------------------------------------------------------------------


def facts(op: Any) -> Iterator[tuple[str, str]]:
    """What is declared, and what follows from it."""
    if op.kind:
        yield "kind", f"`{op.kind.value}`"
    if isinstance(op, FusedOp):
        yield "fused op", f"id {op.id}, family {op.family}" if op.id is not None else "no id"
    if not isinstance(op, Op):
        return
    yield "outputs", ", ".join(f"`{name}`" for name in op.outputs)
    yield "dtypes", dtypes(op)
    yield "gradient", gradient(op)
    if isinstance(op, FusedOp) and op.wrt:
        yield "kept for it", ", ".join(f"`{name}`" for name in kept(op))
    if op.wrt:
        yield "largest error", precision(op).partition(":")[0]
    if isinstance(op.splits, str) and op.splits:
        yield "may be split over devices", f"`{op.splits}`"
    yield "implementations", ", ".join(f"`{kernel.name}`" for kernel in op.kernels)


def kept(op: FusedOp) -> list[str]:
    """Operands and outputs that the backward reads."""
    if not isinstance(op.backward, FusedOp):
        return op.inputs
    return [n for n in op.backward.inputs if n in (*op.inputs, *op.outputs)]


def dtypes(op: Op) -> str:
    """Of each operand, those that agree together."""
    kinds: dict[str, list[str]] = {}
    for name, operand in op.signature.operands.items():
        shared = "one of " if operand.shared else ""
        kinds.setdefault(shared + ", ".join(operand.dtypes), []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())


# -- who serves ----------------------------------------------------------------------------


def grid(op: Op) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The examples, and the first of them grown, in float32 and a half type."""
    first, *others = op.examples()
    sizes = [suite.grown(op, first, most) for most in SIZES]
    distinct = {str(suite.shapes(op, e)): e for e in (first, *sizes)}.values()
    known = dtypes_of(op)
    for example in (*distinct, *others):
        for dtype in [d for d in suite.DTYPES if d in known] or known[:1]:
            yield abstract(op, example, dtype)


def abstract(op: Op, example: dict[str, Any], dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """An example's shapes, its float operands in ``dtype``."""

    def cast(name: str, x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        floats = jax.numpy.issubdtype(x.dtype, np.floating)
        shared = op.signature.operands[name].shared
        return jax.ShapeDtypeStruct(x.shape, dtype if floats and shared else x.dtype)

    held = {
        n: suite.each(functools.partial(cast, n), x) for n, x in example.items() if n in op.inputs
    }
    return suite.arguments(op, example | held)


def who_serves(op: Op) -> Iterator[str]:
    """The implementation on each platform, call by call; then why the others do not serve."""
    calls: dict[str, str] = {}
    reasons: dict[tuple[str, str, str], int] = {}
    for arrays, params in grid(op):
        said = op.explain(*arrays, **params)
        shown = [describe(x) for x in arrays if x is not None]
        given = [(n, v) for n, v in params.items() if v is not None]
        call = ", ".join([*shown, *(f"{n}={v!r}" for n, v in given)])
        ways = {"forward": said.forward, "backward": said.backward}
        told = {way: choices for way, choices in ways.items() if not isinstance(choices, str)}
        served = [", ".join(dict.fromkeys(on(platform, told))) for platform in PLATFORMS]
        calls[call] = row(f"`{call}`", *served)
        for way, choices in told.items():
            for choice in choices:
                if choice.why_not and "comes later" not in choice.why_not:
                    why = (choice.kernel.name, way, choice.why_not)
                    reasons[why] = reasons.get(why, 0) + 1
    if isinstance(getattr(op, "backward", None), FusedOp):
        yield "One name serves both directions; of two the second serves backward."
    yield "\n".join([*markdown(("call", *PLATFORMS)), *calls.values()])
    if reasons:
        heads = ("implementation", "", "does not serve", "calls above")
        rows = [row(f"`{n}`", way, prose(why), k) for (n, way, why), k in reasons.items()]
        yield "\n".join([*markdown(heads), *rows])


def on(platform: str, told: dict[str, list[Choice]]) -> Iterator[str]:
    """Who serves there forward, and backward where the backward is an op."""
    for choices in told.values():
        serving = server(choices, platform)
        yield serving.kernel.name if serving else "–"


# -- measured ------------------------------------------------------------------------------


@functools.cache
def read(name: str) -> list[dict[str, Any]]:
    """Rows of a file of measurements."""
    return [json.loads(line) for line in (PERFORMANCE / name).read_text().splitlines()]


def on_cpu(name: str) -> Iterator[str]:
    """Beside the same maths in plain jax.numpy and PyTorch's; the last time each was measured."""
    last = {
        (r["op"], r["direction"], str(r["arrays"]), str(r["params"])): r
        for r in read("cpu.jsonl")
        if r.get("op") == name and "arrays" in r  # others are of importing and of a call's own cost
    }
    if not last:
        return
    rows = [
        row(
            r["direction"],
            "`" + ", ".join([*r["arrays"], *(f"{n}={v}" for n, v in r["params"].items())]) + "`",
            *map(micro, (r["us"], r["plain_us"], r.get("torch_us"))),
        )
        for r in last.values()
    ]
    heads = ("", "call", "µs", "plain jax.numpy", "PyTorch")
    yield f"On a CPU: {versions([*last.values()], ('cores', 'processor', 'jax', 'torch'))}."
    yield "\n".join([*markdown(heads), *rows])


def on_h200(name: str) -> Iterator[str]:
    """Microseconds of device time beside what others need."""
    last = {r["case"]: r for r in read("nvidia-h200.jsonl") if r["case"].split()[0] == name}
    timed = [r for r in last.values() if r.get("us")]
    if not timed:
        return
    peers = list(dict.fromkeys(peer for r in timed for peer in r.get("peers", {})))
    rows = [
        row(
            f"`{r['case'].removeprefix(name).strip()}`",
            r.get("kernel", ""),
            micro(r["us"]),
            *(micro(r.get("peers", {}).get(peer, {}).get("us")) for peer in peers),
        )
        for r in timed
    ]
    yield f"On an NVIDIA H200: {versions(timed, ('driver', 'jax', 'torch'))}."
    yield "\n".join([*markdown(("case", "implementation", "µs", *peers)), *rows])


def micro(us: float | None) -> str:
    """Three digits."""
    return "" if us is None else f"{us:,.0f}" if us >= 99.5 else f"{us:.3g}"


def versions(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """What it was measured with, and when."""
    told = {n: sorted({str(r[n]) for r in rows if n in r}) for n in (*names, "date")}
    return ", ".join(f"{n} {' and '.join(values)}" for n, values in told.items() if values)
