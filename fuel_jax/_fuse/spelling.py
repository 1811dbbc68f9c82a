"""One way in which people write an op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Spelling:
    """Plain code that means an op: what to look for, and what to call in its place."""

    name: str  # of the op
    write: Callable[..., Any]  # operands and parameters by keyword
    axes: Mapping[str, tuple[str, ...]]  # of each operand; ``*name`` is several, ``name/2`` half
    call: Callable[..., Any]  # same arguments, same result, by the op
    holes: Mapping[str, type] = dataclasses.field(default_factory=dict)  # parameters to be found
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # parameters of this one
    dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of operands, if no float
    last: str | None = None  # an axis that is the last one, or the op is not worth it
    needs: frozenset[str] = frozenset()  # operations without which there is no point in looking
    why_not: str | None = None  # why the op cannot stand here, for the report

    def dtype(self, name: str) -> Any:
        """That the spelling is traced with: float widths leave no trace in a term."""
        return self.dtypes.get(name, jnp.float32)
