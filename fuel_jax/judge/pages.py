"""A report for people: as text, Markdown and HTML, alone and beside another."""

from __future__ import annotations

import html
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from .._pages import columns, markdown, row
from . import plots
from .choosing import microseconds
from .report import Entry, ProfileReport, Timing, text

HEAD = "call", "kernel", "time", "least–most", "of XLA's time", "of the ceiling", "error"
SHOWN = 24  # rows of a report in a notebook


def cells(report: ProfileReport, entry: Entry) -> Iterator[Sequence[str]]:
    """A row for each implementation, the fastest first."""
    xla = entry.kernels.get("xla")
    for i, (name, t) in enumerate(sorted(entry.kernels.items(), key=lambda item: item[1].us)):
        beside = f"{t.us / xla.us:.2f}" if xla and name != "xla" else ""
        share = plots.share(report, entry, t)
        yield (
            entry.call if not i else "",
            name,
            microseconds(t.us),
            f"{t.least_us:.3g}–{t.most_us:.3g}",
            beside,
            f"{share:.0%}" if share else "",
            f"{t.error:.2g}",
        )
    for i, (name, why) in enumerate(entry.failed.items(), len(entry.kernels)):
        yield entry.call if not i else "", name, "failed", why, "", "", ""


def table(report: ProfileReport) -> list[Sequence[str]]:
    """Every implementation of every call."""
    return [line for entry in report.entries for line in cells(report, entry)]


def facts(report: ProfileReport) -> str:
    """Device, versions and date: the footer."""
    said = {name: text(str(value)) for name, value in report.machine.items() if value}
    device = said.get("processor") or said.get("device", "unknown device")
    found = [device, *([f"{said['cores']} cores"] if "cores" in said else [])]
    names = {"driver": "driver", "jax": "JAX", "fuel_jax": "fuel_jax", "commit": "commit"}
    found += [f"{shown} {said[name]}" for name, shown in names.items() if name in said]
    return ", ".join([*found, said.get("date", "no date")])


def about(report: ProfileReport) -> str:
    """How to read the table."""
    bounds = plots.ceilings(report)
    says = {
        "copy": "a copy moves {:,.0f} GB/s",
        "float32": "a product makes {:,.0f} GFLOP/s in float32",
        "bfloat16": "a product makes {:,.0f} GFLOP/s in bfloat16",
    }
    speeds = [say.format(bounds[name] / 1e9) for name, say in says.items() if name in bounds]
    passed = f" {report.passed_over} entries were passed over." * bool(report.passed_over)
    reached = f" The ceiling: {', '.join(speeds)}." * bool(speeds)
    return (
        f"{len(report.entries)} calls.{passed}{reached} "
        "Errors are in units of what the op promises: 1 is the most it may be."
    )


def as_text(report: ProfileReport) -> str:
    """For a terminal: each call, and under it who can serve it."""
    lines = [facts(report), about(report)]
    rest = columns([HEAD[1:], *(line[1:] for line in table(report))])
    lines += ["", next(rest)]
    for call, *_ in table(report):
        lines += [f"{call}"] * bool(call)
        lines.append(next(rest))
    return "\n".join(lines)


def as_markdown(report: ProfileReport, pictures: Sequence[str] = ()) -> str:
    """For a repository; with the pictures that stand in files beside."""
    lines = [row(*(cell.replace("\n", " ") for cell in line)) for line in table(report)]
    shown = [f"![{name}]({name})\n" for name in pictures]
    return "\n".join(
        ["# Profile", "", about(report), "", *shown, *markdown(HEAD), *lines, "", facts(report), ""]
    )


def write_markdown(reports: Sequence[ProfileReport], path: pathlib.Path) -> None:
    """The file, and an SVG beside it for each picture."""
    parts = []
    for i, report in enumerate(reports):
        names = []
        for title, svg in plots.pictures(report).items():
            names.append(f"{path.stem}-{i}-{title.lower().replace(' ', '-')}.svg")
            drawn = svg.replace("currentColor", "#888888")  # an image knows no page around it
            path.with_name(names[-1]).write_text(drawn, encoding="utf-8")
        parts.append(as_markdown(report, names))
    path.write_text("\n".join(parts), encoding="utf-8")


# -- HTML ----------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
div.wide { overflow-x: auto } svg { max-width: 100%; height: auto }
"""
TABLE = """
.fuel-report { border-collapse: collapse; font-size: 13px }
.fuel-report td, .fuel-report th { padding: 1px 10px 1px 0; text-align: right; border: 0 }
.fuel-report td:nth-child(-n+2), .fuel-report th:nth-child(-n+2) { text-align: left }
.fuel-report td:first-child { font-family: ui-monospace, monospace }
.fuel-report thead th { border-bottom: 1px solid #8888 }
"""


def as_html(reports: Sequence[ProfileReport]) -> str:
    """One page, with everything in it, readable in light and dark."""
    parts = []
    for report in reports:
        pictures = plots.pictures(report)
        parts += [f"<p>{html.escape(about(report))}</p>"]
        parts += [f"<h2>{title}</h2><div class=wide>{svg}</div>" for title, svg in pictures.items()]
        parts += [f"<p>{html.escape(plots.ABSENT)}</p>"] * (not pictures)
        parts += ["<h2>Every call</h2><div class=wide>", html_rows(table(report)), "</div>"]
        parts += [f"<footer><p><small>{html.escape(facts(report))}</small></p></footer>"]
    return "\n".join(
        [
            "<!doctype html><html lang=en><head><meta charset=utf-8><title>Profile</title>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"<style>{STYLE}{TABLE}</style></head><body><h1>Profile</h1>",
            *parts,
            "</body></html>\n",
        ]
    )


def html_rows(lines: Sequence[Sequence[str]]) -> str:
    """A table of HTML."""
    made = lambda tag, line: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
    body = "\n".join(f"<tr>{made('td', line)}</tr>" for line in lines)
    head = made("th", HEAD)
    return f"<table class=fuel-report><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_tables(report: ProfileReport) -> str:
    """For a notebook: the calls that more than one implementation can serve, first."""
    first = sorted(report.entries, key=lambda entry: len(entry.kernels) < 2)
    lines = [line for entry in first for line in cells(report, entry)]
    more = f"<p>… and {len(lines) - SHOWN} rows more</p>" * (len(lines) > SHOWN)
    said = f"<p>{html.escape(about(report))}<br><small>{html.escape(facts(report))}</small></p>"
    return f"<style>{TABLE}</style>{said}{html_rows(lines[:SHOWN])}{more}"


# -- two reports ---------------------------------------------------------------------------


def compared(old: ProfileReport, new: ProfileReport) -> str:
    """What became faster or slower from one report to another: where the spreads do not meet."""
    pairs = [
        (entry, name, t, theirs.kernels[name])
        for entry in new.entries
        if (theirs := old.get(entry.key))
        for name, t in entry.kernels.items()
        if name in theirs.kernels
    ]
    lines = [f"A  {facts(old)}", f"B  {facts(new)}", ""]
    if not pairs:
        return "\n".join([*lines, "No call is in both."])
    ratios = [t.us / before.us for _, _, t, before in pairs]
    middle = math.exp(statistics.fmean(map(math.log, ratios)))
    apart = [pair for pair in pairs if are_apart(pair[2], pair[3])]
    apart.sort(key=lambda pair: pair[2].us / pair[3].us)
    shown = [
        (e.call, name, microseconds(a.us), microseconds(b.us), f"{b.us / a.us:.2f}")
        for e, name, b, a in apart
    ]
    lines += [
        f"{len(pairs)} times in both; B takes {middle:.3f} of A's (geometric mean).",
        f"{len(pairs) - len(apart)} are within the spread of each other; the others:",
        "",
    ]
    return "\n".join([*lines, *columns([("call", "kernel", "A", "B", "B/A"), *shown], "")])


def are_apart(a: Timing, b: Timing) -> bool:
    """Whether no round of one took as long as a round of the other."""
    return a.least_us > b.most_us or b.least_us > a.most_us
