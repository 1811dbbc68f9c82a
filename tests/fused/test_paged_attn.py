"""What is true of paged attention in particular: the block table, and what is not read."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import fuel_jax
from fuel_jax import paged_attn

from ..contract import close
from ..refused import refused

KERNELS = ["xla", "stepwise"]


def oracle(q, k_cache, v_cache, table, lens, alibi=None, *, softmax_scale=None, softcap=None):
    """The definition in NumPy, in float64, token by token and row by row."""
    q, k_cache, v_cache = (np.asarray(x, np.float64) for x in (q, k_cache, v_cache))
    (b, h, sq, d), (_, size, hk, _) = q.shape, k_cache.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    o = np.zeros((b, h, sq, v_cache.shape[-1]))
    for n, head, i in np.ndindex(b, h, sq):
        at, kv = i + int(lens[n]) - sq, head // (h // hk)
        where = [(table[n, t // size], t % size, kv) for t in range(at + 1)]
        if not where:
            continue
        s = np.array([q[n, head, i] @ k_cache[w] for w in where]) * scale
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        if alibi is not None:
            s = s - float(alibi[head]) * np.abs(at - np.arange(at + 1))
        e = np.exp(s - s.max())
        o[n, head, i] = e @ np.array([v_cache[w] for w in where]) / e.sum()
    return o


def paged(draw, *, blocks, size, lens, h=4, hk=2, sq=1, d=8, dv=6):
    """Operands with a shuffled table; its entries beyond the lengths are no blocks."""
    m = blocks // len(lens)
    table = np.random.default_rng(1).permutation(blocks)[: m * len(lens)].reshape(len(lens), m)
    used = np.arange(m) * size < np.asarray(lens)[:, None]
    table = np.where(used, table, 2**32 - 1).astype(np.uint32)
    cache = lambda width: draw((blocks, size, hk, width))
    q = draw((len(lens), h, sq, d))
    return q, cache(d), cache(dv), table, np.array(lens, np.uint32)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"blocks": 12, "size": 3, "lens": [9, 4, 1]}, {}),
        ({"blocks": 9, "size": 1, "lens": [9], "sq": 3, "hk": 4}, {"softcap": 1.5}),
        ({"blocks": 2, "size": 32, "lens": [30, 3], "sq": 5, "hk": 1}, {"softmax_scale": 2.0}),
        (
            {"blocks": 8, "size": 8, "lens": [0, 32], "sq": 2},
            {"alibi": np.array([0.5, 0.25, 1, 0], np.float32), "softcap": 4.0},
        ),
        ({"blocks": 260, "size": 5, "lens": [1293], "sq": 2}, {}),  # several steps
    ],
)
def test_agrees_with_the_definition(sizes, options, name, draw):
    operands = paged(draw, **sizes)
    close(paged_attn.using(name)(*operands, **options), oracle(*operands, **options), 5e-6)


def test_the_block_size_does_not_matter(draw):
    """The same 24 tokens in blocks of 1, 3, 8 and 24."""
    q, k, v = draw((1, 2, 2, 4)), draw((24, 1, 2, 4)), draw((24, 1, 2, 4))
    want = None
    for size in (1, 3, 8, 24):
        order = np.random.default_rng(size).permutation(24 // size)
        cut = lambda x, size=size, order=order: x.reshape(-1, size, 2, 4)[np.argsort(order)]
        table = order[None].astype(np.int64)
        got = paged_attn(q, cut(k), cut(v), table, np.array([23]), block_size=size)
        want = got if want is None else want
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_sequences_may_share_blocks(draw):
    q, k, v, _, _ = paged(draw, blocks=4, size=2, lens=[1, 1], sq=2)
    table = np.array([[3, 1, 0], [3, 1, 2]], np.uint8)
    lens = np.array([5, 6], np.uint8)
    close(paged_attn(q, k, v, table, lens), oracle(q, k, v, table, lens), 5e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_before_the_first_token_are_zero(name, draw):
    operands = paged(draw, blocks=4, size=2, lens=[0, 2], sq=4)
    o = paged_attn.using(name)(*operands)
    assert not o[0].any()
    assert not o[1, :, :2].any()
    assert o[1, :, 2:].all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_in_use_is_not_read(bad, name, draw):
    """Blocks of nobody, the tail of a last block, tokens after the query."""
    q, k, v, table, lens = paged(draw, blocks=8, size=4, lens=[6, 3], sq=2)
    used = np.zeros((8, 4), bool)
    for n in range(2):
        for t in range(int(lens[n])):
            used[table[n, t // 4], t % 4] = True
    spoil = lambda x: jnp.where(used[:, :, None, None], x, bad)
    f = jax.jit(paged_attn.using(name))
    np.testing.assert_array_equal(f(q, spoil(k), spoil(v), table, lens), f(q, k, v, table, lens))
    newest = v.at[table[0, 1], 1].set(bad)  # token 5 of sequence 0, seen by its last query alone
    got = f(q, k, newest, table, lens)
    chex.assert_tree_all_finite((got[0, :, 0], got[1]))
    assert not jnp.isfinite(got[0, :, 1]).any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wrong", [8, 2**32 - 1, -1, 300])
def test_a_block_there_is_not_spoils_its_sequence_alone(wrong, name, draw):
    q, k, v, table, lens = paged(draw, blocks=8, size=4, lens=[6, 3])
    table = table.astype(np.int64) if wrong < 0 else table
    table[0, 1] = wrong
    o = paged_attn.using(name)(q, k, v, table, lens)
    assert jnp.isnan(o[0]).all()
    chex.assert_tree_all_finite(o[1])
    checked = checkify.checkify(jax.jit(paged_attn), errors=checkify.all_checks)
    assert checked(q, k, v, table, lens)[0].get()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wrong", [17, 2**32 - 1])
def test_a_length_that_the_table_cannot_hold_spoils_its_sequence_alone(wrong, name, draw):
    q, k, v, table, lens = paged(draw, blocks=8, size=4, lens=[16, 3])
    lens = np.array([wrong, 3], np.uint32)
    o = paged_attn.using(name)(q, k, v, table, lens)
    assert jnp.isnan(o[0]).all()
    chex.assert_tree_all_finite(o[1])
    checked = checkify.checkify(jax.jit(paged_attn), errors=checkify.all_checks)
    assert checked(q, k, v, table, lens)[0].get()


def test_an_empty_cache_serves_empty_sequences(draw):
    q, nothing = draw((2, 2, 1, 4)), jnp.zeros((0, 4, 2, 4), jnp.float32)
    table, lens = np.full((2, 3), 7, np.uint32), np.zeros(2, np.uint32)
    assert not paged_attn(q, nothing, nothing, table, lens).any()


def test_steps_bound_memory():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    q, cache = f32(4, 8, 1, 64), f32(1024, 16, 8, 64)
    table = jax.ShapeDtypeStruct((4, 256), jnp.uint32)
    lens = jax.ShapeDtypeStruct((4,), jnp.uint32)
    choices = paged_attn.explain(q, cache, cache, table, lens).forward
    assert {c.kernel.name: c.serves for c in choices}["stepwise"] == ("default",)
    program = jax.jit(paged_attn).lower(q, cache, cache, table, lens).compile()
    copied = 2 * 4 * 256 * 16 * 8 * 64 * 4
    assert program.memory_analysis().temp_size_in_bytes < copied / 2


def test_has_no_gradient(draw):
    operands = paged(draw, blocks=4, size=2, lens=[4])
    with pytest.raises(fuel_jax.NotDifferentiable, match="no gradient for 'q'"):
        jax.grad(lambda q: paged_attn(q, *operands[1:]).sum())(operands[0])


def test_bad_calls(draw):
    q, k, v, table, lens = paged(draw, blocks=4, size=2, lens=[4, 2])
    refused(paged_attn, q, k, v, table, lens, block_size=16, match="'block_size' is 16, and")
    refused(paged_attn, q[:, :3], k, v, table, lens, match="multiple of the 2 of 'k_cache'")
    refused(paged_attn, q, k, v, table[:1], lens, match="its axis b is 1")
    refused(paged_attn, q, k, v, table, lens[:, None], match="it has 2 axes")
    refused(paged_attn, q, k, v[:, :1], table, lens, match="its axis bs is 1")
    refused(paged_attn, q, k, v, table.astype(np.float32), lens, match="its dtype must be one of")
    refused(paged_attn, q, k, v, table, match="array 'context_lens' is missing")
    refused(paged_attn, q, k, v, table, lens, softcap=0, match="it must be positive")
