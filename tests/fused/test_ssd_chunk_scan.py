"""What is true of the chunked state-space scan in particular."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import ssd_chunk_scan

from ..refused import refused


def oracle(x, dt, a, b, c, h=None):
    """The recurrence, step by step, in NumPy, in float64."""
    x, dt, a, b, c = (np.asarray(v, np.float64) for v in (x, dt, a, b, c))
    b, c = (np.repeat(v, x.shape[2] // v.shape[2], 2) for v in (b, c))
    h = np.zeros((x.shape[0], *x.shape[2:], b.shape[3])) if h is None else np.asarray(h, np.float64)
    y = np.zeros(x.shape)
    for t in range(x.shape[1]):
        s = dt[:, t, :, None, None]
        h = np.exp(s * a[:, None, None]) * h + s * x[:, t, ..., None] * b[:, t, :, None]
        y[:, t] = (h * c[:, t, :, None]).sum(-1)
    return y, h


def operands(draw, length, groups=2, dtype="float32"):
    shapes = ((2, length, 4, 3), (2, length, 4), (4,), *[(2, length, groups, 5)] * 2)
    x, dt, a, b, c = (np.asarray(draw(shape, dtype)) / 2 for shape in shapes)
    return x, abs(dt), -abs(a), b, c


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "size"), [(0, 1), (0, 8), (1, 1), (6, 3), (34, 17)])
def test_agrees_with_the_definition(length, size, groups, draw):
    xs = operands(draw, length, groups)
    for got, want in zip(ssd_chunk_scan(*xs, chunk_size=size), oracle(*xs), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=5e-6 * max(1, abs(want).max(initial=0)))


@pytest.mark.parametrize("empty", range(5))
def test_any_axis_may_have_no_element(empty):
    batch, length, heads, width, state = (0 if axis == empty else 2 for axis in range(5))
    per_group = (batch, length, heads, state)  # as many groups as heads
    shapes = ((batch, length, heads, width), (batch, length, heads), (heads,), per_group, per_group)
    xs = [np.ones(shape, "float32") for shape in shapes]

    @jax.jit
    def there_and_back(*xs):
        (y, last), pull = jax.vjp(functools.partial(ssd_chunk_scan, chunk_size=2), *xs)
        return y, last, pull((y + 1, last + 1))

    y, last, gradients = there_and_back(*xs)
    np.testing.assert_array_equal(y, np.zeros(shapes[0], "float32"), strict=True)
    np.testing.assert_array_equal(
        last, np.zeros((batch, heads, width, state), "float32"), strict=True
    )
    for x, gradient in zip(xs, gradients, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape, "float32"), strict=True)


def test_every_divisor_gives_the_same(draw):
    xs = operands(draw, 12, dtype="float64")
    want = oracle(*xs)
    every = lambda *xs: [ssd_chunk_scan(*xs, chunk_size=size) for size in (1, 2, 3, 4, 6, 12)]
    for results in jax.jit(every)(*xs):
        for got, wanted in zip(results, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


def test_strong_and_weak_decays_keep_their_promise(draw):
    x, dt, _, b, c = operands(draw, 256)
    for a in (jnp.full(4, -30.0), jnp.full(4, -1e-4), jnp.array([-30.0, -1e-4, 0.0, -1.0])):
        xs = x, dt, a.astype("float32"), b, c
        for got, want in zip(ssd_chunk_scan(*xs), oracle(*xs), strict=True):
            assert (
                abs(np.asarray(got, np.float64) - want).max()
                <= ssd_chunk_scan.precision.float32 * abs(want).max()
            )


def test_small_chunks_of_a_long_sequence_keep_their_promise():
    """A state that grows to 10²¹ keeps what each chunk rounds: 1e-5 of 16,383 of them."""
    rng, length = np.random.default_rng(0), 65_532  # 4 · 3 · 43 · 127
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, "float32")
    x, dt = draw(1, length, 2, 1), draw(1, length, 2)
    b, c = draw(1, length, 1, 2), draw(1, length, 1, 2)
    xs = x, dt, jnp.asarray([0.4, 0.0], "float32"), b, c
    got, _ = ssd_chunk_scan(*xs, chunk_size=4)
    want, _ = oracle(*xs)
    for head in (0, 1):
        off = abs(np.asarray(got, np.float64) - want)[:, :, head].max()
        assert off <= ssd_chunk_scan.precision.float32 * abs(want[:, :, head]).max()


def test_a_sequence_may_be_cut_and_continued(draw):
    x, dt, a, b, c = operands(draw, 12, dtype="float64")
    whole, last = ssd_chunk_scan(x, dt, a, b, c, chunk_size=4)
    cut = lambda v, part: v[:, part]
    h, parts = None, []
    for part in (slice(0, 4), slice(4, 12)):
        given = [cut(v, part) for v in (x, dt)], [cut(v, part) for v in (b, c)]
        y, h = ssd_chunk_scan(*given[0], a, *given[1], h, chunk_size=4)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(h, last, rtol=1e-9, atol=1e-12)


def test_dt_enters_twice():
    """mamba#551: in the decay and in the input."""
    one = jnp.ones((1, 1, 1, 1))
    y, _ = ssd_chunk_scan(one, one[..., 0] / 2, -jnp.ones(1), one, one, chunk_size=1)
    assert y[0, 0, 0, 0] == 0.5


@pytest.mark.parametrize("name", ["x", "dt", "b"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_step_sees_a_later_one(name, bad, draw):
    """Within a chunk a product with a score of 0 would: 0 · NaN is NaN."""
    names = ("x", "dt", "a", "b", "c")
    xs = dict(zip(names, operands(draw, 8), strict=True))
    want, _ = oracle(*xs.values())
    xs[name] = np.array(xs[name])
    xs[name][0, 5, 0] = bad
    with np.errstate(invalid="ignore"):
        spoilt, last = oracle(*xs.values())
    y, h = map(np.asarray, ssd_chunk_scan(**xs, chunk_size=8))
    np.testing.assert_allclose(y[:, :5], want[:, :5], atol=5e-6 * abs(want).max())
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(spoilt))
    np.testing.assert_array_equal(np.isfinite(h), np.isfinite(last))


def test_no_array_of_all_states_is_held():
    """Neither forward nor backward: [B, L, H, P, N] would take 256 MiB here."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    given = [shape(1, 2048, 8, 64), shape(1, 2048, 8), shape(8), *[shape(1, 2048, 8, 64)] * 2]
    for f in (ssd_chunk_scan, jax.grad(lambda *xs: ssd_chunk_scan(*xs)[0].sum(), range(5))):
        held = jax.jit(f).lower(*given).compile().memory_analysis().temp_size_in_bytes
        assert held <= 2048 * 8 * 64 * 64 * 4 / 2


def test_bad_calls(draw):
    x, dt, a, b, c = operands(draw, 12)
    for size in (0, 5, -4):
        refused(ssd_chunk_scan, x, dt, a, b, c, chunk_size=size, match=f"'chunk_size' is {size}")
    three = jnp.zeros((2, 12, 3, 5), "float32")
    refused(ssd_chunk_scan, x, dt, a, three, three, chunk_size=4, match="'b' has 3 groups")
    refused(ssd_chunk_scan, x, dt[:, :6], a, b, c, chunk_size=4, match="its axis l is 6")
    refused(ssd_chunk_scan, x, dt, a, b, chunk_size=4, match="array 'c' is missing")
