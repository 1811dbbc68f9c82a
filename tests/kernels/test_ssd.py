"""Mamba-2's recurrence on tensor cores alone, interpreted, and what it lowers to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from fuel_jax.fused import ssd_chunk_scan as op
from pallas_kernels import ssd as kernels
from pallas_kernels._ssd import Tile
from pallas_kernels.ssd_gradient import gradient

from ..fused.test_ssd_chunk_scan import oracle
from .test_launch import lowered

FORWARD, BACKWARD = Tile(16, 16, 4, 2), Tile(16, 64, 8, 1)


def drawn(batch, length, heads, p, groups, n, dtype, *, continued, decay=1.0):
    """Operands in ``dtype``, the cotangents, and states in float32 or None."""
    rng = np.random.default_rng(length * 100 + p)
    draw = lambda *shape: (rng.normal(size=shape) / 2).astype(jnp.dtype(dtype))
    state = lambda: rng.normal(size=(batch, heads, p, n)).astype("float32")
    x, g = draw(batch, length, heads, p), draw(batch, length, heads, p)
    dt, a = abs(draw(batch, length, heads)), -decay * abs(draw(heads))
    b, c = draw(batch, length, groups, n), draw(batch, length, groups, n)
    return (
        (x, dt, a.astype(dt.dtype), b, c),
        g,
        *((state(), state()) if continued else (None, None)),
    )


def in_float64(xs):
    return [None if x is None else np.asarray(x, np.float64) for x in xs]


def scan(xs, h=None, tile=FORWARD):
    """Interpreted, with what is around the kernels compiled as one program."""
    return jax.jit(functools.partial(kernels.scan, interpret=True, tile=tile))(*xs, h)


def within_promise(got, want, roundings=1):
    for y, w in zip(got, want, strict=True):
        assert y.shape == w.shape
        error = abs(np.asarray(y, np.float64) - w).max()
        bound = roundings * op.PRECISION.tolerance(y.dtype)
        assert error <= bound * max(abs(w).max(), 1)


SHAPES = st.tuples(
    st.integers(1, 2),  # sequences
    st.sampled_from([1, 5, 16, 33, 50]),  # steps
    st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),  # heads and groups
    st.sampled_from([1, 3, 16, 24]),  # p
    st.sampled_from([1, 5, 16, 20]),  # n
    st.sampled_from(["bfloat16", "float16"]),
)


@settings(max_examples=6, deadline=None)
@given(shape=SHAPES, continued=st.booleans(), decay=st.sampled_from([1e-3, 1.0, 60.0]))
def test_outputs_and_last_state(shape, continued, decay):
    batch, length, (heads, groups), p, n, dtype = shape
    xs, _, h, _ = drawn(batch, length, heads, p, groups, n, dtype, continued=continued, decay=decay)
    within_promise(scan(xs, h), oracle(*xs, h))


@settings(max_examples=2, deadline=None)
@example(shape=(1, 5, (1, 1), 24, 1, "float16"), continued=True, splits=1)  # p in two parts
@given(shape=SHAPES, continued=st.booleans(), splits=st.integers(1, 2))
def test_gradient(shape, continued, splits):
    batch, length, (heads, groups), p, n, dtype = shape
    xs, *given = drawn(batch, length, heads, p, groups, n, dtype, continued=continued)
    back = op.ssd_chunk_scan_backward
    body = functools.partial(back.body, chunk_size=length)
    want = jax.jit(body)(*in_float64([*xs, *given]))
    tiles = {"tile": BACKWARD, "edge": FORWARD, "splits": splits}
    got = jax.jit(functools.partial(gradient, interpret=True, **tiles))(*xs, *given)
    assert [d.dtype for d in got] == [dtype] * 5 + ["float32"]
    within_promise(got, want, roundings=2 if dtype == "bfloat16" else 1)  # of states, too


def test_strong_decays_leave_the_digits_of_what_follows():
    """Sums of dt · a reach 2000 within a block; what one step adds is 1e-3 of it."""
    xs, *_ = drawn(1, 64, 2, 16, 1, 16, "float16", continued=False)
    x, dt, _, b, c = xs
    dt = np.where(np.arange(64)[None, :, None] < 32, np.float16(60), dt)
    xs = x, dt, np.array([-1.0, -0.01], "float16"), b, c
    within_promise(scan(xs, tile=Tile(64, 16, 4, 2)), oracle(*xs))


@pytest.mark.parametrize("place", [0, 1, 3])  # x, dt, b
def test_no_step_sees_a_later_one(place):
    xs, *_ = drawn(1, 16, 2, 16, 1, 16, "bfloat16", continued=False)
    want, _ = oracle(*xs)
    xs[place][0, 9, 0] = np.nan
    y = np.asarray(scan(xs)[0])
    within_promise([y[:, :9]], [want[:, :9]])
    np.testing.assert_array_equal(np.isnan(y), np.isnan(oracle(*xs)[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "p", "groups", "n"),
    [(8, 2048, 64, 64, 1, 128), (1, 65_536, 64, 64, 64, 128), (2, 1000, 24, 50, 8, 20)],
)
def test_lowers(batch, length, heads, p, groups, n, dtype):
    shape = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    xs = (
        *(shape(batch, length, heads, p), shape(batch, length, heads), shape(heads)),
        *[shape(batch, length, groups, n)] * 2,
    )

    def loss(*xs):
        y, last = op.ssd_chunk_scan(*xs, chunk_size=length // 8)
        return jnp.sum(y.astype("float32")) + jnp.sum(last)

    text = lowered(jax.grad(loss, range(5)), *xs)
    assert "fuel_ssd_dx" in text
    assert "fuel_ssd_scan" in lowered(loss, *xs)


def test_what_is_left_to_xla():
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)

    def explained(dtype="bfloat16", p=64, n=128, length=64):
        xs = [shape(dtype, 8, length, 4, p), shape(dtype, 8, length, 4), shape(dtype, 4)]
        groups = [shape(dtype, 8, length, 1, n)] * 2
        said = op.ssd_chunk_scan.explain(*xs, *groups, chunk_size=min(length, 64))
        return [str(choices[0].why_not) for choices in (said.forward, said.backward)]

    assert all("float32 is left to XLA" in why for why in explained("float32"))
    assert all("256 states" in why for why in explained(n=256))
    forward, backward = explained(length=2)
    assert "mostly empty" in backward
    assert "mostly empty" not in forward
    forward, backward = explained(p=128)
    assert "heads of 128" in backward
    assert "heads" not in forward
    forward, backward = explained(length=2**18)
    assert "states between blocks" in backward
    assert "states between" not in forward
