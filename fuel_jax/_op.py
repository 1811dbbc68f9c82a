"""What an op is: a function, its contract, and the kernels that can serve it.

The decorated function body is the op's *decomposition*, and everything derivable is derived from
it rather than written again:

    shape and dtype rule   jax.eval_shape(body); annotations check the operands (_signature.py)
    XLA lowering           the body, last in the list of kernels                (_choose.py)
    default gradient       jax.vjp(body)                                        (_fused.py)
    fusion pattern         jax.make_jaxpr(body)
    cost                   XLA's count of the body's operations; bytes of inputs and outputs
    reference for tests    the body in float64

What cannot be derived is declared: kind, id, the backward op, kernels, precision, examples.

A call goes   bind → jit → check → [custom_vjp] → choose → kernel.   Everything right of ``jit``
runs once per signature, when traced.
"""

from __future__ import annotations

import functools
import html
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

import jax
import numpy as np
from jax.core import Tracer

from ._choose import (
    PIN,
    Choice,
    Explanation,
    Kernel,
    KernelCaps,
    Reason,
    abstract,
    choose,
    decide,
    never,
)
from ._parameters import Call
from ._parts import split
from ._sharding import Rule, rule_of, told
from ._signature import Signature
from .errors import ArgumentError, SignatureError, UnsupportedKernel
from .numerics import Precision as Precision, check, tie, vary_alike
from .op_kind import OpKind

if TYPE_CHECKING:  # ``Op`` alone is an op of any signature: Python 3.11 has no defaults to say so
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P, R = ParamSpec("P"), TypeVar("R")

Examples = Callable[[], Iterable[dict[str, Any]]]


class Shaped(Protocol):
    """What an op can be asked about: an array, or as much of one as ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class Cost:
    """What a call has to do at least: the roofline's two axes."""

    flops: int
    transcendentals: int
    bytes: int


@dataclass(frozen=True)
class OutputView:
    """One output of an op: its slot's name, and what it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Op(Generic[P, R]):
    """An op of plain jax.numpy: its gradient is its body's, in either mode.

    Call it like the function it was declared with; ask it for the rest.
    """

    body: Callable[..., R]
    name: str
    kind: OpKind | None
    precision: Precision
    outputs: tuple[str, ...]
    rejects: Reason
    expects: Callable[..., Any]
    examples: Examples
    adapt: Callable[..., tuple[Sequence[Any], dict[str, Any]]] | None
    destructive_input: int | None
    splits: str | Callable[..., Rule]
    signature: Signature
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    kernels: list[Kernel]
    __name__: str

    def __init__(
        self,
        body: Callable[..., R],
        *,
        name: str | None = None,
        kind: OpKind | None = None,
        precision: Precision,
        outputs: Sequence[str] = ("y",),
        rejects: Reason = never,
        expects: Callable[..., Any] = never,
        adapt: Callable[..., tuple[Sequence[Any], dict[str, Any]]] | None = None,
        destructive_input: int | None = None,
        splits: str | Callable[..., Rule] = "",
        examples: Examples = lambda: (),
    ) -> None:
        """Declare an op.

        Args:
            body: the decomposition.  Arrays by position, parameters by keyword; annotated.
            name: the body's, if None.
            kind: its place in the vocabulary, if it has one.
            precision: the promise that the tests hold it to.
            outputs: slot names, in order.
            rejects: ``(*avals, **params) -> reason | None`` for what annotations cannot express;
                a reason begins with the argument, tells what arrived, what was wanted, what to do.
            expects: ``(*arrays, **params) -> bool array | None``, what must hold of values.  They
                cannot raise under jit; under ``checkify`` they do.
            adapt: the public signature where it differs from the body's (an array inside a keyword
                argument); returns the body's ``(arrays, params)``.
            destructive_input: position of the operand whose buffer an eager call gives up.
            splits: axes of the operands' annotations that may be split over devices, each part
                computed alone; ``h=hk*r`` says that h is (hk, r).  A result that lacks such an
                axis is a sum over it.  Or the rule itself, of parameters, operands and results.
            examples: shapes and parameters that tests, benchmarks, tuning and docs share.  Every
                argument of the body by name; abstract arrays and float arrays stand for data of
                any float dtype, other arrays for themselves.
        """
        functools.update_wrapper(self, adapt or body)
        self.body, self.name, self.kind = body, name or body.__name__, kind
        self.__name__ = self.__qualname__ = self.name
        self.__doc__ = body.__doc__
        self.precision, self.outputs = precision, tuple(outputs)
        self.rejects, self.expects, self.examples = rejects, expects, examples
        self.adapt, self.destructive_input, self.splits = adapt, destructive_input, splits
        self.signature = Signature(body, self.name)
        self.inputs, self.params = self.signature.inputs, self.signature.params
        self.kernels = [Kernel("xla", body)]

    # -- calling ---------------------------------------------------------------------------

    @functools.cached_property
    def _jitted(self) -> Any:
        """The compiled op.  Made on first use: to make them all would double the import's time."""
        return self._compiled()

    @functools.cached_property
    def _donating(self) -> Any:
        """The compiled op, the buffer of its destructive input handed over."""
        assert self.destructive_input is not None
        return self._compiled(donate_argnums=1 + self.destructive_input)

    def _compiled(self, **options: Any) -> Any:
        def traced(call: Call, *arrays: Any) -> Any:
            params = call.params
            self._check(params, arrays)
            check(self.expects(*arrays, **params))
            return self._core(call, *vary_alike(arrays))

        traced.__name__ = self.name  # as jaxprs, HLO and profiles show it
        return jax.jit(traced, static_argnums=0, **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        params, arrays = self._bind(args, kwargs)
        call = Call.of(params, PIN.value)
        if self.destructive_input is not None and gives_up(arrays, self.destructive_input):
            return self._donating(call, *arrays)
        return self._jitted(call, *arrays)

    def decompose(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The op in plain jax.numpy: no kernel, no custom gradient, forward mode works."""
        params, arrays = self._bind(args, kwargs)
        self._check(params, arrays)
        return self.body(*arrays, **params)

    def _bind(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        if self.adapt is not None:
            args, kwargs = self._adapt(args, kwargs)
        return self.signature.bind(args, kwargs)

    def _adapt(self, args: Any, kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        assert self.adapt is not None
        try:
            self._public.bind(*args, **kwargs)
        except TypeError as error:
            raise SignatureError(f"{self.name}: {error}. Call it as {self.usage()}.") from None
        return self.adapt(*args, **kwargs)

    @functools.cached_property
    def _public(self) -> inspect.Signature:
        """That of ``adapt``: reading it costs more than a call."""
        python, empty = inspect.signature(self.adapt or self.body), inspect.Signature.empty
        names = [p.replace(annotation=empty) for p in python.parameters.values()]
        return python.replace(parameters=names, return_annotation=empty)

    def _core(self, call: Call, *arrays: Any) -> Any:
        """What is differentiated: here, whatever runs."""
        return self._run(call, *arrays)

    def _run(self, call: Call, *arrays: Any) -> Any:
        part = functools.partial(self._choose, call)
        rule = functools.partial(self._rule, call.params)
        over_devices = functools.partial(split, part=part, rule_of=rule) if self.by_parts else None
        out = self._choose(call, *arrays, over_devices=over_devices)
        return tie(out, arrays) if isinstance(out, tuple) else out

    def _choose(self, call: Call, *arrays: Any, over_devices: Any = None) -> Any:
        run = choose(self.name, self.kernels, call.pin, abstract(arrays), call.params, over_devices)
        return run(*arrays)

    def _rule(self, params: dict[str, Any], arrays: Sequence[Any], outputs: Any) -> Rule:
        if callable(self.splits):
            return self.splits(params, arrays, as_tuple(outputs))
        return rule_of(
            self.signature, self.splits, self._present(params), arrays, as_tuple(outputs)
        )

    def _check(self, params: dict[str, Any], arrays: Sequence[Any]) -> None:
        self.signature.check(arrays)
        if reason := self.rejects(*abstract(arrays), **params):
            raise ArgumentError(f"{self.name}: {reason}")

    # -- choosing a kernel -----------------------------------------------------------------

    def kernel(
        self,
        name: str,
        *,
        platforms: tuple[str, ...] = (),
        refuses: Reason = never,
        declines: Reason = never,
        caps: KernelCaps = KernelCaps(),
        tiles: Callable[..., Any] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator registering an implementation, tried after those before it, before ``xla``.

        Args:
            name: by which it is pinned and told of; one of the op.
            platforms: that it is for, ``"cpu"`` or ``"cuda"``; every one if empty.
            refuses: why it cannot serve a call, from shapes and parameters; see :class:`Kernel`.
            declines: why another is to be taken before it; a pin overrules this.
            caps: what it takes beyond contiguous row-major operands.
            tiles: how it may be cut for a call, of the arguments of ``refuses``.
        """

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            self.add(Kernel(name, run, platforms, refuses, declines, caps, tiles))
            return run

        return register

    def add(self, kernel: Kernel) -> None:
        """Register an implementation, tried after those before it, before ``xla``."""
        if kernel.name in [k.name for k in self.kernels]:
            raise ArgumentError(f"{self.name}: kernel {kernel.name!r} is registered already.")
        self.kernels.insert(-1, kernel)
        for compiled in ("_jitted", "_donating"):
            self.__dict__.pop(compiled, None)

    def using(self, name: str) -> Callable[P, R]:
        """The op pinned to one implementation, its gradient included: ``op.using("xla")(x)``.

        The backward is pinned as well where it has an implementation of that name.
        """
        if name not in (known := [k.name for k in self.kernels]):
            raise UnsupportedKernel(
                f"{self.name}: no kernel {name!r}; it has {', '.join(known)}. "
                f"{self.name}.explain(...) says who runs."
            )

        @functools.wraps(self.body)
        def pinned(*args: P.args, **kwargs: P.kwargs) -> R:
            with PIN(name):
                return self(*args, **kwargs)

        return pinned

    @overload
    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation: ...
    @overload
    def explain(self, *arrays: Shaped | int | None, **params: Any) -> Explanation: ...
    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Every implementation in order of preference, with the reason it would or wouldn't run."""
        params, arrays = self._bind(args, kwargs)
        avals = abstract(arrays)
        self._check(params, avals)
        forward = decide(self.name, self.kernels, PIN.value, avals, params)
        rule = lambda: self._rule(params, arrays, self.out(*args, **kwargs))
        by_rule = rule if self.by_parts else None
        says = told(forward, by_rule, self.signature.names(arrays), arrays)
        return Explanation(self.name, forward, self._explain_backward(params, avals), says)

    def _explain_backward(self, params: dict[str, Any], avals: list[Any]) -> list[Choice] | str:
        derivative = "derivative of whatever runs forward"
        return derivative if self.wrt else "no gradient: integer operands"

    # -- being asked -----------------------------------------------------------------------

    @property
    def by_parts(self) -> bool:
        """Whether devices run it by its rule; what is ``jax.numpy`` alone is split by XLA."""
        return bool(self.splits) and any(kernel.interpretable for kernel in self.kernels)

    @functools.cached_property
    def wrt(self) -> tuple[str, ...]:
        """Names of the operands that have a gradient."""
        return tuple(n for n, o in self.signature.operands.items() if o.floating)

    @overload
    def out(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def out(self, *arrays: Shaped | int | None, **params: Any) -> Any: ...
    def out(self, *args: Any, **kwargs: Any) -> Any:
        """Shape and dtype of the result; arguments may be abstract."""
        params, arrays = self._bind(args, kwargs)
        self._check(params, arrays)
        return jax.eval_shape(functools.partial(self.body, **params), *arrays)

    @overload
    def output_views(self, *args: P.args, **kwargs: P.kwargs) -> tuple[OutputView, ...]: ...
    @overload
    def output_views(
        self, *arrays: Shaped | int | None, **params: Any
    ) -> tuple[OutputView, ...]: ...
    def output_views(self, *args: Any, **kwargs: Any) -> tuple[OutputView, ...]:
        """Slot name, shape and dtype of each output, in order."""
        params, _ = self._bind(args, kwargs)
        leaves = as_tuple(self.out(*args, **kwargs))
        return tuple(
            OutputView(name, y.shape, y.dtype)
            for name, y in zip(self._present(params), leaves, strict=True)
        )

    def _present(self, params: dict[str, Any]) -> list[str]:
        """Names of the outputs returned; a parameter ``return_lse`` switches ``lse`` on."""
        return [n for n in self.outputs if params.get(f"return_{n}", True)]

    @overload
    def cost(self, *args: P.args, **kwargs: P.kwargs) -> Cost: ...
    @overload
    def cost(self, *arrays: Shaped | int | None, **params: Any) -> Cost: ...
    def cost(self, *args: Any, **kwargs: Any) -> Cost:
        """Work of the fused form: XLA's operation count, inputs read once, outputs written once."""
        params, arrays = self._bind(args, kwargs)
        moved = jax.tree.leaves((arrays, self.out(*args, **kwargs)))
        body = jax.jit(functools.partial(self.body, **params))
        counted = body.lower(*arrays).cost_analysis() or {}
        return Cost(
            flops=int(counted.get("flops", 0)),
            transcendentals=int(counted.get("transcendentals", 0)),
            bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in moved),
        )

    @overload
    def sharding(self, *args: P.args, **kwargs: P.kwargs) -> Rule: ...
    @overload
    def sharding(self, *arrays: Shaped | int | None, **params: Any) -> Rule: ...
    def sharding(self, *args: Any, **kwargs: Any) -> Rule:
        """Which axes of operands and results belong together, and which may be split over devices.

        Operands split otherwise are gathered before a kernel runs; the body, XLA splits as it can.
        """
        params, arrays = self._bind(args, kwargs)
        return self._rule(params, arrays, self.out(*args, **kwargs))

    def usage(self) -> str:
        """``rms_norm_last_dim(x[*batch d], *, eps=1e-06)``."""
        if self.adapt is None:
            return self.signature.usage()
        return f"{self.name}{self._public}"

    def __repr__(self) -> str:
        return f"<op {self.usage()}; {', '.join(k.name for k in self.kernels)}>"

    def _repr_html_(self) -> str:
        doc = inspect.cleandoc(self.__doc__ or "").partition("\n")[0]
        return f"<code>{html.escape(self.usage())}</code><br>{html.escape(doc)}"

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled and copied by name, as functions are


def gives_up(arrays: Sequence[Any], position: int) -> bool:
    """Whether an eager call may hand the operand's buffer over: it is concrete, and used once."""
    x = arrays[position]
    others = [a for i, a in enumerate(arrays) if i != position]
    return (
        isinstance(x, jax.Array)
        and not any(isinstance(a, Tracer) for a in arrays)
        and not any(a is x for a in others)
    )


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """The outputs of an op, also when there is one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
