"""ONNX's matrix products and convolutions in terms of ours."""

import jax
import numpy as np


def product(op, a, b):
    y = op(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
    y = y[..., 0] if b.ndim == 1 else y
    return y[..., 0] if a.ndim == b.ndim == 1 else y[..., 0, :] if a.ndim == 1 else y


def gemm(op, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    y = alpha * op(a.T if transA else a, b.T if transB else b)
    return y if c is None else y + beta * c


def gemm_with_bias(op, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    a, b = alpha * (a.T if transA else a), b.T if transB else b
    bias = np.zeros(1, a.dtype) if c is None else beta * np.asarray(c)
    if bias.ndim == 2 and len(bias) > 1:  # one for each row
        return jax.vmap(op, (0, None, 0))(a[:, None], b, bias)[:, 0]
    return op(a, b, np.broadcast_to(bias.reshape(-1), b.shape[1:]))


def same(total, auto_pad):
    """Margins before and after of a given sum; the odd one at the side that the mode names."""
    few, many = total // 2, total - total // 2
    return (many, few) if auto_pad == "SAME_LOWER" else (few, many)


def conv(
    op,
    x,
    w,
    bias=None,
    *,
    pads=(0, 0, 0, 0),
    strides=(1, 1),
    dilations=(1, 1),
    group=1,
    auto_pad="NOTSET",
    kernel_shape=None,
):
    if x.ndim == 3:  # one spatial axis: another of extent 1 beside it
        plane = {"strides": (*strides[:1], 1), "dilations": (*dilations[:1], 1), "group": group}
        plane["pads"] = pads[0], 0, pads[1], 0
        return conv(op, x[..., None], w[..., None], bias, **plane)[..., 0]
    params = {"stride": strides, "dilation": dilations, "groups": group}
    if auto_pad != "NOTSET":
        sizes = zip(x.shape[2:], w.shape[2:], strides, strict=True)
        margins = [same(max(0, (-(-n // s) - 1) * s + k - n), auto_pad) for n, k, s in sizes]
        pads = [before for before, _ in margins] + [after for _, after in margins]
    before, after = tuple(pads[:2]), tuple(pads[2:])
    if before != after:
        x = np.pad(x, ((0, 0), (0, 0), *zip(before, after, strict=True)))
        before = (0, 0)
    return op(x, w, bias, **params, padding=before)


def conv_transpose(
    op,
    x,
    w,
    bias=None,
    *,
    pads=(0, 0, 0, 0),
    strides=(1, 1),
    dilations=(1, 1),
    group=1,
    output_padding=(0, 0),
    output_shape=None,
    auto_pad="NOTSET",
    kernel_shape=None,
):
    if x.ndim == 3:
        return conv_transpose(op, x[..., None], w[..., None], bias)[..., 0]
    params = {"stride": strides, "dilation": dilations, "groups": group}
    if auto_pad != "NOTSET":
        output_shape = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if output_shape is None:
        before, after = tuple(pads[:2]), tuple(pads[2:])
        assert before == after
        return op(x, w, bias, **params, padding=before, output_padding=output_padding)
    sizes = zip(x.shape[2:], w.shape[2:], strides, output_shape, strict=True)
    more = tuple(max(0, out - (n - 1) * s - k) for n, k, s, out in sizes)
    y = op(x, w, bias, **params, output_padding=more)  # then what is too much is cut off
    (top, _), (left, _) = (
        same(n - out, auto_pad) for n, out in zip(y.shape[2:], output_shape, strict=True)
    )
    return y[:, :, top : top + output_shape[0], left : left + output_shape[1]]


def in_space(x, w, bias=None, **_):
    return "three spatial axes: ours has two" if x.ndim == 5 else None
