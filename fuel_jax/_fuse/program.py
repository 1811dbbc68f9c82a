"""A jaxpr laid flat: nested ``jit`` dissolved, common subexpressions shared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

HERE = os.path.dirname(os.path.dirname(__file__))
JAX = os.path.dirname(jax.__file__)


class Typed:
    """What has a type."""

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.aval.dtype


@dataclasses.dataclass(eq=False)
class Var(Typed):
    """A value: its type, the equation that makes it, who reads it."""

    aval: Any
    maker: Equation | None = None
    const: Any = None  # of a constant
    readers: list[Equation] = dataclasses.field(default_factory=list)
    returned: bool = False


@dataclasses.dataclass(eq=False)
class Number(Typed):
    """A literal."""

    val: Any
    aval: Any


Atom = Var | Number


@dataclasses.dataclass(eq=False)
class Equation:
    """One primitive applied."""

    primitive: Any
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Var]
    effects: Any
    source: Any

    @property
    def name(self) -> str:
        """Of the primitive."""
        return self.primitive.name

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Its results."""
        bound = self.primitive.get_bind_params(self.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        results = self.primitive.bind(*functions, *values, **params)
        return list(results) if self.primitive.multiple_results else [results]

    def where(self) -> str:
        """``file:line`` in the user's code, as far as it is known."""
        traceback = getattr(self.source, "traceback", None)
        frames = [] if traceback is None else list(traceback.frames)
        outside = [f for f in frames if not f.file_name.startswith((JAX, HERE, "<"))]
        users = [f for f in outside if f"{os.sep}site-packages{os.sep}" not in f.file_name]
        for frame in users or outside:
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        return "?"


@dataclasses.dataclass
class Program:
    """Equations in order, from ``inputs`` to ``outputs``."""

    inputs: list[Var]
    consts: list[Var]
    equations: list[Equation]
    outputs: list[Atom]


def dissolves(eqn: Any) -> bool:
    """Whether an equation is a ``jit`` that only groups others."""
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
        return False
    given = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    plain = all(type(s).__name__ == "UnspecifiedValue" for s in given)
    return plain and not any(eqn.params.get("donated_invars", ()))


def flatten(closed: Any) -> Program:
    """The program of a jaxpr."""
    equations: list[Equation] = []
    known: dict[Any, list[Var]] = {}
    consts: list[Var] = []

    def constants(closed: Any) -> tuple[Any, dict[Any, Atom]]:
        jaxpr = getattr(closed, "jaxpr", closed)  # that of checkpoint is not closed
        values = getattr(closed, "consts", ())
        made = [Var(v.aval, const=x) for v, x in zip(jaxpr.constvars, values, strict=True)]
        consts.extend(made)
        return jaxpr, dict(zip(jaxpr.constvars, made, strict=True))

    def walk(jaxpr: Any, env: dict[Any, Atom], caller: Any = None) -> list[Atom]:
        # A nested jit was traced where it was called first, which may have been anywhere.
        read = lambda v: Number(v.val, v.aval) if isinstance(v, Literal) else env[v]
        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            if dissolves(eqn):
                inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                body, scope = constants(inner)
                env_inside = scope | dict(zip(body.invars, inputs, strict=True))
                results = walk(body, env_inside, caller or eqn.source_info)
                env |= zip(eqn.outvars, results, strict=True)
                continue
            key = None if eqn.effects else signature(eqn, inputs)
            outputs = known.get(key) if key is not None else None
            if outputs is None:
                outputs = [Var(v.aval) for v in eqn.outvars]
                source = caller or eqn.source_info
                made = Equation(eqn.primitive, eqn.params, inputs, outputs, eqn.effects, source)
                for v in outputs:
                    v.maker = made
                equations.append(made)
                if key is not None:
                    known[key] = outputs
            env |= zip(eqn.outvars, outputs, strict=True)
        return [read(v) for v in jaxpr.outvars]

    jaxpr, scope = constants(closed)
    inputs = [Var(v.aval) for v in jaxpr.invars]
    outputs = walk(jaxpr, scope | dict(zip(jaxpr.invars, inputs, strict=True)))
    equations = list(live(equations, outputs))
    for eqn in equations:
        for v in eqn.inputs:
            if isinstance(v, Var):
                v.readers.append(eqn)
    for v in outputs:
        if isinstance(v, Var):
            v.returned = True
    return Program(inputs, consts, equations, outputs)


def signature(eqn: Any, inputs: Sequence[Atom]) -> Any:
    """What makes two equations compute the same; None if that cannot be told."""
    atoms = tuple(
        (id(v),) if isinstance(v, Var) else (str(v.aval), np.asarray(v.val).tobytes())
        for v in inputs
    )
    try:
        key = eqn.primitive.name, tuple(sorted(eqn.params.items())), atoms
        hash(key)
    except TypeError:
        return None
    # 1 and 1.0 and True are equal as parameters; what they make has another type.
    return *key, tuple(str(v.aval) for v in eqn.outvars)


def live(equations: Sequence[Equation], outputs: Sequence[Atom]) -> Iterator[Equation]:
    """Those whose results, or effects, somebody wants; in order."""
    wanted, kept = {id(v) for v in outputs}, []
    for eqn in reversed(equations):
        if eqn.effects or any(id(v) in wanted for v in eqn.outputs):
            wanted |= {id(v) for v in eqn.inputs}
            kept.append(eqn)
    return reversed(kept)
