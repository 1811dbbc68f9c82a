"""Rules that annotations cannot say: which axes of a call may be split depends on its parameters.

An op along one axis computes every part of the others alone; so do margins beside an axis, slabs,
and what is read or added at indices.  Axes that are aligned at the last one are one factor where
they are of one extent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ._sharding import Rule, unchanged

RuleOf = Callable[[dict[str, Any], Sequence[Any], Sequence[Any]], Rule]
Labels = Sequence[str]  # the factor of each axis of an array


def labelled(
    operands: Sequence[Any],
    results: Sequence[Any],
    labels: Sequence[Labels],
    free: Collection[str],
    part: Callable[..., dict[str, Any]] = unchanged,
) -> Rule:
    """The rule of arrays whose axes are called so, operands first; None has none."""
    arrays = [x for x in (*operands, *results) if x is not None]
    sizes: dict[str, int] = {}
    for x, names in zip(arrays, labels, strict=True):
        sizes |= dict(zip(names, x.shape, strict=True))
    dims = [tuple((name,) for name in names) for names in labels]
    count = len(dims) - len([y for y in results if y is not None])
    return Rule(
        tuple(dims[:count]), tuple(dims[count:]), frozenset(free), tuple(sizes.items()), part
    )


def apart(
    taken: Collection[int],
    operands: Sequence[Any],
    results: Sequence[Any],
    part: Callable[..., dict[str, Any]] = unchanged,
) -> Rule:
    """All axes but those taken, whose extents may differ and that results may lack, are free."""
    first = operands[0]

    def names(x: Any) -> Labels:
        axes = [i for i in range(first.ndim) if x.ndim == first.ndim or i not in taken]
        name = lambda i, n: f"shape_{i}" if n == first.shape[i] else f"shape_{i}_{n}"
        return [name(i, n) for i, n in zip(axes, x.shape, strict=False)]  # a scalar has none

    arrays = [x for x in (*operands, *results) if x is not None]
    free = [f"shape_{i}" for i in range(first.ndim) if i not in taken]
    return labelled(operands, results, list(map(names, arrays)), free, part)


def along(parameter: str) -> RuleOf:
    """The rule of an op along one axis, or several, None being all: the others may be split.

    Its results have them in the same order, all axes or those left.
    """

    def rule(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
        ndim, dims = arrays[0].ndim, params[parameter]
        dims = range(ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
        return apart({d % ndim for d in dims}, arrays, results)

    return rule


def beside_margins(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of margins: axes without may be split."""
    return apart({i for i, both in enumerate(params["padding"]) if any(both)}, arrays, results)


def of_slab(axis: str) -> RuleOf:
    """The rule of a slab written: axes that it has all of may be split, but for the one named.

    The ranges of a part are those of what it has.
    """

    def rule(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
        dest, src, *_ = arrays
        moves = params[axis]
        taken = {i for i in range(dest.ndim) if dest.shape[i] != src.shape[i]}
        taken |= set() if moves is None else {moves % dest.ndim}

        def part(params: dict[str, Any], dest: Any, *rest: Any) -> dict[str, Any]:
            given = params.get("ranges")
            if given is None:
                return params
            kept = enumerate(zip(given, dest.shape, strict=True))
            return params | {"ranges": tuple(r if i in taken else (0, n) for i, (r, n) in kept)}

        return apart(taken, arrays, results, part)

    return rule


def at_indices(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of reading or adding at indices of an axis: the others may be split.

    So may the indices read at.  Those added at may not: each part would have the base in it.  Nor
    may an axis along which there are points for its first elements only.
    """
    x, indices, *src = arrays
    dim = params["dim"] % x.ndim
    pointed = [i for i in range(x.ndim) if i != dim and len(indices.shape) == x.ndim]
    short = [i for i in pointed if indices.shape[i] != x.shape[i]]
    axes = [f"shape_{i}" for i in range(x.ndim)]
    some = [f"points_{i}" if i in short else name for i, name in enumerate(axes)]
    some[dim] = "n"
    at = some if indices.ndim == x.ndim else ["n"]
    free = {name for i, name in enumerate(axes) if i not in (dim, *short)}
    if src:
        return labelled(arrays, results, (axes, at, some, axes), free)
    return labelled(arrays, results, (axes, at, some), free | {"n"})


def aligned(*tails: str, free: str = "", everywhere: bool = False) -> RuleOf:
    """The rule of arrays that broadcast, or were summed where they did: aligned at the end.

    Args:
        tails: names of the last axes of each array, operands first; one for all if there is one.
        free: those of them that may be split.
        everywhere: whether of the axes before them only those may be split that every array has.
    """

    def rule(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
        every = [x for x in (*arrays, *results) if x is not None]
        ends = [t.split() for t in (tails * len(every) if len(tails) == 1 else tails)]
        shapes = [x.shape[: x.ndim - len(end)] for x, end in zip(every, ends, strict=True)]
        most = max(map(len, shapes))
        padded = [(1,) * (most - len(shape)) + shape for shape in shapes]
        extents = [max(column) for column in zip(*padded, strict=True)]
        name = lambda i, n: f"batch_{i}" if n == extents[i] else f"one_{i}"
        labels = [
            [*(name(most - len(shape) + i, n) for i, n in enumerate(shape)), *end]
            for shape, end in zip(shapes, ends, strict=True)
        ]
        shared = {f"batch_{i}" for i in range(most)}
        if everywhere:
            shared = shared.intersection(*labels)
        return labelled(arrays, results, labels, shared.union(free.split()))

    return rule


def to_shape(params: dict[str, Any], arrays: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of a reduction to a shape, which of a part is that of its own extents."""
    (x,), (y,) = arrays, results
    kept = [n == m for n, m in zip(x.shape[x.ndim - y.ndim :], y.shape, strict=True)]

    def part(params: dict[str, Any], x: Any) -> dict[str, Any]:
        own = zip(x.shape[x.ndim - len(kept) :], kept, strict=True)
        return params | {"shape": tuple(n if keeps else 1 for n, keeps in own)}

    rule = aligned("", everywhere=True)(params, arrays, results)
    return dataclasses.replace(rule, part=part)
