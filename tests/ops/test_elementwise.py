"""Edges of the elementwise ops, against NumPy and SciPy in float64.

XLA flushes subnormals of F32, F64 and BF16 to zero on the CPU; those of F16, which is computed in
float32, are kept.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuel_jax as F

from ..contract import compiled
from ..refused import refused

special = pytest.importorskip("scipy.special", reason="jax depends on it: the oracle of erf")

INF, NAN = np.inf, np.nan
FLOATS = ("float32", "float64", "bfloat16", "float16")
SIGNED, UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
INTS = SIGNED + UNSIGNED
every_float = pytest.mark.parametrize("dtype", FLOATS)
every_int = pytest.mark.parametrize("dtype", INTS)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of inf − inf and 1 / 0

EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-23, "float16": 2.0**-23}
ROUND = {"float32": 0, "float64": 0, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # once, at the end


def stored(values, dtype):
    """The values as ``dtype`` holds them, and those as float64."""
    x = np.asarray(values, np.float64).astype(jnp.dtype(dtype))  # NumPy's cast compiles nothing
    return jax.device_put(x), x.astype(np.float64)


def in_each(f, xs):
    """``(name, f of x)`` of each of several, compiled as one program: a sixth of the time."""
    return jax.jit(lambda xs: {name: f(*x) for name, x in xs.items()})(xs).items()


def agree(got, want, dtype, ulps=4.0, least=0.0):
    """Equal where ``want`` is special, else within ``ulps`` of the computation and one rounding."""
    assert got.dtype == dtype
    got = np.asarray(got).astype(np.float64)
    kept = np.asarray(want).astype(jnp.dtype(dtype)).astype(np.float64)  # may overflow there
    finite = np.isfinite(kept)
    np.testing.assert_array_equal(got[~finite], kept[~finite])
    flushed = 2.0**-25 if dtype == "float16" else float(jnp.finfo(dtype).tiny)
    bound = (ulps * EPS[dtype] + ROUND[dtype]) * np.abs(want) + flushed + least
    assert (np.abs(got - want) <= bound)[finite].all(), (got, want)


def grid(dtype):
    """Both signs of zero, small, ordinary, large and infinite numbers, and NaN."""
    f = jnp.finfo(dtype)
    points = [0, 1e-4, 0.25, 0.5, 1, 1.5, 2.5, 3.7, 5, 5.5, 6, 8, 10, 20, 30, 80, 88, 89, 104]
    points += [201.7, 548.3, 1e4, 6e4, float(f.tiny), float(f.max), INF]
    points += [float(f.smallest_subnormal)] if dtype == "float16" else []
    return stored([s * p for p in points for s in (1, -1)] + [NAN], dtype)


# -- functions of one array -----------------------------------------------------------------

few = lambda x: 4.0  # units in the last place of the dtype computed in

# name: (oracle, admitted error as a function of |x|)
UNARY = {
    "relu": (lambda x: np.where(x < 0, 0, x), few),
    "neg": (np.negative, few),
    "sqr": (np.square, few),
    "sqrt": (np.sqrt, few),
    "recip": (lambda x: 1 / x, few),
    "abs": (np.abs, few),
    "tanh": (np.tanh, few),
    "exp": (np.exp, few),
    "log": (np.log, few),
    "sin": (np.sin, few),
    "cos": (np.cos, few),
    "sigmoid": (special.expit, few),
    "silu": (lambda x: np.where(np.isinf(x) & (x < 0), NAN, x * special.expit(x)), few),
    "step": (lambda x: np.where(x > 0, 1.0, 0.0), few),
    "floor": (np.floor, few),
    "ceil": (np.ceil, few),
    "round": (np.round, few),
    "sign": (np.sign, few),
    "erf": (special.erf, few),
    # Rounding the argument of erfc is amplified by its slope, x².
    "gelu": (lambda x: 0.5 * x * special.erfc(-x * math.sqrt(0.5)), lambda x: 4 + x * x),
    "rsqrt": (lambda x: 1 / np.sqrt(x), few),
}


@pytest.mark.parametrize("name", UNARY)
def test_values(name):
    oracle, ulps_at = UNARY[name]
    for dtype, y in in_each(getattr(F, name), {d: grid(d)[:1] for d in FLOATS}):
        _, v = grid(dtype)
        ulps = np.where(np.isfinite(v), ulps_at(np.minimum(np.abs(v), 100)), 0)
        # x / (1 + e⁻ˣ) is −0 where e⁻ˣ overflows.
        least = 1e-36 if name == "silu" and dtype != "float64" else 0.0
        agree(y, oracle(v), dtype, ulps, least)


@every_float
def test_gelu_tanh_is_the_tanh_form(dtype):
    """½(1 + tanh u) is σ(2u), which keeps its tail: PyTorch's is −2.98e-7 at −5, for −2.29e-7."""
    x, v = grid(dtype)
    small = np.clip(v, -60, 60)  # cubes of larger ones overflow; σ is 0 or 1 long before
    z = 2 * math.sqrt(2 / math.pi) * (small + 0.044715 * small**3)
    want = np.where(np.isneginf(v), NAN, v * special.expit(z))
    # Rounding z is amplified by its own size.
    ulps = 4 + 4 * np.minimum(np.abs(z), 1000)
    agree(F.gelu_tanh(x), want, dtype, ulps, 0.0 if dtype == "float64" else 1e-36)


def test_slope_of_gelu_tanh_between_its_tail_and_zero():
    """1 − tanh² would be off by 3.5e-6 near −4.9, where x·u′ is large."""
    x = np.linspace(-12, 12, 4801, dtype=np.float32)
    v, c = x.astype(np.float64), math.sqrt(2 / math.pi)
    z, dz = 2 * c * (v + 0.044715 * v**3), 2 * c * (1 + 3 * 0.044715 * v**2)
    want = special.expit(z) * (1 + v * special.expit(-z) * dz)
    got = jax.vjp(F.gelu_tanh, x)[1](jnp.ones_like(x))[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", [*UNARY, "gelu_tanh"])
def test_half_types_are_computed_in_float32(name):
    xs = {d: np.asarray(grid(d)[0]) for d in ("bfloat16", "float16")}
    wide = dict(in_each(getattr(F, name), {d: [x.astype("float32")] for d, x in xs.items()}))
    for dtype, y in in_each(getattr(F, name), {d: [x] for d, x in xs.items()}):
        want = np.asarray(wide[dtype]).astype(jnp.dtype(dtype))
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y, "float32"), want.astype("float32"))


def test_signs_of_zero():
    zeros = {"relu": -0.0, "sqrt": -0.0, "floor": -0.0, "round": -0.4, "ceil": -0.5, "tanh": -0.0}
    zeros |= {"sin": -0.0, "neg": 0.0, "erf": -0.0, "silu": -0.0, "gelu": -0.0, "gelu_tanh": -0.0}
    xs = {name: [stored(x, d)[0] for d in FLOATS] for name, x in zeros.items()}
    every = lambda xs: {name: [getattr(F, name)(x) for x in xs[name]] for name in xs}
    for name, ys in compiled(every)(xs).items():  # code that is not optimised may lose a sign
        for dtype, y in zip(FLOATS, ys, strict=True):
            assert y == 0, (name, dtype)
            assert np.signbit(y), (name, dtype)
    assert F.recip(jnp.float32(-0.0)) == -INF
    assert not jnp.signbit(F.abs(jnp.float32(-0.0)))


def test_round_takes_ties_to_even():
    x = jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 8388607.5], "float32")
    np.testing.assert_array_equal(F.round(x), [0, 2, 2, 0, -2, -2, 8388608])


def test_gelu_keeps_its_tail():
    """pytorch#187806: ½x(1 + erf) is 0 below −6.  The values are mpmath's, from 50 digits."""
    tail = {
        -4.0: -0.00012668496733247969,
        -5.0: -1.4332578593959696e-6,
        -5.5: -1.0444259356238246e-7,
        -6.0: -5.9195258702261888e-9,
        -8.0: -4.9767684594174273e-15,
        -12.0: -2.1317785344932148e-32,
    }
    x, want = jnp.array(list(tail)), np.array(list(tail.values()))
    np.testing.assert_allclose(F.gelu(x.astype("float32")), want, rtol=2e-5)
    np.testing.assert_allclose(F.gelu(x), want, rtol=1e-13)


def test_the_two_gelus_differ():
    one = jnp.float32(1)
    np.testing.assert_allclose(F.gelu(one), 0.8413447, atol=1e-7)
    np.testing.assert_allclose(F.gelu_tanh(one), 0.8411920, atol=1e-7)


INTEGER_UNARY = {
    "relu": lambda x: max(x, 0),
    "neg": lambda x: -x,
    "abs": abs,
    "sqr": lambda x: x * x,
    "step": lambda x: int(x > 0),
    "sign": lambda x: (x > 0) - (x < 0),
}


def extremes(dtype):
    """Python ints at and around the ends of the dtype, and zero."""
    ends = jnp.iinfo(dtype)
    low, high = int(ends.min), int(ends.max)
    wanted = {low, low + 1, -3, -1, 0, 1, 2, 7, high // 2 + 1, high - 1, high}
    return sorted(v for v in wanted if v >= low)


def wrapped(value, dtype):
    """A Python int modulo the dtype."""
    ends = jnp.iinfo(dtype)
    span = int(ends.max) - int(ends.min) + 1
    return (value - int(ends.min)) % span + int(ends.min)


@pytest.mark.parametrize("name", INTEGER_UNARY)
def test_integers_wrap(name):
    """−(−128) is −128 in I8, and −1 is 255 in U8."""
    for dtype, got in in_each(getattr(F, name), {d: [np.array(extremes(d), d)] for d in INTS}):
        assert got.dtype == dtype
        want = [wrapped(INTEGER_UNARY[name](v), dtype) for v in extremes(dtype)]
        assert got.tolist() == want, dtype


@pytest.mark.parametrize("name", sorted(set(UNARY) - set(INTEGER_UNARY)))
def test_functions_of_floats_refuse_integers(name):
    refused(getattr(F, name), jnp.arange(3), match="'x' is int64\\[3\\]; its dtype must be one of")


# -- functions of two arrays ----------------------------------------------------------------

BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "pow": np.power,
    "rem": np.remainder,
}


def pairs(dtype):
    """Every pair of a grid's numbers, in both orders."""
    f = jnp.finfo(dtype)
    points = [0, 0.5, 1, 2, 3, 7.25, 1e4, float(f.max), INF]
    _, v = stored([s * p for p in points for s in (1, -1)] + [NAN], dtype)
    a, b = np.array(list(itertools.product(v, v))).T
    (a, v), (b, w) = stored(a, dtype), stored(b, dtype)
    return (a, b), (v, w)


@pytest.mark.parametrize("name", BINARY)
def test_values_of_pairs(name):
    for dtype, y in in_each(getattr(F, name), {d: pairs(d)[0] for d in FLOATS}):
        _, (v, w) = pairs(dtype)
        want = BINARY[name](v, w)
        if dtype == "float64" and name == "rem":  # NumPy's own float64 is no oracle of itself
            exact = lambda x, y: math.fmod(x, y) if math.isfinite(x) and y and x == x else NAN
            r = np.array([exact(x, y) for x, y in zip(v, w, strict=True)])
            want = np.where((r != 0) & ((r < 0) != (w < 0)), r + w, r)
        exponent = np.abs(w * np.log(np.abs(v))) if name == "pow" else 0
        ulps = np.nan_to_num(np.minimum(exponent, 2e3), nan=0, posinf=0) + 4
        agree(y, want, dtype, ulps)


@every_float
def test_nan_wins_in_maximum_and_minimum(dtype):
    x, y = stored([NAN, 1, NAN], dtype)[0], stored([1, NAN, NAN], dtype)[0]
    assert jnp.isnan(F.maximum(x, y)).all()
    assert jnp.isnan(F.minimum(x, y)).all()


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (1.0, INF, 1.0),
        (-1.0, INF, INF),
        (1.0, -INF, -INF),
        (-1.0, -INF, -1.0),
        (INF, 3.0, NAN),
        (3.0, 0.0, NAN),
        (5.5, -2.0, -0.5),
        (-5.5, 2.0, 0.5),
        (1e10, 3.0, 1.0),
        (16777216.0, 3.0, 1.0),
        (-16777216.0, 3.0, 2.0),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rem(a, b, want, dtype):
    """The formula a − ⌊a/b⌋·b taken literally gives NaN at infinity."""
    got = F.rem(jnp.asarray([a], dtype), jnp.asarray([b], dtype))
    np.testing.assert_array_equal(got, [want])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rem_of_large_quotients_is_python_s(dtype):
    rng = np.random.default_rng(0)
    a = (rng.normal(size=300) * 10.0 ** rng.uniform(-3, 30, 300)).astype(dtype)
    b = (rng.normal(size=300) * 10.0 ** rng.uniform(-3, 3, 300)).astype(dtype)
    want = np.array([float(x) % float(y) for x, y in zip(a, b, strict=True)])
    got = np.asarray(F.rem(a, b)).astype(np.float64)
    # A remainder of the other sign than the divisor's is added to it, which rounds.
    assert (np.abs(got - want) <= EPS[dtype] * np.abs(b)).all()


def truncated(a, b):
    return -1 if b == 0 else int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


INTEGER_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": truncated,
    "maximum": max,
    "minimum": min,
    "rem": lambda a, b: a % b if b else a,
}


def couples(dtype):
    """Every pair of extremes, division by zero and of the least number by −1 among them."""
    return list(itertools.product(extremes(dtype), repeat=2))


def sides(dtype):
    """The couples as two arrays."""
    return [np.array(side, dtype) for side in zip(*couples(dtype), strict=True)]


@pytest.mark.parametrize("name", INTEGER_BINARY)
def test_integer_pairs_wrap(name):
    for dtype, got in in_each(getattr(F, name), {d: sides(d) for d in INTS}):
        assert got.dtype == dtype
        want = [wrapped(INTEGER_BINARY[name](*couple), dtype) for couple in couples(dtype)]
        assert got.tolist() == want, dtype


def test_pow_refuses_integers():
    refused(F.pow, jnp.arange(3), jnp.arange(3), match="its dtype must be one of float32")


@pytest.mark.parametrize("name", [*BINARY, "eq", "lt"])
def test_nothing_is_broadcast_nor_promoted(name, draw):
    op, x = getattr(F, name), draw((2, 3))
    refused(
        op, x, x[0], match="nothing is broadcast. Spell it: jnp.broadcast_to\\(b, \\(2, 3\\)\\)"
    )
    refused(op, x, x[:, :1], match="its axes \\*shape are \\(2, 1\\), but \\(2, 3\\) in 'a'")
    refused(op, x, x.astype("bfloat16"), match="operands share one dtype, nothing is promoted")
    refused(op, x, 1.0, match="'b' is 1.0; it must be an array")
    refused(op, x, match="array 'b' is missing")


# -- comparisons ----------------------------------------------------------------------------

COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name):
    """NaN compares false, but for ne; the zeros are equal."""
    for dtype, got in in_each(getattr(F, name), {d: pairs(d)[0] for d in FLOATS}):
        assert got.dtype == jnp.uint8
        want = COMPARISONS[name](*pairs(dtype)[1])
        np.testing.assert_array_equal(got, want, err_msg=dtype)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_integers(name):
    """In their own dtype: 2⁶³ − 1 and 2⁶³ − 2 differ."""
    for dtype, got in in_each(getattr(F, name), {d: sides(d) for d in INTS}):
        np.testing.assert_array_equal(got, COMPARISONS[name](*sides(dtype)), err_msg=dtype)


# -- where ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cond", [np.array([0, 1, 2, 255], np.uint8), np.array([0, 1, 1, 1], bool)])
def test_where_selects_by_truth(cond, draw):
    a, b = jnp.array([NAN, 2.0, 3.0, 4.0]), jnp.array([-1.0, NAN, INF, -INF])
    np.testing.assert_array_equal(F.where(cond, a, b), [-1, 2, 3, 4])
    g = jnp.array([5.0, 6.0, 7.0, 8.0])
    da, db = jax.vjp(lambda a, b: F.where(cond, a, b), a, b)[1](g)
    np.testing.assert_array_equal(da, [0, 6, 7, 8])  # Fuel multiplies by cond: 2·7
    np.testing.assert_array_equal(db, [5, 0, 0, 0])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_where_keeps_a_bad_cotangent_to_its_side(bad):
    cond = np.array([1, 0], np.uint8)
    da, db = jax.vjp(lambda a, b: F.where(cond, a, b), jnp.ones(2), jnp.ones(2))[1](
        jnp.array([bad, bad])
    )
    assert da[1] == 0
    assert db[0] == 0


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, "bool", "complex64", "float8_e4m3fn"])
def test_where_moves_any_dtype(dtype):
    a, b = jnp.array([0, 1, 1]).astype(dtype), jnp.array([1, 0, 1]).astype(dtype)
    got = F.where(np.array([1, 0, 0], np.uint8), a, b)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype("complex64"), [0, 0, 1])


def test_bad_calls_of_where(draw):
    x, cond = draw((2, 3)), np.ones((2, 3), np.uint8)
    refused(F.where, cond[0], x, x, match="'a' is .*its axes \\*shape are \\(2, 3\\), but \\(3,\\)")
    refused(F.where, cond.astype(np.int32), x, x, match="'cond' is int32.* uint8, bool")
    refused(F.where, cond, x, x.astype("float64"), match="operands share one dtype")
    refused(F.where, cond, x, match="array 'b' is missing")


# -- scalar parameters ----------------------------------------------------------------------


@every_float
def test_affine(dtype):
    x, v = stored([0, 1, -2.5, INF, -INF, NAN], dtype)
    agree(F.affine(x, mul=-2.0, add=1.0), -2 * v + 1, dtype)
    agree(F.affine(x, mul=0.1, add=0.3), 0.1 * v + 0.3, dtype)
    slope = jax.grad(lambda x: F.affine(x, mul=-2.5, add=1.0).astype("float32").sum())(x)
    np.testing.assert_array_equal(slope, np.full(6, -2.5))


@every_int
def test_affine_of_integers_wraps(dtype):
    values = extremes(dtype)
    got = F.affine(np.array(values, dtype), mul=3, add=5)
    assert got.tolist() == [wrapped(3 * v + 5, dtype) for v in values]


@every_float
def test_clamp(dtype):
    x, v = stored([-INF, -3, -1, -0.0, 0.5, 1, 2, INF, NAN], dtype)
    y = F.clamp(x, min=-1.0, max=1.0)
    np.testing.assert_array_equal(y.astype("float32"), [-1, -1, -1, 0, 0.5, 1, 1, 1, NAN])
    np.testing.assert_array_equal(F.clamp(x, min=-INF, max=INF).astype("float64"), v)
    np.testing.assert_array_equal(F.clamp(x, min=2, max=2)[:-1].astype("float32"), np.full(8, 2))
    slope = jax.grad(lambda x: F.clamp(x, min=-1.0, max=1.0).astype("float32").sum())(x)
    np.testing.assert_array_equal(slope[:-1], [0, 0, 1, 1, 1, 1, 0, 0])


@every_int
def test_clamp_of_integers(dtype):
    values = extremes(dtype)
    got = F.clamp(np.array(values, dtype), min=1, max=5)
    assert got.dtype == dtype
    assert got.tolist() == [min(max(v, 1), 5) for v in values]
    unbounded = F.clamp(np.array(values, dtype), min=-INF, max=INF)
    assert unbounded.tolist() == values
    assert F.clamp(np.array(values, dtype), min=3, max=INF).tolist() == [max(v, 3) for v in values]


@pytest.mark.parametrize("exp", [-3, -2, -1, 0, 1, 2, 3, 9])
def test_powi(exp):
    for dtype, y in in_each(lambda x: F.powi(x, exp=exp), {d: grid(d)[:1] for d in FLOATS}):
        want = np.power(grid(dtype)[1], float(exp))  # IEEE: x⁰ is 1, NaN's too; 0⁻¹ has 0's sign
        agree(y, want, dtype, ulps=4 + 2 * abs(exp))


@every_float
def test_powi_0_has_no_slope(dtype):
    x, _ = stored([0, -0.0, 2, INF, NAN], dtype)
    slope = jax.grad(lambda x: F.powi(x, exp=0).astype("float32").sum())
    np.testing.assert_array_equal(slope(x), np.zeros(5))
    np.testing.assert_array_equal(
        jax.grad(lambda x: slope(x).astype("float32").sum())(x), np.zeros(5)
    )


def test_bad_parameters(draw):
    x, ints = draw((2, 3)), jnp.arange(3, dtype="int8")
    refused(F.clamp, x, min=2.0, max=-2.0, match="'min' is 2.0 and 'max' is -2.0; .* Swap them")
    refused(F.clamp, x, min=NAN, max=1.0, match="nor be NaN")
    refused(F.clamp, ints, min=0.5, max=1, match="'min' is 0.5 and 'x' is int8")
    refused(F.clamp, ints, min=0, max=200, match="'max' is 200.*from -128 to 127")
    refused(F.clamp, x, min=0, match="parameter 'max' is missing")
    refused(F.affine, ints, mul=0.5, add=0, match="'mul' is 0.5 and 'x' is int8")
    refused(F.affine, ints, mul=1, add=NAN, match="'add' is nan")
    refused(
        F.affine, x, mul=jnp.float32(2), add=0.0, match="'mul' is float32\\[\\]; parameters are"
    )
    refused(F.affine, x, mul=True, add=0.0, match="'mul' is True; it must be a number")
    refused(F.powi, x, exp=2.0, match="'exp' is 2.0; it must be an int")
    refused(F.powi, x, exp=2**31, match="'exp' is 2147483648; it must fit in I32")
    refused(F.powi, ints, exp=2, match="its dtype must be one of float32")


# -- gradients ------------------------------------------------------------------------------


def slopes(op, *xs):
    """Reverse and forward, of the sum with respect to the first array."""
    f = lambda x: op(x, *xs[1:])
    ones = jnp.ones_like(xs[0])
    return jax.vjp(f, xs[0])[1](ones)[0], jax.jvp(f, (xs[0],), (ones,))[1]


# At x, the slope; kinks as decided, and where a factor overflows or saturates.
KINKS = {
    "relu": {0.0: 0, 1.0: 1, -1.0: 0, INF: 1, -INF: 0, NAN: 0},
    "abs": {0.0: 0, 2.0: 1, -2.0: -1, INF: 1, -INF: -1},
    "sigmoid": {0.0: 0.25, 1e4: 0, -1e4: 0, -548.3: 0, -201.7: 0, 201.7: 0, INF: 0, -INF: 0},
    "tanh": {0.0: 1, 1e4: 0, -1e4: 0, INF: 0, -INF: 0},
    "silu": {0.0: 0.5, 1e4: 1, -1e4: 0, INF: 1, -INF: 0},
    "gelu": {0.0: 0.5, 1e4: 1, -1e4: 0, INF: 1, -INF: 0},
    "gelu_tanh": {0.0: 0.5, 1e4: 1, -1e4: 0, INF: 1, -INF: 0},
    "erf": {1e4: 0, -1e4: 0, INF: 0, -INF: 0},
    "exp": {-INF: 0, 0.0: 1, INF: INF},
    "sqrt": {0.0: INF, 4.0: 0.25, INF: 0},
    "log": {0.0: INF, 2.0: 0.5, INF: 0},
    "recip": {0.0: -INF, 2.0: -0.25, INF: 0},
    "sqr": {0.0: 0, 3.0: 6, INF: INF},
}


@pytest.mark.parametrize("name", KINKS)
def test_slopes_at_kinks_and_far_out(name):
    xs = {d: stored(list(KINKS[name]), d)[:1] for d in FLOATS}
    for dtype, both in in_each(lambda x: slopes(getattr(F, name), x), xs):
        for slope in both:
            assert slope.dtype == dtype
            want = list(KINKS[name].values())
            np.testing.assert_array_equal(np.asarray(slope, "float32"), want, err_msg=dtype)


@pytest.mark.parametrize("name", ["relu", "sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "erf"])
def test_second_derivatives_vanish_far_out(name):
    slope = lambda x: slopes(getattr(F, name), x)[0].astype("float32").sum()
    xs = {d: stored([1e4, -1e4, 100, -100], d)[:1] for d in FLOATS}
    for dtype, second in in_each(jax.grad(slope), xs):
        second = np.asarray(second, "float32")
        np.testing.assert_allclose(second, np.zeros(4), atol=1e-40, err_msg=dtype)


@pytest.mark.parametrize("name", ["step", "floor", "ceil", "round", "sign"])
def test_steps_drop_the_gradient(name):
    xs = {d: grid(d)[:1] for d in FLOATS}
    for dtype, both in in_each(lambda x: slopes(getattr(F, name), x), xs):
        assert not np.any(both), dtype


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_a_tie_gives_each_half(name):
    pull = lambda a, b: jax.vjp(getattr(F, name), a, b)[1](jnp.ones_like(a))
    pair = lambda d: [stored(v, d)[0] for v in ([1, 2, 0.0, -0.0, INF], [1, 3, 0.0, 0.0, INF])]
    winner = [0.5, float(name == "minimum"), 0.5, 0.5, 0.5]
    for dtype, (da, db) in in_each(pull, {d: pair(d) for d in FLOATS}):
        np.testing.assert_array_equal(np.asarray(da, "float32"), winner, err_msg=dtype)
        np.testing.assert_array_equal(np.asarray(db, "float32"), 1 - np.array(winner))


def test_slopes_of_smooth_functions():
    """Against closed forms in float64, to what cancels in 1 − y²."""
    x = np.linspace(-3.9, 3.8, 78)
    s = special.expit(x)
    phi = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    u = math.sqrt(2 / math.pi)
    h = np.tanh(u * (x + 0.044715 * x**3))
    closed = {
        "tanh": 1 - np.tanh(x) ** 2,
        "sigmoid": s * (1 - s),
        "silu": s + x * s * (1 - s),
        "gelu": special.ndtr(x) + x * phi,
        "gelu_tanh": 0.5 * (1 + h) + 0.5 * x * (1 - h * h) * u * (1 + 3 * 0.044715 * x * x),
        "erf": 2 / math.sqrt(math.pi) * np.exp(-x * x),
        "sin": np.cos(x),
        "cos": -np.sin(x),
        "exp": np.exp(x),
    }
    bounds = {"float64": 1e-15, "float32": 5e-7}
    for name, want in closed.items():
        ys = {d: stored(x, d)[:1] for d in bounds}
        for dtype, both in in_each(lambda y: slopes(getattr(F, name), y), ys):  # noqa: B023
            bound = bounds[dtype]
            for slope in both:
                np.testing.assert_allclose(
                    slope, want, rtol=4 * bound, atol=4 * bound * np.abs(want).max(), err_msg=name
                )


def test_slopes_of_pairs(draw):
    a, b = jnp.array([2.0, -3.0, 5.5]), jnp.array([3.0, 2.0, -2.0])
    g = jnp.array([1.0, 2.0, 3.0])
    want = {
        "add": (g, g),
        "sub": (g, -g),
        "mul": (g * b, g * a),
        "div": (g / b, -g * a / b**2),
        "rem": (g, -g * jnp.floor(a / b)),
    }
    for name, both in want.items():
        got = jax.vjp(getattr(F, name), a, b)[1](g)
        for slope, closed in zip(got, both, strict=True):
            np.testing.assert_allclose(slope, closed, rtol=1e-14, err_msg=name)
    base, exponent = jnp.array([2.0, 0.5]), jnp.array([3.0, -1.5])
    da, db = jax.vjp(F.pow, base, exponent)[1](jnp.ones(2))
    np.testing.assert_allclose(da, exponent * base ** (exponent - 1), rtol=1e-14)
    np.testing.assert_allclose(db, base**exponent * jnp.log(base), rtol=1e-14)


def slopes_of_pair(op, a, b):
    """In reverse mode; in forward mode each operand alone, the other being no part of it."""
    a, b = jnp.asarray(a), jnp.asarray(b)
    one = jnp.ones_like(a)
    back = jax.vjp(op, a, b)[1](one)
    ahead = (
        jax.jvp(lambda a: op(a, b), (a,), (one,))[1],
        jax.jvp(lambda b: op(a, b), (b,), (one,))[1],
    )
    for x, y in zip(back, ahead, strict=True):
        np.testing.assert_array_equal(x, y)
    return back


def test_slope_of_a_power_whose_exponent_or_base_is_zero():
    """a⁰ is 1 for every a: its slope is 0 at 0 as well.  0ᵇ is 0 until b is negative."""
    a, b = np.array([0.0, 0, 0, 0, INF, NAN]), np.array([0.0, -0.0, 2, -2, 0, 0])
    da, db = slopes_of_pair(F.pow, a, b)
    np.testing.assert_array_equal(da, [0, 0, 0, -INF, 0, 0])
    np.testing.assert_array_equal(db, [0, 0, 0, -INF, INF, NAN])
    second = jax.grad(jax.grad(lambda a: F.pow(a, jnp.zeros_like(a))))
    np.testing.assert_array_equal([second(0.0), second(2.0)], [0, 0])


def test_slope_of_a_quotient_whose_square_is_out_of_range():
    a, b = np.float32([1e-30, 1e30, 0, 1]), np.float32([1e-25, 1e25, 1.2e-38, 0])
    da, db = slopes_of_pair(F.div, a, b)
    np.testing.assert_allclose(da, [1e25, 1e-25, 1 / 1.2e-38, INF], rtol=1e-6)
    np.testing.assert_allclose(db, [-1e20, -1e-20, 0, -INF], rtol=1e-6)
    second = jax.grad(jax.grad(F.div, 1), 1)(jnp.float64(2), jnp.float64(4))
    assert second == 2 * 2 / 4**3


def test_slope_of_a_remainder_is_that_of_the_exact_quotient():
    """1.0/0.1 rounds to 10 in float64 and to 10 in float32; 0.1 is a little more than a tenth."""
    a, b = np.array([1.0, -1, 7, 1, -1]), np.array([0.1, 0.1, -2, INF, INF])
    da, db = slopes_of_pair(F.rem, a, b)
    np.testing.assert_array_equal(da, np.ones(5))
    np.testing.assert_array_equal(db, [-9, 10, 4, 0, 1])


# -- shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_any_shape(shape):
    @jax.jit
    def every(x):
        ys = {name: getattr(F, name)(x) for name in (*UNARY, "gelu_tanh")}
        ys |= {name: getattr(F, name)(x, x) for name in (*BINARY, *COMPARISONS)}
        ys["where"] = F.where(x > 0, x, x)
        ys |= {"clamp": F.clamp(x, min=0, max=1), "affine": F.affine(x, mul=1, add=0)}
        return ys | {"powi": F.powi(x, exp=3)}

    for name, y in every(np.ones(shape, "float32")).items():
        assert np.asarray(y).shape == shape, name
