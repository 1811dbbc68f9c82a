"""Attention's kernels in Pallas' interpreter: what hides, what is empty, what they do not take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused import _attention_triton as triton
from fuel_jax.fused.flash_attn import flash_attn, flash_attn_backward
from fuel_jax.fused.paged_attn import paged_attn

OPTIONS = {"softmax_scale": None, "causal": False, "softcap": None}
OPTIONS |= {"window_size_left": None, "window_size_right": None}


def draw(seed, dtype, *shapes):
    """Normal numbers of a half type."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def exactly(f, *arrays, **params):
    """The body of an op in float64."""
    with jax.enable_x64(True):
        wide = (
            x if x is None or x.dtype.kind in "iu" else jnp.asarray(np.asarray(x, np.float64))
            for x in arrays
        )
        return [None if y is None else np.asarray(y) for y in f.body(*wide, **params)]


def by_name(explanation):
    """What became of each implementation."""
    return {choice.kernel.name: choice for choice in explanation.forward}


def plainly(q, k, v, seen, alibi, scale, softcap):
    """What people write: scores in float32, weights in halves."""
    g = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, g, 1) for x in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(seen, s if alibi is None else s - alibi, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s).astype(q.dtype), v)


def error(got, want):
    """Root of the mean square, so that one number's luck does not count."""
    return np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - want)))


def half_a_unit(dtype, want):
    """The rounding of a result, which nobody avoids."""
    return float(jnp.finfo(dtype).eps) * np.sqrt(np.mean(np.square(want)))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1), ("float16", 17)])
def test_errors_are_those_of_halves(dtype, size):
    """At most twice, and thrice in gradients, what attention in halves is off; scores to ±1000."""
    b, h, n, d = 2, 2, 48, 16
    q, k, v, do = draw(0, dtype, *[(b, h, n, d)] * 4)
    q, k = size * q, size * k
    params = OPTIONS | {"causal": True}
    seen = np.tri(n, dtype=bool)
    plain = functools.partial(plainly, seen=seen, alibi=None, scale=d**-0.5, softcap=None)
    plain_o, pull = jax.vjp(jax.jit(plain), q, k, v)
    f = functools.partial(flash_attn.using("triton"), causal=True)
    o, pull_ours = jax.vjp(f, q, k, v)
    want_o, _ = exactly(flash_attn, q, k, v, None, None, **params, return_lse=True)
    assert error(o, want_o) <= 2 * error(plain_o, want_o)
    want = exactly(flash_attn_backward, q, k, v, None, None, do, None, None, None, **params)
    for name, ours, theirs, exact in zip("qkv", pull_ours(do), pull(do), want, strict=False):
        assert error(ours, exact) <= 3 * error(theirs, exact), name


def test_scores_of_ten_thousand():
    """Weights of 1 and 0: the values themselves, and slopes that are nothing beside q and k."""
    q, k, v, do = draw(5, "bfloat16", *[(1, 2, 48, 16)] * 4)
    q, k = 100 * q, 100 * k
    o, pull = jax.vjp(flash_attn.using("triton"), q, k, v)
    want, _ = exactly(flash_attn, q, k, v, None, None, **OPTIONS, return_lse=True)
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=2e-2)
    dq, dk, dv = (np.asarray(x, np.float64) for x in pull(do))
    eps = float(jnp.finfo("bfloat16").eps)
    assert max(np.abs(dq).max(), np.abs(dk).max()) < eps * 100 * np.abs(dv).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "params", [{"causal": True}, {"window_size_left": 3, "window_size_right": 2}], ids=str
)
def test_hidden_keys_may_hold_anything(params, value):
    """Rows that see a bad key are as the body says, and no others are touched."""
    q, k, v, do = draw(0, "bfloat16", *[(1, 2, 40, 16)] * 4)
    f = functools.partial(flash_attn.using("triton"), **params)
    for bad_k, bad_v in ((k, v.at[0, 0, 20].set(value)), (k.at[0, 0, 20].set(np.nan), v)):
        got, want = f(q, bad_k, bad_v), flash_attn.decompose(q, bad_k, bad_v, **params)
        np.testing.assert_allclose(*(np.asarray(x, "float32") for x in (got, want)), atol=2e-2)
        got = jax.vjp(f, q, bad_k, bad_v)[1](do)
        clean = jax.vjp(f, q, k, v)[1](do)
        sees = np.isnan(np.asarray(want, "float32")).any(-1) | np.isinf(want).any(-1)
        rows = (np.asarray(x[0], "float32")[~sees] for x in (got, clean))
        np.testing.assert_allclose(*rows, atol=3e-2)


def test_what_lies_beyond_the_length_is_not_read():
    q, k, v, do = draw(1, "float16", *[(2, 2, 24, 16)] * 4)
    k_len = jnp.array([24, 9])
    bad_k, bad_v = (x.at[1, :, 9:].set(np.nan) for x in (k, v))
    f = lambda k, v: flash_attn.using("triton")(q, k, v, None, k_len, causal=True)
    (got, pull), (want, pull_clean) = jax.vjp(f, bad_k, bad_v), jax.vjp(f, k, v)
    np.testing.assert_array_equal(got, want)
    for a, b in zip(pull(do), pull_clean(do), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.any(a[1, :, 9:])


def test_a_length_there_is_not_gives_nan():
    (x,) = draw(2, "float16", (2, 2, 8, 16))
    o = flash_attn.using("triton")(x, x, x, None, jnp.array([9, 8]))
    assert np.isnan(o[0]).all()
    assert np.isfinite(o[1]).all()


@pytest.mark.parametrize("sq", [1, 3])
def test_pages(sq):
    """Tables with pages that are not there, where nobody looks; a length that is too long."""
    b, h, hk, d, size, pages = 3, 4, 2, 16, 4, 30
    q, k, v = draw(3, "bfloat16", (b, h, sq, d), (pages, size, hk, d), (pages, size, hk, d))
    table = np.random.default_rng(3).permutation(pages).reshape(b, -1).astype(np.uint32)
    table[1, 3:] = 2**32 - 1
    lens = jnp.array([40, 10, 41], "uint32")
    k, v = (x.at[table[1, 2], 2:].set(np.nan) for x in (k, v))  # beyond the tenth token
    got = paged_attn.using("triton")(q, k, v, table, lens, softcap=5.0)
    want = paged_attn.decompose(q, k, v, table, lens, softcap=5.0)
    np.testing.assert_allclose(*(np.asarray(x, "float32") for x in (got, want)), atol=1e-2)
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[:2]).all()


def test_few_rows_share_the_chip():
    """One sequence of long keys is cut into parts, and the heads of a group go together."""
    plan = triton.forward_plan(1, 32, 8, 1, 131_072, 128)
    assert plan["packed"]
    assert 132 <= 8 * plan["parts"] <= 2 * 264
    assert triton.forward_plan(64, 32, 8, 1, 4096, 128)["parts"] == 1
    assert not triton.forward_plan(4, 32, 8, 4096, 4096, 128)["packed"]


def test_parts_of_the_keys_combine():
    q, k, v = draw(4, "float16", (1, 8, 1, 16), (1, 2, 700, 16), (1, 2, 700, 16))
    f = flash_attn.using("triton")
    got = f(q, k, v, None, 650, return_lse=True)
    assert triton.forward_plan(1, 8, 2, 1, 700, 16)["parts"] == 3
    want = exactly(flash_attn, q, k, v, None, jnp.int32(650), **OPTIONS, return_lse=True)
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want[0], atol=2e-3)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 2, 8, 64), "float32", "tensor cores take halves"),
        ((1, 2, 8, 264), "float16", "wider than 256"),
        ((1, 70_000, 1, 8), "float16", "more than a grid has"),
    ],
)
def test_what_it_does_not_take(shape, dtype, reason):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert reason in by_name(flash_attn.explain(x, x, x))["triton"].why_not


def test_many_sequences_are_no_obstacle():
    q, kv = (jax.ShapeDtypeStruct((1000, h, n, 64), "bfloat16") for h, n in ((8, 1), (2, 512)))
    assert by_name(flash_attn.explain(q, kv, kv))["triton"].serves == ("cuda",)
    plan = triton.forward_plan(1000, 8, 2, 1, 512, 64)
    assert plan["parts"] == 1
