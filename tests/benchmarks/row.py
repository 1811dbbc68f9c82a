"""What a line of the tables says: an op's plain spellings, its calls, what is promised of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

Spelling = Callable[..., Any]
Call = tuple[list[str], dict[str, Any]]

PLAIN = 1.05  # the promise of every op: at most this many times its fastest plain spelling


class Row(NamedTuple):
    """How a JAX user without fuel_jax would write an op, and the calls of it that are timed.

    A call is a list of arrays and the parameters.  ``"f32 4096 1024"`` is normal, ``f32+`` positive
    and ``f32-`` negative, ``"u32<100 512"`` integers below 100; ``programs.array`` knows them all.
    """

    plain: Spelling | dict[str, Spelling]  # several by name: the fastest is the one to compare with
    calls: list[Call]
    at: tuple[int, ...] | None = None  # operands differentiated; None: every float one
    torch: float | None = None  # promised: at most this many times PyTorch
    limit: float = PLAIN
    view: Callable[..., Any] | None = None  # from a call's arrays to the op's, inside the program

    @property
    def spellings(self) -> dict[str, Spelling]:
        """The plain spellings by name."""
        return self.plain if isinstance(self.plain, dict) else {"plain": self.plain}


def calls(*specs: str, operands: int = 1, **params: Any) -> list[Call]:
    """A call for each array, given to every operand."""
    return [([spec] * operands, params) for spec in specs]


TOKEN = "f32 1 4096"  # what a layer sees of one token
SMALL = "f32 64 128"
SQUARE = "f32 1024 1024"
LARGE = "f32 4096 4096"  # 64 MiB: far more than any cache
ODD = "f32 4 16 33 65"
WIDE = "f32 2 50257"  # a vocabulary
