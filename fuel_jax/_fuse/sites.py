"""A place where an op can stand, or why it cannot; and its call there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import ArgumentError, FuelError
from .program import Atom, Equation, Number, Var
from .proving import Found
from .spelling import Spelling
from .terms import Term, View


@dataclasses.dataclass(frozen=True)
class Site:
    """An op where maths was."""

    found: Found
    root: Var
    covers: frozenset[Equation]
    operands: dict[Term, Var]
    narrow: bool = False  # operands as they were before they were widened, whatever the result is

    def given(self, v: Var) -> Var:
        """The variable that the op reads for an operand."""
        return narrowest(v, 0 if self.narrow else self.root.dtype.itemsize)

    @property
    def spelling(self) -> Spelling:
        """As which it was recognised."""
        return self.found.pattern.spelling

    @property
    def params(self) -> dict[str, Any]:
        """Of the op, found or fixed."""
        return {**self.spelling.fixed, **self.found.params}

    @property
    def where(self) -> str:
        """``file:line`` of the result."""
        assert self.root.maker is not None
        return self.root.maker.where()


def place(
    found: Found, root: Var, views: Mapping[Var, View], tried: dict[Any, str | None]
) -> Site | str | None:
    """The site of what was found, or why the op cannot stand there.

    ``tried`` is filled with what the op said to calls of each kind: layers are alike.
    """
    spelling = found.pattern.spelling
    stops = {t for t, _, _ in found.operands.values()} | {t for (t, _), _ in found.rest}
    covers, operands, twins = covered(root, stops, views)
    if any(t not in operands and t.op != "number" for t in stops):
        return None  # a value that no variable holds
    if any(
        spelling.axes[n] and n not in spelling.dtypes and t in operands and not operands[t].shape
        for n, (t, _, _) in found.operands.items()
    ):
        return None  # a scalar is no vector of one: a · b + c is not a linear layer
    site = Site(found, root, frozenset(covers), operands)
    widths = [
        site.given(operands[t]).dtype
        for n, (t, _, _) in found.operands.items()
        if n not in spelling.dtypes
    ]
    reasons = (
        twins,
        read_elsewhere(site, views),
        "the result is weakly typed" if root.aval.weak_type else None,
        rounded_inside(site, min((*widths, root.dtype), key=lambda d: d.itemsize)),
        not_last(site, views),
        widened(site, widths),
    )
    if reason := next(filter(None, reasons), None):
        return reason
    narrow = dataclasses.replace(site, narrow=True)
    narrows = any(narrow.given(v) is not site.given(v) for v in operands.values())
    if narrows and asked(narrow, views, tried) is None:
        return narrow
    return asked(site, views, tried) or site


def asked(site: Site, views: Mapping[Var, View], tried: dict[Any, str | None]) -> str | None:
    """As :func:`refusal`, once for each kind of call."""
    kind = kind_of_call(site, views)
    if kind not in tried:
        tried[kind] = refusal(site, views)
    return tried[kind]


def refusal(site: Site, views: Mapping[Var, View]) -> str | None:
    """What the op says against these operands.

    Halves that the program widens are read as they are where the result is wide all the same, as
    a loss is: the op widens them itself, and saves a copy.
    """
    root = site.root
    try:
        y = jax.eval_shape(functools.partial(assemble, site, views), *avals(site))
    except FuelError as error:
        return str(error)
    assert (y.shape, y.dtype) == (root.shape, root.dtype), (y, root.aval)
    return None


def kind_of_call(site: Site, views: Mapping[Var, View]) -> Any:
    """Everything that :func:`assemble` looks at, with terms and axes numbered as they come."""
    found, root, axes = site.found, site.root, {}
    number = {t: i for i, t in enumerate(site.operands)}
    of_term = lambda t: number.get(t, repr(t.params))
    of_axes = lambda slots: tuple(axes.setdefault(a, len(axes)) for a in slots)
    arrays = [site.given(v) for v in site.operands.values()]
    return (
        *(site.spelling, site.narrow),
        repr(sorted(site.params.items())),
        tuple(
            (name, of_term(t), tuple(map(of_axes, dims)), of_axes(slots))
            for name, (t, dims, slots) in found.operands.items()
        ),
        tuple((of_term(t), of_axes(slots), repr(n)) for (t, slots), n in found.rest),
        (tuple(map(of_axes, found.out)), of_axes(found.root_axes), found.scale, found.offset),
        tuple((v.shape, v.dtype, views[v].axes) for v in (*arrays, root)),
        tuple(found.extents[a] for a in axes),
        precision_of(site),
    )


def covered(
    root: Var, stops: set[Term], views: Mapping[Var, View]
) -> tuple[list[Equation], dict[Term, Var], str | None]:
    """The equations between the result and the operands, and the variables of the operands.

    Also why one variable cannot stand for all of a term: casts leave no trace in terms, but in the
    program a value and its rounding may both be there, as in products of split floats.
    """
    covers: dict[Equation, None] = {}
    operands: dict[Term, Var] = {}
    reason = None
    stack: list[Atom] = [root]
    while stack:
        v = stack.pop()
        if isinstance(v, Number):
            continue
        if views[v].term in stops and v is not root:
            v = unpadded(v) or v
            other = operands.setdefault(views[v].term, v)
            if origin(other, views) is not origin(v, views):
                reason = "an operand is there twice, once rounded or without its gradient"
        elif v.maker is None:
            if not views[v].term.constant:
                reason = "what is lost by rounding is added again"
        elif v.maker not in covers:
            covers[v.maker] = None
            stack += v.maker.inputs
    return list(covers), operands, reason


def unpadded(v: Var) -> Var | None:
    """What was padded, of the part of it that is no padding: the last tap of a convolution."""
    outer = v.maker if v.maker is not None and v.maker.name == "slice" else None
    source = outer.inputs[0] if outer is not None else None
    inner = source.maker if isinstance(source, Var) else None
    if outer is None or inner is None or inner.name != "pad":
        return None
    lows, _, gaps = zip(*inner.params["padding_config"], strict=True)
    x = inner.inputs[0]
    same = outer.params["start_indices"] == lows and not any(gaps) and x.shape == v.shape
    return x if same and isinstance(x, Var) and outer.params["strides"] is None else None


def origin(v: Var, views: Mapping[Var, View]) -> Var:
    """The variable of the same numbers before layouts, wider types, ``x − 0`` and the like."""
    while v.maker is not None and v.maker.name != "stop_gradient":
        variables = [x for x in v.maker.inputs if isinstance(x, Var)]
        sources = [x for x in variables if not views[x].term.constant]
        if len(sources) != 1 or views[sources[0]].term is not views[v].term:
            break
        if rounds(sources[0].dtype, v.dtype):
            break
        (v,) = sources
    return v


def rounds(old: Any, new: Any) -> bool:
    """Whether a cast between these floats can lose digits or range."""
    if old == new or not all(jnp.issubdtype(d, jnp.floating) for d in (old, new)):
        return False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return b.nmant < a.nmant or b.maxexp < a.maxexp


def read_elsewhere(site: Site, views: Mapping[Var, View]) -> str | None:
    """Of a float inside: it would be computed twice.  Masks and positions cost nothing."""
    values = {*site.operands, *(t for (t, _), _ in site.found.rest)}
    bring_back = lambda e: all(views[v].term in values for v in e.outputs)
    for eqn in site.covers:
        for v in eqn.outputs:
            free = views[v].term.constant or not jnp.issubdtype(v.dtype, jnp.floating)
            if v is site.root or free:
                continue
            others = [e for e in v.readers if e not in site.covers and not bring_back(e)]
            if others:
                return f"`{eqn.name}` ({eqn.where()}) is also read at {others[0].where()}"
            if v.returned:
                return f"`{eqn.name}` ({eqn.where()}) is also returned"
    return None


def rounded_inside(site: Site, least: Any) -> str | None:
    """Of a float inside that is narrower than operands and result: somebody wants it so."""
    for eqn in site.covers:
        for v in eqn.outputs:
            inside = v is not site.root and jnp.issubdtype(v.dtype, jnp.floating)
            if inside and v.dtype.itemsize < least.itemsize:
                return f"{v.dtype} inside ({eqn.where()}), {least} outside"
    return None


def not_last(site: Site, views: Mapping[Var, View]) -> str | None:
    """Of an axis that would have to be moved, where moving costs more than the op gains."""
    found, spelling = site.found, site.spelling
    for name, (term, dims, slots) in found.operands.items():
        view = views[site.operands[term]]
        for axis, inside in zip(spelling.axes[name], dims, strict=True):
            if axis == spelling.last and inside:
                at = view.labels[slots.index(inside[-1])]
                if any(a is not None for a in view.axes[at + 1 :]):
                    return f"along axis {at} of {len(view.shape)}; the op works along the last"
    return None


def widened(site: Site, widths: Sequence[Any]) -> str | None:
    """Of half operands of a matrix product with a wider result: the op would widen them first."""
    products = any(e.name == "dot_general" for e in site.covers)
    narrow = [d for d in widths if d.itemsize < site.root.dtype.itemsize]
    return (
        f"a product of {narrow[0]} with a {site.root.dtype} result" if products and narrow else None
    )


def narrowest(v: Var, least: int) -> Var:
    """The variable a value was widened from, of at least so many bytes an element."""
    while v.maker is not None and v.maker.name == "convert_element_type":
        (source,) = v.maker.inputs
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (source, v))
        if not (isinstance(source, Var) and floats and source.dtype.itemsize < v.dtype.itemsize):
            break
        if source.dtype.itemsize < least:
            break
        v = source
    return v


# -- the call ------------------------------------------------------------------------------


def avals(site: Site) -> list[Any]:
    """Of the operands, in order."""
    given = map(site.given, site.operands.values())
    return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given]


def assemble(site: Site, views: Mapping[Var, View], *values: Any) -> Any:
    """The op's call, and around it what brings its operands and result into place."""
    found, spelling, root = site.found, site.spelling, site.root
    arrays = {
        t: (x, views[site.given(v)])
        for (t, v), x in zip(site.operands.items(), values, strict=True)
    }

    def fetch(term: Term) -> Any:
        """With an axis for each of the term's."""
        if term.op == "number":
            return jnp.asarray(term.params, root.dtype)
        x, view = arrays[term]
        x = x[tuple(0 if a is None else slice(None) for a in view.axes)]
        present = [a for a in view.axes if a is not None]
        return lax.transpose(x, [present.index(i) for i in range(len(present))])

    def spread(x: Any, slots: Sequence[Any], wanted: Sequence[Any]) -> Any:
        """With just the wanted axes, those it lacks of extent 1."""
        order = [slots.index(a) for a in wanted if a in slots]
        x = lax.transpose(x, order)
        return lax.expand_dims(x, [i for i, a in enumerate(wanted) if a not in slots])

    operands = {}
    floats = [
        x.dtype
        for n, (t, _, _) in found.operands.items()
        if jnp.issubdtype((x := fetch(t)).dtype, jnp.floating)
    ]
    wide = [] if site.narrow else [root.dtype]
    common = functools.reduce(jnp.promote_types, [*floats, *wide])
    for name, (term, dims, slots) in found.operands.items():
        flat = [a for d in dims for a in d]
        x = spread(fetch(term), slots, flat)
        if name not in spelling.dtypes:
            x = x.astype(common)
        shape: list[int] = []
        for axis, d in zip(spelling.axes[name], dims, strict=True):
            sizes = [found.extents[a] for a in d]
            shape += sizes if axis.startswith("*") else [math.prod(sizes)]
        x = jnp.broadcast_to(x, [found.extents[a] for a in flat])
        operands[name] = x.reshape(shape)
    with jax.default_matmul_precision(precision_of(site)):
        y = spelling.call(**operands, **site.params)
    flat = [a for d in found.out for a in d]
    if y.dtype.itemsize < root.dtype.itemsize:
        raise ArgumentError(f"the op's result is {y.dtype}, the program's {root.dtype}")
    y = y.reshape([found.extents[a] for a in flat])
    view = views[root]
    wanted = [found.root_axes[a] if a is not None else ("unit", i) for i, a in enumerate(view.axes)]
    y = spread(y, flat, wanted).astype(root.dtype)
    product = found.pattern.root.op == "product"
    if product and found.scale != 1:
        y = y * jnp.asarray(found.scale, root.dtype)
    if not product and found.offset != 0:
        y = y + jnp.asarray(found.offset, root.dtype)
    for (term, slots), number in found.rest:
        z = spread(fetch(term), slots, wanted).astype(root.dtype)
        if product:
            y = y * power(z, number)
        else:
            y = y + (z if number == 1 else z * jnp.asarray(number, root.dtype))
    return jnp.broadcast_to(y, root.shape)


def power(x: Any, exponent: Any) -> Any:
    """``x`` to the power."""
    known = {1: lambda x: x, -1: lambda x: 1 / x, 0.5: jnp.sqrt, -0.5: lax.rsqrt, 2: jnp.square}
    if exponent in known:
        return known[exponent](x)
    return lax.integer_pow(x, exponent) if exponent == int(exponent) else x**exponent


def precision_of(site: Site) -> Any:
    """What the program asked of its products: the op gives them no less, and no more.

    Of those of wide operands: others have one precision only, whatever algorithm is asked for.
    """
    asked = [
        e.params["precision"]
        for e in site.covers
        if e.name == "dot_general" and all(x.dtype.itemsize > 2 for x in e.inputs)
    ]
    first = next((p[0] if isinstance(p, tuple) else p for p in asked if p is not None), None)
    if isinstance(first, lax.Precision):
        return str(first.name).lower()
    return getattr(first, "name", None)  # of an algorithm
