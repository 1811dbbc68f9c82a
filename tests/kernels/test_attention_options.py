"""Attention under options drawn at random, against float64: every kernel, and what halves do.

The measure is attention in halves as people write it: scores and softmax in float32, weights
rounded to halves for their product with values, and JAX's gradient of that.  A kernel may be twice
as far from float64, and three times in gradients, as root of the mean square over a result.  Where
weights are exactly 0 and 1 that form may be exact; so nothing is asked beyond the rounding of the
result to halves, and of the sums it is made of to float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuel_jax.fused import _attention_hopper as shipped, _attention_triton as triton
from pallas_kernels import (
    attention,
    attention_gradients,
    attention_hopper,
    attention_hopper_gradients,
)
from pallas_kernels._attention import Tile

from . import blocks, hopper
from .test_attention import OPTIONS, plainly

TILE = Tile(16, 16, 1, 1)
ANY = {"sq": (1, 3, 16, 33), "sk": (1, 7, 16, 33, 50), "d": (8, 16, 20), "dv": (5, 16, 33)}
EIGHTS = {"sq": (8, 64, 136, 200), "sk": (8, 72, 200, 264), "d": (64,), "dv": (64,)}
FLOAT32 = 2.0**-22
SIMULATIONS = {"blocks": blocks, "pages": blocks, "hopper": hopper}


class Case(NamedTuple):
    """Operands, options, and which keys a query sees, ``[b, 1, sq, sk]``."""

    arrays: dict[str, Any]
    params: dict[str, Any]
    lengths: np.ndarray | None
    seen: np.ndarray
    ahead: np.ndarray  # key − query, alike
    how: dict[str, Any]


def drawn(i, kernel):
    """The ``i``-th of them."""
    rng = np.random.default_rng([7, i])
    pick = lambda *choices: choices[rng.integers(len(choices))]
    b, hk, g = pick(1, 2), pick(1, 2), pick(1, 2, 3)
    sq, sk, d, dv = (pick(*x) for x in (EIGHTS if kernel == "hopper" else ANY).values())
    h, dtype = hk * g, pick("bfloat16", "float16")
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    arrays = {"q": normal(b, h, sq, d), "k": normal(b, hk, sk, d), "v": normal(b, hk, sk, dv)}
    arrays["q"] = (arrays["q"] * pick(1, 1, 30, 300, 3000)).astype(dtype)  # scores to 1e4
    arrays["alibi"] = rng.uniform(0, 1, h).astype(dtype) if pick(0, 0, 1) else None
    dlse = rng.normal(size=(b, h, sq)).astype(np.float32)
    arrays |= {"do": normal(b, h, sq, dv), "dlse": dlse if pick(0, 0, 1) else None}
    params = {"causal": pick(False, True), "softcap": pick(None, None, 2.0, 30.0)}
    params |= {"window_size_left": pick(None, None, 0, 3, 20), "softmax_scale": pick(None, -0.3)}
    params |= {"window_size_right": pick(None, None, 0, 5)}
    if kernel == "pages":
        params |= {"causal": True, "window_size_left": None, "window_size_right": None}
    each = rng.integers(0, sk + 1, b)
    k_len = pick(None, None, int(each[0]), jnp.int32(each[0]), jnp.asarray(each, "int32"))
    lengths = triton.lengths_of(k_len, b, sk)
    lengths = None if lengths is None else np.asarray(lengths)
    length = np.full(b, sk) if lengths is None else lengths
    length = length.reshape(-1, 1, 1, 1)
    ahead = np.arange(sk) - (np.arange(sq)[:, None] + length - sq)
    seen = np.arange(sk) < np.broadcast_to(length, (b, 1, sq, 1))
    left, right = params["window_size_left"], 0 if params["causal"] else params["window_size_right"]
    seen = seen & (True if left is None else ahead >= -left)
    seen = seen & (True if right is None else ahead <= right)
    how = {"parts": pick(1, 1, 2, 3), "packed": pick(False, True), "page": pick(1, 3, 8)}
    how |= {"bad": pick(np.nan, np.inf, -np.inf)}
    return Case(arrays, params, lengths, seen, ahead, how)


def each_head(case, dtype):
    """q, k, v, do in a dtype, for every query head; keys nobody counts are 0."""
    q, k, v, do = (case.arrays[n].astype(dtype) for n in ("q", "k", "v", "do"))
    g = q.shape[1] // k.shape[1]
    return q, np.repeat(k, g, 1), np.repeat(v, g, 1), do


def scores(case, s):
    """Capped, with slopes, masked; and what a cap's slope is."""
    (cap, alibi), bend = (case.params["softcap"], case.arrays["alibi"]), 1
    if cap is not None:
        s, bend = (
            cap * np.tanh(s / s.dtype.type(cap)),
            1 - np.square(np.tanh(s / s.dtype.type(cap))),
        )
    if alibi is not None:
        s = s - alibi.astype(s.dtype)[:, None, None] * np.abs(case.ahead).astype(s.dtype)
    return np.where(case.seen, s, -np.inf).astype(s.dtype), bend


def softmax(s):
    """Weights, 0 in rows that see nothing, and the log-sum-exp."""
    m = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    total = np.where(total == 0, 1, total)
    return e / total, (m + np.log(total))[..., 0]


@np.errstate(invalid="ignore")  # NumPy's products of small matrices say so of what is finite
def attended(case, dtype):
    """By the definition in float64, or as people write it in halves with sums in float32."""
    wide = np.float64 if dtype == "float64" else np.float32
    q, k, v, do = (x.astype(wide) for x in each_head(case, dtype))
    rounded = lambda x: x.astype(dtype).astype(wide)
    turned = lambda x: np.swapaxes(x, -1, -2)
    scale, far = wide(case.params["softmax_scale"] or q.shape[-1] ** -0.5), np.abs(case.ahead)
    s, bend = scores(case, q @ turned(k) * scale)
    p, lse = softmax(s)
    dp = rounded(do @ turned(v))
    dlse = 0 if case.arrays["dlse"] is None else case.arrays["dlse"].astype(wide)[..., None]
    along = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse)
    ds = along * bend * scale
    b, hk = case.arrays["k"].shape[:2]
    shared = lambda x: x.reshape(b, hk, -1, *x.shape[2:]).sum(2)
    found = {"o": p.astype(dtype).astype(wide) @ v, "dq": ds @ k}
    found |= {"dk": shared(rounded(turned(ds) @ q)), "dv": shared(rounded(turned(rounded(p)) @ do))}
    found = {name: rounded(x) for name, x in found.items()}
    found |= {"lse": lse, "dslopes": -(along * far).sum((0, 2, 3))}
    # By how much of what, in units of float32: scores of sums of products, weights of scores, and
    # slopes of the terms that they are differences of.
    least = {"lse": (np.abs(q) @ turned(np.abs(k))) * abs(scale) + (case.params["softcap"] or 0)}
    loose = p * (1 - p) * least["lse"]
    terms = (p + loose) * (np.abs(do) @ turned(np.abs(v)) + np.abs(dlse)) * abs(scale)
    # The gradient is given log-sum-exps in float32, rounded, and once more in powers of two.  Each
    # is off by up to 2⁻²⁴ of itself, both by 0.6 of that as root of squares: less than a fifth of a
    # unit.
    given = loose + p * np.where(np.isfinite(lse), np.abs(lse), 0)[..., None] / 5
    least |= {"o": loose @ np.abs(v), "dv": shared(turned(given) @ np.abs(do))}
    least |= {"dq": terms @ np.abs(k), "dk": shared(turned(terms) @ np.abs(q))}
    return found, least | {"dslopes": (terms * far).sum((0, 2, 3)) / abs(scale)}


def rms(x):
    return np.sqrt(np.mean(np.square(x.astype(np.float64))))


def errors(case, got):
    """How far each result is off, and how far it may be: once."""
    dtype = case.arrays["q"].dtype
    (want, least), (plain, _) = attended(case, "float64"), attended(case, dtype)
    for name in got.keys() - {"lse"}:
        theirs, rounding = rms(plain[name] - want[name]), rms(want[name]) * jnp.finfo(dtype).eps / 4
        off = rms(got[name].astype(np.float64) - want[name])
        yield name, off, max(theirs, rounding, rms(least[name]) * FLOAT32, 1e-9)
    some = np.isfinite(want["lse"])
    np.testing.assert_array_equal(np.isneginf(got["lse"]), ~some)
    off = np.abs(got["lse"][some] - want["lse"][some]).max(initial=0)
    yield "lse", off, FLOAT32 * max(least["lse"].max(initial=1), np.abs(case.ahead).max())


def both(case, attend, gradients, forward, backward):
    """Results and gradients; keys that nobody sees hold anything."""
    x, sk = case.arrays, case.seen.shape[-1]
    unseen, empty = ~case.seen.any((1, 2))[:, None, :, None], ~case.seen.any(-1)
    k, v = (np.where(unseen, x[n].dtype.type(case.how["bad"]), x[n]) for n in ("k", "v"))
    rules = triton.rules_of(x["q"], sk, **case.params)
    o, lse = attend(x["q"], k, v, x["alibi"], case.lengths, rules=rules, **forward)
    # Nor does what is asked of rows that see nothing say anything.
    do = np.where(empty[..., None], x["do"].dtype.type(np.nan), x["do"])
    dlse = None if x["dlse"] is None else np.where(empty, np.float32(np.nan), x["dlse"])
    dq, dk, dv, dslopes = gradients(
        *(x["q"], k, v, o, lse, do, dlse, x["alibi"], case.lengths), rules=rules, **backward
    )
    got = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return got if dslopes is None else got | {"dslopes": dslopes.sum((0, 2))}


def by_blocks(case):
    """The kernels for blocks."""
    how = {n: case.how[n] for n in ("parts", "packed")} | {"tile": TILE}
    tiles = {"of_keys": TILE, "of_queries": TILE}
    return both(case, attention.attend, attention_gradients.gradients, how, tiles)


def by_pages(case):
    """Keys and values in pages, of which those beyond the length are not there."""
    x, (b, hk, sk, _), page = case.arrays, case.arrays["k"].shape, case.how["page"]
    m = -(-sk // page)
    lengths = np.full(b, sk, "int32") if case.lengths is None else case.lengths
    table = np.random.default_rng(0).permutation(b * m).astype("int32").reshape(b, m)

    def cut(y):
        pages = np.full((b * m, page, hk, y.shape[-1]), case.how["bad"], y.dtype)
        for sequence, t in np.ndindex(b, sk):
            if t < lengths[sequence]:
                pages[table[sequence, t // page], t % page] = y[sequence, :, t]
        return pages

    k, v = cut(x["k"]), cut(x["v"])
    table = np.where(np.arange(m) * page < lengths[:, None], table, 2**30)
    how = {n: case.how[n] for n in ("parts", "packed")} | {"tile": TILE, "table": table}
    rules = triton.rules_of(x["q"], m * page, **case.params)
    o, lse = attention.attend(x["q"], k, v, x["alibi"], lengths, rules=rules, **how)
    return {"o": o, "lse": lse}


def by_hopper(case):
    """Hopper's kernels."""
    tile, mending, d = Tile(64, 64, 8, 2), Tile(32, 32, 1, 1), case.arrays["q"].shape[-1]
    backward = {"of_keys": shipped.OF_KEYS[d], "of_queries": shipped.OF_QUERIES[d]}
    backward |= {"mending": (mending, mending)}
    gradients = attention_hopper_gradients.gradients
    forward = {"tile": tile, "mending": mending, "programs": case.how["parts"]}
    return both(case, attention_hopper.attend, gradients, forward, backward)


BY = {"blocks": by_blocks, "pages": by_pages, "hopper": by_hopper}
COUNT = {"blocks": 100, "pages": 100, "hopper": 6}
SATURATED = 72  # an example without slopes, whose scores go to 600
TIMES = {"o": 2, "lse": 1}  # of what halves are off


@pytest.mark.parametrize("kernel", BY)
def test_errors_are_those_of_halves(monkeypatch, request, kernel):
    n = request.config.getoption("--attention-examples") or COUNT[kernel]
    for i in range(n):
        case = drawn(i, kernel)
        with SIMULATIONS[kernel].simulated(monkeypatch):
            got = BY[kernel](case)
        for name, off, unit in errors(case, got):
            told = f"example {i}: {name} is {off / unit:.2f} times as far off as halves, {case}"
            assert off <= TIMES.get(name, 3) * unit, told


def test_rounding_the_result_is_what_is_taken_back(monkeypatch):
    """Without that, gradients of one weight near 1 are off by more than thrice as much."""
    gradients = attention_gradients.gradients
    less = functools.partial(gradients, whole=False)
    monkeypatch.setattr(attention_gradients, "gradients", less)
    case = drawn(SATURATED, "blocks")
    with blocks.simulated(monkeypatch):
        got = by_blocks(case)
    off = {name: off / unit for name, off, unit in errors(case, got)}
    assert off["o"] < 2
    assert min(off["dq"], off["dk"]) > 3


def test_hopper_finds_rows_whose_weight_is_on_one_key(monkeypatch):
    """And would be off by more than thrice as much if it did not."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype("bfloat16")
    arrays = {
        "q": normal(1, 2, 64, 64) * 20,
        "k": normal(1, 1, 200, 64),
        "v": normal(1, 1, 200, 64),
    }
    arrays |= {"do": normal(1, 2, 64, 64), "alibi": None, "dlse": None}
    params = OPTIONS
    seen, ahead = np.ones((1, 1, 64, 200), bool), np.zeros((1, 1, 64, 200), int)
    case = Case(arrays, params, None, seen, ahead, {"bad": np.nan, "parts": 1})
    for most, missed in ((attention_hopper_gradients.LOST, False), ({"bfloat16": 1e9}, True)):
        monkeypatch.setattr(attention_hopper_gradients, "LOST", most)
        with hopper.simulated(monkeypatch):
            got = by_hopper(case)
        off = {name: off / unit for name, off, unit in errors(case, got)}
        assert max(off["o"], off["dk"], off["dv"]) < 2
        assert (off["dq"] > 3) == missed


def test_hopper_leaves_rows_whose_weight_is_on_some_of_many_keys(monkeypatch):
    """What is lost is compared with the whole of a row's gradient, and is little beside it."""
    rng, marked, sk = np.random.default_rng(1), [], 1024
    normal = lambda *shape: rng.normal(size=shape).astype("bfloat16")
    arrays = {"q": (3 * normal(1, 1, 64, 64)).astype("bfloat16"), "k": normal(1, 1, sk, 64)}
    arrays |= {"v": normal(1, 1, sk, 64), "do": normal(1, 1, 64, 64), "alibi": None, "dlse": None}
    seen, ahead = np.ones((1, 1, 64, sk), bool), np.zeros((1, 1, 64, sk), int)
    case = Case(arrays, OPTIONS, None, seen, ahead, {"bad": np.nan, "parts": 1})
    marks_of = attention_hopper_gradients.marks_of
    mark = lambda rows, size: marked.append(rows.any()) or marks_of(rows, size)
    monkeypatch.setattr(attention_hopper_gradients, "marks_of", mark)
    with hopper.simulated(monkeypatch):
        got = by_hopper(case)
    assert marked == [False]
    assert all(off < 2 * unit for _, off, unit in errors(case, got))


def test_people_write_what_errors_are_measured_by():
    """The measure is what JAX makes of :func:`plainly`."""
    case = drawn(SATURATED, "blocks")
    x, params = case.arrays, case.params
    case = case._replace(arrays=x | {"dlse": None})
    f = functools.partial(
        plainly,
        seen=case.seen,
        alibi=None,
        scale=params["softmax_scale"] or x["q"].shape[-1] ** -0.5,
        softcap=params["softcap"],
    )
    o, pull = jax.vjp(f, *(jnp.asarray(x[n]) for n in "qkv"))
    want, _ = attended(case, x["q"].dtype)
    for name, got in zip(("o", "dq", "dk", "dv"), (o, *pull(jnp.asarray(x["do"]))), strict=True):
        got = np.asarray(got, np.float64)
        assert rms(got - want[name]) < rms(want[name]) * jnp.finfo(x["q"].dtype).eps / 2, name
