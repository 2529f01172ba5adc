"""The head of a page: which files it shows, what is modelled and not measured, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...kernels.dev import codegen_report
from ..harness.benchmark import Benchmark
from ..harness.publish import Result
from .markup import Element, add, box, new


def measured(results: Sequence[Result], histories: Iterable[Path]) -> Element:
    """A card with a line for each result: file, date, commit, machine, versions."""
    card = _card("Measured")
    table = add(box(card, "Files"), "table")
    head = add(add(table, "thead"), "tr")
    for name in ("file", "benchmark", "rows", "date", "commit", "device", "processor", "torch", "Triton"):
        add(head, "th", name, scope="col")
    body = add(table, "tbody")
    for result in results:
        origin, line = result.origin, add(body, "tr")
        changed = {True: " with changes", False: "", None: " (perhaps with changes)"}[origin["dirty"]]
        rows = f"not shown: {result.complaint}" if result.complaint else str(len(result.rows))
        missing = f", {result.missing} not measured" if result.missing else ""
        for text in (
            *("/".join(result.path.parts[-2:]), result.bench, rows + missing),
            *(str(origin["date"])[:16].replace("T", " "), str(origin["commit"])[:12] + changed, result.device),
            *(str(origin.get("cpu") or "not recorded"), str(origin["torch"]), str(origin["triton"])),
        ):
            add(line, "td", text)
    for path in histories:
        add(card, "p", f"Earlier comparisons: {path.name}.", class_="muted")
    return card


def modelled() -> Element:
    """A card on what the project computes without running it, and where this is found."""
    card = _card("Modelled, not measured")
    told = "No number on this page comes from a model."
    add(card, "p", f"{told} What follows is about kernels that were compiled, and did not run for these records.")
    found = add(card, "ul")
    for text in _compiled():
        add(found, "li", text)
    add(
        found,
        "li",
        "The cost model (kernels/runtime/cost.py) predicts times from published figures of a chip: shardfuse inspect, "
        "audit and explain print its predictions.",
    )
    return card


def _compiled() -> Iterator[str]:
    """What the record of compiled kernels holds, for each version of Triton; an installed package has no record."""
    for path in sorted(codegen_report.FOLDER.glob("triton-*.json")):
        record = json.loads(path.read_text())
        targets = sorted({name.split()[1] for name in record["builds"]})
        yield (
            f"kernels/dev/compiled/{path.name}: {len(record['builds']):,} builds by Triton {record['triton']} for "
            f"{', '.join(targets)}: registers, spills, shared memory, no times."
        )


def missing(results: Sequence[Result], benchmarks: Iterable[Benchmark]) -> Element:
    """A card with the benchmarks that run on a GPU and have no result of one among ``results``."""
    card = _card("Missing")
    shown = [result for result in results if result.absolute and result.rows and not result.complaint]
    if not shown:
        add(card, "p", "None of these results was measured on a GPU.", class_="warn")
    names = [each.name for each in benchmarks if "cuda" in each.devices]
    absent = [name for name in names if name not in {result.bench for result in shown}]
    if absent:
        add(card, "p", f"Without a result for any GPU: {len(absent)} of {len(names)} benchmarks that run on one.")
        add(card, "p", ", ".join(absent), class_="names")
    else:
        add(card, "p", "Every benchmark that runs on a GPU has a result for one.")
    return card


def _card(title: str) -> Element:
    card = new("section", class_="card")
    add(card, "h2", title)
    return card
