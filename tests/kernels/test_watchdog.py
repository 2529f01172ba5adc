"""The watchdog: commands that end, hang, run late, are stopped; and what they started goes with them."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from shardfuse.kernels.dev.watchdog import watch

FOREVER = 3600.0


def _watch(code: str, *arguments: str, on_line=lambda line: None, **changes):
    options = {"until": time.monotonic() + 60, "quiet_s": 30.0, "on_line": on_line} | changes
    return watch([sys.executable, "-u", "-c", code, *arguments], **options)


def test_lines_arrive_and_the_exit_code_is_kept():
    lines: list[str] = []
    ending = _watch("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)", on_line=lines.append)
    assert sorted(lines) == ["a", "b"]
    assert (ending.status, ending.returncode, ending.ok) == ("ended", 3, False)
    assert _watch("").ok


def test_silence_is_a_hang():
    lines: list[str] = []
    code = f"import time; print('one'); time.sleep({FOREVER})"
    ending = _watch(code, on_line=lines.append, quiet_s=0.3, startup_s=60.0)
    assert lines == ["one"]
    assert (ending.status, ending.returncode) == ("hung", None)


def test_talking_forever_is_out_of_time():
    ending = _watch("while True: print('still here')", until=time.monotonic() + 1.0)
    assert ending.status == "out of time"


def test_output_closed_but_still_running_is_out_of_time():
    code = f"import os, time; os.close(1); os.close(2); time.sleep({FOREVER})"
    assert _watch(code, until=time.monotonic() + 1.0).status == "out of time"


def test_stop_ends_it():
    stop = threading.Event()
    code = f"import time; print('one'); time.sleep({FOREVER})"
    assert _watch(code, on_line=lambda line: stop.set(), stop=stop).status == "stopped"


def test_grandchildren_die_too(tmp_path):
    """A grandchild holds a pipe open for as long as it lives."""
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    grandchild = f"import sys, time; f = open(sys.argv[1], 'w'); print('ready', flush=True); time.sleep({FOREVER})"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}, sys.argv[1]])"
    lines: list[str] = []
    assert _watch(code, str(pipe), on_line=lines.append, quiet_s=0.3, startup_s=60.0).status == "hung"
    assert lines == ["ready"]
    assert os.read(reader, 1) == b""  # end of file: nobody has it open any more
    os.close(reader)


def test_error_in_the_callback_leaves_nothing_running():
    pids: list[int] = []

    def fail(line: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _watch(f"import time; print('one'); time.sleep({FOREVER})", on_line=fail, on_start=pids.append)
    with pytest.raises(ProcessLookupError):
        os.killpg(pids[0], 0)
