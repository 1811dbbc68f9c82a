"""Every rule is true: on eight devices each op and its gradient are those of one, part by part."""

import functools
import pathlib
import re

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import fuel_jax
from fuel_jax import _check
from fuel_jax._choose import PIN
from fuel_jax._examples import dtypes_of, filled
from fuel_jax._sharding import Rule
from fuel_jax.judge import several
from fuel_jax.parallel import sharded
from fuel_jax.registry import builtin
from fuel_jax.types import x64_enabled

from .counted import predicted, sent

EIGHT = 3  # factors of two: as many axes can be split
RULED = [op for op in several.every() if op.splits and not op.signature.variadic]
OPS = [op for op in RULED if op.by_parts]
PLAIN = [op for op in RULED if not op.by_parts]  # of which XLA splits what is jax.numpy
TWICE = 2.0  # promised errors: both results may be off


def mesh_of(sizes, kind):
    return jax.make_mesh(sizes, tuple("ijk"[: len(sizes)]), axis_types=(kind,) * len(sizes))


def spread(op):
    """An op's example that can be split, with parts for eight devices of every axis that may be.

    The kernel is the one that serves; ``split`` has the mesh axis of each, ``sizes`` its devices.
    """
    exact = x64_enabled() and "float64" in dtypes_of(op)
    dtype = "float64" if exact else dtypes_of(op)[0]
    example = next(e for e in op.examples() if several.free(op, e, dtype))
    factors = several.free(op, example, dtype)[:EIGHT]
    sizes = (*(2 for _ in factors[1:]), 2 ** (EIGHT + 1 - len(factors)))
    for factor, size in zip(factors, sizes, strict=True):
        example = several.stretched(op, example, dtype, factor, size)
    arrays, params = filled(op, example, dtype)
    serves = functools.partial(_check.serves, op, platform=_check.platform_here())
    kernel = next(k for k in op.kernels if serves(k, arrays=arrays, params=params))
    rule = op.sharding(*arrays, **params)
    case = several.Split(op, kernel, factors[0], arrays, params, rule)
    return case, {f: (axis,) for f, axis in zip(factors, "ijk", strict=False)}, sizes


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_on_eight_devices(op):
    """0 all-gathers; all-reduces of what the rule says is a sum, forward and backward, only.

    By ``jit`` where XLA decides and where types say how arrays are laid out, and by ``shard_map``.
    """
    case, split, sizes = spread(op)
    rule, given, cotangents = case.rule, *several.operands(case)

    def program(f):
        def whole(*given):
            every = dict(enumerate(case.arrays)) | dict(zip(case.present, given, strict=True))
            with PIN(case.kernel.name):
                return f(*every.values(), **case.params)

        return jax.jit(several.with_gradient(whole, case.wrt()))

    def placed(mesh):
        lay = lambda xs, dims: [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(xs, rule.specs(dims, split), strict=False)
        ]
        return lay(given, rule.operands), lay(cotangents, rule.results)

    gradients = Rule((), tuple(rule.operands[i] for i in case.wrt()), rule.splits, rule.sizes)
    want = jax.device_get(program(op)(given, cotangents))
    auto, explicit = mesh_of(sizes, AxisType.Auto), mesh_of(sizes, AxisType.Explicit)
    promised = predicted(rule, split, auto, case.results)
    promised += predicted(gradients, split, auto, [given[i] for i in case.wrt()])
    specs = dict(zip(case.present, rule.specs(rule.operands, split), strict=True))
    by_hand = sharded(op, auto, [specs.get(i) for i in range(len(case.arrays))])
    for way, f, mesh in (("jit", op, auto), ("types", op, explicit), ("shard_map", by_hand, auto)):
        laid = placed(mesh)
        compiled = program(f).lower(*laid).compile()
        whole = jax.jit(lambda found: found, out_shardings=NamedSharding(mesh, P()))
        got = jax.device_get(whole(compiled(*laid)))  # of other processes, too
        assert _check.excess(got, want, op.precision.tolerance) <= TWICE, way
        found, plain = sent(compiled.as_text()), case.kernel is op.kernels[-1]
        assert set(found) <= {"all-reduce"}, way
        if way == "jit" and plain:  # XLA may sum two terms apart, or not what it has whole
            assert sum(found.values()) <= 2 * promised
        else:
            assert sum(found.values()) == promised, way


@pytest.mark.parametrize("op", PLAIN, ids=lambda op: op.name)
def test_plain_ops_on_eight_devices(op):
    """Nothing is sent, whether XLA splits the op or ``shard_map`` does by its rule."""
    case, split, sizes = spread(op)
    mesh, at = mesh_of(sizes, AxisType.Auto), dict(enumerate(case.arrays))
    specs = dict(zip(case.present, case.rule.specs(case.rule.operands, split), strict=True))
    laid = [jax.device_put(at[i], NamedSharding(mesh, specs[i])) for i in case.present]
    want = jax.device_get(jax.jit(functools.partial(op, **case.params))(*case.arrays))
    by_hand = sharded(op, mesh, [specs.get(i) for i in range(len(case.arrays))])
    for f in (op, by_hand):
        compiled = jax.jit(functools.partial(f, **case.params)).lower(*laid).compile()
        got = jax.device_get(compiled(*laid))
        assert _check.excess(got, want, op.precision.tolerance) <= TWICE
        assert not sent(compiled.as_text())


def test_a_rule_in_shardy_s_notation():
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    q, k = f32((2, 8, 5, 4)), f32((2, 2, 6, 4))
    rule = fuel_jax.flash_attn.sharding(q, k, k, return_lse=True)
    assert rule.text == ("b (hk r) sq d, b hk sk d, b hk sk dv -> b (hk r) sq dv, b (hk r) sq")
    assert rule.free == ("b", "hk")
    assert rule.whole == ("r", "sq", "d", "sk", "dv")


def test_an_axis_that_devices_do_not_divide_stays_whole():
    rule = Rule(((("b",), ("n",)),), ((("b",), ("n",)),), frozenset("b"), (("b", 6), ("n", 8)))
    mesh = AbstractMesh((4, 2), ("i", "j"))
    assert rule.split(mesh, [("i", "j")]) == {}
    assert rule.split(mesh, [("j", "i")]) == {"b": ("j",)}


def test_the_table_of_the_docs_is_current():
    page = (pathlib.Path(fuel_jax.__file__).parents[1] / "docs/parallel.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `.*` \| `(.*)` \|$", page, re.MULTILINE))
    ops = [op for op in builtin() if getattr(op, "by_parts", False) and isinstance(op.splits, str)]
    axes = lambda op: [w for w in op.splits.partition("->")[0].split() if "=" not in w]
    assert rows == {op.name: " ".join(axes(op)) for op in ops if "backward" not in op.name}
