"""The vocabulary: one ``OpKind`` per kernel-level op, one ``FusedOps`` constant per fused op.

Spelled and ordered as in Fuel, so that reports, caches and code written against either agree.
"""

from __future__ import annotations

import difflib
import enum

from .errors import UnknownName


class OpKind(enum.StrEnum):
    """Dispatch key of an op.

    The value is the variant name, which is what JSON holds; ``str(kind)`` and ``kind.as_str()`` are
    the name of the public function that implements it::

        OpKind.SoftmaxLastDim.value     'SoftmaxLastDim'
        str(OpKind.SoftmaxLastDim)      'softmax_last_dim'     fuel_jax.softmax_last_dim
        OpKind("SoftmaxLastDim")        OpKind.SoftmaxLastDim  (json.loads gives the string back)
        OpKind.parse("softmax_last_dim")                       either spelling
        OpKind.get("NoSuchOp")          None                   for readers of foreign reports
    """

    _as_str: str

    def __new__(cls, variant: str, as_str: str) -> OpKind:
        """A member whose string value is ``variant``."""
        member = str.__new__(cls, variant)
        member._value_ = variant
        member._as_str = as_str
        return member

    MatMul = "MatMul", "matmul"
    AddElementwise = "AddElementwise", "add"
    SubElementwise = "SubElementwise", "sub"
    MulElementwise = "MulElementwise", "mul"
    DivElementwise = "DivElementwise", "div"
    ReluElementwise = "ReluElementwise", "relu"
    NegElementwise = "NegElementwise", "neg"
    SqrElementwise = "SqrElementwise", "sqr"
    SqrtElementwise = "SqrtElementwise", "sqrt"
    RecipElementwise = "RecipElementwise", "recip"
    AbsElementwise = "AbsElementwise", "abs"
    TanhElementwise = "TanhElementwise", "tanh"
    ExpElementwise = "ExpElementwise", "exp"
    LogElementwise = "LogElementwise", "log"
    SinElementwise = "SinElementwise", "sin"
    CosElementwise = "CosElementwise", "cos"
    SigmoidElementwise = "SigmoidElementwise", "sigmoid"
    SiluElementwise = "SiluElementwise", "silu"
    GeluTanhElementwise = "GeluTanhElementwise", "gelu_tanh"
    StepElementwise = "StepElementwise", "step"
    SumReduce = "SumReduce", "sum_reduce"
    MaxReduce = "MaxReduce", "max_reduce"
    MinReduce = "MinReduce", "min_reduce"
    MeanReduce = "MeanReduce", "mean_reduce"
    Cast = "Cast", "cast"
    Conv2D = "Conv2D", "conv2d"
    ConvTranspose2D = "ConvTranspose2D", "conv_transpose2d"
    ReduceSumTo = "ReduceSumTo", "reduce_sum_to"
    ReduceMaxTo = "ReduceMaxTo", "reduce_max_to"
    FusedLinear = "FusedLinear", "fused_linear"
    FlashAttn = "FlashAttn", "flash_attn"
    FlashAttnBackwardQ = "FlashAttnBackwardQ", "flash_attn_backward_q"
    FlashAttnBackwardK = "FlashAttnBackwardK", "flash_attn_backward_k"
    FlashAttnBackwardV = "FlashAttnBackwardV", "flash_attn_backward_v"
    PagedAttn = "PagedAttn", "paged_attn"
    Affine = "Affine", "affine"
    ClampElementwise = "ClampElementwise", "clamp"
    PowIElementwise = "PowIElementwise", "powi"
    PowIElementwiseBackward = "PowIElementwiseBackward", "powi_backward"
    MaximumElementwise = "MaximumElementwise", "maximum"
    MinimumElementwise = "MinimumElementwise", "minimum"
    EqualElementwise = "EqualElementwise", "eq"
    NotEqualElementwise = "NotEqualElementwise", "ne"
    LessElementwise = "LessElementwise", "lt"
    LessEqualElementwise = "LessEqualElementwise", "le"
    GreaterElementwise = "GreaterElementwise", "gt"
    GreaterEqualElementwise = "GreaterEqualElementwise", "ge"
    Where = "Where", "where"
    FloorElementwise = "FloorElementwise", "floor"
    CeilElementwise = "CeilElementwise", "ceil"
    RoundElementwise = "RoundElementwise", "round"
    SignElementwise = "SignElementwise", "sign"
    ErfElementwise = "ErfElementwise", "erf"
    GeluElementwise = "GeluElementwise", "gelu"
    PowElementwise = "PowElementwise", "pow"
    RsqrtElementwise = "RsqrtElementwise", "rsqrt"
    RemElementwise = "RemElementwise", "rem"
    Flip = "Flip", "flip"
    Roll = "Roll", "roll"
    CumSum = "CumSum", "cumsum"
    Pad = "Pad", "pad"
    Triu = "Triu", "triu"
    Tril = "Tril", "tril"
    LogSoftmaxLastDim = "LogSoftmaxLastDim", "log_softmax_last_dim"
    LogSoftmaxLastDimBackward = "LogSoftmaxLastDimBackward", "log_softmax_last_dim_backward"
    MaskedFill = "MaskedFill", "masked_fill"
    PadBackward = "PadBackward", "pad_backward"
    Concat = "Concat", "concat"
    SoftmaxLastDim = "SoftmaxLastDim", "softmax_last_dim"
    SoftmaxLastDimBackward = "SoftmaxLastDimBackward", "softmax_last_dim_backward"
    RmsNormLastDim = "RmsNormLastDim", "rms_norm_last_dim"
    RmsNormLastDimBackward = "RmsNormLastDimBackward", "rms_norm_last_dim_backward"
    LayerNormLastDim = "LayerNormLastDim", "layer_norm_last_dim"
    LayerNormLastDimBackward = "LayerNormLastDimBackward", "layer_norm_last_dim_backward"
    ReduceMaxToBackward = "ReduceMaxToBackward", "reduce_max_to_backward"
    IndexSelect = "IndexSelect", "index_select"
    Gather = "Gather", "gather"
    Rope = "Rope", "rope"
    IndexAdd = "IndexAdd", "index_add"
    ScatterAdd = "ScatterAdd", "scatter_add"
    ArgMaxDim = "ArgMaxDim", "argmax_dim"
    ArgMinDim = "ArgMinDim", "argmin_dim"
    QMatMul = "QMatMul", "qmatmul"
    WriteSlice = "WriteSlice", "write_slice"
    WriteSliceRotating = "WriteSliceRotating", "write_slice_rotating"
    WriteSliceDoff = "WriteSliceDoff", "write_slice_doff"
    Copy = "Copy", "copy"
    ReluInplace = "ReluInplace", "relu_inplace"
    SiluInplace = "SiluInplace", "silu_inplace"
    GeluTanhInplace = "GeluTanhInplace", "gelu_tanh_inplace"
    TanhInplace = "TanhInplace", "tanh_inplace"
    SigmoidInplace = "SigmoidInplace", "sigmoid_inplace"
    NegInplace = "NegInplace", "neg_inplace"
    AbsInplace = "AbsInplace", "abs_inplace"
    SqrInplace = "SqrInplace", "sqr_inplace"
    SqrtInplace = "SqrtInplace", "sqrt_inplace"
    RsqrtInplace = "RsqrtInplace", "rsqrt_inplace"
    RecipInplace = "RecipInplace", "recip_inplace"
    ExpInplace = "ExpInplace", "exp_inplace"
    LogInplace = "LogInplace", "log_inplace"
    SinInplace = "SinInplace", "sin_inplace"
    CosInplace = "CosInplace", "cos_inplace"
    SignInplace = "SignInplace", "sign_inplace"
    FloorInplace = "FloorInplace", "floor_inplace"
    CeilInplace = "CeilInplace", "ceil_inplace"
    RoundInplace = "RoundInplace", "round_inplace"
    ErfInplace = "ErfInplace", "erf_inplace"
    GeluInplace = "GeluInplace", "gelu_inplace"
    ClampInplace = "ClampInplace", "clamp_inplace"
    PowIInplace = "PowIInplace", "powi_inplace"
    InplaceAffine = "InplaceAffine", "inplace_affine"
    FusedSoftmaxCrossEntropy = "FusedSoftmaxCrossEntropy", "fused_softmax_cross_entropy"
    CausalConv1d = "CausalConv1d", "causal_conv1d"
    SelectiveScan = "SelectiveScan", "selective_scan"
    SsdChunkScan = "SsdChunkScan", "ssd_chunk_scan"
    Nf4Matmul = "Nf4Matmul", "nf4_matmul"
    RuntimeFused = "RuntimeFused", "runtime_fused"
    NonZeroIndices = "NonZeroIndices", "nonzero_indices"

    def as_str(self) -> str:
        """The snake-case name: key of reports, and name of the public function."""
        return self._as_str

    __str__ = as_str

    def __repr__(self) -> str:
        return f"OpKind.{self.name}"

    @classmethod
    def parse(cls, text: str) -> OpKind:
        """The kind of either spelling; ``UnknownName`` with the nearest names otherwise."""
        if (kind := cls.get(text)) is None:
            raise unknown("OpKind", text, [n for kind in cls for n in (kind.value, kind.as_str())])
        return kind

    @classmethod
    def get(cls, text: str) -> OpKind | None:
        """As :meth:`parse`, but ``None`` for a name this version does not know."""
        return next((kind for kind in cls if text in (kind.value, kind.as_str())), None)

    @classmethod
    def _missing_(cls, value: object) -> OpKind:
        raise unknown("OpKind", value, [kind.value for kind in cls])


class FusedOps(enum.IntEnum):
    """Ids of the fused ops, never reused; those from ``RUNTIME_BASE`` are a process's own."""

    SOFTMAX_LAST_DIM = 1
    FUSED_LINEAR = 2
    RMS_NORM_LAST_DIM = 3
    LAYER_NORM_LAST_DIM = 4
    ROPE = 5
    CONV2D = 6
    SOFTMAX_LAST_DIM_BACKWARD = 7
    LAYER_NORM_LAST_DIM_BACKWARD = 8
    RMS_NORM_LAST_DIM_BACKWARD = 9
    REDUCE_MAX_TO_BACKWARD = 10
    CONV_TRANSPOSE2D = 11
    FLASH_ATTN = 12
    PAGED_ATTN = 13
    QMATMUL = 14
    POWI_BACKWARD = 15
    INPLACE_AFFINE = 16
    FUSED_SOFTMAX_CROSS_ENTROPY = 17
    CAUSAL_CONV1D = 18
    SELECTIVE_SCAN = 19
    SSD_CHUNK_SCAN = 20
    NF4_MATMUL = 21
    FLASH_ATTN_BACKWARD_Q = 22
    FLASH_ATTN_BACKWARD_K = 23
    FLASH_ATTN_BACKWARD_V = 24
    AWQ_MATMUL = 25

    UNASSIGNED = enum.nonmember(0)
    RUNTIME_BASE = enum.nonmember(0x8000)

    @classmethod
    def _missing_(cls, value: object) -> FusedOps:
        raise UnknownName(
            f"FusedOps: {value!r} is not the id of a built-in fused op; they run from 1 to "
            f"{len(cls)}. Ops registered at run time are in fuel_jax.FUSED."
        )


def unknown(what: str, got: object, known: list[str]) -> UnknownName:
    """The error for a name that is not in a table, with the nearest ones that are."""
    near = difflib.get_close_matches(str(got), known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"`python -m fuel_jax` lists all {what} names."
    )
    return UnknownName(f"{what}: no {got!r}; {hint}")
