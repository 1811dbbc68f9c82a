"""What is true of attention in particular: the definition, empty rows, leaks, bounded memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from fuel_jax import (
    flash_attn,
    flash_attn_backward_k,
    flash_attn_backward_q,
    flash_attn_backward_v,
)
from fuel_jax.fused import _attention_chunked as chunked
from fuel_jax.fused._attention import Rules

from ..contract import close, compiled
from ..refused import refused

KERNELS = ["xla", "chunked"]


def oracle(
    q,
    k,
    v,
    alibi=None,
    k_len=None,
    *,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
):
    """The definition in NumPy, in float64, one sequence and head at a time: (o, lse)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, h, sq, d), (_, hk, sk, dv) = q.shape, v.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    lengths = np.broadcast_to(sk if k_len is None else np.asarray(k_len), (b,))
    o, lse = np.zeros((b, h, sq, dv)), np.full((b, h, sq), -np.inf)
    for n, head in np.ndindex(b, h):
        keys, kv = np.arange(int(lengths[n])), head // (h // hk)
        ahead = keys - (np.arange(sq)[:, None] + len(keys) - sq)  # of the query, key by key
        seen = np.ones(ahead.shape, bool)
        if causal:
            seen &= ahead <= 0
        if window_size_left is not None:
            seen &= ahead >= -window_size_left
        if window_size_right is not None:
            seen &= ahead <= window_size_right
        s = q[n, head] @ k[n, kv, keys].T * scale
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        if alibi is not None:
            s = s - float(alibi[head]) * np.abs(ahead)
        some = seen.any(-1)
        s = np.where(seen, s, -np.inf)[some]
        m = s.max(-1, keepdims=True, initial=-1e300)
        e = np.exp(s - m)
        o[n, head, some] = e @ v[n, kv, keys] / e.sum(-1, keepdims=True)
        lse[n, head, some] = m[:, 0] + np.log(e.sum(-1))
    return o, lse


@pytest.fixture
def qkv(draw):
    return draw((2, 4, 5, 8)), draw((2, 2, 7, 8)), draw((2, 2, 7, 6))


SLOPES = np.array([0.5, 0.25, 1.0, 0.0], np.float32)
SMALL = {
    "plain": {},
    "causal": {"causal": True},
    "before the keys": {"causal": True, "k_len": 3},
    "a length each": {"k_len": np.array([7, 4], np.int32)},
    "no keys": {"k_len": np.array([0, 7], np.uint8)},
    "capped": {"softcap": 1.5, "softmax_scale": 2.0},
    "a window without causality": {"window_size_left": 2, "window_size_right": 1},
    "itself alone": {"window_size_left": 0, "causal": True, "k_len": 6},
    "a window beyond the keys": {"window_size_left": 99, "causal": True},
    "alibi": {"alibi": SLOPES, "window_size_right": 2},
    "cap before alibi before mask": {"alibi": 9 * SLOPES, "softcap": 0.5, "causal": True},
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("options", SMALL)
def test_agrees_with_the_definition(options, name, qkv):
    options = SMALL[options]
    got = flash_attn.using(name)(*qkv, **options, return_lse=True)
    close(got, oracle(*qkv, **options), 5e-6)


# b, h, hk, sq, sk, d, dv: several blocks of queries and ranges of keys, none of them even
LARGE = {
    "causal": ((1, 2, 1, 301, 301, 32, 32), {"causal": True}),
    "causal, fewer queries": ((1, 1, 1, 290, 523, 64, 48), {"causal": True}),
    "causal, fewer keys": ((1, 1, 1, 523, 260, 40, 40), {"causal": True}),
    "many blocks": ((1, 1, 1, 2350, 2311, 8, 8), {"causal": True}),
    "a length each": (
        (2, 2, 2, 300, 333, 96, 32),
        {"causal": True, "k_len": np.array([320, 17], np.uint32)},
    ),
    "a window": ((1, 3, 1, 301, 411, 33, 5), {"causal": True, "window_size_left": 20}),
    "a window of a prefix": (
        (2, 1, 1, 300, 411, 16, 256),
        {"window_size_left": 9, "window_size_right": 3, "k_len": np.array([310, 5], np.int64)},
    ),
    "left only": ((1, 1, 1, 600, 500, 128, 16), {"window_size_left": 70}),
    "right only": ((1, 1, 1, 600, 500, 16, 16), {"window_size_right": 70}),
    "everything": (
        (2, 4, 2, 300, 307, 8, 8),
        {"alibi": SLOPES, "softcap": 2.0, "k_len": 305, "window_size_right": 40},
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_blocks_agree_with_the_definition(case, draw):
    (b, h, hk, sq, sk, d, dv), options = LARGE[case]
    q, k, v = draw((b, h, sq, d)), draw((b, hk, sk, d)), draw((b, hk, sk, dv))
    got = flash_attn.using("chunked")(q, k, v, **options, return_lse=True)
    close(got, oracle(q, k, v, **options), 5e-6)


@pytest.mark.parametrize("case", ["causal, fewer queries", "a window of a prefix", "everything"])
def test_blocks_have_the_gradients_of_the_decomposition(case, draw):
    (b, h, hk, sq, sk, d, dv), options = LARGE[case]
    options = dict(options)
    shapes = (b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv)
    xs = [draw(shape, "float64") for shape in shapes]
    xs.append(jnp.asarray(options.pop("alibi", np.zeros(h))).astype("float64"))

    def slope(op):
        def loss(q, k, v, alibi):
            o, lse = op(q, k, v, alibi, **options, return_lse=True)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(jnp.where(jnp.isneginf(lse), 0, lse)))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*xs)

    close(slope(flash_attn.using("chunked")), slope(flash_attn.decompose), 1e-11)


def test_the_three_backwards_are_the_gradient(qkv, draw):
    """Also where Sq ≠ Sk, where Fuel's own stand at other positions than its forward."""
    do, options = draw((2, 4, 5, 6)), {"causal": True, "k_len": 6, "window_size_left": 3}
    q, k, v = qkv
    want = jax.vjp(lambda *xs: flash_attn(*xs, **options), q, k, v)[1](do)
    ops = flash_attn_backward_q, flash_attn_backward_k, flash_attn_backward_v
    close([op(q, k, v, do, **options) for op in ops], want, 5e-6)


# -- rows that see nothing, keys that nobody sees ----------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(name, qkv):
    f = functools.partial(flash_attn.using(name), k_len=2, causal=True)  # rows 0, 1, 2
    o, pull = jax.vjp(f, *qkv)
    assert not o[:, :, :3].any()
    assert o[:, :, 3:].all()
    upstream = jnp.ones_like(o).at[:, :, :3].set(jnp.nan)
    dq, dk, dv = pull(upstream)
    for part in (dq[:, :, :3], dk[:, :, 2:], dv[:, :, 2:]):
        assert not part.any()
    chex.assert_tree_all_finite((dq, dk, dv))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_nothing_at_all(dtype, draw):
    for b, sq, sk, d, dv in ((0, 2, 3, 4, 4), (1, 0, 3, 4, 4), (1, 2, 0, 4, 4), (1, 2, 3, 4, 0)):
        q, k, v = (
            draw((b, 2, sq, d), dtype),
            draw((b, 2, sk, d), dtype),
            draw((b, 2, sk, dv), dtype),
        )
        o = flash_attn(q, k, v, causal=True)
        assert o.shape == (b, 2, sq, dv)
        assert o.dtype == dtype
        assert not o.any()
        loss = lambda q, k, v: flash_attn(q, k, v).sum()
        chex.assert_tree_all_finite(jax.grad(loss, (0, 1, 2))(q, k, v))


def leaks(name, qkv, poisoned, at, **options):
    """Compare value, gradients and second derivative with those of clean operands.

    ``poisoned`` are operands by what is wrong with them: one program serves all.
    """

    def loss(q, k, v):
        return jnp.sum(jnp.sin(flash_attn.using(name)(q, k, v, **options)[:, :, at]))

    def twice(q, k, v):
        return jnp.sum(jnp.sin(jax.grad(loss)(q, k, v)))

    for f in (jax.value_and_grad(loss, (0, 1, 2)), jax.grad(twice, (0, 1, 2))):
        f = compiled(f)
        want = f(*qkv)
        for bad, operands in poisoned.items():
            same = functools.partial(
                np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=f"beside {bad}"
            )
            jax.tree.map(same, f(*operands), want)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_stored_beyond_k_len_stays_there(name, qkv):
    q, k, v = qkv
    with_bad = lambda bad: (q, k.at[:, :, 4:].set(bad), v.at[:, :, 4:].set(-bad))
    poisoned = {bad: with_bad(bad) for bad in (np.nan, np.inf)}
    leaks(name, qkv, poisoned, slice(None), k_len=4, softcap=3.0)


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_row_does_not_see_cannot_reach_it(name, qkv):
    """Row i sees keys up to i + 2: what is wrong with key 5 concerns rows 3 and 4 alone."""
    q, k, v = qkv
    poisoned = q, k, v.at[:, :, 5, 1].set(jnp.nan).at[:, :, 6, 2].set(jnp.inf)
    f = functools.partial(flash_attn.using(name), causal=True)
    got, want = compiled(f)(*poisoned), np.array(compiled(f)(*qkv))
    want[:, :, 3:, 1], want[:, :, 4:, 2] = np.nan, np.inf
    np.testing.assert_allclose(got, want, rtol=1e-6)
    batched = jax.vmap(f)(*(jnp.stack([a, b]) for a, b in zip(poisoned, qkv, strict=True)))
    np.testing.assert_allclose(batched[0], want, rtol=1e-6)

    slope = jax.grad(lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v)[:, :, :3])))
    got, want = slope(q, k.at[:, :, 5:].set(jnp.nan), poisoned[2]), slope(*qkv)
    np.testing.assert_allclose(got[:, :, :3], want[:, :, :3], rtol=1e-5, atol=1e-6)


def test_the_test_for_leaks_is_no_work_under_vmap(qkv):
    """A condition on a batch would run both ways; this one is on all of the batch."""
    stacked = [jnp.stack([x] * 3) for x in qkv]
    f = jax.jit(jax.vmap(functools.partial(flash_attn, causal=True)))
    assert "conditional" in f.lower(*stacked).compile().as_text()


# -- k_len -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "k_len", [8, -1, np.uint32(2**32 - 1), np.int64(-(2**40)), np.array([9, 3], np.int8)]
)
def test_a_length_there_is_not_gives_nan(k_len, name, qkv):
    o = flash_attn.using(name)(*qkv, k_len=k_len)
    assert jnp.isnan(o[0]).all()
    assert jnp.isnan(o[1]).all() == (np.ndim(k_len) == 0)
    checked = checkify.checkify(jax.jit(flash_attn), errors=checkify.all_checks)
    assert checked(*qkv, k_len=k_len)[0].get()


def test_a_length_is_a_number_an_array_or_one_each(qkv):
    want = flash_attn(*qkv, k_len=5)
    for k_len in (np.uint8(5), jnp.int32(5), np.array([5, 5]), jnp.array([5, 5], jnp.uint32)):
        np.testing.assert_array_equal(flash_attn(*qkv, k_len=k_len), want)


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("options", [{}, {"softcap": 1e8}, {"alibi": 1e20 * SLOPES}])
def test_huge_finite_scores_stay_finite(options, name, qkv):
    for scale in (0.3, 1 / 3, -123.4):
        f = functools.partial(flash_attn.using(name), softmax_scale=scale, **options)
        at = lambda q, k, v, size, f=f: f(q * size, k * size, v)
        slopes = jax.grad(lambda *xs, at=at: jnp.sum(at(*xs)), (0, 1, 2))
        program = compiled(lambda *xs, at=at, slopes=slopes: (at(*xs), slopes(*xs)))
        for size in (1e5, 1e10, 1e15):  # scores to 1e31
            o, gradient = program(*qkv, np.float32(size))
            chex.assert_tree_all_finite((o, gradient))
            bound = jnp.abs(qkv[2]).max((2, 3))[:, [0, 0, 1, 1], None, None]
            assert (jnp.abs(o) <= bound * 1.0001).all()  # an average of values


@pytest.mark.parametrize("name", KERNELS)
def test_equal_keys_share_at_any_size(name, draw):
    """Where exp(s − lse) would be 1 for each of them: lse has no digits left for log 7."""
    q, v = draw((1, 1, 3, 4)) * 1e10, draw((1, 1, 7, 4))
    k = jnp.broadcast_to(draw((1, 1, 1, 4)), (1, 1, 7, 4))
    o, pull = jax.vjp(lambda v: flash_attn.using(name)(q, k, v), v)
    np.testing.assert_allclose(o, jnp.broadcast_to(v.mean(2, keepdims=True), o.shape), rtol=1e-5)
    (dv,) = pull(jnp.ones_like(o))
    np.testing.assert_allclose(dv, jnp.full(dv.shape, 3 / 7), rtol=1e-5)


def test_partial_results_combine_through_lse(qkv):
    """Attention over two halves of the keys, merged, is attention; its gradient as well."""
    q, k, v = (x.astype("float64") for x in qkv)

    def halves(q, k, v):
        parts = [
            flash_attn(q, k[:, :, s], v[:, :, s], return_lse=True)
            for s in (slice(3), slice(3, None))
        ]
        weights = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)[..., None]
        return sum(w * o for w, (o, _) in zip(weights, parts, strict=True))

    np.testing.assert_allclose(halves(q, k, v), flash_attn(q, k, v), rtol=1e-12)
    slope = lambda f: jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))(q, k, v)
    close(slope(halves), slope(flash_attn), 1e-12)


# -- what it costs -----------------------------------------------------------------------------


def serves(*xs, **options):
    """The platforms of each implementation."""
    return {c.kernel.name: c.serves for c in flash_attn.explain(*xs, **options).forward}


def temporaries(f, *xs, backward):
    """Bytes that the compiled program holds beside operands and results."""
    loss = lambda *xs: jnp.sum(f(*xs))
    program = jax.jit(jax.grad(loss, (0, 1, 2)) if backward else f)
    return program.lower(*xs).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size_left": 100}], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_blocks_bound_memory(backward, options):
    """Far below one matrix of scores, and what whole matrices take.

    (XLA:CPU computes the naive form without a mask in one piece, and does not say what that takes.)
    """
    n = 4096
    x = jax.ShapeDtypeStruct((1, 8, n, 64), jnp.float32)
    assert serves(x, x, x, **options)["chunked_cpu"] == ("cpu",)

    def naive(q, k, v):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8
        s = jnp.where(jnp.tri(n, dtype=bool), s, -jnp.inf) if options else s
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s), v)

    ours = temporaries(functools.partial(flash_attn, **options), x, x, x, backward=backward)
    assert ours < 8 * n * n * 4 / 8
    if options or backward:
        assert ours < temporaries(naive, x, x, x, backward=backward) / 8


def read(sq, sk, *, whole=True, **options):
    """Queries times keys that the plan multiplies."""
    off = {"causal": False, "window_size_left": None, "window_size_right": None, "softcap": None}
    plan = chunked.Plan.of(1, sq, sk, Rules.of(sq, sk, **{**off, **options}), whole)
    return sum((s.blocks.stop - s.blocks.start) * plan.rows * s.width for s in plan.spans)


def test_what_nobody_sees_is_not_computed():
    n = 8192
    assert read(n, n) == n * n
    assert read(n, n, causal=True) < 0.57 * n * n
    assert read(n, n, causal=True, whole=False) < 0.57 * n * n
    for whole in (False, True):
        window = {"window_size_left": 100, "window_size_right": 28, "whole": whole}
        assert read(n, n, **window) == n * (chunked.ROWS + 128)
    assert read(n, n, window_size_left=0) < 0.57 * n * n
    assert read(1, n, causal=True) == n


def test_small_and_decoding_are_left_to_the_dense_form():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    small, smaller = f32(1, 8, 256, 64), f32(1, 8, 80, 16)
    assert "chunks begin at 4 MiB" in str(flash_attn.explain(small, small, small))
    assert "chunks begin at 0.25 MiB" in str(flash_attn.explain(smaller, smaller, smaller))
    assert serves(small, small, small)["chunked_cpu"] == ("cpu",)
    cache = f32(64, 8, 8192, 64)
    assert "no more memory than keys" in str(flash_attn.explain(f32(64, 8, 1, 64), cache, cache))


# -- bad calls ---------------------------------------------------------------------------------


def test_bad_calls(qkv):
    q, k, v = qkv
    three = jnp.ones((2, 3, 7, 8), jnp.float32)
    refused(flash_attn, q, three, three, match="'q' has 4 heads; it must be a multiple of the 3")
    refused(flash_attn, q[0], k, v, match="'q' is float32\\[4,5,8\\]; it has 3 axes")
    refused(flash_attn, q, k[..., :5], v, match="its axis d is 5")
    refused(flash_attn, q, k, v[:, :, :6], match="its axis sk is 6")
    refused(flash_attn, q, k.astype("bfloat16"), v, match="operands share one dtype")
    refused(flash_attn, q, k, match="array 'v' is missing")
    refused(
        flash_attn, *qkv, jnp.ones(3, jnp.float32), match="'alibi' is float32\\[3\\]; its axis h"
    )
    refused(flash_attn, *qkv, k_len=2.5, match="'k_len' is 2.5")
    refused(flash_attn, *qkv, k_len=jnp.ones((2, 2), jnp.int32), match="'k_len' is int32\\[2,2\\]")
    for softcap in (0, -1.0, float("inf"), float("nan")):
        refused(flash_attn, *qkv, softcap=softcap, match="'softcap' is .*; it must be positive")
    refused(flash_attn, *qkv, softmax_scale=float("nan"), match="it must be finite, or None")
    refused(flash_attn, *qkv, window_size_left=-1, match="'window_size_left' is -1; it must be")
    refused(flash_attn, *qkv, window_size_right=-2, match="'window_size_right' is -2; it must be")
    refused(flash_attn, *qkv, softmax_scale=jnp.float32(1), match="parameters are static")
    refused(flash_attn_backward_q, *qkv, v, match="'do' is float32")
    do = jnp.ones((2, 4, 5, 6), jnp.float32)
    refused(flash_attn_backward_k, *qkv, do, softcap=0, match="it must be positive")
    refused(flash_attn_backward_v, *qkv, do, window_size_left=-1, match="must be at least 0")
