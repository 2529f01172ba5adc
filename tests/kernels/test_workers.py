"""Processes that answer one request per line: whatever happens to them, every request gets an answer."""

from __future__ import annotations

import os
import sys
import time

import pytest

from shardfuse.kernels.dev import workers

_PROGRAM = """
import os, sys, time
from shardfuse.kernels.dev import workers

def answer(request):
    print("noise on standard output")
    what = request["do"]
    if what == "raise":
        print("pages of state", file=sys.stderr)
        print("kernel.py:7: error: out of luck", file=sys.stderr)
        raise ValueError("no such thing")
    if what == "die":
        os._exit(3)
    if what == "wait":
        time.sleep(60)
    return {"did": what, "pid": os.getpid(), "secret": os.environ.get("SECRET")}

workers.serve(answer)
"""


def _ask(*requests: str, jobs: int = 1, limits: workers.Limits | None = None):
    env = {**os.environ, "SECRET": "passed on"}
    command = [sys.executable, "-c", _PROGRAM]
    return workers.ask_all([{"do": what} for what in requests], command, env, jobs, limits=limits)


def test_every_request_is_answered():
    answers = dict(_ask("a", "b", "raise", "die", "c"))
    assert answers[0] == {"did": "a", "pid": answers[0]["pid"], "secret": "passed on"}
    assert answers[1]["pid"] == answers[0]["pid"]  # one process serves many
    assert answers[2]["error"] == "ValueError: no such thing\nkernel.py:7: error: out of luck"
    assert answers[3]["error"].startswith("the process at work on it ended with exit code 3")
    assert answers[4]["did"] == "c"
    assert answers[4]["pid"] != answers[0]["pid"]  # the dead one was replaced


def test_what_takes_too_long_is_killed_and_costs_no_other():
    """A process that starts has longer."""
    answers = dict(_ask("a", "wait", "b", limits=workers.Limits(1.0, 120.0, time.monotonic() + 600)))
    assert answers[1]["error"].startswith("the process at work on it was killed after 1 s")
    assert answers[1]["late"]
    assert (answers[0]["did"], answers[2]["did"]) == ("a", "b")


def test_no_process_lives_longer_than_the_call():
    """Neither one that answers nor one that starts."""
    begun = time.monotonic()
    for start_s in (120.0, 0.0):
        [(_, answer)] = _ask("wait", limits=workers.Limits(120.0, start_s, begun + 8.0))
        assert "was killed after" in answer["error"]
    assert time.monotonic() - begun < 60


def test_no_requests():
    assert list(_ask()) == []


def test_stopping_early_ends_the_processes():
    answers = _ask("a", "wait", jobs=1)
    _, first = next(answers)
    started = time.monotonic()
    answers.close()
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(first["pid"], 0)
