"""The tests of a GPU run: a process for each file, one event of the journal for each test.

A test that was green is not run again until the package's sources, or the tests' own, change; nor is one that hung or
crashed. One that failed runs again in the next call. What it says is in the journal too.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..harness import provenance
from . import pytest_events
from .journal import Event, Journal, said
from .watchdog import Ending

QUIET_S = 100.0  # of one test: the slowest compiles a dozen kernels
_ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, none collected
Watch = Callable[..., Ending]


def test_command(markers: str) -> list[str]:
    """What runs the tests that ``markers`` select, without the files."""
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", markers]


class Suite:
    """Runs test files by ``watch`` (``GpuRun._watch``), whose other lines go to ``note``."""

    def __init__(self, journal: Journal, root: Path, watch: Watch, note: Callable[[str], None]) -> None:
        self._journal, self._root, self._watch, self._note = journal, root, watch, note

    def run(self, lane: str, markers: str, file: Path, until: float, quiet_s: float = QUIET_S) -> None:
        """Run the tests of ``file`` that ``markers`` select and that are not done, until ``until``."""
        what = {"lane": lane, "file": self._name(file), "source": provenance.tests_hash(file)}
        if any(self._journal.known("tests", **what, ok=True)):
            return
        while time.monotonic() < until:
            ending, running = self._process(what, markers, file, until, quiet_s)
            if ending.status == "ended" and ending.returncode in _ENDED:
                ok = not any(each["outcome"] not in ("passed", "skipped") for each in self._latest(what).values())
                self._journal.add("tests", **what, ok=ok, how=str(ending))
                return
            if ending.status in ("out of time", "stopped"):
                break
            if running is None:  # outside of a test: it would end so again
                self._journal.add("tests", **what, ok=False, how=str(ending))
                return
        else:
            return
        self._journal.add("tests", **what, ok=False, how=str(ending))

    def _process(
        self, what: Event, markers: str, file: Path, until: float, quiet_s: float
    ) -> tuple[Ending, str | None]:
        """Run one process; returns its end and the test in which it ended."""
        running: str | None = None
        not_again = ("passed", "skipped", "hung", "crashed")
        done = [test for test, each in self._latest(what).items() if each["outcome"] in not_again]
        done += [each["test"] for each in self._journal.of("test", **what)]

        def on_line(line: str) -> None:
            nonlocal running
            event = said(line) or {}
            kind = event.pop("event", None)
            if kind == "test-start":
                running = event["test"]
            elif kind == "test":
                running = None
                self._journal.add("test", **what, **event)
            elif kind is None:
                self._note(line)

        with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
            skip = Path(folder) / "skip.json"
            skip.write_text(json.dumps(done))
            plugin = pytest_events.__name__
            command = [*test_command(markers), "-p", plugin, pytest_events.LEAVE_OUT, str(skip), str(file)]
            ending = self._watch(command, on_line, until, quiet_s)
        if running is not None:
            outcome = {"hung": "hung", "ended": "crashed"}.get(ending.status, "cut")
            self._journal.add("test", **what, test=running, outcome=outcome, seconds=None, detail=str(ending))
        return ending, running

    def _latest(self, what: Event) -> dict[str, Event]:
        """The newest event of each test of a file, in this call or an earlier one."""
        return {event["test"]: event for event in self._journal.known("test", **what)}

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self._root)) if file.is_relative_to(self._root) else file.name
