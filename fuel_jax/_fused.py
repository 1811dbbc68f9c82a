"""What a fused op is: an op whose gradient is declared, so that kernels can serve both directions.

A ``FusedOp`` is a ``jax.custom_vjp`` function.  Its backward is another fused op, which names what
it needs among the forward's operands (``x``), outputs (``lse``) and their cotangents (``dlse``;
that of the first output also as ``upstream``), or the derivative of the body, or there is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ._choose import PIN, Choice, decide
from ._fuse.spelling import Spelling
from ._op import Op, P, R, abstract, as_tuple
from ._parameters import Call
from .errors import ArgumentError, NotDifferentiable
from .numerics import is_float

Family = Literal["Forward", "Backward", "Quantized", "Attention", "Norm", "Runtime"]


class FusedOp(Op[P, R], jax.custom_vjp[R]):
    """A differentiable fused op.  Call it like the function it was declared with."""

    id: int | None
    family: Family
    backward: FusedOp | Literal["decompose", "none"]
    seed_backward: str
    frozen: frozenset[str]
    spellings: list[Callable[..., Any] | Spelling]
    matchable: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Without ``custom_vjp.__new__``, which on some versions wants its own arguments."""
        return object.__new__(cls)

    def __init__(
        self,
        body: Callable[P, R],
        *,
        id: int | None = None,
        family: Family,
        backward: FusedOp | Literal["decompose", "none"] = "decompose",
        seed_backward: str = "NotDifferentiable",
        frozen: Sequence[str] = (),
        spellings: Sequence[Callable[..., Any] | Spelling] = (),
        matchable: bool = True,
        **contract: Any,
    ) -> None:
        """Declare a fused op; see :class:`Op` for the rest of the contract.

        Args:
            body: the decomposition.
            id: its place in the registry, or None for an op that only another one uses.
            family: as in Fuel's registry.
            backward: the op that computes the gradient; ``"decompose"`` for the derivative of the
                body; ``"none"`` if there is no gradient.
            seed_backward: Fuel's own ``BackwardKind``.
            frozen: float operands without a gradient; differentiating one raises.
            spellings: other ways to write the body, for ``fuse``; same signature.
            matchable: whether ``fuse`` looks for the body in other people's programs.
            **contract: as for :class:`Op`.
        """

        def run(call: Call, *arrays: Any) -> Any:
            return self._run(call, *arrays)

        run.__name__ = contract.get("name") or body.__name__
        jax.custom_vjp.__init__(self, run, nondiff_argnums=(0,))
        self.defvjp(self._save, self._pull_back, symbolic_zeros=True)
        super().__init__(body, **contract)
        self.id, self.family, self.backward = id, family, backward
        self.seed_backward, self.frozen = seed_backward, frozenset(frozen)
        self.spellings, self.matchable = list(spellings), matchable
        if bad := self.frozen.difference(self.inputs):
            raise ArgumentError(
                f"{self.name}: frozen operands {sorted(bad)} are not among {self.inputs}."
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            if "forward-mode" in str(error):
                error.add_note(f"{self.name}.decompose(...) is plain jax.numpy and supports it.")
            raise

    def _core(self, call: Call, *arrays: Any) -> Any:
        """The op as JAX's custom_vjp sees it: static half first, every operand present."""
        guarded = map(self._guarded, self.signature.names(arrays), arrays)
        return jax.custom_vjp.__call__(self, call, *guarded)

    def spelling(
        self,
        *,
        axes: dict[str, str],
        call: Callable[..., Any] | None = None,
        variants: Sequence[dict[str, Any]] = ({},),
        last: str | None = None,
        dtypes: Mapping[str, Any] = {},
        needs: Sequence[str] = (),
        why_not: str | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: another way in which people write the op, for ``fuse`` to recognise.

        The function takes arrays by position and parameters by keyword.  Parameters annotated
        ``float`` or ``int`` are found in the program.

        Args:
            axes: names of the axes of each operand, ``{"x": "*batch n"}``.  Layouts do not
                matter, so one order of axes stands for all.
            call: what to call instead, with the same arguments; the op itself if None.
            variants: values of the other parameters, a spelling for each.
            last: the axis that must be the last one in a program for the op to be worth it.
            dtypes: of operands that do not hold floats.
            needs: operations that a program must have near the result (their names as terms).
            why_not: for maths like the op's that the op does not do: what ``fuse.report`` says.
        """

        def register(write: Callable[..., Any]) -> Callable[..., Any]:
            params = inspect.signature(write, eval_str=True).parameters.values()
            for fixed in variants:
                holes = {
                    p.name: p.annotation
                    for p in params
                    if p.kind is p.KEYWORD_ONLY and p.name not in fixed
                }
                self.spellings.append(
                    Spelling(
                        self.name,
                        write,
                        {n: tuple(a.split()) for n, a in axes.items()},
                        call or self,
                        holes,
                        fixed,
                        dtypes,
                        last,
                        frozenset(needs),
                        why_not,
                    )
                )
            return write

        return register

    @property
    def by_parts(self) -> bool:
        """Whether it has a rule: bodies sum over axes, and have loops over them."""
        return bool(self.splits)

    # -- differentiating -------------------------------------------------------------------

    @functools.cached_property
    def wrt(self) -> tuple[str, ...]:
        """Operands that have a gradient; the backward returns one for each, in this order."""
        if self.backward == "none":
            return ()
        return tuple(
            n for n, o in self.signature.operands.items() if o.floating and n not in self.frozen
        )

    @property
    def backward_kind(self) -> str:
        """Ours, in the words of Fuel's ``BackwardKind``."""
        if isinstance(self.backward, FusedOp):
            return f"Fused({self.backward.name})"
        return {"decompose": "Decompose", "none": "NotDifferentiable"}[self.backward]

    def _save(self, call: Call, *primals: Any) -> tuple[Any, dict[str, Any]]:
        """Run the op, and keep what the backward names among its operands."""
        arrays = [None if p is None else p.value for p in primals]
        asked = call.params
        params = asked | (self._returning_all() if isinstance(self.backward, FusedOp) else {})
        # The op itself, so that what is saved is differentiable again.
        outputs = self._core(Call.of(params, call.pin), *arrays)
        pool = self._named(params, arrays, outputs)
        wanted = self.backward.inputs if isinstance(self.backward, FusedOp) else self.inputs
        result = [pool[n] for n in self._present(asked)]
        return (
            tuple(result) if len(result) > 1 else result[0],
            {n: pool[n] for n in wanted if n in pool},
        )

    def _pull_back(self, call: Call, saved: dict[str, Any], cotangents: Any) -> tuple[Any, ...]:
        params = call.params
        if isinstance(self.backward, FusedOp):
            pool = saved | self._cotangents(params, cotangents)
            for n, o in self.backward.signature.operands.items():
                pool[n] = None if o.optional and is_zero(pool[n]) else materialise(pool[n])
            static = {n: params[n] for n in self.backward.params}
            with PIN(call.pin):
                grads = self.backward(*(pool[n] for n in self.backward.inputs), **static)
            found = self._by_operand(as_tuple(grads))
        else:
            xs = {n: saved[n] for n in self.wrt if saved[n] is not None and is_float(saved[n])}
            pinned = call._replace(pin=self.kernels[-1].name)
            body = lambda all: self._run(pinned, *(all[n] for n in self.inputs))
            pull = jax.vjp(lambda xs: body(saved | xs), xs)[1]
            (found,) = pull(jax.tree.map(materialise, cotangents, is_leaf=is_zero))
        return tuple(found.get(n) for n in self.inputs)

    def _by_operand(self, grads: tuple[Any, ...]) -> dict[str, Any]:
        if len(grads) != len(self.wrt):
            raise ArgumentError(
                f"{self.name}: its backward returned {len(grads)} gradients, wanted one each for "
                f"{', '.join(self.wrt)}. Annotate integer operands as such, name others in frozen."
            )
        return dict(zip(self.wrt, grads, strict=True))

    def _guarded(self, name: str, x: Any) -> Any:
        """``x``, refusing to be differentiated if the op has no gradient for it.

        A gradient is right or it is an error, raised when somebody asks for it and only then.  The
        forward rule could see that too, but an error out of it would leave JAX unable to
        differentiate the same trace with respect to the other operands.
        """
        operand = self.inputs[0] if self.signature.variadic else name
        if x is None or operand in self.wrt or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        has = f"one for {', '.join(self.wrt)}" if self.wrt else "none at all"
        return undifferentiable(
            x,
            f"{self.name}: no gradient for {name!r}; it has {has}. Wrap {name} in "
            f"jax.lax.stop_gradient, or differentiate {self.name}.decompose.",
        )

    # -- outputs and cotangents by name ----------------------------------------------------

    def _returning_all(self) -> dict[str, bool]:
        return {p: True for n in self.outputs if (p := f"return_{n}") in self.params}

    def _named(self, params: dict[str, Any], arrays: Sequence[Any], outputs: Any) -> dict[str, Any]:
        named = dict(zip(self._present(params), as_tuple(outputs), strict=True))
        return named | dict(zip(self.inputs, arrays, strict=True))

    def _cotangents(self, params: dict[str, Any], cotangents: Any) -> dict[str, Any]:
        """Cotangent of output ``lse`` as ``dlse``, of the first one also as ``upstream``."""
        leaves = as_tuple(cotangents)
        named: dict[str, Any] = dict.fromkeys(f"d{n}" for n in self.outputs)
        named |= {f"d{n}": ct for n, ct in zip(self._present(params), leaves, strict=True)}
        return named | {"upstream": leaves[0]}

    def _explain_backward(self, params: dict[str, Any], avals: list[Any]) -> list[Choice] | str:
        if isinstance(self.backward, str):
            says = {"decompose": "derivative of the decomposition", "none": "not differentiable"}
            return says[self.backward]
        asked, params = params, params | self._returning_all()
        outputs = jax.eval_shape(functools.partial(self.body, **params), *avals)
        pool = self._named(params, avals, outputs)
        pool |= self._cotangents(asked, tuple(pool[n] for n in self._present(asked)))
        operands = abstract([pool[n] for n in self.backward.inputs])
        params = {n: params[n] for n in self.backward.params}
        back = self.backward
        return decide(back.name, back.kernels, PIN.value, operands, params)

    def __repr__(self) -> str:
        return f"<fused {super().__repr__()[1:]}"


def is_zero(ct: Any) -> bool:
    """A cotangent nobody asked about."""
    return ct is None or isinstance(ct, SymbolicZero)


def materialise(ct: Any) -> Any:
    """A cotangent as an array."""
    if not isinstance(ct, SymbolicZero):
        return ct
    aval: Any = ct.aval
    if axes := tuple(aval.manual_axis_type.varying):  # zeros_like refuses those
        return lax.pcast(jnp.zeros(aval.shape, aval.dtype), axes, to="varying")
    return jnp.zeros_like(aval)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def undifferentiable(x: Any, why_not: str) -> Any:
    """``x``; whoever differentiates it gets the error."""
    return x


@undifferentiable.defjvp
def refuse(why_not: str, primals: Any, tangents: Any) -> Any:
    """Reached only if ``x`` has a tangent."""
    raise NotDifferentiable(why_not)
