"""An op's signature, read from its body: operands, parameters, and the checks they imply.

Positional arguments are operands: arrays, or None where the default is None.  Keyword-only
arguments are parameters: static, and part of the compilation key.  An operand's annotation is its
shape and dtype rule, a parameter's annotation its type; nothing else in the library checks either.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ._choose import describe
from ._parameters import Reader, reader
from .errors import ArgumentError, FuelError, ShapeError, SignatureError
from .types import NARROWED, Indices, require_x64, x64_enabled

Axes = dict[str, tuple[Any, str]]  # axis -> (extent, the operand that bound it)


@dataclass(frozen=True)
class Operand:
    """An array argument; ``forms`` are the annotations it may satisfy (none: any array)."""

    name: str
    forms: tuple[Any, ...]
    optional: bool
    may_be_int: bool

    @functools.cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes it may have; empty for any."""
        return tuple(dict.fromkeys(d for form in self.forms for d in form.dtypes))

    @property
    def floating(self) -> bool:
        """Whether it may hold floats, and so be differentiated."""
        return not self.forms or "float32" in self.dtypes

    @property
    def shared(self) -> bool:
        """Whether its dtype is the one the op's operands share."""
        return any(form.dtype.shared for form in self.forms)

    def __str__(self) -> str:
        shapes = "|".join(f"[{form.dim_str.strip()}]" for form in self.forms)
        return f"{self.name}{shapes}{'?' if self.optional else ''}"


class Signature:
    """Operands and parameters of ``body``; errors carry the name of the op."""

    op: str
    body: Callable[..., Any]
    python: inspect.Signature
    variadic: bool
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    defaults: dict[str, Any]

    def __init__(self, body: Callable[..., Any], op: str) -> None:
        self.op, self.body = op, body
        self.python = inspect.signature(body)
        parameters = self.python.parameters.values()
        self.variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        positional = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        self.inputs = tuple(p.name for p in parameters if p.kind in positional)
        self.params = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if len(self.inputs) + len(self.params) < len(parameters) or (
            self.variadic and len(self.inputs) > 1
        ):
            raise SignatureError(
                f"{self.op}: an op takes arrays by position and parameters by keyword; "
                f"got {self.op}{self.python}. Put parameters after '*'."
            )
        self.defaults = {
            p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty
        }

    @functools.cached_property
    def annotations(self) -> dict[str, Any]:
        """Read on first use: annotations may name things defined after the op."""
        return inspect.get_annotations(self.body, eval_str=True)

    @functools.cached_property
    def operands(self) -> dict[str, Operand]:
        """By name."""
        found = {}
        for name in self.inputs:
            note = self.annotations.get(name, jax.Array)
            union = (note,) if hasattr(note, "dim_str") else typing.get_args(note)
            forms = tuple(a for a in union if hasattr(a, "dim_str"))
            optional = self.defaults.get(name, self) is None
            found[name] = Operand(name, forms, optional, int in union)
        return found

    @functools.cached_property
    def readers(self) -> dict[str, Reader]:
        """How each parameter's value is read, by name."""
        return {name: reader(self.annotations.get(name, Any)) for name in self.params}

    # -- binding ---------------------------------------------------------------------------

    def bind(
        self, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Parameters by name, and every operand in order, None where left out."""
        if self.variadic:
            arrays = [self.array(self.inputs[0], value) for value in args]
            left = given
        else:
            arrays, left = self._operands(args, given)
        params = {}
        for name in self.params:
            if name in left:
                params[name] = self._parameter(name, left[name])
            elif name in self.defaults:
                params[name] = self.defaults[name]
            else:
                raise SignatureError(f"{self.op}: parameter {name!r} is missing. {self._usage()}")
        if unknown := [name for name in left if name not in params]:
            raise SignatureError(
                f"{self.op}: got an argument {unknown[0]!r} it does not have. {self._usage()}"
            )
        return params, arrays

    def _operands(
        self, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        if len(args) > len(self.inputs):
            raise SignatureError(
                f"{self.op}: got {len(args)} arrays, takes {len(self.inputs)} by position "
                f"({', '.join(self.inputs)}); parameters go by keyword. {self._usage()}"
            )
        arrays, left, taken = [], given, len(args)
        for i, name in enumerate(self.inputs):
            if i < taken:
                if name in given:
                    raise SignatureError(f"{self.op}: got {name!r} twice. {self._usage()}")
                value = args[i]
            elif name in left:
                value = left[name]
                left = {n: v for n, v in left.items() if n != name}
            elif name in self.defaults:
                value = None
            else:
                raise SignatureError(f"{self.op}: array {name!r} is missing. {self._usage()}")
            arrays.append(value if isinstance(value, jax.Array) else self.array(name, value))
        return arrays, left

    def array(self, name: str, value: Any) -> Any:
        """The operand as an array or None.  A Python int becomes an array: it doesn't recompile."""
        operand = self.operands[name]
        if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return self._host_array(operand, np.asarray(value))
        if value is None and operand.optional:
            return None
        if operand.may_be_int and type(value) is int:
            if not -(2**31) <= value < 2**31:
                raise ArgumentError(f"{self.op}: {name!r} is {value}, which does not fit in I32.")
            return np.int32(value)
        if to_array := getattr(value, "__jax_array__", None):
            return to_array()
        article = "an array or None" if operand.optional else "an array"
        raise ShapeError(
            f"{self.op}: {name!r} is {shorten(value)}; it must be {article}. "
            f"Wrap it in jnp.asarray(...), and pass parameters by keyword."
        )

    def _host_array(self, operand: Operand, value: np.ndarray) -> np.ndarray:
        """A NumPy array that JAX will store as it is; indices are narrowed where they fit."""
        dtype = value.dtype.name
        if operand.dtypes and dtype not in operand.dtypes:
            self._refuse_dtype(operand, value)
        if dtype in NARROWED and not x64_enabled():
            limits = np.iinfo(np.int32)
            if any(form.dtype is Indices for form in operand.forms) and (
                value.size == 0 or (value.min() >= limits.min and value.max() <= limits.max)
            ):
                return value.astype(np.int32)
            require_x64(self.op, operand.name, dtype)
        return value

    def _parameter(self, name: str, value: Any) -> Any:
        read, wanted = self.readers[name]
        if isinstance(value, jax.Array):
            raise ArgumentError(
                f"{self.op}: parameter {name!r} is {describe(value)}; parameters are static and "
                f"must be {wanted}. Pass a Python value; under jax.jit name it in static_argnames."
            )
        try:
            return read(value)
        except FuelError as error:
            raise type(error)(str(error).replace("cast:", f"{self.op}:", 1)) from None
        except (TypeError, ValueError, OverflowError):
            raise ArgumentError(
                f"{self.op}: parameter {name!r} is {shorten(value)}; it must be {wanted}."
            ) from None

    def _usage(self) -> str:
        return f"Call it as {self.usage()}."

    def usage(self) -> str:
        """``rms_norm_last_dim(x[*batch d], *, eps=1e-06)``."""
        stars = "*" if self.variadic else ""
        operands = [f"{stars}{operand}" for operand in self.operands.values()]
        python = self.python.parameters
        params = [str(python[n].replace(annotation=inspect.Parameter.empty)) for n in self.params]
        marker = ["*"] if params and not self.variadic else []
        return f"{self.op}({', '.join([*operands, *marker, *params])})"

    # -- checking --------------------------------------------------------------------------

    def check(self, arrays: Sequence[Any]) -> None:
        """Raise unless every operand fits its annotation, all of them together."""
        names = self.names(arrays)
        axes: Axes = {}
        shared: tuple[str, Any] | None = None
        for name, value in zip(names, arrays, strict=True):
            operand = self.operands[self.inputs[0] if self.variadic else name]
            if value is None or not operand.forms:
                continue
            forms = [form for form in operand.forms if value.dtype.name in form.dtypes]
            if not forms:
                self._refuse_dtype(operand, value)
            complaints = [fit(form.dim_str, value.shape, axes, name) for form in forms]
            if all(complaints):
                expected = "  ".join(map(str, self.operands.values()))
                received = "  ".join(
                    f"{n}: {describe(v)}" for n, v in zip(names, arrays, strict=True)
                )
                raise ShapeError(
                    f"{self.op}: {name!r} is {describe(value)}; {complaints[-1]}.\n"
                    f"  expected  {expected}\n  received  {received}"
                )
            if forms[0].dtype.shared:
                shared = shared or (name, value.dtype)
                if value.dtype != shared[1]:
                    raise ShapeError(
                        f"{self.op}: {name!r} is {describe(value)} and {shared[0]!r} is "
                        f"{shared[1].name}; operands share one dtype, nothing is promoted. "
                        f"Cast with fuel_jax.cast({name}, dtype={shared[1].name!r})."
                    )

    def names(self, arrays: Sequence[Any]) -> Sequence[str]:
        """A name for each array; variadic operands are numbered."""
        return (
            [f"{self.inputs[0]}[{i}]" for i in range(len(arrays))] if self.variadic else self.inputs
        )

    def _refuse_dtype(self, operand: Operand, value: Any) -> typing.NoReturn:
        nearest = operand.dtypes[0]
        raise ShapeError(
            f"{self.op}: {operand.name!r} is {describe(value)}; its dtype must be one of "
            f"{', '.join(operand.dtypes)}. "
            f"Cast with fuel_jax.cast({operand.name}, dtype={nearest!r})."
        )


def fit(dims: str, shape: tuple[int, ...], axes: Axes, operand: str) -> str | None:
    """Bind the axes named in ``dims`` to ``shape``; what is wrong, or None.

    ``dims`` holds names, numbers, and at most one ``*name``, for any number of axes, or ``...``,
    for axes that no other operand shares.
    """
    tokens = dims.split()
    stars = [i for i, token in enumerate(tokens) if token.startswith("*") or token == "..."]
    fixed = len(tokens) - len(stars)
    if len(shape) < fixed or (not stars and len(shape) > fixed):
        at_least = "at least " if stars else ""
        return f"it has {len(shape)} axes, wanted {at_least}{fixed}: [{dims.strip()}]"
    if stars:
        at, many = stars[0], len(shape) - fixed
        parts = [*shape[:at], shape[at : at + many], *shape[at + many :]]
    else:
        parts = list(shape)
    found: Axes = {}
    for token, extent in zip(tokens, parts, strict=True):
        axis = token.lstrip("*")
        if axis == "...":
            continue
        if axis.isdigit():
            if extent != int(axis):
                return f"its axis of {extent} must be {axis}: [{dims.strip()}]"
            continue
        known = axes.get(axis) or found.get(axis)
        if known is None:
            found[axis] = (extent, operand)
        elif known[0] != extent:
            return disagreement(token, extent, known, operand)
    axes.update(found)
    return None


def disagreement(token: str, extent: Any, known: tuple[Any, str], operand: str) -> str:
    """Two operands that give one axis two extents."""
    if not token.startswith("*"):
        return f"its axis {token} is {extent}, but {token} is {known[0]} in {known[1]!r}"
    return (
        f"its axes {token} are {extent}, but {known[0]} in {known[1]!r}; nothing is broadcast. "
        f"Spell it: jnp.broadcast_to({operand}, {known[0]})"
    )


def shorten(value: Any) -> str:
    """``repr``, cut: an error is read in a terminal."""
    text = describe(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
