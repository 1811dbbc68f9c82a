"""What is true of the selective scan in particular."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import selective_scan

from ..refused import refused


def oracle(u, delta, a, b, c, h=None, softplus=False):
    """The recurrence, step by step, in NumPy, in float64."""
    u, delta, a, b, c = (np.asarray(x, np.float64) for x in (u, delta, a, b, c))
    step = np.logaddexp(0, delta) if softplus else delta
    h = np.zeros((u.shape[0], *a.shape)) if h is None else np.asarray(h, np.float64)
    y = np.zeros(u.shape)
    for t in range(u.shape[1]):
        s = step[:, t, :, None]
        h = np.exp(s * a) * h + s * u[:, t, :, None] * b[:, t, None, :]
        y[:, t] = (h * c[:, t, None, :]).sum(-1)
    return y, h


def operands(draw, length, dtype="float32", batch=2, d=3, n=4):
    shapes = (
        (batch, length, d),
        (batch, length, d),
        (d, n),
        (batch, length, n),
        (batch, length, n),
    )
    u, delta, a, b, c = (np.asarray(draw(shape, dtype)) / 2 for shape in shapes)
    return u, abs(delta), -abs(a), b, c


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 17, 70])
def test_agrees_with_the_definition(length, softplus, draw):
    xs = operands(draw, length)
    for got, want in zip(
        selective_scan(*xs, delta_softplus=softplus), oracle(*xs, softplus=softplus), strict=True
    ):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=5e-6 * max(1, abs(want).max(initial=0)))


def test_long_sequences_keep_their_promise(draw):
    xs = operands(draw, 2048, batch=1)
    for got, want in zip(selective_scan(*xs), oracle(*xs), strict=True):
        assert (
            abs(np.asarray(got, np.float64) - want).max()
            <= selective_scan.precision.float32 * abs(want).max()
        )


def test_constant_slow_steps_of_a_very_long_sequence_keep_their_promise(draw):
    """65,536 roundings that go one way: of exp(Δ·a), of the states, of the sums over them."""
    length, d, n = 65_536, 2, 2
    u, _, a, b, c = operands(draw, length, batch=1, d=d, n=n)
    xs = u + 1, np.full_like(u, 0.01), np.float32(0.1) * a - np.float32(0.01), b, c
    h, dlast = draw((1, d, n)), draw((1, d, n))

    def both(*xs):
        *operands, h, g, dlast = xs
        y, pull = jax.vjp(selective_scan, *operands, h)
        return *y, *pull((g, dlast))

    xs = *xs, h, draw(u.shape), dlast
    got = jax.jit(both)(*xs)
    want = jax.jit(both)(*(np.asarray(x, np.float64) for x in xs))
    assert len(got) == 8
    for x, y in zip(got, want, strict=True):
        error = np.abs(np.asarray(x, np.float64) - y).max()
        assert error <= selective_scan.precision.float32 * np.abs(y).max()


def test_a_sequence_may_be_cut_and_continued(draw):
    u, delta, a, b, c = operands(draw, 11, "float64")
    whole, last = selective_scan(u, delta, a, b, c)
    first = lambda x: x[:, :4]
    rest = lambda x: x[:, 4:]
    y, h = selective_scan(first(u), first(delta), a, first(b), first(c))
    z, h = selective_scan(rest(u), rest(delta), a, rest(b), rest(c), h)
    np.testing.assert_allclose(jnp.concatenate([y, z], 1), whole, rtol=1e-12)
    np.testing.assert_allclose(h, last, rtol=1e-12)


def test_the_gradient_flows_through_the_last_state_of_a_long_sequence(draw):
    """Finite differences over more steps than the backward keeps states of."""
    u, delta, a, b, c = operands(draw, 40, "float64", batch=1, d=2, n=2)
    loss = jax.jit(lambda u, a: jnp.sum(jnp.sin(selective_scan(u, delta, a, b, c)[1])))
    du, da = jax.jit(jax.grad(loss, (0, 1)))(u, a)
    for x, slope, f in ((u, du, lambda x: loss(x, a)), (a, da, lambda x: loss(u, x))):
        way = np.asarray(draw(x.shape, "float64"))
        found = (f(x + 1e-6 * way) - f(x - 1e-6 * way)) / 2e-6
        np.testing.assert_allclose(np.sum(slope * way), found, rtol=1e-6, atol=1e-9)


def test_no_array_of_all_states_is_held():
    """Neither forward nor backward: [B, L, D, S] would take 128 MiB here."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    given = [shape(1, 4096, 512), shape(1, 4096, 512), shape(512, 16), *[shape(1, 4096, 16)] * 2]
    for f in (selective_scan, jax.grad(lambda *xs: selective_scan(*xs)[0].sum(), range(5))):
        held = jax.jit(f).lower(*given).compile().memory_analysis().temp_size_in_bytes
        assert held <= 4096 * 512 * 16 * 4 / 2


def test_bad_calls(draw):
    u, delta, a, b, c = operands(draw, 5)
    refused(selective_scan, u, delta[:, :4], a, b, c, match="its axis l is 4, but l is 5 in 'u'")
    refused(selective_scan, u, delta, a.T, b, c, match="'a' is float32")
    refused(selective_scan, u, delta, a, b, c[..., :2], match="its axis n is 2, but n is 4")
    state = jnp.zeros((2, 3, 4), "float64")
    refused(selective_scan, u, delta, a, b, c, state, match="'initial_state' is float64")
    refused(selective_scan, u, delta, a, b, match="array 'c' is missing")
    refused(selective_scan, u, delta, a, b, c, delta_softplus=None, match="must be True or False")
