"""Fresh Python processes that answer one JSON object per line: for work that needs another environment than ours.

Compiling kernels is such work: whether Triton interprets is fixed when a process starts, and a compiler that crashes
takes its process with it. Unlike multiprocessing's spawn, nothing of the parent (its ``__main__``, its ``sys.path``)
is carried over, and a process that dies becomes the error of one request, not the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TextIO

Json = dict[str, Any]


def cores() -> int:
    """How many processes may run at once here."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ask_all(
    requests: Sequence[Json], command: Sequence[str], env: Mapping[str, str], jobs: int
) -> Iterator[tuple[int, Json]]:
    """Share ``requests`` out over ``jobs`` processes; yields (index of the request, answer) as they come.

    ``command`` must start a program that calls ``serve``. A request whose process raises or dies is answered with
    {"error": what happened}. Whatever stops the iteration ends the processes.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(command, env)) for _ in range(min(jobs, len(requests)))]
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
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.stop()


class _Worker:
    """The parent's end of one process; started on first use, started anew after it died."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
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
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        said = self._stderr.seek(0, os.SEEK_END)
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: Json = json.loads(line)
        else:
            answer = {"error": f"the process at work on it ended with exit code {process.wait()}"}
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

    def stop(self) -> None:
        """End the process within seconds, even in the middle of a request; SIGINT lets it clear its temporary files."""
        self._stopped = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=5)
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
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
