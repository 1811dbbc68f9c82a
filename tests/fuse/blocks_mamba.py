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
