"""A pytest plugin that prints one JSON event a line: a test's start, and its outcome.

So a run that a clock or a crash ends has told what it did until then, and in which test it ended. Use it by
``pytest -p shardfuse.bench.gpu.pytest_events``. ``--leave-out FILE`` names a file with a JSON list of node ids that
are not to run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ...kernels.dev.workers import end_with_the_parent

LEAVE_OUT = "--leave-out"
DETAIL_LINES = 12  # the last ones of a failure's text
_WORST = {"passed": 0, "skipped": 1, "failed": 2}


def _say(event: str, **content: Any) -> None:
    print(json.dumps({"event": event, **content}), flush=True)


class Events:
    """The hooks, and what the phases (set-up, call, clean-up) of the running test have said."""

    def __init__(self) -> None:
        self._reports: list[pytest.TestReport] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        path = config.getoption(LEAVE_OUT)
        skipped = set(json.loads(Path(path).read_text())) if path else set()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in skipped])
        items[:] = [item for item in items if item.nodeid not in skipped]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        _say("collected", tests=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        _say("test-start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        worst = max(self._reports, key=lambda report: _WORST[report.outcome])
        text = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else worst.longreprtext
        _say(
            "test",
            test=nodeid,
            outcome=worst.outcome,
            seconds=round(sum(report.duration for report in self._reports), 2),
            detail="\n".join(text.splitlines()[-DETAIL_LINES:]),
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        return report.outcome, "", ""  # no dots between the events


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(LEAVE_OUT, metavar="FILE", help="a JSON list of tests not to run, by their node ids")


def pytest_configure(config: pytest.Config) -> None:
    end_with_the_parent()
    config.pluginmanager.register(Events(), "shardfuse-events")
