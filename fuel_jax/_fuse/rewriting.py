"""Putting ops where they were found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from .matching import Matcher, pattern_of
from .program import Equation, Number, Program, Var, flatten
from .proving import find
from .rules import Reader
from .sites import Site, assemble, place
from .spelling import Spelling
from .terms import Term, Terms, View

LOOPS = ("scan", "while", "cond", "remat2", "checkpoint")  # whose bodies are searched


@dataclasses.dataclass(frozen=True)
class Miss:
    """Maths that is an op's, where the op does not stand, and why."""

    op: str
    where: str
    reason: str


@dataclasses.dataclass
class Plan:
    """A program and the ops to put into it."""

    program: Program
    views: dict[Var, View]
    sites: dict[Var, Site]
    inner: dict[Equation, dict[tuple[str, int | None], Plan]]
    misses: list[Miss]

    def all_sites(self) -> list[Site]:
        """Those of loop bodies too, in order."""
        found = []
        for eqn in self.program.equations:
            found += [self.sites[v] for v in eqn.outputs if v in self.sites]
            for plan in self.inner.get(eqn, {}).values():
                found += plan.all_sites()
        return found

    def all_misses(self) -> list[Miss]:
        """Those of loop bodies too."""
        inner = [p for plans in self.inner.values() for p in plans.values()]
        return [*self.misses, *(m for p in inner for m in p.all_misses())]


def plan(closed: Any, spellings: Sequence[Spelling]) -> Plan:
    """Where which op can stand in a jaxpr."""
    program = flatten(closed)
    terms = Terms()
    reader = Reader(terms)
    inputs = [reader.input(i, v.shape, v.dtype) for i, v in enumerate(program.inputs)]
    reader.read(program, inputs)
    made = Plan(program, reader.views, {}, {}, [])
    matcher, taken = Matcher(terms), set()
    missed: list[tuple[Miss, Equation]] = []
    tried: dict[Any, str | None] = {}
    for eqn in reversed(program.equations):
        if eqn in taken:
            continue
        site = None
        if not eqn.effects and (len(eqn.outputs) == 1 or eqn.name == "scan"):
            for root in eqn.outputs:
                site, misses = best_site(matcher, root, made, spellings, tried)
                missed += [(m, eqn) for m in misses]
                if site is not None:
                    made.sites[site.root] = site
                    taken |= site.covers
                    break
        if site is None:
            plans = {at: plan(body, spellings) for at, body in inner_bodies(eqn)}
            plans = {at: p for at, p in plans.items() if p.sites or p.inner or p.misses}
            if plans:
                made.inner[eqn] = plans
    first = {(m.op, m.where): m for m, e in missed if e not in taken}
    made.misses = list(first.values())[::-1]
    return made


def inner_bodies(eqn: Equation) -> Iterator[tuple[tuple[str, int | None], Any]]:
    """Jaxprs that are searched by themselves."""
    if eqn.name not in LOOPS:
        return
    for name in ("jaxpr", "body_jaxpr", "cond_jaxpr", "branches"):
        if name in eqn.params:
            value = eqn.params[name]
            many = isinstance(value, tuple)
            for i, body in enumerate(value) if many else [(None, value)]:
                yield (name, i), body


def best_site(
    matcher: Matcher,
    root: Var,
    made: Plan,
    spellings: Sequence[Spelling],
    tried: dict[Any, str | None],
) -> tuple[Site | None, list[Miss]]:
    """The op that replaces most, among those whose result is the variable; and near misses."""
    best: Site | None = None
    where = root.maker.where() if root.maker else "?"
    misses = []
    for spelling in spellings:
        if not spelling.needs <= operations(made.views[root].term, DEPTH):
            continue
        pattern = pattern_of(spelling)
        if not promising(pattern.root, made.views[root].term):
            continue
        if spelling.why_not:
            if any(matcher.ways(pattern, made.views[root].term)):
                misses.append(Miss(spelling.name, where, spelling.why_not))
            continue
        for found in find(matcher, pattern, made.views[root].term):
            found_site = place(found, root, made.views, tried)
            if isinstance(found_site, str):
                misses.append(Miss(spelling.name, where, found_site))
            elif found_site and (best is None or len(found_site.covers) > len(best.covers)):
                best = found_site
            if found_site is not None:  # of the same values in other roles, all may be at hand
                break
    return best, misses


def promising(pattern: Term, term: Term) -> bool:
    """Whether the first level of a term can be that of the pattern."""
    if pattern.op == "product":
        return shape_of(pattern) <= shape_of(term)
    if pattern.op == "sum":
        return term.op == "sum" and shape_of(pattern) <= shape_of(term)
    return pattern.op == term.op


DEPTH = 8  # from the result of attention to what bounds its scores


@functools.lru_cache(4096)
def operations(term: Term, depth: int) -> frozenset[str]:
    """Names of the operations near a result."""
    if not depth:
        return frozenset()
    near = (operations(t, depth - 1) for t, _ in term.args)
    return frozenset({term.op}).union(*near)


@functools.lru_cache(4096)
def shape_of(term: Term) -> frozenset[Any]:
    """What stands in a sum or product: operations, with their powers; operands are left out."""
    if term.op not in ("sum", "product"):
        return frozenset({(term.op, 1)})
    numbers = term.params[0] if term.op == "sum" else term.params[1]
    return frozenset(
        (t.op, w if term.op == "product" else 1)
        for (t, _), w in zip(term.args, numbers, strict=True)
        if t.op not in ("input", "product", "number") or (term.op == "product" and w != 1)
    )


# -- running -------------------------------------------------------------------------------


def execute_plan(made: Plan, closed: Any, values: Sequence[Any]) -> list[Any]:
    """The program with its ops; without any, the jaxpr as it is, equation for equation."""
    return run(made, values) if made.all_sites() else jaxpr_as_fun(closed)(*values)


def run(made: Plan, values: Sequence[Any]) -> list[Any]:
    """The program, with the ops."""
    env: dict[int, Any] = {id(v): x for v, x in zip(made.program.inputs, values, strict=True)}
    env |= {id(v): v.const for v in made.program.consts}
    read = lambda a: a.val if isinstance(a, Number) else env[id(a)]
    for eqn, site in needed(made):
        if site is not None:
            given = [read(site.given(v)) for v in site.operands.values()]
            env[id(site.root)] = assemble(site, made.views, *given)
        else:
            results = execute(eqn, made.inner.get(eqn, {}), [read(a) for a in eqn.inputs])
            env |= {id(v): x for v, x in zip(eqn.outputs, results, strict=True)}
    return [read(a) for a in made.program.outputs]


def needed(made: Plan) -> list[tuple[Equation, Site | None]]:
    """Equations that still run, and the ops in place of others; in order."""
    wanted, kept = {id(v) for v in made.program.outputs}, []
    for eqn in reversed(made.program.equations):
        if not eqn.effects and not any(id(v) in wanted for v in eqn.outputs):
            continue
        site = next((made.sites[v] for v in eqn.outputs if v in made.sites), None)
        inputs = eqn.inputs
        if site is not None:
            inputs = [site.given(v) for v in site.operands.values()]
        wanted |= {id(v) for v in inputs}
        kept.append((eqn, site))
    return kept[::-1]


def execute(
    eqn: Equation, plans: Mapping[tuple[str, int | None], Plan], values: Sequence[Any]
) -> list[Any]:
    """An equation; ops are put into its bodies where there is something to put."""
    plans = {at: p for at, p in plans.items() if p.all_sites()}
    if not plans:
        return eqn.run(values)
    if eqn.name in ("remat2", "checkpoint"):
        (body,) = plans.values()
        again = jax.checkpoint(
            lambda *xs: run(body, xs),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return again(*values)
    params = dict(eqn.params)
    for (name, i), body in plans.items():
        old = params[name] if i is None else params[name][i]
        new = retraced(body, old)
        params[name] = new if i is None else (*params[name][:i], new, *params[name][i + 1 :])
    return dataclasses.replace(eqn, params=params).run(values)


def retraced(made: Plan, old: Any) -> Any:
    """A loop body as a jaxpr again."""
    given = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in made.program.inputs
    ]
    return jax.make_jaxpr(lambda *xs: run(made, xs))(*given)
