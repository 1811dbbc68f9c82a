"""Scale and shift in place."""

from .._op import Precision
from ..op_kind import FusedOps, OpKind
from ..ops.elementwise import affine
from ..registry import fused_op
from ..types import Array, Numbers


@fused_op(
    OpKind.InplaceAffine,
    id=FusedOps.INPLACE_AFFINE,
    family="Forward",
    splits="*shape",
    precision=Precision(float32=2e-6),
    destructive_input=0,
    matchable=False,
    rejects=affine.rejects,
    examples=affine.examples,
)
def inplace_affine(
    x: Numbers[Array, "*shape"], *, mul: float, add: float
) -> Numbers[Array, "*shape"]:
    """mul · x + add, in place: an eager call deletes the array passed.

    Inside ``jit`` XLA decides; ``donate_argnums`` on the outer ``jit`` makes it an alias.  Values
    and gradient are those of :func:`affine`.

    Args:
        x: any shape.
        mul: factor; F32 beside F32 and half arrays.
        add: summand.

    Returns:
        An array like ``x``.
    """
    return affine.body(x, mul=mul, add=add)
