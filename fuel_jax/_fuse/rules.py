"""The reader, with the rules for all primitives that have one."""

from . import contraction, layout, loops, meaning
from .reading import Reader

__all__ = ["Reader", "contraction", "layout", "loops", "meaning"]
