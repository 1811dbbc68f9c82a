"""How ops are called, for type checkers and editors, where a body does not tell.

The bodies of a table's rows are written for all of them at once; and a parameter that adds an
output changes the type of the result.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._fused import FusedOp
from ._op import Op
from .types import Array, Reduction

O = TypeVar("O")

if TYPE_CHECKING:

    class Unary(Op[..., Array]):
        """An op of one array."""

        def __call__(self, x: Array) -> Array: ...
        def decompose(self, x: Array) -> Array: ...
        def using(self, name: str) -> Callable[[Array], Array]: ...

    class Binary(Op[..., Array]):
        """An op of two arrays."""

        def __call__(self, a: Array, b: Array) -> Array: ...
        def decompose(self, a: Array, b: Array) -> Array: ...
        def using(self, name: str) -> Callable[[Array, Array], Array]: ...

    class FlashAttn(FusedOp[..., Any]):
        """A pair with ``return_lse``."""

        @overload
        def __call__(
            self,
            q: Array,
            k: Array,
            v: Array,
            alibi: Array | None = None,
            k_len: Array | int | None = None,
            *,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size_left: int | None = None,
            window_size_right: int | None = None,
            softcap: float | None = None,
            return_lse: Literal[False] = False,
        ) -> Array: ...
        @overload
        def __call__(
            self,
            q: Array,
            k: Array,
            v: Array,
            alibi: Array | None = None,
            k_len: Array | int | None = None,
            *,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size_left: int | None = None,
            window_size_right: int | None = None,
            softcap: float | None = None,
            return_lse: Literal[True],
        ) -> tuple[Array, Array]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    class CrossEntropy(FusedOp[..., Any]):
        """A pair with ``return_lse``."""

        @overload
        def __call__(
            self,
            logits: Array,
            targets: Array,
            *,
            reduction: Reduction = "mean",
            ignore_index: int = -100,
            return_lse: Literal[False] = False,
        ) -> Array: ...
        @overload
        def __call__(
            self,
            logits: Array,
            targets: Array,
            *,
            reduction: Reduction = "mean",
            ignore_index: int = -100,
            return_lse: Literal[True],
        ) -> tuple[Array, Array]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    Unary = Binary = Op
    FlashAttn = CrossEntropy = FusedOp


def called(like: type[O]) -> Callable[[Any], O]:
    """Decorator: to a type checker, what is decorated is a ``like``; it is returned as it is."""
    return lambda op: op
