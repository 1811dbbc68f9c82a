"""An op by ``shard_map``, checked against its rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from .._choose import PIN
from .._op import Op, P, R
from .._parameters import Call
from .._parts import summed
from .._sharding import Rule
from ..errors import ArgumentError


def sharded(op: Op[P, R], mesh: Mesh, specs: Sequence[PartitionSpec | None]) -> Callable[P, R]:
    """``op`` on operands that are split so:  each device computes its part.

    The results are laid out as the op's rule says; one that lacks an axis that is split is a sum
    over it, and is summed over the devices.  Differentiable.

    Args:
        op: what to compute.
        mesh: over which devices.
        specs: the layout of each operand, in order; None for one that is left out or not split.

    Returns:
        A function of the op's arguments.

    Raises:
        ArgumentError: the op cannot be split so; when called.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        params, arrays = op._bind(args, kwargs)
        out = op.out(*args, **kwargs)
        rule = op._rule(params, arrays, out)
        given = [(x, spec) for x, spec in zip(arrays, pad(specs, arrays), strict=True)]
        present = [(x, spec or PartitionSpec()) for x, spec in given if x is not None]
        asked = [tuple(spec) for _, spec in present]
        split = rule.split(mesh, asked)
        operands = rule.specs(rule.operands, split)
        if reason := objection(op, rule, mesh, asked, operands):
            raise ArgumentError(f"{op.name}: {reason}")

        def part(*parts: Any) -> list[Any]:
            it = iter(parts)
            whole = [None if x is None else next(it) for x in arrays]
            call = Call.of(rule.part(params, *whole), PIN.value)
            return jax.tree.leaves(op._jitted(call, *whole))

        mapped = jax.shard_map(
            summed(part, rule, split),
            mesh=mesh,
            in_specs=tuple(operands),
            out_specs=rule.specs(rule.results, split),
        )
        return jax.tree.unflatten(jax.tree.structure(out), mapped(*(x for x, _ in present)))

    return run


def pad(specs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """A layout for each operand; those at the end may be left out with them."""
    return [*specs, *[None] * (len(arrays) - len(specs))]


def objection(
    op: Op, rule: Rule, mesh: Mesh, asked: list[tuple[Any, ...]], found: list[PartitionSpec]
) -> str | None:
    """Why the op cannot be split as asked: an axis that must be whole, or two that disagree."""
    names = [n for n in op.inputs]
    for i, (spec, can) in enumerate(zip(asked, found, strict=True)):
        for axis, wanted in enumerate(spec):
            wanted = several(mesh, wanted)
            if wanted == several(mesh, can[axis] if axis < len(can) else None):
                continue
            devices = math.prod(mesh.shape[a] for a in wanted)
            free = ", ".join(rule.free) or "none"
            return (
                f"operand {i} ({names[min(i, len(names) - 1)]}) is to be split along axis {axis} "
                f"over {devices} devices, and cannot be: of {rule.text} the axes that may be split "
                f"are {free}, each by a number that divides it and alike in all operands. Give it "
                f"another layout, or leave that to jax.jit, which moves the data."
            )
    return None


def several(mesh: Mesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Those of a layout's mesh axes that have several devices; one device splits nothing."""
    named = (axes,) if isinstance(axes, str) else tuple(axes or ())
    return tuple(a for a in named if mesh.shape[a] > 1)
