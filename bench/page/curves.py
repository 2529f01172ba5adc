"""Plots over a number: ratios over tokens, ratios over dates, and the roofline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone

from ..harness.roofline import ceilings, intensity, tflops
from .entries import Entry, Past, ratio
from .markup import Element, LogScale, add, new, svg, text_at
from .tables import history_table

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 40  # margins
COLOURS = 6  # classes c0 to c5 of the page's style
_Point = tuple[Entry | Past, float, float, tuple[float, float]]  # the row, x, the ratio and its interval


def scaling_plots(shown: Iterable[Entry]) -> Element | None:
    """A figure for each group of rows that differ in tokens and peer alone; None without such rows."""
    families: dict[object, list[Entry]] = {}
    for entry in shown:
        if entry.tokens is not None:
            families.setdefault(entry.family, []).append(entry)
    wide = [found for found in families.values() if len({entry.tokens for entry in found}) > 1]
    if not wide:
        return None
    section = _section("scaling", "Ratio over tokens", "Rows that differ in their number of tokens (T) alone.")
    for found in wide:
        _, case, metric = found[0].family
        curves: dict[str, list[_Point]] = {}
        for entry in sorted(found, key=lambda each: each.tokens or 0):
            point = (entry, float(entry.tokens or 0), entry.row.ratio, entry.span)
            curves.setdefault(f"against {entry.row.peer_name}", []).append(point)
        x = LogScale.over((point[1] for points in curves.values() for point in points), LEFT, WIDTH - RIGHT)
        marks = [(float(tokens), str(tokens)) for tokens in sorted({entry.tokens or 0 for entry in found})]
        title = f"{found[0].result.bench} on {found[0].result.where}: {case}, {metric}"
        _ratio_figure(section[-1], title, curves, x, marks, "tokens")
    return section


def history_plots(shown: Sequence[Past]) -> Element | None:
    """A figure for each device of each benchmark's key, and the table; None without earlier comparisons."""
    if not shown:
        return None
    section = _section("history", "History", "Earlier comparisons, from the named files.")
    by_key = lambda past: (past.comparison.key, past.comparison.device)
    for (key, device), group in itertools.groupby(sorted(shown, key=by_key), key=by_key):
        found = sorted(group, key=lambda past: past.comparison.date.timestamp())
        points: list[_Point] = []
        for past in found:
            each = past.comparison
            points.append((past, each.date.timestamp(), each.ratio, each.interval or (each.ratio, each.ratio)))
        first, last = points[0][1], points[-1][1]
        marks = [(time, f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d}") for time in sorted({first, last})]
        x = _dates(first, last)
        _ratio_figure(section[-1], f"{key} on {device}", {"ratio": points}, x, marks, "date")
    history_table(add(section, "div", class_="card", data_group=""), shown)
    return section


def rooflines(shown: Iterable[Entry]) -> Element | None:
    """A figure for each result with work and ceilings (Williams et al., doi:10.1145/1498765.1498785); else None."""
    able = [entry for entry in shown if entry.row.work and entry.row.ceilings]
    if not able:
        return None
    told = "Both sides of a row lie at the same intensity, under the ceilings that the same runs measured."
    section = _section("roofline", "Roofline", told)
    for _, group in itertools.groupby(able, key=lambda entry: id(entry.result)):
        _roofline(section[-1], list(group))
    return section


def _roofline(parent: Element, found: Sequence[Entry]) -> None:
    peak, copy = ceilings(entry.row for entry in found)
    heights = [tflops(entry.row, time) for entry in found for time in (entry.row.ours, entry.row.peer)]
    intensities = [intensity(entry.row) for entry in found]
    x = LogScale.over(intensities, LEFT, WIDTH - RIGHT, 1.5)
    y = LogScale.over((*heights, min(peak, x.high * copy)), HEIGHT - BOTTOM, TOP, 1.3)
    title = f"{found[0].result.bench} on {found[0].result.where}"
    drawing = _figure(parent, title, ("c0", "ours"), ("c1 hollow", "peer"), ("roof", "ceilings"))
    _axes(drawing, x, y, [(tick, f"{tick:g}") for tick in x.ticks()], "FLOP per byte", "TFLOP/s")
    edges = sorted({x.low, min(max(peak / copy, x.low), x.high), x.high})
    roof = " ".join(f"{x(edge):.1f},{y(min(peak, edge * copy)):.1f}" for edge in edges)
    add(drawing, "polyline", class_="roof", points=roof)
    text_at(drawing, LEFT + 6, TOP + 12, f"GEMM {peak:,.0f} TFLOP/s, copy {copy:,.2f} TB/s", "start")
    for entry in found:
        row, at = entry.row, f"{x(intensity(entry.row)):.1f}"
        ours, peer = (f"{y(tflops(row, time)):.1f}" for time in (row.ours, row.peer))
        mark = add(drawing, "g", data_rows=entry.number)
        add(mark, "title", entry.told)
        add(mark, "line", class_="pair", x1=at, x2=at, y1=ours, y2=peer)
        add(mark, "circle", class_="c1 hollow", cx=at, cy=peer, r=4)
        add(mark, "circle", class_="c0", cx=at, cy=ours, r=3.5)


def _section(name: str, title: str, told: str) -> Element:
    """A section whose last child is a grid for figures."""
    section = new("section", id=name, data_group="", aria_labelledby=f"{name}-title")
    add(section, "h2", title, id=f"{name}-title")
    add(section, "p", told, class_="muted")
    add(section, "div", class_="figures")
    return section


def _ratio_figure(
    parent: Element,
    title: str,
    curves: Mapping[str, Sequence[_Point]],
    x: Callable[[float], float],
    marks: Sequence[tuple[float, str]],
    unit: str,
) -> None:
    """Curves of ratios over x with their intervals. A segment belongs to both of its rows."""
    drawing = _figure(parent, title, *((f"c{i % COLOURS}", name) for i, name in enumerate(curves)))
    points = [point for found in curves.values() for point in found]
    y = LogScale.over([1.0, *(end for point in points for end in point[3])], HEIGHT - BOTTOM, TOP)
    _axes(drawing, x, y, marks, unit, "ratio")
    add(drawing, "line", class_="one", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(1.0):.1f}", y2=f"{y(1.0):.1f}")
    for i, found in enumerate(curves.values()):
        colour = f"c{i % COLOURS}"
        for before, after in itertools.pairwise(found):
            ends = {"x1": x(before[1]), "y1": y(before[2]), "x2": x(after[1]), "y2": y(after[2])}
            at = {name: f"{value:.1f}" for name, value in ends.items()}
            add(drawing, "line", class_=f"curve {colour}", data_rows=f"{before[0].number} {after[0].number}", **at)
        for item, where, value, (low, high) in found:
            at_x = f"{x(where):.1f}"
            mark = add(drawing, "g", class_=colour, data_rows=item.number)
            add(mark, "title", item.told if isinstance(item, Entry) else _told(item))
            add(mark, "line", class_="bar", x1=at_x, x2=at_x, y1=f"{y(low):.1f}", y2=f"{y(high):.1f}")
            add(mark, "circle", cx=at_x, cy=f"{y(value):.1f}", r=3.5)


def _told(past: Past) -> str:
    each = past.comparison
    return f"{each.date:%Y-%m-%d}, {each.commit[:12]}: {ratio(each.ratio, each.interval)}, {each.verdict}"


def _figure(parent: Element, title: str, *legend: tuple[str, str]) -> Element:
    """A figure with its legend, of (class, text); returns the drawing."""
    figure = add(parent, "figure", class_="card", data_group="")
    add(figure, "figcaption", title)
    drawing = svg(figure, title, WIDTH, HEIGHT)
    key = add(figure, "p", class_="legend")
    for colour, text in legend:
        line = add(key, "span")
        mark = add(line, "svg", viewBox="0 0 12 12", aria_hidden="true")
        if colour == "roof":
            add(mark, "line", class_=colour, x1=0, x2=12, y1=6, y2=6)
        else:
            add(mark, "circle", class_=colour, cx=6, cy=6, r=4)
        mark.tail = f" {text}"
    return drawing


def _axes(
    drawing: Element,
    x: Callable[[float], float],
    y: LogScale,
    marks: Iterable[tuple[float, str]],
    unit_x: str,
    unit_y: str,
) -> None:
    for tick in y.ticks():
        at = f"{y(tick):.1f}"
        add(drawing, "line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at)
        text_at(drawing, LEFT - 6, y(tick) + 4, f"{tick:g}", "end")
    taken = -math.inf  # where the last text ends
    for value, text in marks:
        at = f"{x(value):.1f}"
        add(drawing, "line", class_="grid", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM)
        half = 3.2 * len(text)  # half the text's width
        if x(value) - half > taken:
            text_at(drawing, min(x(value), WIDTH - half), HEIGHT - BOTTOM + 15, text)
            taken = x(value) + half + 4
    text_at(drawing, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, unit_x)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    add(drawing, "text", unit_y, x=12, y=middle, text_anchor="middle", transform=f"rotate(-90 12 {middle})")


def _dates(first: float, last: float) -> Callable[[float], float]:
    """The place of a time, in seconds, on an axis from the first to the last; the middle if they are one."""
    inner = WIDTH - RIGHT - LEFT - 60
    return lambda time: LEFT + 30 + inner * ((time - first) / (last - first) if last > first else 0.5)
