"""Cross entropy alone, interpreted: rows of any length, in any number of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fuel_jax.fused import cross_entropy as op
from pallas_kernels import cross_entropy as kernels

TILES = st.sampled_from(
    [(kernels.LOSSES, kernels.GRADIENT), (kernels.Tile(2, 8, 1), kernels.Tile(1, 8, 1))]
)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    v=st.integers(1, 70),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    tiles=TILES,
    centre=st.sampled_from([0, 100]),
)
def test_against_float64(rows, v, dtype, tiles, centre):
    rng = np.random.default_rng(rows * 1000 + v)
    logits = jnp.asarray(centre + 3 * rng.normal(size=(rows, v)), dtype)
    label = rng.integers(0, v, rows)
    weight, g = rng.normal(size=(2, rows))
    x = np.asarray(logits, np.float64)
    m = x.max(-1)
    lse = np.log(np.exp(x - m[:, None]).sum(-1)) + m
    loss = lse - x[np.arange(rows), label]
    p = np.exp(x - lse[:, None])
    slope = weight[:, None] * p - g[:, None] * (np.arange(v) == label[:, None])

    label = jnp.asarray(label, "int32")
    got, got_lse = kernels.row_losses(logits, label, interpret=True, tile=tiles[0])
    np.testing.assert_allclose(got, loss, atol=op.PRECISION.float32 * max(loss.max(), 1))
    np.testing.assert_allclose(got_lse, lse, rtol=op.PRECISION.float32)
    of_rows = [jnp.asarray(a, "float32") for a in (weight, g)]
    d = kernels.gradient(logits, label, got_lse, *of_rows, interpret=True, tile=tiles[1])
    assert d.dtype == dtype
    bound = op.PRECISION.tolerance(dtype) * max(np.abs(slope).max(), 1)
    np.testing.assert_allclose(np.asarray(d, np.float64), slope, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_hold_anything(dtype):
    """What is ignored is 0 in loss and gradient; what is not is NaN, as in the body."""
    inf, nan = np.inf, np.nan
    rows = [[nan, 1, 2], [inf, 1, 2], [-inf] * 3, [1, 2, 3]] * 2
    logits = jnp.array(rows, dtype)
    targets = jnp.array([-100] * 4 + [0, 1, 2, 5])
    f = op.fused_softmax_cross_entropy
    back = f.backward
    for reduction in ("none", "sum"):
        params = {"reduction": reduction, "ignore_index": -100}
        want, lse = f.body(logits, targets, **params, return_lse=True)
        got, _ = f.using("triton")(logits, targets, **params, return_lse=True)
        np.testing.assert_array_equal(got, want)
        up = jnp.ones(want.shape, "float32")
        for dlse in (None, jnp.ones(8, "float32")):
            given = (logits, targets, lse, up, dlse)
            want_d = back.body(*given, **params)
            got_d = back.using("triton")(*given, **params)
            np.testing.assert_allclose(
                np.asarray(got_d, np.float64),
                np.asarray(want_d, np.float64),
                rtol=0,
                atol=2 * op.PRECISION.tolerance(dtype),
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_through_the_op(reduction):
    """Loss and z-loss together, kernels in both directions."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 3, 33)), "float32")
    targets = jnp.array([[0, 5, -100], [32, 1, 2]])

    def loss(f):
        def of(logits):
            y, lse = f(logits, targets, reduction=reduction, return_lse=True)
            return jnp.sum(y) + 1e-2 * jnp.sum(jnp.square(lse))

        return jax.jit(jax.grad(of))

    f = op.fused_softmax_cross_entropy
    got, want = loss(f.using("triton"))(logits), loss(f.decompose)(logits)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "loss", "gradient"),
    [
        ((4096, 50257), "float32", None, None),
        ((16, 50257), "bfloat16", "most of the chip idle", None),
        ((16, 50257), "float32", "most of the chip idle", "most of the chip idle"),
        ((16, 8192), "float32", None, None),
        ((334, 64), "bfloat16", None, None),
        ((16, 64), "bfloat16", "less than 768", "less than 768"),
        ((65536, 64), "float32", "more than 512 rows", "less than 768"),
    ],
)
def test_choice(shape, dtype, loss, gradient):
    """Which kernel runs on CUDA, or why XLA does."""
    logits = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    targets = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    said = op.fused_softmax_cross_entropy.explain(logits, targets)
    for choices, reason in ((said.forward, loss), (said.backward, gradient)):
        choice = next(c for c in choices if c.kernel.name == "triton")
        if reason is None:
            assert choice.serves == ("cuda",)
        else:
            assert reason in choice.why_not
