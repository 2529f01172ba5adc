"""The tests of a GPU run: processes of several files each, one event of the journal for each test.

A test that was green is not run again until the package's sources, or the tests' own, change; nor is one that hung or
crashed. One that failed runs again in the next call. What it says is in the journal too.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...kernels.dev.watchdog import Ending
from ..harness import provenance
from . import pytest_events
from .journal import Event, Journal, said

# Their tests marked interpret create tensors on the device where the kernels run.
_NAMES = (
    "autograd_gate bench_comm block_launches comm cross_entropy cross_entropy_backward dropout fp8_bits "
    "kv_cache kv_cache_blocks linear_act linear_fused linear_torch main_grad mlp_fused norm "
    "paged_attention paged_invariance paged_plan rope rope_tables scaled_linear "
)
OP_TESTS = tuple(f"test_{name}.py" for name in _NAMES.split())
OP_SUITE = "interpret and not (gpu or ranks or nightly)"
_ENDED = (0, 1, 5)  # pytest's exit codes: all passed, some failed, none collected
Watch = Callable[..., Ending]


def test_command(markers: str) -> list[str]:
    """What runs the tests that ``markers`` select, without the files."""
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", markers]


class Suite:
    """Runs test files by ``watch`` (``GpuRun._watch``), whose other lines go to ``note``."""

    def __init__(self, journal: Journal, root: Path, watch: Watch, note: Callable[[str], None]) -> None:
        self._journal, self._root, self._watch, self._note = journal, root, watch, note

    def run(self, lane: str, markers: str, files: Sequence[Path], until: float, quiet_s: float) -> None:
        """Run the tests of ``files`` that ``markers`` select and that are not done, until ``until``."""
        sources = {self._name(file): provenance.tests_hash(file) for file in files}
        finished = self._journal.known("tests", lane=lane, ok=True)
        green = {(name, source) for event in finished for name, source in event["sources"].items()}
        left = {name: source for name, source in sources.items() if (name, source) not in green}
        how, ended = "", not left
        while not ended and time.monotonic() < until:
            ending, running = self._process(lane, left, markers, until, quiet_s)
            how = str(ending)
            if ending.status == "ended" and ending.returncode in _ENDED:
                worst = [e["outcome"] for e in self._latest(lane, left).values()]
                ok = all(outcome in ("passed", "skipped") for outcome in worst)
                self._journal.add("tests", lane=lane, sources=left, ok=ok, how=how)
                return
            # What ends outside of a test would end so again.
            ended = ending.status in ("out of time", "stopped") or running is None
        if how:
            self._journal.add("tests", lane=lane, sources=left, ok=False, how=how)

    def _process(
        self, lane: str, sources: dict[str, str], markers: str, until: float, quiet_s: float
    ) -> tuple[Ending, str | None]:
        """Run one process; returns its end and the test in which it ended."""
        running: str | None = None
        not_again, ran = ("passed", "skipped", "hung", "crashed"), list(self._journal.of("test", lane=lane))
        latest = self._latest(lane, sources)
        done = [test for test, each in latest.items() if each["outcome"] in not_again or each in ran]

        def on_line(line: str) -> None:
            nonlocal running
            event = said(line) or {}
            kind = event.pop("event", None)
            if kind == "test-start":
                running = event["test"]
            elif kind == "test":
                running = None
                self._journal.add("test", lane=lane, source=self._source(event["test"], sources), **event)
            elif kind is None:
                self._note(line)

        with tempfile.TemporaryDirectory(prefix="shardfuse-gpu-") as folder:
            skip = Path(folder) / "skip.json"
            skip.write_text(json.dumps(done))
            plugin, files = pytest_events.__name__, [str(self._root / name) for name in sources]
            command = [*test_command(markers), "-p", plugin, pytest_events.LEAVE_OUT, str(skip), *files]
            ending = self._watch(command, on_line, until, quiet_s)
        if running is not None:
            outcome = {"hung": "hung", "ended": "crashed"}.get(ending.status, "cut")
            told = {"outcome": outcome, "seconds": None, "detail": str(ending)}
            self._journal.add("test", lane=lane, source=self._source(running, sources), test=running, **told)
        return ending, running

    def _latest(self, lane: str, sources: dict[str, str]) -> dict[str, Event]:
        """The newest event of each test of the files with these sources, in this call or an earlier one."""
        found = {event["test"]: event for event in self._journal.known("test", lane=lane)}
        return {test: event for test, event in found.items() if event["source"] == self._source(test, sources)}

    def _source(self, test: str, sources: dict[str, str]) -> str | None:
        """Of the file that a node id names; no two test files have one name."""
        file = Path(test.partition("::")[0]).name
        return next((source for name, source in sources.items() if Path(name).name == file), None)

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self._root)) if file.is_relative_to(self._root) else str(file)
