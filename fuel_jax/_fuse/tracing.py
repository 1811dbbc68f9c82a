"""A call as a jaxpr, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


class Traced:
    """A call, traced: arrays are its inputs, everything else is part of the program."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        self.arrays = [x for x in leaves if is_array(x)]
        where = [i for i, x in enumerate(leaves) if is_array(x)]
        self.others: list[Any] = []
        self.tree: Any = None

        def flat(*arrays: Any) -> list[Any]:
            given = list(leaves)
            for i, x in zip(where, arrays, strict=True):
                given[i] = x
            args, kwargs = jax.tree.unflatten(tree, given)
            out, self.tree = jax.tree.flatten(fn(*args, **kwargs))
            self.others = [None if is_value(x) else x for x in out]
            return [x for x in out if is_value(x)]

        self.jaxpr = jax.make_jaxpr(flat)(*self.arrays)

    def result(self, values: Sequence[Any]) -> Any:
        """The function's result, of the program's."""
        given = iter(values)
        return jax.tree.unflatten(self.tree, [next(given) if x is None else x for x in self.others])


def is_array(x: Any) -> bool:
    """Whether an argument is traced.  Python numbers are not: a program may depend on them."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_value(x: Any) -> bool:
    """Whether a result is one of the program's."""
    return is_array(x) or isinstance(x, int | float | complex)
