"""Fuel's op vocabulary in JAX."""

from ._choose import Kernel as Kernel, KernelCaps as KernelCaps
from ._fused import FusedOp as FusedOp
from ._op import Op as Op, Precision as Precision
from .errors import (
    ArgumentError as ArgumentError,
    FuelError as FuelError,
    NotDifferentiable as NotDifferentiable,
    ShapeError as ShapeError,
    SignatureError as SignatureError,
    UnknownName as UnknownName,
    UnsupportedKernel as UnsupportedKernel,
    X64Required as X64Required,
)
from .fused.rms_norm import *
from .fused.softmax import *
from .ops.elementwise import *
from .ops.in_place import *
from .op_kind import FusedOps as FusedOps, OpKind as OpKind
from .registry import *
