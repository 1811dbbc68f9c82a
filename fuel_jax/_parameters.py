"""How the values of an op's parameters are read: by their annotations, and by nothing else.

A value is stored in one form, whichever way it was written, for it is part of a compilation key.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .types import DType, Pair, dtype_named


class Call(NamedTuple):
    """The static half of a call; hashable, it keys the caches of ``jit`` and ``custom_vjp``.

    1, 1.0 and True are equal and hash alike, and select other programs; so do 0.0 and −0.0; and NaN
    is not equal to itself.  Hence the types, and floats by their digits.
    """

    key: tuple[tuple[str, type, Any], ...]
    pin: str | None

    @classmethod
    def of(cls, params: dict[str, Any], pin: str | None) -> Call:
        """The call with these parameters, pinned or not."""
        return cls(
            tuple([(n, type(v), v.hex() if type(v) is float else v) for n, v in params.items()]),
            pin,
        )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, by name."""
        return {n: float.fromhex(v) if t is float else v for n, t, v in self.key}


# What is stored of a value, or TypeError or ValueError; and what is wanted, in words.
Reader = tuple[Callable[[Any], Any], str]


def reader(note: Any) -> Reader:
    """How values of a parameter annotated ``note`` are read."""
    if note in SCALARS:
        return SCALARS[note]
    origin, inner = typing.get_origin(note), typing.get_args(note)
    if origin is typing.Literal:
        return functools.partial(one_of, inner), f"one of {', '.join(map(repr, inner))}"
    if origin in (typing.Union, types.UnionType):
        readers = [reader(a) for a in inner if a is not type(None)]
        optional = " or None" if type(None) in inner else ""
        read = functools.partial(first_of, [r for r, _ in readers], bool(optional))
        return read, " or ".join(wanted for _, wanted in readers) + optional
    if origin is tuple:
        variadic = inner[-1] is Ellipsis
        # One int for both is for a lone pair: in a sequence, (1, 2) could mean either.
        of, wanted = BOTH if inner[0] == Pair else reader(inner[0])
        count = None if variadic else len(inner)
        number = "" if count is None else f"{count} of "
        return functools.partial(sequence, of, count), f"a sequence, {number}{wanted}"
    return hashable, "hashable"


def integer(value: Any) -> int:
    """An int; bools are not numbers here."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


def real(value: Any) -> float:
    """A float from any real number."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError
    return float(value)


def boolean(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError
    return value


def one_of(allowed: tuple[Any, ...], value: Any) -> Any:
    """A value of a fixed set."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError
    return value


def first_of(readers: list[Callable[[Any], Any]], optional: bool, value: Any) -> Any:
    """Whatever the first reader that accepts it makes of it."""
    if value is None and optional:
        return None
    for read in readers:
        try:
            return read(value)
        except (TypeError, ValueError):
            continue
    raise TypeError


def sequence(of: Callable[[Any], Any], count: int | None, value: Any) -> tuple[Any, ...]:
    """A tuple of any sequence's elements."""
    if isinstance(value, (str, bytes)):
        raise TypeError
    items = tuple(of(item) for item in value)
    if count is not None and len(items) != count:
        raise ValueError
    return items


def pair(value: Any) -> tuple[int, int]:
    """(vertical, horizontal); one int stands for both."""
    if hasattr(value, "__index__"):
        both = integer(value)
        return both, both
    vertical, horizontal = map(integer, value)
    return vertical, horizontal


def hashable(value: Any) -> Any:
    """Anything that can be part of a cache key."""
    if isinstance(value, list):
        value = tuple(value)
    hash(value)
    return value


BOTH: Reader = functools.partial(sequence, integer, 2), "pairs of ints"
SCALARS: dict[Any, Reader] = {
    int: (integer, "an int"),
    float: (real, "a number"),
    bool: (boolean, "True or False"),
    str: (text, "a string"),
    Pair: (pair, "an int or a pair of ints"),
    DType: (dtype_named, "a dtype"),
}
