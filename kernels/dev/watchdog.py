"""Runs a command that may hang, and kills it with all its children when it prints nothing for too long."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_POLL_S = 0.2


@dataclass(frozen=True)
class Ending:
    """How a watched command ended: "ended" by itself, "hung", "out of time" or "stopped"; and its seconds."""

    status: str
    returncode: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == "ended" and self.returncode == 0

    def __str__(self) -> str:
        how = self.status if self.returncode is None else f"exited with {self.returncode}"
        return f"{how} after {self.seconds:.0f} s"


def watch(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    until: float,
    quiet_s: float,
    startup_s: float | None = None,
    stderr: IO[str] | int = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stop: threading.Event | None = None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> Ending:
    """Run ``command`` in a process group of its own and pass its output to ``on_line``, line by line.

    The group is killed when no line came for ``quiet_s`` seconds (``startup_s`` before the first), when ``until`` (of
    ``time.monotonic``) has passed, when ``stop`` is set, and in any case when this function returns or raises.
    """
    started = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - a command line of this package's, without a shell
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace",
        env=env, cwd=cwd, start_new_session=True,
    )  # fmt: skip
    try:
        on_start(process.pid)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        status = _follow(lines, on_line, until, quiet_s, startup_s or quiet_s, stop)
        if status == "ended":
            status = _wait(process, until)
    finally:
        _kill_group(process)
    return Ending(status, process.returncode if status == "ended" else None, time.monotonic() - started)


def _follow(
    lines: queue.Queue[str | None],
    on_line: Callable[[str], None],
    until: float,
    quiet_s: float,
    startup_s: float,
    stop: threading.Event | None,
) -> str:
    silent_after = time.monotonic() + startup_s
    while True:
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            now = time.monotonic()
            if stop is not None and stop.is_set():
                return "stopped"
            if now >= until:
                return "out of time"
            if now >= silent_after:
                return "hung"
            continue
        if line is None:
            return "ended"
        on_line(line)
        silent_after = time.monotonic() + quiet_s
        if time.monotonic() >= until:
            return "out of time"


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # a kill may have closed it meanwhile
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
    lines.put(None)


def _wait(process: subprocess.Popen[str], until: float) -> str:
    """Wait for a process that closed its output; one that is still running at the deadline is out of time."""
    try:
        process.wait(max(1.0, until - time.monotonic()))
        return "ended"
    except subprocess.TimeoutExpired:
        return "out of time"


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
