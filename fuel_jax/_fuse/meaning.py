"""What primitives mean: arithmetic, comparisons, choices, casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .program import Atom, Equation, flatten
from .reading import Reader, kind_of, of, rule
from .terms import Term, View, extremes, parts_of

ELEMENTWISE = {
    *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "sin", "cos"),
    *("is_finite", "sign", "floor", "ceil", "round", "cbrt", "atan2", "rem", "nextafter", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf_inv", "lgamma"),
}


@rule(*ELEMENTWISE)
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    if eqn.params.keys() - {"accuracy", "rounding_method"}:
        return None
    shape, kind = of(eqn)
    if eqn.name == "is_finite" and is_maximum(given[0].term):
        return reader.seen((reader.terms.scalar(True, "b"), ()), shape)
    return reader.elementwise(eqn.name, given, shape, kind)


def is_maximum(term: Term) -> bool:
    """A row's maximum, as softmax and logsumexp subtract it.

    They guard it against rows of −inf only, and stop its gradient: its gradient cancels, and the
    fused ops have their own rule for such rows.
    """
    return term.op == "maximum"


@rule("add", "sub", "add_any")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    if kind not in "fi":
        return None
    a, b = given
    return reader.add(a, b, -1 if eqn.name == "sub" else 1, shape, kind)


@rule("mul")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    return reader.multiply([(v, 1) for v in given], shape, kind) if kind in "fi" else None


@rule("neg")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    if kind not in "fi":
        return None
    parts, coef = reader.factors(given[0], 1, len(shape))
    return reader.seen(reader.terms.product(parts, -coef, kind), shape)


@rule("div")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    return reader.multiply([(given[0], 1), (given[1], -1)], shape, kind) if kind == "f" else None


@rule("square", "integer_pow", "sqrt", "rsqrt")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    power = {"square": 2, "sqrt": 0.5, "rsqrt": -0.5}.get(eqn.name) or eqn.params["y"]
    if kind != "f" and not (kind == "i" and power > 0):
        return None
    if given[0].term.op == "number" and given[0].term.params < 0 and power != int(power):
        return None
    return reader.multiply([(given[0], power)], shape, kind)


@rule("pow")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    power = given[1].term
    if kind != "f" or power.op != "number" or power.params not in (2, 0.5, -0.5, -1, 3):
        return None
    exact = int(power.params) if power.params == int(power.params) else power.params
    return reader.multiply([(given[0], exact)], shape, kind)


@rule("abs")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    term = given[0].term
    if term.op == "total" and term.args[0][0].op == "exp":  # logsumexp: the sum is not negative
        return given[0]
    return reader.elementwise("abs", given, *of(eqn))


@rule("max", "min")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """What changes no number is left out: max(x, −inf), min(x, the largest float), max(x², 0)."""
    shape, kind = of(eqn)
    neutral = (lambda x: x == -math.inf) if eqn.name == "max" else (lambda x: x >= 3e38)
    for i in (0, 1):
        term, other = given[i].term, given[1 - i]
        if kind != "f" or term.op != "number":
            continue
        least = eqn.name == "max" and term.params <= 0 and never_negative(other.term)
        if least or neutral(term.params):
            return expanded(other, shape)
    return reader.elementwise(eqn.name, given, shape, kind)


def never_negative(term: Term) -> bool:
    """Sums of squares and exponentials, as far as that is plain."""
    if term.op == "number":
        return term.params >= 0
    if term.op == "total":
        return never_negative(term.args[0][0])
    if term.op == "product":
        coef, powers = term.params
        factors = zip(term.args, powers, strict=True)
        return coef >= 0 and all(w % 2 == 0 or never_negative(t) for (t, _), w in factors)
    return term.op in ("exp", "abs")


def expanded(view: View, shape: Sequence[int]) -> View:
    """A scalar operand of a ranked operation, with the rank."""
    missing = len(shape) - len(view.shape)
    return View(view.term, (None,) * missing + view.axes, tuple(shape))


# -- comparisons and choices ---------------------------------------------------------------


@rule("ge", "gt", "le", "lt")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, _ = of(eqn)
    a, b = given if eqn.name in ("ge", "gt") else given[::-1]
    strict = eqn.name in ("gt", "lt")
    if a.term.kind == b.term.kind == "i":
        (left, c), (right, d) = (
            reader.addends(a, 1, len(shape)),
            reader.addends(b, -1, len(shape)),
        )
        difference = reader.terms.sum([*left, *right], c + d - strict, "i")
        return reader.seen(reader.terms.at_least_0(difference), shape)
    return reader.elementwise("gt" if strict else "ge", [a, b], shape, "b")


@rule("eq", "ne")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    return compared(reader, eqn.name, given, eqn.outputs[0].shape)


def compared(reader: Reader, name: str, given: Sequence[View], shape: Sequence[int]) -> View:
    """Of a choice between two numbers and a number: the mask of the choice."""
    for i in (0, 1):
        (term, labels), other = given[i].at(range(len(shape))), given[1 - i].term
        if term.op == "select" and other.op == "number":
            mask, (no, _), (yes, _) = parts_of(term, labels)
            if no.op == yes.op == "number":
                answers = [(x.params == other.params) == (name == "eq") for x in (no, yes)]
                found = [(reader.terms.scalar(x, "b"), ()) for x in answers]
                return reader.seen(reader.terms.select(mask, *found), shape)
    return reader.elementwise(name, given, shape, "b")


@rule("not")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    if kind != "b":
        return None
    return reader.seen(reader.terms.negate(given[0].at(range(len(shape)))), shape)


@rule("and")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    if kind != "b":
        return None
    return reader.seen(reader.terms.both([v.at(range(len(shape))) for v in given]), shape)


@rule("select_n")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, _ = of(eqn)
    if len(given) != 3 or given[0].term.kind != "b":
        return None
    return reader.seen(reader.terms.select(*(v.at(range(len(shape))) for v in given)), shape)


@rule("convert_element_type")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """Between floats, and from small integers to large: the same value."""
    (view,), kind = given, kind_of(eqn.outputs[0].dtype)
    was, shape = view.term.kind, eqn.outputs[0].shape
    if was == kind and (kind in "fb" or holds(view.term, *eqn.inputs, *eqn.outputs)):
        return view
    if view.term.op == "number" and kind in "fib" and math.isfinite(view.term.params):
        value = int(view.term.params) if kind == "i" else view.term.params
        return reader.seen((reader.terms.scalar(value, kind), ()), shape)
    if was == "b" and kind in "fi":
        one, zero = ((reader.terms.scalar(x, kind), ()) for x in (1, 0))
        return reader.seen(reader.terms.select(view.at(range(len(shape))), zero, one), shape)
    part = view.at(range(len(shape)))
    if kind == "b" and was in "fi":
        zero = View(reader.terms.scalar(0, was), (None,) * len(shape), shape)
        return compared(reader, "ne", [view, zero], shape)
    name = "cast" if kind == "f" else f"cast to {eqn.outputs[0].dtype}"
    return reader.seen(reader.terms.intern(name, (), [part], kind), shape)


def holds(term: Term, old: Atom, new: Atom) -> bool:
    """Whether the new dtype has all integers of the old one, or all that the term can be."""
    a, b, bounds = jnp.iinfo(old.dtype), jnp.iinfo(new.dtype), extremes(term)
    low, high = (a.min, a.max) if bounds is None else bounds
    return b.min <= low and high <= b.max


@rule("stop_gradient")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    return given[0] if is_maximum(given[0].term) or given[0].term.constant else None


@rule("copy", "copy_p")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    return given[0]


@rule("custom_jvp_call", "custom_jvp_call_jaxpr")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """Its value is its body's; relu, silu and softmax come this way."""
    inner = eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
    program = flatten(inner)
    if any(e.effects for e in program.equations):
        return None
    return Reader(reader.terms, reader.depth).read(program, given)
