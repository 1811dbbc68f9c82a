"""Fuel's op vocabulary in JAX.

Every op is an ordinary function to call, ``jit``, ``vmap`` or differentiate, and an object to ask
questions of::

    y = fuel_jax.rms_norm_last_dim(x, eps=1e-6)
    fuel_jax.rms_norm_last_dim.explain(x)     # which kernel would run here, and why not the others
    fuel_jax.rms_norm_last_dim.decompose(x)   # the same maths in plain jax.numpy
    fuel_jax.OPS, fuel_jax.FUSED              # every op by OpKind, every fused op by id
"""

from . import types as types
from ._choose import Kernel as Kernel, KernelCaps as KernelCaps
from ._fuse.fusing import fuse as fuse
from ._fused import FusedOp as FusedOp
from ._op import Op as Op, Precision as Precision
from .errors import (
    ArgumentError as ArgumentError,
    FileError as FileError,
    FuelError as FuelError,
    NotDifferentiable as NotDifferentiable,
    ShapeError as ShapeError,
    SignatureError as SignatureError,
    UnknownName as UnknownName,
    UnsupportedKernel as UnsupportedKernel,
    X64Required as X64Required,
)
from .fused.awq_matmul import (
    awq_matmul as awq_matmul,
)
from .fused.causal_conv1d import (
    causal_conv1d as causal_conv1d,
)
from .fused.conv2d import (
    conv2d as conv2d,
)
from .fused.conv_transpose2d import (
    conv_transpose2d as conv_transpose2d,
)
from .fused.cross_entropy import (
    fused_softmax_cross_entropy as fused_softmax_cross_entropy,
)
from .fused.flash_attn import (
    flash_attn as flash_attn,
    flash_attn_backward_k as flash_attn_backward_k,
    flash_attn_backward_q as flash_attn_backward_q,
    flash_attn_backward_v as flash_attn_backward_v,
)
from .fused.inplace_affine import (
    inplace_affine as inplace_affine,
)
from .fused.layer_norm import (
    layer_norm_last_dim as layer_norm_last_dim,
    layer_norm_last_dim_backward as layer_norm_last_dim_backward,
)
from .fused.linear import (
    fused_linear as fused_linear,
)
from .fused.nf4_matmul import (
    nf4_matmul as nf4_matmul,
)
from .fused.paged_attn import (
    paged_attn as paged_attn,
)
from .fused.powi_backward import (
    powi_backward as powi_backward,
)
from .fused.qmatmul import (
    qmatmul as qmatmul,
)
from .fused.reduce_max_to_backward import (
    reduce_max_to_backward as reduce_max_to_backward,
)
from .fused.rms_norm import (
    rms_norm_last_dim as rms_norm_last_dim,
    rms_norm_last_dim_backward as rms_norm_last_dim_backward,
)
from .fused.rope import (
    rope as rope,
)
from .fused.selective_scan import (
    selective_scan as selective_scan,
)
from .fused.softmax import (
    log_softmax_last_dim as log_softmax_last_dim,
    log_softmax_last_dim_backward as log_softmax_last_dim_backward,
    softmax_last_dim as softmax_last_dim,
    softmax_last_dim_backward as softmax_last_dim_backward,
)
from .fused.ssd_chunk_scan import (
    ssd_chunk_scan as ssd_chunk_scan,
)
from .op_kind import FusedOps as FusedOps, OpKind as OpKind
from .ops.cache import (
    write_slice as write_slice,
    write_slice_doff as write_slice_doff,
    write_slice_rotating as write_slice_rotating,
)
from .ops.cumsum import cumsum as cumsum
from .ops.elementwise import (
    abs as abs,
    add as add,
    affine as affine,
    ceil as ceil,
    clamp as clamp,
    cos as cos,
    div as div,
    eq as eq,
    erf as erf,
    exp as exp,
    floor as floor,
    ge as ge,
    gelu as gelu,
    gelu_tanh as gelu_tanh,
    gt as gt,
    le as le,
    log as log,
    lt as lt,
    maximum as maximum,
    minimum as minimum,
    mul as mul,
    ne as ne,
    neg as neg,
    pow as pow,
    powi as powi,
    recip as recip,
    relu as relu,
    rem as rem,
    round as round,
    rsqrt as rsqrt,
    sigmoid as sigmoid,
    sign as sign,
    silu as silu,
    sin as sin,
    sqr as sqr,
    sqrt as sqrt,
    step as step,
    sub as sub,
    tanh as tanh,
    where as where,
)
from .ops.in_place import (
    abs_inplace as abs_inplace,
    ceil_inplace as ceil_inplace,
    clamp_inplace as clamp_inplace,
    cos_inplace as cos_inplace,
    erf_inplace as erf_inplace,
    exp_inplace as exp_inplace,
    floor_inplace as floor_inplace,
    gelu_inplace as gelu_inplace,
    gelu_tanh_inplace as gelu_tanh_inplace,
    log_inplace as log_inplace,
    neg_inplace as neg_inplace,
    powi_inplace as powi_inplace,
    recip_inplace as recip_inplace,
    relu_inplace as relu_inplace,
    round_inplace as round_inplace,
    rsqrt_inplace as rsqrt_inplace,
    sigmoid_inplace as sigmoid_inplace,
    sign_inplace as sign_inplace,
    silu_inplace as silu_inplace,
    sin_inplace as sin_inplace,
    sqr_inplace as sqr_inplace,
    sqrt_inplace as sqrt_inplace,
    tanh_inplace as tanh_inplace,
)
from .ops.index import (
    gather as gather,
    index_add as index_add,
    index_select as index_select,
    nonzero_indices as nonzero_indices,
    scatter_add as scatter_add,
)
from .ops.layout import (
    cast as cast,
    concat as concat,
    copy as copy,
    flip as flip,
    masked_fill as masked_fill,
    roll as roll,
    tril as tril,
    triu as triu,
)
from .ops.linalg import (
    matmul as matmul,
)
from .ops.padding import pad as pad, pad_backward as pad_backward
from .ops.reduce import (
    argmax_dim as argmax_dim,
    argmin_dim as argmin_dim,
    max_reduce as max_reduce,
    mean_reduce as mean_reduce,
    min_reduce as min_reduce,
    reduce_max_to as reduce_max_to,
    reduce_sum_to as reduce_sum_to,
    sum_reduce as sum_reduce,
)
from .registry import FUSED as FUSED, OPS as OPS, using as using
from .runtime import (
    register_fused as register_fused,
    runtime_fused as runtime_fused,
    unregister_fused as unregister_fused,
)
