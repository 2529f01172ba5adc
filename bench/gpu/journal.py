"""The journal of a GPU run: one JSON event a line, on disk as it happens; all that a run found is told by it alone.

A card's journal lies in a folder of its own, ``OUT/<card>/events.jsonl``, to which later calls append. A call's events
begin with "run", which tells machine, versions and commit, and a "benchmark" for each with its sources and its plan.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...kernels.dev.accuracy import Verdict
from ..harness import provenance
from ..harness.records import Outcome, RowKey, recorded
from ..harness.report import Row

Event = dict[str, Any]
FILE = "events.jsonl"


class Events:
    """The events of all calls on one card."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    @classmethod
    def read(cls, folder: Path) -> Events:
        """What the journal in ``folder`` holds, while a run writes it too."""
        return cls(list(_read(folder / FILE)))

    def of(self, event: str, *, everything: bool = False, **content: Any) -> Iterator[Event]:
        """Events of one kind with the given content, of the latest call or (``everything``) of all."""
        latest = max((n for n, entry in enumerate(self.events) if entry["event"] == "run"), default=0)
        for entry in list(self.events[0 if everything else latest :]):
            if entry["event"] == event and all(entry.get(name) == value for name, value in content.items()):
                yield entry

    def known(self, event: str, **content: Any) -> Iterator[Event]:
        """:meth:`of` all calls."""
        return self.of(event, everything=True, **content)

    def done(self, bench: str, source: str) -> set[RowKey]:
        """Rows not to measure again: measured, or lost, with the same sources."""
        return {row.key for row in self.outcome(bench, source).rows} | self.lost(bench, source)

    def lost(self, bench: str, source: str) -> set[RowKey]:
        """Rows that hung or crashed; they are not tried again until the sources change."""
        ended = (e for kind in ("hung", "failed") for e in self.known(kind, bench=bench, source=source))
        return {(case, metric, peer_name) for case, metric, peer_name in (e["key"] for e in ended if e["key"])}

    def outcome(self, bench: str, source: str) -> Outcome:
        """All results of a benchmark with these sources. What was red once stays so."""
        verdicts: dict[tuple[str, str], Event] = {}
        for e in self.known("verdict", bench=bench, source=source):
            if verdicts.setdefault((e["case"], e["name"]), e)["ok"]:
                verdicts[e["case"], e["name"]] = e
        rows = [Row.from_record(e) for e in self.known("row", bench=bench, source=source)]
        return Outcome(
            [(e["case"], Verdict(e["name"], e["error"], e["budget"])) for e in verdicts.values()],
            list({row.key: row for row in rows}.values()),
        )

    def benchmarks(self) -> dict[str, Event]:
        """The latest "benchmark" of each, of the latest sources that were checked where any were."""
        checked = {(event["bench"], event["source"]) for event in self.known("verdict")}
        told = sorted(self.known("benchmark"), key=lambda event: (event["bench"], event["source"]) in checked)
        return {event["bench"]: event for event in told}

    def records(self) -> dict[str, dict[str, Any]]:
        """The full record of each benchmark that was checked, from all calls with the same sources."""
        return {
            bench: self._record(event, outcome)
            for bench, event in self.benchmarks().items()
            if (outcome := self.outcome(bench, event["source"])).verdicts
        }

    def _record(self, event: Event, outcome: Outcome) -> dict[str, Any]:
        bench, source = event["bench"], event["source"]
        runs, run = list[Event](), Event()
        for each in self.events:  # the calls that found something of it
            run = each if each["event"] == "run" else run
            if each["event"] in ("row", "verdict") and (each["bench"], each["source"]) == (bench, source):
                runs += [] if run in runs else [run]
        origins = [run["origin"] for run in runs]
        dirty = [origin["dirty"] for origin in origins]
        origin = origins[-1] | {  # whatever keeps one call's rows from being filed
            "dirty": any(dirty) if any(dirty) or None not in dirty else None,
            "environment": origins[-1]["environment"]
            | {
                name: value
                for each in origins
                for name, value in each["environment"].items()
                if value not in ("", "0", "auto")
            },
        }
        head = {
            **{"bench": bench, "device": origin["device"], "dry": any(run["dry"] for run in runs)},
            **{"short": event["short"], "origin": origin, "source_hash": source, "sources": event["sources"]},
        }
        skipped = {(case, metric, peer_name): why for case, metric, peer_name, why in event["skipped"]}
        return recorded(head, outcome, [(key[0], key[1], key[2]) for key in event["planned"]], skipped)


class Journal(Events):
    """Appends events to a journal, the file ``path``; every event is on disk before the call returns.

    ``on_event`` gets each new event, for progress on a terminal; ``started`` (of ``time.monotonic``) is their zero.
    """

    def __init__(
        self, path: Path, on_event: Callable[[Event], None] = lambda event: None, started: float | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._started, self._on_event = time.monotonic() if started is None else started, on_event
        self._lock = threading.Lock()
        super().__init__(list(_read(path)))
        self._file = path.open("a")
        text = path.read_bytes()
        self._file.truncate(text.rfind(b"\n") + 1)  # a killed run may have left half a line

    def add(self, event: str, **content: Any) -> None:
        entry: Event = {"event": event, "at_s": round(time.monotonic() - self._started, 2), **content}
        with self._lock:
            self.events.append(entry)
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        self._on_event(entry)

    def close(self) -> None:
        self._file.close()


def card_folder(out: Path, origin: Mapping[str, Any]) -> Path:
    """``out/<card>`` for the machine of ``origin``; ``<card>-2`` and so on where that holds a run of other versions."""
    card = provenance.slug(origin["device"])
    for name in itertools.chain([card], (f"{card}-{n}" for n in itertools.count(2))):
        runs = [event["origin"] for event in _read(out / name / FILE) if event["event"] == "run"]
        if all(run[field] == origin[field] for run in runs for field in provenance.MACHINE):
            return out / name
    raise AssertionError("counting ends nowhere")


def folders(out: Path) -> list[Path]:
    """The cards' folders in ``out``, or ``out`` if it is one; ValueError without any."""
    found = [out] if (out / FILE).is_file() else sorted(path.parent for path in out.glob(f"*/{FILE}"))
    if not found:
        raise ValueError(f"{out} holds no run: name the OUT of make gpu, or a card's folder in it")
    return found


def said(line: str) -> Event | None:
    """The JSON object on a line that a process printed, or None: libraries print lines, too."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ({"event", "op", "counts"} & found.keys()) else None


def _read(path: Path) -> Iterator[Event]:
    """Every complete line; a killed run may have left half of one at the end."""
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines())
