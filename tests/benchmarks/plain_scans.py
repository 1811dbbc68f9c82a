"""How a JAX user without fuel_jax would write the state-space scans."""

import jax.numpy as jnp
from jax import lax

from .row import Row


def selective_scan(u, delta, a, b, c):
    """The recurrence, step by step."""

    def step(h, at_t):
        u, dt, b, c = at_t
        h = jnp.exp(dt[..., None] * a) * h + (dt * u)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    along = [x.swapaxes(0, 1) for x in (u, delta, b, c)]
    h, y = lax.scan(step, jnp.zeros((u.shape[0], *a.shape)), along)
    return y.swapaxes(0, 1), h


def ssd_chunk_scan(x, dt, a, b, c, *, chunk_size):
    """The recurrence, step by step."""
    b, c = (jnp.repeat(z, x.shape[2] // z.shape[2], 2) for z in (b, c))

    def step(h, at_t):
        x, dt, b, c = at_t
        decay = jnp.exp(dt * a)[..., None, None]
        h = decay * h + (dt[..., None] * x)[..., None] * b[:, :, None]
        return h, jnp.einsum("bhpn,bhn->bhp", h, c)

    along = [z.swapaxes(0, 1) for z in (x, dt, b, c)]
    h, y = lax.scan(step, jnp.zeros((*x.shape[::2], x.shape[3], b.shape[3])), along)
    return y.swapaxes(0, 1), h


def selective_scan_associative(u, delta, a, b, c):
    """All states at once, by a parallel prefix."""
    decay = jnp.exp(delta[..., None] * a)
    x = (delta * u)[..., None] * b[:, :, None]
    h = lax.associative_scan(composed, (decay, x), axis=1)[1]
    return jnp.einsum("bldn,bln->bld", h, c), h[:, -1]


def ssd_associative(x, dt, a, b, c, *, chunk_size):
    """All states at once, by a parallel prefix."""
    b, c = (jnp.repeat(z, x.shape[2] // z.shape[2], 2) for z in (b, c))
    decay = jnp.exp(dt * a)[..., None, None]
    states = (dt[..., None] * x)[..., None] * b[:, :, :, None]
    h = lax.associative_scan(composed, (decay, states), axis=1)[1]
    return jnp.einsum("blhpn,blhn->blhp", h, c), h[:, -1]


def composed(first, second):
    """Two steps  h ↦ d·h + x  as one."""
    (d0, x0), (d1, x1) = first, second
    return d0 * d1, d1 * x0 + x1


def selective(b, l, d, n):
    """A call of selective_scan."""
    states = [f"f32 {b} {l} {n}"] * 2
    return [f"f32 {b} {l} {d}", f"f32+ {b} {l} {d}", f"f32- {d} {n}", *states], {}


def ssd(b, l, h, p, n, groups):
    """A call of ssd_chunk_scan."""
    heads = [f"f32 {b} {l} {h} {p}", f"f32+ {b} {l} {h}", f"f32- {h}"]
    return [*heads, *[f"f32 {b} {l} {groups} {n}"] * 2], {"chunk_size": 64}


# Faster than either is promised; memory in proportion to the inputs too.
SCANS: dict[str, Row] = {
    "selective_scan": Row(
        {"scan": selective_scan, "associative_scan": selective_scan_associative},
        [selective(2, 2048, 1024, 16), selective(1, 1024, 256, 16), selective(4, 1, 2048, 16)],
        limit=1.0,
    ),
    "ssd_chunk_scan": Row(
        {"scan": ssd_chunk_scan, "associative_scan": ssd_associative},
        [ssd(1, 1024, 8, 64, 64, 8), ssd(2, 2048, 16, 64, 128, 16), ssd(1, 512, 16, 64, 128, 1)],
        limit=1.0,
    ),
}
