"""What is true of reductions in particular: NaN, ties, nothing, long axes, wide sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.ops.cumsum import cumsum
from fuel_jax.ops.reduce import (
    argmax_dim,
    argmin_dim,
    max_reduce,
    mean_reduce,
    min_reduce,
    reduce_max_to,
    reduce_sum_to,
    sum_reduce,
)

from ..contract import compiled
from ..refused import refused

nan, inf = np.nan, np.inf
HALVES = ("bfloat16", "float16")
FLOATS = ("float32", "float64", *HALVES)
NUMPY = {sum_reduce: np.sum, mean_reduce: np.mean, max_reduce: np.max, min_reduce: np.min}


def slope(f, x, g=1.0):
    """Gradient of g · Σ f, compiled as one program."""
    return jax.jit(jax.grad(lambda x: (g * f(x)).sum()))(x)


# -- axes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", NUMPY, ids=lambda op: op.name)
def test_every_choice_of_axes_is_numpy_s(op):
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    choices = [dims for n in range(4) for dims in itertools.combinations(range(3), n)]
    ys = jax.jit(lambda x: [op(x, dims=dims) for dims in choices])(x)
    for y, dims in zip(ys, choices, strict=True):
        np.testing.assert_allclose(y, NUMPY[op](x, axis=dims), rtol=1e-14)


def test_of_a_transposed_array_of_five_axes():
    """candle#3873: interior axes of a strided operand."""
    x = np.arange(2 * 3 * 4 * 5.0).reshape(1, 2, 3, 4, 5).transpose(4, 0, 2, 1, 3)
    for op, numpy in NUMPY.items():
        np.testing.assert_allclose(op(jnp.asarray(x), dims=(1, 2)), numpy(x, axis=(1, 2)))


def test_all_axes_one_axis_no_axis():
    x = jnp.arange(6.0).reshape(2, 3)
    assert sum_reduce(x) == 15
    np.testing.assert_array_equal(sum_reduce(x, dims=-1), [3, 12])
    np.testing.assert_array_equal(sum_reduce(x, dims=np.int64(0)), [3, 5, 7])
    np.testing.assert_array_equal(sum_reduce(x, dims=[0, -1]), 15)
    np.testing.assert_array_equal(sum_reduce(x, dims=()), x)
    assert mean_reduce(jnp.float32(3)) == 3


# -- sums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_summed_in_float32(dtype):
    x = jnp.ones((70_000,), dtype) / 128
    want = jnp.asarray(70_000 / 128).astype(dtype)
    assert sum_reduce(x) == want
    assert reduce_sum_to(x, shape=(1,)) == want
    assert cumsum(x, dim=0)[-1] == want
    assert mean_reduce(jnp.full((70_000,), 3, dtype)) == 3  # the sum exceeds float16
    assert sum_reduce(x).dtype == mean_reduce(x).dtype == x.dtype


@pytest.mark.parametrize("dims", [0, 1, None])
def test_long_sums_keep_their_promise(dims):
    x = np.random.default_rng(0).uniform(size=(4096, 33)).astype(np.float32)
    want = np.sum(x, dims, dtype=np.float64)
    np.testing.assert_allclose(sum_reduce(x, dims=dims), want, rtol=2e-6)
    np.testing.assert_allclose(mean_reduce(x, dims=dims), np.mean(x, dims, np.float64), rtol=2e-6)


@pytest.mark.parametrize("shape", [(1, 20), (2, 1, 40), (3, 700, 17), (1, 1, 16)])
def test_sums_over_leading_axes(shape):
    """Slice onto slice, and the slope of each element 1."""
    x = np.random.default_rng(0).normal(size=shape)
    leading = [tuple(range(n)) for n in range(1, len(shape))]

    def over(x, dims):
        to = (1,) * len(dims) + shape[len(dims) :]
        dx = slope(lambda x: sum_reduce(x, dims=dims) ** 2 / 2, x)
        return sum_reduce(x, dims=dims), mean_reduce(x, dims=dims), reduce_sum_to(x, shape=to), dx

    every = jax.jit(lambda x: [over(x, dims) for dims in leading])(x)
    for dims, (total, mean, to, dx) in zip(leading, every, strict=True):
        want = x.sum(dims)
        np.testing.assert_allclose(total, want, rtol=1e-11)
        np.testing.assert_allclose(mean, x.mean(dims), rtol=1e-11)
        np.testing.assert_allclose(to, x.sum(dims, keepdims=True), rtol=1e-11)
        np.testing.assert_allclose(dx, np.broadcast_to(want, shape), rtol=1e-11)


def test_integers_are_summed_in_their_own_dtype_and_wrap():
    x = jnp.array([200, 100], jnp.uint8)
    assert sum_reduce(x) == 44
    assert sum_reduce(x).dtype == jnp.uint8
    assert sum_reduce(jnp.array([2**40, 1])) == 2**40 + 1
    np.testing.assert_array_equal(cumsum(x, dim=0), [200, 44])
    np.testing.assert_array_equal(reduce_sum_to(x, shape=(1,)), [44])


def test_sum_of_nothing_is_0():
    for shape, dims in (((0, 3), 0), ((3, 0), 1), ((0,), None)):
        y = sum_reduce(jnp.zeros(shape), dims=dims)
        assert not y.any()
        assert y.shape == np.zeros(shape).sum(dims).shape
    np.testing.assert_array_equal(reduce_sum_to(jnp.zeros((0, 2)), shape=(1, 2)), [[0, 0]])


def test_mean_of_no_element_is_refused_and_no_mean_is_not():
    assert mean_reduce(jnp.zeros((0, 3)), dims=1).shape == (0,)
    for shape, dims in (((0, 3), 0), ((0, 3), None), ((0, 0), 1)):
        refused(mean_reduce, jnp.zeros(shape), dims=dims, match="a mean needs at least one element")


# -- extremes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dtype"), [(5, "float32"), (64, "float32"), *((131, d) for d in FLOATS)]
)
def test_nan_wins_wherever_it_stands(n, dtype):
    """Beyond 4096 elements XLA's own reduction loses it on the CPU, on either axis."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(min(n, 64), n))
    at = rng.permutation(n)[: len(x)]
    x[np.arange(len(x)), at] = nan
    x = x.astype(jnp.dtype(dtype))
    kinds = ((max_reduce, argmax_dim), (min_reduce, argmin_dim))
    both = lambda y, dim: [(f(y, dims=dim), g(y, dim=dim)) for f, g in kinds]
    rows = compiled(lambda x: [*both(x, 1), (reduce_max_to(x, shape=(len(x), 1)), at)])(x)
    for highest, where in rows + compiled(lambda x: both(x, 0))(x.T):
        assert np.isnan(np.asarray(highest, "float32")).all()
        np.testing.assert_array_equal(where, at)


EXTREMES = {  # compiled once for both signs
    dims: compiled(lambda z, dims=dims: (max_reduce(z, dims=dims), min_reduce(z, dims=dims)))
    for dims in (1, 0, (0, 2))
}
POSITIONS = jax.jit(lambda y: (argmax_dim(y, dim=1), argmin_dim(y, dim=1)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_of_either_sign_wins(dtype, sign):
    """As integers, NaN with its sign set is less than −inf."""
    x = np.zeros((3, 700))
    x[:, 1], x[:, 2] = inf, -inf
    x[1, 600] = np.copysign(nan, sign)
    y = x.astype(jnp.dtype(dtype))
    for dims, z in ((1, y), (0, y.T), ((0, 2), y.T.reshape(70, 10, 3).swapaxes(1, 2))):
        for got, end in zip(EXTREMES[dims](z), (inf, -inf), strict=True):
            np.testing.assert_array_equal(np.asarray(got, "float32"), [end, nan, end])
    top, bottom = POSITIONS(y)
    np.testing.assert_array_equal(top, [1, 600, 1])
    np.testing.assert_array_equal(bottom, [2, 600, 2])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_extremes_of_integers_in_long_rows(dtype):
    ends = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(ends.min, ends.max, (5, 700), dtype, endpoint=True)
    ends = jax.jit(lambda x: [(max_reduce(x, dims=d), min_reduce(x, dims=d)) for d in (0, 1)])
    for dim, (top, bottom) in enumerate(ends(x)):
        np.testing.assert_array_equal(top, x.max(dim))
        np.testing.assert_array_equal(bottom, x.min(dim))


def test_infinities_and_signed_zeros():
    x = jnp.array([[-inf, -inf], [inf, -inf], [-0.0, 0.0]])
    np.testing.assert_array_equal(max_reduce(x, dims=1), [-inf, inf, 0])
    np.testing.assert_array_equal(min_reduce(x, dims=1), [-inf, -inf, 0])
    np.testing.assert_array_equal(argmax_dim(x, dim=1), [0, 0, 0])
    np.testing.assert_array_equal(argmin_dim(x, dim=1), [0, 1, 0])


def test_extremes_of_nothing():
    x = jnp.zeros((2, 0))
    np.testing.assert_array_equal(max_reduce(x, dims=1), [-inf, -inf])
    np.testing.assert_array_equal(min_reduce(x, dims=1), [inf, inf])
    np.testing.assert_array_equal(reduce_max_to(x, shape=(2, 1)), [[-inf], [-inf]])
    assert max_reduce(x, dims=0).shape == (0,)
    integers = ("int8", "uint8", "int32", "uint32", "int64")
    ends = jax.jit(lambda xs: [(max_reduce(x), min_reduce(x)) for x in xs])
    for top, bottom in ends([np.zeros(0, dtype) for dtype in integers]):
        limits = np.iinfo(top.dtype)
        assert (top, bottom) == (limits.min, limits.max)


def test_integer_extremes_start_from_no_float():
    """candle#3200."""
    assert max_reduce(jnp.array([-5, -7], jnp.int32)) == -5
    assert min_reduce(jnp.array([200, 255], jnp.uint8)) == 200
    big = jnp.array([2**62, 2**62 + 1])  # equal in any float
    assert max_reduce(big) == 2**62 + 1
    assert argmax_dim(big, dim=0) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_share_the_gradient_equally(dtype):
    x = jnp.array([[1, 3, 3, 2], [5, 5, 5, 5], [0, -0.0, -1, -2]], dtype)
    want = jnp.array([[0, 4, 4, 0], [2, 2, 2, 2], [4, 4, 0, 0]], dtype)
    tall = lambda x: reduce_max_to(x, shape=(3, 1))
    top, bottom = (lambda x, op=op: op(x, dims=1) for op in (max_reduce, min_reduce))
    every = jax.jit(lambda x: [slope(f, at, 8) for f, at in ((top, x), (bottom, -x), (tall, x))])
    for dx in every(x):
        np.testing.assert_array_equal(dx, want)
        assert dx.dtype == x.dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_many_ties_are_counted_exactly(dtype):
    """65536 ones overflow a float16 count, and a bfloat16 count stops at 256."""
    x = jnp.zeros((2**16,), dtype)
    np.testing.assert_array_equal(slope(max_reduce, x, 2.0**10), jnp.full(x.shape, 2**-6, dtype))


def test_an_infinite_cotangent_stays_where_the_extreme_is():
    for op in (max_reduce, min_reduce):
        x = jnp.array([2.0, 1.0]) * (1 if op is max_reduce else -1)
        np.testing.assert_array_equal(slope(op, x, inf), [inf, 0])


@pytest.mark.parametrize("op", [max_reduce, min_reduce])
def test_a_window_holding_nan_has_no_derivative_its_neighbours_have(op):
    x = jnp.array([[1.0, nan, 2.0], [4.0, 3.0, 4.5]])
    at = 2 if op is max_reduce else 1
    want = np.array([[nan] * 3, np.eye(3)[at]])
    np.testing.assert_array_equal(slope(lambda x: op(x, dims=1), x), want)
    ahead = jax.jit(lambda x, t: jax.jvp(lambda x: op(x, dims=1), (x,), (t,)))
    _, dy = ahead(x, np.ones((2, 3)))
    np.testing.assert_array_equal(dy, [nan, 1])


def test_the_extreme_of_nothing_has_a_derivative_of_0():
    x = jnp.zeros((2, 0))
    _, dy = jax.jvp(lambda x: max_reduce(x, dims=1), (x,), (x,))
    np.testing.assert_array_equal(dy, [0, 0])
    assert slope(lambda x: max_reduce(x, dims=1), x).shape == (2, 0)


def test_a_row_of_minus_infinity_shares_its_gradient():
    x = jnp.full((4,), -inf)
    np.testing.assert_array_equal(slope(max_reduce, x), [0.25] * 4)


def test_integers_do_not_stand_in_the_way_of_a_gradient():
    n = jnp.array([3, 5])
    assert jax.grad(lambda x: x * (max_reduce(n) * sum_reduce(n)).astype(x.dtype))(2.0) == 40


# -- shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "target"),
    [((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 3), ()), ((2, 3), (1, 1)), ((2, 3), (2, 3)),
     ((4, 2, 3), (2, 1)), ((1, 3), (3,)), ((), ())],
)  # fmt: skip
def test_reducing_to_a_shape_is_the_transpose_of_broadcasting(shape, target):
    x = np.random.default_rng(0).normal(size=shape)
    spread = jax.linear_transpose(lambda y: jnp.broadcast_to(y, shape), np.zeros(target))
    to = lambda x: (*spread(x), reduce_sum_to(x, shape=target), reduce_max_to(x, shape=target))
    want, total, top = map(np.asarray, jax.jit(to)(x))
    np.testing.assert_allclose(total, want, rtol=1e-14)
    assert top.shape == target
    assert (top >= x).all()
    assert np.isin(top, x).all()


# -- arg-reductions ------------------------------------------------------------------------


def test_the_first_of_equal_elements():
    assert argmax_dim(jnp.array([3, 1, 3, 3.0]), dim=0) == 0
    x = np.zeros(1000, np.float32)
    x[[7, 900]] = 1
    assert argmax_dim(x, dim=0) == 7
    assert argmin_dim(-x, dim=0) == 7


def test_doubles_are_compared_as_doubles():
    x = jnp.array([1, 1 + 1e-12])
    assert argmax_dim(x, dim=0) == 1
    assert argmin_dim(-x, dim=0) == 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 1031), "float32"), ((1031, 3), "bfloat16"), ((2, 512, 3), "int8"), ((63, 2), "uint32"),
     ((50_257,), "float32")],
)  # fmt: skip
def test_positions_are_numpy_s(shape, dtype):
    """Long axes and short ones, with ties: whichever implementation serves."""
    x = np.random.default_rng(0).integers(0, 100, shape)
    dims = range(len(shape))
    every = jax.jit(lambda x: [(argmax_dim(x, dim=d), argmin_dim(x, dim=d)) for d in dims])
    for dim, (top, bottom) in enumerate(every(x.astype(jnp.dtype(dtype)))):
        assert top.dtype == jnp.uint32
        np.testing.assert_array_equal(top, x.argmax(dim))
        np.testing.assert_array_equal(bottom, x.argmin(dim))


def test_the_position_is_that_of_the_extreme():
    x = np.random.default_rng(0).normal(size=(40, 300))
    x[::3, 17] = nan
    at = np.asarray(argmax_dim(x, dim=1))
    np.testing.assert_array_equal(x[np.arange(40), at], max_reduce(x, dims=1))


# -- running sums --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim"), [((7,), 0), ((2, 300), 1), ((300, 2), 0), ((2, 65, 3), 1)]
)
def test_running_sums_are_numpy_s(shape, dim):
    x = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_allclose(cumsum(x, dim=dim), np.cumsum(x, dim), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 2)])
def test_long_running_sums_keep_their_promise(shape):
    x = np.random.default_rng(0).uniform(size=shape).astype(np.float32)
    dim = int(np.argmax(shape))
    want = np.cumsum(x, dim, np.float64)
    error = np.abs(np.asarray(cumsum(x, dim=dim)) - want).max() / want.max()
    assert error < cumsum.precision.float32


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_reaches_only_what_comes_after(bad):
    for dim, shape in ((1, (2, 100)), (0, (100, 2))):
        x = np.ones(shape, np.float32)
        np.moveaxis(x, dim, 0)[70] = bad
        y = np.moveaxis(np.asarray(cumsum(x, dim=dim)), dim, 0)
        np.testing.assert_array_equal(y[:70], np.arange(1, 71)[:, None] + np.zeros(2))
        np.testing.assert_array_equal(y[70:], np.full((30, 2), bad))


def test_the_gradient_of_a_running_sum_runs_backwards():
    g = np.array([1.0, 2, 3, 4])
    dx = slope(lambda x: cumsum(x, dim=0), jnp.zeros(4), g)
    np.testing.assert_array_equal(dx, np.cumsum(g[::-1])[::-1])


def test_a_running_sum_of_nothing():
    assert cumsum(jnp.zeros((2, 0)), dim=1).shape == (2, 0)
    assert cumsum(jnp.zeros((0, 2)), dim=1).shape == (0, 2)


def there_and_back(x):
    """Running sums along rows, and their gradient for the cotangent x."""
    run = lambda x: cumsum(x, dim=1)
    return run(x), slope(run, jnp.zeros_like(x), x)


THERE_AND_BACK = compiled(there_and_back)


@pytest.mark.parametrize("n", [17, 33, 272, 4099])
def test_running_sums_of_rows_in_blocks(n):
    """More than one level of blocks, whole ones and begun ones; the gradient from the other end."""
    x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    y, back = map(np.asarray, THERE_AND_BACK(x))
    want = np.cumsum(x, 1, np.float64)
    assert np.abs(y - want).max() < cumsum.precision.float32 * np.abs(want).max()
    want = np.cumsum(x[:, ::-1], 1, np.float64)[:, ::-1]
    assert np.abs(back - want).max() < cumsum.precision.float32 * np.abs(want).max()


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_stays_in_its_place_across_blocks(bad):
    x = np.ones((2, 600), np.float32)
    x[0, 350] = bad
    y, dx = map(np.asarray, THERE_AND_BACK(x))
    np.testing.assert_array_equal(y[1], np.arange(1, 601))
    np.testing.assert_array_equal(y[0, :350], np.arange(1, 351))
    np.testing.assert_array_equal(y[0, 350:], np.full(250, bad))
    np.testing.assert_array_equal(dx[0, :351], np.full(351, bad))
    np.testing.assert_array_equal(dx[0, 351:], np.arange(249, 0, -1))


def test_a_running_sum_is_batched_and_differentiated_forward_and_twice():
    x = np.random.default_rng(0).normal(size=(2, 3, 40))
    f = lambda x: cumsum(x, dim=0)
    np.testing.assert_allclose(jax.vmap(jax.vmap(f))(x), np.cumsum(x, 2), rtol=1e-12, atol=1e-12)
    _, t = jax.jvp(lambda x: cumsum(x, dim=2), (x,), (x,))
    np.testing.assert_allclose(t, np.cumsum(x, 2), rtol=1e-12, atol=1e-12)
    square = lambda x: (cumsum(x, dim=2) ** 2).sum() / 2
    h = jax.jvp(jax.grad(square), (x,), (x,))[1]
    want = np.cumsum(np.cumsum(x, 2)[..., ::-1], 2)[..., ::-1]
    np.testing.assert_allclose(h, want, rtol=1e-11, atol=1e-11)


# -- bad calls -----------------------------------------------------------------------------


def test_bad_calls():
    x = jnp.zeros((2, 3))
    for op in NUMPY:
        refused(op, x, dims=(1, 0), match=r"axes \(1, 0\) of 'x'; they must ascend.*Pass \(0, 1\)")
        refused(op, x, dims=(1, -1), match=r"axes \(1, 1\).*Pass \(1,\)")
        refused(op, x, dims=(0, 2), match="'dims' is 2 and 'x' has 2 axes; it must be from -2 to 1")
        refused(op, x, dims=-3, match="it must be from -2 to 1")
        refused(op, jnp.float32(1), dims=0, match="'x' has no axes")
        refused(op, x, dims=1.5, match="parameter 'dims' is 1.5; it must be")
        refused(op, x, dims=True, match="parameter 'dims' is True")
        refused(op, x, x, match="got 2 arrays, takes 1")
    for op in (argmax_dim, argmin_dim, cumsum):
        refused(op, x, match="parameter 'dim' is missing")
        refused(op, x, dim=2, match="'dim' is 2 and 'x' has 2 axes; it must be from -2 to 1")
        refused(op, jnp.float32(1), dim=0, match="'x' has no axes")
    for op in (argmax_dim, argmin_dim):
        refused(op, jnp.zeros((3, 0)), dim=-1, match="its axis -1 is empty")
        assert op(jnp.zeros((3, 0)), dim=0).shape == (0,)
    for op in (reduce_sum_to, reduce_max_to):
        for shape in ((2,), (2, 3, 1), (1, 2, 3), (4, 3), (-1,), (0, 3)):
            refused(op, x, shape=shape, match="each extent must be that of x or 1")
    refused(mean_reduce, jnp.arange(3), match="its dtype must be one of float32")
    refused(sum_reduce, jnp.array([True]), match="its dtype must be one of")
