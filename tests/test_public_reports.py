"""Bugs that users of other libraries have reported in public, each as a test of its whole kind.

A test's docstring begins with the numbers of the reports it answers, then names them; ``REPORTS``
lists all, so that none is lost.
"""

import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import fuel_jax as F

from .contract import compiled

INF, NAN = np.inf, np.nan
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FAR = np.uint32(0xFFFFFFFF)  # −1 to whoever casts it to int32

REPORTS = (
    *(2, 3, 4, 11, 12, 14, 15, 16, 19, 20, 21, 22, 25, 26, 27, 29, 30, 31, 33, 34, 39, 40, 43, 44),
    *(45, 46, 47, 49, 52, 60, 61, 62, 63, 64, 65, 67, 68, 69, 70, 76, 77, 78, 79, 82, 83, 87, 89),
    *(90, 93, 95, 96, 97, 98, 100, 102, 105, 106, 112, 119, 120),
)


def test_every_report_has_a_test():
    module = sys.modules[__name__]
    classes = [v for n, v in vars(module).items() if n.startswith("Test")]
    tests = [t for c in classes for n, t in vars(c).items() if n.startswith("test")]
    answered = [int(n) for t in tests for n in re.findall(r"\bbug0*(\d+)", t.__doc__)]
    assert sorted(answered) == sorted(REPORTS)
    assert len(REPORTS) == 60


def near(got, want, bound=2e-6, least=1e-30):
    """Within ``bound`` of the largest wanted value."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error = np.abs(got - want).max(initial=0)
    assert error <= bound * max(np.abs(want).max(initial=0), least), error


def f64(x):
    return np.asarray(x).astype(np.float64)


def reported(f, *arrays):
    """What checkify says of the call."""
    error, _ = checkify.checkify(jax.jit(f), errors=checkify.all_checks)(*arrays)
    return error.get() or ""


class TestElementwise:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_saturating_functions_far_out(self, dtype):
        """bug025, candle#2475: a fast tanh gave NaN for large inputs."""
        x = jnp.array([50, 1e4, -1e4, 3e38, INF, -INF], jnp.float64).astype(dtype)
        for op, low in ((F.tanh, -1), (F.erf, -1), (F.sigmoid, 0)):
            np.testing.assert_array_equal(f64(op(x)), [1, 1, low, 1, 1, low])

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_gradients_of_saturating_functions(self, dtype):
        """bug026, candle#2114 and #1722: sigmoid's gradient was NaN for large negative inputs."""
        x = jnp.array([-548.3, -201.7, 0, 201.7, 548.3]).astype(dtype)
        slopes = {F.sigmoid: 0.25, F.silu: 0.5, F.gelu: 0.5, F.gelu_tanh: 0.5, F.tanh: 1}
        for op, middle in slopes.items():
            right = 0 if op in (F.sigmoid, F.tanh) else 1
            slope = jax.vjp(op, x)[1](jnp.ones_like(x))[0]
            np.testing.assert_allclose(f64(slope), [0, 0, middle, right, right], atol=1e-80)

    def test_infinities_and_nan(self):
        """bug027, candle#3309: fast-math lost the rules for inf and NaN."""
        x = jnp.array([INF, -INF, NAN, 89, -104], "float32")
        np.testing.assert_array_equal(F.exp(x), [INF, 0, NAN, INF, 0])
        np.testing.assert_array_equal(F.log(x)[:3], [INF, NAN, NAN])
        np.testing.assert_array_equal(F.sqrt(x)[:3], [INF, NAN, NAN])
        np.testing.assert_array_equal(F.recip(x)[:3], [0, -0.0, NAN])
        np.testing.assert_array_equal(F.sin(x)[:3], [NAN, NAN, NAN])

    def test_the_two_gelus(self):
        """bug033, candle#900: the tanh form was served under the name gelu."""
        one = jnp.float32(1)
        near(F.gelu(one), 0.8413447460685429)
        near(F.gelu_tanh(one), 0.8411919906082768)

    def test_the_tail_of_gelu(self):
        """bug034, pytorch#187806 and #189234: 0 below −6, noise before."""
        x = jnp.array([-5, -5.5, -6, -8], "float32")
        want = [-1.4332578594e-6, -1.0444259356e-7, -5.9195258702e-9, -4.9767684594e-15]
        np.testing.assert_allclose(F.gelu(x), want, rtol=1e-5)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_kinks_at_zero(self, dtype):
        """bug063, jax#37821 and #2342: maximum(x, 0) has slope ½ at 0."""
        x = jnp.array([0.0, -0.0]).astype(dtype)
        for op in (F.relu, F.relu_inplace, F.abs):
            slope = jax.grad(lambda x, op=op: op(x).astype("float32").sum())(x)
            np.testing.assert_array_equal(f64(slope), [0, 0])

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_slope_of_clamp_at_its_bounds(self, dtype):
        """bug064, jnp.clip: ½ at the bounds; here, as in PyTorch, 1."""
        x = jnp.array([-0.5, 0, 0.5, 1, 1.5]).astype(dtype)
        for op in (F.clamp, F.clamp_inplace):
            slope = jax.grad(lambda x, op=op: op(x, min=0, max=1).astype("float32").sum())(x)
            np.testing.assert_array_equal(f64(slope), [0, 1, 1, 1, 0])


class TestReductions:
    @pytest.mark.parametrize("rank", range(1, 8))
    def test_any_axes_of_a_transposed_array(self, rank, draw):
        """bug014, candle#3873 and #3847: a strided reduction indexed the wrong axes."""
        x = draw((1, 2, 3, 2, 2, 1, 3)[:rank], "float64").T
        subsets = [s for r in range(rank + 1) for s in itertools.combinations(range(rank), r)]
        ops = {
            F.sum_reduce: np.sum,
            F.max_reduce: np.max,
            F.min_reduce: np.min,
            F.mean_reduce: np.mean,
        }
        step = max(1, len(subsets) // 12)
        some = [*subsets[::step], tuple(range(rank))]
        every = compiled(lambda x: [op(x, dims=dims) for op in ops for dims in some])
        want = [oracle(f64(x), axis=dims) for oracle in ops.values() for dims in some]
        for got, wanted in zip(every(x), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("dtype", INTS)
    def test_extremes_of_integers(self, dtype):
        """bug015, candle#3200: integer maxima were seeded with −inf."""
        ends = jnp.iinfo(dtype)
        low, high = int(ends.min), int(ends.max)
        for values in (
            [low, low],
            [high, high],
            [low, high],
            [high - 5, high - 7],
            [low + 7, low + 5],
        ):
            x = np.array(values, dtype)
            assert int(F.max_reduce(x)) == max(values)
            assert int(F.min_reduce(x)) == min(values)
            assert F.reduce_max_to(x, shape=(1,)).tolist() == [max(values)]
            assert F.max_reduce(x).dtype == dtype

    @pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
    def test_ties_go_to_the_first(self, dtype):
        """bug016, candle#3179 and #3238: the order of ties in a parallel reduction."""
        long = np.zeros(1000)
        long[[7, 900]] = 1
        for values, first in (([3, 1, 3, 3], 0), (long, 7), (np.zeros(4097), 0)):
            x = jnp.asarray(values).astype(dtype)
            assert F.argmax_dim(x, dim=0) == first
            assert F.argmin_dim(-x, dim=0) == first
            both = jnp.stack([x, x], 1)
            assert F.argmax_dim(both, dim=0).tolist() == [first, first]

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("at", [0, 1, 2, 40])
    def test_nan_wins(self, dtype, at):
        """bug049, pytorch#130295 and #187039; bug052, pytorch#7052 and #6996; bug119, tvm#19518 and
        mlx#4291: argmax and max ignored NaN, or disagreed about it."""
        values = np.linspace(1, 3, 41)
        values[at] = NAN
        x = jnp.asarray(values).astype(dtype)
        for best, where in ((F.max_reduce, F.argmax_dim), (F.min_reduce, F.argmin_dim)):
            assert jnp.isnan(best(x))
            assert where(x, dim=0) == at
        assert jnp.isnan(F.reduce_max_to(x, shape=(1,))).all()
        both = x.at[(at + 1) % 41].set(NAN)
        assert F.argmax_dim(both, dim=0) == min(at, (at + 1) % 41)

    def test_ties_share_the_gradient(self):
        """bug065, tensorflow#51681: which of several maxima gets the gradient."""
        x = jnp.array([1.0, 3.0, 3.0])
        share = [0, 0.5, 0.5]
        np.testing.assert_array_equal(F.reduce_max_to_backward(x, jnp.ones(1)), share)
        for op in (F.max_reduce, lambda x: F.reduce_max_to(x, shape=(1,)).sum()):
            np.testing.assert_array_equal(jax.grad(op)(x), share)
        np.testing.assert_array_equal(jax.grad(F.min_reduce)(-x), share)

    def test_float64_is_compared_in_float64(self):
        """bug120, Fuel's CPU kernel: arg-reductions narrowed to float32 first."""
        x = jnp.array([1.0, 1.0 + 1e-12])
        assert F.argmax_dim(x, dim=0) == 1
        assert F.argmin_dim(x[::-1], dim=0) == 1
        big = np.array([2**62, 2**62 + 1], np.int64)
        assert F.argmax_dim(big, dim=0) == 1


class TestIndexing:
    def test_transposed_indices(self, draw):
        """bug011, candle#3418: a transposed index array was misread."""
        ids = np.arange(6, dtype=np.uint32).reshape(2, 3).T % 2
        fresh = np.ascontiguousarray(ids)
        base, src = draw((3, 2)), draw((3, 2))
        calls = (
            lambda ids: F.scatter_add(base, ids, src, dim=0),
            lambda ids: F.gather(base, ids, dim=0),
            lambda ids: F.index_select(base, ids[:, 0], dim=0),
            lambda ids: F.index_add(base, ids[:, 1], src, dim=0),
        )
        for call in calls:
            np.testing.assert_array_equal(call(ids), call(fresh))
            inside = jax.jit(lambda flat, call=call: call(flat.reshape(2, 3).T % 2))
            np.testing.assert_array_equal(inside(jnp.arange(6, dtype="uint32")), call(fresh))

    @pytest.mark.parametrize("index", ["uint8", "uint32", "int64"])
    def test_wide_sources_under_narrow_indices(self, index):
        """bug012, candle#3371: U32 indices into an I64 source copied half of each element."""
        for dtype in ("int64", "uint8", "float64", "bfloat16"):
            low = 2**40 if dtype in ("int64", "float64") else 7
            x = jnp.asarray(np.array([[low, 2], [3, 4]])).astype(dtype)
            picked = F.index_select(x, np.array([1, 0], index), dim=0)
            assert picked.dtype == dtype
            np.testing.assert_array_equal(f64(picked), [[3, 4], [low, 2]])
            np.testing.assert_array_equal(
                f64(F.index_select(x, np.array([1], index), dim=1)), [[2], [4]]
            )

    @pytest.mark.parametrize("bad", [np.int32(5), np.int32(-1), np.int64(-(2**31)), FAR])
    def test_reads_out_of_range(self, bad):
        """bug068, jax#9839: x[5] clamps, take(5) fills, −1 wraps."""
        x, ids = jnp.arange(4.0), np.array([bad, 1])
        calls = (
            lambda ids: F.index_select(x, ids, dim=0),
            lambda ids: F.gather(x, ids, dim=0),
        )
        for call in calls:
            np.testing.assert_array_equal(call(ids), [NAN, 1])
            assert reported(call, ids)
        assert F.index_select(jnp.arange(4), ids, dim=0).tolist() == [0, 1]

    @pytest.mark.parametrize("bad", [np.int32(5), np.int32(-1), FAR])
    def test_writes_out_of_range(self, bad):
        """bug069, .at[].add: an update out of range is dropped, but −1 wraps."""
        ids = np.array([0, bad])
        for op in (F.index_add, F.scatter_add):
            call = lambda ids, op=op: op(jnp.zeros(3), ids, jnp.ones(2), dim=0)
            np.testing.assert_array_equal(call(ids), [1, 0, 0])
            assert reported(call, ids)

    @pytest.mark.parametrize("offset", [4, -1, -3, 5, 2**31 - 1])
    def test_a_write_that_overflows_stays_where_it_is(self, offset):
        """bug067, jax#3621, #34257 and #40849: dynamic_update_slice moves the write instead."""
        src = np.array([1.0, 2.0, 3.0])
        want = np.zeros(5)
        for r, value in enumerate(src):
            if 0 <= offset + r < 5:
                want[offset + r] = value
        calls = (
            lambda o: F.write_slice_doff(jnp.zeros(5), src, o, axis=0),
            lambda o: F.write_slice(jnp.zeros(5), src, ranges=((0, 3),), dyn_offset=(0, o)),
        )
        for call in calls:
            np.testing.assert_array_equal(call(np.int64(offset)), want)
            np.testing.assert_array_equal(jax.jit(call)(np.int64(offset)), want)
            assert reported(call, jnp.int64(offset))

    @pytest.mark.parametrize("count", range(5))
    def test_capacity_and_count_agree(self, count):
        """bug070, jax#31568 and #7592: off by one where the capacity equals the count."""
        x = np.array([3.0, NAN, -1.0, 2.0])
        x[count:] = 0
        for capacity in (None, count, count + 1, 9):
            indices, n = F.nonzero_indices(x, capacity=capacity)
            width = 4 if capacity is None else capacity
            assert indices.tolist() == (list(range(count)) + [4] * width)[:width]
            assert n.tolist() == [count]

    @pytest.mark.parametrize(("position", "rows"), [(3, [3, 0, 1]), (0, [0, 1, 2]), (6, [2, 3, 0])])
    def test_order_of_a_ring_that_wraps(self, position, rows):
        """bug089, transformers#37574: the order of a window's cache after it wraps."""
        want = np.full(4, -1.0)
        want[rows] = [1, 2, 3]
        got = F.write_slice_rotating(
            jnp.full(4, -1.0), np.array([1.0, 2.0, 3.0]), np.uint32(position), axis=0, modulus=4
        )
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("position", [9, 2**32 - 3])
    def test_a_ring_shorter_than_its_buffer(self, position):
        """bug090, sglang#38622: the buffer was longer than the window, and its index ignored."""
        got = F.write_slice_rotating(
            jnp.zeros(6), np.array([1.0, 2.0]), np.uint32(position), axis=0, modulus=4
        )
        np.testing.assert_array_equal(got, [0, 1, 2, 0, 0, 0])


class TestNorms:
    def test_rows_too_large_for_their_squares(self):
        """bug039, pytorch#178123 and #162489: the variance of 1e30·[1, 2, 3, 4] overflows float32.

        In float64 it does not.  In float32 the deviation is infinite and the row becomes 0, never
        NaN; rows just inside the range keep their values.
        """
        row = np.array([1.0, 2.0, 3.0, 4.0])
        want = (row - 2.5) / np.sqrt(1.25)
        near(F.layer_norm_last_dim(1e30 * row), want, 1e-14)
        near(F.layer_norm_last_dim((1e18 * row).astype(np.float32)), want)
        np.testing.assert_array_equal(
            F.layer_norm_last_dim((1e30 * row).astype(np.float32)), 0 * row
        )

    @pytest.mark.parametrize("op", [F.rms_norm_last_dim, F.layer_norm_last_dim])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_types_accumulate_in_float32(self, op, dtype, draw):
        """bug040, pytorch#189581: squares were summed in bf16."""
        for shape in ((2, 4, 1, 32), (2, 5000)):
            x = (draw(shape) * np.float32(0.058)).astype(dtype)
            near(
                op(x), op(x.astype("float64")), {"bfloat16": 2**-8, "float16": 2**-11}[dtype] + 1e-5
            )

    def test_gradients_of_half_types_accumulate_in_float32(self, draw):
        """bug093, Liger-Kernel#950: a gradient was reduced in bf16."""
        x, g = draw((512, 1024), "bfloat16"), draw((512, 1024), "bfloat16")
        for op in (F.rms_norm_last_dim_backward, F.layer_norm_last_dim_backward):
            near(op(x, g), op(x.astype("float64"), g.astype("float64")), 2**-8 + 1e-5)


class TestSoftmaxAndLoss:
    @pytest.mark.parametrize("c", [0.3, 1 / 3, -0.7])
    @pytest.mark.parametrize("size", [1e10, 1e20])
    def test_scores_that_were_scaled_before(self, c, size, draw):
        """bug060, jax#37234: x·c − max became one operation, NaN for large finite scores."""
        x = draw((4, 64)) * np.float32(size)
        f = lambda x: F.softmax_last_dim(x * np.float32(c))
        np.testing.assert_allclose(f64(compiled(f)(x)).sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(compiled(f)(x), f(x), atol=1e-6)
        assert jnp.isfinite(compiled(lambda x: F.log_softmax_last_dim(x * np.float32(c)))(x)).all()
        q = (draw((1, 1, 4, 8)) * np.float32(size**0.5)).astype("float32")
        v = jnp.ones((1, 1, 4, 8), "float32")
        y = compiled(lambda q: F.flash_attn(q, q, v, softmax_scale=c))(q)
        np.testing.assert_allclose(y, np.ones((1, 1, 4, 8)), rtol=1e-5)

    def test_a_gradient_summed_over_many_f16_elements(self, draw):
        """bug061, jax#40409: NaN over 2¹⁶ elements and more."""
        y = F.log_softmax_last_dim(draw((70_000,), "float16"))
        dx = F.log_softmax_last_dim_backward(y, jnp.ones_like(y))
        want = 1 - 70_000 * np.exp(f64(y))
        near(dx, want, 2**-7)

    def test_a_small_component_of_the_gradient(self):
        """bug062, jax#40384, #40386 and #40344: lost beside a large one."""
        y = F.softmax_last_dim(jnp.array([37.43, 0.0]))
        dx = f64(F.softmax_last_dim_backward(y, jnp.array([1.0, 0.0])))
        small = f64(y)[0] * f64(y)[1]
        np.testing.assert_allclose(dx, [small, -small], atol=1e-16)
        assert abs(dx.sum()) <= 1e-16

    @pytest.mark.parametrize("target", [-4, 5, -1, 2**31 - 1])
    @pytest.mark.parametrize("reduction", ["none", "mean"])
    def test_targets_that_are_no_class(self, target, reduction, draw):
        """bug043, pytorch#12670: one that is not ignore_index either was accepted silently."""
        logits, targets = draw((2, 5)), np.array([1, target])
        call = lambda x, t: F.fused_softmax_cross_entropy(x, t, reduction=reduction)
        loss = call(logits, targets)
        if reduction == "none":
            assert jnp.isnan(loss).tolist() == [False, True]
        else:
            assert jnp.isnan(loss)
        assert reported(call, logits, jnp.asarray(targets))
        call = lambda x, t: F.fused_softmax_cross_entropy(x, t, ignore_index=target)
        assert jnp.isfinite(call(logits, targets))

    def test_ignored_rows_are_exactly_zero(self, draw):
        """bug044, pytorch#20406: memory that was never written showed there."""
        targets = np.where(np.arange(24) % 2, -100, np.arange(24) % 5)
        loss = F.fused_softmax_cross_entropy(draw((24, 5)), targets, reduction="none")
        assert not loss[1::2].any()
        assert (loss[::2] > 0).all()

    @pytest.mark.parametrize("poison", [-INF, INF, NAN])
    def test_what_ignored_rows_hold_does_not_matter(self, poison, draw):
        """bug045, pytorch#11551: −inf logits in an ignored row poisoned the gradient."""
        logits, targets = draw((3, 5)).at[1].set(poison), np.array([2, -100, 4])
        for reduction in ("mean", "sum"):
            f = lambda x, r=reduction: F.fused_softmax_cross_entropy(
                x, targets[: len(x)], reduction=r
            )
            loss, dx = jax.value_and_grad(f)(logits)
            kept = lambda x, r=reduction: F.fused_softmax_cross_entropy(
                x, targets[[0, 2]], reduction=r
            )
            want, dkept = jax.value_and_grad(kept)(logits[jnp.array([0, 2])])
            near(loss, want)
            assert not dx[1].any()
            near(dx[jnp.array([0, 2])], dkept)

    def test_an_ignored_class_stays_in_the_sum(self, draw):
        """bug046, pytorch#63004: ignore_index may be a class."""
        logits = draw((2, 3))
        got = F.fused_softmax_cross_entropy(
            logits, np.array([1, 2]), ignore_index=0, reduction="none"
        )
        p = np.exp(f64(logits))
        near(got, np.log(p.sum(-1)) - f64(logits)[[0, 1], [1, 2]])

    @pytest.mark.parametrize("rows", [1, 2, 7])
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_scale_of_the_mean_s_gradient(self, rows, dtype, draw):
        """bug047, pytorch#64163: divided by the wrong number."""
        logits, targets = draw((rows, 2), dtype), np.arange(rows) % 2
        targets[-1] = -100 if rows > 1 else targets[-1]
        dx = jax.grad(lambda x: F.fused_softmax_cross_entropy(x, targets))(logits)
        p = np.exp(f64(logits))
        p /= p.sum(-1, keepdims=True)
        kept = targets != -100
        want = (p - np.eye(2)[np.where(kept, targets, 0)]) * kept[:, None] / kept.sum()
        near(dx, want)


def attend(q, k, v, *, scale, hidden, cap=None, bias=0.0):
    """Attention in float64; ``hidden[sq, sk]`` keys are not looked at, a row without any is 0."""
    q, k, v = f64(q), f64(k), f64(v)
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    s = s if cap is None else cap * np.tanh(s / cap)
    s = np.where(hidden, -INF, s + bias)
    top = np.max(s, -1, keepdims=True, initial=-1e300)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bhqd", e / np.where(total == 0, 1, total), v)


def causal(sq, sk):
    """Hidden from the queries at the end of the keys."""
    return np.arange(sk) > np.arange(sq)[:, None] + sk - sq


def qkv(draw, heads, sq, sk, d=8):
    return draw((1, heads, sq, d)), draw((1, heads, sk, d)), draw((1, heads, sk, d))


class TestAttention:
    @pytest.mark.parametrize(("sq", "sk"), [(3, 7), (5, 6), (1, 4), (4, 4), (6, 3)])
    def test_queries_stand_at_the_end_of_the_keys(self, sq, sk, draw):
        """bug020, candle#3437; bug076, flash-attention#436: a square's mask beside a cache."""
        q, k, v = qkv(draw, 2, sq, sk)
        got = F.flash_attn(q, k, v, causal=True)
        near(got, attend(q, k, v, scale=8**-0.5, hidden=causal(sq, sk)))
        if sq > sk:
            assert not got[:, :, : sq - sk].any()

    @pytest.mark.parametrize("left", [5, 6, 100])
    def test_a_window_wider_than_the_keys(self, left, draw):
        """bug021, candle#3438: no key outside the window."""
        q, k, v = qkv(draw, 2, 4, 6)
        for causal_too in (False, True):
            want = F.flash_attn(q, k, v, causal=causal_too)
            got = F.flash_attn(
                q, k, v, causal=causal_too, window_size_left=left, window_size_right=left
            )
            near(got, want, 1e-6)

    @pytest.mark.parametrize("causal_too", [False, True])
    def test_a_window_of_nothing_but_the_query_itself(self, causal_too, draw):
        """bug022, candle#3625: both masks together left a row without keys, 0/0."""
        q, k, v = qkv(draw, 2, 5, 5)
        got = F.flash_attn(q, k, v, causal=causal_too, window_size_left=0, window_size_right=0)
        near(got, v, 1e-6)

    @pytest.mark.parametrize("heads", [6, 40])
    def test_slopes_of_any_number_of_heads(self, heads, draw):
        """bug077, flash-attention#540: no power of two, and the ends of the sequence."""
        q, k, v = qkv(draw, heads, 3, 113)
        slopes = np.float32(2.0) ** -np.linspace(0.5, 8, heads, dtype=np.float32)
        distance = np.abs(np.arange(113) - (np.arange(3)[:, None] + 110))
        bias = -f64(slopes)[:, None, None] * distance
        for hidden, causal_too in ((causal(3, 113), True), (np.zeros((3, 113), bool), False)):
            got = F.flash_attn(q, k, v, slopes, causal=causal_too)
            near(got, attend(q, k, v, scale=8**-0.5, hidden=hidden, bias=bias), 5e-6)

    def test_the_cap_comes_before_the_bias(self, draw):
        """bug078, TransformerEngine#3391: the bias was squashed as well."""
        q, k, v = qkv(draw, 2, 4, 4)
        q = q * 20
        bias = -np.abs(np.arange(4) - np.arange(4)[:, None]) * np.ones((2, 1, 1))
        got = F.flash_attn(q, k, v, np.ones(2, np.float32), softcap=5.0)
        want = attend(q, k, v, scale=8**-0.5, hidden=np.zeros((4, 4), bool), cap=5, bias=bias)
        near(got, want, 5e-6)

    @pytest.mark.parametrize("poison", [NAN, INF, 1e30])
    def test_the_cap_comes_before_the_mask(self, poison, draw):
        """bug079, onnxruntime#28379 and #28370: a capped −inf is a visible key."""
        q, k, v = qkv(draw, 1, 3, 6)
        want = attend(q, k[:, :, :4], v[:, :, :4], scale=8**-0.5, hidden=causal(3, 4), cap=0.5)
        k, v = k.at[:, :, 4:].set(poison), v.at[:, :, 4:].set(poison)
        near(F.flash_attn(q, k, v, k_len=4, causal=True, softcap=0.5), want)

    def test_the_cap_is_not_ignored(self, draw):
        """bug082, flashinfer#1193 and sglang#33915."""
        q, k, v = qkv(draw, 2, 16, 16)
        q = q * 50
        capped, free = F.flash_attn(q, k, v, softcap=5.0), F.flash_attn(q, k, v)
        want = attend(q, k, v, scale=8**-0.5, hidden=np.zeros((16, 16), bool), cap=5)
        near(capped, want, 5e-6)
        assert np.abs(capped - free).max() > 0.1

    def paged(self, k, v, block_size, blocks):
        """The keys and values ``[1, h, s, d]`` in blocks; what is not used is NaN."""
        _, h, s, d = k.shape
        table = np.random.default_rng(0).permutation(blocks)[: -(-s // block_size)]
        caches = np.full((2, blocks, block_size, h, d), NAN, np.float32)
        for t in range(s):
            at = table[t // block_size], t % block_size
            caches[0][at], caches[1][at] = k[0, :, t], v[0, :, t]
        return (*caches, table[None].astype(np.uint32))

    @pytest.mark.parametrize(("sq", "length"), [(4, 2), (4, 4), (4, 0), (1, 0)])
    def test_queries_before_the_first_token(self, sq, length, draw):
        """bug083, flashinfer#4452: an empty row had a finite log-sum-exp."""
        q, k, v = qkv(draw, 2, sq, length)
        k_cache, v_cache, table = self.paged(np.asarray(k), np.asarray(v), 2, 5)
        table = np.concatenate([table, np.zeros((1, 3), np.uint32)], 1)
        got = F.paged_attn(q, k_cache, v_cache, table, np.array([length], np.uint32))
        if length:
            near(got, attend(q, k, v, scale=8**-0.5, hidden=causal(sq, length)))
        assert not got[:, :, : sq - length].any()

    @pytest.mark.parametrize("slopes", [None, np.array([0.5, 0.25], np.float32)])
    @pytest.mark.parametrize("block_size", [1, 3, 8, 32])
    def test_the_size_of_a_block_changes_nothing(self, block_size, slopes, draw):
        """bug087, vllm#57614: one other than 16, or ALiBi, was ignored."""
        q, k, v = qkv(draw, 2, 3, 11)
        k_cache, v_cache, table = self.paged(np.asarray(k), np.asarray(v), block_size, 13)
        got = F.paged_attn(
            q, k_cache, v_cache, table, np.array([11], np.uint32), slopes, block_size=block_size
        )
        distance = np.abs(np.arange(11) - (np.arange(3)[:, None] + 8))
        bias = 0.0 if slopes is None else -f64(slopes)[:, None, None] * distance
        near(got, attend(q, k, v, scale=8**-0.5, hidden=causal(3, 11), bias=bias))

    def test_angles_at_distant_positions(self, draw):
        """bug019, candle#3005: tables computed in bf16 are off by radians.

        Tables are operands here: built in float32 and rounded once they keep the angle.
        """
        d = 128
        frequency = 1e6 ** -(np.arange(0, d, 2) / d)
        angles = 4000 * np.concatenate([frequency, frequency])[None]
        x = draw((1, d), "bfloat16")
        cos, sin = (jnp.asarray(t(angles)).astype("bfloat16") for t in (np.cos, np.sin))
        half = f64(x)
        turned = np.concatenate([-half[:, d // 2 :], half[:, : d // 2]], 1)
        near(F.rope(x, cos, sin), half * np.cos(angles) + turned * np.sin(angles), 1e-2)


class TestConvolutions:
    @pytest.mark.parametrize("op", [F.conv2d, F.conv_transpose2d])
    def test_a_kernel_that_is_a_slice(self, op, draw):
        """bug002, candle#3736: a kernel with an offset was read past its end."""
        whole = draw((8, 6, 1, 1))
        if op is F.conv_transpose2d:
            whole = whole.transpose(1, 0, 2, 3)
        part = (lambda w: w[:, 2:5]) if op is F.conv2d else (lambda w: w[2:5])
        fresh = jnp.array(np.ascontiguousarray(part(np.asarray(whole))))
        x = draw((1, 3, 5, 5))
        near(op(x, part(whole)), op(x, fresh), 0)
        inside = jax.jit(lambda x, w: op(x, part(w)))
        near(inside(x, whole), op(x, fresh), 1e-6)
        loss = lambda w: jnp.sin(op(x, w)).sum()
        dwhole = jax.jit(jax.grad(lambda w: loss(part(w))))(whole)
        near(part(dwhole), jax.grad(loss)(fresh), 1e-5)

    @pytest.mark.parametrize(
        ("h", "k", "stride", "padding"),
        [(32, 7, 2, 3), (9, 3, 2, 0), (10, 3, 4, 0), (11, 2, 3, 1), (8, 1, 3, 0)],
    )
    def test_rows_left_over_by_the_stride(self, h, k, stride, padding, draw):
        """bug003, candle#1212 and #1214: the gradient had the wrong shape."""
        x, w = draw((1, 2, h, h), "float64"), draw((3, 2, k, k), "float64")
        f = lambda x, w: F.conv2d(x, w, stride=(stride, stride), padding=(padding, padding))
        y, pull = jax.vjp(f, x, w)
        g = draw(y.shape, "float64")
        dx, dw = pull(g)
        padded = np.pad(f64(x), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        want_x, want_w = np.zeros_like(padded), np.zeros(w.shape)
        for i, j in itertools.product(range(y.shape[2]), range(y.shape[3])):
            at = (
                slice(None),
                slice(None),
                slice(i * stride, i * stride + k),
                slice(j * stride, j * stride + k),
            )
            np.testing.assert_allclose(
                y[0, :, i, j], np.einsum("chw,ochw->o", padded[at][0], f64(w)), rtol=1e-9, atol=1e-9
            )
            want_x[at] += np.einsum("o,ochw->chw", f64(g)[0, :, i, j], f64(w))[None]
            want_w += np.einsum("o,chw->ochw", f64(g)[0, :, i, j], padded[at][0])
        near(dx, want_x[:, :, padding : padding + h, padding : padding + h], 1e-12)
        near(dw, want_w, 1e-12)

    def test_a_stride_of_the_kernel_s_size(self, draw):
        """bug004, candle#633: the gradient failed for stride 16, a vision model's patches."""
        x, w = draw((1, 3, 64, 64)), draw((8, 3, 16, 16))
        dx = jax.grad(lambda x: F.conv2d(x, w, stride=(16, 16)).sum())(x)
        near(dx, np.tile(f64(w).sum(0), (1, 1, 4, 4)))

    @pytest.mark.parametrize(("length", "kernel"), [(2, 5), (1, 4), (3, 1)])
    def test_a_sequence_shorter_than_the_kernel(self, length, kernel, draw):
        """bug102, onnx CausalConvWithState short_input."""
        x = np.pad(np.asarray(draw((1, 2, length))), ((0, 0), (0, 0), (kernel - 1, 0)))
        w, bias = draw((2, 1, kernel)), draw((2,))
        want = [
            [f64(x)[0, c, t : t + kernel] @ f64(w)[c, 0] + float(bias[c]) for t in range(length)]
            for c in range(2)
        ]
        near(F.causal_conv1d(x, w, bias), [want])


def scan(u, delta, a, b, c):
    """Mamba's recurrence, step by step in float64: every y, and the state after every step."""
    u, delta, a, b, c = map(f64, (u, delta, a, b, c))
    h, ys, states = np.zeros((u.shape[0], *a.shape)), [], []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        h = np.exp(step * a) * h + step * b[:, t, None, :] * u[:, t, :, None]
        ys.append((h * c[:, t, None, :]).sum(-1))
        states.append(h)
    return np.stack(ys, 1), states


def mamba(draw, length, d=3, n=4):
    a = -jnp.exp(draw((d, n)))
    delta = jnp.abs(draw((2, length, d)))
    return draw((2, length, d)), delta, a, draw((2, length, n)), draw((2, length, n))


class TestStateSpaces:
    def test_padding_after_the_sequence(self, draw):
        """bug095, mamba#368: padded steps were live once softplus was on.

        softplus(0) = 0.69 decays the state, so a padded sequence is cut before its padding; with Δ
        as given, 0 pads.
        """
        u, delta, a, b, c = mamba(draw, 5)
        pad = lambda x: jnp.pad(x, ((0, 0), (0, 3), (0, 0)))
        _, states = scan(u, delta, a, b, c)
        _, last = F.selective_scan(pad(u), pad(delta), a, pad(b), pad(c))
        near(last, states[4])
        _, soft = F.selective_scan(u, delta, a, b, c, delta_softplus=True)
        _, states = scan(u, np.log1p(np.exp(f64(delta))), a, b, c)
        near(soft, states[4], 5e-6)
        _, padded = F.selective_scan(pad(u), pad(delta), a, pad(b), pad(c), delta_softplus=True)
        assert np.abs(padded - soft).max() > 0.01

    def test_the_state_has_its_factor_b(self, draw):
        """bug096, mamba#371: last_state was returned without B."""
        u, delta, a, b, c = mamba(draw, 6)
        b = jnp.full_like(b, 3)
        _, states = scan(u, delta, a, b, c)
        near(F.selective_scan(u, delta, a, b, c)[1], states[-1])

    def test_delta_enters_twice(self):
        """bug097, mamba#551: does dt multiply B as well as A?"""
        one = jnp.ones((1, 1, 1, 1), "float32")
        dt, a = jnp.full((1, 1, 1), 0.5, "float32"), -jnp.ones(1, "float32")
        y, last = F.ssd_chunk_scan(one, dt, a, one, one, chunk_size=1)
        assert float(y[0, 0, 0, 0]) == float(last[0, 0, 0, 0]) == 0.5
        two = jnp.ones((1, 2, 1, 1), "float32")
        y, _ = F.ssd_chunk_scan(two, jnp.full((1, 2, 1), 0.5, "float32"), a, two, two, chunk_size=2)
        near(y[0, 1, 0, 0], 0.5 + 0.5 * np.exp(-0.5))

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 17])
    def test_order_of_a_parallel_scan(self, length, draw):
        """bug098, mamba#716: operands of the combination were swapped."""
        arrays = mamba(draw, length)
        want, states = scan(*arrays)
        y, last = F.selective_scan(*arrays)
        near(y, want, 5e-6)
        near(last, states[-1], 5e-6)

    def test_edges_of_chunks(self, draw):
        """bug100, sglang#31833: the state was read at the wrong edge."""
        length, heads, width, n = 12, 2, 3, 4
        x, dt = draw((2, length, heads, width)), jnp.abs(draw((2, length, heads)))
        a, b, c = -jnp.exp(draw((heads,))), draw((2, length, heads, n)), draw((2, length, heads, n))
        h, ys = np.zeros((2, heads, width, n)), []
        for t in range(length):
            step = f64(dt)[:, t, :, None, None]
            h = np.exp(step * f64(a)[:, None, None]) * h
            h += step * f64(x)[:, t, :, :, None] * f64(b)[:, t, :, None, :]
            ys.append((h * f64(c)[:, t, :, None, :]).sum(-1))
        for chunk_size in (1, 2, 3, 4, 6, 12):
            y, last = F.ssd_chunk_scan(x, dt, a, b, c, chunk_size=chunk_size)
            near(y, np.stack(ys, 1), 5e-6)
            near(last, h, 5e-6)
        for chunk_size in (0, 5, -1):
            with pytest.raises(F.ArgumentError, match="'chunk_size'"):
                F.ssd_chunk_scan(x, dt, a, b, c, chunk_size=chunk_size)


def stream(blocks):
    """GGUF blocks as little-endian words, padded with zeros."""
    loose = np.frombuffer(blocks.tobytes(), np.uint8)
    return np.pad(loose, (0, -loose.size % 4)).view("<u4").astype(np.uint32)


def half(x):
    return np.frombuffer(np.array(x, "<f2").tobytes(), np.uint8)


class TestQuantised:
    def test_extreme_codes(self):
        """bug029, candle#1526 and #1544: an integer product overflowed.

        Q4_K with every code 15 and every scale 63, beside activations of ±127.
        """
        block = np.full(144, 0xFF, np.uint8)
        block[:4] = np.concatenate([half(1.0), half(0.5)])
        a = np.where(np.arange(1024) % 3, 127, -127).astype(np.float32)[None]
        got = F.qmatmul(a, stream(np.tile(block, 4)), quant_type="Q4K", k=1024, n=1)
        weight = 63 * 15 - 0.5 * 63
        np.testing.assert_allclose(got, [[f64(a).sum() * weight]], rtol=1e-6)

    def test_fifth_bits(self):
        """bug030, candle#1569: Q5_K took the high bit from the wrong place.

        One set at a time: bit 2j of byte l belongs to weight 64j + l, bit 2j + 1 to 64j + 32 + l.
        """
        for bit, byte in itertools.product(range(8), (0, 13, 31)):
            block = np.zeros(176, np.uint8)
            block[:2] = half(1.0)
            block[4:8], block[12:16] = 1, 1  # all scales 1, all minima 0
            block[16 + byte] = 1 << bit
            got = F.qmatmul(
                np.eye(256, dtype=np.float32), stream(block), quant_type="Q5K", k=256, n=1
            )
            want = np.zeros(256)
            want[32 * bit + byte] = 16
            np.testing.assert_array_equal(got[:, 0], want)

    @pytest.mark.parametrize("m", range(1, 10))
    def test_rows_and_columns_that_fill_no_tile(self, m, draw):
        """bug031, candle#2509 and #2526: padding was read, or the last row lost."""
        n, k = 33, 288
        rng = np.random.default_rng(m)
        blocks = rng.integers(0, 256, (n, k // 32, 34), np.uint8)
        scales = rng.normal(0, 2**-7, (n, k // 32, 1)).astype("<f2")
        blocks[..., :2] = scales.view(np.uint8)
        w = (blocks[..., 2:].view(np.int8) * scales.astype(np.float64)).reshape(n, k)
        a = draw((m, k))
        got = F.qmatmul(a, stream(blocks), quant_type="Q8_0", k=k, n=n)
        near(got, f64(a) @ w.T)

    @pytest.mark.parametrize("k", [32, 96, 288])
    @pytest.mark.parametrize("quant_type", ["Q8_0", "Q4_0", "Q5_1"])
    def test_rows_that_are_no_multiple_of_256(self, quant_type, k, draw):
        """bug112, ik_llama.cpp#1005 and llamafile#935."""
        n, width = 3, {"Q8_0": 34, "Q4_0": 18, "Q5_1": 24}[quant_type]
        blocks = np.random.default_rng(k).integers(0, 256, (n, k // 32, width), np.uint8)
        blocks[..., :2] = half(2**-4)
        body = blocks[..., 2:]
        if quant_type == "Q5_1":
            blocks[..., 2:4] = half(-0.25)
            bits = np.unpackbits(blocks[..., 4:8], axis=-1, bitorder="little")
            body = blocks[..., 8:]
        q = np.concatenate([body & 15, body >> 4], -1).astype(int)
        if quant_type == "Q8_0":
            w = body.view(np.int8) * 2**-4
        else:
            w = (q - 8) * 2**-4 if quant_type == "Q4_0" else (q + 16 * bits) * 2**-4 - 0.25
        a = draw((2, k))
        got = F.qmatmul(a, stream(blocks), quant_type=quant_type, k=k, n=n)
        near(got, f64(a) @ w.reshape(n, k).T)

    @pytest.mark.parametrize(("k", "block_size"), [(96, 64), (64, 48), (2, 64)])
    def test_blocks_that_do_not_fill_a_row(self, k, block_size):
        """bug105, bitsandbytes#1884: an element count that is no multiple of the block."""
        a, packed = np.ones((1, k), np.float32), np.zeros((2, k // 2), np.uint8)
        absmax = np.ones((2, max(1, k // block_size)), np.float32)
        with pytest.raises(F.ArgumentError, match="blocks must fill a row"):
            F.nf4_matmul(a, packed, absmax, block_size=block_size)
        words = np.zeros((2, 12), np.uint32)
        with pytest.raises(F.ArgumentError, match="groups must fill a row"):
            F.awq_matmul(
                np.ones((1, 96), np.float32), words, words, words.astype(np.float16), group_size=64
            )
        with pytest.raises(F.ArgumentError, match="packs 256 weights"):
            F.qmatmul(np.ones((1, 96), np.float32), words[0], quant_type="Q4K", k=96, n=2)

    def test_which_nibble_comes_first(self):
        """bug106, bitsandbytes' order beside Fuel's: −1, 0 is packed as 0x07."""
        packed, absmax = np.array([[0x07]], np.uint8), np.ones((1, 1), np.float32)
        read = lambda **order: F.nf4_matmul(
            np.eye(2, dtype=np.float32), packed, absmax, block_size=2, **order
        )[:, 0].tolist()
        assert read() == [-1, 0]
        assert read(low_nibble_first=True) == [0, -1]
