"""What is true of indexing in particular: out of range, repeats, half types, a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from fuel_jax.ops.index import gather, index_add, index_select, nonzero_indices, scatter_add

from ..refused import refused

nan = np.nan
INTS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
KERNELS = ("rows", "in_order", "xla")
OUTSIDE = [
    np.array([0, 0xFFFFFFFF, 3, 2], np.uint32),
    np.array([0, -1, 3, 2], np.int8),
    np.array([0, 255, 3, 2], np.uint8),
    np.array([0, -(2**31), 2**31 - 1, 2], np.int32),
    np.array([0, -(2**40), 2**32, 2], np.int64),
    np.array([0, 2**64 - 1, 2**63, 2], np.uint64),
]  # the middle two, on an axis of 3
outside = pytest.mark.parametrize("index", OUTSIDE, ids=lambda index: index.dtype.name)
kernels = pytest.mark.parametrize("kernel", KERNELS)


def plain_index_add(base, index, src, dim):
    """One slice after the other, in NumPy."""
    out = np.moveaxis(base.copy(), dim, 0)
    for i, slab in zip(index, np.moveaxis(src, dim, 0), strict=True):
        out[i] += slab
    return np.moveaxis(out, 0, dim)


def plain_scatter_add(base, index, src, dim):
    """One element after the other, in NumPy."""
    out = base.copy()
    for at in np.ndindex(*index.shape):
        out[(*at[:dim], index[at], *at[dim + 1 :])] += src[at]
    return out


# -- against NumPy -------------------------------------------------------------------------


def on_each_axis(f, x, indices, sources):
    """``f(x, index, source, axis)`` of each axis, compiled as one program."""
    run = lambda x, pairs: [f(x, *pair, dim) for dim, pair in enumerate(pairs)]
    return jax.jit(run)(x, list(zip(indices, sources, strict=True)))


@kernels
def test_slices_on_every_axis(kernel):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 5))
    indices = [rng.integers(0, n, 7) for n in x.shape]
    taken = [np.take(x, index, dim) for dim, index in enumerate(indices)]
    sources = [rng.normal(size=y.shape) for y in taken]

    def both(x, index, src, dim):
        read = index_select.using(kernel)(x, index, dim=dim - 3)
        return read, index_add.using(kernel)(x, index, src, dim=dim)

    for dim, (read, added) in enumerate(on_each_axis(both, x, indices, sources)):
        np.testing.assert_array_equal(read, taken[dim])
        want = plain_index_add(x, indices[dim], sources[dim], dim)
        np.testing.assert_allclose(added, want, rtol=1e-12)


@kernels
def test_points_on_every_axis(kernel):
    """As many as the operand has on the other axes, or fewer; more on the axis itself."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 5))
    shapes = ((6, 4, 5), (2, 4, 5), (2, 3, 9))
    indices = [rng.integers(0, x.shape[dim], shape) for dim, shape in enumerate(shapes)]
    sources = [rng.normal(size=shape) for shape in shapes]

    def both(x, index, src, dim):
        read = gather.using(kernel)(x, index, dim=dim - 3)
        return read, scatter_add.using(kernel)(x, index, src, dim=dim)

    for dim, (read, added) in enumerate(on_each_axis(both, x, indices, sources)):
        within = tuple(slice(None) if a == dim else slice(n) for a, n in enumerate(shapes[dim]))
        np.testing.assert_array_equal(read, np.take_along_axis(x[within], indices[dim], dim))
        want = plain_scatter_add(x, indices[dim], sources[dim], dim)
        np.testing.assert_allclose(added, want, rtol=1e-12)


@pytest.mark.parametrize("dtype", INTS)
def test_any_integer_indexes(dtype):
    index = np.array([2, 0, 2], dtype)
    x = np.array([10.0, 20, 30])
    read = lambda x, index: [op(x, index, dim=0) for op in (index_select, gather)]
    for y in jax.jit(read)(x, index):
        np.testing.assert_array_equal(y, [30, 10, 30])
    add = lambda x, index: [op(x, index, x, dim=0) for op in (index_add, scatter_add)]
    for y in jax.jit(add)(x, index):
        np.testing.assert_array_equal(y, [30, 20, 70])


def test_a_narrow_index_on_a_long_axis():
    """jax#16557: an extent that the index's dtype cannot hold."""
    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(index_select(x, np.array([127, -1], np.int8), dim=0), [127, nan])
    np.testing.assert_array_equal(gather(x, np.array([255], np.uint8), dim=0), [255])


def test_transposed_indices():
    """candle#3418."""
    index = np.arange(6).reshape(2, 3).T % 2
    src = np.arange(6.0).reshape(3, 2)
    got = scatter_add(jnp.zeros((3, 2)), index, src, dim=1)
    np.testing.assert_array_equal(got, plain_scatter_add(np.zeros((3, 2)), index, src, 1))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "int64", "complex64", "float8_e4m3fn", "int4", "float16"]
)
def test_whatever_can_be_stored_can_be_read(dtype):
    """candle#3371; unread elements are NaN, 0 or false."""
    x = jnp.array([1, 0, 1]).astype(dtype)
    big = jnp.array([[2**40, 2], [3, 4]])
    np.testing.assert_array_equal(
        index_select(big, np.array([1, 0], np.uint32), dim=0), [[3, 4], [2**40, 2]]
    )
    for op in (index_select, gather):
        y = op(x, np.array([2, 1, 3]), dim=0)
        assert y.dtype == x.dtype
        blank = nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        np.testing.assert_array_equal(y.astype("complex128"), np.array([1, 0, blank]))


# -- out of range --------------------------------------------------------------------------


@outside
def test_reading_outside_gives_nan_or_0(index):
    x = np.array([[1.0, 2, 3], [4, 5, 6]])

    def reads(x, n, index, points):
        for kernel in KERNELS:
            select = index_select.using(kernel)
            yield select(x, index, dim=1)
            yield gather.using(kernel)(x, points, dim=1)
            yield select(n, index, dim=1)

    every = jax.jit(lambda *xs: list(reads(*xs)))
    for y in every(x, x.astype("int16"), index, np.stack([index, index])):
        blank = nan if y.dtype == x.dtype else 0
        np.testing.assert_array_equal(y, [[1, blank, blank, 3], [4, blank, blank, 6]])


@outside
def test_writing_outside_adds_nothing(index):
    base, src = np.array([[1.0, 2, 3], [4, 5, 6]]), np.full((2, 4), 10.0)

    def adds(base, src, index, points):
        for kernel in KERNELS:
            yield index_add.using(kernel)(base, index, src, dim=1)
            yield scatter_add.using(kernel)(base, points, src, dim=1)

    for y in jax.jit(lambda *xs: list(adds(*xs)))(base, src, index, np.stack([index, index])):
        np.testing.assert_array_equal(y, [[11, 2, 13], [14, 5, 16]])


@kernels
def test_what_lies_outside_leaks_into_no_gradient(kernel):
    """Neither NaN read there, nor NaN in a cotangent or source that goes nowhere."""
    index, x = np.array([0, -1, 3, 2]), np.array([1.0, 2, 3])
    g = np.array([5.0, nan, nan, 7])

    def back(op, x, g):
        return jax.vjp(lambda x: op.using(kernel)(x, index, dim=0), x)[1](g)

    def there_and_back(op, x, src, g):
        y, pull = jax.vjp(lambda b, s: op.using(kernel)(b, index, s, dim=0), x, src)
        return y, *pull(g)

    for (slope,) in jax.jit(lambda *xs: [back(op, *xs) for op in (index_select, gather)])(x, g):
        np.testing.assert_array_equal(slope, [5, 0, 7])
    adds = jax.jit(lambda *xs: [there_and_back(op, *xs) for op in (index_add, scatter_add)])
    for y, base, src in adds(x, g, np.array([2.0, 3, 4])):
        np.testing.assert_array_equal(y, [6, 2, 10])
        np.testing.assert_array_equal(base, [2, 3, 4])
        np.testing.assert_array_equal(src, [2, 0, 0, 4])


@pytest.mark.parametrize("at", [-1, 3])
def test_checkify_reports_what_is_outside(at):
    x, index, good = jnp.ones((3,)), jnp.array([0, at, 2]), jnp.array([0, 1, 2])
    for op in (index_select, gather, index_add, scatter_add):
        for where, bad in ((index, True), (good, False)):
            operands = (x, where) if op in (index_select, gather) else (x, where, x)
            f = jax.jit(lambda *xs, op=op: op(*xs, dim=0))
            error, _ = checkify.checkify(f, errors=checkify.all_checks)(*operands)
            assert bool(error.get()) == bad


# -- repeats -------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_summed_in_float32_and_rounded_once(kernel, dtype):
    """Added one by one, 2⁻⁶ is lost against 8 in bfloat16, 2⁻¹⁰ against 4 in float16."""
    small, base, n = (2**-6, 8.0, 64) if dtype == "bfloat16" else (2**-10, 4.0, 64)
    index = np.zeros(n, np.uint32)
    src, x = (np.full(shape, v, jnp.dtype(dtype)) for shape, v in ((n, small), (2, base)))
    adds = lambda *xs: [op.using(kernel)(*xs, dim=0) for op in (index_add, scatter_add)]
    for y in jax.jit(adds)(x, index, src):
        np.testing.assert_array_equal(y, [base + n * small, base])
    g = np.append(src, src[:1] * 0)
    g[0] += x[0]

    def slopes(x, index, g):
        for op in (index_select, gather):
            yield from jax.vjp(lambda x, op=op: op.using(kernel)(x, index, dim=0), x)[1](g)

    for grad in jax.jit(lambda *xs: list(slopes(*xs)))(x, np.append(index, 1), g):
        np.testing.assert_array_equal(grad, [base + n * small, 0])
        assert grad.dtype == x.dtype


@kernels
def test_integers_wrap(kernel):
    base, src = jnp.array([250, 250], jnp.uint8), jnp.array([4, 4, 1], jnp.uint8)
    index = np.array([0, 0, 1])
    for op in (index_add, scatter_add):
        y = op.using(kernel)(base, index, src, dim=0)
        np.testing.assert_array_equal(y, [2, 251])
        assert y.dtype == jnp.uint8


def test_what_is_not_finite_stays_in_its_row():
    """The fixed order sums runs of equal rows by a scan: nothing crosses from run to run."""
    index = np.array([3, 1, 3, 0, 1, 1])
    src = np.array([nan, 1, 2, np.inf, 3, 4])
    for kernel in KERNELS:
        y = index_add.using(kernel)(jnp.zeros(4), index, src, dim=0)
        np.testing.assert_array_equal(y, [np.inf, 8, 0, nan])


def test_the_fixed_order_sums_are_as_good():
    rng = np.random.default_rng(0)
    index = rng.integers(0, 50, 5000)
    src = rng.normal(size=(5000, 3)).astype(np.float32)
    want = plain_index_add(np.zeros((50, 3)), index, src.astype(np.float64), 0)
    for kernel in KERNELS:
        y = index_add.using(kernel)(jnp.zeros((50, 3), "float32"), index, src, dim=0)
        error = abs(np.asarray(y, np.float64) - want).max() / abs(want).max()
        assert error < index_add.precision.float32


def test_on_cuda_no_float_is_added_out_of_order():
    """A sum writes each row once.  A gradient does too, by the same sort, though JAX forgets that
    its indices are unique in some versions."""
    x, index, src = np.ones((5, 3), np.float32), np.array([1, 1]), np.ones((2, 3), np.float32)
    points = np.array([[0, 1, 1]])
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=h200)
    for program, unique in (
        (lambda x: index_add(x, index, src, dim=0), True),
        (lambda x: scatter_add(x, points, src[:1], dim=0), True),
        (jax.grad(lambda x: index_select(x, index, dim=0).sum()), False),
        (jax.grad(lambda x: gather(x, points, dim=0).sum()), False),
    ):
        with jax.sharding.use_abstract_mesh(mesh):
            text = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        scatters = [line for line in text.splitlines() if "stablehlo.scatter" in line]
        assert len(scatters) == text.count("stablehlo.sort") == 1
        assert not unique or "unique_indices = true" in scatters[0]


# -- nothing -------------------------------------------------------------------------------


def test_empty_axes_and_empty_indices():
    none, one = np.zeros(0, np.uint32), np.array([0], np.uint32)
    x = jnp.zeros((2, 0, 3))
    assert index_select(x, none, dim=1).shape == (2, 0, 3)
    assert index_select(x, np.array([1, 0]), dim=0).shape == (2, 0, 3)
    np.testing.assert_array_equal(index_select(x, one, dim=1), np.full((2, 1, 3), nan))
    np.testing.assert_array_equal(
        gather(x, np.zeros((2, 1, 3), int), dim=1), np.full((2, 1, 3), nan)
    )
    assert gather(x, np.zeros((1, 0, 3), int), dim=1).shape == (1, 0, 3)
    y = jnp.ones((2, 3))
    np.testing.assert_array_equal(index_add(y, none, jnp.ones((0, 3)), dim=0), y)
    np.testing.assert_array_equal(scatter_add(y, np.zeros((0, 3), int), jnp.ones((0, 3)), dim=0), y)
    assert index_add(x, one, jnp.ones((2, 1, 3)), dim=1).shape == x.shape
    assert scatter_add(x, np.zeros((2, 1, 3), int), jnp.ones((2, 1, 3)), dim=1).shape == x.shape


# -- nonzero -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", *INTS])
def test_positions_in_row_major_order(dtype):
    x = np.array([[0, 1, 0], [1, 1, 0]], jnp.dtype(dtype))
    indices, count = nonzero_indices(x)
    np.testing.assert_array_equal(indices, [1, 3, 4, 6, 6, 6])
    np.testing.assert_array_equal(count, [3])
    assert indices.dtype == count.dtype == jnp.uint32


@pytest.mark.parametrize("capacity", [0, 1, 3, 4, 5, 9])
def test_any_capacity_and_the_true_count(capacity):
    """jax#31568, jax#7592: none off by one where the capacity equals the count."""
    x = jnp.array([3, 0, 0.5, -1, 0, 7])
    indices, count = nonzero_indices(x, capacity=capacity)
    np.testing.assert_array_equal(indices, [0, 2, 3, 5, 6, 6, 6, 6, 6][:capacity])
    np.testing.assert_array_equal(count, [4])


def test_all_none_and_one():
    n = np.arange(1000)
    np.testing.assert_array_equal(nonzero_indices(jnp.ones((10, 100)))[0], n)
    np.testing.assert_array_equal(nonzero_indices(jnp.zeros(3))[0], [3, 3, 3])
    for shape, count in (((), 1), ((0,), 0), ((2, 0), 0)):
        indices, got = nonzero_indices(jnp.ones(shape))
        np.testing.assert_array_equal(got, [count])
        assert indices.shape == (count,)


def test_nan_is_something_and_minus_0_is_nothing():
    x = jnp.array([nan, -0.0, 0.0, -nan, np.inf, 5e-324, -1.0])
    np.testing.assert_array_equal(nonzero_indices(x)[0][:3], [0, 3, 4])
    assert nonzero_indices(x[4:5])[1] == 1
    np.testing.assert_array_equal(nonzero_indices(jnp.array([-0.0], "bfloat16"))[1], [0])


def test_a_random_mask_is_numpy_s():
    x = np.random.default_rng(0).integers(0, 3, (7, 333)).astype(np.float32)
    indices, count = jax.jit(nonzero_indices)(x)
    want = np.flatnonzero(x)
    assert count == want.size
    np.testing.assert_array_equal(indices[: want.size], want)
    assert (indices[want.size :] == x.size).all()


def test_unused_entries_read_and_add_nothing():
    x = jnp.array([0.0, 5, 0, 7])
    indices, _ = nonzero_indices(x)
    np.testing.assert_array_equal(index_select(x, indices, dim=0), [5, 7, nan, nan])
    np.testing.assert_array_equal(index_add(x, indices, jnp.ones(4), dim=0), [0, 6, 0, 8])


# -- bad calls -----------------------------------------------------------------------------


def test_bad_calls():
    x, index, points = jnp.zeros((2, 3)), np.zeros(4, int), np.zeros((2, 4), int)
    src, spots = jnp.zeros((2, 4)), jnp.zeros((2, 4))
    huge = jax.ShapeDtypeStruct((2**31 - 1,), "int8")
    for op, name, rest in (
        (index_select, "x", (index,)),
        (gather, "x", (points,)),
        (index_add, "base", (index, src)),
        (scatter_add, "base", (points, spots)),
    ):
        refused(op, x, *rest, dim=2, match=f"'dim' is 2 and '{name}' has 2 axes; .* from -2 to 1")
        refused(op, x, *rest, match="parameter 'dim' is missing")
        refused(op, x, *rest, rest[0], dim=1, match="arrays, takes")
        refused(op, x, rest[0] * 1.0, *rest[1:], dim=1, match="'indices' is float64")
        refused(op, x, rest[0] == 0, *rest[1:], dim=1, match="'indices' is bool")
        refused(op, jnp.float32(1), *rest, dim=0, match=f"'{name}' has no axes|share one dtype")
    refused(
        index_select, x, points, dim=1, match="'indices' is int64.2,4.; it has 2 axes, wanted 1"
    )
    refused(gather, x, index, dim=1, match="'indices' has 1 axes and 'x' has 2.* use index_select")
    refused(scatter_add, x, index, jnp.zeros(4), dim=1, match="whole slices use index_add")
    refused(gather, x, np.zeros((3, 1), int), dim=1, match="other than 1 it must not be longer")
    refused(scatter_add, x, np.zeros((1, 4), int), jnp.zeros((1, 4)), dim=0, match="other than 0")
    refused(scatter_add, x, points, jnp.zeros((2, 3)), dim=1, match="axes \\*points are")
    refused(index_add, x, index, jnp.zeros((2, 3)), dim=1, match=r"it must be \(2, 4\)")
    refused(index_add, x, index, jnp.zeros((4,)), dim=1, match="'src' is \\(4,\\)")
    refused(index_add, x, index, src.astype("float32"), dim=1, match="share one dtype")
    with pytest.raises(ValueError, match="index_select: 'x' has 2147483647 elements on axis 0"):
        index_select.out(huge, index, dim=0)
    for capacity in (-1, 2**31):
        refused(nonzero_indices, x, capacity=capacity, match="None or from 0 to 2147483646")
    refused(nonzero_indices, x, capacity=1.5, match="parameter 'capacity' is 1.5")
    refused(nonzero_indices, x == 0, match="'x' is bool")
