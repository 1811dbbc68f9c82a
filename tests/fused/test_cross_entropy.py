"""What is true of cross entropy in particular."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from fuel_jax.fused.cross_entropy import (
    fused_softmax_cross_entropy as cross_entropy,
    fused_softmax_cross_entropy_backward,
)

from ..contract import compiled
from ..refused import refused

NAN, INF = math.nan, math.inf


def oracle(logits, targets, reduction="mean", ignore_index=-100):
    """Loss and gradient of its sum, row by row, in NumPy, in float64."""
    x = np.asarray(logits, np.float64)
    loss, slope = np.zeros(targets.shape), np.zeros(x.shape)
    kept = sum(int(t) != ignore_index for t in targets.flat)
    share = 1 / max(kept, 1) if reduction == "mean" else 1.0
    for row in np.ndindex(targets.shape):
        if int(targets[row]) == ignore_index:
            continue
        e = np.exp(x[row] - x[row].max())
        p = e / e.sum()
        loss[row] = math.log(e.sum()) + x[row].max() - x[row][targets[row]]
        slope[row] = (p - np.eye(x.shape[-1])[targets[row]]) * share
    return loss if reduction == "none" else loss.sum() * share, slope


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
def test_agrees_with_the_definition(reduction, dtype, draw):
    """Of targets of any integer dtype; 100 is a class, and ignored."""
    targets = np.array([[0, 127, 7], [100, 100, 2]], dtype)
    x = draw((2, 3, 300), "float64") * 3
    f = lambda x: cross_entropy(x, targets, reduction=reduction, ignore_index=100)
    want, slope = oracle(x, targets, reduction, 100)
    assert f(x).dtype == "float32"
    np.testing.assert_allclose(f(x), want, rtol=3e-7)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), slope, rtol=1e-6, atol=1e-16)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8"])
def test_the_default_ignore_index_need_not_fit_the_targets(dtype, draw):
    x, t = draw((2, 156), "float64"), np.array([0, 127], dtype)
    np.testing.assert_allclose(cross_entropy(x, t), oracle(x, t)[0], rtol=3e-7)
    np.testing.assert_allclose(cross_entropy(x, t, ignore_index=2**70), oracle(x, t)[0], rtol=3e-7)


def test_a_class_may_be_ignored_and_stays_in_the_sum():
    x = jnp.array([[5.0, 1, 1], [5, 1, 1]], "float32")
    loss = cross_entropy(x, jnp.array([1, 2]), ignore_index=0)
    np.testing.assert_allclose(loss, math.log(math.exp(4) + 2), rtol=1e-6)


def test_a_single_row(draw):
    x = draw((5,), "float64")
    loss, slope = jax.value_and_grad(lambda x: cross_entropy(x, jnp.int32(3)))(x)
    want, gradient = oracle(x, np.array(3))
    np.testing.assert_allclose(loss, want, rtol=3e-7)
    np.testing.assert_allclose(slope, gradient, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_kept_is_zero_with_zero_gradients(reduction, draw):
    f = lambda x: cross_entropy(x, jnp.full(3, -100), reduction=reduction).sum()
    loss, slope = jax.value_and_grad(f)(draw((3, 5)))
    assert loss == 0
    assert not slope.any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (0,)])
def test_of_nothing_is_zero(shape):
    x, t = jnp.zeros(shape, "float32"), jnp.zeros(shape[:-1], int)
    for reduction, of in (("mean", ()), ("sum", ()), ("none", shape[:-1])):
        f = lambda x, reduction=reduction: cross_entropy(x, t, reduction=reduction)
        np.testing.assert_array_equal(f(x), jnp.zeros(of))
        assert jax.grad(lambda x: f(x).sum())(x).shape == shape  # noqa: B023


@pytest.mark.parametrize("pin", ["xla", "rows"])
@pytest.mark.parametrize("junk", [-INF, INF, NAN])
def test_ignored_rows_may_hold_anything(junk, pin, draw):
    """pytorch#11551: of −inf only, as padding leaves them."""
    x, t = draw((4, 7)), jnp.array([2, -100, 6, -100])
    bad = x.at[1].set(junk).at[3, 2].set(junk)
    op = cross_entropy.using(pin)
    for reduction in ("mean", "sum"):
        f = jax.value_and_grad(lambda x, reduction=reduction: op(x, t, reduction=reduction))
        (loss, slope), (want, gradient) = f(bad), f(x)
        assert loss == want
        np.testing.assert_array_equal(slope, gradient)
        assert not slope[1].any()
        assert not slope[3].any()
    np.testing.assert_array_equal(op(bad, t, reduction="none")[jnp.array([1, 3])], 0)


@pytest.mark.parametrize("pin", ["xla", "rows"])
@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [("int32", -1), ("int32", 5), ("uint32", 2**32 - 1), ("uint8", 255), ("int64", 2**32)],
)
def test_a_target_that_is_no_class_is_nan_and_checkify_says_so(dtype, wrong, pin, draw):
    """pytorch#12670: never the loss of another class."""
    t, x = jnp.array([0, wrong, 4], dtype), draw((3, 5))
    f = lambda x: cross_entropy.using(pin)(x, t, reduction="none")
    np.testing.assert_array_equal(jnp.isnan(f(x)), [False, True, False])
    slope = jax.grad(lambda x: f(x).sum())(x)
    np.testing.assert_array_equal(jnp.isnan(slope).all(-1), [False, True, False])
    assert jnp.isnan(slope).any(-1).sum() == 1
    assert jnp.isnan(cross_entropy(x, t))
    error, _ = checkify.checkify(jax.jit(f), errors=checkify.all_checks)(x)
    with pytest.raises(checkify.JaxRuntimeError, match="out-of-bounds"):
        error.throw()


def test_a_row_without_probabilities_is_nan():
    x = jnp.array([[-INF, -INF], [INF, 0], [NAN, 0], [0, -INF]], "float32")
    loss, lse = cross_entropy(x, jnp.array([0, 1, 1, 0]), reduction="none", return_lse=True)
    np.testing.assert_array_equal(jnp.isnan(loss), [True, True, True, False])
    assert lse[0] == -INF
    np.testing.assert_array_equal(loss[3:], 0)


@pytest.mark.parametrize("pin", ["xla", "rows"])
def test_a_common_offset_costs_no_digits(pin, draw):
    """ln Σ exp is rounded by 4e-3 here; the loss and the gradient are not."""
    x, t = jnp.round(draw((4, 9)) * 64) / 64, np.array([0, 3, 8, 1])
    f = lambda x: cross_entropy.using(pin)(x, t)
    loss, slope = compiled(jax.value_and_grad(f))(x + 2.0**16)
    want, gradient = oracle(x, t)
    np.testing.assert_allclose(loss, want, rtol=3e-6)
    np.testing.assert_allclose(slope, gradient, atol=3e-6 * abs(gradient).max())


@pytest.mark.parametrize("pin", ["xla", "rows"])
def test_large_products_survive_the_compiler(pin, draw):
    """XLA contracts x·c − max into one rounding, which is off by hundreds at 1e10."""
    x, t = draw((4, 64)) * 1e10, jnp.arange(4)
    f = lambda x: cross_entropy.using(pin)(x * 0.3, t, reduction="none")
    loss, pull = compiled(lambda x: jax.vjp(f, x))(x)
    z = np.asarray(x * 0.3, np.float64)
    np.testing.assert_allclose(loss, z.max(-1) - z[range(4), range(4)], rtol=1e-6)
    slope = np.asarray(pull(jnp.ones(4, "float32"))[0], np.float64)
    np.testing.assert_allclose(slope.sum(-1), 0, atol=1e-6)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("rows", [(1,), (7,), (16,), (3, 8), ()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_rows_at_a_time_are_all_rows(rows, dtype, draw):
    x, t = draw((*rows, 33), dtype), np.resize([3, -100, 32, 0], rows).astype("int32")
    both = [cross_entropy.using(k)(x, t, return_lse=True) for k in ("rows", "xla")]
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def compiled_at(f, shape, dtype="float32"):
    x, t = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], "int32")
    return jax.jit(f).lower(x, t).compile()


@pytest.mark.parametrize("shape", [(4096, 50257), (4096, 2048), (65536, 128)])
@pytest.mark.parametrize("f", [cross_entropy, jax.grad(cross_entropy)], ids=["value", "gradient"])
def test_no_second_array_of_the_logits_size(f, shape):
    memory = compiled_at(f, shape).memory_analysis()
    assert memory.temp_size_in_bytes < 4 * math.prod(shape) / 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_second_array_of_long_half_precision_logits(dtype):
    shape = (4096, 50257)
    memory = compiled_at(jax.grad(cross_entropy), shape, dtype).memory_analysis()
    assert memory.temp_size_in_bytes < 2 * math.prod(shape) / 16


def test_rows_are_taken_a_few_at_a_time_where_they_are_long():
    def serves(*shape):
        x, t = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct(shape[:-1], "int32")
        return cross_entropy.explain(x, t).forward[0].serves

    assert serves(2048, 50257) == serves(3, 32769) == ("cpu",)
    assert serves(1_000_000, 128) == serves(2048, 32768) == serves(2, 50257) == ()


def test_z_loss_is_the_square_of_lse(draw):
    """Of ignored rows too."""
    x, t = draw((4, 9), "float64"), jnp.array([0, -100, 2, 3])

    def z_loss(x, f=cross_entropy):
        loss, lse = f(x, t, return_lse=True)
        return loss.astype("float64") + 0.1 * jnp.mean(lse**2)

    v = np.asarray(x)
    e = np.exp(v)
    lse = np.log(e.sum(-1, keepdims=True))
    want = oracle(x, np.asarray(t))[1] + 0.2 * lse / 4 * e / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.grad(z_loss)(x), want, rtol=1e-6)


def test_parts_of_a_vocabulary_combine_by_their_lse(draw):
    x, t = draw((3, 12), "float64"), jnp.array([1, 2, 0])
    part = lambda x: cross_entropy(x, t, return_lse=True)[1]
    whole = lambda x: jnp.logaddexp(part(x[:, :5]), part(x[:, 5:]))
    np.testing.assert_allclose(whole(x), part(x), rtol=1e-14)
    slope = lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(x)
    np.testing.assert_allclose(slope(whole), slope(part), rtol=1e-12, atol=1e-15)


def test_half_logits_are_summed_in_float32():
    x = jnp.zeros((2, 70_000), "float16")
    loss, slope = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([0, 9])))(x)
    np.testing.assert_allclose(loss, math.log(70_000), rtol=1e-6)
    assert slope.dtype == "float16"
    np.testing.assert_allclose(slope[0, 0], -0.5, rtol=1e-3)


def test_bad_calls(draw):
    x, t = draw((2, 3)), jnp.zeros(2, int)
    refused(cross_entropy, x, t, reduction="avg", match="'reduction' is 'avg'; it must be one of")
    refused(cross_entropy, x, t, ignore_index=1.5, match="'ignore_index' is 1.5; it must be an int")
    refused(cross_entropy, x, t.astype("float32"), match="'targets' is float32")
    refused(cross_entropy, x, jnp.zeros(3, int), match="axes \\*rows are \\(3,\\)")
    refused(cross_entropy, jnp.float32(1), t, match="it has 0 axes")
    refused(cross_entropy, x, match="array 'targets' is missing")
    refused(cross_entropy, jnp.zeros((2, 3), int), t, match="'logits' is int")


def test_the_backward_is_an_op_of_its_own(draw):
    x, t, g = draw((2, 5)), jnp.array([1, 4]), jnp.float32(2)
    lse = cross_entropy(x, t, return_lse=True)[1]
    got = fused_softmax_cross_entropy_backward(x, t, lse, g, reduction="sum", ignore_index=-100)
    np.testing.assert_allclose(got, 2 * oracle(x, np.asarray(t), "sum")[1], atol=1e-6)
