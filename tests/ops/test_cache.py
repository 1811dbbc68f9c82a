"""What is true of slab writes: nothing moves, nothing recompiles, nothing is copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from fuel_jax.ops.cache import write_slice, write_slice_doff, write_slice_rotating

from ..refused import refused

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def scalar(value, dtype="int64"):
    return jnp.asarray(np.array(value, dtype))


def appended(dest, src, start, axis):
    """NumPy's loop over rows; those outside are dropped."""
    y, rows = np.array(dest), np.moveaxis(np.asarray(src), axis, 0)
    view = np.moveaxis(y, axis, 0)
    for r, row in enumerate(rows):
        if 0 <= start + r < len(view):
            view[start + r] = row
    return y


def rotated(dest, src, position, axis, modulus):
    """NumPy's loop over rows, around the ring."""
    y = np.array(dest)
    view = np.moveaxis(y, axis, 0)
    for r, row in enumerate(np.moveaxis(np.asarray(src), axis, 0)):
        view[(position + r) % modulus] = row
    return y


class TestWhereRowsGo:
    @pytest.mark.parametrize("width", [1, 2, 5])
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_at_any_offset_rows_outside_are_dropped(self, width, axis, draw):
        """jax#3621: dynamic_update_slice would write them over live rows."""
        shape = [5, 5, 5]
        dest, shape[axis] = draw((5, 5, 5)), width
        src = draw(tuple(shape))
        append = jax.jit(lambda offset: write_slice_doff(dest, src, offset, axis=axis))
        ranges = [(0, n) for n in shape]
        slab = jax.jit(lambda s: write_slice(dest, src, ranges=ranges, dyn_offset=(axis, s)))
        for offset in (*range(-7, 8), 2**31 - 1, -(2**31), 2**40, -(2**63), 2**63 - 1):
            want = appended(dest, src, offset, axis)
            np.testing.assert_array_equal(append(scalar(offset)), want)
            np.testing.assert_array_equal(slab(scalar(offset)), want)

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_offsets_of_any_integer_dtype(self, dtype, draw):
        """A U32 of 0xFFFFFFFF is far away, not −1; the axis may outgrow the offset's dtype."""
        dest, src, limits = draw((300, 2)), draw((2, 2)), np.iinfo(dtype)
        for offset in {0, 1, 100, max(limits.min, -1), limits.min, limits.max}:
            got = write_slice_doff(jnp.array(dest), src, scalar(offset, dtype), axis=0)
            np.testing.assert_array_equal(got, appended(dest, src, offset, 0))
            got = write_slice_rotating(
                jnp.array(dest), src, scalar(offset, dtype), axis=0, modulus=299
            )
            np.testing.assert_array_equal(got, rotated(dest, src, offset, 0, 299))

    @pytest.mark.parametrize("width", [1, 2, 4])
    @pytest.mark.parametrize("axis", [0, 1, -1])
    def test_the_ring_wraps_and_the_rest_stays(self, width, axis, draw):
        shape = [6, 6, 6]
        dest, shape[axis] = draw((6, 6, 6)), width
        src = draw(tuple(shape))
        f = jax.jit(lambda p: write_slice_rotating(dest, src, p, axis=axis, modulus=4))
        for position in (*range(9), 4_000_000_003, 2**32 - 1):
            want = rotated(dest, src, position, axis, 4)
            np.testing.assert_array_equal(f(scalar(position, "uint32")), want)

    def test_literally(self):
        y = write_slice(jnp.zeros((4, 2)), jnp.ones((1, 1)), ranges=((2, 3), (1, 2)))
        np.testing.assert_array_equal(y, [[0, 0], [0, 0], [0, 1], [0, 0]])
        src = jnp.array([[10.0, 20], [30, 40]])
        y = write_slice_rotating(
            jnp.zeros((2, 4)), src, scalar(3, "uint32"), axis=1, modulus=4, ranges=((0, 2), (0, 2))
        )
        np.testing.assert_array_equal(y, [[20, 0, 0, 10], [40, 0, 0, 30]])
        y = write_slice_doff(jnp.zeros((2, 5)), src, scalar(2), axis=1, ranges=((0, 2), (0, 2)))
        np.testing.assert_array_equal(y, [[0, 0, 10, 20, 0], [0, 0, 30, 40, 0]])

    def test_ranges_of_the_other_axes_are_kept(self, draw):
        dest, src = draw((4, 5, 6)), draw((2, 3, 1))
        want = np.array(dest)
        want[1:3, 2:5, 4:5] = src
        ranges = ((0, 2), (2, 5), (4, 5))
        write = {"ranges": ranges, "dyn_offset": (-3, 1)}
        np.testing.assert_array_equal(write_slice(jnp.array(dest), src, **write), want)
        got = write_slice_doff(jnp.array(dest), src, 1, axis=0, ranges=ranges)
        np.testing.assert_array_equal(got, want)
        got = write_slice_rotating(jnp.array(dest), src, 5, axis=0, modulus=4, ranges=ranges)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("dtype", ["bool", "uint8", "int4", "float8_e4m3fn", "bfloat16"])
    def test_any_dtype(self, dtype):
        dest, src = jnp.zeros((4, 2), dtype), jnp.ones((2, 2), dtype)
        got = write_slice_doff(dest, src, 3, axis=0)
        np.testing.assert_array_equal(np.asarray(got).astype(int), [[0, 0]] * 3 + [[1, 1]])

    def test_an_empty_slab_changes_nothing(self):
        dest, src = jnp.arange(6.0).reshape(3, 2), jnp.zeros((0, 2))
        keep = np.asarray(dest)
        for write in (
            lambda: write_slice(jnp.array(keep), src, ranges=((1, 1), (0, 2))),
            lambda: write_slice_doff(jnp.array(keep), src, 7, axis=0),
            lambda: write_slice_rotating(jnp.array(keep), src, 7, axis=0, modulus=2),
            lambda: write_slice(jnp.array(keep), src[:, :0], ranges=((3, 3), (2, 2))),
        ):
            np.testing.assert_array_equal(write(), keep)

    def test_a_step_of_each_sequence_at_its_own_length(self, draw):
        """vmap over caches and offsets, one of them out of range."""
        dest, src, offsets = draw((3, 5, 2)), draw((3, 2, 2)), jnp.array([0, 4, 9])
        got = jax.vmap(lambda d, s, o: write_slice_doff(d, s, o, axis=0))(dest, src, offsets)
        want = [appended(dest[i], src[i], int(o), 0) for i, o in enumerate(offsets)]
        np.testing.assert_array_equal(got, np.stack(want))

    def test_without_x64(self):
        with jax.enable_x64(False):
            dest, src = jnp.zeros((4,)), jnp.ones((2,))
            far = jnp.asarray(np.uint32(2**32 - 1))
            assert write_slice_doff(dest, src, far, axis=0).tolist() == [0, 0, 0, 0]
            ring = write_slice_rotating(jnp.zeros((4,)), src, far, axis=0, modulus=4)
            assert ring.tolist() == [1, 0, 0, 1]


class TestGradients:
    @pytest.mark.parametrize("offset", [-9, -1, 0, 2, 4, 9])
    def test_go_to_what_was_kept_and_to_what_was_written(self, offset, draw):
        dest, src, g = draw((5, 2)), draw((2, 2)), draw((5, 2))
        pull = jax.vjp(lambda d, s: write_slice_doff(d, s, scalar(offset), axis=0), dest, src)[1]
        kept, written = pull(g)
        ones = appended(np.zeros((5, 2)), np.ones((2, 2)), offset, 0)
        np.testing.assert_array_equal(kept, np.where(ones == 1, 0, g))
        rows = [g[offset + r] if 0 <= offset + r < 5 else np.zeros(2) for r in range(2)]
        np.testing.assert_array_equal(written, np.stack(rows))

    def test_around_the_ring(self, draw):
        dest, src, g = draw((5,)), draw((3,)), draw((5,))
        f = lambda d, s: write_slice_rotating(d, s, 6, axis=0, modulus=4)
        kept, written = jax.vjp(f, dest, src)[1](g)
        np.testing.assert_array_equal(kept, g * np.array([0, 1, 0, 0, 1], np.float32))
        np.testing.assert_array_equal(written, g[np.array([2, 3, 0])])

    def test_what_is_overwritten_does_not_leak(self):
        f = lambda d, s: write_slice_doff(d, s, 0, axis=0)
        kept, written = jax.vjp(f, jnp.full((3,), np.nan), jnp.ones((2,)))[1](jnp.ones((3,)))
        np.testing.assert_array_equal(kept, [0, 0, 1])
        np.testing.assert_array_equal(written, [1, 1])


WRITES = {
    "write_slice": lambda d, s, p: write_slice(
        d, s, ranges=((0, s.shape[0]), (0, 1024)), dyn_offset=(0, p)
    ),
    "write_slice_doff": lambda d, s, p: write_slice_doff(d, s, p, axis=0),
    "write_slice_rotating": lambda d, s, p: write_slice_rotating(
        d, s, p, axis=0, modulus=d.shape[0]
    ),
}


class TestInPlace:
    """A 64 MB cache: what is written is what a write costs."""

    @pytest.mark.parametrize("name", WRITES)
    @pytest.mark.parametrize("width", [1, 16])
    def test_a_donated_write_under_jit_is_an_alias_and_no_copy(self, name, width):
        dest = jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
        src = jax.ShapeDtypeStruct((width, 1024), jnp.float32)
        at = jax.ShapeDtypeStruct((), jnp.int32)
        write = jax.jit(WRITES[name], donate_argnums=0)
        compiled = write.lower(dest, src, at).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert "input_output_alias={ {}: (0, {}, may-alias) }" in text
        assert memory.alias_size_in_bytes == 2**26
        assert memory.temp_size_in_bytes <= 4 * 4096 * width
        assert not [
            line for line in text.splitlines() if "f32[16384,1024]" in line and " copy(" in line
        ]

    @pytest.mark.parametrize("name", WRITES)
    def test_an_eager_write_keeps_the_buffer_and_takes_the_array(self, name):
        cache = jnp.zeros((2048, 1024), "float32")
        where = cache.unsafe_buffer_pointer()
        y = WRITES[name](cache, jnp.ones((1, 1024), "float32"), 7)
        assert y.unsafe_buffer_pointer() == where
        assert y[7].sum() == 1024
        assert cache.is_deleted()
        with pytest.raises(RuntimeError, match="deleted"):
            cache + 1

    def test_inside_a_scan_the_cache_is_carried_in_place(self):
        def step(cache, p):
            return write_slice_doff(cache, jnp.ones((1, 1024), "float32"), p, axis=0), None

        decode = jax.jit(lambda c: lax.scan(step, c, jnp.arange(8))[0], donate_argnums=0)
        compiled = decode.lower(jax.ShapeDtypeStruct((16384, 1024), jnp.float32)).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == 2**26
        assert compiled.memory_analysis().temp_size_in_bytes < 2**20

    @pytest.mark.parametrize("name", WRITES)
    def test_nothing_recompiles_while_decoding(self, name):
        write, traces = WRITES[name], []

        @jax.jit
        def step(cache, src, p):
            traces.append(1)
            return write(cache, src, p)

        cache, src = jnp.zeros((64, 1024), "float32"), jnp.ones((1, 1024), "float32")
        cache = write(cache, src, 0)
        op = {"write_slice": write_slice, "write_slice_doff": write_slice_doff}.get(
            name, write_slice_rotating
        )
        before = op._donating._cache_size()
        for p in range(1, 6):
            cache = write(cache, src, p)
            step(cache, src, p)
        assert op._donating._cache_size() == before
        assert len(traces) == 1


@pytest.mark.parametrize("name", WRITES)
def test_a_write_has_no_effects(name):
    """A program with effects is dispatched from Python: 150 µs a call, for a write of 10."""
    args = (jnp.zeros((8, 1024), "float32"), jnp.ones((1, 1024), "float32"), jnp.int32(3))
    assert not jax.make_jaxpr(WRITES[name])(*args).effects


@pytest.mark.parametrize("offset", [-1, 4, 2**31, -(2**40)])
def test_checkify_reports_rows_outside(offset):
    dest, src = jnp.zeros((5,)), jnp.ones((2,))
    for write in (
        lambda o: write_slice_doff(dest, src, o, axis=0),
        lambda o: write_slice(dest, src, ranges=((0, 2),), dyn_offset=(0, o)),
    ):
        checked = checkify.checkify(jax.jit(write), errors=checkify.all_checks)
        assert "out-of-bounds indexing for array of shape (5,)" in checked(scalar(offset))[0].get()
        assert checked(scalar(3))[0].get() is None


def test_bad_calls(draw):
    x, row = draw((4, 3)), draw((1, 3))
    full = ((0, 1), (0, 3))
    whole = {"ranges": full}
    refused(write_slice, x, row, ranges=((4, 5), (0, 3)), match="axis 0 it must be 0 ≤ start")
    refused(write_slice, x, row, ranges=((2, 1), (0, 3)), match="axis 0 it must be 0 ≤ start")
    refused(write_slice, x, row, ranges=((-1, 0), (0, 3)), match="axis 0 it must be 0 ≤ start")
    refused(write_slice, x, row, ranges=((0, 1),), match="must be 2 pairs")
    refused(write_slice, x, row, ranges=((0, 2), (0, 3)), match=r"the slab is \[2, 3\]")
    refused(write_slice, x, row[0], **whole, match=r"'src' is float32\[3\]")
    refused(write_slice, x, row.astype("float16"), **whole, match="operands share one dtype")
    refused(write_slice, x[0, 0], row[0, 0], ranges=(), match="a scalar has no slab")
    refused(write_slice, x, row, **whole, dyn_offset=3, match=r"'dyn_offset' is 3; it must be \(a")
    refused(write_slice, x, row, **whole, dyn_offset=(2, 0), match="'dyn_offset' is 2 .* axis must")
    refused(write_slice, x, row, **whole, dyn_offset=(0, 1.5), match="'start' is 1.5")
    refused(write_slice, x, row, match="ranges")
    refused(write_slice_doff, x, row, jnp.zeros((1,), int), axis=0, match="it has 1 axes, wanted 0")
    refused(write_slice_doff, x, row, jnp.float32(1), axis=0, match="its dtype must be one of")
    refused(write_slice_doff, x, row, 0, axis=2, match="'axis' is 2 .* from -2 to 1")
    refused(write_slice_doff, x, draw((5, 3)), 0, axis=0, match="axis 0 it must be")
    refused(write_slice_doff, x, draw((1, 2)), 0, axis=0, match=r"the slab is \[1, 3\]")
    ring = {"axis": 0, "modulus": 4}
    refused(write_slice_rotating, x, row, 0, **ring | {"modulus": 0}, match="from 1 to 4")
    refused(write_slice_rotating, x, row, 0, **ring | {"modulus": 5}, match="from 1 to 4")
    refused(
        write_slice_rotating, x, x[:3], 0, **ring | {"modulus": 2}, match="overwrite each other"
    )
    refused(write_slice_rotating, x, row, 2**31, **ring, match="does not fit in I32")
