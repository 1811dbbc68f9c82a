"""Fused ops that users register: their registration, and the op kind that calls them."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack

from ._choose import Explanation, Kernel, Reason
from ._fuse.spelling import Spelling
from ._fused import Family, FusedOp
from ._op import Cost, Examples, OutputView, P, Precision, R
from ._sharding import Rule
from .errors import ArgumentError
from .op_kind import FusedOps, OpKind, unknown
from .registry import _FUSED, _RUNTIME, builtin, enter, named

IDS = itertools.count(FusedOps.RUNTIME_BASE)  # of this process, and never reused in it


class Contract(TypedDict, total=False):
    """What a registered op may declare beside its gradient and kernels; see :class:`FusedOp`."""

    outputs: Sequence[str]
    rejects: Reason
    expects: Callable[..., Any]
    splits: str | Callable[..., Rule]
    examples: Examples
    frozen: Sequence[str]
    spellings: Sequence[Callable[..., Any] | Spelling]
    matchable: bool
    family: Family
    seed_backward: str
    destructive_input: int | None


class RuntimeOp(FusedOp[P, R]):
    """A fused op that a user registered.  It differs from the others in how it is pickled."""

    mark: Any  # fingerprint of the body and the backward, as they were when registered

    def __reduce__(self) -> Any:
        return named, (self.name,)


def register_fused(
    name: str,
    body: Callable[P, R],
    *,
    backward: FusedOp | Callable[..., Any] | Literal["decompose", "none"] = "decompose",
    kernels: tuple[Kernel, ...] = (),
    precision: Precision = Precision(float32=5e-6),
    **contract: Unpack[Contract],
) -> FusedOp[P, R]:
    """Make a function of arrays a fused op of this process.

    Registering an equal body again, under any name, gives the same op; a changed body needs another
    name, or ``unregister_fused`` first.  (A notebook cell may run twice.)

    Args:
        name: what it is called; a Python identifier no other op has.
        body: jax.numpy code; arrays by position, static parameters by keyword.  Annotations, where
            there are any, are its shape and dtype rule, as for the built-in ops.
        backward: ``"decompose"`` for the derivative of the body, ``"none"``, or a function (or
            fused op) that returns a gradient for every float operand.  It names what it needs:
            operands and outputs of the body, and ``upstream``, the cotangent of the first output.
        kernels: implementations in order of preference, each with the body's signature; more can
            be added with ``@op.kernel(...)``.
        precision: promised error, relative to the largest element of the float64 reference.
        **contract: as for the built-in ops: ``outputs``, ``rejects``, ``frozen``, ``examples``, …

    Returns:
        The op, with an id from 0x8000; also reachable as ``fuel_jax.runtime_fused(name, …)``.

    Raises:
        ArgumentError: the name is taken or no identifier, or the body is no function.
    """
    if not name.isidentifier():
        raise ArgumentError(f"register_fused: 'name' is {name!r}; it must be a Python identifier.")
    if not callable(body):
        raise ArgumentError(f"register_fused: 'body' is {body!r}; it must be a function of arrays.")
    mark = fingerprint(body), fingerprint(getattr(backward, "body", backward))
    known: Any = next((op for op in _RUNTIME.values() if op.mark == mark), None)
    holder = _RUNTIME.get(name) or next((o for o in builtin() if o.name == name), None)
    if holder is not None and holder is not known:
        raise ArgumentError(
            f"register_fused: {name!r} is an op already, with another body or backward. "
            "Choose another name"
            + (f", or call unregister_fused({name!r}) first." if name in _RUNTIME else ".")
        )
    if known is None:
        if callable(backward) and not isinstance(backward, FusedOp):
            backward = FusedOp(backward, family="Backward", precision=precision, matchable=False)
        fused_id = next(IDS)
        declared: dict[str, Any] = {"family": "Runtime", **contract}
        declared |= {"precision": precision, "backward": backward}
        known = RuntimeOp(body, name=name, id=fused_id, **declared)
        known.mark = mark
        _FUSED[fused_id] = known
    for kernel in kernels:
        if kernel.name not in [k.name for k in known.kernels]:
            known.add(kernel)
    _RUNTIME[name] = known
    return known


def unregister_fused(name: str) -> None:
    """Forget a registered op, its id and all its names."""
    op = _RUNTIME.get(name)
    if op is None:
        raise unknown("runtime op", name, list(_RUNTIME))
    for fused_id in [i for i, o in _FUSED.items() if o is op]:
        del _FUSED[fused_id]
    for other in [n for n, o in _RUNTIME.items() if o is op]:
        del _RUNTIME[other]


class RuntimeFused:
    """``runtime_fused(op, *arrays, **params)``: call a fused op by its id or name.

    The op kind of everything registered at run time.  What other ops tell of themselves, this tells
    of the op named first: ``runtime_fused.explain("swiglu", gate, up)``.

    Args:
        op: id or name.
        *arrays: its operands.
        **params: its parameters.

    Raises:
        UnknownName: there is no such op; the message lists the nearest.
    """

    kind: OpKind = OpKind.RuntimeFused
    name: str = "runtime_fused"
    inputs: tuple[str, ...] = ("op",)
    params: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    __name__: str

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name

    def __call__(self, op: int | str, *arrays: Any, **params: Any) -> Any:
        """Run the op."""
        return named(op)(*arrays, **params)

    def decompose(self, op: int | str, *arrays: Any, **params: Any) -> Any:
        """Run its body."""
        return named(op).decompose(*arrays, **params)

    def out(self, op: int | str, *arrays: Any, **params: Any) -> Any:
        """Shape and dtype of its result."""
        return named(op).out(*arrays, **params)

    def output_views(self, op: int | str, *arrays: Any, **params: Any) -> tuple[OutputView, ...]:
        """Its outputs, by slot."""
        return named(op).output_views(*arrays, **params)

    def cost(self, op: int | str, *arrays: Any, **params: Any) -> Cost:
        """Its work."""
        return named(op).cost(*arrays, **params)

    def explain(self, op: int | str, *arrays: Any, **params: Any) -> Explanation:
        """Who runs it."""
        return named(op).explain(*arrays, **params)

    def using(self, kernel: str) -> Callable[..., Any]:
        """Run it on one kernel."""
        return lambda op, *arrays, **params: named(op).using(kernel)(*arrays, **params)

    def examples(self) -> tuple[()]:
        """None of its own."""
        return ()

    def usage(self) -> str:
        """``runtime_fused(op, *arrays, **params)``."""
        return f"{self.name}(op, *arrays, **params)"

    def __repr__(self) -> str:
        return f"<op {self.usage()}>"

    def __reduce__(self) -> str:
        return self.name


runtime_fused: RuntimeFused = enter(RuntimeFused())


# -- equal bodies --------------------------------------------------------------------------


def fingerprint(body: Any, seen: tuple[int, ...] = ()) -> Any:
    """What makes two functions the same: code, defaults, and what they refer to.

    Functions are compared by their own fingerprints, so that a notebook cell run twice gives an
    equal body; other objects by value where they are plain, else by identity.
    """
    code = getattr(body, "__code__", None)
    if code is None or id(body) in seen:
        return plain(body)
    seen = (*seen, id(body))
    refer = {n: body.__globals__[n] for n in names_in(code) if n in body.__globals__}
    refer |= dict(zip(code.co_freevars, body.__closure__ or (), strict=True))
    values = {
        n: getattr(v, "cell_contents", v) if isinstance(v, types.CellType) else v
        for n, v in refer.items()
    }
    return (
        code_of(code),
        plain(body.__defaults__),
        plain(tuple((body.__kwdefaults__ or {}).items())),
        tuple((n, str(note)) for n, note in body.__annotations__.items()),
        tuple((n, fingerprint(v, seen)) for n, v in sorted(values.items())),
    )


def plain(value: Any) -> Any:
    """A value comparable to others: itself with its type if it is plain, else its identity."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, (int, float, str, bytes, type(None))):
        return type(value), repr(value)
    return type(value), id(value)


def code_of(code: types.CodeType) -> Any:
    """Instructions and constants, of nested functions too; not where they stood in a file."""
    consts = [code_of(c) if isinstance(c, types.CodeType) else plain(c) for c in code.co_consts]
    return code.co_code, tuple(consts), code.co_names, code.co_varnames, code.co_freevars


def names_in(code: types.CodeType) -> set[str]:
    """Global names a function or one nested in it may read."""
    nested = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*nested)
