"""Every op by kind, every fused op by id or name; pinning by name."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ._choose import PIN
from ._fused import FusedOp
from ._op import Op, P, R
from .errors import ArgumentError, UnsupportedKernel
from .op_kind import FusedOps, OpKind, unknown

_OPS: dict[OpKind, Any] = dict.fromkeys(OpKind)  # in the vocabulary's order, filled on import
_FUSED: dict[int, Any] = dict.fromkeys(FusedOps)
_RUNTIME: dict[str, FusedOp] = {}  # what users registered, by every name they gave it (runtime.py)

OPS: Mapping[OpKind, Op] = types.MappingProxyType(_OPS)
FUSED: Mapping[int, FusedOp] = types.MappingProxyType(_FUSED)


def op(kind: OpKind, **contract: Any) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare a plain op; the decorated body is its decomposition."""
    return lambda body: enter(Op(body, kind=kind, **contract))


def fused_op(
    kind: OpKind | None = None, *, id: FusedOps | None = None, **contract: Any
) -> Callable[[Callable[P, R]], FusedOp[P, R]]:
    """Declare a fused op; the decorated body is its decomposition.

    Without a kind and an id it has kernels and a gradient like any other, and no place in the
    vocabulary: the backward of one that has.
    """
    return lambda body: enter(FusedOp(body, kind=kind, id=id, **contract))


def enter(op: Any) -> Any:
    """Put an op in the tables; a kind and an id belong to one op each."""
    fused_id = getattr(op, "id", None)
    if op.kind is not None:
        if _OPS[op.kind] is not None or op.kind.as_str() != op.name:
            raise ArgumentError(
                f"{op.name}: kind {op.kind!r} belongs to {_OPS[op.kind] or op.kind}."
            )
        _OPS[op.kind] = op
    if fused_id is not None:
        if _FUSED.get(fused_id) is not None:
            raise ArgumentError(f"{op.name}: id {fused_id} belongs to {_FUSED[fused_id].name}.")
        _FUSED[fused_id] = op
    return op


def using(name: str) -> AbstractContextManager[None]:
    """Pin every op called or traced in the block to ``name``, where it has such a kernel.

    Part of the cache key of every ``jax.jit`` around it.  A gradient keeps the pin its forward had.
    """
    ops = [*builtin(), *_RUNTIME.values()]
    known = {kernel.name for op in ops for kernel in op.kernels}
    if name not in known:
        raise UnsupportedKernel(
            f"using: no op has a kernel {name!r}; there are {', '.join(sorted(known))}."
        )
    return PIN(name)


def named(name: int | str) -> FusedOp:
    """The fused op of an id or a name, whoever registered it."""
    if isinstance(name, str) and name in _RUNTIME:
        return _RUNTIME[name]
    for op in FUSED.values():
        if name in (op.id, op.name):
            return op
    raise unknown("fused op", name, [op.name for op in FUSED.values()])


def builtin() -> list[Op]:
    """The ops of the vocabulary, and the fused ones outside it."""
    return [op for op in {*_OPS.values(), *(_FUSED[i] for i in FusedOps)} if op is not None]
