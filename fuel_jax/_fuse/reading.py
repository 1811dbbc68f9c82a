"""From equations to terms: what each primitive means, without its layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .program import Atom, Equation, Number, Program, Var
from .terms import Part, Terms, View, parts_of

COMMUTATIVE = {"max", "min", "eq", "ne", "or", "xor"}
FOLDED: dict[str, Callable[..., Any]] = {
    **{"exp": math.exp, "tanh": math.tanh, "abs": abs, "max": max, "min": min},
    "log": lambda x: math.log(x) if x > 0 else math.nan,
    **{"lt": lambda a, b: a < b, "le": lambda a, b: a <= b},
    **{"gt": lambda a, b: a > b, "ge": lambda a, b: a >= b},
    **{"eq": lambda a, b: a == b, "ne": lambda a, b: a != b},
}


def kind_of(dtype: Any) -> str:
    """``f i u b``, or the dtype's name: floats are one kind, whatever their width."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "f"
    if dtype == jnp.bool_:
        return "b"
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return "i"
    return str(dtype)


class Reader:
    """Gives every variable of a program its view."""

    def __init__(self, terms: Terms, depth: int = 0) -> None:
        self.terms, self.depth = terms, depth  # in how many loops
        self.views: dict[Var, View] = {}
        self.whole: set[Var] = set()

    def read(self, program: Program, inputs: Sequence[View], *, whole: bool = False) -> list[View]:
        """The views of the outputs, given those of the inputs; ``whole`` ones are not opened up."""
        self.whole = set(program.inputs) if whole else set()
        for var, view in zip(program.inputs, inputs, strict=True):
            self.views[var] = view
        for var in program.consts:
            self.views[var] = self.constant(var)
        for eqn in program.equations:
            self.equation(eqn)
        return [self.view(v) for v in program.outputs]

    def input(self, name: Any, shape: Sequence[int], dtype: Any) -> View:
        """A value that comes from outside."""
        dims = [(i, n) for i, n in enumerate(shape) if n != 1]
        term, labels = self.terms.intern("input", name, (), kind_of(dtype), new=dims)
        return self.seen((term, labels), shape)

    def constant(self, var: Var) -> View:
        """A closed-over array; a number if it is one."""
        if var.aval.size == 1 and isinstance(var.const, np.ndarray | np.generic):
            return self.number(np.asarray(var.const).reshape(()).item(), var.aval)
        if np.dtype(var.dtype).kind in "bi" and (part := table(self.terms, var.const)):
            return self.seen(part, var.shape)
        return self.input(("const", id(var.const)), var.shape, var.dtype)

    def number(self, value: Any, aval: Any) -> View:
        """A literal."""
        term = self.terms.scalar(value, kind_of(aval.dtype))
        return View(term, (None,) * len(aval.shape), aval.shape)

    def view(self, atom: Atom) -> View:
        """Of a variable or literal."""
        if isinstance(atom, Number):
            value = np.asarray(atom.val)
            if value.dtype.kind not in "fiubV":
                return self.input(("literal", repr(atom.val)), atom.shape, atom.dtype)
            return self.number(
                value.astype(np.float64).item() if value.dtype.kind == "V" else value.item(),
                atom.aval,
            )
        view = self.views[atom]
        shared = len(atom.readers) + atom.returned > 1 or atom in self.whole
        return view._replace(shared=shared)

    def seen(self, part: Part, shape: Sequence[int]) -> View:
        """An array whose axes the labels of the part count."""
        term, labels = part
        axes: list[int | None] = [None] * len(shape)
        for i, label in enumerate(labels):
            axes[label] = i
        return View(term, tuple(axes), tuple(shape))

    # -- one equation ----------------------------------------------------------------------

    def equation(self, eqn: Equation) -> None:
        """Give its outputs views."""
        given = [self.view(v) for v in eqn.inputs]
        rule = RULES.get(eqn.name)
        views = rule(self, eqn, given) if rule else None
        if views is None:
            views = self.opaque(eqn, given)
        elif isinstance(views, View):
            views = [views]
        for var, view in zip(eqn.outputs, views, strict=True):
            assert view.shape == var.shape, (eqn.name, view.shape, var.shape)
            self.views[var] = view

    def opaque(self, eqn: Equation, given: Sequence[View]) -> list[View]:
        """An operation on whole arrays, about which nothing is known but that it is a function."""
        dtypes = [str(a.dtype) for a in eqn.inputs]
        layout = tuple((v.axes, v.shape, d) for v, d in zip(given, dtypes, strict=True))
        try:
            params: Any = tuple(sorted(eqn.params.items()))
            hash(params)
        except TypeError:
            params = id(eqn)
        if eqn.effects:
            params = id(eqn)
        axes = lambda i, term: tuple((i, j) for j in range(len(term.shape)))
        args = [(v.term, axes(i, v.term)) for i, v in enumerate(given)]
        bound = [x for _, labels in args for x in labels]
        views = []
        for i, out in enumerate(eqn.outputs):
            new = [(d, n) for d, n in enumerate(out.shape) if n != 1]
            part = self.terms.intern(
                eqn.name,
                {**eqn.params},
                args,
                kind_of(out.dtype),
                bound=bound,
                new=new,
                key=(params, layout, i),
            )
            views.append(self.seen(part, out.shape))
        return views

    def elementwise(
        self, name: str, given: Sequence[View], shape: Sequence[int], kind: str
    ) -> View:
        """The same operation on every element."""
        parts = [v.at(range(len(shape))) for v in given]
        if name in FOLDED and all(t.op == "number" for t, _ in parts):
            value = FOLDED[name](*(t.params for t, _ in parts))
            return self.seen((self.terms.scalar(value, kind), ()), shape)
        if name in COMMUTATIVE:
            parts = sorted(parts, key=lambda p: p[0].number)
        return self.seen(self.terms.intern(name, (), parts, kind), shape)

    # -- sums and products -----------------------------------------------------------------

    def addends(self, view: View, weight: Any, rank: int) -> tuple[list[tuple[Part, Any]], Any]:
        """A value as weighted parts and a constant; a shared one is a part by itself."""
        term, labels = view.at(range(rank))
        if term.op != "sum" or (view.shared and term.kind == "f"):
            return [((term, labels), weight)], 0
        weights, const = term.params
        parts = parts_of(term, labels)
        return [(p, w * weight) for p, w in zip(parts, weights, strict=True)], const * weight

    def add(self, a: View, b: View, sign: int, shape: Sequence[int], kind: str) -> View:
        """``a + sign · b``."""
        (left, c), (right, d) = self.addends(a, 1, len(shape)), self.addends(b, sign, len(shape))
        return self.seen(self.terms.sum([*left, *right], c + d, kind), shape)

    def factors(self, view: View, power: Any, rank: int) -> tuple[list[tuple[Part, Any]], Any]:
        """A value to a power, as parts to powers and a coefficient."""
        term, labels = view.at(range(rank))
        if term.op != "product" or view.shared or power != int(power):
            return [((term, labels), power)], 1
        coef, powers = term.params
        if power < 0 and coef == 0:
            return [((term, labels), power)], 1
        parts = parts_of(term, labels)
        return [(p, w * power) for p, w in zip(parts, powers, strict=True)], coef**power

    def multiply(self, given: Sequence[tuple[View, Any]], shape: Sequence[int], kind: str) -> View:
        """``Π view ^ power``."""
        parts: list[tuple[Part, Any]] = []
        coef: Any = 1
        for view, power in given:
            found, c = self.factors(view, power, len(shape))
            parts += found
            coef = coef * c
        return self.seen(self.terms.product(parts, coef, kind), shape)


def table(terms: Terms, const: Any) -> Part | None:
    """A closed-over table of positions, or of which come first: ``arange``, ``tri`` …"""
    if isinstance(const, jax.Array) and not const.is_fully_addressable:
        return None
    x = np.asarray(const)
    dims = [d for d, n in enumerate(x.shape) if n != 1]
    place = lambda d: (terms.intern("iota", x.shape[d], (), "i", new=[(d, x.shape[d])])[0], (d,))
    if x.dtype != bool and len(dims) == 1:
        first, step = int(x.flat[0]), int(x.flat[1]) - int(x.flat[0])
        if step and np.array_equal(x.ravel(), first + step * np.arange(x.size)):
            return terms.sum([(place(dims[0]), step)], first, "i")
    if x.dtype == bool and len(dims) == 2:
        rows, columns = (x.shape[d] for d in dims)
        for lower in (True, False):  # column − row is at most, or at least, an offset
            flat = x.reshape(rows, columns) == lower
            offset = int(flat[0].sum()) - 1
            if 0 <= offset < columns - 1 and np.array_equal(flat, np.tri(rows, columns, offset)):
                difference = [(place(dims[0]), 1), (place(dims[1]), -1)]
                mask = terms.at_least_0(terms.sum(difference, offset, "i"))
                return mask if lower else terms.negate(mask)
    return None


Rule = Callable[[Reader, Equation, list[View]], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: what these primitives mean.  None for what the rule does not cover."""

    def enter(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return enter


def of(eqn: Equation) -> tuple[tuple[int, ...], str]:
    """Shape and kind of the result."""
    return eqn.outputs[0].shape, kind_of(eqn.outputs[0].dtype)
