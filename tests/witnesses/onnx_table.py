"""Which of our ops makes which of ONNX's nodes, and how."""

import dataclasses
from collections.abc import Callable
from typing import Any

import fuel_jax as fj

from . import onnx_adapters as adapters, onnx_attention as attention, onnx_products as products


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our ops, a type of node, and how the one makes the other."""

    op: str
    node: str
    adapt: Callable[..., Any]
    when: Callable[..., bool] = lambda *inputs, **attributes: True  # else it is another op's case
    beyond: Callable[..., str | None] = lambda *inputs, **attributes: None  # why ours cannot


ALONE = {
    **{"relu": "Relu", "neg": "Neg", "abs": "Abs", "sign": "Sign", "erf": "Erf", "sqrt": "Sqrt"},
    **{"recip": "Reciprocal", "exp": "Exp", "log": "Log", "sin": "Sin", "cos": "Cos"},
    **{"tanh": "Tanh", "sigmoid": "Sigmoid", "floor": "Floor", "ceil": "Ceil", "round": "Round"},
    **{"where": "Where", "copy": "Identity"},
}
PAIRS = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
COMPARED = {
    **{"eq": "Equal", "lt": "Less", "le": "LessOrEqual"},
    **{"gt": "Greater", "ge": "GreaterOrEqual"},
}

TABLE = [
    *(Row(op, node, adapters.alone, beyond=adapters.sequence) for op, node in ALONE.items()),
    Row("gelu", "Gelu", adapters.gelu, when=adapters.exact),
    Row("gelu_tanh", "Gelu", adapters.gelu, when=adapters.by_tanh),
    Row("silu", "Swish", adapters.swish),
    Row("silu", "SwiGLU", adapters.swiglu),
    Row("clamp", "Clip", adapters.clipped, beyond=adapters.crossed),
    Row("powi", "Pow", adapters.by_integer, when=adapters.one_integer),
    *(Row(op, node, adapters.pairs) for op, node in PAIRS.items()),
    Row("add", "Sum", adapters.summed),
    Row("maximum", "Max", adapters.extreme),
    Row("minimum", "Min", adapters.extreme),
    Row("pow", "Pow", adapters.power),
    Row("rem", "Mod", adapters.remainder, beyond=adapters.truncated),
    *(Row(op, node, adapters.compared, beyond=adapters.strings) for op, node in COMPARED.items()),
    Row("cast", "Cast", adapters.cast, beyond=adapters.other_dtypes),
    Row("cast", "CastLike", adapters.cast_like, beyond=adapters.other_dtypes),
    Row("sum_reduce", "ReduceSum", adapters.reduced),
    Row("mean_reduce", "ReduceMean", adapters.reduced),
    Row("max_reduce", "ReduceMax", adapters.reduced),
    Row("min_reduce", "ReduceMin", adapters.reduced),
    Row("reduce_sum_to", "ReduceSum", adapters.reduced_to),
    Row("reduce_max_to", "ReduceMax", adapters.reduced_to),
    Row("mean_reduce", "Mean", adapters.averaged),
    Row("argmax_dim", "ArgMax", adapters.position),
    Row("argmin_dim", "ArgMin", adapters.position),
    Row("cumsum", "CumSum", adapters.running),
    Row("softmax_last_dim", "Softmax", adapters.along),
    Row("log_softmax_last_dim", "LogSoftmax", adapters.along),
    Row("rms_norm_last_dim", "RMSNormalization", adapters.normed),
    Row("layer_norm_last_dim", "LayerNormalization", adapters.layer_normed),
    Row("layer_norm_last_dim", "MeanVarianceNormalization", adapters.over_axes),
    Row("layer_norm_last_dim", "InstanceNormalization", adapters.over_groups),
    Row("layer_norm_last_dim", "GroupNormalization", adapters.over_groups),
    Row("concat", "Concat", adapters.joined),
    Row("pad", "Pad", adapters.padded, beyond=adapters.wrapped),
    Row("triu", "Trilu", adapters.triangle, when=adapters.upper),
    Row("tril", "Trilu", adapters.triangle, when=adapters.lower),
    Row("index_select", "Gather", adapters.taken),
    Row("index_select", "GatherND", adapters.taken_at),
    Row("gather", "GatherElements", adapters.picked),
    Row("gather", "NegativeLogLikelihoodLoss", adapters.likelihood),
    Row("scatter_add", "ScatterElements", adapters.added_at, beyond=adapters.another_reduction),
    Row("index_add", "ScatterND", adapters.rows_added, beyond=adapters.another_reduction),
    Row("nonzero_indices", "NonZero", adapters.not_zero),
    Row("write_slice", "TensorScatter", adapters.slab, when=adapters.linear),
    Row("write_slice_doff", "TensorScatter", adapters.appended, when=adapters.linear),
    Row("write_slice_rotating", "TensorScatter", adapters.ring, when=adapters.circular),
    Row("matmul", "MatMul", products.product),
    Row("matmul", "Gemm", products.gemm),
    Row("fused_linear", "Gemm", products.gemm_with_bias),
    Row("conv2d", "Conv", products.conv, beyond=products.in_space),
    Row("conv_transpose2d", "ConvTranspose", products.conv_transpose, beyond=products.in_space),
    Row("causal_conv1d", "CausalConvWithState", attention.causal_conv),
    Row("fused_softmax_cross_entropy", "SoftmaxCrossEntropyLoss", adapters.cross_entropy),
    Row("rope", "RotaryEmbedding", attention.rotary),
    Row("flash_attn", "Attention", attention.attention, beyond=attention.beyond_attention),
    Row("flash_attn", "FlexAttention", attention.flex, beyond=attention.beyond_flex),
    Row(
        "ssd_chunk_scan",
        "LinearAttention",
        attention.linear_attention,
        when=attention.decays_by_head,
        beyond=attention.beyond_scan,
    ),
    Row(
        "selective_scan",
        "LinearAttention",
        attention.linear_attention_by_key,
        when=attention.decays_by_key,
    ),
]
TABLE += [
    dataclasses.replace(row, op=f"{row.op}_inplace")
    for row in TABLE
    if hasattr(fj, f"{row.op}_inplace")
]
