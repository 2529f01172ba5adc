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


def _ask(*requests: str, jobs: int = 1):
    env = {**os.environ, "SECRET": "passed on"}
    return workers.ask_all([{"do": what} for what in requests], [sys.executable, "-c", _PROGRAM], env, jobs)


def test_every_request_is_answered():
    answers = dict(_ask("a", "b", "raise", "die", "c"))
    assert answers[0] == {"did": "a", "pid": answers[0]["pid"], "secret": "passed on"}
    assert answers[1]["pid"] == answers[0]["pid"]  # one process serves many
    assert answers[2]["error"] == "ValueError: no such thing\nkernel.py:7: error: out of luck"
    assert answers[3]["error"].startswith("the process at work on it ended with exit code 3")
    assert answers[4]["did"] == "c"
    assert answers[4]["pid"] != answers[0]["pid"]  # the dead one was replaced


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
