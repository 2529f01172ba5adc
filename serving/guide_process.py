"""The program that compiles guides on trial, each in a process of its own, with no import but llguidance.

A guide of a few bytes may take minutes and gigabytes to compile, or overflow the stack, which ends the whole process.
So this process, which has read the tokenizer, forks for every guide, and the fork compiles it under limits. Messages
are lines of JSON, those of ``guide_compiler.py`` on standard input and the answers on standard output:

    {"tokenizer": .., "n_vocab": .., "eos_token": .., "path": sys.path}    first; {} or {"failed": ..} answers it
    {"id": .., "kind": .., "source": .., "any_whitespace": .., "bytes": .., "seconds": ..}    compile, within limits;
        {"id": .., "bytes": ..}, {"id": .., "refused": ..} or {"id": .., "over": one of OVER} answers it
    {"drop": id}    compile no longer
    {"room": bytes}    of memory, that all forks may take together from now on

The end of standard input ends this process and its forks.
"""

from __future__ import annotations

import contextlib
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
_CROWDED_S = 1.0  # after this long the oldest fork ends if others wait for its place
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
        self.last = self.began + 3 * job["seconds"]  # by the clock; the fork itself counts processor time
        self.before = _held()
        self.pipe, answer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _compile(tokenizer, job, answer)
        os.close(answer)

    def age(self) -> float:
        return time.monotonic() - self.began

    def nbytes(self) -> int:
        """The memory that it has taken so far."""
        return _held(self.pid) - self.before

    def kill(self, over: str) -> None:
        self.over = over
        os.kill(self.pid, signal.SIGKILL)  # exists until result() has waited for it

    def result(self) -> dict[str, Any]:
        """What it has found, or the limit that it has reached, after its end."""
        with open(self.pipe, "rb") as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == 0 and not self.over:
            return {"id": self.number, **json.loads(text)}
        return {"id": self.number, "over": self.over or _REACHED.get(-code, "memory")}


# By the signal that ends a process at a limit. Where Rust gets no memory it aborts.
_REACHED: dict[int, str] = {signal.SIGSEGV: "stack", signal.SIGBUS: "stack", signal.SIGPROF: "seconds"}


def _compile(tokenizer: Any, job: dict[str, Any], answer: int) -> NoReturn:
    """A fork's work."""
    try:
        with open(os.devnull, "r+b", 0) as nothing:
            for stream in (0, 1, 2):  # Rust writes to standard error before it aborts
                os.dup2(nothing.fileno(), stream)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where the system's memory is full, this process ends first
        os.nice(5)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, STACK)
        _limit(resource.RLIMIT_AS, _statm("self")[0] + job["bytes"])
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])
        before = _held()
        try:
            matcher = build(tokenizer, job["kind"], job["source"], job["any_whitespace"])
            found: dict[str, Any] = {"bytes": max(0, _held() - before)}
            del matcher  # which may recurse as well
        except Refused as error:
            found = {"refused": str(error)}
        os.write(answer, json.dumps(found).encode())
        os._exit(0)
    finally:  # no memory was left
        os._exit(1)


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _statm(pid: int | str) -> list[int]:
    """A process's memory: all of it, what is resident, and what of that is files', in bytes."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return [int(each) * _PAGE for each in file.read().split()[:3]]


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
            while self._waiting and len(self._running) < _FORKS:
                fork = _Fork(self._tokenizer, self._waiting.popleft())
                self._running[fork.pipe] = fork
        for fork in self._running.values():
            fork.kill("load")

    def _take(self, message: dict[str, Any]) -> None:
        if "drop" in message:
            self._waiting = deque(job for job in self._waiting if job["id"] != message["drop"])
            for pipe, fork in list(self._running.items()):
                if fork.number == message["drop"]:
                    fork.kill("load")
                    self._running.pop(pipe).result()
        elif "room" in message:
            self._room = message["room"]
        else:
            self._waiting.append(message)

    def _watch(self) -> None:
        """Kill forks whose time is over, the oldest one if others wait for its place, and the largest ones until the
        others have room.
        """
        living = [fork for fork in self._running.values() if not fork.over]
        for fork in living:
            if time.monotonic() > fork.last:
                fork.kill("seconds")
            elif fork.age() > _SHORT_S and not fork.late:
                fork.late = True
                os.setpriority(os.PRIO_PROCESS, fork.pid, 15)
        if self._waiting and len(living) == _FORKS and living[0].age() > _CROWDED_S:
            living[0].kill("load")
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
