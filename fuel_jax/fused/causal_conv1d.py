"""Depthwise convolution along a sequence, as Mamba's short one."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import causal_conv1d as kernels

from .._op import Precision
from ..numerics import product_precision, wide
from ..op_kind import FusedOps, OpKind
from ..registry import fused_op
from ..types import Array, Floats

UNROLLED = 16  # taps that one fused loop adds up; beyond, XLA's convolution is the shorter program


def examples() -> Iterator[dict[str, Any]]:
    """Mamba's four taps with SiLU, a single tap, a single output."""
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    for b, c, l, k, silu in ((2, 3, 9, 4, True), (1, 2, 5, 1, False), (1, 3, 1, 5, True)):
        yield {
            **{"x": f32(b, c, l + k - 1), "weight": f32(c, 1, k), "bias": f32(c)},
            "use_silu": silu,
        }


def rejects(x: Any, weight: Any, bias: Any, **_: Any) -> str | None:
    """No taps, or a sequence shorter than the padding it should begin with."""
    taps = weight.shape[-1]
    if taps == 0:
        return "'weight' has 0 taps; it must have at least one. A pointwise product is one tap."
    if x.shape[-1] < taps - 1:
        return (
            f"'x' has {x.shape[-1]} steps and 'weight' {taps} taps; x must begin with {taps - 1} "
            f"steps of padding. Pad it: jnp.pad(x, ((0, 0), (0, 0), ({taps - 1}, 0)))."
        )
    return None


@fused_op(
    OpKind.CausalConv1d,
    id=FusedOps.CAUSAL_CONV1D,
    family="Forward",
    splits="batch c",
    precision=Precision(float32=2e-6),
    rejects=rejects,
    matchable=False,
    examples=examples,
)
def causal_conv1d(
    x: Floats[Array, "batch c padded"],
    weight: Floats[Array, "c 1 k"],
    bias: Floats[Array, " c"],
    *,
    use_silu: bool = False,
) -> Floats[Array, "batch c l"]:
    """yₜ = bias + Σⱼ weightⱼ · xₜ₊ⱼ,  of each channel alone;  then y · σ(y).

    The caller pads the sequence on the left, with k − 1 zeros or the last k − 1 steps of what came
    before; then the last tap meets the current step, and none a later one.  Sums in float32
    (float64 for float64 operands), rounded once.

    Args:
        x: padded sequences, ``[batch, c, l + k − 1]``.
        weight: the taps of each channel, ``[c, 1, k]``, oldest step first.
        bias: added to each channel, ``[c]``.
        use_silu: apply SiLU to the sum.

    Returns:
        ``[batch, c, l]`` in the dtype of ``x``.

    Raises:
        ShapeError: ranks or channels disagree.
        ArgumentError: there are no taps, or fewer than k − 1 steps.
    """
    taps = weight.shape[-1]
    length = x.shape[-1] - taps + 1
    v, w, b = wide(x), wide(weight), wide(bias)[:, None]
    if taps <= UNROLLED:
        y = b + sum(w[:, :, j] * lax.slice_in_dim(v, j, j + length, axis=2) for j in range(taps))
    else:
        y = b + lax.conv_general_dilated(
            v,
            w,
            window_strides=(1,),
            padding="VALID",
            feature_group_count=w.shape[0],
            precision=product_precision(),
        )
    return (y * lax.logistic(y) if use_silu else y).astype(x.dtype)


# -- on NVIDIA GPUs ------------------------------------------------------------------------

causal_conv1d.kernel(
    "triton",
    platforms=("cuda",),
    refuses=kernels.refuses,
    declines=kernels.declines,
    tiles=kernels.tiles,
)(kernels.causal_conv1d)


# -- as people write it --------------------------------------------------------------------
#
# ``fuse`` reads a depthwise ``lax.conv_general_dilated`` as the sum of its taps, so these stand for
# convolutions in any layout too.


def padded_on_the_left(
    x: Any, weight: Any, bias: Any = None, *, taps: Any, use_silu: bool, cut: Any
) -> Any:
    """The op, on a sequence that begins with zeros."""
    x = jnp.pad(x, ((0, 0), (0, 0), (taps - 1, 0)))
    bias = jnp.zeros(x.shape[1], x.dtype) if bias is None else bias
    return causal_conv1d(x, weight[:, None, :taps], bias, use_silu=use_silu)


def shift_and_add(
    x: Array, weight: Array, bias: Array | None = None, *, taps: int, use_silu: bool, cut: bool
) -> Array:
    """Every tap times the sequence moved to the right; ``weight`` is ``[c, taps]``.

    Padded on both sides and then cut, as in PyTorch, or on the left only.
    """
    steps = x.shape[-1]
    length = steps + taps - 1 if cut else steps
    x = jnp.pad(x, ((0, 0), (0, 0), (taps - 1, length - steps)))
    y, *later = (weight[:, j, None] * x[:, :, j : j + length] for j in range(taps))
    y = sum(later, y)
    y = y if bias is None else y + bias[:, None]
    y = y[:, :, :steps]
    return jax.nn.silu(y) if use_silu else y


for bias, silu, cut in itertools.product(({"bias": "c"}, {}), (True, False), (True, False)):
    causal_conv1d.spelling(
        axes={"x": "b c l", "weight": "c k", **bias},
        call=padded_on_the_left,
        variants=[{"taps": k, "use_silu": silu, "cut": cut} for k in (2, 3, 4)],
        needs=("pad", "at", *(("logistic",) if silu else ()), *(("slice",) if cut else ())),
    )(shift_and_add)
