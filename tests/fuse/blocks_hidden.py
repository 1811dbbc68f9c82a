"""The same maths inside what models put around it: loops, branches, ``checkpoint``, ``jit``."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import block, draw

B, S, D, F, LAYERS = 2, 5, 8, 12, 3


def stacked():
    """Weights of all layers, one array each."""
    return draw(
        61,
        **{"wq": (LAYERS, D, D), "wk": (LAYERS, D, D), "wv": (LAYERS, D, D), "g": (LAYERS, D)},
        **{"w1": (LAYERS, D, F), "b1": (LAYERS, F)},
        **{"w2": (LAYERS, F, D), "b2": (LAYERS, D)},
    )


def x():
    """Hidden states."""
    return draw(62, x=(B, S, D))["x"]


def first(w):
    """The first layer's."""
    return jax.tree.map(lambda t: t[0], w)


def layer(w, x):
    """A norm, one head, two linear layers: rms_norm 1, flash_attn 1, linear 2."""
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["g"]
    q, k, v = h @ w["wq"], h @ w["wk"], h @ w["wv"]
    s = q @ k.mT / D**0.5
    s = jnp.where(jnp.tril(jnp.ones((S, S), bool)), s, -jnp.inf)
    x = x + jax.nn.softmax(s, axis=-1) @ v
    return x + jax.nn.relu(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


counted = functools.partial(block, rms_norm=1, flash_attn=1, linear=2)


@counted()
def scan_over_stacked_weights():
    """Counted once: the body is one."""
    return (lambda w, x: lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]), (stacked(), x())


@counted()
def scan_over_checkpointed_layers():
    """``checkpoint`` in ``scan``, as everybody trains."""
    body = jax.checkpoint(lambda x, w: (layer(w, x), None))
    return (lambda w, x: lax.scan(body, x, w)[0]), (stacked(), x())


@counted()
def checkpoint_with_a_policy():
    """The policy is kept."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(layer, policy=policy), (first(stacked()), x())


@counted()
def branch():
    """In one branch of two."""

    def f(w, x, train):
        return lax.cond(train, lambda x: layer(w, x), lambda x: x, x)

    return f, (first(stacked()), x(), jnp.asarray(True))


@block(rms_norm=1, flash_attn=1, linear=2, softmax=1)
def switch():
    """In two branches of three."""

    def f(w, x, which):
        branches = (lambda x: x, lambda x: layer(w, x), lambda x: jax.nn.softmax(x))
        return lax.switch(which, branches, x)

    return f, (first(stacked()), x(), jnp.asarray(1))


@counted()
def fori_loop():
    """A layer applied three times, its number known: a ``scan``."""

    def f(w, x):
        return lax.fori_loop(0, 3, lambda i, x: layer(w, x), x)

    return f, (first(stacked()), x())


@counted()
def layers_picked_in_a_loop():
    """The weights of layer i are taken in the loop."""

    def f(w, x):
        at = lambda i: jax.tree.map(lambda t: lax.dynamic_index_in_dim(t, i, keepdims=False), w)
        return lax.fori_loop(0, LAYERS, lambda i, x: layer(at(i), x), x)

    return f, (stacked(), x())


@block(softmax=1)
def while_loop():
    """Sharpened until one probability is above 0.9; forward only, so no gradient is asked for."""

    def f(x):
        def more(state):
            p, n = state
            return (p.max() < 0.9) & (n < 4)

        step = lambda state: (jax.nn.softmax(state[0] * 8), state[1] + 1)
        return lax.while_loop(more, step, (lax.stop_gradient(x), 0))[0]

    return f, (x(),)


@counted()
def nested_jit():
    """``jit`` in ``jit``, and a jitted norm that comes from elsewhere."""
    return jax.jit(lambda w, x: jax.jit(layer)(w, x) * 2.0), (first(stacked()), x())


@counted()
def vmap_of_scan():
    """Every sequence by itself, layers in a ``scan``."""

    def one(w, x):
        return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    return jax.vmap(one, (None, 0)), (stacked(), x())


@jax.custom_vjp
def own_softmax(x):
    """Somebody's own, with its own gradient."""
    return jax.nn.softmax(x)


def _forward(x):
    y = own_softmax(x)
    return y, y


own_softmax.defvjp(_forward, lambda y, g: (y * (g - jnp.sum(y * g, -1, keepdims=True)),))


@block()
def custom_vjp():
    """Left alone: whoever writes a gradient wants it."""
    return (lambda x: own_softmax(x) ** 2), (x(),)


@block(softmax=1)
def beside_custom_vjp():
    """What is around it is not."""
    return (lambda x: jax.nn.softmax(own_softmax(x))), (x(),)
