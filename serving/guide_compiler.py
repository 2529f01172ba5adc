"""Compiles guides on trial in another process (``guide_process.py``), which a guide of a client may end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import IO, Any

from . import guide_process
from .guide import Guide, GuideBusy, GuideRefused

_TRIES = 2  # of a trial whose process ends without an answer, say because the system has no memory left
_PATIENCE_S = 30.0  # for the process to read its tokenizer, or a message
_numbers = itertools.count()


class Trial:
    """A compilation on trial within ``nbytes`` of memory, all trials together within ``room``.

    ``done`` is called once, in another thread, with the bytes that it took or with the error. ``most`` are the bytes
    that it could have if no other guide were in use.
    """

    def __init__(
        self, guide: Guide, nbytes: int, room: int, most: int, seconds: float, done: Callable[[int | Exception], None]
    ) -> None:
        self.number = next(_numbers)
        self.guide = guide
        self.done = done
        self.tries = 0
        self._nbytes, self._room, self._most, self._seconds = nbytes, room, most, seconds

    def message(self) -> dict[str, Any]:
        guide = self.guide
        what = {"kind": guide.kind, "source": guide.source, "any_whitespace": guide.any_whitespace}
        limits = {"bytes": self._nbytes, "room": self._room, "seconds": self._seconds}
        return {"id": self.number, **what, **limits}

    def hear(self, said: dict[str, Any]) -> None:
        """Take the process's answer."""
        self.done(said["bytes"] if "bytes" in said else self._error(said))

    def _error(self, said: dict[str, Any]) -> GuideRefused:
        kind = f"guide: this {self.guide.kind}"
        if "refused" in said:
            return GuideRefused(f"{kind} cannot be compiled: {said['refused']}")
        if said["over"] == "load":
            return GuideBusy(
                f"{kind} found no room to compile beside others, of the processor or the memory: try again"
            )
        if said["over"] == "memory" and self._nbytes < self._most:
            return GuideBusy(
                f"{kind} needs more than {self._nbytes >> 20} MiB of memory to compile, and the guides in use now "
                "leave no more: try again later"
            )
        limit = {
            "stack": "nests too deeply, or its definitions refer to each other in too long a chain",
            "memory": f"needs more than {self._nbytes >> 20} MiB of memory to compile",
            "seconds": f"needs more than {self._seconds:g} s to compile",
        }[said["over"]]
        return GuideRefused(f"{kind} is too complex: it {limit}")


class GuideCompiler:
    """The process that compiles guides on trial. It starts with the first one and stays; another replaces a dead one.

    One thread calls :meth:`send` and :meth:`drop`, which may wait for the process; any thread may call :meth:`close`,
    which does not. ``tokenizer`` has the fields of the first message.
    """

    def __init__(self, tokenizer: dict[str, Any], again: weakref.WeakMethod[Callable[[Trial], object]]) -> None:
        self._first = {"path": [str(each) for each in sys.path], **tokenizer}
        self._again = again  # sends a trial once more; weak, for a thread knows it as long as the process lives
        self._lock = threading.Lock()  # guards the next two attributes
        self._trials: dict[int, Trial] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process's number; None before the first trial."""
        return None if self._process is None else self._process.pid

    def send(self, trial: Trial) -> None:
        """Begin ``trial``. Raises RuntimeError if the process cannot run."""
        trial.tries += 1
        with self._lock:  # of two that see its end, the listener comes later
            process = self._process
            lives = process is not None and process.poll() is None
            if lives:
                self._trials[trial.number] = trial
        if process is None or not lives:
            process = self._start(trial)
        if not self._write(process, trial.message()) and self._trials.pop(trial.number, None) is not None:
            process.kill()
            raise RuntimeError("guide: the process that compiles guides does not read")

    def drop(self, trial: Trial) -> None:
        """Compile ``trial`` no longer, if its process still does."""
        if self._trials.pop(trial.number, None) is not None and self._process is not None:
            self._write(self._process, {"drop": trial.number})

    def close(self) -> None:
        """End the process, and all trials with it."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _start(self, trial: Trial) -> subprocess.Popen[bytes]:
        """Start the process, for ``trial`` first."""
        # -I and -S: it needs nothing but the path, and starts at once. A session of its own: a terminal's Ctrl-C is not
        # for it.
        command = [os.fsdecode(get_executable() or sys.executable), "-I", "-S", str(Path(guide_process.__file__))]
        process = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        trials = {trial.number: trial}
        try:
            os.set_blocking(process.stdin.fileno(), False)
            wrote = self._write(process, self._first)
            line = process.stdout.readline() if wrote and _ready(process.stdout, select.POLLIN) else b""
            said = json.loads(line) if line else {"failed": "it does not answer"}
            if "failed" in said:
                raise RuntimeError(f"guide: the process that compiles guides cannot start: {said['failed']}")
            some = process, trials, self._lock, self._writing, self._again
            listener = threading.Thread(target=_listen, args=some, name="shardfuse-guides", daemon=True)
            weakref.finalize(self, _kill, process)
            listener.start()
        except BaseException:
            _kill(process)
            process.stdin.close()
            process.stdout.close()
            process.wait()
            raise
        with self._lock:
            self._trials, self._process = trials, process
        if self._closed:
            process.kill()
        return process

    def _write(self, process: subprocess.Popen[bytes], message: dict[str, Any]) -> bool:
        """Write a line to the process; False if it reads nothing for long. If it has ended, its listener notices."""
        assert process.stdin is not None
        left = memoryview(json.dumps(message).encode() + b"\n")
        with self._writing, contextlib.suppress(OSError):
            while left and not process.stdin.closed:
                if not _ready(process.stdin, select.POLLOUT):
                    return False
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(process.stdin.fileno(), left) :]
        return True


def _listen(
    process: subprocess.Popen[bytes],
    trials: dict[int, Trial],
    lock: threading.Lock,
    writing: threading.Lock,
    again: weakref.WeakMethod[Callable[[Trial], object]],
) -> None:
    """Pass each of the process's answers to its trial; after its end, try what is left once more."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            _deliver(json.loads(line), trials)  # this thread keeps no trial, and with it no engine, alive
        code = process.wait()
    with writing:
        process.stdin.close()
    with lock:
        left = list(trials.values())
        trials.clear()
    for trial in left:
        if trial.tries < _TRIES and (send := again()) is not None:
            send(trial)
        else:
            ended = f"guide: the process that compiles guides ended with {code}, {_TRIES} times in a row"
            trial.done(RuntimeError(ended))


def _deliver(answer: dict[str, Any], trials: dict[int, Trial]) -> None:
    if (trial := trials.pop(answer["id"], None)) is not None:
        trial.hear(answer)


def _ready(file: IO[bytes], event: int) -> bool:
    """Wait until ``file`` can be read or written."""
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(1000 * _PATIENCE_S))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
