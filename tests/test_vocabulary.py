"""The vocabulary against Fuel's: names, order, ids; and every name has an op behind it."""

import json
import pickle

import jax
import pytest

import fuel_jax
from fuel_jax import FUSED, OPS, FusedOps, OpKind

SEED_KINDS = """
MatMul AddElementwise SubElementwise MulElementwise DivElementwise ReluElementwise
NegElementwise SqrElementwise SqrtElementwise RecipElementwise AbsElementwise TanhElementwise
ExpElementwise LogElementwise SinElementwise CosElementwise SigmoidElementwise SiluElementwise
GeluTanhElementwise StepElementwise SumReduce MaxReduce MinReduce MeanReduce Cast Conv2D
ConvTranspose2D ReduceSumTo ReduceMaxTo FusedLinear FlashAttn FlashAttnBackwardQ
FlashAttnBackwardK FlashAttnBackwardV PagedAttn Affine ClampElementwise PowIElementwise
PowIElementwiseBackward MaximumElementwise MinimumElementwise EqualElementwise
NotEqualElementwise LessElementwise LessEqualElementwise GreaterElementwise
GreaterEqualElementwise Where FloorElementwise CeilElementwise RoundElementwise SignElementwise
ErfElementwise GeluElementwise PowElementwise RsqrtElementwise RemElementwise Flip Roll CumSum
Pad Triu Tril LogSoftmaxLastDim LogSoftmaxLastDimBackward MaskedFill PadBackward Concat
SoftmaxLastDim SoftmaxLastDimBackward RmsNormLastDim RmsNormLastDimBackward LayerNormLastDim
LayerNormLastDimBackward ReduceMaxToBackward IndexSelect Gather Rope IndexAdd ScatterAdd
ArgMaxDim ArgMinDim QMatMul WriteSlice WriteSliceRotating WriteSliceDoff Copy ReluInplace
SiluInplace GeluTanhInplace TanhInplace SigmoidInplace NegInplace AbsInplace SqrInplace
SqrtInplace RsqrtInplace RecipInplace ExpInplace LogInplace SinInplace CosInplace SignInplace
FloorInplace CeilInplace RoundInplace ErfInplace GeluInplace ClampInplace PowIInplace
InplaceAffine FusedSoftmaxCrossEntropy CausalConv1d SelectiveScan SsdChunkScan Nf4Matmul
RuntimeFused NonZeroIndices
""".split()

SEED_FUSED = """
SOFTMAX_LAST_DIM FUSED_LINEAR RMS_NORM_LAST_DIM LAYER_NORM_LAST_DIM ROPE CONV2D
SOFTMAX_LAST_DIM_BACKWARD LAYER_NORM_LAST_DIM_BACKWARD RMS_NORM_LAST_DIM_BACKWARD
REDUCE_MAX_TO_BACKWARD CONV_TRANSPOSE2D FLASH_ATTN PAGED_ATTN QMATMUL POWI_BACKWARD INPLACE_AFFINE
FUSED_SOFTMAX_CROSS_ENTROPY CAUSAL_CONV1D SELECTIVE_SCAN SSD_CHUNK_SCAN NF4_MATMUL
FLASH_ATTN_BACKWARD_Q FLASH_ATTN_BACKWARD_K FLASH_ATTN_BACKWARD_V AWQ_MATMUL
""".split()

SEED_FAMILY = {  # Fuel's registry inventory; AWQ_MATMUL is newer than it
    "Forward": (1, 2, 5, 6, 11, 16, 17, 18, 19, 20),
    "Norm": (3, 4),
    "Backward": (7, 8, 9, 10, 15),
    "Attention": (12, 13, 22, 23, 24),
    "Quantized": (14, 21, 25),
}
SEED_BACKWARD = {  # every other entry is NotDifferentiable
    1: "Fused(softmax_last_dim_backward)",
    3: "Fused(rms_norm_last_dim_backward)",
    4: "Fused(layer_norm_last_dim_backward)",
    17: "Decompose",
    25: "Decompose",
}


def test_kinds_are_the_seed_s_in_its_order():
    assert [kind.name for kind in OpKind] == SEED_KINDS
    assert len(SEED_KINDS) == 118


def test_fused_ids_are_the_seed_s():
    assert {f.name: f.value for f in FusedOps} == {n: i for i, n in enumerate(SEED_FUSED, 1)}
    assert len(SEED_FUSED) == 25
    assert (FusedOps.UNASSIGNED, FusedOps.RUNTIME_BASE) == (0, 0x8000)


@pytest.mark.parametrize("kind", OpKind, ids=str)
def test_a_kind_is_written_and_read(kind):
    assert json.loads(json.dumps({"op": kind})) == {"op": kind.name}
    assert OpKind(json.loads(json.dumps(kind))) is kind
    assert OpKind.parse(str(kind)) is OpKind.parse(kind.name) is OpKind[kind.name] is kind
    assert OpKind.get(kind.as_str()) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert {kind: 1}[OpKind(kind.name)] == 1


def test_names_are_unique_and_made_of_words():
    names = [str(kind) for kind in OpKind]
    assert len(set(names)) == 118
    assert all(name.isidentifier() and name == name.lower() for name in names)


@pytest.mark.parametrize("text", ["softmax", "SoftMaxLastDim", "", "no_such_op"])
def test_unknown_names_are_refused_with_a_hint(text):
    assert OpKind.get(text) is None
    for read in (OpKind, OpKind.parse):
        with pytest.raises(fuel_jax.UnknownName, match=f"^OpKind: no {text!r}; ") as caught:
            read(text)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(fuel_jax.UnknownName, match="did you mean SoftmaxLastDim"):
        OpKind("SoftMaxLastDim")
    with pytest.raises(fuel_jax.UnknownName, match="FusedOps: 99 is not the id"):
        FusedOps(99)


@pytest.mark.parametrize("kind", OpKind, ids=str)
def test_every_kind_has_an_op_of_its_name(kind):
    op = OPS[kind]
    assert op is getattr(fuel_jax, kind.as_str())
    assert (op.kind, op.name) == (kind, kind.as_str())


def test_the_tables_are_total_in_order_and_read_only():
    assert list(OPS) == list(OpKind)
    assert list(FUSED)[:25] == list(FusedOps)
    for table in (OPS, FUSED):
        with pytest.raises(TypeError):
            table[next(iter(table))] = None  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("fused", FusedOps, ids=lambda f: f.name)
def test_every_fused_op_holds_its_registry_entry(fused):
    op = FUSED[fused]
    assert isinstance(op, jax.custom_vjp)
    assert op.id == fused
    assert op.name == fused.name.lower()
    assert getattr(fuel_jax, op.name) is op
    assert fused.value in SEED_FAMILY[op.family]
    assert op.seed_backward == SEED_BACKWARD.get(fused.value, "NotDifferentiable")
    assert op.backward_kind in ("Decompose", "NotDifferentiable") or op.backward_kind in (
        f"Fused({op.backward.name})",
    )
    assert op.destructive_input == (0 if fused is FusedOps.INPLACE_AFFINE else None)
    assert op.kernels[-1].name == "xla"
    assert op.kernels[-1].revision != 0
    assert not op.kernels[-1].caps.strided_input


def test_every_public_name_is_documented_and_no_other_is_exported():
    ops = {op.name for op in (*OPS.values(), *FUSED.values())}
    public = {n for n in vars(fuel_jax) if not n.startswith("_")}
    modules = {n for n in public if type(getattr(fuel_jax, n)).__name__ == "module"}
    assert ops <= public
    for name in public - modules - {"OPS", "FUSED"}:
        assert getattr(fuel_jax, name).__doc__, name
