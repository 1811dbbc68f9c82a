"""Depthwise causal convolution along a sequence, then SiLU: each element read once from memory.

grid      sequences of channels × blocks of steps
reads     x once; what two threads share, from the cache      writes  y once
bound by  memory: 2 · elements · itemsize bytes.  Measured on an H200, 8 sequences of 4096 channels,
          2048 steps, 4 taps: 68 µs in bfloat16 (XLA: 113), 134 in float32 (XLA: 140)

A row of L + k − 1 halves begins wherever the last one ended, at any element of a word of 16 bytes.
Whole words are read, and the kernel is written out for each place at which a row may begin in one:
a thread has in registers what 8 outputs of 4 taps need, from 2 reads or 3 instead of 32.
"""

import functools
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
from ._threads import joined, parts
from ._tiles import FULL, Tiles, around, varied

MOST_TAPS = 16
MOST_CHOSEN = 4
SHORTEST = 1024  # steps of a row: of 512 it takes 37 µs and XLA 29, of 1024 50 and 59


class Tile(NamedTuple):
    """What a program computes: words of a row, and its warps."""

    size: int
    warps: int


# By elements of a word.  Of 8: two words of a thread take 64 µs, one 69, four 78.
FIRST = {8: Tile(256, 4), 4: Tile(512, 8), 2: Tile(1024, 8), 1: Tile(2048, 8)}


def together(x: Any, length: int) -> int:
    """Elements of the words that are read: of rows whose outputs are a number of whole ones."""
    ways = (8, 4, 2) if x.dtype.itemsize == 2 else ()
    return next((n for n in ways if length % n == 0 and x.size % n == 0), 1)


def by_rule(x: Any, length: int) -> Tile:
    """For rows of a length."""
    each = together(x, length)
    tile = FIRST[each]
    return tile._replace(size=min(tile.size, power_of_two(length // each)))


def tiles(x: Any, weight: Any, bias: Any, **params: Any) -> Tiles:
    """More or less at a time."""
    batch, c, padded = x.shape
    taps = weight.shape[-1]
    length = padded - taps + 1
    first, each = by_rule(x, length), together(x, length)
    extents: dict[str, int | str] = {"rows": min(batch * c, FULL), "steps": length, "taps": taps}
    extents |= {"together": each}
    sizes = around(first.size, 32, power_of_two(length // each))
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
    x_ref, w_ref, bias_ref, y_ref, *, tile: Tile, length: int, each: int, use_silu: bool, dtype: Any
) -> None:
    """A block of one row.  ``each``: elements of a word; ``dtype``: theirs."""
    row, block = program_id(0), program_id(1)
    channels, taps = w_ref.shape
    channel = row % channels
    weight = [w_ref[channel, j] for j in range(taps)]
    bias = bias_ref[channel]
    n, first = length // each, row * (length + taps - 1)
    i = block * tile.size + counted(tile.size)
    inside = i < n if n % tile.size else None

    def word(k):
        """The elements of the k-th word from where an output's first element is."""
        at = first // each + i + k
        if each == 1:
            return [read(x_ref, (at,), inside, None if inside is None else 0.0)]
        mask = at < x_ref.shape[0] // (each // 2)
        return unpacked_all(x_ref, at, mask if inside is None else mask & inside, each // 2, dtype)

    def outputs(start):
        """The outputs of rows that begin at an element of a word."""
        xs = [x for k in range(cdiv(start + each + taps - 1, each)) for x in word(k)]
        ys = [convolved(xs[start + j :][:taps], weight, bias, use_silu) for j in range(each)]
        if each == 1:
            write(y_ref, (row * n + i,), ys[0], inside)
            return
        pairs = [packed(x, y, dtype) for x, y in zip(ys[::2], ys[1::2], strict=True)]
        at, mask = of_word(row * n + i, inside, len(pairs))
        triton().store(y_ref.at[at], joined(pairs), mask=mask)

    if each == 1:
        outputs(0)
    else:
        lax.switch(first % each, [functools.partial(outputs, start) for start in range(each)])


def of_word(word: jax.Array, mask: jax.Array | None, n: int) -> tuple[jax.Array, jax.Array | None]:
    """Where the ``n`` pairs of halves of some words are, and the mask of them."""
    spread = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], n))
    return spread(word * n) + counted(n)[None, :], None if mask is None else spread(mask)


def unpacked_all(ref: Any, word: jax.Array, mask: jax.Array, n: int, dtype: Any) -> list[jax.Array]:
    """The halves of some words of ``n`` pairs, in float32; 0 where the mask is not set."""
    at, masks = of_word(word, mask, n)
    pairs = triton().load(ref.at[at], mask=masks, other=0)
    return [x for pair in parts(pairs) for x in unpacked(pair, dtype)]


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
    each = together(x, length)
    n = length // each
    tile = tile or by_rule(x, length)
    tile = tile._replace(size=min(tile.size, power_of_two(n)))
    pairs = lambda x: lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int32)
    out = (
        like(x, (batch * c * length,))
        if each == 1
        else like(x, (batch * c * length // 2,), jnp.int32)
    )
    y = launch(
        functools.partial(
            kernel, tile=tile, length=length, each=each, use_silu=use_silu, dtype=x.dtype
        ),
        "causal_conv1d",
        out=out,
        grid=(batch * c, cdiv(n, tile.size)),
        warps=tile.warps,
        interpret=interpret,
    )(
        x.reshape(-1) if each == 1 else pairs(x),
        weight.reshape(c, -1).astype(jnp.float32),
        bias.astype(jnp.float32),
    )
    y = y if each == 1 else lax.bitcast_convert_type(y, x.dtype)
    return y.reshape(batch, c, length)
