"""What to say of a name that is not in a file."""

import difflib
from collections.abc import Sequence


def missing(what: str, name: str, known: Sequence[str]) -> str:
    """That there is no such name, and which there are: near ones, or the first few."""
    if near := difflib.get_close_matches(name, known, n=3):
        return f"no {what} {name!r}; did you mean {', '.join(near)}?"
    some = ", ".join([*known[:5], *["…"] * (len(known) > 5)])
    return f"no {what} {name!r}; there are {len(known)}{': ' * bool(some)}{some}."
