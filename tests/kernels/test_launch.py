"""Every kernel lowers for an H200, on a machine without a GPU; and what happens without Triton."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec as P

import fuel_jax
from pallas_kernels import _launch, arg_extreme, cumsum, norms, softmax

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
EPS = {"eps": 1e-6}
ROWS = {
    "softmax": (softmax.softmax, 1, {}),
    "log_softmax": (softmax.log_softmax, 1, {}),
    "softmax_backward": (softmax.softmax_backward, 2, {}),
    "log_softmax_backward": (softmax.log_softmax_backward, 2, {}),
    "rms_norm": (norms.rms_norm, 1, EPS),
    "rms_norm_backward": (norms.rms_norm_backward, 2, EPS),
    "layer_norm": (norms.layer_norm, 1, EPS),
    "layer_norm_backward": (norms.layer_norm_backward, 2, EPS),
    "cumsum": (cumsum.cumsum, 1, {"dim": -1}),
    "argmax": (arg_extreme.argmax, 1, {"dim": -1}),
    "argmin": (arg_extreme.argmin, 1, {"dim": -1}),
}


def lowered(f, *arrays):
    """The program for CUDA, as text."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        return jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(4096, 8192), (3, 1), (7, 100_003), (2, 3, 1000), (64, 2**20)])
@pytest.mark.parametrize("name", ROWS)
def test_rows_lower(name, shape, dtype):
    run, operands, params = ROWS[name]
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert f"fuel_{name}" in lowered(functools.partial(run, **params), *[x] * operands)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8192, 128_256), (64, 50_257), (8, 9, 262_144)])
def test_cross_entropy_lowers(shape, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)
    t = jax.ShapeDtypeStruct(shape[:-1], "int32")
    loss = lambda x, t: jnp.sum(fuel_jax.fused_softmax_cross_entropy(x, t))
    text = lowered(jax.value_and_grad(loss), x, t)
    assert "fuel_cross_entropy" in text
    assert "fuel_cross_entropy_backward" in text


EVERY = {"causal": True, "window_size_left": 100, "softcap": 30.0}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("q", "k", "dv", "options"),
    [
        ((4, 32, 4096, 128), (4, 32, 4096, 128), 128, {"causal": True}),
        ((2, 6, 333, 80), (2, 2, 500, 80), 72, EVERY),
        ((2, 4, 1000, 256), (2, 4, 1000, 256), 256, {}),
        ((2, 4, 1, 64), (2, 1, 10_000, 64), 64, {}),
    ],
    ids=["training", "everything", "wide", "decoding"],
)
def test_attention_lowers(q, k, dv, options, dtype):
    v = (*k[:-1], dv)
    q, k, v, do = (jax.ShapeDtypeStruct(s, dtype) for s in (q, k, v, (*q[:-1], dv)))
    alibi, k_len = jax.ShapeDtypeStruct((q.shape[1],), dtype), jax.ShapeDtypeStruct((2,), "int32")
    more = (alibi, k_len) if options is EVERY else ()

    def gradient(q, k, v, do, *more):
        f = lambda q, k, v: fuel_jax.flash_attn(q, k, v, *more, **options)
        return jax.vjp(f, q, k, v)[1](do)

    text = lowered(gradient, q, k, v, do, *more)
    for part in ("attention", "attention_key_gradients", "attention_query_gradients"):
        assert f"fuel_{part}" in text


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "everything"])
def test_hoppers_attention_lowers(width, options):
    q, k = (jax.ShapeDtypeStruct((2, h, 504, width), "bfloat16") for h in (4, 2))
    alibi, k_len = jax.ShapeDtypeStruct((4,), "bfloat16"), jax.ShapeDtypeStruct((2,), "int32")
    f = functools.partial(fuel_jax.flash_attn.using("mosaic"), **options)
    text = lowered(f, q, k, k, *((alibi, k_len) if options else ()))
    assert "fuel_attention_hopper" in text
    assert ("fuel_attention_mend" in text) == bool(options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size_right": 9}], ids=str)
@pytest.mark.parametrize("given", ["alibi", "k_len", "neither"])
def test_hoppers_attention_lowers_with_one_option(given, options):
    """Mosaic has no registers for positions that nobody asks for."""
    q = jax.ShapeDtypeStruct((2, 4, 504, 64), "bfloat16")
    alibi = jax.ShapeDtypeStruct((4,), "bfloat16") if given == "alibi" else None
    k_len = jax.ShapeDtypeStruct((2,), "int32") if given == "k_len" else None
    f = functools.partial(fuel_jax.flash_attn.using("mosaic"), **options)
    assert "fuel_attention_hopper" in lowered(f, q, q, q, alibi, k_len)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "everything"])
def test_hoppers_gradients_lower(width, options):
    q, k = (jax.ShapeDtypeStruct((2, h, 504, width), "bfloat16") for h in (4, 2))
    alibi, k_len = jax.ShapeDtypeStruct((4,), "bfloat16"), jax.ShapeDtypeStruct((2,), "int32")

    def gradient(q, k, v, do, *more):
        f = lambda q, k, v: fuel_jax.flash_attn.using("mosaic")(q, k, v, *more, **options)
        return jax.vjp(f, q, k, v)[1](do)

    text = lowered(gradient, q, k, k, q, *((alibi, k_len) if options else ()))
    for part in ("hopper_query_gradients", "hopper_key_gradients", "query_gradients_mend"):
        assert f"fuel_attention_{part}" in text
    assert ("fuel_attention_key_gradients_mend" in text) == bool(options)


def test_hoppers_attention_lowers_for_parts_of_many():
    """Under ``vmap`` and in ``shard_map``, which checks what varies over which devices."""
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("b",), axis_types=auto, abstract_device=H200)
    x = jax.ShapeDtypeStruct((4, 1, 2, 64, 64), "bfloat16")
    attend = jax.vmap(lambda q, k, v: fuel_jax.flash_attn.using("mosaic")(q, k, v, causal=True))
    part = jax.shard_map(attend, mesh=mesh, in_specs=P("b"), out_specs=P("b"))
    gradient = lambda q, k, v, do: jax.vjp(part, q, k, v)[1](do)
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(gradient).trace(x, x, x, x).lower(lowering_platforms=("cuda",))
    assert program.as_text().count("@mosaic_gpu") == 3


def test_paged_attention_lowers():
    q, pages = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 32, 1, 128), (9999, 16, 8, 128)))
    table, lens = (jax.ShapeDtypeStruct(s, "uint32") for s in ((64, 256), (64,)))
    assert "fuel_attention" in lowered(fuel_jax.paged_attn, q, pages, pages, table, lens)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 3), "float64", "float64 is left to XLA"),
        ((2, 0), "float32", "nothing to compute"),
        ((2**16, 2**15), "bfloat16", "2³¹ elements and more"),
    ],
)
def test_what_no_kernel_takes(shape, dtype, reason):
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct(shape, dtype)
        assert reason in fuel_jax.softmax_last_dim.explain(x).forward[0].why_not


def test_without_triton_the_ops_go_on(monkeypatch):
    monkeypatch.setattr(_launch, "triton", lambda: None)
    x = jnp.ones((1024, 8192), "bfloat16")
    first, last = fuel_jax.softmax_last_dim.explain(x).forward
    assert "no Triton backend" in first.why_not
    assert last.serves == ("default",)
    with pytest.raises(fuel_jax.UnsupportedKernel, match="no Triton backend"):
        fuel_jax.softmax_last_dim.using("triton")(x)
