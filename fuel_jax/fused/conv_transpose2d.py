"""Transposed two-dimensional convolution, and its backward."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._op import Precision
from ..numerics import product_precision, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats, IntOrPair, Pair
from ._conv_taps import weight_gradient
from .conv2d import bias_gradient, convolved, dense, not_half, with_bias, with_half_bias

PRECISION = Precision(float32=3e-6)


def examples() -> Iterator[dict[str, Any]]:
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


def rejects(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> str | None:
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


def extents(
    x: Any, w: Any, stride: Pair, padding: Pair, output_padding: Pair, dilation: Pair
) -> list[int]:
    """Output extent per axis."""
    rows = zip(x.shape[2:], w.shape[2:], stride, padding, output_padding, dilation, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in rows]


def backward_rejects(x: Any, w: Any, upstream: Any, bias: Any, **window: Any) -> str | None:
    """What the forward rejects, and a cotangent of another shape than its result."""
    if reason := rejects(x, w, bias, **window):
        return reason
    sizes = {n: p for n, p in window.items() if n != "groups"}
    want = (x.shape[0], w.shape[1] * window["groups"], *extents(x, w, **sizes))
    if upstream.shape != want:
        return f"'upstream' is of shape {upstream.shape}, the result of {want}. Pass its cotangent."
    return None


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent."""
    for example in examples():
        x, w = example["x"], example["w"]
        names = ("stride", "padding", "output_padding", "dilation")
        out = extents(x, w, **{n: example[n] for n in names})
        shape = (x.shape[0], w.shape[1] * example["groups"], *out)
        yield example | {"upstream": jax.ShapeDtypeStruct(shape, x.dtype)}


def transposed(
    x: Any,
    w: Any,
    *,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    dilation: Pair,
    groups: int,
) -> Array:
    """Without a bias, in the dtype of the operands."""
    c_in, per_group, *kernel = w.shape
    # The kernel of the equivalent convolution: channels exchanged within each group, turned over.
    turned = w.reshape(groups, c_in // groups, per_group, *kernel)
    turned = jnp.flip(turned.swapaxes(1, 2), (-2, -1)).reshape(-1, c_in // groups, *kernel)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return lax.conv_general_dilated(
        x,
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


def gathered(g: Any, w: Any, extent: Any, *, output_padding: Pair, **window: Any) -> Array:
    """The convolution that this one transposes: its cotangent ``g`` to that of x.

    An output padding of a stride or more would give rows that x does not have.
    """
    return convolved(g, w, **window)[:, :, : extent[0], : extent[1]]


def gradient(x: Any, w: Any, g: Any, **window: Any) -> tuple[Array, Array]:
    """Cotangents of ``x`` and ``w``: those of the other convolution, their roles exchanged."""
    dx, pull = jax.vjp(lambda w: gathered(g, w, x.shape[2:], **window), w)
    return dx, pull(x)[0]


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dx", "dw", "dbias"),
    splits="n",
    rejects=backward_rejects,
    matchable=False,
    examples=backward_examples,
)
def conv_transpose2d_backward(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_in c_out_per_group kh kw"],
    upstream: Floats[Array, "n c_out h_out w_out"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    output_padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> tuple[Array, Array, Array | None]:
    """Gradient of :func:`conv_transpose2d`:  a convolution of g with w, and its kernel's gradient.

    Sums in float32 (float64 for float64 operands), each rounded once.

    Args:
        x: the forward's operand, ``[n, c_in, h, w]``.
        w: the forward's kernel.
        upstream: the cotangent ``g`` of the result, ``[n, c_out, h_out, w_out]``.
        bias: the forward's, or None; only whether there is one matters.
        stride: the forward's.
        padding: the forward's.
        output_padding: the forward's.
        dilation: the forward's.
        groups: the forward's.

    Returns:
        The cotangents of ``x``, ``w`` and ``bias``.
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    dx, dw = gradient(wide(x), wide(w), wide(upstream), output_padding=output_padding, **window)
    return dx.astype(x.dtype), dw.astype(w.dtype), bias_gradient(upstream, bias)


@fused_op(
    OpKind.ConvTranspose2D,
    id=FusedOps.CONV_TRANSPOSE2D,
    family="Forward",
    precision=PRECISION,
    backward=conv_transpose2d_backward,
    splits="n",
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def conv_transpose2d(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_in c_out_per_group kh kw"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: IntOrPair = (1, 1),
    padding: IntOrPair = (0, 0),
    output_padding: IntOrPair = (0, 0),
    dilation: IntOrPair = (1, 1),
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
    window: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    window |= {"output_padding": output_padding, "groups": groups}
    y = transposed(wide(x), wide(w), **window)
    return with_bias(y, bias).astype(x.dtype)


# -- kernels -------------------------------------------------------------------------------


@conv_transpose2d.kernel("half", platforms=("cuda",), refuses=not_half)
def in_half(x, w, bias, *, interpret: bool = False, **window):
    """Half operands as they are: see conv2d."""
    return with_half_bias(transposed(x, w, **window), bias)


@conv_transpose2d_backward.kernel("half", platforms=("cuda",), refuses=not_half)
def backward_in_half(x, w, upstream, bias, *, interpret: bool = False, **window):
    """Half operands as they are."""
    return *gradient(x, w, upstream, **window), bias_gradient(upstream, bias)


@conv_transpose2d_backward.kernel("taps", platforms=("cpu",), declines=dense)
def backward_by_taps(x, w, upstream, bias, *, output_padding, **window):
    """The kernel's cotangent as a product per tap."""
    v, g = wide(x), wide(upstream)
    dx = gathered(g, wide(w), x.shape[2:], output_padding=output_padding, **window)
    dw = weight_gradient(g, v, w.shape[2:], **window)
    return dx.astype(x.dtype), dw.astype(w.dtype), bias_gradient(upstream, bias)
