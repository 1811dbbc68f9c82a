"""Pictures of a report: how near each call comes to what bounds it, and who is faster than XLA."""

from __future__ import annotations

import io
import math
from typing import Any

from .report import Entry, ProfileReport, Timing, number

ABSENT = "No pictures: matplotlib is not installed (pip install 'fuel_jax[report]')."
INK = "#010203"  # stands for the text's colour, which a page in light or dark decides
# Okabe and Ito's colours, which people with any kind of colour blindness tell apart.
COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
MARKERS = "o", "s", "D", "^", "v", "P"
MOST_BARS = 40


def ceilings(report: ProfileReport) -> dict[str, float]:
    """Bytes a second of a copy, operations a second of a product, as far as they were measured."""
    given = report.machine.get("ceilings")
    found = {}
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            found[name] = number(value)
        except ValueError:
            continue
    return found


def share(report: ProfileReport, entry: Entry, timing: Timing) -> float | None:
    """The time that memory or arithmetic allows, over what was taken.

    More than 1 where the operands fit into a cache, or where XLA counts operations that nobody
    has to do.
    """
    bounds = ceilings(report)
    product = bounds.get(entry.dtype, bounds.get("float32"))
    if "copy" not in bounds or product is None:
        return None
    return max(entry.bytes / bounds["copy"], entry.flops / product) * 1e6 / timing.us


def pictures(report: ProfileReport) -> dict[str, str]:
    """SVG by title; none where matplotlib is absent or there is nothing to show."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fuel_jax"}
    for part in ("text", "axes.edge", "axes.label", "xtick", "ytick"):
        settings[f"{part}color" if part == "axes.edge" else f"{part}.color"] = INK
    settings["axes.labelcolor"] = settings.pop("axes.label.color")
    found = {}
    with rc_context(settings):
        for title, draw in (("Roofline", roofline), ("Beside XLA", speed_ups)):
            figure = Figure(layout="constrained")
            if draw(figure, report):
                footer(figure, report)
                found[title] = svg(figure)
    return found


def svg(figure: Any) -> str:
    """The picture, in the colours of the page it stands in."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    return drawn[drawn.index("<svg") :].replace(INK, "currentColor")


def footer(figure: Any, report: ProfileReport) -> None:
    """What the numbers hold for."""
    from .pages import facts

    figure.supxlabel(facts(report), fontsize=7, x=0.01, ha="left")


def roofline(figure: Any, report: ProfileReport) -> bool:
    """A dot per call and implementation, those of one call joined: share of its ceiling."""
    bounds = ceilings(report)
    points: dict[str, list[tuple[float, float]]] = {}
    joined = []
    for entry in report.entries:
        shares = {n: share(report, entry, t) for n, t in entry.kernels.items()}
        known = {n: s for n, s in shares.items() if s}
        if known:
            # A copy has no operations: it stands with those that have few.
            x = max(entry.flops / max(entry.bytes, 1), 2**-5)
            joined.append((x, min(known.values()), max(known.values())))
            for name, y in known.items():
                points.setdefault(name, []).append((x, y))
    if not points:
        return False
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    axes.vlines(*zip(*joined, strict=True), color=INK, alpha=0.25, linewidth=0.8)
    if xla := points.pop("xla", []):
        axes.scatter(*zip(*xla, strict=True), s=14, color=INK, label="xla", zorder=3)
    for i, (name, found) in enumerate(sorted(points.items())):
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % 6]}
        axes.scatter(*zip(*found, strict=True), s=14, label=name, zorder=4, **look)
    axes.axhline(1, color=INK, linewidth=0.8)
    if "float32" in bounds:
        axes.axvline(bounds["float32"] / bounds["copy"], color=INK, linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte (dotted: float32's ridge)")
    axes.set_ylabel("share of the ceiling")
    axes.legend(frameon=False, fontsize=8)
    return True


def speed_ups(figure: Any, report: ProfileReport) -> bool:
    """A bar per implementation beside XLA's: how many times as fast it is."""
    bars = [
        (xla.us / timing.us, f"{entry.call[:60]}  {name}")
        for entry in report.entries
        if (xla := entry.kernels.get("xla"))
        for name, timing in entry.kernels.items()
        if name != "xla"
    ]
    if not bars:
        return False
    shown = sorted(sorted(bars, key=lambda bar: -abs(math.log(bar[0])))[:MOST_BARS])
    figure.set_size_inches(9, 1 + 0.2 * len(shown))
    axes = figure.subplots()
    speeds, names = zip(*shown, strict=True)
    colours = [COLOURS[0] if speed >= 1 else COLOURS[1] for speed in speeds]
    places = range(len(shown))
    axes.barh(places, [speed - 1 for speed in speeds], left=1, color=colours)
    axes.set_yticks(places, names, fontsize=7)
    axes.axvline(1, color=INK, linewidth=0.8)
    rest = f" (the {len(shown)} furthest from 1, of {len(bars)})" * (len(bars) > len(shown))
    axes.set(xscale="log", xlabel=f"times as fast as XLA's form{rest}")
    return True
