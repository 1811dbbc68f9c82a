"""What ``fuse`` did, for people to read."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._notebook import html_table
from .rewriting import Miss, Plan
from .sites import Site


@dataclasses.dataclass(frozen=True)
class Replaced:
    """One op that stands where maths was."""

    op: str
    where: str
    params: dict[str, Any]
    operands: dict[str, str]
    equations: int

    @classmethod
    def of(cls, site: Site) -> Replaced:
        """Of a site."""
        by_term = {t: site.given(v).aval.str_short() for t, v in site.operands.items()}
        operands = {n: by_term.get(t, "?") for n, (t, _, _) in site.found.operands.items()}
        return cls(site.spelling.name, site.where, site.params, operands, len(site.covers))

    def __str__(self) -> str:
        given = [f"{n}={x}" for n, x in self.operands.items()]
        given += [
            f"{n}={x:.4g}" if isinstance(x, float) else f"{n}={x}" for n, x in self.params.items()
        ]
        return f"{self.op}({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was recognised in a function, and what nearly was."""

    name: str
    replaced: tuple[Replaced, ...]
    missed: tuple[Miss, ...]

    @classmethod
    def of(cls, name: str, made: Plan) -> Report:
        """Of a plan."""
        return cls(name, tuple(map(Replaced.of, made.all_sites())), tuple(made.all_misses()))

    def __str__(self) -> str:
        count = f"{len(self.replaced)} op{'s' * (len(self.replaced) != 1)}"
        lines = [f"fuse({self.name}): {count} recognised"]
        lines += [f"  {r.where:<20} {r}, for {r.equations} equations" for r in self.replaced]
        if self.missed:
            lines.append("nearly:")
            lines += [f"  {m.where:<20} {m.op}: {m.reason}" for m in self.missed]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows: list[Any] = [
            (r.where, r.op, r, f"for {r.equations} equations") for r in self.replaced
        ]
        rows += [(m.where, m.op, "not replaced", m.reason) for m in self.missed]
        return html_table(f"fuse({self.name})", rows)
