"""The demo's page, ``report.html``, which shows the contents of ``report.json`` and ``metrics.jsonl``.

It is one file without scripts, which opens from disk without a network. Drawings stretch to the window's width, and
their labels are text beside them, so that a telephone shows both at a readable size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.page.markup import Element, add, new
from . import pages

PAGE = "report.html"
_TICKS = 5  # about so many on an axis


def write_page(folder: Path, report: Mapping[str, Any], losses: Sequence[float | None]) -> None:
    """Write ``report.html`` into ``folder``; ``losses`` has the loss of each step, None if it is not finite."""
    (folder / PAGE).write_text(page(report, losses), encoding="utf-8")


def page(report: Mapping[str, Any], losses: Sequence[float | None]) -> str:
    """The page that shows ``report``, the content of ``report.json``."""
    sections = (
        _head(report),
        _checks(report["checks"]),
        _training(report, losses),
        _requests(report["requests"], report["serving"]),
        _ran(report["model"], report["serving_calls"]),
        _environment(report["environment"]),
    )
    return pages.page("shardfuse demo", sections)


def _head(report: Mapping[str, Any]) -> Element:
    failed = sum(not check["ok"] for check in report["checks"])
    found = new("header")
    add(found, "h1", "shardfuse demo")
    total = len(report["checks"])
    add(found, "p", f"{total - failed} of {total} checks held", class_="bad" if failed else "good")
    model, parallel = report["settings"]["model"], report["settings"]["parallel"]
    add(
        found,
        "p",
        f"A decoder of {report['model']['parameters'] / 1e6:.2f} M parameters, {model['num_layers']} layers of width "
        f"{model['hidden_size']}, trained on {report['text']} over {parallel['tp']} tensor-parallel "
        f"process{'es' if parallel['tp'] > 1 else ''} in {parallel['precision']}, then saved, loaded and served.",
    )
    return found


def _section(title: str, said: str = "") -> Element:
    found = new("section")
    add(found, "h2", title)
    if said:
        add(found, "p", said, class_="muted")
    return found


def _checks(checks: Iterable[Mapping[str, Any]]) -> Element:
    found = _section("What was checked")
    rows = [("ok" if check["ok"] else "FAILED", check["check"]) for check in checks]
    table = _table(found, "checks", (), rows)
    for row in table.iter("tr"):
        row[0].set("class", "good" if row[0].text == "ok" else "bad")
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def _training(report: Mapping[str, Any], losses: Sequence[float | None]) -> Element:
    first, agreement, baselines = report["ranks"][0], report["agreement"], report["baselines"]
    found = _section(
        "Training loss",
        f"Nats per byte at each of {first['steps']} steps; {first['tokens_per_second']:,.0f} tokens/s. The same first "
        f"{len(agreement['unsharded'])} steps ran again in one process, unsharded.",
    )
    key = add(found, "ul", class_="key muted")
    _keyed(key, "sharded", "M0 5H22", "sharded")
    _keyed(key, "unsharded", "M11 5h0", "unsharded, one process")
    levels = [loss for loss in (first["held_out"],) if loss is not None and math.isfinite(loss)]
    for level in levels:
        _keyed(key, "level", "M0 5H22", f"held-out text after training, {level:.3f}")
    points = [(step, loss) for step, loss in enumerate(losses, 1) if loss is not None]
    alone = [(step, loss) for step, loss in enumerate(agreement["unsharded"], 1) if math.isfinite(loss)]
    if points:
        _plot(found, points, alone, levels)
    add(
        found,
        "p",
        f"Counting bytes would give {baselines['unigram']:.2f}, counting pairs of bytes {baselines['bigram']:.2f}.",
        class_="muted",
    )
    rows = [
        (str(step), f"{ours:.6f}", f"{one:.6f}", f"{abs(ours - one) / abs(one):.1e}")
        for step, (ours, one) in enumerate(zip(agreement["sharded"], agreement["unsharded"]), 1)
    ]
    _table(found, "losses of the first steps", ("step", "sharded", "unsharded", "relative difference"), rows, figures=4)
    return found


def _keyed(key: Element, kind: str, path: str, said: str) -> None:
    """A line of a legend."""
    item = add(key, "li")
    mark = add(item, "svg", viewBox="0 0 22 10", aria_hidden="true")
    if path:
        add(mark, "path", d=path, class_=kind)
    else:
        add(mark, "rect", width=22, height=10, class_=kind)
    mark.tail = f" {said}"


def _plot(
    parent: Element, points: Sequence[tuple[int, float]], alone: Sequence[tuple[int, float]], levels: Sequence[float]
) -> None:
    """The curve of ``points``, dots at ``alone`` and lines at ``levels``; steps run from 1."""
    values = [value for _, value in (*points, *alone)] + list(levels)
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], min(values)), max(ticks[-1], max(values))
    last = max(2, points[-1][0])

    def x(step: float) -> float:
        return 100 * (step - 1) / (last - 1)

    def y(value: float) -> float:
        return 100 * (high - value) / ((high - low) or 1)

    plot = add(parent, "div", class_="plot")
    up = add(plot, "div", class_="up")
    said = f"loss from {points[0][1]:.3f} at step {points[0][0]} to {points[-1][1]:.3f} at step {points[-1][0]}"
    drawing = add(plot, "svg", viewBox="0 0 100 100", preserveAspectRatio="none", role="img", aria_label=said)
    for tick in ticks:
        add(up, "span", f"{tick:g}", style=f"top:{y(tick):.2f}%")
        add(drawing, "path", d=f"M0 {y(tick):.2f}H100", class_="grid")
    for level in levels:
        add(drawing, "path", d=f"M0 {y(level):.2f}H100", class_="level")
    curve, before = "", 0
    for step, value in points:  # with a gap where a loss was not finite
        curve += f"L{x(step):.2f} {y(value):.2f}" if step == before + 1 > 1 else f"M{x(step):.2f} {y(value):.2f}h0"
        before = step
    add(drawing, "path", d="".join(f"M{x(step):.2f} {y(value):.2f}h0" for step, value in alone), class_="unsharded")
    add(drawing, "path", d=curve, class_="sharded")
    _along(plot, "step", 1, last, x)


def _along(parent: Element, unit: str, first: int, last: int, x: Any) -> None:
    """The labels of a horizontal axis; ``x`` gives a value's place in percent."""
    inner = [tick for tick in _ticks(first, last) if first < tick and 8 < x(tick) < 84]
    along = add(parent, "div", class_="along")
    for value in (first, *inner, last):
        said = f"{unit} {value:g}" if value in (first, last) else f"{value:g}"
        add(along, "span", said, style=f"left:{x(value):.2f}%")


def _ticks(low: float, high: float) -> list[float]:
    """Round values between ``low`` and ``high``, about _TICKS of them; ``low`` alone if they are equal."""
    if high <= low:
        return [low]
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


# --- serving ----------------------------------------------------------------------------------------------------------


def _requests(requests: Sequence[Mapping[str, Any]], serving: Mapping[str, Any]) -> Element:
    tokens, seconds = serving["generated_tokens"], serving["prefill_seconds"] + serving["decode_seconds"]
    found = _section(
        "Requests",
        f"{tokens} tokens in {serving['steps']} steps of the engine, {seconds:.2f} s; at most {serving['peak_seqs']} "
        f"requests ran at once. {serving['kv_waste']:.1%} of the allocated cache slots held no token.",
    )
    key = add(found, "ul", class_="key muted")
    _keyed(key, "waits", "", "waits")
    _keyed(key, "runs", "", "runs, from its first token to its last")
    _keyed(key, "token", "M11 0V10", "a token")
    last = max((request["tokens"][-1] for request in requests if request["tokens"]), default=1)

    def x(step: float) -> float:
        return 100 * step / last

    for number, request in enumerate(requests):
        steps = request["tokens"]
        said = (
            f"request {number}: prompt of {request['prompt_tokens']} tokens, arrives after step {request['arrival']}, "
            f"first token in step {steps[0]}, last of {len(steps)} in step {steps[-1]} ({request['finish']})"
            if steps
            else f"request {number}: no token ({request['finish']})"
        )
        lane = add(found, "div", class_="lane")
        add(lane, "div", said, class_="muted")
        drawing = add(lane, "svg", viewBox="0 0 100 10", preserveAspectRatio="none", role="img", aria_label=said)
        add(drawing, "path", d="M0 10H100", class_="grid")
        if steps:
            # Step n takes the part of the axis from n - 1 to n.
            arrival, first, end = (x(step) for step in (request["arrival"], steps[0] - 1, steps[-1]))
            add(drawing, "rect", x=f"{arrival:.2f}", width=f"{first - arrival:.2f}", height=10, class_="waits")
            add(drawing, "rect", x=f"{first:.2f}", width=f"{end - first:.2f}", height=10, class_="runs")
            ticks = "".join(f"M{x(step - 0.5):.2f} 0V10" for step in steps)
            add(drawing, "path", d=ticks, class_="token")
    _along(found, "step", 0, last, x)
    return found


# --- what ran, and where ----------------------------------------------------------------------------------------------


def _ran(model: Mapping[str, Any], calls: Iterable[Mapping[str, Any]]) -> Element:
    found = _section(
        "What ran",
        "By module, as explain answers for the model in one process: a kernel (triton), its twin in plain torch "
        "(reference), oneDNN, or a function of torch. A star stands for a layer's number.",
    )
    reasons: dict[str, int] = {}
    rows = [
        (row["path"], str(row["layers"]), row["kind"], row["op"], row["runs"], _mark(reasons, row["why"]))
        for row in model["rows"]
    ]
    _table(found, "implementations by module", ("module", "layers", "class", "op", "runs", "why"), rows)
    for why, number in reasons.items():
        add(found, "p", f"[{number}] {why}", class_="muted")
    add(found, "p", "The calls that were counted while the engine served:")
    counted = [(call["op"], call["runs"], f"{call['calls']:,}") for call in calls]
    _table(found, "calls while serving", ("op", "ran", "calls"), counted, figures=1)
    return found


def _mark(reasons: dict[str, int], why: str) -> str:
    return f"[{reasons.setdefault(why, len(reasons) + 1)}]" if why else ""


def _environment(environment: Mapping[str, Any]) -> Element:
    found = _section("Environment")
    rows = []
    for section, content in environment.items():
        lines = content.items() if isinstance(content, dict) else [("", content)]
        rows += [(f"{section} {name}".strip(), str(value)) for name, value in lines]
    _table(found, "environment", (), rows)
    return found


def _table(
    parent: Element, label: str, headings: Sequence[str], rows: Iterable[Sequence[str]], figures: int = 0
) -> Element:
    """A table that scrolls sideways by itself; its last ``figures`` columns are numbers."""
    table = add(add(parent, "div", class_="scroll", tabindex=0, role="region", aria_label=label), "table")

    def line(tag: str, cells: Sequence[str]) -> None:
        row = add(table, "tr")
        for place, cell in enumerate(cells):
            more = {"class_": "number"} if place >= len(cells) - figures else {}
            add(row, tag, cell, **more)

    if headings:
        line("th", headings)
    for cells in rows:
        line("td", cells)
    return table
