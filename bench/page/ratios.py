"""The plot of all ratios: a dot with its interval in each row, around 1, with the row's target."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .entries import Entry, ratio
from .markup import Element, LogScale, add, new


def ratio_plot(shown: Sequence[Entry]) -> Element:
    """A section with a line for each row; all lines share one logarithmic axis.

    Positions are percentages of a line's width, so that a filter can hide lines and the page can be of any width.
    """
    section = new("section", id="ratios", data_group="", aria_labelledby="ratios-title")
    add(section, "h2", "Ratios", id="ratios-title")
    legend = add(section, "p", "", class_="muted")
    legend.text = (
        "Above 1 ours is better. Dot and bar: the ratio and its interval, where the timing gave one; tick: the target; "
        "green meets it, red does not, grey has none. The axis is logarithmic."
    )
    ends = [value for entry in shown for value in (*entry.span, entry.row.target or 1.0, 1.0)]
    scale = LogScale.over(ends, 0.0, 100.0)
    for _, group in itertools.groupby(shown, key=lambda entry: id(entry.result)):
        lines = list(group)
        card = add(section, "figure", class_="card", data_group="")
        add(card, "figcaption", f"{lines[0].result.bench} on {lines[0].result.where}")
        _axis(card, scale)
        for entry in lines:
            _line(card, entry, scale)
    return section


def _axis(parent: Element, scale: LogScale) -> None:
    line = add(parent, "div", class_="ratio axis", aria_hidden="true")
    add(line, "span")
    drawing = add(line, "svg")
    for tick in scale.ticks():
        add(drawing, "text", f"{tick:g}", x=_at(scale, tick), y="14", text_anchor="middle")
    add(line, "span")


def _line(parent: Element, entry: Entry, scale: LogScale) -> None:
    row = entry.row
    line = add(parent, "div", class_="ratio", data_rows=entry.number)
    name = add(line, "span", entry.label)
    add(name, "small", f" against {row.peer_name}")
    colour = {None: "none", True: "good", False: "bad"}[row.met]
    drawing = add(line, "svg", class_=colour, role="img", aria_label=entry.told)
    add(drawing, "title", entry.told)
    for tick in scale.ticks():
        _upright(drawing, _at(scale, tick), "grid")
    _upright(drawing, _at(scale, 1.0), "one")
    low, high = entry.span
    add(drawing, "line", class_="bar", x1=_at(scale, low), x2=_at(scale, high), y1="50%", y2="50%")
    if row.target is not None:
        _upright(drawing, _at(scale, row.target), "target", "15%", "85%")
    add(drawing, "circle", cx=_at(scale, row.ratio), cy="50%", r=4)
    add(line, "span", ratio(row.ratio, None), class_="number")


def _upright(parent: Element, x: str, kind: str, top: str = "0", bottom: str = "100%") -> None:
    add(parent, "line", class_=kind, x1=x, x2=x, y1=top, y2=bottom)


def _at(scale: LogScale, value: float) -> str:
    return f"{scale(value):.2f}%"
