"""Every rule is true: on eight devices each op and its gradient are those of one, part by part."""

import contextlib
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
RULED = [op for op in several.every() if op.splits]
SEND = "attn", "conv", "gather", "linear", "matmul", "norm", "rope", "scan", "select"  # sums
ALONE = [op for op in RULED if any(word in op.name for word in SEND)]
TOGETHER = [op for op in RULED if op not in ALONE]
TWICE = 2.0  # promised errors: both results may be off


def splittable(op):
    """The first example with axes that may be split, the dtype that it gets, and those axes."""
    exact = x64_enabled() and "float64" in dtypes_of(op)
    dtype = "float64" if exact else dtypes_of(op)[0]
    free = lambda example: several.free(op, example, dtype)[:EIGHT]
    return next((e, dtype, free(e)) for e in op.examples() if free(e))


def sizes_of(count):
    """Of the axes of a mesh that splits so many."""
    return (*(2,) * (count - 1), 2 ** (EIGHT + 1 - count))


def mesh_of(sizes, kind):
    return jax.make_mesh(sizes, tuple("ijk"[: len(sizes)]), axis_types=(kind,) * len(sizes))


@functools.cache
def spread(op):
    """An op's example that can be split, with parts for eight devices of axes that may be.

    The kernel is the one that serves; ``split`` has the mesh axis of each.
    """
    example, dtype, factors = splittable(op)
    devices = dict(zip(factors, sizes_of(len(factors)), strict=True))
    example = several.stretched(op, example, dtype, devices)
    arrays, params = filled(op, example, dtype)
    serves = functools.partial(_check.serves, op, platform=_check.platform_here())
    kernel = next(k for k in op.kernels if serves(k, arrays=arrays, params=params))
    rule = op.sharding(*arrays, **params)
    case = several.Split(op, kernel, factors[0], arrays, params, rule)
    return case, {f: (axis,) for f, axis in zip(factors, "ijk", strict=False)}


def laid_out(case, split, mesh):
    """Operands and cotangents."""
    lay = lambda xs, dims: [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(xs, case.rule.specs(dims, split), strict=False)
    ]
    given, cotangents = several.operands(case)
    return lay(given, case.rule.operands), lay(cotangents, case.rule.results)


def promised(case, split, mesh):
    """Bytes of sums: results, and gradients, which are laid out as their operands."""
    rule, given, at = case.rule, several.operands(case)[0], case.wrt()
    of = Rule((), tuple(rule.operands[i] for i in at), rule.splits, rule.sizes)
    sums = predicted(rule, split, mesh, case.results)
    return sums + predicted(of, split, mesh, [given[i] for i in at])


def by_hand(case, split, mesh):
    """The op by ``shard_map``."""
    specs = case.rule.specs(case.rule.operands, split)
    specs = dict(zip(case.present, specs, strict=False))  # numbers come last, and have no axes
    return sharded(case.op, mesh, [specs.get(i) for i in range(len(case.arrays))])


def program(cases, fs):
    """Results and gradients of all, one after the other."""

    def of(case, f):
        def whole(*given):
            every = dict(enumerate(case.arrays)) | dict(zip(case.present, given, strict=True))
            with PIN(case.kernel.name):
                return f(*every.values(), **case.params)

        return several.with_gradient(whole, case.wrt())

    each = [of(case, f) for case, f in zip(cases, fs, strict=True)]
    return jax.jit(lambda given: [f(*its) for f, its in zip(each, given, strict=True)])


def judge(ops):
    """By ``jit``, where XLA decides and where types say how arrays are laid out; ``shard_map``.

    All in one program: values, gradients, and the bytes of sums that the rules promise.
    """
    cases, splits = zip(*map(spread, ops), strict=True)
    sizes = sizes_of(len(splits[0]))
    auto, explicit = mesh_of(sizes, AxisType.Auto), mesh_of(sizes, AxisType.Explicit)
    hands = [by_hand(case, split, auto) for case, split in zip(cases, splits, strict=True)]
    most = sum(promised(case, split, auto) for case, split in zip(cases, splits, strict=True))
    want = jax.device_get(program(cases, ops)([several.operands(case) for case in cases]))
    for way, fs, mesh in (("jit", ops, auto), ("types", ops, explicit), ("shard_map", hands, auto)):
        laid = [laid_out(case, split, mesh) for case, split in zip(cases, splits, strict=True)]
        run = program(cases, fs)
        with jax.set_mesh(mesh) if mesh is explicit else contextlib.nullcontext():
            compiled = run.lower(laid).compile()
        whole = jax.jit(lambda found: found, out_shardings=NamedSharding(mesh, P()))
        got = jax.device_get(whole(compiled(laid)))  # of other processes, too
        for case, mine, its in zip(cases, got, want, strict=True):
            excess = _check.excess(mine, its, case.op.precision.tolerance)
            assert excess <= TWICE, f"{case.op.name} by {way}"
        moved = sent(compiled.as_text())
        assert set(moved) <= {"all-reduce"}, way
        if way == "jit" and len(ops) == 1 and cases[0].kernel is ops[0].kernels[-1]:
            assert sum(moved.values()) <= 2 * most  # two terms apart, or not what XLA has whole
        else:
            assert sum(moved.values()) == most, way


@pytest.mark.parametrize("op", ALONE, ids=lambda op: op.name)
def test_on_eight_devices(op):
    """0 all-gathers; all-reduces of what the rule says is a sum, forward and backward, only."""
    judge([op])


@pytest.mark.parametrize("axes", range(1, EIGHT + 1))
def test_ops_that_send_nothing(axes):
    """Those that may be split along so many axes; by one program, for compiling takes longest."""
    judge([op for op in TOGETHER if len(spread(op)[1]) == axes])


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


def test_the_tables_of_the_docs_are_current():
    """Axes by name; ops whose axes depend on parameters; and those that have no rule."""
    page = (pathlib.Path(fuel_jax.__file__).parents[1] / "docs/parallel.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `.*` \| `(.*)` \|$", page, re.MULTILINE))
    ops = [op for op in builtin() if getattr(op, "by_parts", False) and isinstance(op.splits, str)]
    axes = lambda op: [w for w in op.splits.partition("->")[0].split() if "=" not in w]
    assert rows == {op.name: " ".join(axes(op)) for op in ops if "backward" not in op.name}
    named = set(re.findall(r"`(\w+)`", page[page.index("| op | may be split |") :]))
    assert named >= {op.name for op in RULED if callable(op.splits)}
    (without,) = re.findall(r"^No rule: .*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", without)) == {
        op.name for op in several.every() if not op.splits
    }
