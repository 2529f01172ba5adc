"""The journal of a GPU run: one JSON event a line, written as it happens, read again when the run is resumed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...kernels.dev.accuracy import Verdict
from ..harness.provenance import check_machine
from ..harness.records import Outcome, RowKey
from ..harness.report import Row

Event = dict[str, Any]


class Journal:
    """Appends events to ``path``; every event is on disk before the call returns.

    ``on_event`` gets each new event, for progress on a terminal. ``origin`` describes this machine, as
    ``provenance.describe`` returns it.

    Raises ValueError if ``path`` holds a run from another device or other versions than ``origin`` names.
    """

    def __init__(
        self,
        path: Path,
        *,
        dry: bool,
        origin: Mapping[str, Any] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        self._dry = dry
        self._on_event = on_event
        self._lock = threading.Lock()
        self.events = list(_read(path))
        if origin is not None:
            for run in self.events:
                if run["event"] == "run" and run["dry"] == dry:
                    check_machine(path, run["origin"], origin)
        self.resumed = len(self.events)
        self._file = path.open("a")

    def add(self, event: str, **content: Any) -> None:
        entry: Event = {"event": event, "at_s": round(time.monotonic() - self._started, 2), "dry": self._dry, **content}
        with self._lock:
            self.events.append(entry)
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        self._on_event(entry)

    def close(self) -> None:
        self._file.close()

    def of(self, event: str, *, everything: bool = False, **content: Any) -> Iterator[Event]:
        """This run's events of one kind with the given content, or (``everything``) those of earlier runs as well."""
        for entry in list(self.events if everything else self.events[self.resumed :]):
            if entry["event"] == event and all(entry.get(name) == value for name, value in content.items()):
                yield entry

    def known(self, event: str, **content: Any) -> Iterator[Event]:
        """:meth:`of` this call and all earlier ones of its kind, dry or not."""
        return self.of(event, everything=True, dry=self._dry, **content)

    def done(self, bench: str, source: str) -> set[RowKey]:
        """Rows not to measure again: measured, or lost, with the same sources, in this call or an earlier one."""
        rows = self._of_source("row", bench, source)
        return {Row.from_record(row).key for row in rows} | self.lost(bench, source)

    def lost(self, bench: str, source: str) -> set[RowKey]:
        """Rows that hung or crashed; they are not tried again until the sources change."""
        ended = (event for kind in ("hung", "failed") for event in self._of_source(kind, bench, source))
        return {(case, metric, peer_name) for case, metric, peer_name in (e["key"] for e in ended if e["key"])}

    def outcome(self, bench: str, source: str) -> Outcome:
        """All results of a benchmark with these sources."""
        verdicts = {(e["case"], e["name"]): e for e in self._of_source("verdict", bench, source)}
        rows = {Row.from_record(e).key: Row.from_record(e) for e in self._of_source("row", bench, source)}
        return Outcome(
            [(e["case"], Verdict(e["name"], e["error"], e["budget"])) for e in verdicts.values()], list(rows.values())
        )

    def _of_source(self, event: str, bench: str, source: str) -> Iterator[Event]:
        return self.known(event, bench=bench, source=source)


def said(line: str) -> Event | None:
    """The JSON object on a line that a process printed, or None: libraries print lines, too."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ({"event", "op"} & found.keys()) else None


def _read(path: Path) -> Iterator[Event]:
    """Every complete line; a killed run may have left half of one at the end."""
    if not path.exists():
        return
    text = path.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + "\n" if whole else "")
    yield from (json.loads(line) for line in whole.splitlines())
