"""``fuel_jax.fuse``: a function, with its own maths by fused ops.

What it takes is imported when it is first used: importing ``fuel_jax`` stays cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .._fused import FusedOp
    from .report import Report
    from .rewriting import Plan
    from .tracing import Traced

P = ParamSpec("P")
R = TypeVar("R")


def planned(
    fn: Callable[..., Any], args: Any, kwargs: Any, ops: Sequence[FusedOp] | None
) -> tuple[Traced, Plan]:
    """A call, traced, and which op can stand where in it."""
    from .patterns import spellings
    from .rewriting import plan
    from .tracing import Traced

    looked_for = spellings(ops)
    traced = Traced(fn, args, kwargs)
    return traced, plan(traced.jaxpr, looked_for)


class Fuse:
    """``fuse(fn)``: ``fn``, every op that it spells out replaced by the fused op.

    The maths of softmax, log-softmax, linear layers, rms and layer norm, rotary embedding,
    attention, cross entropy … is recognised in whatever layout and spelling, also inside ``scan``,
    ``while_loop``, ``cond``, ``checkpoint`` and nested ``jit``, and in libraries the function
    calls.  A fused op brings its gradient, its memory bounds and its kernels.

    Where nothing is recognised the program is the same, equation for equation.  Where something
    is, results differ in the last bits: the op keeps its declared precision, whatever the
    replaced code did.  Rows of attention that see no key are 0, where a large negative mask gives
    the mean of all values.

    Composes with ``jit``, ``grad``, ``vmap`` and ``shard_map`` in any order; fuse before you
    differentiate: ``jax.grad(fuse(loss))``, since the derivative of a softmax is not one.

    Args:
        fn: any function JAX can trace.
        ops: look for these only; all fused ops, and those registered at run time, if None.

    Returns:
        A function like ``fn``.  It is traced at every call: wrap it in ``jax.jit``.
    """

    __name__ = __qualname__ = "fuse"

    def __call__(
        self, fn: Callable[P, R], *, ops: Sequence[FusedOp] | None = None
    ) -> Callable[P, R]:
        """See the class."""

        @functools.wraps(fn)
        def fused(*args: P.args, **kwargs: P.kwargs) -> R:
            from .rewriting import execute_plan

            traced, made = planned(fn, args, kwargs, ops)
            return traced.result(execute_plan(made, traced.jaxpr, traced.arrays))

        return fused

    def report(
        self, fn: Callable[..., Any], *, ops: Sequence[FusedOp] | None = None
    ) -> Callable[..., Report]:
        """``fuse.report(fn)(*args)``: what ``fuse(fn)(*args)`` replaces, and what it nearly does.

        Args:
            fn: as for ``fuse``.
            ops: as for ``fuse``.

        Returns:
            A function of the arguments of ``fn``, which may be abstract; it returns a
            :class:`Report`.
        """

        def reported(*args: Any, **kwargs: Any) -> Report:
            from .report import Report

            _, made = planned(fn, args, kwargs, ops)
            return Report.of(getattr(fn, "__name__", repr(fn)), made)

        return reported


fuse: Fuse = Fuse()
