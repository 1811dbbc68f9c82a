"""Real programs: what ``fuse`` finds in libraries that know nothing of it.

Beside each program stands how many ops it holds, counted by hand.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax

from .compared import assert_agree, filled, found

BATCH, LENGTH, WIDTH, HEADS = 3, 6, 16, 4
HEAD = WIDTH // HEADS
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
HALF = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)
MASK = np.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH) % 3 < 2  # none that has a name
NAMES = {"attention": "flash_attn", "linear": "fused_linear"}
NAMES |= {"cross_entropy": "fused_softmax_cross_entropy"}
NAMES |= {n: f"{n}_last_dim" for n in ("softmax", "log_softmax", "rms_norm", "layer_norm")}
PROGRAMS = {}
SEEN = {}


def program(name, **sites):
    """Decorator: what builds a function and its arguments, and how many ops are in it."""

    def enter(build):
        assert name not in PROGRAMS, name
        PROGRAMS[name] = build, {NAMES.get(n, n): count for n, count in sites.items()}
        return build

    return enter


@pytest.fixture(autouse=True)
def as_libraries_expect():
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of their own parts
        yield


# -- jax.nn --------------------------------------------------------------------------------


def heads(batch=BATCH, length=LENGTH, n=HEADS, width=HEAD, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((batch, length, n, width), dtype)


def jax_attention(kv_heads=HEADS, keys=LENGTH, dtype=jnp.float32, more=(), **options):
    """``jax.nn.dot_product_attention``; ``more`` are arrays by name."""
    attend = functools.partial(jax.nn.dot_product_attention, implementation="xla", **options)

    def fn(q, k, v, more):
        return attend(q, k, v, **more)

    q, k = heads(dtype=dtype), heads(length=keys, n=kv_heads, dtype=dtype)
    return fn, (q, k, k, dict(more))


LENGTHS = np.array([6, 1, 4], np.int32)
SCORES = jax.ShapeDtypeStruct((BATCH, HEADS, LENGTH, LENGTH), jnp.float32)
attends = functools.partial(functools.partial, jax_attention)
at = "jax.nn.dot_product_attention"
program(at, attention=1)(attends())
program(f"{at}, causal", attention=1)(attends(is_causal=True))
program(f"{at}, grouped heads", attention=1)(attends(kv_heads=2))
program(f"{at}, one key head", attention=1)(attends(kv_heads=1))
program(f"{at}, scaled", attention=1)(attends(scale=0.25))
program(f"{at}, more keys", attention=1)(attends(keys=8))
program(f"{at}, grouped and causal", attention=1)(attends(kv_heads=2, is_causal=True))
program(f"{at}, lengths of keys", attention=1)(attends(more={"key_value_seq_lengths": LENGTHS}))
program(f"{at}, lengths of keys, grouped", attention=1)(
    attends(more={"key_value_seq_lengths": LENGTHS}, kv_heads=2)
)
program(f"{at}, window to the left", attention=1)(attends(local_window_size=(2, 0), is_causal=True))
program(f"{at}, window to the left, not said to be causal", attention=1)(
    attends(local_window_size=(2, 0))
)
program(f"{at}, bfloat16", attention=1)(attends(dtype=jnp.bfloat16))
program(f"{at}, bfloat16, causal", attention=1)(attends(dtype=jnp.bfloat16, is_causal=True))
# Not the op's: what is found is the softmax.
program(f"{at}, window to both sides", softmax=1)(attends(local_window_size=(2, 1)))
program(f"{at}, a mask", softmax=1)(attends(more={"mask": MASK[None, None]}))
program(f"{at}, a bias", softmax=1)(attends(more={"bias": SCORES}))
program(f"{at}, a mask, causal", softmax=1)(
    attends(more={"mask": MASK[None, None]}, is_causal=True)
)
# The first query sees one key; with the op, which counts from the last, the last one sees all.
program(f"{at}, lengths of keys, causal", softmax=1)(
    attends(more={"key_value_seq_lengths": LENGTHS}, is_causal=True)
)
program(f"{at}, causal, more keys", softmax=1)(attends(keys=8, is_causal=True))


@program("jax.nn.softmax", softmax=1)
def _():
    return jax.nn.softmax, (X,)


@program("jax.nn.softmax, bfloat16", softmax=1)
def _():
    return jax.nn.softmax, (HALF,)


@program("jax.nn.softmax, another axis")
def _():
    return functools.partial(jax.nn.softmax, axis=1), (X,)


@program("jax.nn.softmax, some elements")
def _():
    return lambda x: jax.nn.softmax(x, where=MASK.reshape(-1)[:WIDTH]), (X,)


@program("jax.nn.log_softmax", log_softmax=1)
def _():
    return jax.nn.log_softmax, (X,)


@program("jax.nn.log_softmax, another axis")
def _():
    return functools.partial(jax.nn.log_softmax, axis=0), (X,)


@program("jax.nn.standardize", layer_norm=1)
def _():
    return jax.nn.standardize, (X,)


@program("jax.nn.standardize, in two passes", layer_norm=1)
def _():
    return functools.partial(jax.nn.standardize, algorithm="stable"), (X,)


@program("jax.nn.standardize, another axis")
def _():
    return functools.partial(jax.nn.standardize, axis=1), (X,)


@program("jax.nn.standardize, a given mean")
def _():
    mean = jax.ShapeDtypeStruct((BATCH, LENGTH, 1), jnp.float32)
    return lambda x, mean: jax.nn.standardize(x, mean=mean), (X, mean)


# -- flax.nnx ------------------------------------------------------------------------------


def nnx_call(make, *inputs, **options):
    """A module's call as a function of its state."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    graph, state = nnx.split(make(nnx, nnx.Rngs(0)))

    def fn(state, *inputs):
        return nnx.merge(graph, state)(*inputs, **options)

    return fn, (state, *(inputs or (X,)))


@program("nnx.LayerNorm", layer_norm=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.LayerNorm(WIDTH, rngs=rngs))


@program("nnx.LayerNorm, slow variance, no bias", layer_norm=1)
def _():
    return nnx_call(
        lambda nnx, rngs: nnx.LayerNorm(WIDTH, rngs=rngs, use_fast_variance=False, use_bias=False)
    )


@program("nnx.LayerNorm, bfloat16", layer_norm=1)
def _():
    return nnx_call(
        lambda nnx, rngs: nnx.LayerNorm(
            WIDTH, rngs=rngs, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
        ),
        HALF,
    )


@program("nnx.LayerNorm, another axis")
def _():
    return nnx_call(
        lambda nnx, rngs: nnx.LayerNorm(LENGTH, rngs=rngs, reduction_axes=1, feature_axes=1)
    )


@program("nnx.RMSNorm", rms_norm=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.RMSNorm(WIDTH, rngs=rngs))


@program("nnx.RMSNorm, bfloat16", rms_norm=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.RMSNorm(WIDTH, rngs=rngs, dtype=jnp.bfloat16), HALF)


@program("nnx.GroupNorm")
def _():
    return nnx_call(lambda nnx, rngs: nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs))


@program("nnx.BatchNorm")
def _():
    return nnx_call(lambda nnx, rngs: nnx.BatchNorm(WIDTH, rngs=rngs), use_running_average=False)


@program("nnx.Linear", linear=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.Linear(WIDTH, 10, rngs=rngs))


@program("nnx.Linear, no bias")
def _():
    return nnx_call(lambda nnx, rngs: nnx.Linear(WIDTH, 10, use_bias=False, rngs=rngs))


@program("nnx.Linear, bfloat16", linear=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.Linear(WIDTH, 10, rngs=rngs, dtype=jnp.bfloat16))


@program("nnx.LinearGeneral, two axes from one", linear=1)
def _():
    return nnx_call(lambda nnx, rngs: nnx.LinearGeneral(WIDTH, (HEADS, 5), rngs=rngs))


@program("nnx.LinearGeneral, one axis from two", linear=1)
def _():
    return nnx_call(
        lambda nnx, rngs: nnx.LinearGeneral((HEADS, HEAD), 10, axis=(-2, -1), rngs=rngs), heads()
    )


def nnx_attention(*, mask=None, keys=None, keep=False, half=False, **options):
    """``nnx.MultiHeadAttention`` with ``mask(nnx, x)``; ``keys``: another sequence to look at."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    rngs = nnx.Rngs(0)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False, **options)
    graph, state = nnx.split(module)

    def fn(state, x, *others):
        module = nnx.merge(graph, state)
        seen = mask(nnx, x) if mask else None
        call = nnx.capture(module, nnx.Intermediate) if keep else module
        return call(x, *others, mask=seen, sow_weights=keep)

    return fn, (state, HALF if half else X, *(() if keys is None else (keys,)))


causal = lambda nnx, x: nnx.make_causal_mask(x[..., 0])
padded = lambda nnx, x: nnx.make_attention_mask(x[..., 0] > -0.5, x[..., 0] > -0.5)
OTHER = jax.ShapeDtypeStruct((BATCH, 9, WIDTH), jnp.float32)
attends = functools.partial(functools.partial, nnx_attention)
at = "nnx.MultiHeadAttention"
program(at, linear=4, attention=1)(attends())
program(f"{at}, causal", linear=4, attention=1)(attends(mask=causal))
program(f"{at}, no biases", attention=1)(attends(use_bias=False))
program(f"{at}, to another sequence", linear=4, attention=1)(attends(keys=OTHER))
program(f"{at}, normalised queries and keys", linear=4, layer_norm=2, attention=1)(
    attends(normalize_qk=True)
)
program(f"{at}, bfloat16", linear=4, attention=1)(attends(dtype=jnp.bfloat16, half=True))
program(f"{at}, a mask of the data", linear=4, softmax=1)(attends(mask=padded))
program(f"{at}, its weights kept", linear=4, softmax=1)(attends(keep=True))
program(f"{at}, dropout", linear=4, softmax=1)(attends(dropout_rate=0.5, deterministic=False))


@program("nnx.dot_product_attention", attention=1)
def _():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    return nnx.dot_product_attention, (heads(), heads(), heads())


@program("nnx.dot_product_attention, causal", attention=1)
def _():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def fn(q, k, v):
        return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(q[..., 0, 0])[:, 0:1])

    return fn, (heads(), heads(), heads())


@program("nnx.dot_product_attention, a mask and a bias", softmax=1)
def _():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def fn(q, k, v, bias):
        return nnx.dot_product_attention(q, k, v, bias=bias, mask=MASK)

    return fn, (heads(), heads(), heads(), SCORES)


@program("a transformer in nnx, of one block", layer_norm=3, linear=7, attention=1, cross_entropy=1)
def _():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
            self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 24, rngs=rngs)
            self.down = nnx.Linear(24, WIDTH, rngs=rngs)
            self.norm_3 = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 11, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(tokens))
            x = x + self.down(nnx.gelu(self.up(self.norm_2(x))))
            return self.head(self.norm_3(x))

    optax = pytest.importorskip("optax", reason="optax is not installed")
    graph, state = nnx.split(Transformer(nnx.Rngs(0)))

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, (state, np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH) % 11)


# -- flax.linen ----------------------------------------------------------------------------


def linen_call(name, *given, inputs=(X,), call=None, dropout_rate=0.0, **options):
    """A module's call as a function of its variables."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    options |= {"dropout_rate": dropout_rate} if dropout_rate else {}
    module = getattr(linen, name)(*given, **options)
    call = call or (lambda module, *args, **rest: module.apply(*args, **rest))
    init = functools.partial(module.init, **({"deterministic": True} if dropout_rate else {}))
    variables = jax.eval_shape(init, jax.random.key(0), *inputs)
    return functools.partial(call, module), (variables, *inputs)


def linen_modules():
    """Name, what it is made with, what is in it."""
    half = {"dtype": jnp.bfloat16}
    three = {"inputs": (X, OTHER)}
    yield "Dense", (10,), {}, {"linear": 1}
    yield "Dense", (10,), {"use_bias": False}, {}
    yield "Dense", (10,), {**half}, {"linear": 1}
    yield "DenseGeneral", ((HEADS, 5),), {}, {"linear": 1}
    yield "DenseGeneral", (10,), {"axis": (-2, -1), "inputs": (heads(),)}, {"linear": 1}
    yield "DenseGeneral", (10,), {"batch_dims": (0,)}, {}  # a bias for each sequence
    yield "LayerNorm", (), {}, {"layer_norm": 1}
    yield "LayerNorm", (), {"use_bias": False, "use_scale": False}, {"layer_norm": 1}
    yield "LayerNorm", (), {"use_fast_variance": False}, {"layer_norm": 1}
    yield "LayerNorm", (), {**half, "inputs": (HALF,)}, {"layer_norm": 1}
    yield "LayerNorm", (), {"reduction_axes": 1, "feature_axes": 1}, {}
    yield "RMSNorm", (), {}, {"rms_norm": 1}
    yield "RMSNorm", (), {**half, "inputs": (HALF,)}, {"rms_norm": 1}
    yield "GroupNorm", (2,), {}, {}
    yield "BatchNorm", (False,), {"call": run_with_statistics}, {}
    yield "InstanceNorm", (), {}, {}
    many = {"num_heads": HEADS}
    whole = {"linear": 4, "attention": 1}
    weights = {"linear": 4, "softmax": 1}
    yield "SelfAttention", (), {**many}, whole
    yield "SelfAttention", (), {**many, "call": causally}, whole
    yield "MultiHeadDotProductAttention", (), {**many, **three}, whole
    yield "MultiHeadDotProductAttention", (), {**many, **half, "inputs": (HALF,)}, whole
    yield "MultiHeadDotProductAttention", (), {**many, "call": causally}, whole
    yield "MultiHeadDotProductAttention", (), {**many, "call": masked}, weights
    yield "MultiHeadDotProductAttention", (), {**many, "call": keeping_weights}, weights
    yield (
        "MultiHeadDotProductAttention",
        (),
        {**many, "call": dropping, "dropout_rate": 0.5},
        weights,
    )
    yield "MultiHeadAttention", (), {**many}, whole
    yield (
        "MultiHeadAttention",
        (),
        {**many, "normalize_qk": True},
        {"linear": 4, "layer_norm": 2, "attention": 1},
    )


def run_with_statistics(module, variables, x):
    return module.apply(variables, x, mutable=["batch_stats"])


def causally(module, variables, x):
    from flax import linen

    return module.apply(variables, x, mask=linen.make_causal_mask(x[..., 0]))


def masked(module, variables, x):
    return module.apply(variables, x, mask=MASK)


def keeping_weights(module, variables, x):
    return module.apply(variables, x, sow_weights=True, mutable=["intermediates"])


def dropping(module, variables, x):
    return module.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(1)})


for name, given, options, sites in linen_modules():
    said = [
        getattr(v, "__name__", f"{n}={getattr(v, '__name__', v)}")
        for n, v in options.items()
        if n not in ("inputs", "num_heads")
    ]
    said += ["to another sequence"] if OTHER in options.get("inputs", ()) else []
    said += ["bfloat16 operands"] if HALF in options.get("inputs", ()) else []
    program(", ".join([f"linen.{name}{given if given else ''}", *said]), **sites)(
        functools.partial(linen_call, name, *given, **options)
    )


# -- equinox -------------------------------------------------------------------------------


def equinox_call(make, *inputs, batched=1, **options):
    """A module's call as a function of its arrays, mapped over the leading axes."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    arrays, static = eqx.partition(make(eqx.nn, jax.random.key(0)), eqx.is_array)

    def fn(arrays, *inputs):
        call = functools.partial(eqx.combine(arrays, static), **options)
        for _ in range(batched):
            call = jax.vmap(call)
        return call(*inputs)

    return fn, (arrays, *(inputs or (X,)))


SINGLE = {"dtype": jnp.float32}


@program("equinox.nn.Linear, of each token", linear=1)
def _():
    return equinox_call(lambda nn, key: nn.Linear(WIDTH, 10, key=key, **SINGLE), batched=2)


@program("equinox.nn.Linear, no bias")
def _():
    make = lambda nn, key: nn.Linear(WIDTH, 10, use_bias=False, key=key, **SINGLE)
    return equinox_call(make, batched=2)


@program("equinox.nn.LayerNorm", layer_norm=1)
def _():
    return equinox_call(lambda nn, key: nn.LayerNorm(WIDTH, **SINGLE), batched=2)


@program("equinox.nn.LayerNorm, bfloat16", layer_norm=1)
def _():
    return equinox_call(lambda nn, key: nn.LayerNorm(WIDTH, dtype=jnp.bfloat16), HALF, batched=2)


@program("equinox.nn.LayerNorm, of two axes")  # the op works along one
def _():
    return equinox_call(lambda nn, key: nn.LayerNorm((LENGTH, WIDTH), **SINGLE), batched=1)


@program("equinox.nn.RMSNorm", rms_norm=1)
def _():
    return equinox_call(lambda nn, key: nn.RMSNorm(WIDTH, **SINGLE), batched=2)


@program("equinox.nn.GroupNorm")
def _():
    return equinox_call(lambda nn, key: nn.GroupNorm(2, LENGTH, **SINGLE), batched=1)


@program("equinox.nn.RotaryPositionalEmbedding", rope=1)
def _():
    return equinox_call(lambda nn, key: nn.RotaryPositionalEmbedding(WIDTH, dtype=jnp.float32))


@program("equinox.nn.MLP", linear=3)
def _():
    return equinox_call(lambda nn, key: nn.MLP(WIDTH, 5, 24, 2, key=key, **SINGLE), batched=2)


def equinox_attention(mask=None, process=None, **options):
    """``equinox.nn.MultiheadAttention`` of a sequence to itself."""

    def make(nn, key):
        biases = dict.fromkeys([f"use_{n}_bias" for n in ("query", "key", "value", "output")], True)
        return nn.MultiheadAttention(HEADS, WIDTH, key=key, **{**biases, **SINGLE, **options})

    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    arrays, static = eqx.partition(make(eqx.nn, jax.random.key(0)), eqx.is_array)
    rotate = eqx.nn.RotaryPositionalEmbedding(HEAD, dtype=jnp.float32)

    def rotated(q, k, v):
        each_head = jax.vmap(rotate, 1, 1)
        return each_head(q), each_head(k), v

    def fn(arrays, x):
        layer = eqx.combine(arrays, static)
        key = jax.random.key(1)
        more = {"process_heads": rotated} if process else {}
        return jax.vmap(lambda x: layer(x, x, x, mask=mask, key=key, **more))(x)

    return fn, (arrays, X)


attends = functools.partial(functools.partial, equinox_attention)
at = "equinox.nn.MultiheadAttention"
program(at, linear=4, attention=1)(attends())
program(f"{at}, no biases", attention=1)(
    attends(**{f"use_{n}_bias": False for n in ("query", "key", "value", "output")})
)
program(f"{at}, causal", linear=4, attention=1)(attends(mask=jnp.tril(jnp.ones_like(MASK))))
program(f"{at}, rotated", linear=4, rope=2, attention=1)(attends(process=True))
program(f"{at}, dropout", linear=4, softmax=1)(attends(dropout_p=0.5))
program(f"{at}, a mask", linear=4, softmax=1)(attends(mask=MASK))


# -- haiku ---------------------------------------------------------------------------------


def haiku_call(make, *inputs):
    """What ``make(hk)`` returns, applied, as a function of its parameters."""
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
    pair = hk.without_apply_rng(hk.transform(lambda *inputs: make(hk)(*inputs)))
    inputs = inputs or (X,)
    return pair.apply, (jax.eval_shape(pair.init, jax.random.key(0), *inputs), *inputs)


@program("haiku.Linear", linear=1)
def _():
    return haiku_call(lambda hk: hk.Linear(10))


@program("haiku.Linear, no bias")
def _():
    return haiku_call(lambda hk: hk.Linear(10, with_bias=False))


@program("haiku.LayerNorm", layer_norm=1)
def _():
    return haiku_call(lambda hk: hk.LayerNorm(-1, True, True))


@program("haiku.LayerNorm, fast variance", layer_norm=1)
def _():
    return haiku_call(lambda hk: hk.LayerNorm(-1, True, True, use_fast_variance=True))


@program("haiku.LayerNorm, another axis")
def _():
    return haiku_call(lambda hk: hk.LayerNorm(1, True, True))


@program("haiku.RMSNorm", rms_norm=1)
def _():
    return haiku_call(lambda hk: hk.RMSNorm(-1))


@program("haiku.MLP", linear=3)
def _():
    return haiku_call(lambda hk: hk.nets.MLP([24, 24, 5]))


def haiku_attention(hk):
    return hk.MultiHeadAttention(HEADS, HEAD, w_init=hk.initializers.VarianceScaling())


@program("haiku.MultiHeadAttention", linear=4, attention=1)
def _():
    return haiku_call(haiku_attention, X, OTHER, OTHER)


@program("haiku.MultiHeadAttention, causal", linear=4, attention=1)
def _():
    mask = np.tril(np.ones_like(MASK))[None, None]  # a table of the program
    return haiku_call(lambda hk: lambda x: haiku_attention(hk)(x, x, x, mask=mask))


@program("haiku.MultiHeadAttention, a mask", linear=4, softmax=1)
def _():
    return haiku_call(lambda hk: lambda x: haiku_attention(hk)(x, x, x, mask=MASK[None, None]))


@program("haiku.InstanceNorm")
def _():
    return haiku_call(lambda hk: hk.InstanceNorm(True, True))


# -- optax.losses --------------------------------------------------------------------------

CLASSES = 7
LOGITS = jax.ShapeDtypeStruct((BATCH, LENGTH, CLASSES), jnp.float32)
LABELS = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH) % CLASSES


def optax_loss(name, *args, call=None, **options):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    loss = functools.partial(getattr(optax.losses, name), **options)
    return (lambda *args: call(loss, *args)) if call else loss, args


def of_one_hot(loss, logits, labels):
    return loss(logits, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype))


losses = functools.partial(functools.partial, optax_loss)
at = "optax.softmax_cross_entropy_with_integer_labels"
program(at, cross_entropy=1)(losses(at[6:], LOGITS, LABELS))
program(f"{at}, out of range", cross_entropy=1)(losses(at[6:], LOGITS, LABELS - 2))
program(f"{at}, bfloat16", cross_entropy=1)(
    losses(at[6:], jax.ShapeDtypeStruct(LOGITS.shape, jnp.bfloat16), LABELS)
)
program(f"{at}, the mean", cross_entropy=1)(
    losses(at[6:], LOGITS, LABELS, call=lambda loss, *args: loss(*args).mean())
)
program(f"{at}, another axis")(
    losses(at[6:], LOGITS, LABELS[:, 0][:, None].repeat(CLASSES, 1) % LENGTH, axis=1)
)
program("optax.softmax_cross_entropy of one_hot", cross_entropy=1)(
    losses("softmax_cross_entropy", LOGITS, LABELS, call=of_one_hot)
)
program("optax.softmax_cross_entropy of distributions", log_softmax=1)(
    losses("softmax_cross_entropy", LOGITS, LOGITS)
)
program("optax.softmax_cross_entropy of smoothed one_hot", log_softmax=1)(
    losses(
        "softmax_cross_entropy",
        LOGITS,
        LABELS,
        call=lambda loss, logits, labels: loss(
            logits, 0.9 * jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype) + 0.1 / CLASSES
        ),
    )
)


# -- the tests -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_counted_by_hand_is_found(name):
    build, expected = PROGRAMS[name]
    fn, args = build()
    args = filled(args)
    SEEN[name] = found(fn, args)
    assert SEEN[name] == expected, fuel_jax.fuse.report(fn)(*args)
    if expected:
        assert_agree(fn, args)


def test_table(capsys):
    """Prints ``program | by hand | found`` of the programs that were looked at."""
    if not SEEN:
        pytest.skip("no program was looked at")
    listed = lambda counts: ", ".join(f"{n} {op}" for op, n in counts.items()) or "none"
    with capsys.disabled():
        print(f"\n\n{'program':<72} {'ops, by hand':<60} found")
        for name, here in SEEN.items():
            expected = PROGRAMS[name][1]
            verdict = "all" if here == expected else listed(here)
            print(f"{name:<72} {listed(expected):<60} {verdict}")
        total = lambda counts: sum(sum(c.values()) for c in counts)
        print(f"{len(SEEN)} programs, {total(PROGRAMS[n][1] for n in SEEN)} ops by hand, ", end="")
        print(f"{total(SEEN.values())} found")
