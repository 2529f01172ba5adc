"""Compiles guides on trial in another process (``guide_process.py``), which a guide of a client may end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import weakref
from multiprocessing.spawn import get_executable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from . import guide_process
from .guide import Guide, GuideBusy, GuideRefused

_TRIES = 2  # of a trial whose process ends without an answer, say because the system has no memory left


class Trial:
    """A compilation on trial, which waits for its answer in one thread; others may end the wait."""

    def __init__(self) -> None:
        self._heard: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.hear, self.wait = self._heard.put, self._heard.get

    def give_up(self) -> None:
        self.hear({"given up": True})


class GuideCompiler:
    """The process that compiles guides on trial. It starts with the first one and stays; another replaces a dead one.

    Any number of threads may call :meth:`compile` at once. ``tokenizer`` has the fields of the first message.
    """

    def __init__(self, tokenizer: dict[str, Any], seconds: float) -> None:
        self.pid: int | None = None  # of the process
        self._first = {"path": sys.path, **tokenizer}
        self._seconds = seconds
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows, and writing to the process
        self._process: subprocess.Popen[bytes] | None = None
        self._trials: dict[int, Trial] = {}
        self._closed = False

    def compile(self, trial: Trial, guide: Guide, nbytes: int, room: int, most: int) -> int:
        """Compile ``guide`` within ``nbytes`` of memory, and all trials together within ``room``; return its bytes.

        Raises GuideRefused for a guide that cannot be compiled; GuideBusy if it was given up, or if other trials, or
        guides in use, left it less than they do at ``most``; RuntimeError if the process cannot run.
        """
        number = next(self._numbers)
        what = {"kind": guide.kind, "source": guide.source, "any_whitespace": guide.any_whitespace}
        job = {"id": number, **what, "bytes": nbytes, "seconds": self._seconds}
        for _ in range(_TRIES):
            with self._lock:
                self._start()
                self._trials[number] = trial
                self._send({"room": room}, job)
            found = trial.wait()
            if "ended" not in found:
                break
        else:
            raise RuntimeError(f"guide: the process that compiles guides {found['ended']}, {_TRIES} times in a row")
        if "given up" in found:
            with self._lock:
                self._trials.pop(number, None)
                self._send({"drop": number})
            raise GuideBusy("guide: its request has ended")
        if "refused" in found:
            raise GuideRefused(f"guide: this {guide.kind} cannot be compiled: {found['refused']}")
        if found.get("over") == "load":
            raise GuideBusy(
                f"guide: this {guide.kind} takes long to compile, and others wait or need the memory: try again later"
            )
        if found.get("over") == "memory" and nbytes < most:
            raise GuideBusy(
                f"guide: this {guide.kind} needs more than {nbytes >> 20} MiB of memory to compile, and the guides in "
                "use now leave no more: try again later"
            )
        if "over" in found:
            limit = {
                "stack": "nests too deeply, or its definitions refer to each other in too long a chain",
                "memory": f"needs more than {nbytes >> 20} MiB of memory to compile",
                "seconds": f"needs more than {self._seconds:g} s to compile",
            }[found["over"]]
            raise GuideRefused(f"guide: this {guide.kind} is too complex: it {limit}")
        size: int = found["bytes"]
        return size

    def close(self) -> None:
        """End the process, and all trials with it."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _end(self._process)

    def _start(self) -> None:
        """Start the process unless it runs; the caller holds the lock."""
        if self._closed:
            raise GuideBusy("guide: the engine is closed")
        if self._process is not None and self._process.poll() is None:
            return
        # -I and -S: it needs nothing but the path, and starts at once.
        command = [os.fsdecode(get_executable() or sys.executable), "-I", "-S", str(Path(guide_process.__file__))]
        self._process = process = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = process.pid
        weakref.finalize(self, _end, process)
        self._send(self._first)
        assert process.stdout is not None
        line = process.stdout.readline()
        said = json.loads(line) if line else {"failed": f"ended with {process.wait()}"}
        if "failed" in said:
            _end(process)
            process.stdout.close()
            process.wait()
            raise RuntimeError(f"guide: the process that compiles guides cannot start: {said['failed']}")
        self._trials = {}
        listen = threading.Thread(
            target=_listen, args=(process, self._trials, self._lock), name="shardfuse-guides", daemon=True
        )
        listen.start()

    def _send(self, *messages: dict[str, Any]) -> None:
        """Write ``messages``; if the process has ended, its listener tells the trials."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(b"".join(json.dumps(each).encode() + b"\n" for each in messages))
            self._process.stdin.flush()


def _listen(process: subprocess.Popen[bytes], trials: dict[int, Trial], lock: threading.Lock) -> None:
    """Pass each of the process's answers to its trial, and its end to all that are left."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            answer = json.loads(line)
            if (trial := trials.pop(answer["id"], None)) is not None:
                trial.hear(answer)
    code = process.wait()
    with lock:  # later trials find that it has ended
        while trials:
            trials.popitem()[1].hear({"ended": f"ended with {code}"})


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process: its input ends."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
