"""Elementwise ops.  One row per op; the row is the whole definition.

Half types are computed in float32 and rounded once, F64 in float64, integers as they are.  Where
JAX's own derivative is not the wanted one (ties, kinks, overflow), the row gives it, as a function
of ``x``, the result ``y`` and the tangent ``t``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._called import Binary, Unary
from .._op import Op, Precision
from ..numerics import is_float, lifted, wide
from ..op_kind import OpKind as K
from ..registry import enter, op
from ..types import Anything, Array, Floats, Mask, Numbers
from ._normal import erf as erf_in_parts, erf_jvp
from ._slopes import (
    Jvp,
    gelu_by_tail,
    gelu_core,
    gelu_jvp,
    gelu_tanh_core,
    gelu_tanh_jvp,
    silu_core,
    with_jvp,
    with_partials,
)

PRECISION = Precision(float32=2e-6)


def spread(shape: Sequence[int], low: float, high: float) -> np.ndarray:
    """Example data over a function's domain, in no order."""
    n = math.prod(shape)
    if n == 1:
        return np.full(shape, 0.3 * low + 0.7 * high, np.float32)
    order = np.random.default_rng(0).permutation(n)
    return np.linspace(low, high, n)[order].reshape(shape).astype(np.float32)


def described(body: Callable[..., Any], kind: K, formula: str, args: str) -> Callable[..., Any]:
    """The body with a name and a page."""
    body.__name__ = body.__qualname__ = kind.as_str()
    body.__doc__ = f"{formula}\n\nArgs:\n{args}\n\nReturns:\n    An array like the first."
    return body


def unary(
    kind: K, f: Callable[[Array], Array], formula: str, jvp: Jvp | None = None,
    dtypes: Any = Floats, domain: tuple[float, float] = (-4.03, 3.96),
) -> Unary:
    """Row of a function of one array."""
    core = with_jvp(f, jvp)

    def body(x):
        return core(lifted(x)).astype(x.dtype)

    body.__annotations__ = {"x": dtypes[Array, "*shape"], "return": dtypes[Array, "*shape"]}
    args = f"    x: any shape; {'floats or integers' if dtypes is Numbers else 'floats'}."
    examples = lambda: ({"x": spread(s, *domain)} for s in ((3, 37), ()))
    return enter(
        Op(described(body, kind, formula, args), kind=kind, precision=PRECISION, splits="*shape", examples=examples)
    )


def binary(
    kind: K, f: Callable[[Array, Array], Array], formula: str, dtypes: Any = Numbers,
    left: tuple[float, float] = (-3.03, 2.96), right: tuple[float, float] = (0.5, 4.0),
) -> Binary:
    """Row of a function of two arrays of equal shape and dtype."""

    def body(a, b):
        return f(lifted(a), lifted(b)).astype(a.dtype)

    note = dtypes[Array, "*shape"]
    body.__annotations__ = {"a": note, "b": note, "return": note}
    args = "    a: any shape.\n    b: shape and dtype of ``a``."
    examples = lambda: ({"a": spread(s, *left), "b": spread(s, *right)} for s in ((3, 37), ()))
    return enter(
        Op(described(body, kind, formula, args), kind=kind, precision=PRECISION, splits="*shape", examples=examples)
    )


def comparison(kind: K, f: Callable[[Array, Array], Array], formula: str) -> Binary:
    """Row of a comparison: a U8 mask."""

    def body(a, b):
        return f(a, b).astype(jnp.uint8)

    numbers: Any = Numbers
    mask: Any = Mask
    note = numbers[Array, "*shape"]
    body.__annotations__ = {"a": note, "b": note, "return": mask[Array, "*shape"]}
    args = "    a: any shape.\n    b: shape and dtype of ``a``."
    described(body, kind, formula, args)
    page = body.__doc__ or ""
    body.__doc__ = page.replace("An array like the first.", "U8, 1 where true, 0 elsewhere.")
    x = np.array([0.5, -1, 2, 2, 0, -0.0], np.float32)
    examples = lambda: ({"a": x, "b": x[::-1].copy()}, {"a": x[0], "b": x[0]})
    return enter(Op(body, kind=kind, precision=PRECISION, splits="*shape", examples=examples))


def select_sign(x: Array, y: Array, t: Array) -> Array:
    """|x|′, 0 at 0."""
    return jnp.sign(x) * t


def remainder(a: Array, b: Array) -> Array:
    """Exact, with the sign of the divisor."""
    r = lax.rem(a, b)
    wrong = (r != 0) & ((r < 0) != (b < 0))
    return jnp.where(wrong, r + b, r)


def floored(a: Array, b: Array) -> Array:
    """⌊a/b⌋ of the exact quotient: 1.0/0.1 rounds to 10, and is less."""
    r = lax.rem(a, b)
    wrong = (r != 0) & ((r < 0) != (b < 0))
    return lax.round((a - r) / b, NEAREST_EVEN) - wrong.astype(a.dtype)


NEAREST_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN

quotient: Callable[..., Array] = with_partials(
    lax.div,
    lambda a, b, y, t: quotient(t, b),
    # Not y / b, of which XLA makes a / b²: that leaves the range of numbers first.
    lambda a, b, y, t: -t * (y * quotient(jnp.ones_like(b), b)),
)
power: Callable[..., Array] = with_partials(
    lax.pow,
    lambda a, b, y, t: t * (b * power(jnp.where(b == 0, 1, a), b - 1)),  # a⁰ is 1, also at 0
    lambda a, b, y, t: t * (y * jnp.log(jnp.where((a == 0) & (b >= 0), 1, a))),
)
floor_mod: Callable[..., Array] = with_partials(
    remainder, lambda a, b, y, t: t, lambda a, b, y, t: -floored(a, b) * t
)
POSITIVE = (0.1, 6.0)

# fmt: off
#                  kind                   f(x)                                         formula                                 derivative, dtypes, domain
relu: Unary      = unary(K.ReluElementwise,      lambda x: jnp.where(x < 0, 0, x),            "max(0, x).  NaN and −0 pass.",         lambda x, y, t: jnp.where(x > 0, t, 0), Numbers)
neg: Unary       = unary(K.NegElementwise,       jnp.negative,                                "−x.",                                  dtypes=Numbers)
sqr: Unary       = unary(K.SqrElementwise,       lambda x: x * x,                             "x².",                                  dtypes=Numbers)
sqrt: Unary      = unary(K.SqrtElementwise,      jnp.sqrt,                                    "√x.  NaN for x < 0; √−0 = −0.",        domain=POSITIVE)
recip: Unary     = unary(K.RecipElementwise,     lambda x: 1 / x,                             "1 / x.  ±inf at ±0.",                  domain=POSITIVE)
abs: Unary       = unary(K.AbsElementwise,       jnp.abs,                                     "|x|.  Its derivative at 0 is 0.",      select_sign, Numbers)
tanh: Unary      = unary(K.TanhElementwise,      jnp.tanh,                                    "tanh x.")
exp: Unary       = unary(K.ExpElementwise,       jnp.exp,                                     "eˣ.")
log: Unary       = unary(K.LogElementwise,       jnp.log,                                     "ln x.  −inf at 0, NaN below.",         domain=POSITIVE)
sin: Unary       = unary(K.SinElementwise,       jnp.sin,                                     "sin x.")
cos: Unary       = unary(K.CosElementwise,       jnp.cos,                                     "cos x.")
sigmoid: Unary   = unary(K.SigmoidElementwise,   lax.logistic,                                "1 / (1 + e⁻ˣ).")
silu: Unary      = unary(K.SiluElementwise,      silu_core,                                   "x / (1 + e⁻ˣ).  NaN at −inf.")
gelu_tanh: Unary = unary(K.GeluTanhElementwise,  gelu_tanh_core,                              "½x(1 + tanh(√(2/π)(x + 0.044715x³))), its tail kept.  NaN at −inf.", gelu_tanh_jvp)
step: Unary      = unary(K.StepElementwise,      lambda x: jnp.where(x > 0, 1, 0),            "1 where x > 0, else 0, also at NaN.  Drops the gradient.", dtypes=Numbers)
floor: Unary     = unary(K.FloorElementwise,     jnp.floor,                                   "⌊x⌋.  Drops the gradient.")
ceil: Unary      = unary(K.CeilElementwise,      jnp.ceil,                                    "⌈x⌉.  Drops the gradient.")
round: Unary     = unary(K.RoundElementwise,     lambda x: lax.round(x, NEAREST_EVEN),        "Nearest integer, ties to even.  Drops the gradient.")
sign: Unary      = unary(K.SignElementwise,      jnp.sign,                                    "−1, 0 or 1; NaN at NaN.  Drops the gradient.", dtypes=Numbers)
erf: Unary       = unary(K.ErfElementwise,       erf_in_parts,                                "2/√π ∫₀ˣ e⁻ᵗ² dt.",                    erf_jvp)
gelu: Unary      = unary(K.GeluElementwise,      gelu_core,                                   "½x(1 + erf(x/√2)), its tail kept.  NaN at −inf.", gelu_jvp)
rsqrt: Unary     = unary(K.RsqrtElementwise,     lax.rsqrt,                                   "1 / √x.  inf at 0, NaN below.",        domain=POSITIVE)

#                  kind                   f(a, b)       formula
add: Binary     = binary(K.AddElementwise,        jnp.add,      "a + b.")
sub: Binary     = binary(K.SubElementwise,        jnp.subtract, "a − b.")
mul: Binary     = binary(K.MulElementwise,        jnp.multiply, "a · b.")
div: Binary     = binary(K.DivElementwise,        quotient,     "a / b.  Integers truncate toward zero; x / 0 is −1 for them.")
maximum: Binary = binary(K.MaximumElementwise,    jnp.maximum,  "max(a, b), NaN if either is.  A tie gives each half the gradient.")
minimum: Binary = binary(K.MinimumElementwise,    jnp.minimum,  "min(a, b), NaN if either is.  A tie gives each half the gradient.")
pow: Binary     = binary(K.PowElementwise,        power,        "aᵇ.  1 where b = 0; NaN where a < 0 and b is no integer.", Floats, (0.2, 3.0))
rem: Binary     = binary(K.RemElementwise,        floor_mod,    "a − ⌊a/b⌋·b, exact, with the sign of b.  rem(1, inf) = 1; NaN for b = 0.")

eq: Binary = comparison(K.EqualElementwise,        jnp.equal,         "a = b.  False where either is NaN.")
ne: Binary = comparison(K.NotEqualElementwise,     jnp.not_equal,     "a ≠ b.  True where either is NaN.")
lt: Binary = comparison(K.LessElementwise,         jnp.less,          "a < b.  False where either is NaN.")
le: Binary = comparison(K.LessEqualElementwise,    jnp.less_equal,    "a ≤ b.  False where either is NaN.")
gt: Binary = comparison(K.GreaterElementwise,      jnp.greater,       "a > b.  False where either is NaN.")
ge: Binary = comparison(K.GreaterEqualElementwise, jnp.greater_equal, "a ≥ b.  False where either is NaN.")
# fmt: on


# -- gelu in float32 on the CPU ---------------------------------------------------------------


@gelu.kernel(
    "tail",
    platforms=("cpu",),
    refuses=lambda x: "the fit is one for float32" if x.dtype == jnp.float64 else None,
)
def gelu_in_float32(x: Array) -> Array:
    """One exponential and one polynomial for both sides."""
    return gelu_by_tail(lifted(x)).astype(x.dtype)


# -- ops of three arrays, or with parameters -------------------------------------------------


def where_examples() -> Iterator[dict[str, Any]]:
    """Zeros, ones and another truth value."""
    cond = np.array([[0, 1, 2], [255, 0, 0]], np.uint8)
    yield {"cond": cond, "a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": spread((2, 3), 0, 1)}


@op(K.Where, precision=PRECISION, splits="*shape", examples=where_examples)
def where(
    cond: Mask[Array, "*shape"], a: Anything[Array, "*shape"], b: Anything[Array, "*shape"]
) -> Anything[Array, "*shape"]:
    """a where cond is not 0, else b.

    The unselected element is never looked at, nor its cotangent: NaN there does not leak.

    Args:
        cond: U8 (any nonzero is true) or bool, of the operands' shape.
        a: any shape.
        b: shape and dtype of ``a``.

    Returns:
        An array like ``a``.
    """
    return jnp.where(cond.astype(bool), a, b)


def coefficient(x: Array, name: str, value: float) -> Array:
    """A scalar parameter in the dtype ``x`` is computed in."""
    return jnp.asarray(value if is_float(x) else int(value), lifted(x).dtype)


def integral(x: Any, **given: float) -> str | None:
    """Integers take integer coefficients that fit."""
    if is_float(x):
        return None
    limits = jnp.iinfo(x.dtype)
    for name, value in given.items():
        if not limits.min <= value <= limits.max or value != int(value):
            return (
                f"parameter {name!r} is {value} and 'x' is {x.dtype.name}; it must be an integer "
                f"from {limits.min} to {limits.max}. Cast x to a float dtype first."
            )
    return None


def affine_examples() -> Iterator[dict[str, Any]]:
    """A scale and a shift."""
    yield {"x": spread((3, 37), -4, 4), "mul": -2.5, "add": 0.75}


@op(
    K.Affine,
    precision=PRECISION,
    splits="*shape",
    rejects=lambda x, *, mul, add: integral(x, mul=mul, add=add),
    examples=affine_examples,
)
def affine(x: Numbers[Array, "*shape"], *, mul: float, add: float) -> Numbers[Array, "*shape"]:
    """mul · x + add.

    Args:
        x: any shape.
        mul: factor; F32 beside F32 and half arrays.
        add: summand.

    Returns:
        An array like ``x``.
    """
    v = lifted(x)
    return (v * coefficient(x, "mul", mul) + coefficient(x, "add", add)).astype(x.dtype)


def clamp_rejects(x: Any, *, min: float, max: float) -> Any:
    """Bounds the wrong way round, or none."""
    if not min <= max:  # also when either is NaN
        return f"'min' is {min} and 'max' is {max}; min must not exceed max, nor be NaN. Swap them."
    bounds = {"min": min, "max": max}
    return integral(x, **{n: b for n, b in bounds.items() if not math.isinf(b)})


def clamp_examples() -> Iterator[dict[str, Any]]:
    """Bounds inside the data."""
    yield {"x": spread((3, 37), -4, 4), "min": -1.5, "max": 2.25}


@op(K.ClampElementwise, precision=PRECISION, splits="*shape", rejects=clamp_rejects, examples=clamp_examples)
def clamp(x: Numbers[Array, "*shape"], *, min: float, max: float) -> Numbers[Array, "*shape"]:
    """min(max(x, lo), hi).  NaN passes; the gradient passes from lo to hi, bounds included.

    Args:
        x: any shape.
        min: lower bound.
        max: upper bound, at least ``min``.

    Returns:
        An array like ``x``.

    Raises:
        ArgumentError: ``min > max``, or a bound is NaN.
    """
    v = lifted(x)
    span = jnp.finfo(v.dtype) if is_float(x) else jnp.iinfo(v.dtype)
    low, high = (
        coefficient(x, "bound", b if is_float(x) or not math.isinf(b) else int(limit))
        for b, limit in ((min, span.min), (max, span.max))
    )
    inside = (v >= low) & (v <= high)
    # Constant to autodiff outside the bounds, the identity inside: a tie passes the whole gradient.
    bounded = lax.stop_gradient(jnp.minimum(jnp.maximum(v, low), high))
    return jnp.where(inside, v, bounded).astype(x.dtype)


def powi_rejects(x: Any, *, exp: int) -> Any:
    """Exponents beyond I32."""
    if not -(2**31) <= exp < 2**31:
        return f"parameter 'exp' is {exp}; it must fit in I32."
    return None


def powi_examples() -> Iterator[dict[str, Any]]:
    """A cube, a reciprocal square, and the constant."""
    for exponent in (3, -2, 0):
        yield {"x": spread((3, 11), 0.4, 2.0), "exp": exponent}


@op(K.PowIElementwise, precision=PRECISION, splits="*shape", rejects=powi_rejects, examples=powi_examples)
def powi(x: Floats[Array, "*shape"], *, exp: int) -> Floats[Array, "*shape"]:
    """xⁿ for an integer n, by repeated multiplication; x⁰ = 1 for every x, NaN included.

    Args:
        x: any shape, floats.
        exp: the exponent n, I32; a negative one gives 1 / x⁻ⁿ.

    Returns:
        An array like ``x``.  The gradient of x⁰ is 0 everywhere.
    """
    return lax.integer_pow(wide(x), exp).astype(x.dtype)
