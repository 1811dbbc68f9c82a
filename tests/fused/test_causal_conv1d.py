"""What is true of the causal convolution in particular."""

import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import causal_conv1d

from ..refused import refused


def oracle(x, w, bias, use_silu):
    """The sum over taps, element by element, in NumPy, in float64."""
    x, w, bias = (np.asarray(v, np.float64) for v in (x, w, bias))
    taps = w.shape[-1]
    y = np.zeros((*x.shape[:2], x.shape[2] - taps + 1))
    for b, c, t in np.ndindex(y.shape):
        y[b, c, t] = bias[c] + sum(w[c, 0, k] * x[b, c, t + k] for k in range(taps))
    return y / (1 + np.exp(-y)) if use_silu else y


@pytest.mark.parametrize("use_silu", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(9, 4), (5, 1), (2, 5), (1, 3), (4, 21), (0, 4)])
def test_agrees_with_the_definition(length, taps, use_silu, draw):
    x, w, bias = draw((2, 3, length + taps - 1)), draw((3, 1, taps)), draw((3,))
    y = causal_conv1d(x, w, bias, use_silu=use_silu)
    want = oracle(x, w, bias, use_silu)
    assert y.shape == want.shape
    np.testing.assert_allclose(y, want, atol=2e-6 * max(1, abs(want).max(initial=0)))


def test_the_last_tap_meets_the_current_element():
    x = jnp.array([[[0.0, 0, 1, 2, 3]]])
    w = jnp.array([[[0.0, 0, 1]]])
    np.testing.assert_array_equal(causal_conv1d(x, w, jnp.zeros(1)), [[[1, 2, 3]]])


def test_a_sequence_may_be_cut_and_continued_from_its_past(draw):
    x, w, bias = draw((1, 2, 12), "float64"), draw((2, 1, 4), "float64"), draw((2,), "float64")
    whole = causal_conv1d(x, w, bias)
    parts = [causal_conv1d(x[..., :8], w, bias), causal_conv1d(x[..., 5:], w, bias)]
    np.testing.assert_allclose(jnp.concatenate(parts, -1), whole, rtol=1e-12)


def test_bad_calls(draw):
    x, w, bias = draw((1, 2, 6)), draw((2, 1, 4)), draw((2,))
    refused(causal_conv1d, x[..., :2], w, bias, match="'x' has 2 steps and 'weight' 4 taps")
    refused(causal_conv1d, x, w[..., :0], bias, match="'weight' has 0 taps")
    refused(causal_conv1d, x, w[:1], bias, match="its axis c is 1, but c is 2 in 'x'")
    refused(causal_conv1d, x, w, bias[:1], match="its axis c is 1")
    refused(causal_conv1d, x, w, bias, use_silu=1, match="'use_silu' is 1; it must be True or")
    refused(causal_conv1d, x, w.astype("bfloat16"), bias, match="operands share one dtype")
    refused(causal_conv1d, x, w, match="array 'bias' is missing")
