"""Transposed two-dimensional convolution."""

import jax
import jax.numpy as jnp
from jax import lax

from .._op import Precision
from ..numerics import product_precision, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, Pair


def examples():
    """Plain; everything uneven, with groups and a bias."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    one, zero = (1, 1), (0, 0)
    yield {
        **{"x": f32(1, 2, 4, 3), "w": f32(2, 3, 2, 2), "bias": None, "stride": one},
        **{"padding": zero, "output_padding": zero, "dilation": one, "groups": 1},
    }
    yield {
        **{"x": f32(2, 4, 3, 5), "w": f32(4, 3, 3, 2), "bias": f32(6), "groups": 2},
        **{"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (1, 2)},
    }


def rejects(x, w, bias, *, stride, padding, output_padding, dilation, groups) -> str | None:
    """Sizes and parameters the annotations cannot express."""
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or min(output_padding) < 0:
        return (
            f"parameters 'stride' {stride} and 'dilation' {dilation} start at 1, 'padding' "
            f"{padding} and 'output_padding' {output_padding} at 0."
        )
    if groups < 1 or w.shape[0] % groups:
        return f"parameter 'groups' is {groups}; it must divide the {w.shape[0]} channels of 'x'."
    if bias is not None and bias.shape[0] != w.shape[1] * groups:
        return (
            f"'bias' has {bias.shape[0]} channels, the output {w.shape[1] * groups}. "
            f"Give it one for each of c_out / groups · groups."
        )
    if any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation, strict=True)):
        return (
            f"parameter 'output_padding' is {output_padding}; it must be smaller than stride "
            f"{stride} or dilation {dilation}. Pad the result instead."
        )
    if 0 in w.shape[2:]:
        return f"'w' has a kernel of {w.shape[2:]}; each extent must be at least 1."
    out = extents(x, w, stride, padding, output_padding, dilation)
    if 0 not in x.shape[2:] and min(out) < 0:
        return f"parameter 'padding' is {padding}; it cuts off more than there is. Pad less."
    return None


def extents(x, w, stride, padding, output_padding, dilation) -> list[int]:
    """Output extent per axis."""
    rows = zip(x.shape[2:], w.shape[2:], stride, padding, output_padding, dilation, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in rows]


@fused_op(
    OpKind.ConvTranspose2D,
    id=FusedOps.CONV_TRANSPOSE2D,
    family="Forward",
    precision=Precision(float32=3e-6),
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def conv_transpose2d(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_in c_out_per_group kh kw"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    output_padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Floats[Array, "n c_out h_out w_out"]:
    """Spread each input element over the output:  y[i·s + k·d − p] += x[i] · w[k]  per axis.

    Output extent ``(h − 1)·s − 2p + d·(kh − 1) + output_padding + 1``.  Sums in float32 (float64
    for float64 operands), rounded once.

    Args:
        x: ``[n, c_in, h, w]``.
        w: ``[c_in, c_out / groups, kh, kw]``.
        bias: ``[c_out]``, or None.
        stride: output elements between neighbouring inputs, (vertical, horizontal) or one int.
        padding: output elements cut off at either end.
        output_padding: output elements added at the far end.
        dilation: output elements between neighbouring kernel elements.
        groups: input and output channels are connected within each of this many groups.

    Returns:
        ``[n, c_out, h_out, w_out]`` in the dtype of ``x``.

    Raises:
        ArgumentError: groups that do not divide the channels, an ``output_padding`` that reaches
            stride and dilation, a stride or dilation below 1.
    """
    c_in, per_group, *kernel = w.shape
    # The kernel of the equivalent convolution: channels exchanged within each group, turned over.
    turned = wide(w).reshape(groups, c_in // groups, per_group, *kernel)
    turned = jnp.flip(turned.swapaxes(1, 2), (-2, -1)).reshape(-1, c_in // groups, *kernel)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    y = lax.conv_general_dilated(
        wide(x),
        turned,
        window_strides=(1, 1),
        padding=[
            (r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)
        ],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=product_precision(),
    )
    if bias is not None:
        y = y + wide(bias)[:, None, None]
    return y.astype(x.dtype)
