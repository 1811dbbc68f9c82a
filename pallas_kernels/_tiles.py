"""What a kernel may be cut into: the settings worth a try for a call, the best by rule first.

A table of what was measured (``tuned/*.json``) is asked for the call's extents, counted up to
powers of two, and answers with one of the settings.  Where it has no answer, the first is taken.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ._launch import power_of_two

FULL = 1024  # programs of which a chip has enough: whether there are more changes no tile


class Tiles(NamedTuple):
    """What of a call decides about its tile, and the settings to choose from."""

    extents: dict[str, int | str]
    """By name; numbers are counted up to powers of two."""
    settings: tuple[Any, ...]
    """Named tuples of whole numbers, or of such tuples."""

    @classmethod
    def of(cls, extents: dict[str, int | str], first: Any, *others: Any) -> "Tiles":
        """Each setting once, in order."""
        return cls(extents, tuple(dict.fromkeys((first, *others))))


def varied(first: Any, **fields: Sequence[Any]) -> Iterator[Any]:
    """``first`` with one field changed at a time."""
    for name, values in fields.items():
        for value in values:
            yield first._replace(**{name: value})


def bucket(extent: int | str) -> int | str:
    """A number counted up to a power of two; 0 and words as they are."""
    return power_of_two(extent) if isinstance(extent, int) and extent > 0 else extent


def around(n: int, least: int = 1, most: int = 2**30) -> tuple[int, ...]:
    """Half and twice a power of two, as far as they are within bounds."""
    return tuple(m for m in (n // 2, 2 * n) if least <= m <= most)
