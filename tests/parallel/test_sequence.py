"""Parts of a sequence, of a vocabulary, of an inner axis: one device's values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import fuel_jax
from fuel_jax import parallel
from fuel_jax.errors import ArgumentError
from fuel_jax.formats.quantize import quantize, quantize_nf4
from fuel_jax.parallel import attention

from .counted import collectives, largest_error, sent

COUNT = 4
TOLERANCE = 1e-12
ROW, SEQUENCE, HEADS = P(None, "s"), P(None, "s"), P(None, None, "s")


def mesh(count=COUNT):
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("s",), axis_types=types, devices=jax.devices()[:count])


def put(arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh(), s)) for x, s in zip(arrays, specs, strict=True)]


def mapped(f, in_specs, out_specs, **params):
    f = functools.partial(f, axis="s", **params)
    return jax.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def curved(f):
    """A scalar that every output takes part in, and the outputs."""
    of = lambda y: jnp.sum(jnp.where(jnp.isfinite(y), y * jnp.cos(y), 0)).astype("float64")

    def scalar(*arrays):
        y = f(*arrays)
        return sum(map(of, jax.tree.leaves(y))), y

    return scalar


def agree(f, g, arrays, tolerance=TOLERANCE, specs=None):
    """Values and gradients of every operand; what ``f`` and its gradient send."""
    at = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    both = lambda h: jax.jit(jax.value_and_grad(curved(h), at, has_aux=True))
    given = arrays if specs is None else put(arrays, specs)
    compiled = both(f).lower(*given).compile()
    finite = lambda found: jax.tree.map(lambda x: jnp.where(x == -jnp.inf, -1e3, x), found)
    assert largest_error(finite(compiled(*given)), finite(both(g)(*arrays))) < tolerance
    return sent(compiled.as_text())


def bytes_of(x):
    """Of this device's part."""
    return x.size * x.dtype.itemsize // COUNT


@pytest.mark.parametrize(
    ("causal", "order"), [(False, "zigzag"), (True, "zigzag"), (True, "contiguous")]
)
def test_ring_attention(causal, order):
    n = COUNT
    q, k, v = normal(1, 4, 4 * n, 4), normal(1, 2, 4 * n, 4), normal(1, 2, 4 * n, 3)
    options = {"causal": causal, "softcap": 3.0, "softmax_scale": 0.7, "return_lse": True}
    ring = mapped(parallel.ring_attention, HEADS, HEADS, order=order, **options)
    there = parallel.zigzag if order == "zigzag" else lambda x, *_: x
    back = parallel.unzigzag if order == "zigzag" else lambda x, *_: x

    def f(*arrays):
        return jax.tree.map(lambda y: back(y, n, 2), ring(*(there(x, n, 2) for x in arrays)))

    agree(f, functools.partial(fuel_jax.flash_attn, **options), (q, k, v))
    given = put((q, k, v), [HEADS] * 3)
    parts = bytes_of(k) + bytes_of(v)
    # The forward's k and v, once in a loop; those back; their gradients in the loop, those home.
    gradient = jax.grad(lambda *x: curved(ring)(*x)[0], (0, 1, 2))
    assert collectives(gradient, *given) == {"collective-permute": 6 * parts}


EVERY = {"causal": True, "window_size_left": 9, "softcap": 3.0, "softmax_scale": 0.7}
OPTIONS = {  # order, sq and sk of a device, slopes, keys in use, the rest, rounds
    "every option": ("zigzag", 4, 6, True, (5 * COUNT, 3), EVERY, COUNT),
    "a window": ("contiguous", 4, 4, True, None, {"causal": True, "window_size_left": 3}, 2),
    "keys in use": ("contiguous", 2, 6, False, 5 * COUNT + 1, {"window_size_right": 5}, COUNT),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_ring_attention_where_positions_matter(case):
    """Rows that see no key among them; dalibi is a sum over devices.  Only what is near is sent."""
    order, sq, sk, sloped, k_len, options, rounds = OPTIONS[case]
    n, options = COUNT, options | {"return_lse": True}
    q, k, v = normal(2, 4, sq * n, 4), normal(2, 2, sk * n, 4), normal(2, 2, sk * n, 3)
    alibi = (jnp.abs(normal(4)),) if sloped else ()
    k_len = jnp.asarray(k_len, "int32") if isinstance(k_len, tuple) else k_len
    there = (lambda x: parallel.zigzag(x, n, 2)) if order == "zigzag" else lambda x: x
    back = (lambda x: parallel.unzigzag(x, n, 2)) if order == "zigzag" else lambda x: x

    def part(q, k, v, *alibi):
        given = {"k_len": k_len, "axis": "s", "order": order, **options}
        return parallel.ring_attention(q, k, v, *alibi, **given)

    specs = (HEADS, HEADS, HEADS, *(P() for _ in alibi))
    ring = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=HEADS)

    def f(q, k, v, *alibi):
        return jax.tree.map(back, ring(there(q), there(k), there(v), *alibi))

    g = lambda q, k, v, *alibi: fuel_jax.flash_attn(q, k, v, *alibi, k_len=k_len, **options)
    found = agree(f, g, (q, k, v, *alibi), specs=specs)
    if order == "contiguous":  # to put a sequence in order sends it, too
        parts = bytes_of(k) + bytes_of(v)
        loops = 2 if rounds > 2 else 1  # k and v before the loop and in it
        assert found["collective-permute"] == (loops * 3 if rounds > 2 else 2) * parts


def test_ring_attention_refuses():
    part = normal(1, 1, 3, 4)
    call = lambda **options: mapped(parallel.ring_attention, HEADS, HEADS, **options)
    whole = jnp.tile(part, (1, 1, COUNT, 1))
    with pytest.raises(ArgumentError, match=r"^ring_attention: 'order' is 'sideways'"):
        call(order="sideways")(*[whole] * 3)
    with pytest.raises(ArgumentError, match=r"^ring_attention: 'q' has 3 steps on each device and"):
        call(causal=True)(*[whole] * 3)
    with pytest.raises(ArgumentError, match=r"^flash_attn: parameter 'window_size_left' is -1"):
        call(window_size_left=-1)(*[whole] * 3)


def test_keys_in_use_that_are_none_give_nan():
    x = normal(2, 1, 2 * COUNT, 4)
    ring = lambda q, k, v: parallel.ring_attention(
        q, k, v, k_len=jnp.asarray([2 * COUNT + 1, 2], "int32"), axis="s"
    )
    o = jax.jit(jax.shard_map(ring, mesh=mesh(), in_specs=HEADS, out_specs=HEADS))(x, x, x)
    assert jnp.isnan(o[0]).all()
    assert jnp.isfinite(o[1]).all()


def test_a_kernel_that_takes_lse_gives_a_part_s_share(monkeypatch):
    """Of keys that are the second half of all; the dense form makes its own log-sum-exp."""
    q, k, v, do = (normal(1, 4, 8, n).astype("bfloat16") for n in (16, 16, 8, 8))
    both = [jnp.concatenate([x, x + 1], 2) for x in (k, v)]
    o, lse = fuel_jax.flash_attn(q, *both, return_lse=True)
    saved = q, k, v, o, lse, 8 * do, 0.1 * lse
    params = {"causal": True, "softmax_scale": None, "softcap": 2.0}
    want = attention.by_own_lse(params, *saved)
    assert min(float(jnp.abs(x).max()) for x in want) > 0.5  # so that the error is relative
    monkeypatch.setattr(
        attention, "flash_attn_backward", attention.flash_attn_backward.using("triton")
    )
    assert largest_error(attention.by_given_lse(params, *saved), want) < 2e-2


def test_ring_attention_holds_parts_only():
    """Twice the devices, half the memory: of the gradient too."""
    steps = 64 * COUNT
    q = k = v = jax.ShapeDtypeStruct((1, 1, steps, 8), "float32")

    def peak(count):
        few = mesh(count)
        ring = functools.partial(parallel.ring_attention, axis="s", causal=True)
        ring = jax.shard_map(ring, mesh=few, in_specs=HEADS, out_specs=HEADS)
        layout = [NamedSharding(few, HEADS)] * 3
        program = jax.jit(jax.grad(lambda *x: ring(*x).sum(), (0, 1, 2)), in_shardings=layout)
        return program.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes

    assert peak(COUNT) < 0.6 * peak(COUNT // 2)


def test_zigzag_is_undone_and_balanced():
    x = jnp.arange(16)
    parts = parallel.zigzag(x, 4, 0).reshape(4, 4)
    assert parts.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert (parallel.unzigzag(parallel.zigzag(x, 4, 0), 4, 0) == x).all()
    with pytest.raises(ArgumentError, match=r"^zigzag: the sequence has 10 steps and 4 devices"):
        parallel.zigzag(jnp.arange(10), 4, 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy_of_a_split_vocabulary(reduction):
    n = COUNT
    logits = normal(6, 5 * n).at[2].multiply(1e3)
    targets = jnp.asarray([0, 5 * n - 1, 3, -100, 7, 5])
    params = {"reduction": reduction, "return_lse": True}
    f = mapped(parallel.cross_entropy, (ROW, P()), P(), **params)
    g = functools.partial(fuel_jax.fused_softmax_cross_entropy, **params)
    agree(lambda x: f(x, targets), lambda x: g(x, targets), (logits,), 1e-6)
    given = jax.device_put(logits, NamedSharding(mesh(), ROW))
    for program in (f, lambda x, t: jax.grad(lambda x: f(x, t)[0].sum())(x)):
        found = collectives(program, given, targets)
        assert set(found) == {"all-reduce"}
        assert found["all-reduce"] <= 3 * 6 * 8  # three numbers a row


def test_a_target_outside_a_split_vocabulary_is_nan():
    logits, targets = normal(2, 2 * COUNT), jnp.asarray([2 * COUNT, 1])
    f = mapped(parallel.cross_entropy, (ROW, P()), P(), reduction="none")
    loss = f(logits, targets)
    assert jnp.isnan(loss[0])
    assert jnp.isfinite(loss[1])


def test_selective_scan_of_a_split_sequence():
    length = 2 * COUNT
    u, delta = normal(2, length, 3), jnp.abs(normal(2, length, 3))
    a, b, c, h = -jnp.abs(normal(3, 4)), normal(2, length, 4), normal(2, length, 4), normal(2, 3, 4)
    specs = (SEQUENCE, SEQUENCE, P(), SEQUENCE, SEQUENCE, P())
    f = mapped(parallel.selective_scan, specs, (SEQUENCE, P()), delta_softplus=True)
    agree(
        f, functools.partial(fuel_jax.selective_scan, delta_softplus=True), (u, delta, a, b, c, h)
    )


def test_ssd_chunk_scan_of_a_split_sequence():
    length = 4 * COUNT
    x, dt = normal(1, length, 4, 3), jnp.abs(normal(1, length, 4))
    a, b, c = -jnp.abs(normal(4)), normal(1, length, 2, 3), normal(1, length, 2, 3)
    specs = (SEQUENCE, SEQUENCE, P(), SEQUENCE, SEQUENCE)
    f = mapped(parallel.ssd_chunk_scan, specs, (SEQUENCE, P()), chunk_size=2)
    agree(f, functools.partial(fuel_jax.ssd_chunk_scan, chunk_size=2), (x, dt, a, b, c))


def test_a_layer_of_columns_and_rows():
    """The product by columns sends nothing, that by rows one sum; and the gradient of x another."""
    x, up, down = normal(5, 4), normal(4, 2 * COUNT), normal(2 * COUNT, 3)
    bias, offset = normal(2 * COUNT), normal(3)

    def layer(x, up, bias, down, offset, *, axis):
        hidden = fuel_jax.silu(fuel_jax.fused_linear(x, up, bias))
        return parallel.row_linear(hidden, down, offset, axis=axis)

    def whole(x, up, bias, down, offset):
        hidden = fuel_jax.silu(fuel_jax.fused_linear(x, up, bias))
        return fuel_jax.fused_linear(hidden, down, offset)

    specs = (P(), ROW, P("s"), P("s"), P())
    f = mapped(layer, specs, P())
    arrays = (x, up, bias, down, offset)
    assert agree(f, whole, arrays, specs=specs) == {"all-reduce": (5 * 3 + 5 * 4) * 8}
    assert collectives(f, *put(arrays, specs)) == {"all-reduce": 5 * 3 * 8}


def test_a_packed_layer_of_columns_and_rows():
    """A column of x @ Wᵀ has its GGUF blocks together; of NF4, whole blocks are inner parts."""
    k, hidden, n = 32, 64 * COUNT, 3
    x, gguf = normal(5, k), jnp.asarray(quantize(normal(hidden, k), "Q8_0"))
    codes, absmax = map(jnp.asarray, quantize_nf4(normal(n, hidden)))

    def layer(x, gguf, codes, absmax, *, axis=None):
        columns = hidden if axis is None else hidden // COUNT
        found = fuel_jax.silu(fuel_jax.qmatmul(x, gguf, quant_type="Q8_0", k=k, n=columns))
        y = fuel_jax.nf4_matmul(found, codes, absmax)
        return y if axis is None else jax.lax.psum(y, axis)

    specs = (P(), P("s"), ROW, ROW)
    f = mapped(layer, specs, P())
    at_x = lambda f: jax.jit(jax.value_and_grad(curved(f), has_aux=True))
    arrays = (x, gguf, codes, absmax)
    given = put(arrays, specs)
    assert largest_error(at_x(f)(*given), at_x(layer)(*arrays)) < TOLERANCE
    assert collectives(f, *given) == {"all-reduce": 5 * n * 8}


def test_sharded_is_the_op():
    x, w, bias = normal(COUNT, 6), normal(6, 4), normal(4)
    f = parallel.sharded(fuel_jax.fused_linear, mesh(), [P("s")])
    agree(f, fuel_jax.fused_linear, (x, w, bias))


def test_one_device_splits_any_axis():
    f = parallel.sharded(fuel_jax.rms_norm_last_dim, mesh(1), [P(None, "s")])
    x = normal(3, 5)
    np.testing.assert_array_equal(f(x), fuel_jax.rms_norm_last_dim(x))


def test_sharded_refuses_what_the_rule_does_not_admit():
    f = parallel.sharded(fuel_jax.rms_norm_last_dim, mesh(), [P(None, "s")])
    says = (
        rf"^rms_norm_last_dim: operand 0 \(x\) is to be split along axis 1 over {COUNT} devices, "
        r"and cannot be: of batch_0 d -> batch_0 d the axes that may be split are batch_0"
    )
    with pytest.raises(ArgumentError, match=says):
        f(normal(4, 2 * COUNT))
