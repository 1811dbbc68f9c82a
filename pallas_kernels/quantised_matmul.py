"""Products with a packed weight: which kernel serves, and what none can."""

from typing import Any

import jax

from . import (
    quantised_dot as dots,
    quantised_gradient as gradients,
    quantised_hopper as hopper,
    quantised_rows as few,
)
from ._fragments import Packed
from ._launch import LIMIT, not_hopper, unavailable
from ._tiles import Tiles
from .quantised import Packing
from .quantised_runs import LEAST, Runs


def refuses(x: Any, n: int, k: int, *weight: Any) -> str | None:
    """Why these kernels cannot serve the arrays, in either direction, or None."""
    parts_or_result = jax.ShapeDtypeStruct((dots.PARTS * rows_of(x), max(n, k)), x.dtype)
    return unavailable(x, parts_or_result, *weight)


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
FEWER = 2**22  # of NF4 and AWQ, where tensor cores multiply

# Rows up to which tensor cores were faster than what XLA makes of a product, by the format of GGUF,
# None for NF4 and AWQ, and whether in halves.
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2K", "Q3K", "Q4K", "Q5K", "Q6K")
MEASURED: dict[tuple[str | None, bool], int] = {(None, True): 256, (None, False): 256}
MEASURED |= {(format, False): 128 for format in GGUF} | {(format, True): 64 for format in GGUF}
MEASURED |= {("Q4K", True): 128}


def format_of(quant_type: str | None) -> str | None:
    """In the spelling of the tables here, where there are several."""
    return quant_type and quant_type.removesuffix("_M").replace("_K", "K")


def declines(x: Any, n: int, *, quant_type: str | None = None, group: int = LEAST) -> str | None:
    """Where XLA is as fast, or was not compared."""
    m, k = rows_of(x), x.shape[-1]
    if n * k < (SMALL if m <= few.most(x.dtype) or quant_type else FEWER):
        return f"{n} x {k} weights are decoded as fast by XLA, in one kernel"
    if m <= few.most(x.dtype):
        return None
    if group < LEAST:
        return f"{m} rows: for groups of {group} it multiplies too often"
    most = MEASURED[format_of(quant_type), x.dtype.itemsize == 2]
    return f"{m} rows; for more than {most} it decodes too often" if m > most else None


def tiles(x: Any, n: int, packing: Packing, runs: Runs, **words: str) -> Tiles:
    """How a product may be cut; ``words`` tell formats apart."""
    m, k = rows_of(x), x.shape[-1]
    cuts = few.cuts(packing, n) if m <= few.most(x.dtype) else dots.cuts(m, n, x.dtype, runs)
    return Tiles.of({"rows": m, "k": k, "n": n, **words}, *cuts)


def product(
    x: jax.Array,
    weight: tuple[jax.Array, ...],
    n: int,
    packing: Packing,
    runs: Runs,
    *,
    name: str,
    interpret: bool,
    tile: Any = None,
) -> jax.Array:
    """x Wᵀ: ``[*batch, m, k]`` to ``[*batch, m, n]``; sums in float32, rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    m, options = len(flat), {"name": name, "interpret": interpret}
    if m <= few.most(x.dtype):
        options |= {"packing": packing, "cut": tile or few.cut(packing, n)}
        y = few.times_transposed(flat, weight, n, **options)
    else:
        options |= {"runs": runs, "cut": tile or dots.cut(m, n, x.dtype, runs)}
        y = dots.times_transposed(flat, weight, n, **options)
    return y.reshape(*x.shape[:-1], n)


# -- on Hopper ------------------------------------------------------------------------------


def refuses_hopper(x: Any, n: int, k: int, group: int, *weight: Any) -> str | None:
    """Why Hopper's kernel cannot serve the arrays, or None."""
    if reason := refuses(x, n, k, *weight) or refuses_groups(group):
        return reason
    if x.dtype.itemsize != 2:
        return f"its tensor cores multiply halves, not {x.dtype}"
    if group < LEAST:
        return f"for groups of {group} it multiplies too often"
    if n % hopper.ROWS or k % hopper.STEP:
        return f"{n} x {k} weights are no blocks of {hopper.ROWS} x {hopper.STEP}"
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} finds no layouts for its registers"
    return not_hopper()


def declines_hopper(x: Any, n: int, k: int, least: int) -> str | None:
    """Where other kernels are as fast, which they are for less than ``least`` rows."""
    m, most = rows_of(x), MEASURED[None, True]
    if n * k < FEWER:
        return f"{n} x {k} weights are decoded as fast by XLA, in one kernel"
    if m < least:
        return f"{m} rows are multiplied as fast one by one"
    return f"{m} rows; for more than {most} it decodes too often" if m > most else None


def by_hopper(
    x: jax.Array, weight: tuple[jax.Array, ...], n: int, packed: Packed, *, name: str
) -> jax.Array:
    """x Wᵀ: ``[*batch, m, k]`` to ``[*batch, m, n]``; sums in float32, rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    m, k = flat.shape
    options = {"packed": packed, "name": f"{name}_hopper", "cut": hopper.cut(m, n, k, packed)}
    return hopper.times_transposed(flat, weight, n, **options).reshape(*x.shape[:-1], n)


# Likewise, with the weight itself.
MEASURED_GRADIENT: dict[tuple[str | None, bool], int] = {(None, True): 256}
MEASURED_GRADIENT |= {(format, False): 16 for format in ("Q4_0", "Q4_1", "Q4K", "Q5K")}
MEASURED_GRADIENT |= {(format, True): 128 for format in ("Q2K", "Q4K", "Q5K")}


def declines_gradient(g: Any, *weight: Any, quant_type: Any = None, **params: Any) -> str | None:
    """Where XLA is as fast, or was not compared."""
    m, n = rows_of(g), g.shape[-1]
    most = MEASURED_GRADIENT.get((format_of(quant_type), g.dtype.itemsize == 2))
    if most is None:
        return f"in {g.dtype} it was not compared with XLA for this format, or was slower"
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
