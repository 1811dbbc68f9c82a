"""Everything that jax.nn, optax, flax and equinox offer: what is no op stays as it is.

Where something is replaced that ``EXPECTED`` does not list, the test fails, and where it is listed
the value is compared.
"""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax

from .compared import QUICKLY, filled, found

BATCH, LENGTH, WIDTH = 3, 6, 8
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
X, IMAGE = f32(BATCH, LENGTH, WIDTH), f32(BATCH, 7, 5, WIDTH)
LABELS = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH) % WIDTH

LINEAR, ATTENTION = {"fused_linear": 1}, {"fused_linear": 4, "flash_attn": 1}
LAYER_NORM, RMS_NORM = {"layer_norm_last_dim": 1}, {"rms_norm_last_dim": 1}
SOFTMAX, LOG_SOFTMAX = {"softmax_last_dim": 1}, {"log_softmax_last_dim": 1}
EXPECTED = {
    "jax.nn.softmax": SOFTMAX,
    "jax.nn.log_softmax": LOG_SOFTMAX,
    "jax.nn.standardize": LAYER_NORM,
    "jax.nn.dot_product_attention": {"flash_attn": 1},
    # What two functions of the same exponentials share stays shared (poly_loss_cross_entropy), and
    # what has a gradient of its own keeps it (safe_softmax_cross_entropy).
    "optax.losses.ctc_loss": LOG_SOFTMAX,
    "optax.losses.ctc_loss_with_forward_probs": LOG_SOFTMAX,
    "optax.losses.dice_loss": SOFTMAX,
    "optax.losses.multiclass_generalized_dice_loss": SOFTMAX,
    "optax.losses.ranking_softmax_loss": LOG_SOFTMAX,
    "optax.losses.softmax_cross_entropy": LOG_SOFTMAX,
    "optax.losses.softmax_cross_entropy_with_integer_labels": {"fused_softmax_cross_entropy": 1},
    # Of two products that are added, one has a bias.
    **dict.fromkeys([f"linen.{n}" for n in ("Dense", "DenseGeneral", "Einsum")], LINEAR),
    "linen.GRUCell": {"fused_linear": 4},
    "linen.LSTMCell": {"fused_linear": 4},
    "linen.MGUCell": {"fused_linear": 3},
    "linen.OptimizedLSTMCell": LINEAR,
    "linen.SimpleCell": LINEAR,
    "linen.LayerNorm": LAYER_NORM,
    "linen.RMSNorm": RMS_NORM,
    "linen.MultiHeadAttention": ATTENTION,
    "linen.MultiHeadDotProductAttention": ATTENTION,
    "linen.SelfAttention": ATTENTION,
    "linen.SpectralNorm": LINEAR,
    "linen.WeightNorm": LINEAR,
    **dict.fromkeys([f"nnx.{n}" for n in ("Linear", "LinearGeneral", "LoRALinear")], LINEAR),
    "nnx.Einsum": LINEAR,
    "nnx.GRUCell": LINEAR,
    "nnx.LSTMCell": {"fused_linear": 4},
    "nnx.OptimizedLSTMCell": LINEAR,
    "nnx.SimpleCell": LINEAR,
    "nnx.LayerNorm": LAYER_NORM,
    "nnx.RMSNorm": RMS_NORM,
    "nnx.MultiHeadAttention": ATTENTION,
    "nnx.SpectralNorm": LINEAR,
    "nnx.WeightNorm": LINEAR,
    "equinox.nn.GRUCell": LINEAR,
    "equinox.nn.LSTMCell": LINEAR,
    "equinox.nn.LayerNorm": LAYER_NORM,
    "equinox.nn.Linear": LINEAR,
    "equinox.nn.MLP": {"fused_linear": 3},
    "equinox.nn.MultiheadAttention": {"flash_attn": 1},
    "equinox.nn.RMSNorm": RMS_NORM,
    "equinox.nn.RotaryPositionalEmbedding": {"rope": 1},
    "equinox.nn.WeightNorm": LINEAR,
}


@pytest.fixture(autouse=True)
def as_libraries_expect():
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated, or wants x64
        yield


def look(calls):
    """Each call's report against ``EXPECTED``; says what could not be called as it was."""
    wrong, passed_over, count = [], [], 0
    for name, make in calls:
        try:
            fn, args = make()
            jax.eval_shape(fn, *args)
        except Exception as error:  # whatever a library raises for arguments that are not its own
            passed_over.append(f"{name} ({type(error).__name__})")
            continue
        args = filled(args)
        here, count = found(fn, args), count + 1
        if here != EXPECTED.get(name, {}):
            wrong.append(f"{name}: {here}\n{fuel_jax.fuse.report(fn)(*args)}")
        elif here:
            agree(name, fn, args)
    return wrong, passed_over, count


def agree(name, fn, args):
    theirs, ours = (jax.jit(f, compiler_options=QUICKLY)(*args) for f in (fn, fuel_jax.fuse(fn)))
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        scale = np.abs(a).max(initial=0)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * scale, err_msg=name)


def check(capsys, library, calls):
    wrong, passed_over, count = look(calls)
    with capsys.disabled():
        print(f"\n{library}: {count} calls through fuse; not called: {', '.join(passed_over)}")
    assert not wrong, "\n\n".join(wrong)
    return count


# -- jax.nn --------------------------------------------------------------------------------


def of_jax_nn():
    q = f32(BATCH, LENGTH, 2, 4)
    options = {"dot_product_attention": {"implementation": "xla"}, "one_hot": {"num_classes": 5}}
    arguments = {"dot_product_attention": (q, q, q), "one_hot": (LABELS,), "glu": (X,)}
    arguments |= {"scaled_dot_general": (f32(4, 5), f32(5, 6))}
    options |= {"scaled_dot_general": {"dimension_numbers": (((1,), (0,)), ((), ()))}}
    for name in sorted(n for n in dir(jax.nn) if not n.startswith("_")):
        fn = getattr(jax.nn, name)
        if callable(fn):
            call = functools.partial(fn, **options.get(name, {}))
            args = arguments.get(name, (X,))
            yield f"jax.nn.{name}", lambda call=call, args=args: (call, args)


def test_jax_nn(capsys):
    assert check(capsys, "jax.nn", of_jax_nn()) > 25


# -- optax ---------------------------------------------------------------------------------


def of_optax_losses(optax):
    """Arguments by the names of the parameters."""
    given = dict.fromkeys(("logits", "predictions", "log_predictions", "predictor_outputs"), X)
    given |= dict.fromkeys(("targets", "scores", "labels", "errors"), X)
    given |= {
        "log_targets": X,
        "anchors": X,
        "positives": X,
        "negatives": X,
        "embeddings": f32(LENGTH, WIDTH),
    }
    ints = {"labels": LABELS}
    flat = {"scores": f32(BATCH, WIDTH), "labels": LABELS[:, 0]}
    special = {
        "softmax_cross_entropy_with_integer_labels": ints,
        **dict.fromkeys([f"multiclass_{n}_loss" for n in ("hinge", "perceptron")], flat),
        "multiclass_sparsemax_loss": {**flat, "scores": f32(WIDTH), "labels": np.int32(2)},
        "ntxent": {"labels": np.arange(LENGTH, dtype=np.int32) % 2},
        "smooth_labels": {"alpha": 0.1},
        "make_fenchel_young_loss": {"max_fun": jax.nn.logsumexp},
        "ctc_loss": {
            "logit_paddings": np.zeros((BATCH, LENGTH), np.float32),
            "labels": LABELS[:, :3] % 3 + 1,
            "label_paddings": np.zeros((BATCH, 3), np.float32),
        },
    }
    special["ctc_loss_with_forward_probs"] = special["ctc_loss"]
    for name in sorted(n for n in dir(optax.losses) if not n.startswith("_")):
        fn = getattr(optax.losses, name)
        if not callable(fn):
            continue

        def make(name=name, fn=fn):
            values = {**given, **special.get(name, {})}
            parameters = inspect.signature(fn).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty]
            if name == "make_fenchel_young_loss":
                return fn(jax.nn.logsumexp), (f32(WIDTH), f32(WIDTH))
            fixed = {n: values[n] for n in needed if isinstance(values[n], float)}
            free = [n for n in needed if n not in fixed]
            call = lambda *args: fn(**dict(zip(free, args, strict=True)), **fixed)
            return call, tuple(values[n] for n in free)

        yield f"optax.losses.{name}", make


def of_optax_transformations(optax):
    """Everything that, called with a learning rate or nothing, gives a transformation."""
    for name in sorted(n for n in dir(optax) if not n.startswith("_")):
        build = getattr(optax, name)
        if not inspect.isfunction(build):
            continue
        for given in ((), (0.1,)):
            try:
                made = build(*given)
            except Exception:  # it wants something else
                continue
            if isinstance(made, optax.GradientTransformation):
                yield f"optax.{name}", functools.partial(step_of, made)
                break


def step_of(transformation):
    def step(gradients, params):
        return transformation.update(gradients, transformation.init(params), params)[0]

    tree = {"w": f32(LENGTH, WIDTH), "b": f32(WIDTH)}
    return step, (tree, tree)


def test_optax_losses(capsys):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    assert check(capsys, "optax.losses", of_optax_losses(optax)) > 25


def test_optax_transformations(capsys):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    assert check(capsys, "optax", of_optax_transformations(optax)) > 50


# -- flax and equinox ----------------------------------------------------------------------


def of_linen(linen):
    given = {"Conv": (4, (3, 3)), "ConvTranspose": (4, (3, 3)), "ConvLocal": (4, (3, 3))}
    given |= {"Dense": (5,), "DenseGeneral": (5,), "Embed": (9, 5), "GroupNorm": (2,)}
    given |= {"Einsum": ((WIDTH, 5), "blw,wv->blv"), "BatchNorm": (False,)}
    given |= {"Dropout": (0.5, (), True), "Sequential": ([jnp.tanh],)}
    given |= dict.fromkeys(("SpectralNorm", "WeightNorm"), (linen.Dense(5),))
    given |= {n: (2,) for n in dir(linen) if "Attention" in n}
    inputs = {"Conv": (IMAGE,), "ConvTranspose": (IMAGE,), "ConvLocal": (IMAGE,)}
    inputs |= {"Embed": (LABELS,)}
    for name in sorted(n for n in dir(linen) if inspect.isclass(getattr(linen, n))):
        kind = getattr(linen, name)
        if not issubclass(kind, linen.Module):
            continue

        def make(name=name, kind=kind):
            if name.endswith("Cell"):
                if name == "ConvLSTMCell":
                    module, x = linen.RNN(kind(4, (3,))), f32(BATCH, 4, 5, WIDTH)
                else:
                    module, x = linen.RNN(kind(4)), X
                args = (x,)
            else:
                module, args = kind(*given.get(name, ())), inputs.get(name, (X,))
            more = {"update_stats": False} if name == "SpectralNorm" else {}
            init = lambda *args: module.init(jax.random.key(0), *args, **more)
            variables = jax.eval_shape(init, *args)
            call = functools.partial(module.apply, mutable=["batch_stats"], **more)
            return lambda v, *args: call(v, *args)[0], (variables, *args)

        yield f"linen.{name}", make


def of_nnx(nnx):
    rngs = nnx.Rngs(0)
    given = {"Conv": (WIDTH, 4, (3, 3)), "ConvTranspose": (WIDTH, 4, (3, 3)), "Linear": (WIDTH, 5)}
    given |= {"LinearGeneral": (WIDTH, 5), "Embed": (9, 5), "MultiHeadAttention": (2, WIDTH)}
    given |= {"Einsum": ("blw,wv->blv", (WIDTH, 5), (5,)), "LoRA": (WIDTH, 2, 5)}
    given |= {"LoRALinear": (WIDTH, 5), "Dropout": (0.5,)}
    given |= {n: (nnx.Linear(WIDTH, 5, rngs=rngs),) for n in ("SpectralNorm", "WeightNorm")}
    given |= dict.fromkeys(
        ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm"), (WIDTH,)
    )
    options = {"LoRALinear": {"lora_rank": 2}, "MultiHeadAttention": {"decode": False}}
    options |= {"GroupNorm": {"num_groups": 2}}
    inputs = {"Conv": (IMAGE,), "ConvTranspose": (IMAGE,), "Embed": (LABELS,)}
    for name in sorted(n for n in dir(nnx) if inspect.isclass(getattr(nnx, n))):
        kind = getattr(nnx, name)
        if not issubclass(kind, nnx.Module) or kind is nnx.Module:
            continue

        def make(name=name, kind=kind):
            more = options.get(name, {})
            if name.endswith("Cell"):
                module = nnx.RNN(kind(WIDTH, 4, rngs=rngs))
            elif name in ("Sequential", "PReLU"):
                module = kind()
            else:
                module = kind(*given.get(name, ()), rngs=rngs, **more)
            graph, state = nnx.split(module)
            more = {"update_stats": False} if name == "SpectralNorm" else {}
            call = lambda state, *args: nnx.merge(graph, state)(*args, **more)
            return call, (state, *inputs.get(name, (X,)))

        yield f"nnx.{name}", make


def of_equinox(eqx):
    nn, key = eqx.nn, jax.random.key(0)
    single = {"dtype": jnp.float32}
    given = {"Linear": (WIDTH, 5), "MLP": (WIDTH, 5, 7, 2), "Embedding": (9, 5)}
    given |= {"GRUCell": (WIDTH, 4), "LSTMCell": (WIDTH, 4), "MultiheadAttention": (2, WIDTH)}
    given |= {"LayerNorm": (WIDTH,), "RMSNorm": (WIDTH,), "GroupNorm": (2, WIDTH)}
    given |= {"RotaryPositionalEmbedding": (WIDTH,), "Dropout": (0.5, True), "Lambda": (jnp.tanh,)}
    given |= {"WeightNorm": (nn.Linear(WIDTH, 5, key=key, **single),)}
    vector, matrix = f32(WIDTH), f32(LENGTH, WIDTH)
    inputs = {"Embedding": (np.int32(3),), "GRUCell": (vector, f32(4)), "Identity": (matrix,)}
    inputs |= {"LSTMCell": (vector, (f32(4), f32(4))), "MultiheadAttention": (matrix,) * 3}
    inputs |= {"RotaryPositionalEmbedding": (matrix,), "GroupNorm": (f32(WIDTH, LENGTH),)}
    for d in (1, 2, 3):
        image = f32(WIDTH, *(7, 5, 6)[:d])
        for name in (f"Conv{d}d", f"ConvTranspose{d}d"):
            given[name], inputs[name] = (WIDTH, 4, 3), (image,)
        for name in (f"AvgPool{d}d", f"MaxPool{d}d"):
            given[name], inputs[name] = (2,), (image,)
        for name in (f"AdaptiveAvgPool{d}d", f"AdaptiveMaxPool{d}d"):
            given[name], inputs[name] = (2,), (image,)
    for name in sorted(n for n in dir(nn) if inspect.isclass(getattr(nn, n))):
        kind = getattr(nn, name)

        def make(name=name, kind=kind):
            accepted = inspect.signature(kind).parameters
            more = {"key": key} if "key" in accepted else {}
            more |= single if "dtype" in accepted else {}
            arrays, static = eqx.partition(kind(*given.get(name, ()), **more), eqx.is_array)
            call = lambda arrays, *args: eqx.combine(arrays, static)(*args)
            return call, (arrays, *inputs.get(name, (vector,)))

        yield f"equinox.nn.{name}", make


def test_linen(capsys):
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    assert check(capsys, "flax.linen", of_linen(linen)) > 20


def test_nnx(capsys):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    assert check(capsys, "flax.nnx", of_nnx(nnx)) > 20


def test_equinox(capsys):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    assert check(capsys, "equinox.nn", of_equinox(eqx)) > 25


# -- nearly an op --------------------------------------------------------------------------

NEARLY = {}


def nearly(*shapes, **sites):
    """Decorator: what is written almost as an op is; no op in it, or those named."""

    def enter(f):
        NEARLY[f.__name__] = f, tuple(f32(*shape) for shape in shapes), sites
        return f

    return enter


def rounded(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


@nearly((6, 8), (8, 5), (5,))
def product_of_split_floats(x, w, b):
    return rounded(x) @ w + (x - rounded(x)) @ w + b


@nearly((6, 5), (8, 5), (5,))
def what_rounding_lost_added_to_a_product(y, w, b):
    return jnp.ones((6, 8), y.dtype) @ w + b + (y - rounded(y))


@nearly((6, 8))
def softmax_over_the_sum_of_rounded_exponentials(x):
    most = jnp.max(rounded(x), -1, keepdims=True)
    return jnp.exp(x - most) / jnp.sum(jnp.exp(rounded(x) - most), -1, keepdims=True)


@nearly((6, 8))
def rms_norm_by_the_mean_square_of_rounded_values(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(rounded(x)), -1, keepdims=True) + 1e-5)


@nearly((6, 8))
def rms_norm_whose_scale_has_no_gradient(x):
    still = jax.lax.stop_gradient(x)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(still), -1, keepdims=True) + 1e-5)


@nearly((6, 8))
def rms_norm_of_shifts_with_and_without_gradient(x):
    most = jnp.max(x, -1, keepdims=True)
    still = x - jax.lax.stop_gradient(most)
    return (x - most) * jax.lax.rsqrt(jnp.mean(jnp.square(still), -1, keepdims=True) + 1e-5)


@nearly((6, 8))
def softmax_whose_sum_has_no_gradient(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jax.lax.stop_gradient(jnp.sum(e, -1, keepdims=True))


@nearly((6, 8), (6, 8))
def softmax_below_the_maximum_of_something_else(x, y):
    e = jnp.exp(x - jnp.max(y, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


@nearly((6, 8))
def softmax_with_one_more_in_the_sum(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / (1 + jnp.sum(e, -1, keepdims=True))


@nearly((6, 8))
def layer_norm_of_the_unbiased_variance(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5)


@nearly((6, 8))
def layer_norm_with_eps_outside_the_root(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


@nearly((6, 6))
def layer_norm_by_rows_and_columns(x):
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


@nearly((6, 8))
def rows_of_length_one(x):
    return x / jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


@nearly((8,), (8,), ())
def dot_product_plus_a_number(x, y, c):
    return x @ y + c


@nearly((4, 4), (4, 4), (4, 4))
def product_plus_a_matrix(x, w, b):
    return x @ w + b


@nearly((4, 4), (4, 4), (4,))
def diagonal_of_a_product_plus_a_vector(x, w, b):
    return jnp.einsum("ij,ji->i", x, w) + b


@nearly((2, 3, 6, 8), (6, 8), (6, 8))
def rope_the_other_way(x, cos, sin):
    lo, hi = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([hi, -lo], -1) * sin


@nearly((2, 3, 6, 8), (6, 4), (6, 4))
def rope_of_neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


@nearly((6, 6), log_softmax_last_dim=1)
def labels_that_choose_rows(x):
    return -jax.nn.log_softmax(x)[LABELS[0], jnp.arange(6)]


def attention_by(mask, outwards="bhqk,bkhd->bqhd"):
    """With every extent 4: only the wiring tells one axis from another."""

    def f(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        return jnp.einsum(outwards, jax.nn.softmax(jnp.where(mask, s, -1e30)), v)

    return f


ROW, COLUMN = np.arange(4)[:, None], np.arange(4)
for name, mask, outwards in (
    ("later_keys", ROW <= COLUMN, "bhqk,bkhd->bqhd"),
    ("earlier_keys_only", ROW > COLUMN, "bhqk,bkhd->bqhd"),
    ("causal_heads", (ROW >= COLUMN)[:, :, None], "bhqk,bkhd->bqhd"),
    ("causal_sequences", (ROW >= COLUMN)[:, None, None], "bhqk,bkhd->bqhd"),
    ("as_many_keys_as_heads", (COLUMN < 1 + ROW)[:, None], "bhqk,bkhd->bqhd"),
    ("values_of_queries", ROW >= COLUMN, "bhqk,bqhd->bkhd"),
    ("values_of_every_head", ROW >= COLUMN, "bhqk,bkgd->bqhd"),
):
    f = attention_by(mask, outwards)
    NEARLY[f"attention_to_{name}"] = f, (f32(4, 4, 4, 4),) * 3, {"softmax_last_dim": 1}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_an_op_is_none(name):
    f, args, sites = NEARLY[name]
    args = filled(args)
    assert found(f, args) == sites, fuel_jax.fuse.report(f)(*args)
    if sites:
        agree(name, f, args)
