"""The tables of a page: one for each result, and one of earlier comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..harness.publish import Result, origin_lines
from ..harness.report import RATES
from .entries import Entry, Past, ratio
from .markup import Element, add, box, new

_MET = {None: ("", ""), True: ("yes", "good"), False: ("no", "bad")}


def tables(results: Iterable[Result], shown: Sequence[Entry]) -> Element:
    """A section with a table for each result, or the reason why its numbers are not shown."""
    section = new("section", id="tables", aria_labelledby="tables-title")
    add(section, "h2", "Results", id="tables-title")
    for result in results:
        title = f"{result.bench} on {result.where}"
        card = add(section, "div", class_="card", **({} if result.complaint else {"data_group": ""}))
        add(card, "h3", title)
        add(card, "p", " ".join(origin_lines(result)), class_="muted")
        if result.complaint:
            add(card, "p", f"Not shown: {result.complaint}.", class_="warn")
            continue
        if not result.absolute:
            add(card, "p", "On a processor only ratios count, so no times are shown.", class_="muted")
        _fill(box(card, title), result, [entry for entry in shown if entry.result is result])
    return section


def _fill(parent: Element, result: Result, shown: Sequence[Entry]) -> None:
    rates = RATES if result.absolute and any(entry.row.work for entry in shown) else {}
    times = ("ours", "peer's") if result.absolute else ()
    head = ("case", "metric", "peer", *times, "ratio (interval)", "noise", "target", "met", *rates, "what ran")
    body = _table(parent, head, text=("case", "metric", "peer", "what ran"))
    for entry in shown:
        row, line = entry.row, _line(body, entry)
        add(line, "th", row.case, scope="row")
        add(line, "td", row.metric)
        add(line, "td", row.peer_name)
        for value in (row.ours, row.peer) if result.absolute else ():
            add(line, "td", f"{value:,.4g}", class_="number")
        add(line, "td", ratio(row.ratio, row.between), class_="number")
        add(line, "td", "" if row.noise is None else f"{row.noise:.1%}", class_="number")
        add(line, "td", "" if row.target is None else f"{row.target:.3f}", class_="number")
        said, colour = _MET[row.met]
        add(line, "td", said, class_=f"number {colour}")
        found = row.rates()
        for show in rates.values():
            add(line, "td", show(found), class_="number")
        add(line, "td", row.ran, class_="muted")


def history_table(parent: Element, shown: Iterable[Past]) -> None:
    """The table of earlier comparisons, newest first."""
    body = _table(
        box(parent, "Earlier comparisons"), ("key", "device", "date", "commit", "ratio (interval)", "verdict")
    )
    for past in sorted(shown, key=lambda each: each.comparison.date.timestamp(), reverse=True):
        found, line = past.comparison, _line(body, past)
        add(line, "th", found.key, scope="row")
        for text in (found.device, f"{found.date:%Y-%m-%d %H:%M}", found.commit[:12]):
            add(line, "td", text)
        add(line, "td", ratio(found.ratio, found.interval))
        add(line, "td", found.verdict)


def _table(parent: Element, head: Iterable[str], text: Iterable[str] | None = None) -> Element:
    """The body of a new table; columns not in ``text`` are numbers, if it is given."""
    table = add(parent, "table")
    line = add(add(table, "thead"), "tr")
    for name in head:
        add(line, "th", name, scope="col", class_="number" if text is not None and name not in text else "")
    return add(table, "tbody")


def _line(body: Element, item: Entry | Past) -> Element:
    return add(body, "tr", id=f"row-{item.number}", **item.filters)
