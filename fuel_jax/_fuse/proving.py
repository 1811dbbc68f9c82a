"""Which axis is which, and the proof that what was found is the op."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .matching import Hole, Matcher, Pattern, Slots, State, Way, pattern_of, without_units
from .program import Program, flatten
from .rules import Reader
from .spelling import Spelling
from .terms import Part, Term, Terms, View


class Found(NamedTuple):
    """Operands and parameters of one way to read a term as an op."""

    pattern: Pattern
    operands: dict[str, tuple[Term, tuple[tuple[int, ...], ...], tuple[int, ...]]]
    params: dict[str, float]
    out: tuple[tuple[int, ...], ...]  # for each axis of the result, the program's axes in it
    root_axes: tuple[int, ...]  # the program's axis of each axis of the root term
    extents: dict[int, int]
    rest: tuple[tuple[Part, Any], ...]  # what the op's result is to be multiplied by, or added to
    scale: float
    offset: float


def find(matcher: Matcher, pattern: Pattern, root: Term) -> Iterator[Found]:
    """Proved ways to read a term, or of a sum or product a part of it, as the op."""
    holes = pattern.spelling.holes
    for way in matcher.ways(pattern, root):
        params = solve(way.state.equations, list(holes))
        if params is None or not operands_of(way.state).keys() >= set(pattern.spelling.axes):
            continue
        params = {n: holes[n](x) for n, x in params.items()}
        # In the program a sum or product may be one value, which others read too.
        may_open = any(t.op in ("sum", "product") for t, _, _ in operands_of(way.state).values())
        for axes in assignments(way.state, way.slots):
            tries = (
                prove(matcher, pattern, root, way, params, axes, shut=shut)
                for shut in ((False, True) if may_open else (False,))
            )
            if proved := next(filter(None, tries), None):
                yield proved
                break


def operands_of(state: State) -> dict[str, tuple[Term, Slots, Slots]]:
    """By name."""
    return {
        p.params: found
        for p, found in state.bound.items()
        if p.op == "input" and not isinstance(p.params, Hole)
    }


def assignments(state: State, ns: Slots) -> Iterator[Any]:
    """Ways to say which of the program's axes each axis of the spelling is made of."""
    leader: dict[int, int] = {}

    def lead(x: int) -> int:
        while leader.get(x, x) != x:
            x = leader[x]
        return x

    for a, b in state.joined:
        leader[lead(a)] = lead(b)
    p_axes: dict[int, None] = {}
    n_axes: dict[int, None] = dict.fromkeys(map(lead, ns))
    for found in state.bound.values():
        p_axes |= dict.fromkeys(map(lead, found[1]))
        n_axes |= dict.fromkeys(map(lead, found[2]))
    for a, b in state.same:
        p_axes |= dict.fromkeys(map(lead, a))
        n_axes |= dict.fromkeys(map(lead, b))
    kind: dict[int, tuple[bool, ...]] = {x: () for x in (*p_axes, *n_axes)}
    for a, b in state.same:
        left, right = set(map(lead, a)), set(map(lead, b))
        kind |= {x: (*kind[x], x in left) for x in p_axes}
        kind |= {x: (*kind[x], x in right) for x in n_axes}
    blocks = []
    for which in dict.fromkeys(kind.values()):
        theirs = [x for x in p_axes if kind[x] == which]
        ours = [x for x in n_axes if kind[x] == which]
        if ours and not theirs:
            return
        blocks.append(list(itertools.islice(distributions(theirs, ours), 24)))
    for choice in itertools.islice(itertools.product(*blocks), 48):
        made = {p: tuple(n) for block in choice for p, n in block.items()}
        yield lead, made


# -- proof ---------------------------------------------------------------------------------


def prove(
    matcher: Matcher,
    pattern: Pattern,
    root: Term,
    way: Way,
    params: dict[str, Any],
    axes: Any,
    *,
    shut: bool,
) -> Found | None:
    """What was found, if writing it again gives the program's term."""
    (state, ps, ns), (lead, made) = way, axes
    spelling = pattern.spelling
    consists = lambda names, slots: {
        n: made.get(lead(s), ()) for n, s in zip(names, slots, strict=True)
    }
    operands = {}
    for n, (term, p_slots, n_slots) in operands_of(state).items():
        axes_of = consists(without_units(spelling.axes[n]), p_slots)
        dims = tuple(axes_of.get(a, ()) for a in spelling.axes[n])
        operands[n] = term, dims, tuple(map(lead, n_slots))
        if not set(operands[n][2]) <= {x for d in dims for x in d}:
            return None
    extents = {lead(s): e for s, e in matcher.extent.items()}
    axes_of = consists(pattern.axes, ps)
    out = tuple(axes_of[a] for a in pattern.out)
    again = write(matcher.terms, spelling, operands, params, extents, out, shut=shut)
    if again is None:
        return None
    term, labels = again
    here = tuple(map(lead, ns))
    scale, offset, rest = 1.0, 0.0, ()
    if pattern.root.op in ("sum", "product"):
        op = pattern.root.op
        whole, number = Matcher.opened(root, op)
        part, part_number = Matcher.opened(term, op)
        at = lambda parts, to: [((t, tuple(to[i] for i in a)), w) for (t, a), w in parts]
        whole, part = at(whole, here), at(part, labels)
        rest = tuple(x for x in whole if x not in part)
        if len(rest) + len(part) != len(whole):
            return None
        if op == "product":
            if part_number == 0:
                return None
            scale = number / part_number
        else:
            offset = number - part_number
            offset = 0.0 if abs(offset) <= 1e-6 * abs(number) else offset
    elif term is not root or labels != here:
        return None
    if math.isclose(scale, 1, rel_tol=2e-6):
        scale = 1.0
    return Found(pattern, operands, params, out, here, extents, rest, scale, offset)


def write(
    terms: Terms,
    spelling: Spelling,
    operands: dict[str, Any],
    params: dict[str, float],
    extents: dict[int, int],
    out: tuple[tuple[int, ...], ...],
    *,
    shut: bool,
) -> Part | None:
    """The spelling on these operands, its axes labelled with the program's.

    An axis that is several of the program's is the last of them; ``vmap`` adds the others.
    """
    many = [n for axes in spelling.axes.values() for n in axes if n.startswith("*")]
    extra: dict[int, None] = {}
    layout, views = {}, {}
    for n, (_, dims, _) in operands.items():
        inner: list[int | None] = []
        outer: list[int] = []
        for name, axis in zip(spelling.axes[n], dims, strict=True):
            if name in many:
                inner += axis
            else:
                outer += axis[:-1]
                inner.append(axis[-1] if axis else None)
        extra |= dict.fromkeys(outer)
        layout[n] = outer, inner
    names = sorted(operands)
    for n in names:
        term, _, slots = operands[n]
        outer, inner = layout[n]
        order = [*(x for x in extra if x in outer), *inner]
        shape = tuple(1 if x is None else extents[x] for x in order)
        where = {x: i for i, x in enumerate(slots)}
        views[n] = View(term, tuple(where.get(x) if x is not None else None for x in order), shape)

    program = written(
        spelling,
        tuple(sorted(params.items())),
        tuple(views[n].shape for n in names),
        tuple(tuple(0 if x in layout[n][0] else None for n in names) for x in extra),
    )
    if program is None:
        return None
    (view,) = Reader(terms).read(program, [views[n] for n in names], whole=shut)
    flat: list[int | None] = list(extra)
    for name, axis in zip(pattern_of(spelling).out, out, strict=True):
        flat += axis if name in many else [axis[-1] if axis else None]
    if len(flat) != len(view.shape):
        return None
    labels = tuple(flat[i] for i in view.labels)
    return None if None in labels else (view.term, labels)


@functools.lru_cache(1024)
def written(
    spelling: Spelling,
    params: tuple[tuple[str, float], ...],
    shapes: tuple[tuple[int, ...], ...],
    batched: tuple[tuple[int | None, ...], ...],
) -> Program | None:
    """The program of a spelling on these shapes; None if it was not made for them."""
    names = sorted(spelling.axes)

    def write(*arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return spelling.write(**given, **dict(params), **spelling.fixed)

    for axes in reversed(batched):
        write = jax.vmap(write, axes)
    avals = [
        jax.ShapeDtypeStruct(shape, spelling.dtype(n))
        for n, shape in zip(names, shapes, strict=True)
    ]
    try:
        return flatten(jax.make_jaxpr(write)(*avals))
    except (TypeError, ValueError):  # how jax.numpy refuses shapes
        return None


def distributions(theirs: list[int], ours: list[int]) -> Iterator[dict[int, list[int]]]:
    """Ways to give the axes ``ours`` to ``theirs``: one each from the end, what is left first."""
    if not theirs:
        yield {}
        return
    for order in itertools.permutations(theirs):
        given: dict[int, list[int]] = {p: [] for p in theirs}
        rest = list(ours)
        for p in reversed(order[1:]):
            if rest:
                given[p] = [rest.pop()]
        given[order[0]] = rest
        yield given


def solve(
    equations: Sequence[tuple[float, dict[str, float], float]], names: Sequence[str]
) -> dict[str, float] | None:
    """Values of parameters, one equation with one unknown after the other; None if there are none.

    Whether all equations hold is left to the proof.
    """
    known: dict[str, float] = {}
    for _ in names:
        for coef, powers, value in equations:
            unknown = [n for n in powers if n not in known]
            if len(unknown) != 1 or not coef:
                continue
            (name,) = unknown
            for n, power in powers.items():
                if n in known:
                    coef = coef * known[n] ** power
            ratio = value / coef if coef else math.nan
            if powers[name] != 1 and ratio <= 0:
                return None
            known[name] = float(ratio ** (1 / powers[name]))
    return known if set(names) <= set(known) else None
