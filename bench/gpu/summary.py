"""What a GPU run found, from its journal alone: the summary, the records, and filing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from ...kernels.runtime.printing import console
from ..harness import stale
from ..harness.records import read_records
from ..harness.report import DRY_NOTE, Row, show_rows, write_json
from . import plan, predictions
from .journal import Event, Events, folders


def good(found: Events) -> bool:
    """Whether everything that the latest call ran was right, and nothing is lost to a hang or a crash."""
    right = all(event["ok"] for kind in ("smoke", "tests", "verdict") for event in found.of(kind))
    lost = any(found.lost(event["bench"], event["source"]) for event in found.of("benchmark"))
    return right and not lost and not any(any(found.of(kind)) for kind in ("broken", "failed", "hung"))


def write(folder: Path, found: Events) -> None:
    """Write ``summary.txt`` and ``results.json`` into a card's folder."""
    write_json(folder / "results.json", found.records())
    partial = folder / f"summary.{os.getpid()}.part"
    with partial.open("w") as file:
        show(console(file=file), found)
    partial.replace(folder / "summary.txt")


def show(out: Console, found: Events) -> None:
    """Print the summary; a rehearsal's numbers are marked as meaningless."""
    dry = any(run["dry"] for run in found.of("run"))
    for line in _lines(found):
        out.print(line, markup=False, soft_wrap=True)
    answered: list[tuple[predictions.Prediction, Row]] = []
    for bench, event in found.benchmarks().items():
        rows = found.outcome(bench, event["source"]).good
        if rows:
            show_rows(out, bench + (DRY_NOTE if dry else ""), rows, absolute=True)
        answered += predictions.compared(bench, rows)
    if answered:
        out.print(predictions.table(answered))


def _lines(found: Events) -> Iterator[str]:
    """Of all calls the latest finding of each case, test and check; phases and kernels are the latest call's."""
    phases = list(found.of("phase"))
    for kernels in found.of("kernels"):
        refused = f"; left aside: {kernels['refused']}" if kernels["refused"] else ""
        yield f"kernels: {kernels['found']} came along, {sum(p['compiled'] for p in phases)} compiled anew{refused}"
    for phase in phases:
        compiled = f"  {phase['compiled']} compiled" if phase["compiled"] else ""
        yield f"{phase['name']:<11} {phase['seconds']:6.1f} s  {phase['processes']} processes{compiled}"
    yield from (f"BROKEN {event['phase']}: {event['how']}" for event in found.of("broken"))
    smoked = list({(event["op"], event["case"]): event for event in found.known("smoke")}.values())
    yield f"smoke: {sum(event['ok'] for event in smoked)} of {len(smoked)} cases right"
    yield from (f"  {event['op']} {event['case']}: {_last(event)}" for event in smoked if not event["ok"])
    for event in found.of("again"):
        how = "right" if event["ok"] else _last(event)
        yield f"  again, {event['with']}: {event['op']} {event['case']}: {how}"
    for lane, title in (("tests", "ops' tests"), ("gpu", "gpu tests")):
        ran = list({event["test"]: event for event in found.known("test", lane=lane)}.values())
        passed, skipped = (sum(event["outcome"] == outcome for event in ran) for outcome in ("passed", "skipped"))
        yield f"{title}: {passed} passed, {skipped} skipped, {len(ran) - passed - skipped} not"
        for event in ran:
            if event["outcome"] not in ("passed", "skipped"):
                yield f"  {event['outcome']} {event['test']}: {_last(event)}"
        for event in found.of("tests", lane=lane, ok=False):
            yield f"  {' '.join(event['sources'])}: {event['how']}"
    yield from _measured(found)
    if not any(found.of("finished")):
        yield "the call has not finished"


def _measured(found: Events) -> Iterator[str]:
    """What stands in the way of rows, and how many there are."""
    rows, planned = set[plan.Name](), set[plan.Name]()
    for bench, event in found.benchmarks().items():
        outcome = found.outcome(bench, event["source"])
        for case, each in outcome.verdicts:
            if not each.ok:
                yield f"RED {bench} {case} {each.name}: {each.error:.2e} > {each.budget:.2e}"
        rows |= {(bench, *row.key) for row in outcome.good}
        planned |= {(bench, key[0], key[1], key[2]) for key in event["planned"]}
        yield from (f"skipped {bench} {', '.join(key)}: {why}" for *key, why in event["skipped"])
        ended = [
            (kind, e) for kind in ("hung", "failed") for e in found.known(kind, bench=bench, source=event["source"])
        ]
        for kind, e in ended:
            if e["key"] is None or (bench, *e["key"]) not in rows:
                yield f"{kind.upper()} {bench} at {e['key']}: {e['how']}"
    lacking = [name for name in plan.HEADLINES if name in planned - rows]
    yield from (f"headline without a row: {', '.join(name)}" for name in lacking)
    yield f"rows measured: {len(rows)} of {len(planned)}, now: {len(list(found.of('row')))}"


def _last(event: Event) -> str:
    return (event["detail"].splitlines() or [""])[-1]


def summarise(out: Path) -> int:
    """Print and write the summary of every card in ``out``, a run's directory, finished or not."""
    for folder in folders(out):
        console().print(f"{folder}:", markup=False)
        found = Events.read(folder)
        show(console(), found)
        try:
            write(folder, found)
        except OSError as error:
            print(f"summary.txt was not written: {error}", file=sys.stderr)
    return 0


def accept(out: Path, results: Path = stale.RESULTS) -> int:
    """File the results of a run (its directory) or of one ``bench run`` (its file) under bench/results/, a CPU's too.

    It prints the reason for each record that it refuses.
    """
    if out.is_dir():
        records = [each for folder in folders(out) for each in Events.read(folder).records().values()]
        if len(places := {(each["device"], each["bench"]) for each in records}) < len(records):
            cards = ", ".join(sorted({device for device, _ in places}))
            raise ValueError(f"{out} holds runs of {cards} with different versions: name the folder whose rows to file")
    else:
        records = read_records(out)
    refused = 0
    for found in records:
        try:
            path, missing = stale.accept(found, results), len(found["missing"])
            print(f"{found['bench']}: {path}" + (f", planned rows missing: {missing}" if missing else ""))
        except ValueError as error:
            refused += 1
            print(f"error: {error}", file=sys.stderr)
    return 1 if refused else 0
