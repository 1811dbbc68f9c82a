"""How a JAX user without fuel_jax would reduce, move, index and multiply arrays."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from .row import LARGE, ODD, SMALL, SQUARE, WIDE, Row, calls

LAST, FIRST = {"dim": -1}, {"dim": 0}
ALONG = [
    *calls(LARGE, SQUARE, SMALL, WIDE, ODD, **LAST),
    *calls(LARGE, SQUARE, **FIRST),
]
DIMS = [
    *calls(LARGE, SQUARE, SMALL, WIDE, dims=(1,)),
    *calls(LARGE, SQUARE, dims=(0,)),
    *calls(ODD, dims=(0, 2)),
]


def along(f, dims=ALONG, torch=None):
    """A function of one array and the axis."""
    return Row(lambda x, *, dim: f(x, dim), dims, torch=torch)


def over(f):
    """A reduction over axes."""
    return Row(lambda x, *, dims: f(x, dims), DIMS, torch=1.0)


def with_nan(f, x, axes, **params):
    """A maximum or minimum that is NaN where there is one: on the CPU XLA's is not."""
    return jnp.where(jnp.isnan(x).any(axes, **params), jnp.nan, f(x, axes, **params))


def pick(n, width, picked):
    """A table, and indices into it."""
    return [f"f32 {n} {width}", f"u32<{n} {picked}"]


PICKS = [pick(4096, 512, 1000), pick(50257, 768, 2048), pick(4096, 512, 1), pick(333, 65, 77)]
ADDS = [([*x, f"f32 {x[1].split()[-1]} {x[0].split()[-1]}"], FIRST) for x in PICKS]
POINTS = [
    ["f32 1024 512", "u32<1024 300 512"],
    ["f32 2048 50", "u32<2048 1 50"],
    ["f32 333 65", "u32<333 77 65"],
]
PICKS_ACROSS = [(["f32 512 4096", "u32<4096 1000"], LAST), (["f32 65 333", "u32<333 77"], LAST)]
POINT_ADDS = [([*x, x[1].replace(x[1].split()[0], "f32")], FIRST) for x in POINTS]
THREE_BY_SEVEN: dict[str, Any] = {"padding": ((1, 2), (3, 4))}
PADDED = calls(SMALL, SQUARE, "f32 333 65", **THREE_BY_SEVEN)

REDUCED: dict[str, Row] = {
    "sum_reduce": over(jnp.sum),
    "max_reduce": over(functools.partial(with_nan, jnp.max)),
    "min_reduce": over(functools.partial(with_nan, jnp.min)),
    "mean_reduce": over(jnp.mean),
    "reduce_sum_to": Row(
        lambda x, *, shape: jnp.sum(x, 0, keepdims=True),
        [
            *calls(SQUARE, shape=(1, 1024)),
            *calls(LARGE, shape=(1, 4096)),
            *calls(SMALL, shape=(1, 128)),
        ],
        torch=1.0,
    ),
    "reduce_max_to": Row(
        lambda x, *, shape: with_nan(jnp.max, x, 1, keepdims=True),
        [
            *calls(SQUARE, shape=(1024, 1)),
            *calls(LARGE, shape=(4096, 1)),
            *calls(SMALL, shape=(64, 1)),
        ],
        torch=1.0,
    ),
    "argmax_dim": along(jnp.argmax, torch=1.0),
    "argmin_dim": along(jnp.argmin, torch=1.0),
    "cumsum": along(jnp.cumsum, torch=1.0),
}

MOVED: dict[str, Row] = {
    "flip": along(jnp.flip, [*calls(SMALL, SQUARE, ODD, **LAST), *calls(SQUARE, **FIRST)]),
    "roll": Row(
        lambda x, *, dim, shift: jnp.roll(x, shift, dim),
        [*calls(SMALL, SQUARE, ODD, dim=-1, shift=10), *calls(SQUARE, dim=0, shift=100)],
    ),
    "pad": Row(lambda x, *, padding: jnp.pad(x, padding), PADDED),
    "pad_backward": Row(lambda g, *, padding: g[1:-2, 3:-4], PADDED),
    "triu": Row(lambda x: jnp.triu(x), calls(SMALL, SQUARE, ODD)),
    "tril": Row(lambda x: jnp.tril(x), calls(SMALL, SQUARE, ODD)),
    "concat": Row(
        lambda *xs, dim: jnp.concatenate(xs, dim),
        [
            *calls(SQUARE, SMALL, operands=3, dim=1),
            *calls(SQUARE, operands=2, **FIRST),
            (["f32 1 8 4095 64", "f32 1 8 1 64"], {"dim": 2}),
        ],
    ),
}

INDEXED: dict[str, Row] = {
    "index_select": Row(
        lambda x, i, *, dim: jnp.take(x, i, dim),
        [*((x, FIRST) for x in PICKS), *PICKS_ACROSS],
        torch=1.0,
    ),
    "gather": Row(
        lambda x, i, *, dim: jnp.take_along_axis(x, i.astype(jnp.int32), dim),
        [(x, FIRST) for x in POINTS],
    ),
    "index_add": Row(lambda x, i, s, *, dim: x.at[i].add(s), ADDS, torch=1.0),
    "scatter_add": Row(lambda x, i, s, *, dim: x.at[i, jnp.arange(x.shape[1])].add(s), POINT_ADDS),
    "nonzero_indices": Row(
        lambda x: (
            jnp.flatnonzero(x, size=x.size, fill_value=x.size),
            jnp.count_nonzero(x, keepdims=True),
        ),
        calls("u32<2 65536", "u32<2 1000", "u32<50 1048576"),
    ),
    "write_slice": Row(
        lambda d, s, *, ranges: d.at[tuple(slice(*r) for r in ranges)].set(s),
        [
            ([SQUARE, "f32 10 4"], {"ranges": ((10, 20), (5, 9))}),
            ([SMALL, "f32 1 128"], {"ranges": ((63, 64), (0, 128))}),
            ([SQUARE, "f32 512 1024"], {"ranges": ((0, 512), (0, 1024))}),
        ],
    ),
    "write_slice_doff": Row(
        lambda d, s, o, *, axis: lax.dynamic_update_slice(d, s, (o.astype(jnp.int32), 0)),
        [
            ([SQUARE, "f32 1 1024", "u32<100"], {"axis": 0}),
            ([SMALL, "f32 1 128", "u32<60"], {"axis": 0}),
            ([SQUARE, "f32 333 1024", "u32<100"], {"axis": 0}),
        ],
    ),
    "write_slice_rotating": Row(
        lambda d, s, p, *, axis, modulus: d.at[(p + jnp.arange(s.shape[0])) % modulus].set(s),
        [
            ([SQUARE, "f32 2 1024", "u32<100"], {"axis": 0, "modulus": 1000}),
            ([SMALL, "f32 1 128", "u32<100"], {"axis": 0, "modulus": 64}),
            ([SQUARE, "f32 333 1024", "u32<1000"], {"axis": 0, "modulus": 1000}),
        ],
    ),
}


def product(*specs):
    """A call of matmul."""
    return list(specs), {}


PRODUCTS: dict[str, Row] = {
    "matmul": Row(
        jnp.matmul,
        [
            product(SQUARE, SQUARE),
            product("f32 8 64 128", "f32 8 128 96"),
            product("f32 7 333", "f32 333 1001"),
            product(SMALL, "f32 128 64"),
        ],
    ),
    "matmul M1": Row(
        jnp.matmul,
        [
            product("f32 1 4096", "f32 4096 14336"),
            product("f32 1 4096", "f32 4096 4096"),
            product("f32 1 333", "f32 333 1001"),
        ],
        torch=1.0,
    ),
    "matmul M1 W.T": Row(  # a layer that keeps its weight [N, K]
        jnp.matmul,
        [
            product("f32 1 4096", "f32 14336 4096"),
            product("f32 1 4096", "f32 4096 4096"),
            product("f32 1 333", "f32 1001 333"),
        ],
        torch=1.0,
        view=lambda x, w: (x, w.T),
    ),
}
