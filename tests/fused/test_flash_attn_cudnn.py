"""NVIDIA's attention: what it is asked for, and what it is not; it runs on a GPU alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import UnsupportedKernel, flash_attn
from fuel_jax.fused import _attention_cudnn as cudnn

from .test_flash_attn import oracle

OFF = {"softmax_scale": None, "causal": False, "softcap": None, "return_lse": False}
OFF |= {"window_size_left": None, "window_size_right": None}


@pytest.fixture
def hopper(monkeypatch):
    """As if there were one."""
    monkeypatch.setattr(cudnn, "kind_of_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(cudnn, "not_hopper", lambda: None)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 2, 5, 7), {"k_len": np.array([7, 0], np.int32), "softmax_scale": 0.3}),
        ((1, 2, 1, 6, 6), {"causal": True}),
        ((1, 2, 2, 6, 6), {"window_size_left": 2, "window_size_right": 0}),
    ],
)
def test_what_is_asked_for_is_the_op(monkeypatch, hopper, draw, shape, options):
    """The other implementation behind the same function takes the same arguments."""
    (b, h, hk, sq, sk), asked = shape, jax.nn.dot_product_attention
    instead = lambda *xs, implementation, **given: asked(*xs, implementation="xla", **given)
    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    q, k, v = (draw((b, n, s, 8), "float16") for n, s in ((h, sq), (hk, sk), (hk, sk)))
    params = OFF | {n: x for n, x in options.items() if n != "k_len"}
    operands = q, k, v, None, options.get("k_len")
    assert cudnn.refuses(*operands, **params) is None
    with jax.numpy_dtype_promotion("standard"):
        o = cudnn.forward(*operands, **params)
    np.testing.assert_allclose(o, oracle(q, k, v, **options)[0], atol=2e-3)


@pytest.fixture
def nothing(monkeypatch):
    """In the place of cuDNN."""
    zeros = lambda q, *rest, **given: jnp.zeros_like(q)
    monkeypatch.setattr(jax.nn, "dot_product_attention", zeros)


def test_no_number_of_keys_gives_nan(nothing):
    x = jnp.ones((2, 1, 4, 8), "float16")
    o = cudnn.forward(x, x, x, None, jnp.array([5, 4], "int32"), **OFF)
    assert jnp.isnan(o[0]).all()
    assert not o[1].any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32 is not a half type"),
        ({"d": 12, "dv": 12}, "a multiple of 8 and up to 256 wide, not 12"),
        ({"d": 264, "dv": 264}, "up to 256 wide, not 264"),
        ({"dv": 32}, "as wide as keys, not 32 and 64"),
        ({"sk": 0}, "nothing to compute"),
        ({"softcap": 2.0}, "no soft cap"),
        ({"alibi": jax.ShapeDtypeStruct((2,), "float16")}, "a matrix of biases"),
        ({"window_size_left": 3}, "windows end at the query"),
        ({"window_size_right": 3}, "windows end at the query"),
        ({"causal": True, "sk": 32}, "from the first key, of 32 to 16 queries"),
        ({"causal": True, "k_len": jax.ShapeDtypeStruct((), "int32")}, "know of lengths"),
        ({"return_lse": True}, "rounded to halves"),
    ],
)
def test_what_it_does_not_take(hopper, change, reason):
    size = {"d": 64, "dv": 64, "sk": 16, "dtype": "bfloat16", "alibi": None, "k_len": None} | change
    of = lambda n, d: jax.ShapeDtypeStruct((1, 2, n, d), size["dtype"])
    q, k, v = of(16, size["d"]), of(size["sk"], size["d"]), of(size["sk"], size["dv"])
    params = {n: size.get(n, default) for n, default in OFF.items()}
    assert reason in cudnn.refuses(q, k, v, size["alibi"], size["k_len"], **params)


def test_without_a_gpu_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(cudnn, "kind_of_gpu", lambda: "none")
    x = jnp.ones((1, 2, 16, 64), "float16")
    with pytest.raises(UnsupportedKernel, match="here is no GPU"):
        flash_attn.using("cudnn")(x, x, x)


def test_all_are_named_with_their_reasons(hopper, nothing):
    """A pin runs it where there is a GPU; it has no gradient."""
    x = jax.ShapeDtypeStruct((4, 32, 512, 128), "bfloat16")
    told = {c.kernel.name: c.says for c in flash_attn.explain(x, x, x, causal=True).forward}
    assert told.keys() >= {"mosaic", "cudnn", "triton", "chunked", "xla"}
    assert "copies every operand" in told["cudnn"]
    assert told["triton"].startswith("serves cuda")
    f = functools.partial(flash_attn.using("cudnn"), causal=True)
    with pytest.raises(UnsupportedKernel, match="rounded to halves"):
        jax.eval_shape(jax.grad(lambda q: f(q, q, q).astype("float32").sum()), x)
