"""Every kernel lowers for an H200, on a machine without a GPU; and what happens without Triton."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

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
