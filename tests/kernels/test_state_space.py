"""The selective scan and the causal convolution alone, interpreted; and lowered at real shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import causal_conv1d, selective_scan
from pallas_kernels import _selective_scan, causal_conv1d as convolution
from pallas_kernels._launch import INTERPRETED
from pallas_kernels._selective_scan import Tile, logistic, softplus as softplus_of
from pallas_kernels.selective_scan import forward, parts_of
from pallas_kernels.selective_scan_gradient import backward

from .test_launch import lowered


def close(got, want, precision):
    """To what the op promises: relative to the largest element."""
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= precision.tolerance(got.dtype) * np.abs(want).max()


def drawn(seed, dtype):
    """Arrays of noise, by shape; NumPy's, which compiles nothing for them."""
    rng = np.random.default_rng(seed)
    return lambda *shape, dtype=dtype: (rng.normal(size=shape) / 2).astype(jnp.dtype(dtype))


# -- selective scan ------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="softplus")
def reference(u, delta, a, b, c, h, *, softplus):
    """Step by step, in the dtype of what it is given."""
    ys = []
    h = jnp.zeros((u.shape[0], *a.shape), u.dtype) if h is None else h
    for t in range(u.shape[1]):
        step = (jnp.logaddexp(0, delta[:, t]) if softplus else delta[:, t])[..., None]
        h = jnp.exp(step * a) * h + step * u[:, t, :, None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1))
    return jnp.stack(ys, 1), h


def operands(batch, length, d, n, dtype, continued):
    """u, Δ, a, b, c, and the state before them."""
    array = drawn(length, dtype)
    u, delta, a = array(batch, length, d), array(batch, length, d), -abs(array(d, n))
    b, c = array(batch, length, n), array(batch, length, n)
    return u, delta, a, b, c, array(batch, d, n, dtype="float32") if continued else None


def in_float64(xs):
    return [None if x is None else np.asarray(x, np.float64) for x in xs]


def interpreted(kernel, **options):
    """With what is around it compiled as one program."""
    return jax.jit(functools.partial(kernel, interpret=True, **options))


# batch, steps, channels, states; dtype; by softplus; continued; tile
SCANS = {
    "one of everything": ((1, 1, 1, 1), "float32", True, True, Tile(1, 1, 2)),
    "steps and channels left over": ((2, 5, 9, 5), "bfloat16", True, True, Tile(1, 1, 2)),
    "two channels of a thread": ((1, 4, 40, 16), "float32", False, False, Tile(2, 2, 2)),
    "more threads of a channel than steps": ((1, 9, 3, 64), "float32", False, False, Tile(1, 1, 4)),
    "all states of a thread": ((1, 3, 33, 16), "float16", False, True, Tile(1, 4, 2)),
}


@pytest.mark.parametrize("case", SCANS)
def test_scan_against_float64(case):
    shape, dtype, softplus, continued, tile = SCANS[case]
    xs = operands(*shape, dtype, continued)
    got = interpreted(forward, delta_softplus=softplus, tile=tile)(*xs)
    for x, want in zip(got, reference(*in_float64(xs), softplus=softplus), strict=True):
        close(x, want, selective_scan.precision)
    assert [x.dtype for x in got] == [dtype, "float32"]


@pytest.mark.parametrize("case", list(SCANS)[:4])
def test_gradient_of_scan_against_float64(case):
    shape, dtype, softplus, continued, tile = SCANS[case]
    xs = operands(*shape, dtype, continued)
    array = drawn(0, dtype)
    g = array(*xs[0].shape)
    dlast = array(shape[0], *xs[2].shape, dtype="float32") if continued else None
    back = interpreted(backward, delta_softplus=softplus, tile=tile, edges=tile)
    got = back(*xs[:5], g, xs[5], dlast)
    none = np.zeros((shape[0], *xs[2].shape))
    start, dlast = (none if h is None else h for h in (xs[5], dlast))
    run = functools.partial(reference, softplus=softplus)
    pull = jax.jit(lambda xs, cotangents: jax.vjp(run, *xs)[1](cotangents))
    want = pull(in_float64([*xs[:5], start]), tuple(in_float64([g, dlast])))
    for x, y in zip(got, want, strict=True):
        close(x, y, selective_scan.precision)


def test_a_scan_in_parts():
    """Four of six steps: the state before each comes from those after the ones before it."""
    xs = operands(2, 24, 5, 3, "float32", continued=True)
    tile = Tile(1, 1, 2)
    got = interpreted(forward, delta_softplus=True, tile=tile, parts=4)(*xs)
    for x, want in zip(got, reference(*in_float64(xs), softplus=True), strict=True):
        close(x, want, selective_scan.precision)


def test_parts_fill_the_card():
    """One sequence in eight; eight in one; none of it if parts were short or unequal."""
    assert [parts_of(b, 2048, 128) for b in (1, 2, 8)] == [8, 4, 1]
    assert [parts_of(1, length, 4) for length in (65_536, 1024, 511, 2052)] == [16, 8, 1, 4]


def test_choice():
    """One step is XLA's, several are not."""
    for length, says in ((1, "one step is one kernel in XLA"), (2, "serves cuda")):
        xs = operands(1, length, 4, 4, "float32", continued=False)
        said = [
            line.split(maxsplit=2)[2].strip()
            for line in map(str.strip, str(selective_scan.explain(*xs)).splitlines())
            if " triton " in line
        ]
        assert all(says in line for line in said)


def test_a_long_scan_of_slow_decay():
    """Every step adds and hardly any is forgotten: 1 − exp(Δ·a) is near 1/500."""
    length = 4096
    u, delta, a, b, c, _ = operands(1, length, 3, 2, "float32", continued=False)
    xs = u, 0.01 * abs(delta) + 0.001, a - 0.1, b, c
    y, _ = interpreted(forward, delta_softplus=False, tile=Tile(1, 1, 2))(*xs, None)
    u, delta, a, b, c = (np.asarray(x, np.float64) for x in xs)
    h, want = np.zeros(a.shape), np.zeros(u.shape)
    for t in range(length):
        step = delta[0, t, :, None]
        h = np.exp(step * a) * h + step * u[0, t, :, None] * b[0, t]
        want[0, t] = h @ c[0, t]
    close(y, want, selective_scan.precision)


@pytest.mark.parametrize("constant", [True, False])
def test_an_exponential_that_errs_to_one_side(constant, monkeypatch):
    """As a GPU's does: 512 steps of it would add up to 4e-5.  Both ways in time."""
    off = lambda x: jnp.exp2(x) * jnp.where(x > -1, 1 - np.float32(1.2e-7), 1)
    monkeypatch.setattr(_selective_scan, "exp2", off)
    u, delta, a, b, c, h = operands(1, 512, 2, 1, "float32", continued=True)
    delta = np.full_like(delta, 0.01) if constant else np.float32(0.01) * abs(delta)
    xs, tile = (u + 1, delta, np.float32(0.1) * a, b, c), Tile(1, 1, 8)
    got = (
        *interpreted(forward, delta_softplus=False, tile=tile)(*xs, h),
        *interpreted(backward, delta_softplus=False, edges=tile)(*xs, u, h, h),
    )
    assert len(got) == 8
    exact, (g, h) = in_float64(xs), in_float64((u, h))

    @jax.jit
    def both_ways(*exact):
        body = functools.partial(selective_scan.body, delta_softplus=False)
        (y, last), pull = jax.vjp(body, *exact)
        return y, last, *pull((g, h))

    for x, want in zip(got, both_ways(*exact, h), strict=True):
        close(x, want, selective_scan.precision)


def test_softplus_is_right_where_it_is_small():
    """As it is in trained models: Δ near 0.001.  Relative to itself, not to the largest."""
    x = np.linspace(-15, 100, 3001, dtype=np.float32)
    with INTERPRETED(True):
        got, slope = jax.jit(lambda x: (softplus_of(x), logistic(x)))(x)
    want = np.logaddexp(0, x.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=2e-6)
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=2e-6)


def test_infinite_inputs_stay_what_they_are():
    """Three states are computed as sixteen: those that were added must not turn inf into NaN."""
    xs = operands(1, 3, 2, 3, "float32", continued=False)
    u = xs[0].copy()
    u[0, 1, 0] = np.inf
    given = u, abs(xs[1]), xs[2], abs(xs[3]), abs(xs[4]), None
    tile = Tile(1, 1, 2)
    y, h = interpreted(forward, delta_softplus=False, tile=tile)(*given)
    want, last = jax.jit(functools.partial(selective_scan.body, delta_softplus=False))(*given)
    assert np.isposinf(np.asarray(want)[0, 1:, 0]).all()
    np.testing.assert_allclose(y, want, rtol=1e-5)
    np.testing.assert_allclose(h, last, rtol=1e-5)


# -- convolution ---------------------------------------------------------------------------

# batch, channels, steps, taps; dtype; a row in blocks of 16
CONVOLUTIONS = {
    "eight halves at a time, rows from each": ((1, 8, 136, 4), "bfloat16"),
    "eight, taps in three words": ((2, 4, 16, 15), "float16"),
    "four": ((2, 4, 20, 4), "bfloat16"),
    "words, rows odd": ((2, 3, 36, 4), "bfloat16"),
    "words, rows even": ((1, 2, 34, 3), "float16"),
    "words, one tap": ((1, 2, 8, 1), "bfloat16"),
    "halves": ((1, 2, 7, 4), "bfloat16"),
    "float32": ((2, 3, 20, 5), "float32"),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_against_float64(case):
    (batch, c, length, taps), dtype = CONVOLUTIONS[case]
    array = drawn(taps, dtype)
    xs = array(batch, c, length + taps - 1), array(c, 1, taps), array(c)
    tile = convolution.Tile(16, 1)
    got = interpreted(convolution.causal_conv1d, use_silu=True, tile=tile)(*xs)
    x, w, bias = (np.asarray(x, np.float64) for x in xs)
    y = bias[:, None] + sum(w[:, 0, j, None] * x[..., j : j + length] for j in range(taps))
    assert (got.shape, got.dtype) == (y.shape, dtype)
    close(got, y / (1 + np.exp(-y)), causal_conv1d.precision)


def test_an_output_sees_its_own_taps_alone():
    """Words are shared by neighbours: NaN must not be."""
    run = interpreted(convolution.causal_conv1d, use_silu=False)
    for bad in (5, 6):
        x = np.zeros((1, 2, 23), jnp.bfloat16)
        x[0, 0, bad] = np.nan
        w, bias = np.ones((2, 1, 4), jnp.bfloat16), np.zeros(2, jnp.bfloat16)
        got = np.asarray(run(x, w, bias), np.float32)
        assert list(np.flatnonzero(np.isnan(got[0, 0]))) == [bad - 3, bad - 2, bad - 1, bad]
        assert not np.isnan(got[0, 1]).any()


def test_choice_of_the_convolution():
    """XLA's where a launch, or starting a program for each row, takes longer than the row."""

    def why(c, length, taps):
        array = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
        xs = array(8, c, length + taps - 1), array(c, 1, taps), array(c)
        return convolution.declines(*xs)

    assert why(4096, 2048, 4) is None
    assert "12 taps" in str(why(4096, 2048, 12))
    assert "rows of 259" in str(why(4096, 256, 4))
    assert "launches" in str(why(64, 2048, 4))


# -- lowered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8, 2048, 2048, 16), "bfloat16"), ((1, 37, 50, 5), "float32")]
)
def test_scan_lowers(shape, dtype):
    batch, length, d, n = shape
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    steps, state = array(batch, length, d), array(batch, length, n)
    xs = steps, steps, array(d, n), state, state, array(batch, d, n, dtype="float32")
    run = functools.partial(selective_scan.using("triton"), delta_softplus=True)
    text = lowered(lambda *xs: jax.vjp(run, *xs)[1](run(*xs)), *xs)
    for name in ("fuel_selective_scan", "fuel_selective_scan_states", "_scan_backward"):
        assert name in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 4096, 2048, 4), (1, 3, 5, 7)])
def test_convolution_lowers(shape, dtype):
    batch, c, length, taps = shape
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    run = functools.partial(convolution.causal_conv1d, use_silu=True)
    xs = array(batch, c, length + taps - 1), array(c, 1, taps), array(c)
    assert "fuel_causal_conv1d" in lowered(run, *xs)
