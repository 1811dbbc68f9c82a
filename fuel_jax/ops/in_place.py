"""In-place ops: the functional op, and an eager call gives up the array passed.

JAX arrays are immutable, so "in place" means that XLA may reuse the operand's buffer: after an
eager call the array passed is deleted, and using it raises.  Inside ``jit`` XLA decides, and
``donate_argnums`` on the outer ``jit`` makes it an alias.  Gradients are the functional op's.
"""

from typing import Any, TypeVar

from .._called import Unary
from .._op import Op
from ..op_kind import OpKind as K
from ..registry import enter
from . import elementwise

O = TypeVar("O", bound=Op)


def in_place(of: O, kind: K) -> O:
    """The op of the same body that gives up its operand."""
    op: Any = Op(
        of.body,
        name=kind.as_str(),
        kind=kind,
        precision=of.precision,
        rejects=of.rejects,
        destructive_input=0,
        splits=of.splits,
        examples=lambda: [next(iter(of.examples()))],  # the functional op has met the others
    )
    for kernel in of.kernels[:-1]:  # the last is the body
        op.add(kernel)
    op.__module__ = __name__
    op.__doc__ = f"In place; an eager call deletes the array passed:  {of.__doc__}"
    return enter(op)


# fmt: off
relu_inplace: Unary       = in_place(elementwise.relu,      K.ReluInplace)
silu_inplace: Unary       = in_place(elementwise.silu,      K.SiluInplace)
gelu_tanh_inplace: Unary  = in_place(elementwise.gelu_tanh, K.GeluTanhInplace)
tanh_inplace: Unary       = in_place(elementwise.tanh,      K.TanhInplace)
sigmoid_inplace: Unary    = in_place(elementwise.sigmoid,   K.SigmoidInplace)
neg_inplace: Unary        = in_place(elementwise.neg,       K.NegInplace)
abs_inplace: Unary        = in_place(elementwise.abs,       K.AbsInplace)
sqr_inplace: Unary        = in_place(elementwise.sqr,       K.SqrInplace)
sqrt_inplace: Unary       = in_place(elementwise.sqrt,      K.SqrtInplace)
rsqrt_inplace: Unary      = in_place(elementwise.rsqrt,     K.RsqrtInplace)
recip_inplace: Unary      = in_place(elementwise.recip,     K.RecipInplace)
exp_inplace: Unary        = in_place(elementwise.exp,       K.ExpInplace)
log_inplace: Unary        = in_place(elementwise.log,       K.LogInplace)
sin_inplace: Unary        = in_place(elementwise.sin,       K.SinInplace)
cos_inplace: Unary        = in_place(elementwise.cos,       K.CosInplace)
sign_inplace: Unary       = in_place(elementwise.sign,      K.SignInplace)
floor_inplace: Unary      = in_place(elementwise.floor,     K.FloorInplace)
ceil_inplace: Unary       = in_place(elementwise.ceil,      K.CeilInplace)
round_inplace: Unary      = in_place(elementwise.round,     K.RoundInplace)
erf_inplace: Unary        = in_place(elementwise.erf,       K.ErfInplace)
gelu_inplace: Unary       = in_place(elementwise.gelu,      K.GeluInplace)
clamp_inplace = in_place(elementwise.clamp, K.ClampInplace)
powi_inplace = in_place(elementwise.powi, K.PowIInplace)
# fmt: on
