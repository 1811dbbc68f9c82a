"""What is true of inplace_affine in particular: it is affine, and takes the buffer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax import FusedOps, affine
from fuel_jax.fused.inplace_affine import inplace_affine

from ..refused import refused


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "uint8"])
def test_is_affine_to_the_bit(dtype, draw):
    x = (draw((3, 37)) * 4).astype(dtype)
    given = {"mul": 2, "add": 3} if "int" in dtype else {"mul": 2.5, "add": -1.0}
    want = affine(x, **given)
    got = inplace_affine(x, **given)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def test_an_eager_call_deletes_the_array(draw):
    x = draw((3,))
    inplace_affine(x, mul=2.0, add=1.0)
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        x + 1


def test_a_second_reference_sees_the_deletion(draw):
    x = draw((3,))
    also = x
    inplace_affine(x, mul=2.0, add=1.0)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(also)


def test_a_numpy_array_keeps_its_values():
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(inplace_affine(x, mul=2.0, add=1.0), [3, 3, 3])
    np.testing.assert_array_equal(x, [1, 1, 1])


def test_a_donated_argument_of_jit_is_aliased(draw):
    f = jax.jit(lambda x: inplace_affine(x, mul=2.0, add=1.0), donate_argnums=0)
    text = f.lower(draw((64,))).compile().as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, \{\}", text)


def test_gradient_is_affine_s(draw):
    x = draw((5,))
    f = lambda op: jax.grad(lambda x: jnp.sin(op(x, mul=2.5, add=-1.0)).sum())
    want = f(affine)(x)
    np.testing.assert_array_equal(f(inplace_affine)(jnp.array(x)), want)
    np.testing.assert_array_equal(jax.jit(f(inplace_affine))(x), want)


def test_its_place_in_the_registry():
    assert inplace_affine.id == FusedOps.INPLACE_AFFINE == 16
    assert inplace_affine.destructive_input == 0


def test_bad_calls(draw):
    x = jnp.arange(3, dtype="uint8")
    refused(inplace_affine, x, mul=0.5, add=0, match="'mul' is 0.5 and 'x' is uint8")
    refused(inplace_affine, x, mul=1, add=256, match="'add' is 256.* from 0 to 255")
    refused(inplace_affine, draw((2,)), mul="2", add=0, match="'mul' is '2'; it must be a number")
    refused(inplace_affine, draw((2,)), mul=2.0, match="parameter 'add' is missing")
    refused(inplace_affine, 1.0, mul=2.0, add=1.0, match="'x' is 1.0; it must be an array")
