"""Functions of ours beside PyTorch's: value and gradients of both, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .torch_adapters import QUICKLY

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def by_torch(f, *arrays, cotangent=None):
    """Value, and the gradient of every float array; None where there is none."""
    tensors = [torch.tensor(x) for x in arrays]
    wrt = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    y = f(*tensors)
    if not y.requires_grad:
        return y.numpy(), [None] * len(wrt)
    ct = torch.ones_like(y) if cotangent is None else torch.tensor(cotangent)
    grads = torch.autograd.grad(y, wrt, ct, allow_unused=True)
    return y.detach().numpy(), [None if g is None else g.numpy() for g in grads]


def by_us(f, *arrays, cotangent=None):
    """The same of a function of arrays."""
    arrays = [jnp.asarray(x) for x in arrays]
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(arrays, ct):
        def ours(*active):
            given = dict(enumerate(arrays)) | dict(zip(floats, active, strict=True))
            return f(*given.values())

        y, pull = jax.vjp(ours, *[arrays[i] for i in floats])
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return y, [None] * len(floats)
        return y, pull(jnp.ones_like(y) if ct is None else ct.astype(y.dtype))

    return both(arrays, None if cotangent is None else jnp.asarray(cotangent))


def near(got, want, bound, where=True):
    """Within ``bound`` of each wanted value, or of 1 where that is smaller; infinities equal."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(got - want) <= bound * np.maximum(np.abs(want), 1))
    off &= ~((got == want) | (np.isnan(got) & np.isnan(want))) & where
    assert not off.any(), [
        (tuple(map(int, i)), got[tuple(i)], want[tuple(i)]) for i in np.argwhere(off)
    ]


def agree(op, ours, theirs, *arrays, cotangent=None):
    """Value and gradients, by our promise of precision relative to the largest."""
    bound = op.precision.tolerance(np.float64)
    y, grads = by_us(ours, *arrays, cotangent=cotangent)
    want, wanted = by_torch(theirs, *arrays, cotangent=cotangent)
    for got, right in zip((y, *grads), (want, *wanted), strict=True):
        if right is not None:
            scale = np.abs(np.where(np.isfinite(right), right, 0)).max(initial=0) or 1
            near(np.asarray(got) / scale, right / scale, bound)


def seeded(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def slope_of(*shape):
    """A cotangent; the operand itself would be none: much of a norm's gradient cancels then."""
    return seeded(*shape, seed=1)
