"""Every op by kind, every fused op by id or name; pinning by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, overload

from ._choose import PIN
from ._fused import FusedOp
from ._notebook import html_table
from ._op import Op, P, R
from .errors import ArgumentError, UnsupportedKernel
from .op_kind import FusedOps, OpKind, unknown

C = ParamSpec("C")
K = TypeVar("K")
V = TypeVar("V", bound=Any)

_OPS: dict[OpKind, Any] = dict.fromkeys(OpKind)  # in the vocabulary's order, filled on import
_FUSED: dict[int, Any] = dict.fromkeys(FusedOps)
_RUNTIME: dict[str, FusedOp] = {}  # what users registered, by every name they gave it (runtime.py)


class View(Mapping[K, V]):
    """A table to be read: one row per entry in a terminal and in a notebook."""

    def __init__(self, name: str, held: Mapping[K, V]) -> None:
        self._name, self._held = name, held

    def __getitem__(self, key: K) -> V:
        return self._held[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _rows(self) -> list[tuple[str, str]]:
        return [(str(getattr(k, "name", k)), op.usage()) for k, op in self.items() if op]

    def __repr__(self) -> str:
        return "\n".join([self._name, *(f"  {key:<28} {usage}" for key, usage in self._rows())])

    def _repr_html_(self) -> str:
        return html_table(self._name, self._rows())


OPS: Mapping[OpKind, Op] = View("OPS, by kind", _OPS)
FUSED: Mapping[int, FusedOp] = View("FUSED, by id", _FUSED)


@overload
def op(
    kind: OpKind, *, adapt: Callable[C, Any], **contract: Any
) -> Callable[[Callable[..., R]], Op[C, R]]: ...
@overload
def op(
    kind: OpKind, *, adapt: None = None, **contract: Any
) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(kind: OpKind, **contract: Any) -> Any:
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
