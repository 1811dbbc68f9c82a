"""Data for an op's examples: the same on every run and every machine."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._op import Op

FLOATS = ("float32", "bfloat16", "float16", "float64")
SCALE = 0.5  # recurrences grow exponentially in their inputs; a power of two, exact in any dtype


def dtypes_of(op: Op) -> tuple[str, ...]:
    """The float dtypes its operands may have; float32 where it takes no floats."""
    shared = [o for o in op.signature.operands.values() if o.shared]
    return tuple(d for d in FLOATS if d in shared[0].dtypes) if shared else ("float32",)


def filled(op: Op, example: dict[str, Any], dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """Host arrays and parameters of an example, its float operands in ``dtype``.

    Abstract operands get normal data; arrays of other kinds, None and ints stay as they are.
    """
    seed = zlib.crc32(f"{op.name} {sorted(map(str, example.items()))}".encode())
    rng = np.random.default_rng(seed)
    arrays = []
    for name in (n for n in op.inputs if n in example):
        operand = op.signature.operands[name]
        for x in example[name] if op.signature.variadic else [example[name]]:
            if isinstance(x, jax.ShapeDtypeStruct):
                x = np.asarray(rng.normal(size=x.shape)) * SCALE
            if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
                own = "float64" if dtype == "float64" and "float64" in operand.dtypes else "float32"
                x = np.asarray(x).astype(jnp.dtype(dtype if operand.shared else own))
            arrays.append(x)
    return arrays, {n: v for n, v in example.items() if n not in op.inputs}
