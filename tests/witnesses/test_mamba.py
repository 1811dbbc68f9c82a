"""transformers' Mamba blocks, built again from our ops: same results, same gradients.

A block is  x + mixer(norm(x)),  run on its slow path, random weights, on the CPU.  It rounds to
float32 in places whatever its dtype; in the comparison in float64 that is switched off.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax as F

torch = pytest.importorskip("torch", reason="torch is not installed: transformers needs it")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.mamba.modeling_mamba import MambaBlock  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block  # noqa: E402

# A block runs for a millisecond; most of these tests is compiling it.
HASTY = {"compiler_options": {"xla_backend_optimization_level": 0}}
SMALL = {"num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 12}


def mamba_config(**other):
    return transformers.MambaConfig(**SMALL | {"state_size": 4, "time_step_rank": 2} | other)


def mamba2_config(**other):
    sizes = {"state_size": 4, "num_heads": 6, "head_dim": 4, "n_groups": 1, "chunk_size": 4}
    return transformers.Mamba2Config(**SMALL | sizes | other)


# -- the blocks, of our ops -------------------------------------------------------------------
# State between two calls: the steps that the convolution still sees, and that of the recurrence.


def linear(p, name, x):
    """x Wᵀ, plus the bias where there is one."""
    y = x @ p[f"mixer.{name}.weight"].T
    return y + p[f"mixer.{name}.bias"] if f"mixer.{name}.bias" in p else y


def convolve(p, x, past):
    """SiLU of the convolution along the sequence, and the steps that the next one needs."""
    taps, x = p["mixer.conv1d.weight"], jnp.swapaxes(x, 1, 2)
    before = jnp.zeros((*x.shape[:2], taps.shape[-1] - 1), x.dtype) if past is None else past
    x = jnp.concatenate([before, x], -1)
    bias = p.get("mixer.conv1d.bias", jnp.zeros(x.shape[1], x.dtype))
    y = F.causal_conv1d(x, taps, bias, use_silu=True)
    return jnp.swapaxes(y, 1, 2), x[..., x.shape[-1] - before.shape[-1] :]


def mamba(p, x, mask=None, past=(None, None), *, config):
    rank, n = config.time_step_rank, config.state_size
    mask = jnp.ones(x.shape[:2], x.dtype) if mask is None else mask
    h = F.rms_norm_last_dim(x, eps=config.layer_norm_epsilon) * p["norm.weight"]
    u, gate = jnp.split(linear(p, "in_proj", h * mask[..., None]), 2, -1)
    u, steps = convolve(p, u, past[0])
    u = u * mask[..., None]
    delta, b, c = jnp.split(linear(p, "x_proj", u), (rank, rank + n), -1)
    delta, a = linear(p, "dt_proj", delta), -jnp.exp(p["mixer.A_log"])
    y, state = F.selective_scan(u, delta, a, b, c, past[1], delta_softplus=True)
    y = (y + u * p["mixer.D"]) * F.silu(gate)
    return x + linear(p, "out_proj", y), (steps, state)


def mamba2(p, x, mask=None, past=(None, None), *, config):
    (batch, length, _), heads, groups = x.shape, config.num_heads, config.n_groups
    inner, width = heads * config.head_dim, groups * config.state_size
    mask = jnp.ones(x.shape[:2], x.dtype) if mask is None else mask
    h = F.rms_norm_last_dim(x, eps=config.layer_norm_epsilon) * p["norm.weight"]
    h = linear(p, "in_proj", h * mask[..., None])
    gate, u, dt = jnp.split(h, (inner, 2 * inner + 2 * width), -1)
    u, steps = convolve(p, u, past[0])
    u, b, c = jnp.split(u * mask[..., None], (inner, inner + width), -1)
    dt = jnp.clip(jax.nn.softplus(dt + p["mixer.dt_bias"]), *config.time_step_limit)
    u, b, c = (
        v.reshape(batch, length, -1, v.shape[-1] // parts)
        for v, parts in ((u, heads), (b, groups), (c, groups))
    )
    missing = -length % config.chunk_size  # made up for by steps of dt = 0: they change nothing
    whole = lambda v: jnp.pad(v, [(0, 0), (0, missing)] + [(0, 0)] * (v.ndim - 2))
    given = whole(u), whole(dt), -jnp.exp(p["mixer.A_log"]), whole(b), whole(c), past[1]
    y, state = F.ssd_chunk_scan(*given, chunk_size=config.chunk_size)
    y = (y[:, :length] + u * p["mixer.D"][:, None]).reshape(batch, length, inner) * F.silu(gate)
    y = F.rms_norm_last_dim(y.reshape(batch, length, groups, -1), eps=config.layer_norm_epsilon)
    y = y.reshape(batch, length, inner) * p["mixer.norm.weight"]
    return x + linear(p, "out_proj", y), (steps, state)


# -- transformers' ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread():
    """For such small arrays torch's threads mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def rounding(dtype):
    """In float64, what a block rounds stays: ``x.float()`` and ``x.to(torch.float32)``."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch, "float32", torch.float64)
        yield


def built(block_class, config, dtype):
    """A block with random weights, and its weights by name."""
    block, rng = block_class(config, 0).to(getattr(torch, dtype)), np.random.default_rng(5)
    for weight in block.parameters():
        weight.data.copy_(torch.tensor(rng.normal(0, 0.5, weight.shape)))
    return block, {name: jnp.asarray(w.detach().numpy()) for name, w in block.named_parameters()}


def data(length, seed):
    return np.random.default_rng(seed).normal(size=(2, length, SMALL["hidden_size"]))


def theirs(block_class, config, dtype, x, g, mask):
    """The result and all gradients, by name."""
    block, _ = built(block_class, config, dtype)
    x, g = (torch.tensor(v).to(getattr(torch, dtype)) for v in (x, g))
    x.requires_grad_()
    with rounding(dtype):
        y = block(x, attention_mask=torch.tensor(mask))
        y.backward(g)
    return {"y": y.detach(), "x": x.grad} | {n: w.grad for n, w in block.named_parameters()}


def ours(f, block_class, config, dtype, x, g, mask):
    _, weights = built(block_class, config, dtype)
    x, g, mask = (jnp.asarray(v).astype(dtype) for v in (x, g, mask))

    def run(weights, x):
        block = lambda weights, x: f(weights, x, mask, config=config)
        y, pull, _ = jax.vjp(block, weights, x, has_aux=True)
        of_weights, of_x = pull(g)
        return {"y": y, "x": of_x} | of_weights

    return jax.jit(run, **HASTY)(weights, x)


def errors(got, want):
    """By name, the largest error beside the largest value."""
    assert got.keys() == want.keys()
    each = {}
    for name in want:
        x, y = (np.asarray(v[name], np.float64) for v in (got, want))
        assert x.shape == y.shape
        assert y.any(), name
        each[name] = np.abs(x - y).max() / np.abs(y).max()
    return each


ALL = np.ones((2, 9), bool)
PADDED = np.arange(9) >= np.array([[0], [3]])  # the second sequence, on the left
CASES = {
    "mamba": (mamba, MambaBlock, mamba_config(), ALL),
    "mamba, other biases, odd sizes": (
        *(mamba, MambaBlock),
        mamba_config(
            **{"use_bias": True, "use_conv_bias": False, "conv_kernel": 1},
            **{"state_size": 5, "time_step_rank": 3, "expand": 1},
        ),
        PADDED,
    ),
    "mamba2": (mamba2, Mamba2Block, mamba2_config(), PADDED),
    "mamba2, every bias, groups, limited steps": (
        *(mamba2, Mamba2Block),
        mamba2_config(use_bias=True, n_groups=3, chunk_size=3, time_step_limit=(0.4, 1.2)),
        ALL,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case):
    """In float64, to its last digits."""
    f, block_class, config, mask = CASES[case]
    given = block_class, config, "float64", data(9, 6), data(9, 7), mask
    for name, error in errors(ours(f, *given), theirs(*given)).items():
        assert error < 1e-14, name


@pytest.mark.parametrize("case", ["mamba", "mamba2"])
def test_float32_against_float64(case):
    """Ours and theirs are both a few roundings away; which is nearer changes by the array."""
    f, block_class, config, mask = CASES[case]
    given = data(9, 6), data(9, 7), mask
    exact = theirs(block_class, config, "float64", *given)
    for got in (
        ours(f, block_class, config, "float32", *given),
        theirs(block_class, config, "float32", *given),
    ):
        for name, error in errors(got, exact).items():
            assert error < 2e-6, name


@pytest.mark.parametrize(
    ("case", "lengths"),
    # Of Mamba step by step only: in a later call of more steps MambaMixer begins at zero again.
    [("mamba", (6, 1, 1)), ("mamba2", (6, 4, 1))],
)
def test_a_sequence_continued(case, lengths):
    """Results call by call, and what is kept between them."""
    f, block_class, config, _ = CASES[case]
    block, weights = built(block_class, config, "float64")
    cache, past = transformers.DynamicCache(config=config), (None, None)
    run = jax.jit(lambda *given: f(weights, *given, config=config), **HASTY)
    for i, length in enumerate(lengths):
        x = data(length, 8 + i)
        with rounding("float64"), torch.no_grad():
            y = block(torch.tensor(x), cache=cache)
        got, past = run(jnp.asarray(x), None, past)
        steps = cache.get_conv_state(0)[..., 1:]  # it keeps one more than the next call needs
        want = {"y": y, "steps": steps, "state": cache.get_recurrent_state(0)}
        for name, error in errors({"y": got, "steps": past[0], "state": past[1]}, want).items():
            assert error < 1e-14, (name, i)
