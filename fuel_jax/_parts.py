"""Kernels that are split over devices: each device computes its part, by the op's rule.

XLA partitions plain ``jax.numpy`` by itself.  A kernel it cannot look into: on operands that are
split it would gather them all, and compute the whole on every device.  So a kernel is wrapped with
the op's rule.  Where types say how arrays are laid out (explicit mesh axes) so is the body: JAX
refuses ``jax.numpy`` that sums over an axis that is split, or whose loops carry what is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from ._choose import abstract
from ._sharding import Rule, Split, rule_of
from ._signature import Signature

P = ParamSpec("P")
R = TypeVar("R")

A_PART = jax.make_user_context(False)  # while one device's program is traced


def split(
    run: Callable[..., Any],
    part: Callable[..., Any],
    rule_of: Callable[..., Rule],
    plain: bool = False,
    interpreted: bool = False,
) -> Callable[..., Any]:
    """``run``, such that every device computes its own part where the operands are split.

    Args:
        run: the kernel; its arrays may be None.
        part: what serves a part, which is smaller.
        rule_of: the rule, of the arrays and what comes of them.
        plain: whether it is ``jax.numpy``, which XLA splits where no type says how.
        interpreted: whether a kernel may be interpreted.
    """

    def over_devices(*arrays: Any) -> Any:
        mesh = mesh_of(arrays)
        explicit = AxisType.Explicit in mesh.axis_types
        if mesh.manual_axes or A_PART.value:
            return run(*arrays)  # inside shard_map, or of a kernel: it is a part already
        if plain and not (explicit and any(map(is_split, arrays))):
            return run(*arrays)
        if not explicit and mesh.abstract_device and not is_here(mesh.abstract_device):
            return run(*arrays)  # a partitioner wants devices
        at = [i for i, x in enumerate(arrays) if x is not None]

        def present(f: Callable[..., Any], *given: Any) -> list[Any]:
            every = dict(zip(at, given, strict=True))
            return jax.tree.leaves(f(*(every.get(i) for i in range(len(arrays)))))

        given = [arrays[i] for i in at]
        part_of = functools.partial(present, part)
        if explicit:
            out = jax.eval_shape(run, *abstract(arrays))
            found = by_shard_map(part_of, rule_of(arrays, out), mesh, not interpreted, given)
        else:
            from jax.extend.core import jaxpr_as_fun  # 20 ms, of all of Pallas

            traced, out = jax.make_jaxpr(run, return_shape=True)(*arrays)
            found = by_partitioner(jaxpr_as_fun(traced), part_of, rule_of(arrays, out))(*given)
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return over_devices


def splitting(splits: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a kernel's heart, annotated like an op, where an op cannot be split as a whole.

    A mean over rows is none of means over parts of them; what is found for each row is split, and
    the mean is left to XLA.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        signature = Signature(f, f.__name__)

        def rule(arrays: Sequence[Any], out: Any) -> Rule:
            results = out if isinstance(out, tuple) else (out,)
            names = [f"y{i}" for i in range(len(results))]
            return rule_of(signature, splits, names, arrays, results)

        @functools.wraps(f)
        def run(*arrays: P.args, **params: P.kwargs) -> R:
            whole = functools.partial(f, **params)
            interpreted = bool(params.get("interpret"))
            return split(whole, whole, rule, interpreted=interpreted)(*arrays)

        return run

    return decorate


def linear(
    forth: Callable[..., Any],
    back: Callable[..., Any],
    rule_of: Callable[..., Rule],
    x: Any,
    *at: Any,
) -> Any:
    """``forth(x, *at)``, linear in x, whose transpose is ``back(y, *at)``: each by the rule.

    It is made part of the solution of a linear system,  u = x  and  v − forth(u) = 0:  for one JAX
    takes the word how its transpose is solved, and under ``vmap``, too.
    """
    y = jax.eval_shape(forth, x, *at)
    there = split(forth, forth, rule_of)
    home = split(back, back, lambda arrays, out: rule_of((out, *at), arrays[0]).transposed)

    def nothing(x: Any) -> Any:
        """0, and linear in x as JAX sees it, in another shape: a sum of no elements."""
        return jnp.broadcast_to(jnp.sum(x[:0]), y.shape)

    u, v = lax.custom_linear_solve(
        lambda b: (b[0], b[1] - forth(b[0], *at)),
        (x, nothing(x)),
        lambda _, b: (b[0], there(b[0], *at)),
        lambda _, b: (home(b[1], *at), b[1]),  # of b[0] comes nothing
    )
    return jnp.where(True, v, nothing(u))  # so that JAX finds a cotangent for all of the system


def mesh_of(arrays: Sequence[Any]) -> Any:
    """The mesh around a call, or outside of any, that of explicit axes in the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = [jax.typeof(x).sharding.mesh for x in arrays if x is not None]
        return next((m for m in meshes if AxisType.Explicit in m.axis_types), mesh)
    return mesh


def is_split(x: Any) -> bool:
    """Whether the type of an array says so."""
    return x is not None and any(jax.typeof(x).sharding.spec)


def is_here(device: Any) -> bool:
    """Whether this machine has such devices: programs are lowered for others, too."""
    try:
        return any(d.device_kind == device.device_kind for d in jax.devices(device.platform))
    except RuntimeError:
        return False


def summed(part: Callable[..., list[Any]], rule: Rule, split: Split) -> Callable[..., list[Any]]:
    """What one device computes: its part, summed over the devices where it is one of a sum."""

    def local(*arrays: Any) -> list[Any]:
        with A_PART(True):
            found = part(*arrays)
        return [
            lax.psum(y, axes) if axes else y
            for y, axes in zip(found, rule.sums(split), strict=True)
        ]

    return local


def by_shard_map(
    part: Callable[..., list[Any]],
    rule: Rule,
    mesh: Any,
    checked: bool,
    arrays: Sequence[Any],
) -> list[Any]:
    """Where types say how arrays are laid out.

    ``checked`` is whether JAX checks what varies over which devices.  It cannot where a kernel is
    interpreted, and then sums gradients over mesh axes that split nothing, too.
    """

    def mapped(*arrays: Any) -> list[Any]:
        split = rule.split(mesh, [jax.typeof(x).sharding.spec for x in arrays])
        operands = rule.specs(rule.operands, split)
        given = [
            jax.sharding.reshard(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, operands, strict=True)
        ]
        results = rule.specs(rule.results, split)
        run = summed(part, rule, split)
        specs = {"in_specs": tuple(operands), "out_specs": results}
        varied = lambda *xs: run(*(vary_over(x, split) for x in xs))
        return jax.shard_map(varied, mesh=mesh, **specs, check_vma=checked)(*given)

    def wider(which: list[bool], size: int, *arrays: Any) -> list[Any]:
        axes = [0 if b else None for b in which]
        every = jax.vmap(part, in_axes=axes)
        return by_shard_map(every, rule.batched(which, size), mesh, checked, arrays)

    return mapping(mapped, wider, mapped)(*arrays)


def vary_over(x: Any, split: Split) -> Any:
    """``x``, one of each device's own: a derivative in a part is that part's."""
    axes = frozenset(axis for axes in split.values() for axis in axes)
    new = tuple(axes - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, new, to="varying") if new else x


def by_partitioner(
    run: Callable[..., list[Any]], part: Callable[..., list[Any]], rule: Rule
) -> Callable[..., list[Any]]:
    """Where XLA decides how arrays are laid out: the partitioner asks for the part's program."""
    call = custom_partitioning(jax.jit(run))  # which keeps the constants that ``run`` holds

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        specs = [x.sharding.spec for x in (*operands, *results)]
        split = rule.split(mesh, specs)
        named = lambda arrays: [NamedSharding(mesh, spec) for spec in rule.specs(arrays, split)]
        local = summed(part, rule, split)
        return mesh, local, named(rule.results), tuple(named(rule.operands))

    inner: Any = rule.inner_sizes
    call.def_partition(
        partition,
        sharding_rule=rule.text,
        need_replication_factors=rule.whole,
        **inner,
    )

    def wider(which: list[bool], size: int, *arrays: Any) -> list[Any]:
        axes = [0 if b else None for b in which]
        over = lambda f: jax.vmap(f, in_axes=axes)
        return by_partitioner(over(run), over(part), rule.batched(which, size))(*arrays)

    return mapping(call, wider, run)


def mapping(
    call: Callable[..., list[Any]], wider: Callable[..., list[Any]], run: Callable[..., list[Any]]
) -> Callable[..., Any]:
    """``call``, with derivatives of ``run``; ``wider`` under ``vmap``: its axis may be split, too.

    JAX would have all of the mapped axis on every device.
    """
    batched = jax.custom_batching.custom_vmap(lambda *arrays: call(*arrays))

    @batched.def_vmap
    def vmapped(size: int, which: list[bool], *arrays: Any) -> Any:
        found = wider(which, size, *arrays)
        return found, [True] * len(found)

    differentiable = jax.custom_jvp(lambda *arrays: batched(*arrays))

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return differentiable(*primals), jax.jvp(run, primals, tangents)[1]

    return differentiable
