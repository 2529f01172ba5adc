"""The whole page: a template with the style and the script of the filters, and the elements of its content."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...kernels.runtime.printing import console
from ..harness import stale
from ..harness.benchmark import Benchmark
from ..harness.flashinfer_traces import export
from ..harness.publish import Result, publish, read_all, write_markdown
from ..harness.records import writing
from ..harness.runner import benchmarks
from . import head
from .curves import history_plots, rooflines, scaling_plots
from .entries import entries, pasts
from .history import SUFFIX, Comparison, read_history
from .markup import Element, render
from .ratios import ratio_plot
from .tables import tables

TEMPLATE = Path(__file__).with_name("page.html")


def report(
    paths: Sequence[Path],
    *,
    html: Path | None,
    markdown: Path | None,
    out: Path | None,
    trace: Path | None = None,
    results: Path = stale.RESULTS,
) -> list[Path]:
    """Write the reports that are asked for; returns the files.

    ``html`` is a page and ``markdown`` its tables, both of the same rows; ``out`` is the folder of
    :func:`~..harness.publish.publish`, ``trace`` that of :func:`~..harness.flashinfer_traces.export`. ``paths`` hold
    records, or with ``html`` earlier comparisons (.jsonl); without any the committed results are shown. Raises
    ValueError for other files and places that cannot be written to.
    """
    histories = [path for path in paths if path.suffix == SUFFIX]
    records = [path for path in paths if path.suffix != SUFFIX]
    if histories and html is None:
        raise ValueError(f"{histories[0]} holds earlier comparisons, which only a page shows: name one with --html")
    if histories and not records and (markdown or out or trace):
        raise ValueError(
            f"{histories[0]} holds earlier comparisons and no record: name records for --markdown, --out and --trace"
        )
    found = [] if histories and not records else read_all(records, results=results)
    history = [each for path in histories for each in read_history(path)]
    written = []
    if html is not None:
        text = page(found, history, benchmarks().values(), histories)
        with writing(html, "--html"):
            html.write_text(text, encoding="utf-8")
        written.append(html)
    if markdown is not None:
        write_markdown(found, markdown)
        written.append(markdown)
    if out is not None:
        written += publish(records, out, results=results)
    if trace is not None:
        written.append(export(records, trace, results=results))
    return written


def show(
    paths: Sequence[Path], *, html: Path | None, markdown: Path | None, out: Path | None, trace: Path | None
) -> int:
    """Write the reports and print their files; returns the process's exit code."""
    for path in report(paths, html=html, markdown=markdown, out=out, trace=trace):
        console().print(str(path), markup=False, soft_wrap=True)
    return 0


def page(
    results: Sequence[Result],
    history: Sequence[Comparison],
    known: Iterable[Benchmark],
    histories: Sequence[Path] = (),
) -> str:
    """The page as HTML. ``known`` are the benchmarks that could have a result."""
    shown = entries(results)
    past = pasts(history, len(shown))
    content: list[Element | None] = [
        head.measured(results, histories),
        head.missing(results, known),
        head.modelled(),
        ratio_plot(shown) if shown else None,
        scaling_plots(shown),
        rooflines(shown),
        history_plots(past),
        tables(results, shown) if results else None,
    ]
    template = TEMPLATE.read_text(encoding="utf-8")
    before, _, after = template.partition("<!-- content -->")
    return _allow(before, template) + render(each for each in content if each is not None) + after


def _allow(text: str, template: str) -> str:
    """``text`` with a policy by which a browser runs the template's own script and style, and loads nothing."""
    for name in ("script", "style"):
        (block,) = re.findall(rf"<{name}>(.*?)</{name}>", template, re.S)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        text = text.replace(f"{{{name}}}", f"'sha256-{digest}'")
    return text
