"""How a JAX user without fuel_jax would write each op: the other side of every speed comparison.

``ROW`` has them all.  A row's name is its op, with a word or two when an op has several rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .plain_arrays import INDEXED, MOVED, PRODUCTS, REDUCED
from .plain_fused import FUSED
from .plain_quantised import QUANTISED
from .plain_scans import SCANS
from .row import LARGE, ODD, SMALL, SQUARE, TOKEN, Row, calls

UNARY = calls(TOKEN, SMALL, SQUARE, ODD)
COSTLY = calls(TOKEN, SMALL, SQUARE, ODD, LARGE)
POSITIVE = [([x.replace("f32", "f32+") for x in arrays], p) for arrays, p in UNARY]
BINARY = calls(TOKEN, SMALL, SQUARE, ODD, operands=2)
POWERS = [(arrays * 2, params) for arrays, params in POSITIVE]


def mask(f):
    """A comparison as a mask."""
    return lambda a, b: f(a, b).astype(jnp.uint8)


ELEMENTWISE: dict[str, Row] = {
    "relu": Row(jax.nn.relu, UNARY),
    "neg": Row(jnp.negative, UNARY),
    "sqr": Row(jnp.square, UNARY),
    "sqrt": Row(jnp.sqrt, POSITIVE),
    "recip": Row(lambda x: 1 / x, POSITIVE),
    "abs": Row(jnp.abs, UNARY),
    "tanh": Row(jnp.tanh, COSTLY),
    "exp": Row(jnp.exp, COSTLY),
    "log": Row(jnp.log, POSITIVE),
    "sin": Row(jnp.sin, UNARY),
    "cos": Row(jnp.cos, UNARY),
    "sigmoid": Row(jax.nn.sigmoid, COSTLY),
    "silu": Row(jax.nn.silu, COSTLY, torch=1.0),
    "gelu_tanh": Row(functools.partial(jax.nn.gelu, approximate=True), COSTLY),
    "gelu": Row(functools.partial(jax.nn.gelu, approximate=False), COSTLY, torch=1.0),
    "step": Row(lambda x: (x > 0).astype(x.dtype), UNARY),
    "floor": Row(jnp.floor, UNARY),
    "ceil": Row(jnp.ceil, UNARY),
    "round": Row(jnp.round, UNARY),
    "sign": Row(jnp.sign, UNARY),
    "erf": Row(lax.erf, COSTLY, torch=1.0),
    "rsqrt": Row(lax.rsqrt, POSITIVE),
    "add": Row(jnp.add, BINARY),
    "sub": Row(jnp.subtract, BINARY),
    "mul": Row(jnp.multiply, BINARY),
    "div": Row(jnp.divide, BINARY),
    "maximum": Row(jnp.maximum, BINARY),
    "minimum": Row(jnp.minimum, BINARY),
    "pow": Row(jnp.power, POWERS),
    "rem": Row(jnp.remainder, BINARY),
    "eq": Row(mask(jnp.equal), BINARY),
    "ne": Row(mask(jnp.not_equal), BINARY),
    "lt": Row(mask(jnp.less), BINARY),
    "le": Row(mask(jnp.less_equal), BINARY),
    "gt": Row(mask(jnp.greater), BINARY),
    "ge": Row(mask(jnp.greater_equal), BINARY),
    "where": Row(
        lambda c, a, b: jnp.where(c != 0, a, b),
        [([x.replace("f32", "u8<2"), x, x], {}) for x in (SMALL, SQUARE, ODD)],
    ),
    "affine": Row(
        lambda x, *, mul, add: x * mul + add, calls(SMALL, SQUARE, ODD, mul=2.5, add=0.5)
    ),
    "clamp": Row(
        lambda x, *, min, max: jnp.clip(x, min, max), calls(SMALL, SQUARE, ODD, min=-1.0, max=1.0)
    ),
    "powi": Row(
        lambda x, *, exp: x**exp, [*calls(SMALL, SQUARE, ODD, exp=3), *calls(SQUARE, exp=-2)]
    ),
    "cast": Row(lambda x, *, dtype: x.astype(dtype), calls(SMALL, SQUARE, ODD, dtype="bfloat16")),
    "masked_fill": Row(
        lambda x, m, *, value: jnp.where(m != 0, value, x),
        [([x, x.replace("f32", "u8<2")], {"value": -1.0}) for x in (SMALL, SQUARE, ODD)],
    ),
    "copy": Row(lambda x: jnp.copy(x), calls(SMALL, SQUARE, ODD)),
}

ROW = ELEMENTWISE | REDUCED | MOVED | INDEXED | PRODUCTS | FUSED | QUANTISED | SCANS
