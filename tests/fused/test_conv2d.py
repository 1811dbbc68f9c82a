"""What is true of convolution in particular."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused.conv2d import conv2d, conv2d_backward

from ..refused import refused

WINDOWS = {  # (x, w), parameters
    "plain": (((2, 3, 5, 6), (4, 3, 3, 2)), {}),
    "cube": (((3, 3, 3, 3), (3, 3, 2, 2)), {}),
    "strided, not dividing": (((1, 2, 8, 9), (3, 2, 3, 3)), {"stride": (3, 2), "padding": (1, 2)}),
    "dilated": (((2, 2, 7, 8), (2, 2, 2, 3)), {"dilation": (3, 2), "padding": (0, 1)}),
    "groups": (((2, 6, 5, 4), (4, 3, 2, 2)), {"groups": 2, "stride": 2}),
    "depthwise": (((2, 3, 6, 5), (6, 1, 3, 2)), {"groups": 3, "stride": (1, 2), "padding": 1}),
    "everything": (
        ((2, 4, 9, 10), (6, 2, 2, 3)),
        {"groups": 2, "stride": (2, 3), "padding": (2, 1), "dilation": (3, 2)},
    ),
    "one by one": (((2, 3, 4, 5), (2, 3, 1, 1)), {"stride": (2, 1)}),
    "kernel of the whole": (((2, 2, 3, 4), (3, 2, 3, 4)), {}),
}


def oracle(x, w, bias, g, *, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """Value and gradients in float64, output element by output element."""
    x, w, bias = (np.asarray(v, np.float64) for v in (x, w, bias))
    stride, padding, dilation = (
        (v, v) if isinstance(v, int) else v for v in (stride, padding, dilation)
    )
    (n, c_in, *size), (c_out, per, *kernel) = x.shape, w.shape
    out = [
        (h + 2 * p - d * (k - 1) - 1) // s + 1
        for h, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    wide = [h + 2 * p for h, p in zip(size, padding, strict=True)]
    inside = tuple(slice(p, p + h) for p, h in zip(padding, size, strict=True))
    xp = np.zeros((n, c_in, *wide))
    xp[:, :, inside[0], inside[1]] = x
    y, dxp, dw = np.zeros((n, c_out, *out)), np.zeros_like(xp), np.zeros_like(w)
    g = np.asarray(g, np.float64) if g is not None else y
    for o, i, j in itertools.product(range(c_out), *map(range, out)):
        group = o // (c_out // groups)
        channels = slice(group * per, (group + 1) * per)
        rows, columns = (
            [at * s + t * d for t in range(k)]
            for at, s, d, k in zip((i, j), stride, dilation, kernel, strict=True)
        )
        at = (slice(None), channels, np.array(rows)[:, None], np.array(columns))
        y[:, o, i, j] = np.einsum("nckl,ckl->n", xp[at], w[o]) + bias[o]
        dxp[at] += g[:, o, i, j, None, None, None] * w[o]
        dw[o] += np.einsum("n,nckl->ckl", g[:, o, i, j], xp[at])
    return y, dxp[:, :, inside[0], inside[1]], dw, g.sum((0, 2, 3))


def there_and_back(op, window):
    """Value and gradients for a cotangent, compiled as one program."""

    @jax.jit
    def run(g, *xs):
        y, pull = jax.vjp(lambda *xs: op(*xs, **window), *xs)
        return y, *pull(g)

    return run


@pytest.mark.parametrize("kernel", ["xla", "taps", "product", None])
@pytest.mark.parametrize("name", WINDOWS)
def test_value_and_gradients_are_the_loop_s(name, kernel, draw):
    (x, w), window = WINDOWS[name]
    x, w, bias = draw(x, "float64"), draw(w, "float64"), draw(w[:1], "float64")
    op = conv2d
    if kernel == "taps" and "groups" not in window:
        pytest.skip("pinned forward, it serves grouped convolutions only")
    if kernel == "product" and name != "one by one":
        pytest.skip("it serves kernels of one element only")
    if kernel:
        op = conv2d.using(kernel)
    g = draw(conv2d.out(x, w, bias, **window).shape, "float64")
    want = oracle(x, w, bias, g, **window)
    for got, expected in zip(there_and_back(op, window)(g, x, w, bias), want, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11)


def test_backward_by_taps_whatever_the_forward_was(draw):
    """Unpinned, the CPU takes it for grouped and pointwise kernels; here for all."""
    for (x, w), window in WINDOWS.values():
        x, w = draw(x, "float64"), draw(w, "float64")
        bias = draw(w.shape[:1], "float64")
        g = draw(conv2d.out(x, w, **window).shape, "float64")
        got = jax.jit(functools.partial(conv2d_backward.using("taps"), **window))(x, w, g, bias)
        for a, b in zip(got, oracle(x, w, bias, g, **window)[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_a_large_product(draw):
    """One large enough to be taken for a product, forward and back."""
    x, w, bias = draw((2, 8, 24, 32)), draw((3, 8, 1, 1)), draw((3,))
    g = draw(conv2d.out(x, w, bias, stride=2).shape)
    run = there_and_back(conv2d, {"stride": 2})
    for got, want in zip(run(g, x, w, bias), oracle(x, w, bias, g, stride=2), strict=True):
        assert np.abs(np.asarray(got, np.float64) - want).max() <= 3e-6 * np.abs(want).max()
    served = conv2d.explain(x, w, bias, stride=2).forward
    assert [choice.kernel.name for choice in served if "cpu" in choice.serves] == ["product"]


def test_literally():
    x = jnp.arange(1.0, 10).reshape(1, 1, 3, 3)
    y = conv2d(x, jnp.ones((1, 1, 2, 2)))
    np.testing.assert_array_equal(y[0, 0], [[12, 16], [24, 28]])
    middle = jnp.zeros((1, 1, 3, 3)).at[0, 0, 1, 1].set(1)
    np.testing.assert_array_equal(conv2d(x, middle, padding=(1, 1)), x)
    x = jnp.array([[1.0, 2, 3, 4], [10, 20, 30, 40]]).reshape(1, 2, 2, 2)
    w = jnp.array([[1.0, 1, 1, 1], [1, 0, 0, 0]]).reshape(2, 1, 2, 2)
    np.testing.assert_array_equal(conv2d(x, w, groups=2).ravel(), [10, 10])


def test_a_kernel_sliced_from_a_larger_weight(draw):
    """candle#3736."""
    x, w = draw((1, 3, 5, 5)), draw((8, 6, 1, 1))
    f = lambda x, w: conv2d(x, w)
    for part in (w[:, 2:5], jnp.array(np.array(w[:, 2:5]))):
        want = np.einsum("nchw,oc->nohw", x, np.asarray(w)[:, 2:5, 0, 0])
        np.testing.assert_allclose(f(x, part), want, rtol=1e-5, atol=1e-6)
    g = np.asarray(jax.jit(jax.grad(lambda w: jnp.sum(f(x, w[:, 2:5]) ** 2)))(w))
    assert g.shape == w.shape
    assert not g[:, :2].any()
    assert not g[:, 5:].any()
    assert g[:, 2:5].all()


def test_a_strided_gradient_has_the_shape_of_its_operand(draw):
    """candle#1212, #1214: a row that no window reaches gets zero, not somebody else's share."""
    x, w = draw((1, 3, 32, 32)), draw((4, 3, 7, 7))
    dx = jax.jit(jax.grad(lambda x: conv2d(x, w, stride=2, padding=3).sum()))(x)
    assert dx.shape == x.shape
    x = draw((1, 1, 6, 5))
    ones = np.ones((1, 1, 2, 2), "float32")
    dx = jax.jit(jax.grad(lambda x: conv2d(x, ones, stride=3).sum()))(x)
    np.testing.assert_array_equal(
        np.asarray(dx)[0, 0], np.outer([1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 1])
    )


def test_a_gradient_of_patches(draw):
    """candle#633: stride 16, as in a vision transformer; each element is met once."""
    x, w = draw((1, 3, 64, 64)), draw((8, 3, 16, 16))
    dx = jax.jit(jax.grad(lambda x: conv2d(x, w, stride=16).sum()))(x)
    want = np.tile(np.asarray(w, np.float64).sum(0), (1, 1, 4, 4))
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_halves_are_rounded_once_after_the_bias(dtype, groups, draw):
    x, w, bias = draw((2, 4, 6, 6), dtype), draw((8, 4 // groups, 3, 3), dtype), draw((8,), dtype)
    want = oracle(x, w, bias, None, groups=groups)[0].astype(x.dtype)
    assert np.mean(np.asarray(conv2d(x, w, bias, groups=groups)) == want) > 0.98


def test_padding_does_not_touch_infinities():
    """A window beside an inf is inf, one that only meets padding is not."""
    x = jnp.zeros((1, 1, 3, 3)).at[0, 0, 0, 0].set(jnp.inf)
    y = conv2d(x, jnp.ones((1, 1, 1, 1)), padding=1)
    assert np.isinf(y).sum() == 1
    assert not np.isnan(y).any()


def test_of_nothing():
    w, bias = jnp.ones((2, 3, 2, 2)), jnp.array([1.0, 2])
    assert conv2d(jnp.ones((0, 3, 4, 4)), w, bias).shape == (0, 2, 3, 3)
    y = conv2d(jnp.ones((1, 0, 2, 2)), jnp.ones((2, 0, 1, 1)), bias)
    np.testing.assert_array_equal(y[0, :, 0, 0], [1, 2])
    slopes = jax.jit(jax.grad(lambda x, w: conv2d(x, w).sum(), (0, 1)))
    grads = slopes(np.ones((0, 3, 4, 4)), w)
    assert [g.shape for g in grads] == [(0, 3, 4, 4), w.shape]
    assert not grads[1].any()


def test_which_form_serves_whom(draw):
    """Grouped forward, grouped and pointwise backward: tap by tap on the CPU."""
    served = lambda choices: next(
        c.kernel.name for c in choices if "cpu" in c.serves or "default" in c.serves
    )
    for groups, shape, forward, backward in (
        (1, (4, 4, 3, 3), "xla", "xla"),
        (1, (4, 4, 1, 1), "xla", "taps"),
        (2, (4, 2, 3, 3), "taps", "taps"),
        (4, (4, 1, 3, 3), "taps", "taps"),
        (4, (4, 1, 9, 9), "xla", "xla"),
    ):
        said = conv2d.explain(draw((1, 4, 9, 9)), draw(shape), groups=groups)
        assert (served(said.forward), served(said.backward)) == (forward, backward)


def test_bad_calls(draw):
    x, w, bias = draw((2, 4, 5, 6)), draw((6, 2, 3, 3)), draw((6,))
    refused(conv2d, x, w, match="'w' reads 2 channels in each of 1 groups, 'x' has 4")
    refused(conv2d, x, w, groups=3, match="'groups' is 3; it must divide the 4 channels")
    refused(conv2d, x, w, groups=0, match="'groups' is 0")
    refused(conv2d, x, w, bias[:5], groups=2, match="its axis c_out is 5, but c_out is 6 in 'w'")
    refused(conv2d, x, w, groups=2, stride=(0, 1), match="start at 1")
    refused(conv2d, x, w, groups=2, padding=-1, match="'padding' .* at 0")
    refused(conv2d, x, w, groups=2, dilation=(1, 0), match="start at 1")
    refused(conv2d, x, w, groups=2, stride=(1, 2, 3), match="'stride' is \\(1, 2, 3\\); it must be")
    refused(conv2d, x, w, groups=2, dilation=3, match="'w' spans \\[7, 7\\], 'x' with its padding")
    refused(conv2d, x, draw((6, 2, 6, 1)), groups=2, match="'w' spans \\[6, 1\\]")
    refused(conv2d, x, draw((6, 4, 0, 1)), match="each extent must be at least 1")
    refused(conv2d, x[0], w, match="'x' is float32\\[4,5,6\\]; it has 3 axes, wanted 4")
    refused(conv2d, x, w.astype("float16"), groups=2, match="operands share one dtype")
    refused(conv2d, x, match="array 'w' is missing")
