"""What is true of casts, movers and fills in particular."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fuel_jax
from fuel_jax.ops.layout import (
    cast,
    concat,
    copy,
    flip,
    masked_fill,
    roll,
    tril,
    triu,
)
from fuel_jax.ops.padding import pad, pad_backward

from ..refused import refused

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NUMBERS = (*INTEGERS, "float32", "float64", "bfloat16", "float16", "float8_e4m3fn")
HUGE = 10**400  # overflows even float64
inf, nan = np.inf, np.nan


def same(got, want):
    """Equal in shape, dtype and every bit that matters: −0 is not 0, NaN is NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got.astype("float64"), want.astype("float64"))
    signs = [np.signbit(y.astype("float64")) & (y == y) for y in (got, want)]
    np.testing.assert_array_equal(*signs)


class TestCast:
    @pytest.mark.parametrize("source", ["float32", "float64", "bfloat16", "float16"])
    def test_floats_truncate_and_saturate_and_nan_is_zero(self, source):
        """Against exact integers of Python, around every limit."""
        xs = {}
        for to in INTEGERS:
            edges = [float(e) for e in (np.iinfo(to).min, np.iinfo(to).max, 0, 1, 100)]
            x = np.array([e + d for e in edges for d in (-1, -0.75, -0.25, 0, 0.25, 0.75, 1)])
            x = np.concatenate([x, 4 * x, [inf, -inf, nan, -0.0]])
            with np.errstate(over="ignore"):
                xs[to] = x.astype(jnp.dtype(source))

        def exact(value, limits):
            if value != value:
                return 0
            if abs(value) == inf:
                return limits.max if value > 0 else limits.min
            return min(max(int(value), limits.min), limits.max)

        every = jax.jit(lambda xs: {to: cast(x, dtype=to) for to, x in xs.items()})(xs)
        for to, x in xs.items():
            same(every[to], np.array([exact(float(v), np.iinfo(to)) for v in x], to))

    @pytest.mark.parametrize("source", INTEGERS)
    def test_integers_wrap(self, source):
        limits = np.iinfo(source)
        x = np.array([limits.min, limits.max, 0, 1, 70000 % limits.max, -1 % limits.max], source)
        ys = jax.jit(lambda x: [cast(x, dtype=to) for to in INTEGERS])(x)
        for to, y in zip(INTEGERS, ys, strict=True):
            ends = np.iinfo(to)
            want = [(int(v) - ends.min) % 2**ends.bits + ends.min for v in x]
            same(y, np.array(want, to))

    @pytest.mark.parametrize("source", NUMBERS)
    def test_to_a_float_rounds_to_nearest_even_through_float32(self, source, draw):
        """A cast by itself and several in a program, where XLA could drop a rounding."""
        x = np.asarray(draw((500,), "float64")) * np.logspace(-9, 9, 500)
        if source in INTEGERS:
            x = np.clip(x * 1e5, np.iinfo(source).min / 2, np.iinfo(source).max / 2)
        floats = ("bfloat16", "float16", "float8_e4m3fn", "float32", "float64")
        with np.errstate(over="ignore", invalid="ignore"):
            x = x.astype(jnp.dtype(source))
        ys = jax.jit(lambda x: [cast(x, dtype=to) for to in floats])(x)
        for to, y in zip(floats, ys, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                through = x if jnp.dtype(to).itemsize > 2 else x.astype("float32")
                want = through.astype(jnp.dtype(to))
            same(y, want)
            same(cast(x, dtype=to), want)

    def test_f8e4m3_is_exact_where_it_can_be_and_nan_beyond(self):
        x = np.array([0, 0.5, -0.5, 1, -1, 2, -2, 4, 448, 464, 465, -1e9, inf, nan], np.float32)
        want = np.array([*x[:9], 448, nan, nan, nan, nan], ml_dtypes.float8_e4m3fn)
        same(cast(x, dtype="F8E4M3"), want)
        same(
            cast(want, dtype="I8"),
            np.array([0, 0, 0, 1, -1, 2, -2, 4, 127, 127, 0, 0, 0, 0], "int8"),
        )

    @pytest.mark.parametrize("narrow", ["BF16", "F16", "F8E4M3"])
    def test_a_round_trip_rounds_under_jit_as_well(self, narrow, draw):
        """XLA on GPUs would drop it."""
        x = draw((64,))
        there_and_back = lambda x: cast(cast(x, dtype=narrow), dtype="F32")
        same(jax.jit(there_and_back)(x), there_and_back(x))
        assert (there_and_back(x) != x).any()
        x = draw((64,), "float64")
        there_and_back = lambda x: cast(cast(x, dtype="F32"), dtype="F64")
        same(jax.jit(there_and_back)(x), np.asarray(x).astype("float32").astype("float64"))

    def test_subnormal_halves_survive(self):
        x = np.array([1e-7, -6e-8, 3e-5], np.float32)
        same(cast(x, dtype="F16"), x.astype("float16"))

    def test_bool_is_zero_or_not(self):
        same(cast(np.array([0, 3, -1]), dtype=bool), np.array([False, True, True]))
        same(cast(np.array([0.0, nan, -0.0]), dtype="bool"), np.array([False, True, False]))
        same(cast(np.array([False, True]), dtype="U8"), np.array([0, 1], np.uint8))

    def test_the_gradient_is_cast_back(self):
        x = jnp.ones((3,), "float32")
        g = jax.grad(lambda x: cast(x, dtype="BF16").astype("float32").sum())(x)
        assert g.dtype == jnp.float32
        np.testing.assert_array_equal(g, 1)

    def test_accepts_every_spelling_of_a_dtype(self):
        for dtype in ("F16", "float16", jnp.float16, np.dtype("float16"), np.float16):
            assert cast(jnp.ones((2,), "float32"), dtype=dtype).dtype == jnp.float16

    @pytest.mark.parametrize("wide", ["F64", "I64", jnp.float64, "uint64"])
    def test_64_bits_need_x64(self, wide):
        with jax.enable_x64(False):
            with pytest.raises(fuel_jax.X64Required, match=r"cast: 'dtype' is .*64"):
                cast(jnp.ones((2,), "float32"), dtype=wide)
            same(cast(jnp.full((1,), 3e9, "float32"), dtype="U32"), np.array([3e9], "uint32"))

    def test_bad_calls(self):
        x = jnp.ones((2,), "float32")
        refused(cast, x, dtype="F33", match="parameter 'dtype'.*'F33'", error=fuel_jax.UnknownName)
        refused(cast, x, dtype="complex64", match="must be a float, an integer or bool")
        refused(cast, x, dtype=str, match="parameter 'dtype' is str")
        refused(cast, x.astype("complex64"), dtype="F32", match="'x' is complex64; it must be real")


class TestMovers:
    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    def test_flip(self, dim, draw):
        x = draw((2, 3, 4))
        same(flip(x, dim=dim), np.flip(x, dim))
        same(flip(flip(x, dim=dim), dim=dim), x)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_roll_by_any_distance(self, dim, draw):
        x = draw((5, 7, 3))
        shifts = (0, 1, -2, 5, 17, -(10**30), 10**30 + 3)
        ys = jax.jit(lambda x: [roll(x, dim=dim, shift=shift) for shift in shifts])(x)
        for shift, y in zip(shifts, ys, strict=True):
            same(y, np.roll(x, shift % x.shape[dim], dim))

    def test_roll_literally(self):
        same(roll(jnp.arange(3), dim=0, shift=1), np.array([2, 0, 1]))
        same(roll(jnp.arange(1, 6), dim=0, shift=-2), np.array([3, 4, 5, 1, 2]))

    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_concat_of_any_number(self, count, dim, draw):
        """A third operand used to be forgotten; so did all outer slices but the first."""
        shapes = [[2, 3, 4] for _ in range(count)]
        for i, shape in enumerate(shapes):
            shape[dim] = i  # the first one is empty
        arrays = [draw(tuple(shape)) for shape in shapes]
        join = lambda *xs: concat(*xs, dim=dim)
        loss = lambda *xs: jnp.sin(join(*xs)).sum()
        both = jax.jit(lambda *xs: (join(*xs), jax.grad(loss, tuple(range(count)))(*xs)))
        joined, grads = both(*arrays)
        same(joined, np.concatenate(arrays, dim))
        for g, x in zip(grads, arrays, strict=True):
            np.testing.assert_allclose(g, np.cos(x), rtol=1e-6)

    @pytest.mark.parametrize("dtype", [*NUMBERS, "bool", "complex64", "int4", "float8_e5m2"])
    def test_move_every_dtype(self, dtype):
        host = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
        every = lambda x, mask: (
            flip(x, dim=1),
            roll(x, dim=1, shift=1),
            concat(x, x, dim=0),
            pad(x, padding=((1, 0), (0, 0)), mode="replicate"),
            triu(x),
            tril(x),
            masked_fill(x, mask, value=1),
            copy(x),
        )
        wanted = (
            host[:, ::-1],
            np.roll(host, 1, 1),
            np.concatenate([host, host]),
            host[[0, 0, 1]],
            np.triu(host),
            np.tril(host),
            np.where(host != 0, np.ones_like(host), host),
            host,
        )
        for got, want in zip(jax.jit(every)(host, host != 0), wanted, strict=True):
            assert got.dtype == host.dtype
            np.testing.assert_array_equal(np.asarray(got), want)

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
    def test_of_nothing(self, shape):
        x = jnp.zeros(shape, "float32")
        for y in (flip(x, dim=0), roll(x, dim=1, shift=2), triu(x), tril(x), copy(x)):
            assert y.shape == shape
        assert pad(x, padding=((1, 1), (1, 1))).shape == (shape[0] + 2, shape[1] + 2)
        assert masked_fill(x, x > 0, value=1).shape == shape

    def test_bad_calls(self, draw):
        x = draw((2, 3))
        refused(flip, x, dim=2, match=r"parameter 'dim' is 2 .*float32\[2,3\].*from -2 to 1")
        refused(flip, jnp.float32(1), dim=0, match="a scalar has no axis")
        refused(roll, x, dim=-3, shift=1, match="parameter 'dim' is -3")
        refused(roll, x, dim=0, shift=1.5, match="parameter 'shift' is 1.5; it must be an int")
        refused(concat, dim=0, match="'arrays' is empty")
        refused(concat, x, x[:, :2], dim=0, match=r"'arrays\[1\]' is float32\[2,2\]")
        refused(concat, x, x[0], dim=0, match=r"'arrays\[1\]' is float32\[3\]")
        refused(concat, x, x, dim=2, match="parameter 'dim' is 2")
        refused(concat, x, x.astype("float16"), dim=0, match="operands share one dtype")
        refused(concat, x, x, match="parameter 'dim' is missing")


class TestPad:
    @pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
    @pytest.mark.parametrize(
        "padding", [((0, 0), (0, 0)), ((1, 2), (0, 3)), ((2, 0), (3, 1)), ((2, 2), (3, 3))]
    )
    def test_as_numpy_pads(self, mode, padding, draw):
        x = draw((3, 4))
        kind = "edge" if mode == "replicate" else mode
        options = {"constant_values": 2.5} if mode == "constant" else {}
        got = pad(x, padding=padding, mode=mode, value=2.5 if mode == "constant" else 0)
        same(got, np.pad(x, padding, kind, **options))

    @pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
    def test_backward_adds_each_copy_where_it_came_from(self, mode, draw):
        padding, kind = ((2, 1), (1, 3)), "edge" if mode == "replicate" else mode
        g = draw((6, 8))
        source = np.arange(12).reshape(3, 4)
        source = np.pad(
            source, padding, kind, **({"constant_values": 12} if mode == "constant" else {})
        )
        want = np.bincount(source.ravel(), np.asarray(g, np.float64).ravel(), 13)[:12].reshape(3, 4)
        got = pad_backward(g, padding=padding, mode=mode)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        pull = jax.vjp(lambda x: pad(x, padding=padding, mode=mode), draw((3, 4)))[1]
        same(pull(g)[0], got)

    def test_backward_literally(self):
        g = jnp.array([10.0, 20, 30, 40, 50, 60])
        same(pad_backward(g, padding=((1, 2),)), np.array([20.0, 30, 40]))
        same(pad_backward(g, padding=((1, 2),), mode="replicate"), np.array([30.0, 30, 150]))
        same(pad_backward(g, padding=((1, 2),), mode="reflect"), np.array([80.0, 90, 40]))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_backward_sums_halves_in_float32(self, dtype):
        """A thousand ones: their sum in bfloat16 would stop at 256."""
        g, padding = jnp.ones((1000,), dtype), ((500, 499),)
        assert pad_backward(g, padding=padding, mode="replicate")[0] == 1000
        pull = jax.vjp(lambda x: pad(x, padding=padding, mode="replicate"), g[:1])[1]
        assert pull(g)[0][0] == 1000

    def test_a_constant_keeps_64_bits(self):
        x = jnp.zeros((1,), "int64")
        assert pad(x, padding=((1, 0),), value=2**62 + 1)[0] == 2**62 + 1
        assert jnp.isnan(pad(x.astype("float32"), padding=((1, 0),), value=nan)[0])

    def test_bad_calls(self, draw):
        x = draw((2, 3))
        one = ((1, 1), (1, 1))
        refused(pad, x, padding=((1, 1),), match="must be 2 pairs")
        refused(pad, x, padding=(1, 1), match="parameter 'padding' is \\(1, 1\\); it must be")
        refused(pad, x, padding=((1, -1), (0, 0)), match="none may be negative")
        refused(
            pad, x, padding=((2, 0), (0, 0)), mode="reflect", match="smaller than the extent, 2"
        )
        refused(pad, x, padding=one, mode="wrap", match="parameter 'mode' is 'wrap'")
        refused(pad, x[:0], padding=one, mode="replicate", match="axis 0 is empty")
        refused(pad, x[:0], padding=one, mode="reflect", match="smaller than the extent, 0")
        refused(pad, x.astype("int8"), padding=one, value=128, match="integer from -128 to 127")
        refused(pad_backward, x, padding=((2, 1), (0, 0)), match="axis 0 is shorter")
        refused(pad_backward, x, padding=((0, 0), (1, 1)), mode="reflect", match="the extent, 1")
        refused(pad_backward, x, padding=((1, 1),), match="must be 2 pairs")
        refused(pad_backward, jnp.arange(3), padding=((1, 1),), match="its dtype must be one of")


class TestSelection:
    @pytest.mark.parametrize("shape", [(3, 3), (2, 3, 5), (4, 2), (1, 1)])
    def test_triangles(self, shape, draw):
        x = draw(shape)
        diagonals = (0, 1, -1, 2, -2, 3, 100, -100, 10**30, -(10**30))
        both = jax.jit(lambda x: [(triu(x, diagonal=d), tril(x, diagonal=d)) for d in diagonals])
        for d, (upper, lower) in zip(diagonals, both(x), strict=True):
            near = max(min(d, 100), -100)
            same(upper, np.triu(x, near))
            same(lower, np.tril(x, near))

    def test_what_is_dropped_does_not_leak(self):
        x = jnp.full((2, 2), nan)
        for f, kept in ((triu, [[1, 1], [0, 1]]), (tril, [[1, 0], [1, 1]])):
            np.testing.assert_array_equal(jnp.isnan(f(x)), kept)
            pull = jax.vjp(f, jnp.ones((2, 2)))[1]
            np.testing.assert_array_equal(jnp.isnan(pull(x)[0]), kept)
        mask = np.array([[1, 0], [2, 0]], np.uint8)
        fill = lambda x: masked_fill(x, mask, value=5)
        np.testing.assert_array_equal(jnp.isnan(fill(x)), mask == 0)
        np.testing.assert_array_equal(jnp.isnan(jax.vjp(fill, x)[1](x)[0]), mask == 0)

    def test_any_truth_value_fills(self):
        x = jnp.arange(1.0, 7)
        want = np.array([1.0, -99, 3, -99, 5, -99])
        for mask in ([0, 1, 0, 255, 0, 2], [False, True] * 3):
            mask = np.array(mask)
            mask = mask if mask.dtype == bool else mask.astype(np.uint8)
            same(masked_fill(x, mask, value=-99.0), want)
            np.testing.assert_array_equal(
                jax.grad(lambda x, m=mask: masked_fill(x, m, value=-99.0).sum())(x), mask == 0
            )

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            *[("float16", -inf), ("float16", 65504), ("bfloat16", -3e38), ("float32", nan)],
            *[("int64", 2**63 - 1), ("uint64", 2**64 - 1), ("uint8", 255.0), ("bool", 1)],
            ("float8_e4m3fn", 448),
        ],
    )
    def test_values_that_fit(self, dtype, value):
        y = masked_fill(jnp.zeros((1,), dtype), np.array([True]), value=value)
        np.testing.assert_array_equal(np.asarray(y), np.array([value]).astype(y.dtype))

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            *[("float16", -1e9), ("float16", HUGE), ("float8_e4m3fn", inf), ("float32", 1e39)],
            *[("int8", 128), ("int8", -129), ("uint8", -1), ("int32", 0.5), ("int32", nan)],
            *[("int64", 2**63), ("bool", 2), ("uint8", inf), ("float64", HUGE)],
        ],
        ids=lambda v: v if isinstance(v, str) else f"{float(v):g}" if v is not HUGE else "huge",
    )
    def test_values_that_do_not(self, dtype, value):
        x, mask = jnp.zeros((1,), dtype), np.array([True])
        refused(masked_fill, x, mask, value=value, match="parameter 'value' is")
        refused(pad, x, padding=((1, 0),), value=value, match="parameter 'value' is")

    def test_bad_calls(self, draw):
        x = draw((2, 3))
        refused(triu, x[0], match="it has 1 axes, wanted at least 2")
        refused(tril, x, diagonal=0.5, match="parameter 'diagonal' is 0.5; it must be an int")
        refused(masked_fill, x, x[0] > 0, value=0, match="'mask' is bool\\[3\\]")
        refused(masked_fill, x, x, value=0, match="its dtype must be one of uint8, bool")
        refused(masked_fill, x, x > 0, value="0", match="parameter 'value' is '0'")


class TestCopy:
    def test_is_a_buffer_of_its_own(self):
        x = jnp.arange(4.0)
        y = copy(x)
        x.delete()
        np.testing.assert_array_equal(y, [0, 1, 2, 3])

    def test_to_another_device_and_back_with_the_gradient(self):
        here, there = jax.devices()[:2]
        x = jax.device_put(jnp.arange(4.0), here)
        assert copy(x, device=there).devices() == {there}
        g = jax.grad(lambda x: jnp.sin(copy(x, device=there)).sum())(x)
        assert g.devices() == {here}
        np.testing.assert_allclose(g, jnp.cos(x))
        rows = jax.vmap(lambda row: copy(row, device=there))(x.reshape(2, 2))
        assert rows.devices() == {there}

    def test_to_a_sharding(self):
        mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        x = jnp.arange(8.0)
        assert copy(x, device=split).sharding == split
        y = jax.jit(lambda x: copy(x + 1, device=split))(x)
        assert y.sharding.is_equivalent_to(split, 1)
        np.testing.assert_array_equal(y, np.arange(1.0, 9))

    def test_under_jit_a_device_is_where_the_program_runs(self):
        """A bare jax.device_put inside jit would ignore it."""
        there = jax.devices()[1]
        f = jax.jit(lambda x: copy(x * 2, device=there))
        assert f(jnp.arange(4.0)).devices() == {there}
        with pytest.raises(ValueError, match="incompatible devices"):
            f(jax.device_put(jnp.arange(4.0), jax.devices()[0]))

    def test_bad_calls(self, draw):
        refused(
            copy, draw((2,)), device="gpu", match="parameter 'device' is 'gpu'; it must be a device"
        )
        refused(copy, [1.0], match="it must be an array")
