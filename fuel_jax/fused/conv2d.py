"""Two-dimensional convolution, and its backward."""

import functools
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
from ._conv_taps import MOST_TAPS, input_gradient, pointwise, shifted, weight_gradient

PRECISION = Precision(float32=3e-6)


def examples() -> Iterator[dict[str, Any]]:
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


def reach(w: Any, dilation: Pair) -> list[int]:
    """Input elements a kernel spans, per axis."""
    return [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]


def extents(x: Any, w: Any, stride: Pair, padding: Pair, dilation: Pair) -> tuple[int, ...]:
    """Output extent, per axis."""
    rows = zip(x.shape[2:], reach(w, dilation), stride, padding, strict=True)
    return tuple((n + 2 * p - r) // s + 1 for n, r, s, p in rows)


def rejects(
    x: Any, w: Any, *rest: Any, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> str | None:
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


def backward_rejects(x: Any, w: Any, upstream: Any, *rest: Any, **window: Any) -> str | None:
    """What the forward rejects, and a cotangent of another shape than its result."""
    if reason := rejects(x, w, **window):
        return reason
    out = extents(x, w, window["stride"], window["padding"], window["dilation"])
    if upstream.shape[2:] != out:
        return f"'upstream' is {upstream.shape[2:]} high and wide, the result {out}. Pass its own."
    return None


def backward_examples() -> Iterator[dict[str, Any]]:
    """The forward's, with a cotangent."""
    for example in examples():
        x, w = example["x"], example["w"]
        out = extents(x, w, example["stride"], example["padding"], example["dilation"])
        g = jax.ShapeDtypeStruct((x.shape[0], w.shape[0], *out), x.dtype)
        yield example | {"upstream": g}


def convolved(x: Any, w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Array:
    """Without a bias, in the dtype of the operands."""
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=stride,
        padding=[(p, p) for p in padding],
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=product_precision(),
    )


def with_bias(y: Array, bias: Array | None) -> Array:
    """``y`` and the bias of each channel, in the dtype it is summed in."""
    return y if bias is None else wide(y) + wide(bias)[:, None, None]


def bias_gradient(g: Array, bias: Array | None) -> Array | None:
    """Cotangent of the bias, where there is one."""
    return None if bias is None else jnp.sum(wide(g), axis=(0, 2, 3)).astype(bias.dtype)


@fused_op(
    family="Backward",
    precision=PRECISION,
    outputs=("dx", "dw", "dbias"),
    splits="n",
    rejects=backward_rejects,
    matchable=False,
    examples=backward_examples,
)
def conv2d_backward(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_out c_in_per_group kh kw"],
    upstream: Floats[Array, "n c_out h_out w_out"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> tuple[Array, Array, Array | None]:
    """Gradient of :func:`conv2d`:  each product to its two factors.

    Sums in float32 (float64 for float64 operands), each rounded once.

    Args:
        x: the forward's operand, ``[n, c_in, h, w]``.
        w: the forward's kernel.
        upstream: the cotangent of the result, ``[n, c_out, h_out, w_out]``.
        bias: the forward's, or None; only whether there is one matters.
        stride: the forward's.
        padding: the forward's.
        dilation: the forward's.
        groups: the forward's.

    Returns:
        The cotangents of ``x``, ``w`` and ``bias``.
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    pull = jax.vjp(functools.partial(convolved, **window), wide(x), wide(w))[1]
    dx, dw = pull(wide(upstream))
    return dx.astype(x.dtype), dw.astype(w.dtype), bias_gradient(upstream, bias)


@fused_op(
    OpKind.Conv2D,
    id=FusedOps.CONV2D,
    family="Forward",
    precision=PRECISION,
    backward=conv2d_backward,
    splits="n",
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def conv2d(
    x: Floats[Array, "n c_in h w"],
    w: Floats[Array, "c_out c_in_per_group kh kw"],
    bias: Floats[Array, " c_out"] | None = None,
    *,
    stride: IntOrPair = (1, 1),
    padding: IntOrPair = (0, 0),
    dilation: IntOrPair = (1, 1),
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
    window: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }
    return with_bias(convolved(wide(x), wide(w), **window), bias).astype(x.dtype)


# -- kernels -------------------------------------------------------------------------------


def not_half(x: Any, *rest: Any, **window: Any) -> str | None:
    """Operands for which the form in the operands' dtype is the decomposition."""
    return None if x.dtype.itemsize == 2 else f"operands are {x.dtype.name}, not of a half type"


def with_half_bias(y: Array, bias: Array | None) -> Array:
    """``y`` and the bias of each channel, in their own dtype.

    XLA hands both to cuDNN in one call, which adds in float32 and rounds once: measured on an
    H200, a bias that cancels sums of 583 leaves 1.9467 with an error of 0.0025.
    """
    return y if bias is None else y + bias[:, None, None]


@conv2d.kernel("half", platforms=("cuda",), refuses=not_half)
def in_half(x, w, bias, *, interpret: bool = False, **window):
    """Half operands as they are: cuDNN sums them in float32 and rounds the sums.

    Widened ones run without tensor cores, fourteen times slower on an H200.
    """
    return with_half_bias(convolved(x, w, **window), bias)


@conv2d_backward.kernel("half", platforms=("cuda",), refuses=not_half)
def backward_in_half(x, w, upstream, bias, *, interpret: bool = False, **window):
    """Half operands as they are."""
    dx, dw = jax.vjp(functools.partial(convolved, **window), x, w)[1](upstream)
    return dx, dw, bias_gradient(upstream, bias)


def sums_copies(w: Any, groups: int) -> bool:
    """Whether a convolution is a short sum of shifted copies: few channels in each group."""
    return groups > 1 and w.shape[1] * w.shape[2] * w.shape[3] <= MOST_TAPS


def is_pointwise(
    x: Any, w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> bool:
    """Whether it is a product, and of images large enough to notice."""
    single = w.shape[2:] == (1, 1) and padding == (0, 0) and groups == 1
    return single and w.shape[1] * x.shape[2] * x.shape[3] >= 2**12


def not_copies(x: Any, w: Any, *rest: Any, groups: int, **window: Any) -> str | None:
    """Kernels that are no short sum of shifted copies."""
    if groups == 1:
        return "its channels are not grouped"
    if sums_copies(w, groups):
        return None
    return f"{w.shape[1:]} elements to a sum; it unrolls {MOST_TAPS} at most"


def not_pointwise(x: Any, w: Any, *rest: Any, **window: Any) -> str | None:
    """Kernels that are no product."""
    if w.shape[2:] != (1, 1) or window["padding"] != (0, 0) or window["groups"] != 1:
        return "its kernel has several elements, groups or a margin"
    return "an operand is empty" if x.size == 0 else None


def small(x: Any, w: Any, *rest: Any, **window: Any) -> str | None:
    """Images too small for the difference to show."""
    return None if is_pointwise(x, w, **window) else "its images are small"


def dense(x: Any, w: Any, *rest: Any, groups: int, **window: Any) -> str | None:
    """Kernels for which XLA's own program is as fast, or too large to unroll."""
    if groups == 1 and w.shape[2:] != (1, 1):
        return "dense convolutions are as fast without"
    taps = w.shape[2] * w.shape[3]
    return None if taps <= MOST_TAPS else f"{taps} taps; it unrolls {MOST_TAPS} at most"


@conv2d.kernel("taps", platforms=("cpu",), refuses=not_copies)
def by_taps(x, w, bias, *, stride, padding, dilation, groups):
    """A sum of shifted copies."""
    out = extents(x, w, stride, padding, dilation)
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return with_bias(shifted(wide(x), wide(w), out, **window), bias).astype(x.dtype)


@conv2d.kernel("product", platforms=("cpu",), refuses=not_pointwise, declines=small)
def by_product(x, w, bias, *, stride, **window):
    """A product per image."""
    return with_bias(pointwise(wide(x), wide(w), stride), bias).astype(x.dtype)


@conv2d_backward.kernel("taps", platforms=("cpu",), declines=dense)
def backward_by_taps(x, w, upstream, bias, *, groups, **window):
    """The kernel's cotangent as a product per tap, that of x as the forward runs."""
    v, g, kernel = wide(x), wide(upstream), w.shape[2:]
    dw = weight_gradient(v, g, kernel, groups=groups, **window)
    if sums_copies(w, groups) and w.shape[0] <= 8 * groups:  # back, each element sums the outputs
        dx = input_gradient(g, wide(w), x.shape[2:], groups=groups, **window)
        return dx.astype(x.dtype), dw.astype(w.dtype), bias_gradient(upstream, bias)
    if is_pointwise(x, w, groups=groups, **window):
        forward = lambda v: pointwise(v, wide(w), window["stride"])
    else:
        forward = lambda v: convolved(v, wide(w), groups=groups, **window)
    (dx,) = jax.vjp(forward, v)[1](g)
    return dx.astype(x.dtype), dw.astype(w.dtype), bias_gradient(upstream, bias)
