"""The cases of ONNX's own backend test suite, which come with PyPI's ``onnx``."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

Test = tuple[TestCase, GraphProto, list[Any], list[Any]]  # with its inputs and outputs


def on_host(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op that gives NumPy arrays: what an adapter does around the call compiles nothing."""
    host = lambda y: y if isinstance(y, jax.core.Tracer) else np.asarray(y)
    return lambda *arrays, **params: jax.tree.map(host, op(*arrays, **params))


@dataclasses.dataclass(frozen=True)
class Case:
    """One node: its operands and attributes, and what it must give."""

    name: str
    node: NodeProto
    inputs: tuple[np.ndarray | None, ...]  # None where an optional one is left out
    outputs: tuple[np.ndarray | None, ...]  # None where nobody asks for it
    rtol: float
    atol: float

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        return {a.name: attribute(a) for a in self.node.attribute}

    def check(self, results: Any) -> None:
        """Every output asked for, at the case's own tolerance; integers exactly."""
        results = results if isinstance(results, tuple) else (results,)
        assert len(results) >= len(self.outputs)
        for i, (got, want) in enumerate(zip(results, self.outputs, strict=False)):
            if want is None:
                continue
            got = got() if callable(got) else got  # one that is worth computing only if asked for
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if want.dtype.kind in "iub":
                np.testing.assert_array_equal(got, want)
            elif want.dtype.name == "bfloat16" and not self.close(got, want):
                exact = self.in_float64()[i]
                assert distance(got, exact) <= distance(want, exact)
            else:
                assert self.close(got, want), np.c_[np.ravel(got), np.ravel(want)]

    def close(self, got: np.ndarray, want: np.ndarray) -> bool:
        got, want = (x.astype(np.float64) for x in (got, want))
        return np.allclose(got, want, self.rtol, self.atol, equal_nan=True)

    def in_float64(self) -> list[np.ndarray]:
        """What ONNX's reference makes of it in float64.

        BF16 keeps eight bits, 2⁻⁹, fewer than the tolerance of 10⁻³ asks for, and the expected
        output is rounded at every step: there ours may not be further from this than it is.
        """
        floats = {"float16", "bfloat16", "float32"}
        given = {
            name: x.astype(np.float64) if x.dtype.name in floats else x
            for name, x in zip(self.node.input, self.inputs, strict=True)
            if x is not None
        }
        return ReferenceEvaluator(self.node).run(None, given)


def distance(x: np.ndarray, exact: np.ndarray) -> float:
    return np.abs(x.astype(np.float64) - exact).max()


def array(value: Any) -> Any:
    """A tensor in a message is an array; a sequence of arrays stays one."""
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def attribute(proto: AttributeProto) -> Any:
    """A number, a string, a list of numbers, a subgraph."""
    value = helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def built() -> Iterator[Test]:
    """Node cases.

    Left out: the same data once more through a node's definition in terms of others
    (``_expanded``), and models of more than one node.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX's NumPy, on its casts and empty windows
        tests = collect_testcases(None)
    for test in tests:
        if test.model and len(test.model.graph.node) == 1 and "_expanded" not in test.name:
            for inputs, outputs in test.data_sets:
                yield test, test.model.graph, inputs, outputs


def stored() -> Iterator[Test]:
    """Convolutions that PyTorch exported and ran: no node case has groups or dilations."""
    tests = [
        t for kind in ("converted", "operator") for t in load_model_tests(kind=f"pytorch-{kind}")
    ]
    for test in sorted(tests, key=lambda test: test.name):
        if "conv" in test.name.lower():
            graph, data = (
                onnx.load(f"{test.model_dir}/model.onnx").graph,
                f"{test.model_dir}/test_data_set_0",
            )
            yield (
                test,
                graph,
                *([onnx.load_tensor(f"{data}/{f}_0.pb")] for f in ("input", "output")),
            )


@functools.cache
def cases() -> dict[str, list[Case]]:
    """By the node's type."""
    found: dict[str, list[Case]] = {}
    for test, graph, inputs, outputs in itertools.chain(built(), stored()):
        (node,) = graph.node
        given = {weight.name: array(weight) for weight in graph.initializer}
        names = [i.name for i in graph.input if i.name not in given]
        given |= zip(names, map(array, inputs), strict=True)
        wanted = dict(zip((o.name for o in graph.output), map(array, outputs), strict=True))
        case = Case(
            test.name.removeprefix("test_"),
            node,
            tuple(given.get(name) for name in node.input),
            tuple(wanted.get(name) for name in node.output),
            test.rtol,
            test.atol,
        )
        found.setdefault(node.op_type, []).append(case)
    return found
