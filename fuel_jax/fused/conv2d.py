"""Two-dimensional convolution."""

import jax
import jax.numpy as jnp
from jax import lax

from .._op import Precision
from ..numerics import product_precision, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Pair


def examples():
    """Plain; everything uneven, with groups and a bias; a kernel of one."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    one, zero = (1, 1), (0, 0)
    plain = {"stride": one, "padding": zero, "dilation": one, "groups": 1}
    yield {"x": f32(1, 2, 5, 4), "w": f32(3, 2, 2, 3), "bias": None, **plain}
    yield {
        **{"x": f32(2, 4, 7, 8), "w": f32(6, 2, 3, 2), "bias": f32(6), "groups": 2},
        **{"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)},
    }
    yield {"x": f32(1, 1, 1, 1), "w": f32(1, 1, 1, 1), "bias": None, **plain}


def reach(w, dilation: Pair) -> list[int]:
    """Input elements a kernel spans, per axis."""
    return [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]


def rejects(x, w, bias, *, stride, padding, dilation, groups) -> str | None:
    """Sizes and parameters the annotations cannot express."""
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        return (
            f"parameters 'stride' {stride} and 'dilation' {dilation} start at 1, "
            f"'padding' {padding} at 0. Crop x for a negative padding."
        )
    if groups < 1 or x.shape[1] % groups or w.shape[0] % groups:
        return (
            f"parameter 'groups' is {groups}; it must divide the {x.shape[1]} channels of 'x' and "
            f"the {w.shape[0]} of 'w'."
        )
    if w.shape[1] * groups != x.shape[1]:
        return (
            f"'w' reads {w.shape[1]} channels in each of {groups} groups, 'x' has {x.shape[1]}. "
            f"Give w the shape [c_out, c_in / groups, kh, kw]."
        )
    if 0 in w.shape[2:]:
        return f"'w' has a kernel of {w.shape[2:]}; each extent must be at least 1."
    padded = [n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)]
    if any(r > n for r, n in zip(reach(w, dilation), padded, strict=True)):
        spans = reach(w, dilation)
        return f"'w' spans {spans}, 'x' with its padding {padded}. Pad more, or dilate less."
    return None


@fused_op(
    OpKind.Conv2D,
    id=FusedOps.CONV2D,
    family="Forward",
    precision=Precision(float32=3e-6),
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def conv2d(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_out c_in_per_group kh kw"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Floats[Array, "n c_out h_out w_out"]:
    """Weighted sum of each input window:  y[i] = Σ x[i·s + k·d − p] · w[k] + bias  per axis.

    A cross-correlation.  Output extent ``⌊(h + 2p − d·(kh − 1) − 1) / s⌋ + 1``.  Sums in float32
    (float64 for float64 operands), rounded once.

    Args:
        x: ``[n, c_in, h, w]``.
        w: ``[c_out, c_in / groups, kh, kw]``.
        bias: ``[c_out]``, or None.
        stride: input elements between neighbouring outputs, (vertical, horizontal) or one int.
        padding: zeros at either end.
        dilation: input elements between neighbouring kernel elements.
        groups: input and output channels are connected within each of this many groups.

    Returns:
        ``[n, c_out, h_out, w_out]`` in the dtype of ``x``.

    Raises:
        ArgumentError: groups that do not divide the channels, a kernel larger than the padded
            input, a stride or dilation below 1.
    """
    y = lax.conv_general_dilated(
        wide(x),
        wide(w),
        window_strides=stride,
        padding=[(p, p) for p in padding],
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=product_precision(),
    )
    if bias is not None:
        y = y + wide(bias)[:, None, None]
    return y.astype(x.dtype)
