"""How an op may be split over devices.

The rule is read from what the op says already.  Axes of one name in its annotations are one
*factor*; ``splits`` names those of which every part can be computed alone, ``"*batch"``, or
``"b hk h=hk*r"`` where the axis h is (hk, r), hk outermost.  All others stay whole.  A result
that lacks a factor is a sum over it, and is summed over the devices.  In the einsum-like notation
of Shardy, :attr:`Rule.text`, that of attention is::

    b (hk r) sq d, b hk sk d, b hk sk dv -> b (hk r) sq dv        may be split: b hk
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._choose import Choice, server
from ._signature import Axes, Signature, fit

Dims = tuple[tuple[str, ...], ...]  # the factors of each axis of an array, outermost first
Split = dict[str, tuple[str, ...]]  # factor -> mesh axes it is split over


def unchanged(params: dict[str, Any], *parts: Any) -> dict[str, Any]:
    """The parameters of a part: those of the whole."""
    return params


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which axes of operands and results belong together, and which of them may be split."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    splits: frozenset[str]
    sizes: tuple[tuple[str, int], ...]
    part: Callable[..., dict[str, Any]] = unchanged  # parameters, of those and a part's operands

    @property
    def text(self) -> str:
        """In Shardy's notation."""
        axis = lambda factors: factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
        array = lambda dims: " ".join(map(axis, dims))
        return f"{', '.join(map(array, self.operands))} -> {', '.join(map(array, self.results))}"

    def __str__(self) -> str:
        return f"{self.text}    may be split: {', '.join(self.free) or 'nothing'}"

    @property
    def free(self) -> tuple[str, ...]:
        """Factors that may be split."""
        return tuple(f for f, _ in self.sizes if f in self.splits)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """Extents that no axis has: those of factors that share every axis they are in."""
        alone = {f[0] for dims in (*self.operands, *self.results) for f in dims if len(f) == 1}
        return {f: size for f, size in self.sizes if f not in alone}

    @property
    def whole(self) -> tuple[str, ...]:
        """Factors that must not be split."""
        return tuple(f for f, _ in self.sizes if f not in self.splits)

    def split(self, mesh: Any, specs: Sequence[Any]) -> Split:
        """The mesh axes of each factor, as the first array has it that splits it and may.

        ``specs`` are those of the operands, then of the results, as far as they are known.  An axis
        that the number of devices does not divide stays whole.
        """
        sizes, found, used = dict(self.sizes), {}, set()
        for dims, spec in zip((*self.operands, *self.results), specs, strict=False):
            for factors, axes in zip(dims, spec, strict=False):
                axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
                factor = factors[0]  # outermost: the others are strided over devices
                devices = math.prod(mesh.shape[a] for a in axes)
                if (
                    devices > 1
                    and factor in self.splits
                    and factor not in found
                    and not used.intersection(axes)
                    and sizes[factor] % devices == 0
                ):
                    found[factor] = axes
                    used.update(axes)
        return found

    def specs(self, arrays: tuple[Dims, ...], split: Split) -> list[PartitionSpec]:
        """How each array is laid out, so split."""
        return [PartitionSpec(*(split.get(factors[0]) for factors in dims)) for dims in arrays]

    def sums(self, split: Split) -> list[tuple[str, ...]]:
        """The mesh axes that each result is to be summed over."""
        has = [{factor for factors in dims for factor in factors} for dims in self.results]
        return [tuple(a for f, axes in split.items() if f not in own for a in axes) for own in has]

    @property
    def transposed(self) -> Rule:
        """That of a linear map's transpose, of which the first operand is the first result."""
        operands = (self.results[0], *self.operands[1:])
        return Rule(operands, self.operands[:1], self.splits, self.sizes)

    def batched(self, operands: Sequence[bool], size: int) -> Rule:
        """With a leading axis for those operands, and for every result."""
        name = f"v{sum(f[0] == 'v' and f[1:].isdigit() for f, _ in self.sizes)}"
        new = lambda dims: ((name,), *dims)
        return Rule(
            tuple(new(d) if b else d for d, b in zip(self.operands, operands, strict=True)),
            tuple(map(new, self.results)),
            self.splits | {name},
            ((name, size), *self.sizes),
        )


# -- reading it ------------------------------------------------------------------------------


def rule_of(
    signature: Signature,
    splits: str,
    outputs: Sequence[str],
    arrays: Sequence[Any],
    results: Sequence[Any],
) -> Rule:
    """The rule of a call whose operands and results have these shapes; None is left out.

    A result without an annotation that begins with d, like ``dq``, is laid out as the operand.
    """
    axes: Axes = {}
    forms = {}
    for name, x in zip(signature.names(arrays), arrays, strict=True):
        operand = signature.operands[signature.inputs[0] if signature.variadic else name]
        if x is None:
            continue
        for form in operand.forms:
            if x.dtype.name in form.dtypes and fit(form.dim_str, x.shape, axes, name) is None:
                forms[name] = form.dim_str
                break
    splits, _, layouts = splits.partition("->")
    written = (
        layouts.split(",") if layouts else written_results(signature.annotations.get("return"))
    )
    compound, free = {}, set()
    for word in splits.split():
        axis, _, factors = word.partition("=")
        compound |= {axis: tuple(factors.split("*"))} if factors else {}
        free |= set() if factors else {axis}
    sizes: dict[str, int] = {}
    splittable: set[str] = set()

    def read(dim_str: str | None, x: Any, array: str) -> Dims:
        tokens = (dim_str or "...").split()
        at = next((i for i, t in enumerate(tokens) if t[0] == "*" or t == "..."), None)
        if at is not None:
            star, many = tokens[at], x.ndim - len(tokens) + 1
            label = array if star == "..." else star[1:]
            tokens[at : at + 1] = [f"{label}_{i}" for i in range(many)]
            splittable.update(tokens[at : at + many] if star in free else ())
        dims = []
        for i, (token, extent) in enumerate(zip(tokens, x.shape, strict=True)):
            factors = compound.get(token, (f"{array}_{i}" if token.isdigit() else token,))
            inner = math.prod(sizes.get(f, 1) for f in factors[:-1])
            sizes.setdefault(factors[-1], extent // max(inner, 1))
            factors = tuple(f for f in factors if sizes[f] != 1) or factors[:1]
            splittable.update(free.intersection(factors[:1]))
            dims.append(factors)
        return tuple(dims)

    # Plain axes first: they give the factors of compound ones their sizes.
    order = sorted(forms, key=lambda n: any(t in compound for t in forms[n].split()))
    by_name = dict(zip(signature.names(arrays), arrays, strict=True))
    read_dims = {n: read(forms[n], by_name[n], n) for n in order}
    operands = tuple(
        read_dims[n] if n in read_dims else read(None, x, n)
        for n, x in by_name.items()
        if x is not None
    )
    found = []
    for i, (name, y) in enumerate(zip(outputs, results, strict=True)):
        dim_str = written[i] if i < len(written) else None
        like = signature.operands.get(name[1:]) if dim_str is None and name[0] == "d" else None
        if like is not None and like.forms:
            dim_str = forms.get(like.name, like.forms[0].dim_str)
        if y is not None:
            found.append(read(dim_str, y, f"{name}_out"))
    used = [factor for dims in (*operands, *found) for factors in dims for factor in factors]
    ordered = tuple((factor, sizes[factor]) for factor in dict.fromkeys(used))
    return Rule(operands, tuple(found), frozenset(splittable), ordered)


def written_results(note: Any) -> list[str | None]:
    """The axes of each result, as far as the annotation of ``return`` says them."""
    notes = typing.get_args(note) if typing.get_origin(note) is tuple else (note,)
    return [getattr(n, "dim_str", None) for n in notes]


# -- saying it -------------------------------------------------------------------------------


def told(
    choices: Sequence[Choice],
    rule_of: Callable[[], Rule] | None,
    names: Sequence[str],
    arrays: Sequence[Any],
) -> Sequence[str]:
    """What becomes of operands that are split over devices; nothing where none is."""
    present = [(n, x) for n, x in zip(names, arrays, strict=True) if x is not None]
    given = [getattr(x, "sharding", None) for _, x in present]
    given = [s if isinstance(s, NamedSharding) else None for s in given]
    mesh = next((s.mesh for s in given if s and any(s.spec) and s.mesh.size > 1), None)
    if mesh is None:
        return ()
    devices = getattr(mesh, "devices", None)  # an abstract mesh has none
    serves = server(choices, "default" if devices is None else devices.flat[0].platform)
    if serves is choices[-1] and (rule_of is None or AxisType.Explicit not in mesh.axis_types):
        return ("xla serves, and splits it as it can",)
    if rule_of is None:
        return ("no rule: a kernel runs whole, on operands that XLA gathers",)
    rule, specs = rule_of(), [() if s is None else tuple(s.spec) for s in given]
    split, sizes = rule.split(mesh, specs), dict(rule.sizes)
    flat = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
    over = lambda axes: " and ".join(flat(axes))
    parts = ", ".join(f"{f} over {over(axes)}" for f, axes in split.items())
    says = [f"each device computes its part: {parts}" if split else "each computes the whole"]
    parts_of = rule.specs(rule.operands, split)
    for (name, _), dims, asked, its_part in zip(
        present, rule.operands, specs, parts_of, strict=True
    ):
        for i, (axes, its) in enumerate(zip(asked, its_part, strict=False)):
            if flat(axes) in ((), flat(its)):
                continue
            factor = dims[i][0]
            why = "another axis or operand is split otherwise"
            if factor not in rule.splits:
                why = f"{factor} must be whole"
            elif sizes[factor] % math.prod(mesh.shape[a] for a in flat(axes)):
                why = f"the {sizes[factor]} of {factor} are not a multiple of the devices"
            says.append(f"XLA reshards {name}: axis {i} is split over {over(axes)}, and {why}")
    for i, axes in enumerate(rule.sums(split)):
        says += [f"result {i} is summed over {over(axes)}"] if axes else []
    return [rule.text, *says]
