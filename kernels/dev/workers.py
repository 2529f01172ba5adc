"""Fresh Python processes that answer one JSON object per line: for work that needs another environment than ours.

Compiling kernels is such work: whether Triton interprets is fixed when a process starts, and a compiler that crashes
takes its process with it. Unlike multiprocessing's spawn, nothing of the parent (its ``__main__``, its ``sys.path``)
is carried over, and a process that dies becomes the error of one request, not the end of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, TextIO

Json = dict[str, Any]
_READY = "ready\n"  # the first line of a process
_STOP_S = 5.0  # for processes that are interrupted


def cores() -> int:
    """How many processes may run at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ask_all(
    requests: Sequence[Json],
    command: Sequence[str],
    env: Mapping[str, str],
    jobs: int,
    *,
    limits: Limits | None = None,
) -> Iterator[tuple[int, Json]]:
    """Share ``requests`` out over ``jobs`` processes; yields (index of the request, answer) as they come.

    ``command`` must start a program that calls ``serve``. A request whose process raises or dies is answered with
    {"error": what happened}; so is one that exceeds ``limits``, with "late", whose process is killed. Whatever stops
    the iteration ends the processes.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(command, env, limits)) for _ in range(min(jobs, len(requests)))]
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def ask(request: Json) -> Json:
            worker = idle.get()
            try:
                return worker.ask(request)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            try:
                futures = {pool.submit(ask, request): index for index, request in enumerate(requests)}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                for future in futures:
                    future.cancel()
                for worker in workers:
                    worker.interrupt()
                until = time.monotonic() + _STOP_S
                for worker in workers:
                    worker.stop(until)
                pool.shutdown(wait=False)  # not before: processes may end with the threads that started them


class Limits(NamedTuple):
    """Seconds for the answer to a request, and before the first for a process to start; ``until`` (of
    ``time.monotonic``) all are killed.
    """

    answer_s: float
    start_s: float
    until: float


class _Worker:
    """The parent's end of one process; started on first use, started anew after it died."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], limits: Limits | None = None) -> None:
        self._command, self._env, self._limits = command, env, limits
        self._process: subprocess.Popen[str] | None = None
        self._stderr: TextIO = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in __exit__)
        self._stopped = False

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            _release(self._process)
        self._stderr.close()

    def ask(self, request: Json) -> Json:
        """Send one request and wait for its answer. The process's death is an answer too."""
        if self._stopped:
            return {"error": "stopped before it was done"}
        starts = self._process is None
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        said, begun, late = self._stderr.seek(0, os.SEEK_END), time.monotonic(), threading.Event()
        start_s, answer_s = (self._limits.start_s, self._limits.answer_s) if self._limits else (None, None)
        line = ""
        with contextlib.suppress(BrokenPipeError):
            with self._killed_after(start_s, process, late):
                lines = iter(process.stdout.readline, "") if starts else iter([_READY])
                ready = _READY in lines  # whatever an import printed before
            if ready:
                with self._killed_after(answer_s, process, late):
                    process.stdin.write(json.dumps(request) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
        if line:
            answer: Json = json.loads(line)
        else:
            seconds = time.monotonic() - begun
            try:
                code = process.wait(_STOP_S)
            except subprocess.TimeoutExpired:  # it has closed its output, and lives
                process.kill()
                code = process.wait()
            how = f"was killed after {seconds:.0f} s" if late.is_set() else f"ended with exit code {code}"
            answer = {"error": f"the process at work on it {how}", **({"late": True} if late.is_set() else {})}
            _release(process)
            self._process = None
        if answer.get("error"):
            answer["error"] += self._gist_of_stderr(said)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603 - a Python file of this package, without a shell
            self._command, env=self._env, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True
        )
        return self._process

    def _gist_of_stderr(self, start: int) -> str:
        """What was said since ``start``, cut short: compilers follow a diagnostic with pages of their own state."""
        self._stderr.seek(start)
        lines = self._stderr.read().splitlines()
        gist = [line for line in lines if "error:" in line][:3] or lines[-3:]
        return "".join(f"\n{line}" for line in gist)

    def interrupt(self) -> None:
        """Ask the process to end, even in the middle of a request; SIGINT lets it clear its temporary files."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    @contextlib.contextmanager
    def _killed_after(
        self, seconds: float | None, process: subprocess.Popen[str], late: threading.Event
    ) -> Iterator[None]:
        """Within the block ``process`` may live for so many seconds; ``late`` is set where it is killed."""

        def kill() -> None:
            late.set()
            process.kill()

        left = math.inf if self._limits is None else max(0.0, self._limits.until - time.monotonic())
        timer = threading.Timer(min(math.inf if seconds is None else seconds, left), kill)
        if timer.interval < math.inf:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def stop(self, until: float) -> None:
        """End a process that was interrupted, by force at ``until``."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            process.wait(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _release(process: subprocess.Popen[str]) -> None:
    """Wait for a process that has ended or been stopped, and close its pipes."""
    with contextlib.suppress(BrokenPipeError):  # closing flushes what a dead process never read
        process.__exit__(None, None, None)


def serve(answer: Callable[[Json], Json]) -> None:
    """The child's end: answer requests until the parent closes standard input or dies.

    Standard output belongs to the answers: whatever else prints there goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def end_with_the_parent() -> None:
    """Linux kills this process when the thread that started it ends, so that none outlives a run that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
