"""What attention's kernels for Hopper share: memory on the chip, copies on their way, products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._launch import LOG2_E, lowered_for, mosaic

GROUPS = 2  # that compute; one more copies
REGISTERS = 240, 24  # of a thread that computes, and of one that copies
FEWER = {"PCIe": 114, "H20": 78}  # multiprocessors, by a word of the GPU's name


def multiprocessors() -> int:
    """Of the GPU that a program is for."""
    words = lowered_for().split()
    return next((n for word, n in FEWER.items() if word in words), 132)


class Copies(NamedTuple):
    """Blocks of keys or values on their way: memory, and who waits for whom."""

    blocks: Any
    ready: Any
    free: Any

    def start(self, source: Any, at: tuple[Any, ...], slot: Any) -> None:
        """Fetch a block; what is beyond the end is 0."""
        target, ready = self.blocks.at[slot], self.ready.at[slot]
        mosaic().copy_gmem_to_smem(source.at[at], target, ready)

    def wait(self, slot: Any) -> Any:
        """The block, once it is there."""
        mosaic().barrier_wait(self.ready.at[slot])
        return self.blocks.at[slot]

    def release(self, slot: Any) -> None:
        """Done with it."""
        mosaic().barrier_arrive(self.free.at[slot])

    def replace(self, source: Any, at: tuple[Any, ...], slot: Any) -> None:
        """Fetch another one when both groups are done with that."""
        mosaic().barrier_wait(self.free.at[slot])
        self.start(source, at, slot)


def matrices(dtype: Any, *shape: int) -> Any:
    """Memory for operands of products."""
    gpu = mosaic()
    transforms = gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)
    return gpu.SMEM(shape, dtype, transforms=transforms)


def barriers(arrivals: int, n: int) -> Any:
    """So many, each of which waits for so many."""
    return mosaic().Barrier(num_arrivals=arrivals, num_barriers=n)


def slots(stages: int, memory: Callable[..., Any], *shape: int) -> tuple[Any, Any, Any]:
    """What :class:`Copies` are made of, for ``stages`` blocks at a time."""
    return memory(stages, *shape), barriers(1, stages), barriers(GROUPS, stages)


def pass_by(
    pairs: Sequence[tuple[Copies, Any]],
    at: Callable[[Any], tuple[Any, ...]],
    first: Any,
    last: Any,
    stages: int,
) -> None:
    """What the third group does: block after block into the chip, as the others are done.

    Args:
        pairs: copies and where they come from, those first that are done with first.
        at: where block j begins.
        first: number of the first block, which has slot 0.
        last: of the one after the last.
        stages: slots.
    """
    mosaic().set_max_registers(REGISTERS[1], action="decrease")

    def begin(t: int) -> None:
        for copies, ref in pairs:
            copies.start(ref, at(first + t), t)

    def go_on(j: Any, _: None) -> None:
        for copies, ref in pairs:
            copies.replace(ref, at(j), lax.rem(j - first, jnp.int32(stages)))

    for t in range(stages):
        lax.cond(first + t < last, functools.partial(begin, t), lambda: None)
    lax.fori_loop(first + stages, last, go_on, None)


def spread(x: jax.Array, shape: tuple[int, ...], axis: int = 0) -> jax.Array:
    """One number a row, along the row; or for axis 1 one a column."""
    return lax.broadcast_in_dim(x, shape, [axis])


def zeros(*shape: int) -> jax.Array:
    """As products leave them in registers."""
    gpu = mosaic()
    return gpu.layout_cast(jnp.zeros(shape, jnp.float32), gpu.Layout.WGMMA)


def numbers_of(ref: Any, axis: int) -> jax.Array:
    """What sums over an axis of products look like: each row's number, or each column's."""
    layout = mosaic().Layout.WGMMA.reduce(axis)
    try:
        return mosaic().load(ref, layout=layout)
    except TypeError:  # JAX 0.10 wants an index
        return mosaic().load(ref, (), layout=layout)


def products(run: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """Run with accumulators of such shapes."""
    from jax.experimental import pallas

    return pallas.run_scoped(run, *(mosaic().ACC(shape, jnp.float32) for shape in shapes))


def slope_of(slopes: Any, head: Any) -> Any:
    """Of distance, in powers of 2."""
    return None if slopes is None else slopes[head].astype(jnp.float32) * LOG2_E
