"""Products with a packed weight: which kernel serves, and what none can."""

from typing import Any

import jax

from . import quantised_dot as dots, quantised_gradient as gradients, quantised_rows as few
from ._launch import LIMIT, unavailable
from ._tiles import Tiles
from .quantised import Packing


def refuses(x: Any, n: int, k: int, *weight: Any) -> str | None:
    """Why these kernels cannot serve the arrays, in either direction, or None."""
    result = jax.ShapeDtypeStruct((rows_of(x), max(n, k)), x.dtype)
    return unavailable(x, result, *weight)


def refuses_groups(size: int) -> str | None:
    """Groups that are no tiles of words."""
    words, rest = divmod(size, 8)
    if rest or words & (words - 1):
        return f"groups of {size} are not a power of two of words"
    return None


def refuses_bytes(words: Any) -> str | None:
    """Streams whose bytes are not counted in 32 bits."""
    return "2³¹ bytes and more are left to XLA" if 4 * words.size >= LIMIT else None


def rows_of(x: Any) -> int:
    """How many rows of activations there are."""
    return x.size // max(x.shape[-1], 1)


SMALL = 2**23  # weights


def declines(x: Any, n: int, packing: Packing) -> str | None:
    """Where XLA is as fast, or may be: for rows of gathered words tensor cores are not measured."""
    m, k = rows_of(x), x.shape[-1]
    if n * k < SMALL:
        return f"{n} x {k} weights are decoded as fast by XLA, in one kernel"
    if m > few.most(x.dtype) and not packing.whole:
        return f"{m} rows of activations; words that blocks share are gathered for few"
    if m > dots.MOST:
        return f"{m} rows of activations; for more than {dots.MOST} it decodes too often"
    return None


def tiles(x: Any, n: int, packing: Packing, **words: str) -> Tiles:
    """How a product may be cut; ``words`` tell formats apart."""
    m, k = rows_of(x), x.shape[-1]
    cuts = few.cuts(packing) if m <= few.most(x.dtype) else dots.cuts(m, x.dtype)
    return Tiles.of({"rows": m, "k": k, "n": n, **words}, *cuts)


def product(
    x: jax.Array,
    weight: tuple[jax.Array, ...],
    n: int,
    packing: Packing,
    *,
    name: str,
    interpret: bool,
    tile: Any = None,
) -> jax.Array:
    """x Wᵀ: ``[*batch, m, k]`` to ``[*batch, m, n]``; sums in float32, rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    m, options = len(flat), {"packing": packing, "name": name, "interpret": interpret}
    if m <= few.most(x.dtype):
        y = few.times_transposed(flat, weight, n, cut=tile or few.cut(packing), **options)
    else:
        y = dots.times_transposed(flat, weight, n, cut=tile or dots.cut(m, x.dtype), **options)
    return y.reshape(*x.shape[:-1], n)


# Rows up to which a product with the weight itself was faster than what XLA makes of it, by the
# format of GGUF, None for NF4 and AWQ, and whether in halves.
MEASURED = {(None, True): 256, ("Q4K", False): 16}


def declines_gradient(g: Any, *weight: Any, quant_type: Any = None, **params: Any) -> str | None:
    """Where XLA is as fast, or was not compared."""
    m, n = rows_of(g), g.shape[-1]
    format = quant_type and quant_type.replace("_", "")
    most = MEASURED.get((format, g.dtype.itemsize == 2))
    if most is None:
        return f"in {g.dtype} it was not compared with XLA for this format"
    if m > most:
        return f"{m} rows; for more than {most} XLA multiplies by parts that are decoded once"
    if weight[0].size * weight[0].dtype.itemsize * 2 < SMALL:
        return f"{n} rows of the weight are decoded as fast by XLA"
    return None


def gradient_tiles(g: Any, packing: Packing, **words: str) -> Tiles:
    """How a product with the weight itself may be cut; ``words`` tell formats apart."""
    m, n, k = rows_of(g), g.shape[-1], packing.units * packing.powers.size
    extents = {"rows": m, "k": k, "n": n, **words}
    return Tiles.of(extents, *gradients.cuts(m, n, g.dtype, packing))


def gradient(
    g: jax.Array,
    weight: tuple[jax.Array, ...],
    packing: Packing,
    *,
    name: str,
    interpret: bool,
    tile: Any = None,
) -> jax.Array:
    """g W: ``[*batch, m, n]`` to ``[*batch, m, k]``; sums in float32, rounded once."""
    flat = g.reshape(-1, g.shape[-1])
    m, n = flat.shape
    tile = tile or gradients.cut(m, n, g.dtype, packing)
    options = {"packing": packing, "name": name, "interpret": interpret, "cut": tile}
    return gradients.times(flat, weight, **options).reshape(*g.shape[:-1], -1)
