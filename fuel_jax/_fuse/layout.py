"""What primitives mean: layout, and operations along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .program import Equation
from .reading import Reader, of, rule
from .terms import Label, Part, Terms, View, digits

# -- layout --------------------------------------------------------------------------------


@rule("broadcast_in_dim")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    if len(given) != 1:
        return None
    axes: list[int | None] = [None] * len(eqn.outputs[0].shape)
    for i, d in enumerate(eqn.params["broadcast_dimensions"]):
        axes[d] = given[0].axes[i]
    return View(given[0].term, tuple(axes), eqn.outputs[0].shape)


@rule("transpose")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    order = eqn.params["permutation"]
    (view,) = given
    return View(view.term, tuple(view.axes[i] for i in order), eqn.outputs[0].shape)


@rule("squeeze")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    gone = {d % len(given[0].shape) for d in eqn.params["dimensions"]}
    axes = tuple(a for i, a in enumerate(given[0].axes) if i not in gone)
    return View(given[0].term, axes, eqn.outputs[0].shape)


@rule("expand_dims")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    axes = list(given[0].axes)
    for d in sorted(eqn.params["dimensions"]):
        axes.insert(d, None)
    return View(given[0].term, tuple(axes), eqn.outputs[0].shape)


@rule("reshape")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """Axes are merged and split; splitting what was merged gives it back."""
    if eqn.params.get("dimensions") is not None:
        return None
    (view,), shape = given, eqn.outputs[0].shape
    groups = aligned(view.shape, shape)
    if groups is None:
        return None
    part: Part = view.at(range(len(view.shape)))
    place: dict[Label, int] = {}
    for olds, news in groups:
        olds = [i for i in olds if view.shape[i] != 1]
        news = [i for i in news if shape[i] != 1]
        present = [i for i in olds if i in part[1]]
        if not present:
            continue
        if [view.shape[i] for i in olds] == [shape[i] for i in news]:
            place |= {i: j for i, j in zip(olds, news, strict=True)}
            continue
        label: Label = olds[0]
        if len(olds) > 1:
            part = merge(reader.terms, part, olds, [view.shape[i] for i in olds], ("m", label))
            label = ("m", label)
        if len(news) > 1:
            part = split(reader.terms, part, label, [(("s", j), shape[j]) for j in news])
            place |= {("s", j): j for j in news}
        else:
            place[label] = news[0]
    return reader.seen((part[0], tuple(place[x] for x in part[1])), shape)


def aligned(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The smallest runs of axes whose extents multiply to the same."""
    if math.prod(old) == 0:
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news, a, b = [], [], 1, 1
        while True:
            if a == b and (olds or news) and a != 1:
                break
            if a <= b and i < len(old):
                olds.append(i)
                a, i = a * old[i], i + 1
            elif j < len(new):
                news.append(j)
                b, j = b * new[j], j + 1
            else:
                break
        if a != b:
            return None
        groups.append((olds, news))
    return groups


def merge(
    terms: Terms, part: Part, olds: Sequence[Label], extents: Sequence[int], label: Label
) -> Part:
    """Several axes as one.  Those the term does not have repeat it."""
    term, labels = part
    where = tuple(x in labels for x in olds)
    if term.op == "split" and all(where):  # of one axis, into just these
        inner, at = term.args[0]
        n = len(olds)
        made = labels[len(labels) - n :]
        if tuple(olds) == made and n == len(term.params):
            back = dict(enumerate(labels[: len(labels) - n]))
            return inner, tuple(back.get(i, label) for i in at)
    bound = [x for x in olds if x in labels]
    # Which axis comes first counts, so it is part of the operation.
    params = tuple(extents), where, ranks([labels.index(x) for x in bound])
    return terms.intern(
        "merge", params, [part], term.kind, bound=bound, new=[(label, math.prod(extents))]
    )


def ranks(order: Sequence[int]) -> tuple[int, ...]:
    """The order of distinct numbers, as a permutation."""
    return tuple(sorted(order).index(i) for i in order)


def split(terms: Terms, part: Part, label: Label, news: Sequence[tuple[Label, int]]) -> Part:
    """One axis as several."""
    term, labels = part
    sizes = tuple(n for _, n in news)
    if term.op == "merge" and labels[-1] == label and term.params[0] == sizes:
        _, where, order = term.params
        if all(where):
            inner, at = term.args[0]
            merged = sorted(i for i in at if i >= len(term.shape))
            back: dict[int, Label] = dict(enumerate(labels[:-1]))
            back |= {merged[rank]: x for rank, (x, _) in zip(order, news, strict=True)}
            return inner, tuple(back[i] for i in at)
    return terms.intern("split", sizes, [part], term.kind, bound=[label], new=news)


# -- along an axis -------------------------------------------------------------------------


def along(terms: Terms, name: str, params: Any, part: Part, label: Label, extent: int) -> Part:
    """One axis turned into another, as by a slice."""
    term, labels = part
    if label not in labels:
        raise NotImplementedError
    made, out = terms.intern(
        name, params, [part], term.kind, bound=[label], new=[(("to", label), extent)]
    )
    return made, tuple(label if x == ("to", label) else x for x in out)


@rule("slice")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), shape = given, eqn.outputs[0].shape
    part: Part = view.at(range(len(shape)))
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    for d, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        if d not in part[1] or (start, limit, stride) == (0, view.shape[d], 1):
            continue
        if shape[d] == 1:
            part = element(reader.terms, part, d, start)
        elif stride == 1:
            part = stretch(reader.terms, part, d, start, limit)
        else:
            part = along(reader.terms, "slice", (start, limit, stride), part, d, shape[d])
    return reader.seen(part, shape)


def element(terms: Terms, part: Part, label: Label, at: int) -> Part:
    """One place along an axis."""
    return terms.intern("at", at, [part], part[0].kind, bound=[label])


def stretch(terms: Terms, part: Part, label: Label, start: int, limit: int) -> Part:
    """A run along an axis; of a padded value, the value padded less."""
    if inner := moved(part, label, "pad"):
        term, (low, high, _, value) = inner, part[0].params
        length = part[0].shape[part[1].index(label)]
        return padded(terms, term, label, low - start, high - (length - limit), value)
    return along(terms, "slice", (start, limit, 1), part, label, limit - start)


def padded(terms: Terms, part: Part, label: Label, low: int, high: int, value: Any) -> Part:
    """With so many more elements on either side of an axis; less, where it is negative."""
    length = part[0].shape[part[1].index(label)]
    if inner := moved(part, label, "slice"):
        start, limit, stride = part[0].params
        whole = inner[0].shape[inner[1].index(label)]
        ends = (start == 0 or low <= 0) and (limit == whole or high <= 0)
        if stride == 1 and ends:  # what was cut off does not come back as padding
            return padded(terms, inner, label, low - start, high - (whole - limit), value)
    if low == high == 0:
        return part
    if low <= 0 and high <= 0:
        return along(terms, "slice", (-low, length + high, 1), part, label, length + low + high)
    return along(terms, "pad", (low, high, 0, value), part, label, length + low + high)


def moved(part: Part, label: Label, name: str) -> Part | None:
    """What was sliced or padded along this axis, and along no other."""
    term, labels = part
    if term.op != name or labels[-1] != label:
        return None
    if name == "pad" and term.params[2] != 0:
        return None
    inner, at = term.args[0]
    names = [*labels[:-1], None, label]
    return inner, tuple(names[i] for i in at)


@rule("split")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), d, views = given, eqn.params["axis"], []
    start = 0
    for out, size in zip(eqn.outputs, map(int, eqn.params["sizes"]), strict=True):
        part: Part = view.at(range(len(view.shape)))
        if d in part[1] and size != view.shape[d]:
            run = element(reader.terms, part, d, start)
            if size != 1:
                run = stretch(reader.terms, part, d, start, start + size)
            part = run
        views.append(reader.seen(part, out.shape))
        start += size
    return views


@rule("pad")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view, value), shape = given, eqn.outputs[0].shape
    part: Part = view.at(range(len(shape)))
    if value.term.op != "number":
        return None
    for d, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if (low, high, inner) != (0, 0, 0):
            if d not in part[1] or shape[d] == 1:
                return None
            number = digits(value.term.params)
            if inner:
                params = low, high, inner, number
                part = along(reader.terms, "pad", params, part, d, shape[d])
            else:
                part = padded(reader.terms, part, d, low, high, number)
    return reader.seen(part, shape)


@rule("rev")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), shape = given, eqn.outputs[0].shape
    part: Part = view.at(range(len(shape)))
    for d in eqn.params["dimensions"]:
        if d in part[1]:
            part = along(reader.terms, "rev", (), part, d, shape[d])
    return reader.seen(part, shape)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), shape = given, eqn.outputs[0].shape
    part: Part = view.at(range(len(shape)))
    d = eqn.params["axis"]
    if d not in part[1]:
        return None
    part = along(reader.terms, eqn.name, (eqn.params["reverse"],), part, d, shape[d])
    return reader.seen(part, shape)


@rule("concatenate")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    d = eqn.params["dimension"]
    parts = [v.at(range(len(shape))) for v in given]
    if all(v.shape[d] == 1 for v in given):
        part = reader.terms.intern("columns", (), parts, kind, new=[(d, shape[d])])
        return reader.seen(part, shape)
    numbers = [t.params for t, _ in parts if t.op == "number"]
    others = [i for i, (t, _) in enumerate(parts) if t.op != "number"]
    if len(others) == 1 and len({*map(digits, numbers)}) == 1 and d in parts[others[0]][1]:
        (i,) = others
        low, high = (sum(v.shape[d] for v in vs) for vs in (given[:i], given[i + 1 :]))
        return reader.seen(padded(reader.terms, parts[i], d, low, high, digits(numbers[0])), shape)
    if any(d not in labels for _, labels in parts):
        return None
    part = reader.terms.intern(
        "concatenate",
        (),
        parts,
        kind,
        bound=[d],
        new=[(("to", d), shape[d])],
        key=tuple(v.shape[d] for v in given),
    )
    return reader.seen((part[0], tuple(d if x == ("to", d) else x for x in part[1])), shape)


@rule("iota")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    shape, kind = of(eqn)
    d = eqn.params["dimension"]
    if kind not in "fi" or given:
        return None
    if shape[d] == 1:
        return reader.seen((reader.terms.scalar(0, kind), ()), shape)
    part = reader.terms.intern("iota", shape[d], (), "i", new=[(d, shape[d])])
    if kind == "f":
        part = reader.terms.intern("cast", (), [part], "f")
    return reader.seen(part, shape)
