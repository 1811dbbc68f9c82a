"""What is shown while measuring takes its time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

ABSENT = "(A progress bar needs rich: pip install 'fuel_jax[report]'.)"


@contextlib.contextmanager
def shown(total: int) -> Iterator[Callable[[int, str], None]]:
    """Gives ``told(done, what)``: a bar on a terminal where rich is installed, else a line each."""
    if sys.stdout.isatty():
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
        except ImportError:
            print(ABSENT)
        else:
            parts = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            with Progress(*parts) as bar:
                task = bar.add_task("", total=total)
                escaped = lambda what: what.partition("  ")[0].replace("[", "\\[")
                yield lambda done, what: bar.update(task, completed=done, description=escaped(what))
            return
    yield lambda done, what: print(f"[{done}/{total}] {what}", flush=True)
