"""Mamba: a causal convolution of each channel, SiLU, a recurrence along the sequence."""

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import block, draw

B, L, D, N, K = 2, 7, 6, 3, 4


def weights(taps=K):
    """Of one block of width D; ``dt`` has rank 2."""
    return draw(
        51,
        **{"in": (D, 2 * D), "conv": (taps, D), "conv_b": (D,), "x": (D, 2 + 2 * N)},
        **{"dt": (2, D), "dt_b": (D,), "a_log": (D, N), "d": (D,), "out": (D, D)},
    )


def x():
    """Hidden states."""
    return draw(52, x=(B, L, D))["x"]


def conv_nwc(x, w, b):
    """``conv_general_dilated``, channels last, a group for each."""
    y = lax.conv_general_dilated(
        x,
        w[:, None],
        window_strides=(1,),
        padding=[(w.shape[0] - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=w.shape[1],
    )
    return y + b


def conv_ncw(x, w, b):
    """As PyTorch lays it out; padded on both sides and cut."""
    y = lax.conv_general_dilated(
        x.swapaxes(1, 2),
        w.T[:, None],
        (1,),
        [(w.shape[0] - 1, w.shape[0] - 1)],
        feature_group_count=w.shape[1],
    )
    return (y + b[:, None])[:, :, : x.shape[1]].swapaxes(1, 2)


def conv_by_shifts(x, w, b):
    """Tap by tap."""
    taps = w.shape[0]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return sum(w[j] * padded[:, j : j + x.shape[1]] for j in range(taps)) + b


def conv_by_concatenation(x, w, b):
    """Zeros before; the last tap first."""
    before = lambda n: jnp.concatenate([jnp.zeros((x.shape[0], n, D)), x[:, : L - n]], axis=1)
    y = x * w[-1]
    for n in range(1, w.shape[0]):
        y = y + before(n) * w[-1 - n]
    return y + b


@block(causal_conv1d=1)
def conv_with_silu_nwc():
    """With SiLU."""
    w = weights()
    return (lambda x, w, b: jax.nn.silu(conv_nwc(x, w, b))), (x(), w["conv"], w["conv_b"])


@block(causal_conv1d=1)
def conv_ncw_cut():
    """Without."""
    w = weights()
    return conv_ncw, (x(), w["conv"], w["conv_b"])


@block(causal_conv1d=1)
def conv_by_shifts_of_three():
    """Three taps, SiLU written out."""
    w = weights(3)

    def f(x, w, b):
        y = conv_by_shifts(x, w, b)
        return y * jax.nn.sigmoid(y)

    return f, (x(), w["conv"], w["conv_b"])


@block(causal_conv1d=1)
def conv_by_concatenations():
    """Without a gate."""
    w = weights()
    return conv_by_concatenation, (x(), w["conv"], w["conv_b"])


@block(causal_conv1d=1)
def conv_under_vmap():
    """A sequence alone, and no bias."""
    one = lambda x, w: jax.nn.silu(conv_nwc(x[None], w, jnp.zeros(D)))[0]
    return jax.vmap(one, (0, None)), (x(), weights()["conv"])


@block()
def conv_not_causal():
    """Padded on both sides alike."""

    def f(x, w):
        return lax.conv_general_dilated(
            x,
            w[:, None],
            (1,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=D,
        )

    return f, (x(), weights(3)["conv"])


def projected(w, x):
    """u, Δ, a, b, c and the gate, as in Mamba."""
    u, gate = jnp.split(x @ w["in"], 2, axis=-1)
    u = jax.nn.silu(conv_nwc(u, w["conv"], w["conv_b"]))
    dt, b, c = jnp.split(u @ w["x"], [2, 2 + N], axis=-1)
    delta = jax.nn.softplus(dt @ w["dt"] + w["dt_b"])
    return u, delta, -jnp.exp(w["a_log"]), b, c, gate


@block(causal_conv1d=1, linear=1, selective_scan=1)
def whole_block():
    """Everything in the loop."""

    def f(w, x):
        u, delta, a, b, c, gate = projected(w, x)

        def step(h, at):
            u, delta, b, c = at
            h = jnp.exp(delta[:, :, None] * a) * h + (delta * u)[:, :, None] * b[:, None, :]
            return h, jnp.einsum("bdn,bn->bd", h, c)

        first = jnp.zeros((B, D, N))
        _, y = lax.scan(step, first, tuple(t.swapaxes(0, 1) for t in (u, delta, b, c)))
        y = y.swapaxes(0, 1) + u * w["d"]
        return (y * jax.nn.silu(gate)) @ w["out"]

    return f, (weights(), x())


@block(causal_conv1d=1, linear=1, selective_scan=1)
def whole_block_discrete_first():
    """Decays and inputs of all steps first, as in mamba-minimal."""

    def f(w, x):
        u, delta, a, b, c, gate = projected(w, x)
        keep = jnp.exp(jnp.einsum("bld,dn->bldn", delta, a))
        add = jnp.einsum("bld,bln,bld->bldn", delta, b, u)

        def step(h, at):
            keep, add, c = at
            h = keep * h + add
            return h, (h @ c[:, :, None])[..., 0]

        moved = tuple(jnp.moveaxis(t, 1, 0) for t in (keep, add, c))
        y = jnp.moveaxis(lax.scan(step, jnp.zeros((B, D, N)), moved)[1], 0, 1) + u * w["d"]
        return (y * jax.nn.silu(gate)) @ w["out"]

    return f, (weights(), x())


@block(causal_conv1d=1, linear=1, selective_scan=1)
def whole_block_under_vmap():
    """A sequence alone, states ``[n, d]``, their sums at the end."""

    def one(w, x):
        u, delta, a, b, c, gate = (t if t.ndim == 2 else t[0] for t in projected(w, x[None]))

        def step(h, at):
            u, delta, b = at
            h = h * jnp.exp(delta * a.T) + jnp.outer(b, delta * u)
            return h, h

        _, h = lax.scan(step, jnp.zeros((N, D)), (u, delta, b))
        y = jnp.einsum("lnd,ln->ld", h, c) + u * w["d"]
        return (y * jax.nn.silu(gate)) @ w["out"]

    return jax.vmap(one, (None, 0)), (weights(), x())


@block(selective_scan=1)
def scan_of_one_sequence():
    """The loop's result as it is, no batch."""

    def f(u, delta, a, b, c):
        def step(h, at):
            u, delta, b, c = at
            h = jnp.exp(delta[:, None] * a) * h + (delta * u)[:, None] * b
            return h, h @ c

        return lax.scan(step, jnp.zeros((D, N)), (u, delta, b, c))[1]

    given = draw(53, u=(L, D), delta=(L, D), a=(D, N), b=(L, N), c=(L, N))
    return f, tuple(given.values())


def recurrence(step, reverse=False, last=False):
    """A loop that is nearly the op's."""

    def f(u, delta, a, b, c):
        moved = tuple(t.swapaxes(0, 1) for t in (u, delta, b, c))
        h, y = lax.scan(lambda h, at: step(h, a, *at), jnp.zeros((B, D, N)), moved, reverse=reverse)
        return (y.swapaxes(0, 1), h) if last else y.swapaxes(0, 1)

    given = draw(54, u=(B, L, D), delta=(B, L, D), a=(D, N), b=(B, L, N), c=(B, L, N))
    return f, tuple(given.values())


def plain_step(h, a, u, delta, b, c):
    """The op's."""
    h = jnp.exp(delta[:, :, None] * a) * h + (delta * u)[:, :, None] * b[:, None, :]
    return h, jnp.einsum("bdn,bn->bd", h, c)


@block()
def scan_backwards():
    """From the last step to the first."""
    return recurrence(plain_step, reverse=True)


@block()
def scan_with_another_decay():
    """1 − Δ·a for the exponential."""

    def step(h, a, u, delta, b, c):
        h = (1 - delta[:, :, None] * a) * h + (delta * u)[:, :, None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    return recurrence(step)


@block()
def scan_of_the_state_before():
    """What is read is the state before the step."""

    def step(h, a, u, delta, b, c):
        return plain_step(h, a, u, delta, b, c)[0], jnp.einsum("bdn,bn->bd", h, c)

    return recurrence(step)


@block(near=("selective_scan",))
def scan_whose_last_state_is_returned():
    """The op returns it too, but one value is put in place at a time."""
    return recurrence(plain_step, last=True)


@block()
def scan_from_ones():
    """A first state that is no zero."""

    def f(u, delta, a, b, c):
        moved = tuple(t.swapaxes(0, 1) for t in (u, delta, b, c))
        step = lambda h, at: plain_step(h, a, *at)
        return lax.scan(step, jnp.ones((B, D, N)), moved)[1].swapaxes(0, 1)

    return f, recurrence(plain_step)[1]


@block()
def scan_with_two_step_sizes():
    """One for the decay, another for the input."""

    def step(h, a, u, delta, b, c):
        h = jnp.exp(delta[:, :, None] * a) * h + (u * u)[:, :, None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    return recurrence(step)


@block()
def scans_one_in_the_other():
    """The inner loop carries on from the outer one's state: whose state is whose counts."""

    def f(x):
        def outer(h, x):
            def inner(g, x):
                return g + h, h * x

            g, y = lax.scan(inner, h, jnp.broadcast_to(x, (3, *x.shape)))
            return g, y.sum(0)

        return lax.scan(outer, x[0], x)[1]

    return f, tuple(draw(55, x=(L, D)).values())


@block()
def convs_that_are_not():
    """A gap between taps, a look ahead, the taps of another channel."""
    shape = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": D}

    def f(x, w):
        gap = lax.conv_general_dilated(x, w[:, None], (1,), [(6, 0)], rhs_dilation=(2,), **shape)
        ahead = lax.conv_general_dilated(x, w[:, None], (1,), [(2, 1)], **shape)
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        taps = [w[j] * padded[:, j : j + L] for j in (0, 1, 3)]
        other = jnp.roll(w, 1, axis=1)[2] * padded[:, 2 : 2 + L]
        return gap, ahead, sum(taps) + other

    return f, (x(), weights()["conv"])
