"""The node cases of ONNX's own backend test suite: PyPI ``onnx`` builds them, nothing is stored."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator


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


@functools.cache
def cases() -> dict[str, list[Case]]:
    """By the node's type.

    Left out: the same data once more through a node's definition in terms of others
    (``_expanded``), and models of more than one node.
    """
    found: dict[str, list[Case]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX's NumPy, on its casts and empty windows
        tests = collect_testcases(None)
    for test in tests:
        if test.model is None or len(test.model.graph.node) != 1 or "_expanded" in test.name:
            continue
        graph, node = test.model.graph, test.model.graph.node[0]
        for inputs, outputs in test.data_sets:
            given = dict(zip((i.name for i in graph.input), map(array, inputs), strict=True))
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
