"""Cross entropy of logits whose vocabulary is split: no device holds a whole row."""

from typing import Literal, overload

import jax.numpy as jnp
from jax import lax

from ..fused.cross_entropy import averaged, classes, fused_softmax_cross_entropy, poison
from ..types import Array, Reduction


@overload
def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    axis: str,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    axis: str,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    axis: str,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """:func:`fuel_jax.fused_softmax_cross_entropy` with v split over a mesh axis.

    Each device takes ln Σ exp of its part; their maximum, the sum of their exponentials and the
    loss of the device that holds the target are combined: three all-reduces of ``[*rows]``, none of
    the logits' size.  The gradient of the logits stays where they are.

    Args:
        logits: this device's part, ``[*rows, v/devices]``; the parts are in order of the axis.
        targets: the class of each row, ``[*rows]``, counted in the whole vocabulary, the same on
            all devices.
        axis: name of the mesh axis that splits v.
        reduction: ``"mean"`` over the rows kept, ``"sum"`` of them, or ``"none"``.  Of this
            device's rows: where another axis splits the rows, take ``"none"``.
        ignore_index: as in the op.
        return_lse: also return ln Σ exp of the whole rows.

    Returns:
        As the op, the same on all devices.
    """
    size = logits.shape[-1]
    kept, label = classes(targets, size * lax.axis_size(axis), ignore_index)
    first = size * lax.axis_index(axis)
    mine = (label >= first) & (label < first + size)
    here = jnp.where(mine, label - first, -1).astype(jnp.int32)
    loss, lse = fused_softmax_cross_entropy(
        logits, here, reduction="none", ignore_index=-1, return_lse=True
    )
    # From the largest, as in the op: exponentials of differences, none of which overflows.
    largest = lax.pmax(lax.stop_gradient(lse), axis)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    rest = jnp.log(lax.psum(jnp.exp(lse - largest), axis))
    losses = lax.psum(jnp.where(mine, loss.astype(lse.dtype) + (largest - lse), 0), axis) + rest
    loss = jnp.where(kept, losses * poison(kept, label, losses.dtype), 0)
    if reduction != "none":
        loss = jnp.sum(loss)
    if reduction == "mean":
        loss = loss / averaged(kept).astype(loss.dtype)
    loss = loss.astype(jnp.float32)
    return (loss, rest + largest) if return_lse else loss
