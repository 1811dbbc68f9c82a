"""Every rule is true: an op of parts is the part of the op, or they are its terms."""

import functools
import pathlib
import re

import jax
import numpy as np
import pytest

import fuel_jax
from fuel_jax._op import as_tuple
from fuel_jax._sharding import Rule
from fuel_jax.registry import builtin

from ..contract import THOROUGH, as_arrays, fill


def halves(x, dims, factor, sizes):
    """``x`` cut in two along a factor; twice ``x`` if it lacks it."""
    for axis, factors in enumerate(dims):
        if factor in factors:
            assert factors[0] == factor, "only the outermost factor of an axis can be cut"
            at = x.shape[axis] // sizes[factor] * (sizes[factor] // 2)
            return np.split(x, [at], axis)
    return x, x


def joined(parts, dims, factor):
    """The parts one after the other along the factor, or their sum."""
    for axis, factors in enumerate(dims):
        if factor in factors:
            return np.concatenate(parts, axis)
    return np.add(*parts)


def check(op, params, arrays):
    """Number of factors cut."""
    body = jax.jit(functools.partial(op.body, **params))
    whole = as_tuple(body(*arrays))
    rule = op._rule(params, arrays, whole)
    sizes, at = dict(rule.sizes), [i for i, x in enumerate(arrays) if x is not None]
    cut = [f for f in sizes if f in rule.splits and sizes[f] > 1]
    for factor in cut:
        given = [list(arrays), list(arrays)]
        for i, dims in zip(at, rule.operands, strict=True):
            given[0][i], given[1][i] = halves(np.asarray(arrays[i]), dims, factor, sizes)
        parts = [as_tuple(body(*part)) for part in given]
        found = [y for y in zip(*parts, whole, strict=True) if y[-1] is not None]
        for (a, b, want), dims in zip(found, rule.results, strict=True):
            got = joined([np.asarray(a), np.asarray(b)], dims, factor)
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=factor)
    return len(cut)


def can_be_cut(op, example):
    """Convolutions' first example is of one image."""
    return op.splits and example[op.inputs[0]].shape[0] > 1


FIRST = {case.values[0].name: case for case in reversed(THOROUGH) if can_be_cut(*case.values)}


@pytest.mark.parametrize(("op", "example"), FIRST.values())
def test_parts_make_the_whole(op, example):
    f, arrays = fill(op, example, "float64")
    params, arrays = op._bind(as_arrays(arrays), f.keywords)
    assert check(op, params, arrays)
    if isinstance(getattr(op, "backward", None), fuel_jax.FusedOp):
        back = op.backward
        asked = params | op._returning_all()
        outputs = as_tuple(op.body(*arrays, **asked))
        pool = op._named(asked, arrays, outputs)
        pool |= op._cotangents(asked, tuple(0.3 * y for y in outputs))
        static = {n: asked[n] for n in back.params}
        assert check(back, static, [pool[n] for n in back.inputs])


def test_a_rule_in_shardy_s_notation():
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    q, k = f32((2, 8, 5, 4)), f32((2, 2, 6, 4))
    rule = fuel_jax.flash_attn.sharding(q, k, k, return_lse=True)
    assert rule.text == ("b (hk r) sq d, b hk sk d, b hk sk dv -> b (hk r) sq dv, b (hk r) sq")
    assert rule.free == ("b", "hk")
    assert rule.whole == ("r", "sq", "d", "sk", "dv")


def test_an_axis_that_devices_do_not_divide_stays_whole():
    rule = Rule(((("b",), ("n",)),), ((("b",), ("n",)),), frozenset("b"), (("b", 6), ("n", 8)))
    mesh = jax.sharding.AbstractMesh((4, 2), ("i", "j"))
    assert rule.split(mesh, [("i", "j")]) == {}
    assert rule.split(mesh, [("j", "i")]) == {"b": ("j",)}


def test_the_table_of_the_docs_is_current():
    page = (pathlib.Path(fuel_jax.__file__).parents[1] / "docs/parallel.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `.*` \| `(.*)` \|$", page, re.MULTILINE))
    ops = [op for op in builtin() if isinstance(getattr(op, "splits", None), str) and op.splits]
    axes = lambda op: [w for w in op.splits.partition("->")[0].split() if "=" not in w]
    assert rows == {op.name: " ".join(axes(op)) for op in ops if "backward" not in op.name}
