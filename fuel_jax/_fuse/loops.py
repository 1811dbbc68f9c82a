"""What a ``scan`` means: the term of its body, in whatever layout it carries its state.

step    a value at one step: its axis of time is inside
carry   what the loop carries, as a variable of its body
scan    what is made at every step, along a new axis; it holds what is made, how the carried
        values go on, and how they start
"""

from __future__ import annotations

from typing import Any

from .program import Equation, flatten
from .reading import Reader, kind_of, rule
from .terms import Part, View

EQUATIONS = 40  # of a body that is read: more are a layer, which is searched by itself


@rule("scan")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    params, closed = eqn.params, eqn.params["jaxpr"]
    if len(closed.jaxpr.eqns) > EQUATIONS or params["length"] < 2:
        return None
    body = flatten(closed)
    if eqn.effects or len(body.equations) > EQUATIONS or len(body.outputs) != len(eqn.outputs):
        return None
    # JAX before 0.12 says how many there are of what; ranks say it too.
    stacked = [len(a.shape) > len(b.shape) for a, b in zip(given, body.inputs, strict=True)]
    pairs = zip(eqn.outputs, body.outputs, strict=True)
    count = sum(len(a.shape) == len(b.shape) for a, b in pairs)  # of carried values
    last = stacked.index(True) if True in stacked else len(stacked)
    first = last - count
    consts, starts = given[:first], given[first:last]
    steps = [at_one_step(reader, v) for v in given[last:]]

    def read(carries: list[View]) -> list[View]:
        return Reader(reader.terms, reader.depth + 1).read(body, [*consts, *carries, *steps])

    carries = [
        variable(reader, i, view, kind_of(var.dtype))
        for i, (view, var) in enumerate(zip(read(starts), body.inputs[first:last], strict=False))
    ]
    results = read(carries)
    loop: list[Part] = []
    for i in range(count):  # an axis of a carried value is one axis of all its steps
        names = [(i, d) for d in range(len(starts[i].shape))]
        loop += [results[i].at(names), starts[i].at(names)]
    bound = {x for _, labels in loop for x in labels}
    key = params["reverse"], params["length"], count
    views = []
    for i, out in enumerate(eqn.outputs):
        made = carries[i] if i < count else results[i]
        rank = len(made.shape)
        part = made.at(range(1, rank + 1) if i >= count else range(rank))
        name, new = ("scan", [(0, out.shape[0])]) if i >= count else ("last", [])
        part = reader.terms.intern(
            name, key, [part, *loop], kind_of(out.dtype), bound=bound, new=new
        )
        views.append(reader.seen(part, out.shape))
    return views


def at_one_step(reader: Reader, view: View) -> View:
    """Without the axis of time."""
    part = view.at(["time", *range(len(view.shape) - 1)])
    if "time" in part[1]:
        part = reader.terms.intern("step", (), [part], part[0].kind, bound=["time"])
    return reader.seen(part, view.shape[1:])


def variable(reader: Reader, i: int, after: View, kind: str) -> View:
    """A carried value; its axes in the order in which the first step makes them."""
    axes = [*after.labels]
    axes += [d for d, n in enumerate(after.shape) if d not in axes and n != 1]
    name = (reader.depth, i)
    new = [(d, after.shape[d]) for d in axes]
    return reader.seen(reader.terms.intern("carry", name, (), kind, new=new), after.shape)
