"""What type checkers and editors are told of calls, and that it is so.

Read twice: pyright takes this file as a user's (``make lint``), where every ``assert_type`` must
hold and every ``pyright: ignore`` must be needed; and it is run.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

import pathlib
from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, ShapeDtypeStruct
from jax.sharding import Mesh, PartitionSpec

import fuel_jax
from fuel_jax import judge, parallel
from fuel_jax._choose import Explanation

X = jnp.ones((2, 3), jnp.float32)
Q = jnp.ones((1, 1, 2, 3), jnp.float32)
TARGETS = jnp.zeros(2, jnp.int32)
MESH = Mesh(np.array(jax.devices()[:1]), ("all",))


def traced(test: Callable[[], Any]) -> Callable[[], None]:
    """The test, its arrays without values."""

    def run() -> None:
        jax.eval_shape(test)

    return run


def is_array(x: Array) -> bool:
    return isinstance(x, Array)


def are_arrays(xs: tuple[Array, Array]) -> bool:
    return len(xs) == 2 and all(map(is_array, xs))


@traced
def test_an_op_returns_an_array():
    assert is_array(assert_type(fuel_jax.exp(x=X), Array))
    assert is_array(assert_type(fuel_jax.add(a=X, b=X), Array))
    assert is_array(assert_type(fuel_jax.eq(X, X), Array))
    assert is_array(assert_type(fuel_jax.clamp(X, min=0, max=1), Array))
    assert is_array(assert_type(fuel_jax.exp_inplace(X), Array))
    assert is_array(assert_type(fuel_jax.clamp_inplace(X, min=0, max=1), Array))
    assert is_array(assert_type(fuel_jax.matmul(X, X.T), Array))
    assert is_array(assert_type(fuel_jax.softmax_last_dim(X), Array))
    assert is_array(assert_type(fuel_jax.rms_norm_last_dim(X, eps=1e-6), Array))
    assert is_array(assert_type(fuel_jax.softmax_last_dim.decompose(X), Array))
    assert is_array(assert_type(fuel_jax.softmax_last_dim.using("xla")(X), Array))
    assert is_array(assert_type(fuel_jax.fuse(lambda: X)(), Array))
    assert are_arrays(assert_type(fuel_jax.nonzero_indices(X), tuple[Array, Array]))


@traced
def test_return_lse_makes_a_pair():
    assert is_array(assert_type(fuel_jax.flash_attn(Q, Q, Q), Array))
    pair = fuel_jax.flash_attn(Q, Q, Q, causal=True, return_lse=True)
    assert are_arrays(assert_type(pair, tuple[Array, Array]))
    assert is_array(assert_type(fuel_jax.fused_softmax_cross_entropy(X, TARGETS), Array))
    pair = fuel_jax.fused_softmax_cross_entropy(X, TARGETS, return_lse=True)
    assert are_arrays(assert_type(pair, tuple[Array, Array]))

    def of_flag(lse: bool) -> Array:
        y = fuel_jax.flash_attn(Q, Q, Q, return_lse=lse)
        return assert_type(y, tuple[Array, Array] | Array)[0]

    assert of_flag(True).shape == Q.shape
    assert of_flag(False).shape == Q.shape[1:]


@traced
def test_on_parts():
    def parts(q: Array, logits: Array, targets: Array) -> tuple[Array, Array]:
        o = assert_type(parallel.ring_attention(q, q, q, axis="all"), Array)
        pair = parallel.ring_attention(q, q, q, axis="all", return_lse=True)
        assert are_arrays(assert_type(pair, tuple[Array, Array]))
        pair = parallel.cross_entropy(logits, targets, axis="all", return_lse=True)
        assert are_arrays(assert_type(pair, tuple[Array, Array]))
        return o, assert_type(parallel.cross_entropy(logits, targets, axis="all"), Array)

    split, whole = PartitionSpec(None, None, "all"), PartitionSpec()
    specs = (split, PartitionSpec(None, "all"), whole)
    run = jax.shard_map(parts, mesh=MESH, in_specs=specs, out_specs=(split, whole))
    assert are_arrays(run(Q, X, TARGETS))
    two = Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows = parallel.sharded(fuel_jax.rms_norm_last_dim, two, [PartitionSpec("rows")])
    assert is_array(assert_type(rows(X, eps=1e-6), Array))


def test_an_op_is_asked_about_arrays_that_are_not_there():
    x, q = (ShapeDtypeStruct(y.shape, y.dtype) for y in (X, Q))
    assert fuel_jax.softmax_last_dim.out(x).shape == (2, 3)
    explained = assert_type(fuel_jax.flash_attn.explain(q, q, q, causal=True), Explanation)
    assert "flash_attn" in str(explained)
    assert assert_type(fuel_jax.runtime_fused.explain("softmax_last_dim", x), Explanation)


@traced
def test_a_cache_is_written_as_it_is_called():
    y = fuel_jax.write_slice(X, X[:1], ranges=((0, 1), (0, 3)), dyn_offset=(0, 1))
    assert is_array(assert_type(y, Array))
    with pytest.raises(fuel_jax.SignatureError, match="start"):
        fuel_jax.write_slice(X, X, ranges=((0, 2), (0, 3)), start=1)  # pyright: ignore[reportCallIssue]


@traced
def test_any_sequence_will_do_and_one_int_for_a_pair():
    image, w = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 2, 2))
    assert fuel_jax.conv2d(image, w, stride=2, padding=[0, 2]).shape == (1, 1, 2, 4)
    assert fuel_jax.conv_transpose2d(image, w, stride=(2, 1), output_padding=0).shape[2] == 8
    assert fuel_jax.reduce_sum_to(X, shape=[2, 1]).shape == (2, 1)
    assert fuel_jax.mean_reduce(X, dims=[0]).shape == fuel_jax.mean_reduce(X, dims=0).shape
    assert fuel_jax.pad(X, padding=[(0, 1), (1, 0)]).shape == (3, 4)
    assert fuel_jax.write_slice(X, X[:1], ranges=[[0, 1], [0, 3]]).shape == X.shape
    assert fuel_jax.cast(X, dtype="F16").dtype == fuel_jax.cast(X, dtype=jnp.float16).dtype


@traced
def test_what_has_no_such_parameter():
    with pytest.raises(fuel_jax.SignatureError, match="'x' is missing"):
        fuel_jax.exp(y=X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fuel_jax.SignatureError, match="'c'"):
        fuel_jax.add(X, X, c=X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fuel_jax.SignatureError, match="'epsilon'"):
        fuel_jax.rms_norm_last_dim(X, epsilon=1e-6)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fuel_jax.SignatureError, match="'exponent'"):
        fuel_jax.powi_inplace(X, exp=2, exponent=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fuel_jax.SignatureError, match="'soft_cap'"):
        fuel_jax.flash_attn(Q, Q, Q, soft_cap=30)  # pyright: ignore[reportCallIssue]
    with pytest.raises(fuel_jax.ArgumentError, match="'reduction'"):
        fuel_jax.fused_softmax_cross_entropy(X, TARGETS, reduction="median")  # pyright: ignore


@traced
def test_a_registered_op_keeps_its_signature():
    def swiglu(gate: Array, up: Array, *, beta: float = 1.0) -> Array:
        return gate * jax.nn.sigmoid(beta * gate) * up

    with pytest.raises(TypeError, match="output_names"):
        fuel_jax.register_fused("typed_swiglu", swiglu, output_names=("y",))  # pyright: ignore[reportCallIssue]
    op = fuel_jax.register_fused("typed_swiglu", swiglu, outputs=("y",))
    assert is_array(assert_type(op(X, X, beta=2.0), Array))
    with pytest.raises(fuel_jax.SignatureError, match="'alpha'"):
        op(X, X, alpha=2.0)  # pyright: ignore[reportCallIssue]
    fuel_jax.unregister_fused("typed_swiglu")


def test_the_judge(tmp_path: pathlib.Path):
    assert assert_type(judge.cached(tmp_path / "none"), judge.ProfileReport | None) is None
