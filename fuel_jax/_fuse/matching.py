"""Finding an op in a program: guess by structure, then prove by writing it again.

structure   The terms of a spelling and of the program are walked together, from result to operands:
            same operations, same wiring.  Extents, layouts and literals are not looked at; what
            stands where an operand or a parameter should is taken for it.
axes        Which axes were summed together, or stand together in an operand, tells which axis of
            the program is which of the spelling.
proof       The spelling is traced again on just these operands and parameters.  What comes out must
            be the program's own term: the same object, for terms are interned.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .program import flatten
from .reading import COMMUTATIVE
from .rules import Reader
from .spelling import Spelling
from .terms import Part, Term, Terms

UNORDERED = {*COMMUTATIVE, "and"}
EXTENTS = (6, 10, 14, 22, 26, 34, 38, 46, 58, 62)  # of a spelling's axes: even, and all different


class Pattern(NamedTuple):
    """A spelling, traced: its result, and the axes of its result by name."""

    spelling: Spelling
    root: Term
    axes: tuple[str, ...]  # of the root term
    out: tuple[str, ...]  # of the result, in order


@functools.cache
def pattern_of(spelling: Spelling) -> Pattern:
    """The spelling's term, its parameters left open."""
    names = dict.fromkeys(n for axes in spelling.axes.values() for n in without_units(axes))
    whole = [n for n in names if not n.endswith("/2")]
    extent = {"1": 1, **dict(zip(whole, EXTENTS, strict=False))}
    extent |= {n: extent[n[:-2]] // 2 for n in names if n.endswith("/2")}
    avals = {
        n: jax.ShapeDtypeStruct(tuple(extent[a] for a in axes), spelling.dtype(n))
        for n, axes in spelling.axes.items()
    }
    holes = {
        n: jax.ShapeDtypeStruct((), jnp.int32 if kind is int else jnp.float32, weak_type=True)
        for n, kind in spelling.holes.items()
    }

    def write(arrays: dict[str, Any], params: dict[str, Any]) -> Any:
        return spelling.write(**arrays, **params, **spelling.fixed)

    program = flatten(jax.make_jaxpr(write)(avals, holes))
    reader = Reader(Terms())
    given = [*sorted(avals.items()), *((Hole(n), x) for n, x in sorted(holes.items()))]
    (view,) = reader.read(program, [reader.input(n, x.shape, x.dtype) for n, x in given])
    by_extent = {n: name for name, n in extent.items()}
    out = tuple(by_extent[n] for n in view.shape)
    axes = tuple(out[i] for i in view.labels)
    return Pattern(spelling, view.term, axes, out)


class Hole(NamedTuple):
    """Stands for a parameter's value."""

    name: str


Slots = tuple[int, ...]


class State(NamedTuple):
    """What has been found so far, on one way through the alternatives."""

    bound: dict[Term, tuple[Term, Slots, Slots]]  # of the pattern, to the program's
    same: tuple[tuple[Slots, Slots], ...] = ()  # pairs of (pattern's, program's) slots: equal sets
    joined: tuple[tuple[int, int], ...] = ()  # slots that are one axis
    equations: tuple[tuple[float, dict[str, float], float], ...] = ()  # coef · Π hole^power = value
    scales: tuple[tuple[Term, float], ...] = ()  # operands that are a number times what is bound

    def plus(self, **more: Any) -> State:
        """With additions."""
        return self._replace(**{n: getattr(self, n) + v for n, v in more.items()})


class Way(NamedTuple):
    """One way to read a term, with the slots of its axes and the pattern's."""

    state: State
    pattern_slots: Slots
    slots: Slots


class Matcher:
    """Looks for patterns in the terms of one program."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.extent: dict[int, int] = {}
        self.slots = itertools.count()

    def fresh(self, extents: Sequence[int]) -> Slots:
        """New axes."""
        slots = tuple(next(self.slots) for _ in extents)
        self.extent.update(zip(slots, extents, strict=True))
        return slots

    # -- structure -------------------------------------------------------------------------

    def unify(self, p: Term, ps: Slots, n: Term, ns: Slots, state: State) -> Iterator[State]:
        """Ways to read ``n`` as ``p``."""
        if p.op == "input" and n.op == "product" and n.kind == "f" and n.params[0] != 1:
            scale, (n, ns) = self.terms.bare((n, ns))
            state = state.plus(scales=((p, scale),))
        if p in state.bound:
            known, ps_known, ns_known = state.bound[p]
            if known is n:
                yield state.plus(
                    joined=(*zip(ps, ps_known, strict=True), *zip(ns, ns_known, strict=True))
                )
            return
        if p.kind != n.kind:
            return
        if p.op == "input":
            if isinstance(p.params, Hole):
                if n.op == "number":
                    yield state.plus(equations=((1.0, {p.params.name: 1.0}, n.params),))
                return
            if n.op != "number":
                yield self.bind(state, p, ps, n, ns).plus(same=((ps, ns),))
            return
        if p.op == "number":
            if n.op == "number":
                yield state
            return
        if p.op in ("sum", "product"):
            for found, _ in self.several(p, ps, n, ns, state, whole=True):
                yield found
            return
        if p.op != n.op or len(p.args) != len(n.args):
            return
        if p.op == "at" and p.params != n.params:
            return
        state = self.bind(state, p, ps, n, ns)
        orders = itertools.permutations(n.args) if p.op in UNORDERED else [n.args]
        for order in orders:
            yield from self.each(p, ps, p.args, n, ns, order, state)

    def bind(self, state: State, p: Term, ps: Slots, n: Term, ns: Slots) -> State:
        """With ``p`` read as ``n``."""
        return state._replace(bound={**state.bound, p: (n, ps, ns)})

    def each(
        self, p: Term, ps: Slots, pargs: Any, n: Term, ns: Slots, nargs: Any, state: State
    ) -> Iterator[State]:
        """Argument by argument; axes that are only inside, or only outside, correspond."""
        ps_all, p_inner = self.inside(p, ps, pargs)
        ns_all, n_inner = self.inside(n, ns, nargs)
        used = lambda args, slots: {slots[i] for _, at in args for i in at}
        made = (
            tuple(set(ps) - used(pargs, ps_all)),
            tuple(set(ns) - used(nargs, ns_all)),
        )
        state = state.plus(same=((p_inner, n_inner), made))

        def walk(i: int, state: State) -> Iterator[State]:
            if i == len(pargs):
                yield state
                return
            (pt, pat), (nt, nat) = pargs[i], nargs[i]
            to_p = tuple(ps_all[j] for j in pat)
            to_n = tuple(ns_all[j] for j in nat)
            for found in self.unify(pt, to_p, nt, to_n, state):
                yield from walk(i + 1, found)

        yield from walk(0, state)

    def inside(self, term: Term, slots: Slots, args: Any) -> tuple[Slots, Slots]:
        """Slots by the labels of the arguments; those of bound axes are new."""
        extents = {i: e for t, at in args for i, e in zip(at, t.shape, strict=True)}
        inner = sorted(i for i in extents if i >= len(slots))
        new = self.fresh([extents[i] for i in inner])
        return (*slots, *new), new

    def several(
        self, p: Term, ps: Slots, n: Term, ns: Slots, state: State, *, whole: bool
    ) -> Iterator[tuple[State, list[int]]]:
        """Sums and products: each part of the pattern is some part of the program's.

        Also returns which parts of the program's are left over; ``whole`` admits none.
        """
        numbers, const = self.opened(p, p.op)
        n_numbers, n_const = self.opened(n, p.op)
        holes = [(t.params.name, w) for (t, _), w in numbers if isinstance(t.params, Hole)]
        wanted = [(part, w) for part, w in numbers if not isinstance(part[0].params, Hole)]
        wanted.sort(key=lambda x: (x[0][0].op == "input", x[0][0].op == "number"))
        if len(wanted) > len(n_numbers) or (whole and len(wanted) < len(n_numbers)):
            return
        if holes:
            if p.op == "sum":
                if len(holes) > 1:
                    return
                ((name, w),) = holes
                equation = (w, {name: 1.0}, n_const - const)
            else:
                equation = (const, dict(holes), n_const)
            state = state.plus(equations=(equation,))
        if n.op == p.op:
            state = self.bind(state, p, ps, n, ns)
        states = [state]
        if p.op == "product" and whole and not holes and 0 != n_const != const and p.kind == "f":
            factors = [t for (t, _), power in wanted if t.op == "input" and power == 1]
            states += [state.plus(scales=((t, n_const / const),)) for t in factors]

        def walk(i: int, free: list[int], state: State) -> Iterator[tuple[State, list[int]]]:
            if i == len(wanted):
                yield state, free
                return
            (pt, pat), weight = wanted[i]
            to_p = tuple(ps[j] for j in pat)
            for j in free:
                (nt, nat), n_weight = n_numbers[j]
                to_n = tuple(ns[k] for k in nat)
                if p.op == "product":
                    found = self.unify(pt, to_p, nt, to_n, state) if weight == n_weight else ()
                else:
                    found = self.scaled(pt, weight, to_p, nt, n_weight, to_n, state)
                for other in found:
                    yield from walk(i + 1, [k for k in free if k != j], other)

        for state in states:
            yield from walk(0, list(range(len(n_numbers))), state)

    def scaled(
        self, p: Term, weight: Any, ps: Slots, n: Term, n_weight: Any, ns: Slots, state: State
    ) -> Iterator[State]:
        """A weighted part of a sum, as another one: the weight may be a parameter."""
        if p.op == "product":
            yield from self.unify_product(p, weight, ps, n, n_weight, ns, state)
        elif n_weight != weight and (scalable := scaling(p)):
            for operand in scalable:
                more = state.plus(scales=((operand, n_weight / weight),))
                yield from self.unify(p, ps, n, ns, more)
        else:
            yield from self.unify(p, ps, n, ns, state)

    def unify_product(
        self, p: Term, weight: Any, ps: Slots, n: Term, n_weight: Any, ns: Slots, state: State
    ) -> Iterator[State]:
        """A product with a parameter in it, as a weighted part."""
        scaled, labels = self.terms.product([((n, ns), 1)], n_weight / weight, n.kind)
        for found, _ in self.several(p, ps, scaled, tuple(labels), state, whole=True):
            yield found

    @staticmethod
    def opened(term: Term, op: str) -> tuple[list[tuple[Part, Any]], Any]:
        """Parts with their weights or powers, and the constant or coefficient."""
        if term.op != op:
            at = tuple(range(len(term.shape)))
            return [((term, at), 1)], 0 if op == "sum" else 1
        if op == "sum":
            return list(zip(term.args, term.params[0], strict=True)), term.params[1]
        return list(zip(term.args, term.params[1], strict=True)), term.params[0]

    def ways(self, pattern: Pattern, root: Term) -> Iterator[Way]:
        """Ways to read a term, or of a sum or product a part of it, as the pattern."""
        self.extent = {}  # those of the last search are of no use, and copied with every find
        p = pattern.root
        ps, ns = self.fresh(p.shape), self.fresh(root.shape)
        if p.op == "sum" and root.op != "sum":
            return
        if p.op in ("sum", "product"):
            found = (s for s, _ in self.several(p, ps, root, ns, State({}), whole=False))
        else:
            found = self.unify(p, ps, root, ns, State({}))
        for state in found:
            yield Way(self.with_scales(state), ps, ns)

    def with_scales(self, state: State) -> State:
        """With operands that are numbers times a value: sums carry the numbers elsewhere."""
        bound = dict(state.bound)
        for operand, scale in dict(reversed(state.scales)).items():
            n, ps, ns = bound[operand]
            scaled, labels = self.terms.product([((n, ns), 1)], scale, n.kind)
            bound[operand] = scaled, ps, tuple(labels)
        return state._replace(bound=bound)


def scaling(p: Term) -> list[Term]:
    """The operands of which any, a number of times larger, makes a part of a sum so."""
    if p.kind != "f":
        return []
    if p.op == "total" and p.args[0][0].op == "product":
        product = p.args[0][0]
        powers = zip(product.args, product.params[1], strict=True)
        return [t for (t, _), power in powers if t.op == "input" and power == 1]
    return [p] if p.op == "input" else []


def without_units(axes: Sequence[str]) -> list[str]:
    """The axes that a term has."""
    return [a for a in axes if a != "1"]
