"""How fuel_jax accumulates and exponentiates, how exact that is, and what varies over a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .types import Array


@dataclass(frozen=True)
class Precision:
    """How far a result may stand from the float64 reference, relative to its largest element.

    ``float32`` is the accumulated error in units of the result's maximum.  Half types accumulate in
    float32 and round once more, by half a unit in their last place.
    """

    float32: float
    float64: float = 1e-12

    def tolerance(self, dtype: Any) -> float:
        """Largest admitted error for outputs of ``dtype``; 0 for integers."""
        name = np.dtype(dtype).name
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
        if name in rounding:
            return rounding[name] + self.float32
        return {"float32": self.float32, "float64": self.float64}.get(name, 0.0)


def wide_dtype(x: Array) -> Any:
    """What floats like ``x`` are accumulated in: float32, or float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def wide(x: Array) -> Array:
    """``x`` in its accumulation dtype."""
    return x.astype(wide_dtype(x))


def is_float(x: Any) -> bool:
    """Whether ``x`` holds floats."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def lifted(x: Array) -> Array:
    """``x`` in the dtype it is computed in: floats widened, integers as they are."""
    return wide(x) if is_float(x) else x


@jax.custom_jvp
def uncontracted(y: Array) -> Array:
    """``y``, but a product in it is rounded before anything is subtracted from it.

    XLA recomputes ``y`` where it is used, and on the CPU contracts ``x·c − max(x·c)`` into one
    fused multiply-add: near 1e10 the difference is off by hundreds, on either side, and a softmax
    becomes inf/inf or 0/0.  No operation is contracted across a minimum, and this one changes no
    finite value.  (+inf becomes the largest finite number: its row is NaN with either.)
    """
    return jnp.minimum(y, jnp.finfo(y.dtype).max)


@uncontracted.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return uncontracted(*primals), tangents[0]  # that of a minimum would look for ties


def exp_below_max(y: Array) -> tuple[Array, Array]:
    """``exp(y − m)`` and the row maximum ``m`` (constant to autodiff), over the last axis.

    Rows of −inf only, and rows holding inf or NaN, come out NaN.
    """
    m = lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True, initial=-jnp.inf))
    return jnp.exp(uncontracted(y) - m), m


def check(holds: Array | None) -> None:
    """Under ``checkify`` with ``index_checks``, or ``all_checks``: an error unless all of it holds.

    By way of a read that is out of bounds if it does not.  Nobody uses what is read, so a compiled
    program does not read it: ``checkify.debug_check`` would cost every call of every program around
    it 250 µs, for its effect takes jit off its fast path.
    """
    if holds is not None:
        where = jnp.where(jnp.all(holds), 0, 1)
        jnp.zeros(1, jnp.uint8).at[where].get(mode="fill", fill_value=0)


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Under ``shard_map``: every array varying over the mesh axes that any of them varies over.

    JAX checks that a gradient varies as its operand does.  After this all do, and JAX itself sums
    the gradient of a replicated operand over the devices.
    """
    varying = [frozenset() if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    return [
        x if x is None or axes == its else lax.pcast(x, tuple(axes - its), to="varying")
        for x, its in zip(arrays, varying, strict=True)
    ]


def tie(outputs: tuple[Any, ...], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Let every output depend on every operand, so that ``vmap`` batches all of them or none.

    Under vmap over ``v`` alone attention's lse would stay unbatched; its cotangent would then be
    counted once per example (JAX 0.10, 0.11) or refused (0.12).
    """
    together = jax.custom_batching.custom_vmap(lambda outputs, arrays: outputs)

    @together.def_vmap
    def _(size: int, batched: Any, outputs: Any, arrays: Any) -> Any:
        stack = lambda y, has: y if has else jnp.broadcast_to(y, (size, *y.shape))
        outputs = jax.tree.map(stack, outputs, batched[0])
        return tie(outputs, arrays), jax.tree.map(lambda _: True, outputs)

    tied = jax.custom_jvp(lambda outputs, arrays: together(outputs, arrays))
    tied.defjvp(lambda primals, tangents: (together(*primals), tangents[0]))
    return tied(outputs, [x for x in arrays if x is not None])


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros to start a loop from: dtype and mesh axes of ``like``."""
    return vary_alike([jnp.zeros(shape, like.dtype), like])[0]


def product_precision(x: Any = None) -> lax.Precision | None:
    """IEEE float32 products on every device, unless ``jax_default_matmul_precision`` is set.

    Products of half operands ``x`` are exact in float32, whatever is asked; but if it is, XLA
    leaves a product with one row to cuBLAS: 42 µs on an H200 where it takes 8 itself.
    """
    if x is not None and x.dtype.itemsize == 2:
        return None
    users = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return None if users else lax.Precision.HIGHEST
