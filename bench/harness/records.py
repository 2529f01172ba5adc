"""The outcome of a benchmark's run, its record on disk, and what a later run reuses from one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...kernels.dev.accuracy import Verdict
from . import provenance
from .benchmark import Benchmark, Measurement, Settings, gates
from .report import Row

RowKey = tuple[str, str, str]


@dataclass
class Outcome:
    """The outcome of one run of a benchmark."""

    verdicts: list[tuple[str, Verdict]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failed: dict[RowKey, str] = field(default_factory=dict)  # rows that raised, and their errors
    raised: set[str] = field(default_factory=set)  # gates that did

    @property
    def green(self) -> bool:
        return not self.red

    @property
    def red(self) -> set[str]:
        """The cases (or gates) with a comparison that failed; their rows do not count."""
        return {case for case, verdict in self.verdicts if not verdict.ok}

    @property
    def good(self) -> list[Row]:
        """The rows that count."""
        return [row for row in self.rows if self.gate_of(row) not in self.red]

    def gate_of(self, row: Row) -> str:
        """What was checked before the row."""
        case, own = gates(row.case, row.metric)
        return own if any(name == own for name, _ in self.verdicts) else case


def left(benchmark: Benchmark, settings: Settings, *, done: Collection[RowKey] = ()) -> list[Measurement]:
    """The planned rows that this machine can measure, and that are not measured yet."""
    plan = benchmark.plan(settings)
    return [row for row in plan if not row.skip and row.key not in done]


def skipped(benchmark: Benchmark, settings: Settings) -> dict[RowKey, str]:
    """The planned rows that this machine cannot measure, and why."""
    return {row.key: row.skip for row in benchmark.plan(settings) if row.skip}


def is_short(benchmark: Benchmark, settings: Settings) -> bool:
    """Whether a run plans fewer rows than the whole plan."""
    if not settings.short:
        return False
    planned = {row.key for row in benchmark.plan(settings)}
    return any(row.key not in planned for row in benchmark.plan(replace(settings, short=False)))


def header(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """The header of a result: machine, versions, commit and the hashes of its sources, as they are now."""
    return {
        "bench": benchmark.name,
        "device": provenance.device_name(settings.device),
        "dry": settings.dry,
        "short": is_short(benchmark, settings),
        "origin": provenance.describe(settings.device),
        "source_hash": provenance.source_hash(benchmark),
        "sources": provenance.source_hashes(benchmark),
    }


def record(
    benchmark: Benchmark, settings: Settings, outcome: Outcome, head: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The full result of a plan: :func:`recorded`."""
    planned = [row.key for row in left(benchmark, settings)]
    return recorded(head or header(benchmark, settings), outcome, planned, skipped(benchmark, settings))


def recorded(
    head: Mapping[str, Any], outcome: Outcome, planned: Iterable[RowKey], skipped: Mapping[RowKey, str]
) -> dict[str, Any]:
    """The full result: header, verdicts, rows with derived figures, planned rows that were not or cannot be measured.

    The gate is red if a case was; such a case has no rows.
    """
    rows = outcome.good
    measured = {row.key for row in rows}
    return {
        **head,
        "gate": "green" if outcome.green else "red",
        "verdicts": [{"case": case, **vars(verdict), "ok": verdict.ok} for case, verdict in outcome.verdicts],
        "rows": [row.record() for row in rows],
        "missing": [key for key in planned if key not in measured],
        "failed": [[*key, why] for key, why in outcome.failed.items()],
        "skipped": [[*key, why] for key, why in skipped.items()],
    }


def earlier(benchmark: Benchmark, settings: Settings, path: str | Path | None, resume: bool) -> Outcome:
    """With ``resume`` the outcome recorded at ``path``, without its red cases; empty if there is none yet.

    Raises ValueError if its rows and this run's must not share one result, and without ``resume`` if the run would
    overwrite rows that can be resumed.
    """
    if path is None and resume:
        raise ValueError("--resume continues the run in the file that --out names: pass --out as well")
    if path is None or not Path(path).exists():
        return Outcome()
    if not resume:
        _let_go(Path(path), benchmark, settings)
        return Outcome()
    try:
        found = json.loads(Path(path).read_text())
        bench, dry, source_hash = (found[name] for name in ("bench", "dry", "source_hash"))
        short = found["short"]
        origin = {name: found["origin"][name] for name in provenance.MACHINE}
        rows = [Row.from_record(row) for row in found["rows"]]
        failed = {(case, metric, peer_name): why for case, metric, peer_name, why in found["failed"]}
        verdicts = [(each["case"], Verdict(each["name"], each["error"], each["budget"])) for each in found["verdicts"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the record of a benchmark: choose another --out") from None
    if (bench, dry) != (benchmark.name, settings.dry):
        kind = "a dry run" if dry else "a run"
        raise ValueError(f"{path} holds {kind} of {bench}: choose another --out, or leave --resume out")
    if short != is_short(benchmark, settings):
        raise ValueError(
            f"{path} holds a run of the {'short' if short else 'whole'} plan: pass --short for both runs or for none, "
            "or choose another --out"
        )
    provenance.check_machine(path, origin, provenance.describe(settings.device))
    if source_hash != provenance.source_hash(benchmark):
        raise ValueError(
            f"the sources that {path} measured have changed since: choose another --out, or leave --resume out to "
            "start again"
        )
    before = Outcome(verdicts, rows)
    # The run may have stopped within its last check.
    whole = {before.gate_of(row) for row in rows} | {case for case, _ in verdicts if case != verdicts[-1][0]}
    return Outcome([(case, verdict) for case, verdict in verdicts if case in whole - before.red], rows, failed)


def _let_go(path: Path, benchmark: Benchmark, settings: Settings) -> None:
    """ValueError if ``path`` holds something that must not be overwritten by mistake.

    That is anything but a finished run of the same benchmark on the same device, a CPU.
    """
    text = path.read_text()
    if not text.strip():
        return  # an empty file, made to be written
    try:
        found = json.loads(text)
        same = (found["bench"], found["device"], found["dry"]) == (
            benchmark.name,
            provenance.device_name(settings.device),
            settings.dry,
        )
        rows, unfinished, on_gpu = len(found["rows"]), bool(found["missing"]), found["device"] != "cpu"
        held = f"{'a dry run' if found['dry'] else 'a run'} of {found['bench']} on {found['device']}"
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not the record of a benchmark: choose another --out") from None
    if not same:
        raise ValueError(f"{path} holds {held}: choose another --out, or remove it")
    if rows and unfinished:
        raise ValueError(
            f"{path} holds {rows} rows of a run that was stopped: --resume continues it; remove it to start again"
        )
    if rows and on_gpu and not settings.dry:
        raise ValueError(f"{path} holds {held}, finished: choose another --out, or remove it to start again")


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Make the folder of ``path``, a file to be written; ValueError that names it and the ``option`` that gave it where
    the block cannot write.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(
            f"{option} {path}: cannot be written to ({error.strerror or error}); choose another place"
        ) from None


def check_place(path: Path) -> None:
    """ValueError where a file ``path`` could not be written, before anything is measured."""
    if path.is_dir():
        raise ValueError(f"--out {path}: it is a folder; name a file, such as {path / 'record.json'}")
    with writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def filed_rows(folder: Path) -> dict[tuple[str, str, str, str], Row]:
    """All rows, by benchmark and key, in a card's folder under bench/results/, whatever their sources."""
    records = [record for path in folder.glob("*.json") for record in read_records(path)]
    return {(each["bench"], *row.key): row for each in records for row in map(Row.from_record, each["rows"])}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results in a file: one (``bench run --out``, bench/results/) or several by name (``make gpu``'s).

    Raises ValueError for other files.
    """
    try:
        content = json.loads(path.read_text())
        found = [content] if "bench" in content else list(content.values())
        if not all("bench" in record and "rows" in record for record in found):
            raise ValueError
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name files that bench run --out wrote") from None
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{path} holds no benchmark's record") from None
    return found
