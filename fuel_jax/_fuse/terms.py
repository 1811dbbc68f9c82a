"""Programs as terms: one term for every way to write the same maths.

A *term* is a value without its layout: an operation on terms, each unit axis dropped, no order
among the rest.  An array is a term seen through a *view*, which says where each of its axes stands.
So transposes, ``keepdims``, broadcasts, float casts and ``vmap`` leave no trace in a term.

Terms are interned.  Two programs that are equal by the rules below have the same term object, which
makes proving a match one comparison.

Linear combinations and products are n-ary, sorted, and carry numbers:

    sum       const + Σ weightᵢ · argᵢ        a − b, x + eps, mean(x) = 1/n · Σ x
    product   coef · Π argᵢ ^ powerᵢ          x/√v, x·rsqrt(v); x², x·x; q·k/√d
    total     Σ over axes of one argument     reduce_sum; dot_general is the total of a product
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Label = Any  # hashable


class Term:
    """An interned value; two are equal only if they are the same object."""

    __slots__ = ("args", "constant", "kind", "number", "op", "params", "shape")

    def __init__(
        self,
        number: int,
        op: str,
        params: Any,
        args: tuple[tuple[Term, tuple[int, ...]], ...],
        shape: tuple[int, ...],
        kind: str,
    ) -> None:
        self.number, self.op, self.params, self.args = number, op, params, args
        self.shape, self.kind = shape, kind
        self.constant = op in CONSTANTS or (bool(args) and all(t.constant for t, _ in args))

    def __repr__(self) -> str:
        if self.op == "input":
            return f"{self.params}"
        if self.op == "number":
            return f"{self.params:g}" if self.kind == "f" else f"{self.params}"
        inner = ", ".join(f"{t!r}{list(at)}" for t, at in self.args)
        return f"{self.op}{'' if self.params in ((), None) else self.params}({inner})"


CONSTANTS = {"number", "iota"}


class View(NamedTuple):
    """An array: a term, and for each axis of the array that of the term, or None.

    ``shared`` marks what several equations read.  It is one value then, and not opened up when it
    stands in a sum or a product.
    """

    term: Term
    axes: tuple[int | None, ...]
    shape: tuple[int, ...]
    shared: bool = False

    @property
    def labels(self) -> tuple[int, ...]:
        """For each axis of the term, where it stands in the array."""
        return tuple(self.axes.index(i) for i in range(len(self.term.shape)))

    def at(self, labels: Sequence[Label]) -> tuple[Term, tuple[Label, ...]]:
        """The term, its axes labelled as those of the array are."""
        return self.term, tuple(labels[i] for i in self.labels)


Part = tuple[Term, tuple[Label, ...]]


def digits(x: Any) -> Any:
    """A number as keys hold it: float32 and float64 spellings of one constant agree."""
    if isinstance(x, float) and math.isfinite(x):
        return float(f"{x:.6g}")
    return repr(x) if isinstance(x, float) else x


class Terms:
    """The table of terms."""

    def __init__(self) -> None:
        self._known: dict[Any, Term] = {}
        self.extents: dict[Label, int] = {}

    def intern(
        self,
        op: str,
        params: Any,
        args: Sequence[Part],
        kind: str,
        *,
        bound: Iterable[Label] = (),
        new: Sequence[tuple[Label, int]] = (),
        key: Any = None,
    ) -> tuple[Term, tuple[Label, ...]]:
        """The term, and the labels of its axes: first those of the arguments, then ``new`` ones.

        ``bound`` labels belong to the arguments only.  ``key`` stands for ``params`` in comparing.
        """
        bound = set(bound)
        free: dict[Label, int] = {}
        inner: dict[Label, int] = {}
        extent: dict[Label, int] = {}
        for term, labels in args:
            for label, n in zip(labels, term.shape, strict=True):
                place = inner if label in bound else free
                place.setdefault(label, len(place))
                extent[label] = n
        for label, n in new:
            free[label], extent[label] = len(free), n
        number = {**free, **{label: len(free) + i for label, i in inner.items()}}
        placed = tuple((t, tuple(number[x] for x in labels)) for t, labels in args)
        shape = tuple(extent[x] for x in free)
        params_key = params if key is None else key
        identity = (op, params_key, kind, shape, tuple((t.number, at) for t, at in placed))
        term = self._known.get(identity)
        if term is None:
            term = Term(len(self._known), op, params, placed, shape, kind)
            self._known[identity] = term
        return term, tuple(free)

    # -- numbers ---------------------------------------------------------------------------

    def scalar(self, value: Any, kind: str) -> Term:
        """A number; bools, ints and floats stay apart."""
        value = {"f": float, "b": bool}.get(kind, lambda x: x)(value)
        return self.intern("number", value, (), kind, key=(kind, digits(value)))[0]

    # -- sums ------------------------------------------------------------------------------

    def sum(self, parts: Sequence[tuple[Part, Any]], const: Any, kind: str) -> Part:
        """``const + Σ weight · part``, equal parts collected."""
        weights: dict[Part, Any] = {}
        for part, weight in parts:
            if part[0].op == "number":
                const += weight * part[0].params
            elif part[0].op == "sum" and kind == "i":  # exact in any order
                more, constant = part[0].params
                const += weight * constant
                for p, w in zip(parts_of(*part), more, strict=True):
                    weights[p] = weights.get(p, 0) + weight * w
            elif part[0].op == "product" and part[0].params[0] != 1:
                coef, bare = self.bare(part)
                weights[bare] = weights.get(bare, 0) + weight * coef
            else:
                weights[part] = weights.get(part, 0) + weight
        if kind != "f":  # of floats, x less its own rounding is not nothing
            weights = {part: w for part, w in weights.items() if w != 0}
        if not weights:
            return self.scalar(const, kind), ()
        if chosen := self._chosen(weights, const, kind):
            return chosen
        if const == 0 and len(weights) == 1:
            ((part, weight),) = weights.items()
            return self.product([(part, 1)], weight, kind)
        ordered = sorted(weights, key=order)
        params = (tuple(weights[p] for p in ordered), const)
        key = (tuple(digits(w) for w in params[0]), digits(const))
        return self.intern("sum", params, ordered, kind, key=key)

    def bare(self, part: Part) -> tuple[Any, Part]:
        """The coefficient of a product, and the product without it."""
        term, labels = part
        powers, factors = term.params[1], parts_of(term, labels)
        return term.params[0], self.product(list(zip(factors, powers, strict=True)), 1, term.kind)

    def _chosen(self, weights: dict[Part, Any], const: Any, kind: str) -> Part | None:
        """A sum with a select between numbers in it, as that select."""
        if kind != "f":
            return None
        for part, weight in weights.items():
            term, labels = part
            if term.op != "select" or len(term.args) != 3:
                continue
            mask, (no, _), (yes, _) = parts_of(term, labels)
            if no.op != "number" or yes.op != "number":
                continue
            rest = [(p, w) for p, w in weights.items() if p != part]
            if rest and not (hidden(weight * no.params) and yes.params == 0):
                continue
            rest = [(self._where(p, mask), w) for p, w in rest]
            on_true = self.sum([*rest, ((yes, ()), weight)], const, kind)
            if rest:
                return self.select(mask, (self.scalar(-math.inf, kind), ()), on_true)
            return self.select(mask, self.sum([((no, ()), weight)], const, kind), on_true)
        return None

    def _where(self, part: Part, mask: Part) -> Part:
        """A product where a mask holds: of factors that choose by it, what they choose."""
        term, labels = part
        if term.op != "product":
            return part
        coef, powers = term.params
        chosen = [
            parts_of(*factor)[2]
            if factor[0].op == "select" and parts_of(*factor)[0] == mask
            else factor
            for factor in parts_of(term, labels)
        ]
        return self.product(list(zip(chosen, powers, strict=True)), coef, term.kind)

    # -- products --------------------------------------------------------------------------

    def product(self, parts: Sequence[tuple[Part, Any]], coef: Any, kind: str) -> Part:
        """``coef · Π part ^ power``, powers of equal parts added up."""
        powers: dict[Part, Any] = {}
        for part, power in parts:
            if part[0].op == "number" and (power >= 0 or part[0].params != 0):
                coef = coef * part[0].params ** power
            elif powers.get(part, 0) * power < 0:  # x/x is 1 but at 0: not ours to decide
                inverse = self.intern("reciprocal", (), [part], kind)
                powers[inverse] = powers.get(inverse, 0) - power
            else:
                powers[part] = powers.get(part, 0) + power
        if not powers:
            return self.scalar(coef, kind), ()
        if len(powers) == 1:
            ((part, power),) = powers.items()
            if power == 1 and coef == 1:
                return part
            term, labels = part
            if power == 1 and term.op == "sum" and coef != 0:
                opened = zip(parts_of(term, labels), term.params[0], strict=True)
                scaled = [(p, w * coef) for p, w in opened]
                return self.sum(scaled, term.params[1] * coef, kind)
            if power == 1 and term.op == "select" and kind == "f" and len(term.args) == 3:
                mask, (no, _), (yes, _) = parts_of(term, labels)
                if no.op == yes.op == "number":
                    scaled = [(self.scalar(coef * x.params, kind), ()) for x in (no, yes)]
                    return self.select(mask, *scaled)
        ordered = sorted(powers, key=order)
        params = (coef, tuple(powers[p] for p in ordered))
        key = (digits(coef), tuple(digits(p) for p in params[1]))
        return self.intern("product", params, ordered, kind, key=key)

    def total(self, part: Part, over: Sequence[Label], extents: Sequence[int]) -> Part:
        """Σ over the labels; what does not depend on them stands outside."""
        term, labels = part
        present = [x for x in over if x in labels]
        absent = math.prod(n for x, n in zip(over, extents, strict=True) if x not in labels)
        if absent != 1:
            part = self.product([(part, 1)], absent, term.kind)
            term, labels = part
        if not present:
            return part
        coef, outside = 1, []
        if term.op == "product":
            coef, powers = term.params
            parts = parts_of(term, labels)
            factors = list(zip(parts, powers, strict=True))
            outside = [(p, w) for p, w in factors if not set(present) & set(p[1])]
            inside = [(p, w) for p, w in factors if set(present) & set(p[1])]
            part = self.product(inside, 1, term.kind)
        summed = self.intern("total", (), [part], term.kind, bound=present)
        return self.product([*outside, (summed, 1)], coef, term.kind)

    # -- choices ---------------------------------------------------------------------------

    def select(self, mask: Part, on_false: Part, on_true: Part) -> Part:
        """``where(mask, on_true, on_false)``; what hides, on the side of false."""
        m, kind = mask[0], on_true[0].kind
        if m.op == "number":
            return on_true if m.params else on_false
        if on_true == on_false:
            return on_true
        if kind == "b" and on_true[0].op == on_false[0].op == "number":
            return mask if on_true[0].params else self.negate(mask)
        swapped = is_hidden(on_true) or m.op == "not"
        if swapped and not is_hidden(on_false):
            mask, on_false, on_true = self.negate(mask), on_true, on_false
        if is_hidden(on_false):
            on_false = self.scalar(-math.inf, "f"), ()
        return self.intern("select", (), [mask, on_false, on_true], kind)

    def negate(self, mask: Part) -> Part:
        """``~mask``; of a comparison of integers, the opposite one."""
        term, labels = mask
        if term.op == "number":
            return self.scalar(not term.params, "b"), ()
        inner = parts_of(term, labels)
        if term.op == "not":
            return inner[0]
        if term.op == "at least 0":
            return self.at_least_0(self.sum([(inner[0], -1)], -1, "i"))
        return self.intern("not", (), [mask], "b")

    def both(self, masks: Sequence[Part]) -> Part:
        """``&``, flattened."""
        found: dict[Part, None] = {}
        for term, labels in masks:
            if term.op == "number" and term.kind == "b":
                if not term.params:
                    return self.scalar(False, "b"), ()
            elif term.op == "and":
                found |= dict.fromkeys((t, tuple(labels[i] for i in at)) for t, at in term.args)
            else:
                found[term, labels] = None
        if not found:
            return self.scalar(True, "b"), ()
        if len(found) == 1:
            return next(iter(found))
        return self.intern("and", (), sorted(found, key=order), "b")

    def at_least_0(self, part: Part) -> Part:
        """``part >= 0`` of integers; always true or false where a table of positions says so."""
        term, _ = part
        if term.op == "number":
            return self.scalar(term.params >= 0, "b"), ()
        bounds = extremes(term)
        if bounds is not None and bounds[0] >= 0:
            return self.scalar(True, "b"), ()
        if bounds is not None and bounds[1] < 0:
            return self.scalar(False, "b"), ()
        return self.intern("at least 0", (), [part], "b")


def parts_of(term: Term, labels: Sequence[Label]) -> list[Part]:
    """The arguments of a term whose axes have these labels; those of bound axes are made up."""
    names = [*labels, *((term, i) for i in range(len(labels), 64))]
    return [(t, tuple(names[i] for i in at)) for t, at in term.args]


def order(part: Part) -> Any:
    """Parts of a commutative operation are sorted by term: the layout plays no role."""
    return part[0].number, tuple(map(str, part[1]))


def hidden(value: float) -> bool:
    """Whether a score of this value has no weight in a softmax.

    Programs write −inf, the least float, −1e9, −1e10 …  Not −1e4, which a large score can reach.
    """
    return value <= -1e9


def is_hidden(part: Part) -> bool:
    term, _ = part
    return term.op == "number" and term.kind == "f" and hidden(term.params)


def extremes(term: Term) -> tuple[int, int] | None:
    """Least and greatest value of an integer term made of positions; None if it is not."""
    if term.op == "number":
        return term.params, term.params
    if term.op == "iota":
        return 0, term.params - 1
    if term.op not in ("sum", "product"):
        return None
    if term.op == "product":
        coef, powers = term.params
        weights, const = (coef,), 0
        if powers != (1,):
            return None
    else:
        weights, const = term.params
    low = high = const
    for (t, _), w in zip(term.args, weights, strict=True):
        bounds = extremes(t)
        if bounds is None:
            return None
        ends = [w * bounds[0], w * bounds[1]]
        low, high = low + min(ends), high + max(ends)
    return low, high
