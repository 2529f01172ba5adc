"""The summary of a GPU run: a few lines for each phase and the tables of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console

from ..harness import provenance
from ..harness.benchmark import Benchmark
from ..harness.report import DRY_NOTE, Row, show_rows
from . import predictions
from .journal import Journal


def good(journal: Journal, measured: Iterable[Benchmark]) -> bool:
    """Whether everything that ran was right and no row was lost to a hang or a crash."""
    right = all(
        event["ok"] for kind in ("smoke", "compiled", "tests", "verdict", "rehearsed") for event in journal.of(kind)
    )
    return right and not any(journal.lost(b.name, provenance.source_hash(b)) for b in measured)


def show(out: Console, journal: Journal, measured: Iterable[Benchmark], *, dry: bool) -> None:
    """Print the summary; a dry run's numbers are marked as meaningless."""
    for line in _lines(journal):
        out.print(line, markup=False, soft_wrap=True)
    answered: list[tuple[predictions.Prediction, Row]] = []
    for benchmark, rows in _rows(journal, measured):
        title = benchmark.name + (DRY_NOTE if dry else "")
        show_rows(out, title, rows, absolute=True)
        answered += predictions.compared(benchmark.name, rows)
    if answered:
        out.print(predictions.table(answered))


def _lines(journal: Journal) -> Iterator[str]:
    phases = list(journal.of("phase"))
    for kernels in journal.of("kernels"):
        compiled = sum(phase["compiled"] for phase in phases)
        refused = f"; left aside: {kernels['refused']}" if kernels["refused"] else ""
        yield f"kernels: {kernels['found']} came along, {compiled} compiled anew{refused}"
    for phase in phases:
        yield f"{phase['name']:<11} {phase['seconds']:6.1f} s" + f"  {phase['compiled']} compiled" * bool(
            phase["compiled"]
        )
    smoked = list(journal.of("smoke"))
    yield f"smoke: {sum(event['ok'] for event in smoked)} of {len(smoked)} cases right"
    for event in smoked:
        if not event["ok"]:
            yield f"  {event['op']} {event['case']}: {event['detail'].splitlines()[-1]}"
    for event in journal.of("compiled", ok=False):
        yield f"not compiled: {event['bench']} {' '.join(event['cases'])}: {event['how']}"
    for lane, title in (("tests", "ops' tests"), ("gpu", "gpu tests")):
        ran = list(journal.of("test", lane=lane))
        passed = sum(event["outcome"] == "passed" for event in ran)
        skipped = sum(event["outcome"] == "skipped" for event in ran)
        yield f"{title}: {passed} passed, {skipped} skipped, {len(ran) - passed - skipped} not"
        for event in ran:
            if event["outcome"] not in ("passed", "skipped"):
                yield f"  {event['outcome']} {event['test']}: {(event['detail'].splitlines() or [''])[-1]}"
        for event in journal.of("tests", lane=lane, ok=False):
            yield f"  {event['file']}: {event['how']}"
    for event in journal.of("rehearsed"):
        yield f"rehearsed {event['what']}: {'as expected' if event['ok'] else f'WRONG, {event}'}"
    for event in journal.of("verdict", ok=False):
        yield f"RED {event['bench']} {event['case']} {event['name']}: {event['error']:.2e} > {event['budget']:.2e}"
    for kind in ("hung", "failed"):
        yield from (f"{kind.upper()} {event['bench']} at {event['key']}" for event in journal.of(kind))
    yield f"rows measured now: {len(list(journal.of('row')))}"


def _rows(journal: Journal, measured: Iterable[Benchmark]) -> Iterator[tuple[Benchmark, list[Row]]]:
    for benchmark in measured:
        outcome = journal.outcome(benchmark.name, provenance.source_hash(benchmark))
        rows = [row for row in outcome.rows if row.case not in outcome.red]
        if rows:
            yield benchmark, rows
