"""Depthwise causal convolution along a sequence, then SiLU: each element read once from memory.

grid      sequences of channels × blocks of steps
reads     x once; what two outputs share, from the cache      writes  y once
bound by  memory: 2 · elements · itemsize bytes.  Measured on an H200, 8 sequences of 4096 channels,
          2048 steps, 4 taps: 81 µs in bfloat16 (XLA: 113), 134 in float32 (XLA: 140)

A row of L + k − 1 halves begins wherever the last one ended, at every other element between two
words of 32 bits.  Words are read, and the halves of three give two outputs of four taps: half of
the reads, a quarter of those of single elements.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._launch import (
    LOG2_E,
    cdiv,
    exp2,
    fma,
    launch,
    like,
    packed,
    power_of_two,
    program_id,
    read,
    reciprocal,
    triton,
    unavailable,
    unpacked,
    write,
)
from ._rows import counted
from ._tiles import FULL, Tiles, around, varied

MOST_TAPS = 16
MOST_CHOSEN = 4
SHORTEST = 1024  # steps of a row: of 512 it takes 37 µs and XLA 29, of 1024 50 and 59


class Tile(NamedTuple):
    """What a program computes: loads of a row, and its warps."""

    size: int
    warps: int


WORDS = Tile(1024, 8)
ELEMENTS = Tile(2048, 8)


def by_rule(x: Any, length: int) -> tuple[Tile, bool]:
    """For rows of a length; and whether words are read."""
    by_words = x.dtype.itemsize == 2 and x.size % 2 == 0 and length % 2 == 0
    tile = WORDS if by_words else ELEMENTS
    n = length // 2 if by_words else length
    return tile._replace(size=min(tile.size, power_of_two(n))), by_words


def tiles(x: Any, weight: Any, bias: Any, **params: Any) -> Tiles:
    """More or less at a time."""
    batch, c, padded = x.shape
    taps = weight.shape[-1]
    length = padded - taps + 1
    first, by_words = by_rule(x, length)
    extents: dict[str, int | str] = {"rows": min(batch * c, FULL), "steps": length, "taps": taps}
    extents |= {"read": "words" if by_words else "elements"}
    sizes = around(first.size, 32, power_of_two(length))
    return Tiles.of(extents, first, *varied(first, size=sizes, warps=(2, 4, 8, 16)))


def refuses(x: Any, weight: Any, bias: Any, **params: Any) -> str | None:
    """Why this kernel cannot serve the call, or None."""
    if weight.shape[-1] > MOST_TAPS:
        return f"{weight.shape[-1]} taps are left to XLA"
    if x.shape[-1] < weight.shape[-1]:
        return "there is nothing to compute"
    return unavailable(x, weight)


def declines(x: Any, weight: Any, bias: Any, **params: Any) -> str | None:
    """Where XLA is as fast: measured on an H200, at 4096 channels in bfloat16."""
    if weight.shape[-1] > MOST_CHOSEN:
        return f"{weight.shape[-1]} taps: XLA's loop takes 189 µs for 16, this 274"
    if x.shape[-1] < SHORTEST:
        return f"rows of {x.shape[-1]}: a program a row is mostly its start"
    return "launches take longer than the rows" if x.size < 2**22 else None


def silu(y: jax.Array) -> jax.Array:
    """y · σ(y)."""
    return y * reciprocal(1 + exp2(-y * LOG2_E))


def convolved(xs: list[jax.Array], weight: list[jax.Array], bias: jax.Array, use_silu: bool):
    """One output for each first element, of the taps after it."""
    y = jnp.full(xs[0].shape, bias, jnp.float32)
    for x, w in zip(xs, weight, strict=True):
        y = fma(x, w, y)
    return silu(y) if use_silu else y


def kernel(
    x_ref, w_ref, bias_ref, y_ref, *, tile: Tile, length: int, use_silu: bool, dtype: Any
) -> None:
    """A block of one row.  ``dtype``: of the halves in words, or None."""
    row, block = program_id(0), program_id(1)
    channels, taps = w_ref.shape
    channel = row % channels
    weight = [w_ref[channel, j] for j in range(taps)]
    bias = bias_ref[channel]
    i = block * tile.size + counted(tile.size)
    each = 1 if dtype is None else 2
    first, n = row * (length + taps - 1), length // each
    inside = i < n if n % tile.size else None
    y_at = row * n + i

    if dtype is None:
        xs = [
            read(x_ref, (first + i + j,), inside, None if inside is None else 0.0)
            for j in range(taps)
        ]
        write(y_ref, (y_at,), convolved(xs, weight, bias, use_silu), inside)
        return

    odd, word = first % 2 == 1, first // 2 + i
    halves = []
    for j in range(cdiv(taps + 2, 2)):
        mask = word + j < x_ref.shape[0]
        mask = mask if inside is None else mask & inside
        halves += unpacked(triton().load(x_ref.at[word + j], mask=mask, other=0), dtype)
    xs = [jnp.where(odd, y, x) for x, y in itertools.pairwise(halves)]
    low, high = (convolved(xs[j : j + taps], weight, bias, use_silu) for j in (0, 1))
    triton().store(y_ref.at[y_at], packed(low, high, dtype), mask=inside)


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    use_silu: bool,
    interpret: bool = False,
    tile: Tile | None = None,
) -> jax.Array:
    """yₜ = bias + Σⱼ weightⱼ · xₜ₊ⱼ,  then  y · σ(y);  in float32, rounded once.

    Args:
        x: ``[batch, c, l + k − 1]``.
        weight: ``[c, 1, k]``.
        bias: ``[c]``.
        use_silu: apply SiLU to the sum.
        interpret: run without a GPU.
        tile: what a program computes.
    """
    batch, c, padded = x.shape
    length = padded - weight.shape[-1] + 1
    first, by_words = by_rule(x, length)
    words = lambda x: lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int32)
    tile = tile or first
    n = length // 2 if by_words else length
    tile = tile._replace(size=min(tile.size, power_of_two(n)))
    y = launch(
        functools.partial(
            kernel,
            tile=tile,
            length=length,
            use_silu=use_silu,
            dtype=x.dtype if by_words else None,
        ),
        "causal_conv1d",
        out=like(x, (batch * c * n,), jnp.int32 if by_words else None),
        grid=(batch * c, cdiv(n, tile.size)),
        warps=tile.warps,
        interpret=interpret,
    )(
        words(x) if by_words else x.reshape(-1),
        weight.reshape(c, -1).astype(jnp.float32),
        bias.astype(jnp.float32),
    )
    y = lax.bitcast_convert_type(y, x.dtype) if by_words else y
    return y.reshape(batch, c, length)
