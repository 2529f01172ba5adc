"""The program that compiles guides on trial, each in a process of its own, with no import but llguidance.

A guide of a few bytes may take minutes and gigabytes to compile, or overflow the stack, which ends the whole process.
So this process, which has read the tokenizer, forks for every guide, and the fork compiles it under limits. Messages
are lines of JSON, those of ``guide_compiler.py`` on standard input and the answers on standard output:

    {"tokenizer": .., "n_vocab": .., "eos_token": .., "path": sys.path}    first; {} or {"failed": ..} answers it
    {"id": .., "kind": .., "source": .., "any_whitespace": .., "bytes": .., "seconds": .., "room": ..}    compile,
        within limits of memory and processor time; all forks together may take "room" bytes from now on;
        {"id": .., "bytes": ..}, {"id": .., "refused": ..} or {"id": .., "over": one of OVER} answers it
    {"drop": id}    compile no longer

The end of standard input ends this process and its forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections import deque
from typing import Any, NoReturn

STACK = 8 << 20  # bytes, of which only compiling needs more with a guide's depth; steps never do
OVER = ("stack", "memory", "seconds", "load")  # the limits; "load": what others compile left no place for it
_FORKS = 32  # at once
_SHORT_S = 0.5  # after this long a fork has a low priority
_CROWDED_S = 1.0  # after this long an old fork ends if another guide waits for its place
_WATCH_S = 0.05
_PAGE = resource.getpagesize()


class Refused(ValueError):
    """llguidance's reason for not compiling a guide."""


def build(tokenizer: Any, kind: str, source: str, any_whitespace: bool) -> Any:
    """llguidance's matcher of a guide, with all lazy work of the first step done. Raises Refused."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, grammar(kind, source, any_whitespace), log_level=0)
    except (ValueError, TypeError) as error:  # such as for a text that is not Unicode
        raise Refused(str(error)) from None
    matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(said(matcher))
    return matcher


def grammar(kind: str, source: str, any_whitespace: bool) -> str:
    """A guide in llguidance's format."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(source, {"whitespace_flexible": any_whitespace})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        # One lexeme: as alternatives of a rule there could be 2,000 at most.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(source))))
    return LLMatcher.grammar_from_lark(source)


def said(matcher: Any) -> str:
    """llguidance's error message without the description of its own state."""
    message: str = matcher.get_error()
    return message.partition("\n<state>")[0].strip()[:500]


class _Fork:
    """A process that compiles one guide."""

    def __init__(self, tokenizer: Any, job: dict[str, Any]) -> None:
        self.number = job["id"]
        self.over = ""  # the limit for which it was killed
        self.late = False  # and has a low priority
        self.began = time.monotonic()
        self.seconds = job["seconds"]
        self.last = self.began + 3 * self.seconds + 5  # by the clock; the fork itself counts processor time
        self.before = _held()
        self.pipe, answer = os.pipe()
        try:
            self.pid = os.fork()
            if not self.pid:
                _compile(tokenizer, job, answer)
        except OSError:
            os.close(self.pipe)
            raise
        finally:
            os.close(answer)

    def age(self) -> float:
        """Its seconds so far."""
        return time.monotonic() - self.began

    def nbytes(self) -> int:
        """The memory that it has taken so far."""
        return _held(self.pid) - self.before

    def kill(self, over: str) -> None:
        """End it; the process exists until :meth:`result` has waited for it."""
        self.over = over
        os.kill(self.pid, signal.SIGKILL)

    def result(self) -> dict[str, Any]:
        """What it has found, or the limit that it has reached, after its end."""
        with open(self.pipe, "rb") as pipe:
            text = pipe.read()
        _, status, used = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and not self.over:
            return {"id": self.number, **json.loads(text)}
        if self.over == "seconds" and used.ru_utime + used.ru_stime < self.seconds:
            self.over = "load"  # it was given too little of the processor
        return {"id": self.number, "over": self.over or _REACHED.get(code, "load")}


_NO_MEMORY = 3  # exit code
# By exit codes. Where Rust gets no memory it aborts; a fork that something else ends, say the system, may try again.
_REACHED = {
    -signal.SIGSEGV: "stack",
    -signal.SIGBUS: "stack",
    -signal.SIGPROF: "seconds",
    -signal.SIGABRT: "memory",
    _NO_MEMORY: "memory",
}


def _compile(tokenizer: Any, job: dict[str, Any], answer: int) -> NoReturn:
    """A fork's work."""
    try:
        _die_with_parent()
        with open(os.devnull, "r+b", 0) as nothing:
            for stream in (0, 1, 2):  # Rust writes to standard error before it aborts
                os.dup2(nothing.fileno(), stream)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where the system's memory is full, this process ends first
        os.nice(5)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, STACK)
        if size := _statm("self")[0]:
            _limit(resource.RLIMIT_AS, size + job["bytes"])
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        before = _held()
        try:
            matcher = build(tokenizer, job["kind"], job["source"], job["any_whitespace"])
            found: dict[str, Any] = {"bytes": max(0, _held() - before)}
            del matcher  # which may recurse as well
        except Refused as error:
            found = {"refused": str(error)}
        except MemoryError:
            os._exit(_NO_MEMORY)
        os.write(answer, json.dumps(found).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _die_with_parent() -> None:
    """Let Linux end this process when the one that forked it does."""
    _prctl(1, signal.SIGKILL)


_prctl: Any = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _statm(pid: int | str) -> list[int]:
    """A process's memory: all of it, what is resident, and what of that is files', in bytes; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return [int(each) * _PAGE for each in file.read().split()[:3]]
    except OSError:
        return [0, 0, 0]


def _held(pid: int | str = "self") -> int:
    """A process's resident memory that is no file's, in bytes."""
    _, resident, of_files = _statm(pid)
    return resident - of_files


class _Compiler:
    """Forks for each guide, and watches the forks."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._room = math.inf
        self._waiting: deque[dict[str, Any]] = deque()
        self._turn = False
        self._running: dict[int, _Fork] = {}  # by their pipes, the oldest one first

    def run(self, lines: _Lines) -> None:
        """Serve until standard input ends."""
        while True:
            ready, _, _ = select.select([0, *self._running], [], [], _WATCH_S if self._running else None)
            for pipe in ready:
                if pipe:
                    _tell(self._running.pop(pipe).result())
            if 0 in ready:
                try:
                    for line in lines.read():
                        self._take(json.loads(line))
                except EOFError:
                    break
            self._watch()
            self._start()
        for fork in self._running.values():
            fork.kill("load")

    def _take(self, message: dict[str, Any]) -> None:
        if "drop" in message:
            self._waiting = deque(job for job in self._waiting if job["id"] != message["drop"])
            for pipe, fork in list(self._running.items()):
                if fork.number == message["drop"]:
                    fork.kill("load")
                    self._running.pop(pipe).result()
        else:
            self._room = message["room"]
            self._waiting.append(message)

    def _start(self) -> None:
        """Fork for guides that wait, in turn for the newest and the oldest: neither waits behind all others."""
        while self._waiting and self._living() < _FORKS and len(self._running) < 2 * _FORKS:
            self._turn = not self._turn
            job = self._waiting.pop() if self._turn else self._waiting.popleft()
            try:
                fork = _Fork(self._tokenizer, job)
            except OSError:  # no more processes, or files
                _tell({"id": job["id"], "over": "load"})
            else:
                self._running[fork.pipe] = fork

    def _living(self) -> int:
        return sum(not fork.over for fork in self._running.values())

    def _watch(self) -> None:
        """Kill forks whose time is over, old ones for whose places others wait, and the largest until the others have
        room.
        """
        living = [fork for fork in self._running.values() if not fork.over]
        for fork in living:
            if time.monotonic() > fork.last:
                fork.kill("seconds")
            elif fork.age() > _SHORT_S and not fork.late:
                fork.late = True
                os.setpriority(os.PRIO_PROCESS, fork.pid, 15)
        for fork in living[: len(self._waiting) - (_FORKS - len(living))] if len(living) == _FORKS else []:
            if not fork.over and fork.age() > _CROWDED_S:
                fork.kill("load")
        living = sorted((fork for fork in living if not fork.over), key=_Fork.nbytes)
        while sum(fork.nbytes() for fork in living) > self._room:
            living.pop().kill("load")


class _Lines:
    """Standard input, line by line, without a buffer that hides what came from ``select``."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line that has begun

    def read(self) -> list[bytes]:
        """Wait for more, and return the lines that are whole now. Raises EOFError at the end."""
        data = os.read(0, 1 << 20)
        if not data:
            raise EOFError
        *ended, begun = data.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._parts, ended[0]])
            self._parts = []
        self._parts.append(begun)
        return ended


def _tell(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # the process that started this one ends it
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    lines = _Lines()
    first: list[bytes] = []
    while not first:
        first = lines.read()
    hello = json.loads(first[0])
    sys.path[:] = hello["path"]
    try:
        from llguidance import LLTokenizer

        tokenizer = LLTokenizer(hello["tokenizer"], n_vocab=hello["n_vocab"], eos_token=hello["eos_token"])
        build(tokenizer, "regex", "a", False)  # what every first guide takes is not counted
    except Exception as error:
        _tell({"failed": f"{type(error).__name__}: {error}"})
        return
    _tell({})
    _Compiler(tokenizer).run(lines)


if __name__ == "__main__":
    _main()
