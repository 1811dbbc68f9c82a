"""What ``fuse`` promises: safety, composition, the report, ops of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import fuel_jax
from fuel_jax import fuse

from ..contract import OPS, fill

FUSED = [op for op in OPS if isinstance(op, fuel_jax.FusedOp)]
X = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")


@pytest.fixture(autouse=True)
def as_people_have_it():
    """Without the suite's strict promotion, which ordinary programs do not know."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def softmax(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def ops(f, *args, **kwargs):
    return [r.op for r in fuse.report(f)(*args, **kwargs).replaced]


def reasons(f, *args):
    return [(m.op, m.reason) for m in fuse.report(f)(*args).missed]


def equations(jaxpr):
    """Names of all primitives, those of inner jaxprs too."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner))


# -- its own bodies ------------------------------------------------------------------------


def recognisable(op):
    """Ops that are looked for, and whose examples have all operands as arrays."""
    return op.matchable or any(s.why_not is None for s in op.spellings if hasattr(s, "why_not"))


@pytest.mark.parametrize("op", [op for op in FUSED if recognisable(op)], ids=lambda op: op.name)
def test_a_decomposition_is_the_op(op):
    """Parameters included."""
    for example in op.examples():
        f, arrays = fill(op, example, "float32")
        if any(x is not None and not hasattr(x, "shape") for x in arrays):
            continue
        if 1 in {n for x in arrays if x is not None for n in x.shape}:
            continue  # a unit axis may be any axis
        report = fuse.report(functools.partial(op.decompose, **f.keywords))(*arrays)
        found = [r for r in report.replaced if r.op == op.name]
        if not found and op.name in BODY_IS_NOT_HOW_IT_IS_WRITTEN:
            continue
        assert found, report
        for name, value in f.keywords.items():
            if isinstance(value, float):
                assert found[0].params[name] == pytest.approx(value, rel=1e-6)


# Their bodies guard against NaN beyond masks and rename labels, as nobody else's code does.
BODY_IS_NOT_HOW_IT_IS_WRITTEN = {
    "flash_attn",
    "fused_softmax_cross_entropy",
    "causal_conv1d",
    "selective_scan",
}


# -- safe ----------------------------------------------------------------------------------


def test_without_a_match_nothing_changes():
    def f(x):
        return jax.nn.relu(jnp.tanh(x) @ x.T).sum()

    assert str(jax.make_jaxpr(fuse(f))(X)) == str(jax.make_jaxpr(f)(X))


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (
            lambda x: (lambda e: (e / e.sum(-1, keepdims=True), e.sum()))(
                jnp.exp(x - x.max(-1, keepdims=True))
            ),
            "`exp` .* is also read at",
        ),
        (
            lambda x: (lambda e: (e / e.sum(-1, keepdims=True), e))(
                jnp.exp(x - x.max(-1, keepdims=True))
            ),
            "`exp` .* is also returned",
        ),
        (lambda x: jax.nn.softmax(x, axis=0), "along axis 0 of 2; the op works along the last"),
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), "no maximum is subtracted"),
        (
            lambda x: (lambda y: y / y.sum(-1, keepdims=True))(
                jnp.exp((x - x.max(-1, keepdims=True)).astype("bfloat16")).astype("float32")
            ),
            "bfloat16 inside .*, float32 outside",
        ),
    ],
    ids=["read", "returned", "axis", "unstable", "rounded"],
)
def test_a_near_miss_says_why(f, reason):
    report = fuse.report(f)(X)
    assert not report.replaced
    assert [m.op for m in report.missed] == ["softmax_last_dim"]
    with pytest.raises(AssertionError):
        assert report.missed[0].reason == ""
    import re

    assert re.search(reason, report.missed[0].reason)
    np.testing.assert_array_equal(jax.tree.leaves(fuse(f)(X))[0], jax.tree.leaves(f(X))[0])


def test_float64_losses_are_not_rounded():
    def loss(x, y):
        picked = jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1)
        return -picked.mean()

    labels = jnp.array([0, 3, 5, 1])
    assert ops(loss, X, labels) == ["fused_softmax_cross_entropy"]
    wide = jnp.asarray(X, "float64")
    assert "fused_softmax_cross_entropy" not in ops(loss, wide, labels)
    assert fuse(loss)(wide, labels) == pytest.approx(float(loss(wide, labels)), rel=1e-14)


@pytest.mark.parametrize("lead", [(1, 4), (4, 1), (1,), (1, 1)])
def test_axes_of_one_element_hide_no_loss(lead):
    """JAX picks along such axes by other dimension numbers."""
    x = np.random.default_rng(1).normal(size=(*lead, 7)).astype("float32")
    labels = jnp.arange(len(x.reshape(-1, 7))).reshape(lead) % 7

    def loss(x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1).mean()

    assert ops(loss, x, labels) == ["fused_softmax_cross_entropy"]
    np.testing.assert_allclose(
        jax.grad(fuse(loss))(x, labels), jax.grad(loss)(x, labels), atol=1e-6
    )


def test_halves_that_the_op_widens_itself_are_not_widened_before():
    half, labels = X.astype("bfloat16"), jnp.array([0, 3, 5, 1])

    def loss(x):
        logp = jax.nn.log_softmax(x.astype("float32"))
        return -jnp.take_along_axis(logp, labels[:, None], -1).mean()

    (site,) = fuse.report(loss)(half).replaced
    assert site.operands["logits"].startswith("bfloat16")
    values, slopes = zip(*(jax.value_and_grad(f)(half) for f in (loss, fuse(loss))), strict=True)
    np.testing.assert_allclose(*values, rtol=1e-6)  # nothing is rounded but the slope
    np.testing.assert_allclose(*map(np.float32, slopes), rtol=2**-7)
    # A wide softmax of halves stays one: the op of halves would round it.
    (site,) = fuse.report(lambda x: jax.nn.softmax(x.astype("float32")))(half).replaced
    assert site.operands["x"].startswith("float32")


@pytest.mark.parametrize("labels", [[0, 5, 3, 1], [-1, -6, 6, 2], [-7, 100, -100, 0]])
@pytest.mark.parametrize("way", ["pick", "index", "one_hot"])
def test_labels_that_are_no_class_mean_what_they_meant(labels, way):
    def loss(x, y):
        logp = jax.nn.log_softmax(x)
        if way == "pick":
            return -jnp.take_along_axis(logp, y[:, None], -1)[:, 0]
        if way == "index":
            return -logp[jnp.arange(len(y)), y]
        return -jnp.sum(jax.nn.one_hot(y, x.shape[-1], dtype=x.dtype) * logp, -1)

    y = jnp.array(labels)
    assert ops(loss, X, y) == ["fused_softmax_cross_entropy"]
    np.testing.assert_allclose(fuse(loss)(X, y), loss(X, y), rtol=1e-5, atol=1e-6)
    slope = lambda f: jax.grad(lambda x: jnp.nansum(f(x, y)))(X)
    np.testing.assert_allclose(slope(fuse(loss)), slope(loss), rtol=1e-5, atol=1e-6)


def test_effects_stay_in_order(capfd):
    def f(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        y = softmax(x)
        jax.debug.print("second {}", y.sum(), ordered=True)
        return y

    np.testing.assert_allclose(jax.jit(fuse(f))(X), softmax(X), rtol=1e-6)
    jax.effects_barrier()
    said = capfd.readouterr().out
    assert said.index("first") < said.index("second")
    assert ops(f, X) == ["softmax_last_dim"]


def test_what_was_given_up_is_given_up():
    """A nested jit that donates is left as it is."""
    inner = jax.jit(softmax, donate_argnums=0)
    assert ops(lambda x: inner(x + 1), X) == []
    np.testing.assert_allclose(fuse(lambda x: inner(x + 1))(X), softmax(X + 1), rtol=1e-6)


def test_a_derivative_of_one_s_own_is_left_alone():
    @jax.custom_vjp
    def ours(x):
        return softmax(x)

    ours.defvjp(lambda x: (ours(x), x), lambda x, g: (jnp.full_like(x, 7),))
    f = lambda x: ours(x).sum()
    assert ops(f, X) == []
    assert (jax.grad(fuse(f))(X) == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes_are_kept(dtype):
    x = jnp.asarray(X, dtype)
    for f in (
        softmax,
        lambda x: softmax(x.astype("float32")),
        lambda x: softmax(x).astype("float16"),
    ):
        assert ops(f, x) == ["softmax_last_dim"]
        got, want = fuse(f)(x), f(x)
        assert got.dtype == want.dtype
        assert jax.eval_shape(fuse(f), x) == jax.eval_shape(f, x)
        np.testing.assert_allclose(np.float64(got), np.float64(want), atol=0.01)


def test_what_is_no_array_passes_through():
    def f(config, x, scale=2.0):
        return {"y": config["act"](x * scale), "name": config["name"], "shape": x.shape}

    config = {"act": softmax, "name": "layer"}
    got = fuse(f)(config, X)
    assert got["name"] == "layer"
    assert got["shape"] == (4, 6)
    np.testing.assert_allclose(got["y"], softmax(X * 2), rtol=1e-6)
    assert ops(f, config, X, scale=3.0) == ["softmax_last_dim"]


# -- composition ---------------------------------------------------------------------------


def model(w, x):
    return (softmax(x @ w) ** 2).sum()


W = np.random.default_rng(1).normal(size=(6, 5)).astype("float32")


@pytest.mark.parametrize(
    "program",
    [
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.vmap(jax.grad(f), (None, 0)),
        lambda f: jax.grad(lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None]).sum()),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda w, x: lax.scan(lambda c, row: (c + f(w, row), None), 0.0, x)[0],
    ],
    ids=["jit-grad", "grad-jit", "vmap-grad", "grad-vmap", "checkpoint", "scan"],
)
def test_composes(program):
    got, want = program(fuse(model))(W, X), program(model)(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_fuse_around_the_transformation():
    """Outside ``vmap`` as inside; around ``grad`` there is less to find, and nothing breaks."""
    assert ops(jax.vmap(softmax), X[:, None]) == ["softmax_last_dim"]
    batched = jax.vmap(fuse(softmax))(X[:, None])
    np.testing.assert_allclose(batched, jax.vmap(softmax)(X[:, None]), rtol=1e-6)
    slope = jax.grad(model)
    np.testing.assert_allclose(fuse(slope)(W, X), slope(W, X), rtol=1e-5, atol=1e-6)


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("rows")
    f = jax.shard_map(fuse(softmax), mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_allclose(jax.jit(f)(X), softmax(X), rtol=1e-6)
    around = fuse(jax.shard_map(softmax, mesh=mesh, in_specs=rows, out_specs=rows))
    np.testing.assert_allclose(jax.jit(around)(X), softmax(X), rtol=1e-6)


def test_the_op_stands_in_the_program():
    names = list(equations(jax.make_jaxpr(fuse(softmax))(X).jaxpr))
    assert "custom_vjp_call" in names


def test_a_loss_keeps_no_probabilities():
    """What fusing is for: the gradient has no second array of the logits' size."""

    def loss(x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1).mean()

    x, y = jax.ShapeDtypeStruct((512, 8192), "float32"), jax.ShapeDtypeStruct((512,), "int32")
    temporary = lambda f: (
        jax.jit(jax.grad(f)).lower(x, y).compile().memory_analysis().temp_size_in_bytes
    )
    assert temporary(fuse(loss)) < 0.2 * 4 * 512 * 8192


# -- ops of one's own ----------------------------------------------------------------------


def test_a_registered_op_is_found_as_the_built_in_ones_are():
    def swiglu(gate, up, *, beta: float = 1.0):
        return gate * jax.nn.sigmoid(beta * gate) * up

    def examples():
        for n in (8, 12):
            yield {
                "gate": np.ones((4, n), "float32"),
                "up": np.ones((4, n), "float32"),
                "beta": 1.0,
            }

    op = fuel_jax.register_fused("swiglu_of_mine", swiglu, examples=examples)
    try:
        f = lambda x, w, v: jax.nn.sigmoid(1.5 * (x @ w)) * (x @ v) * (x @ w)
        report = fuse.report(f)(X, W, W + 1)
        assert [r.op for r in report.replaced] == ["swiglu_of_mine"]
        assert report.replaced[0].params == {"beta": pytest.approx(1.5)}
        np.testing.assert_allclose(fuse(f)(X, W, W + 1), f(X, W, W + 1), rtol=1e-5)
        assert ops(f, X, W, W + 1) == fuse.report(f, ops=[op])(X, W, W + 1).replaced[0].op.split()
        assert not fuse.report(f, ops=[fuel_jax.rope])(X, W, W + 1).replaced
    finally:
        fuel_jax.unregister_fused("swiglu_of_mine")
    assert ops(f, X, W, W + 1) == []


def test_only_fused_ops_can_be_looked_for():
    with pytest.raises(fuel_jax.ArgumentError, match=r"fuse: 'ops' holds .*; wanted fused ops"):
        fuse(softmax, ops=[fuel_jax.add])(X)


# -- the report ----------------------------------------------------------------------------


def test_a_report_is_read():
    def layer(x):
        y = softmax(x)
        return y, jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)

    report = fuse.report(layer)(X)
    text = str(report)
    assert text.startswith("fuse(layer): 1 op recognised")
    assert "softmax_last_dim(x=float32[4,6])" in text
    assert "test_fuse.py:" in text
    assert "nearly:" in text
    html = report._repr_html_()
    assert html.count("<tr>") == 2
    assert "no maximum is subtracted" in html
    assert str(fuse.report(layer)(jax.ShapeDtypeStruct((4, 6), "float32"))) == text
