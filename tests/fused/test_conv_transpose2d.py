"""What is true of transposed convolution in particular."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.conv2d import conv2d
from fuel_jax.fused.conv_transpose2d import conv_transpose2d, conv_transpose2d_backward

from ..refused import refused

WINDOWS = {  # (x, w), parameters
    "plain": (((2, 4, 3, 5), (4, 3, 3, 2)), {}),
    "strided": (((2, 2, 3, 4), (2, 3, 3, 3)), {"stride": (2, 3), "padding": (1, 0)}),
    "output padding": (
        ((2, 4, 3, 5), (4, 3, 3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)},
    ),
    "dilated, output padding beyond the stride": (
        ((1, 4, 3, 4), (4, 2, 2, 3)),
        {"stride": (1, 2), "dilation": (3, 2), "output_padding": (2, 1), "padding": (1, 2)},
    ),
    "groups": (((2, 4, 3, 3), (4, 3, 2, 2)), {"groups": 2, "stride": 2}),
    "depthwise": (((2, 3, 4, 3), (3, 1, 3, 3)), {"groups": 3, "stride": 2, "padding": 1}),
    "one by one": (((2, 3, 4, 5), (3, 2, 1, 1)), {"stride": (2, 1)}),
}


def oracle(x, w, bias, g, **window):
    """Value and gradients in float64, input element by input element: the scatter form."""
    both = lambda name, default: (
        (v, v) if isinstance(v := window.get(name, default), int) else tuple(v)
    )
    stride, dilation = both("stride", 1), both("dilation", 1)
    padding, extra, groups = both("padding", 0), both("output_padding", 0), window.get("groups", 1)
    x, w, bias = (np.asarray(v, np.float64) for v in (x, w, bias))
    (n, c_in, *size), (_, per, *kernel) = x.shape, w.shape
    whole = [
        (h - 1) * s + d * (k - 1) + 1 + e
        for h, s, d, k, e in zip(size, stride, dilation, kernel, extra, strict=True)
    ]
    kept = [slice(p, m - p) for p, m in zip(padding, whole, strict=True)]
    y = np.zeros((n, per * groups, *whole))
    full = np.zeros_like(y)
    if g is not None:
        full[:, :, kept[0], kept[1]] = g
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for c, i, j, p, q in itertools.product(range(c_in), *map(range, size), *map(range, kernel)):
        group = c // (c_in // groups)
        to = slice(group * per, (group + 1) * per)
        at = (slice(None), to, i * stride[0] + p * dilation[0], j * stride[1] + q * dilation[1])
        y[at] += x[:, c, i, j, None] * w[c, :, p, q]
        dx[:, c, i, j] += full[at] @ w[c, :, p, q]
        dw[c, :, p, q] += x[:, c, i, j] @ full[at]
    y = y[:, :, kept[0], kept[1]] + bias[:, None, None]
    return y, dx, dw, full.sum((0, 2, 3))


@pytest.mark.parametrize("name", WINDOWS)
def test_value_and_gradients_are_the_loop_s(name, draw):
    (x, w), window = WINDOWS[name]
    bias = draw((w[1] * window.get("groups", 1),), "float64")
    x, w = draw(x, "float64"), draw(w, "float64")
    g = draw(conv_transpose2d.out(x, w, bias, **window).shape, "float64")
    want = oracle(x, w, bias, g, **window)

    @jax.jit
    def every(x, w, bias, g):
        y, pull = jax.vjp(lambda *xs: conv_transpose2d(*xs, **window), x, w, bias)
        kernels = map(conv_transpose2d_backward.using, ("xla", "taps"))
        return (y, *pull(g)), [kernel(x, w, g, bias, **window) for kernel in kernels]

    there_and_back, pinned = every(x, w, bias, g)
    for got, expected in zip(there_and_back, want, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11)
    for gradients in pinned:
        for got, expected in zip(gradients, want[1:], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposes_convolution(groups, draw):
    """⟨conv(z), x⟩ = ⟨z, convᵀ(x)⟩, with the same kernel."""
    window = {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1), "groups": groups}
    z, w = draw((2, 6, 8, 9), "float64"), draw((4, 6 // groups, 3, 2), "float64")
    y = conv2d(z, w, **window)
    x = draw(y.shape, "float64")
    back = conv_transpose2d(x, w, **window)
    room = [a - b for a, b in zip(z.shape[2:], back.shape[2:], strict=True)]
    back = conv_transpose2d(x, w, **window, output_padding=room)
    assert back.shape == z.shape
    np.testing.assert_allclose(jnp.sum(y * x), jnp.sum(z * back), rtol=1e-10)


def test_literally():
    """Two steps of a row, spread by a kernel of three, overlapping in the middle."""
    x, w = jnp.array([1.0, 10]).reshape(1, 1, 1, 2), jnp.array([1.0, 2, 3]).reshape(1, 1, 1, 3)
    spread = lambda **window: conv_transpose2d(x, w, **window)[0, 0, 0].tolist()
    assert spread() == [1, 12, 23, 30]
    assert spread(stride=(1, 2)) == [1, 2, 13, 20, 30]
    assert spread(stride=(1, 2), output_padding=(0, 1)) == [1, 2, 13, 20, 30, 0]
    assert spread(stride=(1, 2), padding=(0, 1)) == [2, 13, 20]
    assert spread(stride=(1, 2), padding=(0, 1), output_padding=(0, 1)) == [2, 13, 20, 30]
    assert spread(dilation=(1, 2)) == [1, 10, 2, 20, 3, 30]


def test_a_nan_weight_is_not_skipped_where_x_is_zero():
    """The original kernel skips zeros of x, and with them a NaN."""
    y = conv_transpose2d(jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1, 1, 1), jnp.nan))
    assert jnp.isnan(y).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_rounded_once_after_the_bias(dtype, draw):
    x, w, bias = draw((2, 8, 4, 4), dtype), draw((8, 3, 3, 3), dtype), draw((3,), dtype)
    want = oracle(x, w, bias, None, stride=2)[0].astype(x.dtype)
    assert np.mean(np.asarray(conv_transpose2d(x, w, bias, stride=2)) == want) > 0.98


def test_of_nothing():
    w = jnp.ones((3, 2, 2, 2))
    assert conv_transpose2d(jnp.ones((0, 3, 4, 4)), w, stride=2).shape == (0, 2, 8, 8)
    dw = jax.grad(lambda w: conv_transpose2d(jnp.ones((0, 3, 4, 4)), w, stride=2).sum())(w)
    assert not dw.any()


def test_bad_calls(draw):
    x, w = draw((1, 4, 3, 3)), draw((4, 3, 2, 2))
    refused(conv_transpose2d, x, w[:2], match="its axis c_in is 2, but c_in is 4 in 'x'")
    refused(conv_transpose2d, x, w, groups=3, match="'groups' is 3; it must divide the 4 channels")
    refused(conv_transpose2d, x, w, draw((4,)), match="'bias' has 4 channels, the output 3")
    refused(conv_transpose2d, x, w, output_padding=(1, 0), match="must be smaller than stride")
    refused(conv_transpose2d, x, w, stride=2, output_padding=2, match="must be smaller than stride")
    refused(conv_transpose2d, x, w, stride=2, output_padding=-1, match="at 0")
    refused(conv_transpose2d, x, w, stride=(0, 1), match="start at 1")
    refused(conv_transpose2d, x, w, padding=3, match="it cuts off more than there is")
    refused(conv_transpose2d, x, draw((4, 3, 0, 2)), match="each extent must be at least 1")
    refused(conv_transpose2d, x[0], w, match="it has 3 axes, wanted 4")
    refused(conv_transpose2d, x, w.astype("float16"), match="operands share one dtype")
    refused(conv_transpose2d, x, w, stride="2", match="parameter 'stride' is '2'; it must be")
