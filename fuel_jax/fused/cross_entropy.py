"""Softmax cross entropy with integer targets, and its backward."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cross_entropy as kernels

from .._called import CrossEntropy, called
from .._op import Precision
from .._parts import splitting
from ..numerics import uncontracted, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Indices, Reduction, Single, Wide
from ._loss_rows import slopes_by_rows
from ._rows import TOGETHER, Rows, Some, sums, taken_together, tiles

PRECISION = Precision(float32=3e-6, float64=2e-7)  # the loss is F32 beside F64 logits, too


def examples() -> Iterator[dict[str, Any]]:
    """Each reduction; ignored rows among others, and alone; a single row."""
    for shape, targets, reduction, ignore_index in (
        ((4, 11), [3, -100, 10, 0], "mean", -100),
        ((2, 3, 7), [[0, 6, 1], [1, 2, 1]], "none", 1),
        ((5,), 4, "sum", -100),
        ((2, 3), [-100, -100], "mean", -100),
    ):
        yield {
            "logits": jax.ShapeDtypeStruct(shape, jnp.float32),
            "targets": np.array(targets, np.int32),
            "reduction": reduction,
            "ignore_index": ignore_index,
        }


def expects(logits: Any, targets: Any, *, ignore_index: int, **_: Any) -> Array:
    """Targets are classes, or ignored."""
    kept, label = classes(targets, logits.shape[-1], ignore_index)
    return ~kept | (label >= 0)


def classes(targets: Array, count: int, ignore_index: int) -> tuple[Array, Array]:
    """Which rows are kept, and the class of each in int32, −1 where the target names none.

    Compared in the dtype of the targets, so that none wraps: 2³² − 1 is no class, and not −1.
    """
    limits = jnp.iinfo(targets.dtype)
    t = targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
    if count == 0:  # as in Fuel: where there is nothing to choose from, nothing is lost
        kept = jnp.full(t.shape, False)
    elif limits.min <= ignore_index <= limits.max:
        kept = t != ignore_index
    else:
        kept = jnp.full(t.shape, True)
    return kept, jnp.where((t < 0) | (t >= count), -1, t).astype(jnp.int32)


def averaged(kept: Array) -> Array:
    """Number of rows in the mean; 1 if there are none, so that nothing kept gives 0."""
    return jnp.maximum(jnp.sum(kept), 1)


def poison(kept: Array, label: Array, dtype: Any) -> Array:
    """A factor that makes NaN of a row whose target is no class, and of its gradient."""
    return jnp.where(kept & (label < 0), jnp.nan, 1).astype(dtype)


def row_losses(logits: Array, label: Array) -> tuple[Array, Array]:
    """−ln p of the label, and ln Σ exp, over the last axis."""
    v = wide(logits)
    # From the least finite number: the sum over a row of −inf is then 0, and its logarithm −inf.
    m = lax.stop_gradient(jnp.max(v, -1, keepdims=True, initial=jnp.finfo(v.dtype).min))
    log_sum = jnp.log(jnp.sum(jnp.exp(uncontracted(v) - m), -1))
    m = jnp.squeeze(m, -1)
    if logits.shape[-1] == 0:
        return jnp.zeros_like(m), log_sum
    at = jnp.maximum(label, 0)[..., None]
    picked = wide(jnp.squeeze(jnp.take_along_axis(logits, at, -1, mode="clip"), -1))
    # Differences of logits first: ln Σ exp is rounded, by 4e-6 where it is 100.
    return log_sum + (m - picked), log_sum + m


def of_rows(logits, targets, lse, upstream, dlse, *, reduction, ignore_index) -> Any:
    """Each row's label, the weights of p and of the label in its gradient, and whether that is 0.

    A row that is ignored may hold anything, and then its gradient is 0 all the same.
    """
    kept, label = classes(targets, logits.shape[-1], ignore_index)
    g = upstream.astype(lse.dtype)
    if reduction == "mean":
        g = g / averaged(kept).astype(g.dtype)
    g = jnp.where(kept, g * poison(kept, label, g.dtype), 0)
    weight, unused = g, ~kept & ~jnp.isfinite(lse)
    if dlse is not None:
        weight, unused = weight + dlse, unused & (dlse == 0)
    return label, weight, g, unused


@fused_op(family="Backward", precision=PRECISION, outputs=("dlogits",), matchable=False)
def fused_softmax_cross_entropy_backward(
    logits: Floats[Array, "*rows v"],
    targets: Indices[Array, "*rows"],
    lse: Wide[Array, "*rows"],
    upstream: Single[Array, "*reduced"],
    dlse: Wide[Array, "*rows"] | None = None,
    *,
    reduction: Reduction,
    ignore_index: int,
) -> Floats[Array, "*rows v"]:
    """Gradient of :func:`fused_softmax_cross_entropy`:  g · (p − onehot) + dlse · p.

    The softmax p is formed again from the logits; nothing but the gradient has their size.

    Args:
        logits: as in the forward, ``[*rows, v]``.
        targets: as in the forward, ``[*rows]``.
        lse: the forward's ln Σ exp(logits), ``[*rows]``.
        upstream: cotangent ``g`` of the loss, a scalar or ``[*rows]``.
        dlse: cotangent of ``lse``, if it was used.
        reduction: as in the forward.
        ignore_index: as in the forward.

    Returns:
        The cotangent of ``logits``, like them: 0 in ignored rows, NaN where a target is no class.
    """
    label, weight, g, unused = of_rows(
        logits, targets, lse, upstream, dlse, reduction=reduction, ignore_index=ignore_index
    )
    v = wide(logits)
    # As uncontracted does, in other words: XLA would compute those once for forward and backward,
    # and keep the array in between.
    v = jnp.maximum(v, jnp.finfo(v.dtype).min)
    e = jnp.exp(v - lax.stop_gradient(lse)[..., None])
    # The sum is 1 but for the rounding of lse, which it takes out of p again.
    p = e * (weight / jnp.sum(e, -1))[..., None]
    here = jnp.arange(logits.shape[-1], dtype=jnp.int32) == label[..., None]
    d = jnp.where(here, p - g[..., None], p)
    return jnp.where(unused[..., None], 0, d).astype(logits.dtype)


@called(like=CrossEntropy)
@fused_op(
    OpKind.FusedSoftmaxCrossEntropy,
    id=FusedOps.FUSED_SOFTMAX_CROSS_ENTROPY,
    family="Forward",
    precision=PRECISION,
    backward=fused_softmax_cross_entropy_backward,
    seed_backward="Decompose",
    outputs=("loss", "lse"),
    expects=expects,
    matchable=False,
    examples=examples,
)
def fused_softmax_cross_entropy(
    logits: Floats[Array, "*rows v"],
    targets: Indices[Array, "*rows"],
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_lse: bool = False,
) -> Any:  # an array, or a pair with return_lse
    """Negative log probability of the target:  ln Σ exp(logits) − logits[target].

    Sums in float32 (float64 for float64 logits); the loss is float32.  The probabilities are never
    stored, nor is anything else of the logits' size but their gradient.

    Args:
        logits: ``[*rows, v]``.
        targets: the class of each row, ``[*rows]``, any integer dtype.  One that is neither in
            ``[0, v)`` nor ``ignore_index`` makes its row NaN, and its gradient.
        reduction: ``"mean"`` over the rows kept, ``"sum"`` of them, or ``"none"``.
        ignore_index: rows with this target are not kept: loss and gradient are 0, whatever the
            logits.  It may be a class; the other rows keep that in their sum.
        return_lse: also return ln Σ exp(logits), of ignored rows too.  It is differentiable: its
            square is the z-loss.

    Returns:
        The loss in F32: a scalar, or ``[*rows]`` without reduction.  0 if no row is kept, or v is
        0.  With ``return_lse`` the pair ``(loss, lse)``; lse is ``[*rows]`` in F32 (F64 for F64).
    """
    return reduced(row_losses, logits, targets, reduction, ignore_index, return_lse)


def reduced(
    rows: Any, logits: Any, targets: Any, reduction: Reduction, ignore_index: int, return_lse: bool
) -> Any:
    """What the op returns, of the losses of ``rows(logits, label)``."""
    kept, label = classes(targets, logits.shape[-1], ignore_index)
    losses, lse = rows(logits, label)
    loss = jnp.where(kept, losses * poison(kept, label, losses.dtype), 0)
    if reduction != "none":
        loss = jnp.sum(loss)
    if reduction == "mean":
        loss = loss / averaged(kept).astype(loss.dtype)
    loss = loss.astype(jnp.float32)
    return (loss, lse) if return_lse else loss


# -- on the CPU ----------------------------------------------------------------------------


def is_small(logits: Any, *_: Any, **__: Any) -> str | None:
    """Where there is nothing to save."""
    return "a few numbers are as fast in one piece" if math.prod(logits.shape) < 2**16 else None


@splitting("*rows")
def row_losses_by_rows(
    logits: Floats[Array, "*rows v"], label: Indices[Array, "*rows"], *, together: int
) -> tuple[Wide[Array, "*rows"], Wide[Array, "*rows"]]:
    """As :func:`row_losses`."""
    if logits.size == 0:
        return row_losses(logits, label)
    rows = Rows(logits, together)
    m, total = rows.map(sums)
    log_sum, picked = jnp.log(total), rows.at(jnp.maximum(label.ravel(), 0))
    found = log_sum + (m - picked), log_sum + m
    return jax.tree.map(lambda y: y.reshape(label.shape), found)


@fused_softmax_cross_entropy.kernel(
    "rows", platforms=("cpu",), declines=taken_together, tiles=tiles
)
def by_rows(logits, targets, *, reduction, ignore_index, return_lse, tile=Some(TOGETHER)):
    """A few rows at a time: they stay in cache between their maximum and their sum."""
    rows = functools.partial(row_losses_by_rows, together=tile.rows)
    return reduced(rows, logits, targets, reduction, ignore_index, return_lse)


@fused_softmax_cross_entropy_backward.kernel("rows", platforms=("cpu",), declines=is_small)
def backward_by_rows(logits, targets, lse, upstream, dlse, *, reduction, ignore_index):
    """p in one pass, then the labels' elements."""
    label, weight, g, unused = of_rows(
        logits, targets, lse, upstream, dlse, reduction=reduction, ignore_index=ignore_index
    )
    return slopes_by_rows(logits, label, lse, weight, g, unused)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

on_cuda: dict[str, Any] = {"platforms": ("cuda",), "refuses": kernels.refuses}


@splitting("*rows")
def row_losses_by_triton(
    logits: Floats[Array, "*rows v"], label: Indices[Array, "*rows"], *, interpret: bool, tile: Any
) -> tuple[Wide[Array, "*rows"], Wide[Array, "*rows"]]:
    """As :func:`row_losses`."""
    return kernels.row_losses(logits, label, interpret=interpret, tile=tile)


@fused_softmax_cross_entropy.kernel(
    "triton", **on_cuda, declines=kernels.declines, tiles=kernels.tiles
)
def by_triton(logits, targets, *, reduction, ignore_index, return_lse, tile=None, interpret=False):
    """Maximum and sum in one pass over the logits."""
    rows = functools.partial(row_losses_by_triton, interpret=interpret, tile=tile)
    return reduced(rows, logits, targets, reduction, ignore_index, return_lse)


@splitting("*rows")
def slopes_by_triton(
    logits: Floats[Array, "*rows v"],
    label: Indices[Array, "*rows"],
    lse: Wide[Array, "*rows"],
    weight: Wide[Array, "*rows"],
    g: Wide[Array, "*rows"],
    *,
    interpret: bool,
    tile: Any,
) -> Floats[Array, "*rows v"]:
    """As :func:`slopes_by_rows`, with the weights of unused rows 0 already."""
    return kernels.gradient(logits, label, lse, weight, g, interpret=interpret, tile=tile)


@fused_softmax_cross_entropy_backward.kernel(
    "triton", **on_cuda, declines=kernels.declines_gradient, tiles=kernels.tiles_gradient
)
def backward_by_triton(
    logits, targets, lse, upstream, dlse, *, reduction, ignore_index, tile=None, interpret=False
):
    """One pass over the logits, or two where they are float32."""
    label, weight, g, unused = of_rows(
        logits, targets, lse, upstream, dlse, reduction=reduction, ignore_index=ignore_index
    )
    weight = jnp.where(unused, 0, jnp.where(jnp.isfinite(lse), weight, jnp.nan))
    return slopes_by_triton(logits, label, lse, weight, g, interpret=interpret, tile=tile)


# -- as people write it --------------------------------------------------------------------
#
# A label that is no class gives NaN, the nearest class, or nothing at all, depending on how the
# logit is picked.  So each spelling ignores such labels, or renames them, before the op sees them.

NOTHING = -1  # a label that is ignored
written = functools.partial(
    fused_softmax_cross_entropy.spelling,
    axes={"logits": "*rows v", "targets": "*rows"},
    dtypes={"targets": jnp.int32},
    last="v",
)


def picked(logits: Array, targets: Array) -> Array:
    """As ``take_along_axis`` counts: −1 is the last class; NaN for what is none."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def from_either_end(targets: Array, classes: int) -> tuple[Array, Array]:
    """Labels as :func:`picked` counts them, and which are classes."""
    label = jnp.where(targets < 0, targets + classes, targets)
    valid = (label >= 0) & (label < classes)
    return jnp.where(valid, label, NOTHING), valid


def nan_for_no_class(logits: Array, targets: Array) -> Array:
    """The loss for ``−picked(log_softmax)``: NaN without a slope for what is no class."""
    label, valid = from_either_end(targets, logits.shape[-1])
    loss = fused_softmax_cross_entropy(logits, label, reduction="none", ignore_index=NOTHING)
    return jnp.where(valid, loss, jnp.nan)


def nan_beside_logsumexp(logits: Array, targets: Array) -> Array:
    """The loss for ``logsumexp − picked``: NaN with the slope of the first for what is no class."""
    label, valid = from_either_end(targets, logits.shape[-1])
    loss, lse = fused_softmax_cross_entropy(
        logits, label, reduction="none", ignore_index=NOTHING, return_lse=True
    )
    return jnp.where(valid, loss, lse.astype(loss.dtype) + jnp.nan)


def nearest(logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    """The loss for ``logits[arange(n), targets]``, the log-sum-exp, and which labels are classes.

    Others read the nearest class, and their slope is dropped.
    """
    classes = logits.shape[-1]
    label, valid = from_either_end(targets, classes)
    clipped = jnp.clip(jnp.where(targets < 0, targets + classes, targets), 0, classes - 1)
    loss, lse = fused_softmax_cross_entropy(
        logits,
        jnp.where(valid, label, clipped),
        reduction="none",
        ignore_index=NOTHING,
        return_lse=True,
    )
    return loss, lse.astype(loss.dtype), valid


def nearest_class(logits: Array, targets: Array) -> Array:
    """The loss for ``−log_softmax[arange(n), targets]``: no slope for what is no class."""
    loss, _, valid = nearest(logits, targets)
    return jnp.where(valid, loss, lax.stop_gradient(loss))


def nearest_beside_logsumexp(logits: Array, targets: Array) -> Array:
    """The loss for ``logsumexp − logits[arange(n), targets]``: the slope of the first remains."""
    loss, lse, valid = nearest(logits, targets)
    return jnp.where(valid, loss, lse + lax.stop_gradient(loss - lse))


def or_nothing(logits: Array, targets: Array) -> Array:
    """The loss for ``one_hot``, which is zero for what is no class."""
    valid = (targets >= 0) & (targets < logits.shape[-1])
    label = jnp.where(valid, targets, NOTHING)
    return fused_softmax_cross_entropy(logits, label, reduction="none", ignore_index=NOTHING)


@written(call=nan_beside_logsumexp, needs=("pick", "log"))
def logsumexp_less_logit(logits, targets):
    """As ``optax.softmax_cross_entropy_with_integer_labels``."""
    return jax.nn.logsumexp(logits, -1) - picked(logits, targets)


@written(call=nan_for_no_class, needs=("pick", "log"))
def picked_from_log_softmax(logits, targets):
    """Minus the label's log-probability."""
    return -picked(jax.nn.log_softmax(logits), targets)


@written(call=nan_for_no_class, needs=("pick", "log"))
def picked_from_logits_less_logsumexp(logits, targets):
    """The same, with log-probabilities written out."""
    return -picked(logits - jax.nn.logsumexp(logits, -1, keepdims=True), targets)


@written(call=or_nothing, needs=("eq", "log"))
def one_hot_times_log_softmax(logits, targets):
    """As ``optax.softmax_cross_entropy`` of ``one_hot`` labels."""
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits), -1)


rows = functools.partial(
    fused_softmax_cross_entropy.spelling,
    axes={"logits": "rows v", "targets": "rows"},
    dtypes={"targets": jnp.int32},
    last="v",
    needs=("pick", "log"),
)


@rows(call=nearest_class)
def indexed_log_softmax(logits, targets):
    """Minus the label's log-probability, by indexing."""
    return -jax.nn.log_softmax(logits)[jnp.arange(logits.shape[0]), targets]


@rows(call=nearest_beside_logsumexp)
def logsumexp_less_indexed_logit(logits, targets):
    """``logsumexp − logits[arange(n), targets]``."""
    return jax.nn.logsumexp(logits, -1) - logits[jnp.arange(logits.shape[0]), targets]
