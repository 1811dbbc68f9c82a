"""What a notebook shows of tables."""

import html
from collections.abc import Iterable, Sequence
from typing import Any


def html_table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    """A title and rows, in the colours of the page they stand in."""
    cells = lambda row: "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
    lines = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f"<b>{html.escape(title)}</b><table>{lines}</table>"
