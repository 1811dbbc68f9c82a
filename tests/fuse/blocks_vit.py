"""ViT: an image as patches, a token for the class, no mask."""

import jax
import jax.numpy as jnp
from jax import lax

from .blocks import block, draw

B, SIDE, P, C, D, H, K, F, CLASSES = 2, 6, 3, 3, 12, 3, 4, 20, 5
N = (SIDE // P) ** 2 + 1


def weights():
    """Patch embedding, one layer, the head."""
    square = {f"w{n}": (D, D) for n in "qkvo"} | {f"b{n}": (D,) for n in "qkvo"}
    norms = {n: (D,) for n in ("g1", "c1", "g2", "c2", "g3", "c3")}
    embedding = {"patch": (P * P * C, D), "patch_b": (D,), "cls": (1, 1, D), "pos": (1, N, D)}
    mlp = {"w1": (D, F), "b1": (F,), "w2": (F, D), "b2": (D,)}
    return draw(41, **square, **norms, **embedding, **mlp, head=(D, CLASSES), head_b=(CLASSES,))


def images():
    """``[b, height, width, c]``."""
    return draw(42, x=(B, SIDE, SIDE, C))["x"]


def layer_norm(x, g, b):
    """By ``jax.nn.standardize``."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-6) * g + b


def patches(x):
    """``[b, patches, pixels]``."""
    x = x.reshape(*x.shape[:-3], SIDE // P, P, SIDE // P, P, C)
    x = jnp.moveaxis(x, -4, -3)
    return x.reshape(*x.shape[:-5], (SIDE // P) ** 2, P * P * C)


def mlp(w, x):
    """Two matrices and gelu."""
    return jax.nn.gelu(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


@block(layer_norm=3, linear=8, flash_attn=1)
def bhsd_matmul():
    """Heads first; the class is read off the first token."""

    def model(w, x):
        x = patches(x) @ w["patch"] + w["patch_b"]
        x = jnp.concatenate([jnp.tile(w["cls"], (B, 1, 1)), x], axis=1) + w["pos"]
        h = layer_norm(x, w["g1"], w["c1"])
        heads = lambda n: (h @ w["w" + n] + w["b" + n]).reshape(B, N, H, K).swapaxes(1, 2)
        q, k, v = map(heads, "qkv")
        o = jax.nn.softmax(q @ k.mT * K**-0.5) @ v
        x = x + (o.swapaxes(1, 2).reshape(B, N, D) @ w["wo"] + w["bo"])
        x = x + mlp(w, layer_norm(x, w["g2"], w["c2"]))
        return layer_norm(x, w["g3"], w["c3"])[:, 0] @ w["head"] + w["head_b"]

    return model, (weights(), images())


@block(layer_norm=3, linear=7, flash_attn=1)
def bshd_einsum():
    """Patches by a strided convolution, no linear layer here; the mean for the class."""

    def model(w, x):
        kernel = w["patch"].reshape(P, P, C, D)
        x = lax.conv_general_dilated(
            x, kernel, (P, P), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.reshape(B, N - 1, D) + w["patch_b"]
        x = jnp.concatenate([jnp.broadcast_to(w["cls"], (B, 1, D)), x], 1) + w["pos"]
        h = layer_norm(x, w["g1"], w["c1"])
        q, k, v = (
            jnp.einsum("bnd,dhk->bnhk", h, w["w" + n].reshape(D, H, K)) + w["b" + n].reshape(H, K)
            for n in "qkv"
        )
        p = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / jnp.sqrt(1.0 * K), axis=-1)
        o = jnp.einsum("bhqs,bshk->bqhk", p, v)
        x = x + jnp.einsum("bqhk,hkd->bqd", o, w["wo"].reshape(H, K, D)) + w["bo"]
        x = x + mlp(w, layer_norm(x, w["g2"], w["c2"]))
        return layer_norm(x.mean(1), w["g3"], w["c3"]) @ w["head"] + w["head_b"]

    return model, (weights(), images())


@block(layer_norm=3, linear=8, flash_attn=1)
def per_example_under_vmap():
    """An image alone; tokens by vmap too."""

    def model(w, x):
        x = jax.vmap(lambda p: p @ w["patch"] + w["patch_b"])(patches(x))
        x = jnp.concatenate([w["cls"][0], x]) + w["pos"][0]
        norm = lambda g, c: jax.vmap(lambda t: layer_norm(t, w[g], w[c]))
        h = norm("g1", "c1")(x)
        q, k, v = (
            jax.vmap(lambda t, n=n: t @ w["w" + n] + w["b" + n])(h).reshape(N, H, K) for n in "qkv"
        )
        head = lambda q, k, v: jax.nn.softmax(q @ k.T / K**0.5) @ v
        o = jax.vmap(head, 1, 1)(q, k, v).reshape(N, D)
        x = x + jax.vmap(lambda t: t @ w["wo"] + w["bo"])(o)
        x = x + mlp(w, norm("g2", "c2")(x))
        return layer_norm(x[0], w["g3"], w["c3"]) @ w["head"] + w["head_b"]

    return jax.vmap(model, (None, 0)), (weights(), images())


@block()
def other_norms():
    """Batch norm, group norm over pixels, instance norm: other axes, or several."""

    def norms(x, g, b):
        over = lambda t, axes: (
            (t - t.mean(axes, keepdims=True)) / jnp.sqrt(t.var(axes, keepdims=True) + 1e-5)
        )
        batch = over(x, (0, 1, 2)) * g + b
        instance = over(x, (1, 2)) * g + b
        group = over(x.reshape(B, SIDE, SIDE, 1, C), (1, 2, 4)).reshape(x.shape)
        return batch + instance + group

    return norms, (images(), *draw(43, g=(C,), b=(C,)).values())


@block(near=("softmax",))
def softmax_along_another_axis():
    """Over tokens, where the op would have to move the axis."""

    return (lambda x: jax.nn.softmax(x, axis=1)), (draw(44, x=(B, N, D))["x"],)
