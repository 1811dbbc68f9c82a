"""Which spellings are looked for: those the ops declare, and the ops' own bodies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .._fused import FusedOp
from ..errors import ArgumentError
from ..registry import FUSED, OPS
from ..types import x64_enabled
from .spelling import Spelling


def spellings(ops: Sequence[FusedOp] | None) -> tuple[Spelling, ...]:
    """Of these ops, or of all fused ones."""
    if ops is None:
        fused = [op for op in OPS.values() if isinstance(op, FusedOp)]
        ops = list(dict.fromkeys([*FUSED.values(), *fused]))
    for op in ops:
        if not isinstance(op, FusedOp):
            raise ArgumentError(
                f"fuse: 'ops' holds {op!r}; wanted fused ops, as in fuel_jax.FUSED.values()."
            )
    return tuple(s for op in ops for s in of(op))


def of(op: FusedOp) -> list[Spelling]:
    """Those an op declares, and its body."""
    declared = [s for s in op.spellings if isinstance(s, Spelling)]
    if x64_enabled():
        declared += [wide for s in declared if (wide := with_long_integers(s))]
    alike = [f for f in op.spellings if not isinstance(f, Spelling)]
    own = [op.body, *alike] if op.matchable else alike
    last = next((s.last for s in declared if s.last), None)
    return [*declared, *(s for f in own for s in like_the_body(op, f, last))]


@functools.cache
def with_long_integers(spelling: Spelling) -> Spelling | None:
    """The same with I64 for I32, which ``jax.numpy`` casts where it indexes; None without I32."""
    dtypes = {n: jnp.int64 if d is jnp.int32 else d for n, d in spelling.dtypes.items()}
    return None if dtypes == spelling.dtypes else dataclasses.replace(spelling, dtypes=dtypes)


@functools.cache
def like_the_body(op: FusedOp, write: Callable[..., Any], last: str | None) -> tuple[Spelling, ...]:
    """A function with the body's signature, for each set of parameters among the examples.

    Floats are left open; they are found in the program.  The axis that the declared spellings want
    last is the one the body works along.
    """
    found: dict[Any, Spelling] = {}
    for example in op.examples():
        arrays = {n: example[n] for n in op.inputs if example.get(n) is not None}
        if op.signature.variadic or not all(hasattr(x, "shape") for x in arrays.values()):
            continue
        params = {n: v for n, v in example.items() if n not in op.inputs}
        fixed = {n: v for n, v in params.items() if type(v) is not float}
        key = tuple(arrays), repr(fixed)
        if key not in found:
            found[key] = Spelling(
                op.name,
                by_name(op, write),
                {n: axes(op, n, x) for n, x in arrays.items()},
                by_name(op, op),
                holes={n: float for n in params if n not in fixed},
                fixed=fixed,
                dtypes={
                    n: x.dtype
                    for n, x in arrays.items()
                    if not jnp.issubdtype(x.dtype, jnp.floating)
                },
                last=last,
            )
    return tuple(found.values())


def by_name(op: FusedOp, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f``, its operands given by name; None for those that are not."""

    def call(**given: Any) -> Any:
        operands = [given.pop(n, None) for n in op.inputs]
        return f(*operands, **given)

    return call


def axes(op: FusedOp, name: str, x: Any) -> tuple[str, ...]:
    """Names of an operand's axes: as annotated, else its extents in the example.

    Equal extents are one axis then, so examples should differ where axes do.
    """
    forms = op.signature.operands[name].forms
    if not forms:
        return tuple(map(str, x.shape))
    return tuple("*..." if t == "..." else t for t in forms[0].dim_str.split())
