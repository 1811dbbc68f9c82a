"""What primitives mean: reductions, products, picking along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .layout import element, padded
from .program import Equation
from .reading import Reader, of, rule
from .terms import Label, View, order

# -- reductions ----------------------------------------------------------------------------


def kept(rank: int, axes: Sequence[int]) -> dict[int, int]:
    """Where the axes that are not reduced end up."""
    return {d: i for i, d in enumerate(d for d in range(rank) if d not in axes)}


@rule("reduce_sum")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), axes = given, [int(d) for d in eqn.params["axes"]]
    shape, kind = of(eqn)
    if kind not in "fi":
        return None
    term, labels = reader.terms.total(
        view.at(range(len(view.shape))), axes, [view.shape[d] for d in axes]
    )
    place = kept(len(view.shape), axes)
    return reader.seen((term, tuple(place[x] for x in labels)), shape)


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    (view,), axes = given, [int(d) for d in eqn.params["axes"]]
    shape, kind = of(eqn)
    part = view.at(range(len(view.shape)))
    present = [d for d in axes if d in part[1]]
    names = {"reduce_max": "maximum", "reduce_min": "minimum"}
    if eqn.name not in names and len(present) < len([d for d in axes if view.shape[d] != 1]):
        return None
    if present or eqn.name not in names:
        name = names.get(eqn.name, eqn.name)
        part = reader.terms.intern(name, (), [part], kind, bound=present)
    place = kept(len(view.shape), axes)
    return reader.seen((part[0], tuple(place[x] for x in part[1])), shape)


@rule("dot_general")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """Σ over the contracted axes of the product; factors are opened up for their number only."""
    shape, kind = of(eqn)
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    if kind not in "fi":
        return None
    labels: list[list[Label]] = [[None] * len(v.shape) for v in given]
    extents = {}
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        labels[0][a] = labels[1][b] = ("sum", i)
        extents["sum", i] = given[0].shape[a]
    for i, (a, b) in enumerate(zip(batch_left, batch_right, strict=True)):
        labels[0][a] = labels[1][b] = i
    free = len(batch_left)
    for names in labels:
        for d, label in enumerate(names):
            if label is None:
                names[d], free = free, free + 1
    coef, parts = 1, []
    for view, names in zip(given, labels, strict=True):
        term, at = view.at(names)
        if not extents:  # a product of elements, as any other
            found, c = reader.factors(view, 1, len(names))
            place = lambda part, names=names: (part[0], tuple(names[d] for d in part[1]))
            parts += [(place(part), power) for part, power in found]
            coef = coef * c
            continue
        if term.op == "product" and term.params[0] != 1 and not view.shared:
            c, (term, at) = reader.terms.bare((term, at))
            coef = coef * c
        parts.append((term, at))
    if not extents:
        return reader.seen(reader.terms.product(parts, coef, kind), shape)
    # A factor that is itself a product stays one operand of this one.
    if parts[0] == parts[1]:
        product = reader.terms.product([(parts[0], 2)], 1, kind)
    else:
        product = reader.terms.intern("product", (1, (1, 1)), sorted(parts, key=order), kind)
    if any(x not in product[1] for x in extents):
        return None
    product = reader.terms.intern("total", (), [product], kind, bound=extents)
    return reader.seen(reader.terms.product([(product, 1)], coef, kind), shape)


@rule("gather")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """One element along one axis, chosen for each place of the result: ``take_along_axis``."""
    (x, index), shape, dims = given, eqn.outputs[0].shape, eqn.params["dimension_numbers"]
    mode, fill = str(eqn.params["mode"]).split(".")[-1], eqn.params["fill_value"]
    rank = len(x.shape)
    if "FILL" in mode and fill is not None and not math.isnan(fill):
        return None
    if list(dims.start_index_map) != list(dims.collapsed_slice_dims):
        return None
    if index.term.op == "number" and len(dims.collapsed_slice_dims) == 1:
        (d,), at = dims.collapsed_slice_dims, index.term.params
        sizes = (*x.shape[:d], 1, *x.shape[d + 1 :])
        if eqn.params["slice_sizes"] != sizes or len(dims.offset_dims) != len(shape):
            return None
        if dims.operand_batching_dims or not 0 <= at < x.shape[d]:
            return None
        term, labels = x.at(range(rank))
        if d in labels:
            term, labels = element(reader.terms, (term, labels), d, at)
        place = kept(rank, [d])
        return reader.seen((term, tuple(place[i] for i in labels)), shape)
    taken = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    whole = [d for d in range(rank) if d not in taken]  # JAX takes axes of one element whole
    if any(n != 1 for n in (*eqn.params["slice_sizes"], *(x.shape[d] for d in whole))):
        return None
    places = [i for i in range(len(shape)) if i not in dims.offset_dims]
    columns = [index.at([*places, len(shape)])]
    if index.term.op == "columns":
        _, labels = columns[0]
        columns = [(t, tuple(labels[i] for i in at)) for t, at in index.term.args]
    if len(columns) != len(dims.collapsed_slice_dims):
        return None
    names: dict[int, Label] = dict(zip(whole, dims.offset_dims, strict=True))
    for d, i in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
        names[d] = places[i]
    chosen = []
    for d, (term, at) in zip(dims.collapsed_slice_dims, columns, strict=True):
        if term.op == "iota" and term.params == x.shape[d]:
            names[d] = at[0]
        else:
            names[d] = ("chosen", d)
            chosen.append((term, at))
    if len(chosen) != 1 or len(set(names.values())) != rank:
        return None
    bound = [n for n in names.values() if isinstance(n, tuple)]
    part = x.at([names[d] for d in range(rank)])
    if bound[0] not in part[1]:
        return None
    kind = "fill" if "FILL" in mode else "clip"
    return reader.seen(
        reader.terms.intern("pick", kind, [part, chosen[0]], x.term.kind, bound=bound), shape
    )


TAPS = 8  # of a depthwise convolution that is read as a sum


@rule("conv_general_dilated")
def _(reader: Reader, eqn: Equation, given: list[View]) -> Any:
    """A depthwise one along a sequence: Σⱼ wⱼ · x, moved by j."""
    (x, w), (shape, kind), params = given, of(eqn), eqn.params
    if len(x.shape) != 3 or kind != "f" or params["batch_group_count"] != 1:
        return None
    lhs, rhs, out = params["dimension_numbers"]
    channels, taps = x.shape[lhs[1]], w.shape[rhs[2]]
    plain = all(params[n] == (1,) for n in ("window_strides", "lhs_dilation", "rhs_dilation"))
    alone = params["feature_group_count"] == channels == w.shape[rhs[0]]
    if not plain or not alone or not 1 < taps <= TAPS or 1 in (x.shape[lhs[2]], shape[out[2]]):
        return None
    place = dict(zip(lhs, out, strict=True))
    moved_x = x.at([place[d] for d in range(3)])
    of_w = w.at([{rhs[0]: out[1], rhs[1]: "in", rhs[2]: "tap"}[d] for d in range(3)])
    if out[2] not in moved_x[1] or "tap" not in of_w[1]:
        return None
    ((low, high),) = params["padding"]
    addends = []
    for j in range(taps):
        run = padded(reader.terms, moved_x, out[2], low - j, high - (taps - 1 - j), 0.0)
        tap = element(reader.terms, of_w, "tap", j)
        addends.append((reader.terms.product([(tap, 1), (run, 1)], 1, kind), 1))
    return reader.seen(reader.terms.sum(addends, 0, kind), shape)
