"""The reader, with the rules for all primitives that have one."""

from . import layout, loops, meaning
from .reading import Reader

__all__ = ["Reader", "layout", "loops", "meaning"]
