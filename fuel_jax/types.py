"""Array annotations.  The shape and dtype rules of an op live in its signature and nowhere else.

``Floats[Array, "*batch d"]`` is read twice: by people and type checkers as ``jax.Array``, and by
:mod:`fuel_jax._signature` as the operand's rule.  Axes of one name have one extent in all operands
of a call; operands whose class is ``shared`` have one dtype.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .errors import UnknownName, X64Required
from .op_kind import unknown

Array = jax.Array
Pair = tuple[int, int]  # (vertical, horizontal)
Reduction = Literal["mean", "sum", "none"]

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")

ANYTHING = (*FLOATS, *INTS, "bool", "complex64", "complex128")
ANYTHING += ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")
NARROWED = {  # what JAX makes of a 64-bit dtype while jax_enable_x64 is off
    **{"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"},
}
FUEL_DTYPES = {  # Fuel's name -> JAX's
    **{"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16"},
    **{"U8": "uint8", "I8": "int8", "U32": "uint32", "I16": "int16", "I32": "int32"},
    **{"I64": "int64", "F8E4M3": "float8_e4m3fn"},
}

if TYPE_CHECKING:  # what may be written; a body is given tuples, of ints
    IntOrPair = int | Sequence[int]
    Ints = Sequence[int]
    Pairs = Sequence[Sequence[int]]
else:
    IntOrPair = Pair
    Ints = tuple[int, ...]
    Pairs = tuple[Pair, ...]

if TYPE_CHECKING:
    from ._annotated import (
        Anything as Anything,
        Bytes as Bytes,
        Floats as Floats,
        Halves as Halves,
        Indices as Indices,
        Mask as Mask,
        Numbers as Numbers,
        Products as Products,
        Single as Single,
        Wide as Wide,
        Words as Words,
    )
else:
    from jaxtyping import AbstractDtype

    class Floats(AbstractDtype):
        """F32, F64, BF16, F16: the four every float op covers."""

        dtypes, shared = FLOATS, True

    class Numbers(AbstractDtype):
        """Floats and integers: arithmetic, comparison, reductions to an extreme."""

        dtypes, shared = FLOATS + INTS, True

    class Products(AbstractDtype):
        """Floats, and the bytes whose products are summed in I32."""

        dtypes, shared = (*FLOATS, "int8", "uint8"), True

    class Anything(AbstractDtype):
        """Whatever JAX can store: ops that move elements and never look at them."""

        dtypes, shared = ANYTHING, True

    class Wide(AbstractDtype):
        """What sums are taken in: F32, or F64 beside F64 operands.  Statistics, scales, states."""

        dtypes, shared = ("float32", "float64"), False

    class Single(AbstractDtype):
        """F32 alone."""

        dtypes, shared = ("float32",), False

    class Halves(AbstractDtype):
        """Floats of any width that need not agree with the other operands: stored scales."""

        dtypes, shared = FLOATS, False

    class Indices(AbstractDtype):
        """Integers that select or count.  64-bit NumPy ones are accepted where they fit in I32."""

        dtypes, shared = INTS, False

    class Mask(AbstractDtype):
        """U8, any nonzero is true; or bool."""

        dtypes, shared = ("uint8", "bool"), False

    class Bytes(AbstractDtype):
        """Packed bytes."""

        dtypes, shared = ("uint8",), False

    class Words(AbstractDtype):
        """Packed 32-bit words."""

        dtypes, shared = ("uint32",), False


if TYPE_CHECKING:
    from jax.typing import DTypeLike

    DType = DTypeLike
else:

    class DType:
        """Annotation of a parameter that names a dtype; its values are canonical dtype names."""


def dtype_named(value: DType, op: str = "cast", parameter: str = "dtype") -> str:
    """JAX's name of a dtype: ``"float32"`` for ``jnp.float32``, ``"float32"`` or Fuel's ``"F32"``.

    Raises:
        UnknownName: no such dtype.
        X64Required: a 64-bit dtype while ``jax_enable_x64`` is off.
    """
    try:
        name = np.dtype(FUEL_DTYPES.get(value, value) if isinstance(value, str) else value).name
    except TypeError:
        try:
            name = jnp.dtype(value).name
        except TypeError:
            error = unknown("dtype", value, [*FUEL_DTYPES, *FUEL_DTYPES.values()])
            raise UnknownName(f"{op}: parameter {parameter!r}: {error}") from None
    require_x64(op, parameter, name)
    return name


def x64_enabled() -> bool:
    """Whether JAX stores 64-bit numbers in 64 bits."""
    return jax.dtypes.canonicalize_dtype("float64") == np.float64


def require_x64(op: str, argument: str, dtype: str) -> None:
    """Raise if JAX would silently store ``dtype`` in 32 bits."""
    if dtype in NARROWED and not x64_enabled():
        raise X64Required(
            f"{op}: {argument!r} is {dtype} and jax_enable_x64 is off, so JAX would make it "
            f"{NARROWED[dtype]}. Call jax.config.update('jax_enable_x64', True) first, or pass "
            f"{NARROWED[dtype]}."
        )
