"""``shardfuse generate --input IN --output OUT``: answers the lines of a file with the server's code, without HTTP.

``serving/server/batch.py`` defines the format of the lines.

The command appends each complete answer to OUT as a whole. After an interruption the same command reads OUT, discards
an incomplete last answer, and continues with the remaining lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import filelock
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from . import opening
from .generate import ends_with_reader
from .opening import Opening

if TYPE_CHECKING:
    from ..serving.server.batch import Line
    from ..serving.server.served import Served

NEEDED = ("fastapi", "prometheus_client", "transformers")
LINE_EVERY = 5.0  # seconds, without a terminal
_TURNS = 256  # lines read between two checks for signals
_NO_LIMIT_MIB = 1 << 20  # lines are the caller's own
_BLOCK = 1 << 16  # bytes read from a pipe at a time


@dataclass(frozen=True)
class BatchOptions:
    """The options of ``shardfuse generate --input``; ``name`` is the model's in lines, ``tool_call_parser`` the
    format of its calls of tools, as in ServerOptions.
    """

    model: Opening
    name: str
    input: str
    output: str
    tool_call_parser: str = "auto"

    def __post_init__(self) -> None:
        if self.tool_call_parser != "auto":
            from ..serving.tools import tool_format

            tool_format(self.tool_call_parser)

    @property
    def streams(self) -> bool:
        """Whether the input can be read only once."""
        return self.input == "-" or (os.path.exists(self.input) and not os.path.isfile(self.input))

    @property
    def resumes(self) -> bool:
        """Whether the output is a file, which keeps answers."""
        return self.output != "-" and (not os.path.exists(self.output) or os.path.isfile(self.output))


@dataclass
class Tally:
    """The lines so far, including earlier runs; ``total`` is None while it is unknown."""

    total: int | None = None
    answered: int = 0
    failed: int = 0

    @property
    def done(self) -> int:
        return self.answered + self.failed

    def __str__(self) -> str:
        return f"{self.done:,} lines" if self.total is None else f"{self.done:,} of {self.total:,} lines"


def run_batch(options: BatchOptions) -> int:
    """Answer all lines; return 0, 1 if some failed, or 128 + the signal that ended the run.

    Raises ImportError without the server's packages. Raises ValueError for an input that cannot be read to its end or
    has two lines of one name, and for an output that another process is writing or that belongs to another input.
    """
    opening.check_installed("generate --input", NEEDED)
    console = Console(highlight=False, stderr=True, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    with opening.settled(options.model) as model, contextlib.ExitStack() as stack:
        if opening.follows():
            opening.follow(model)
            return 0
        if options.resumes:
            stack.enter_context(_only_writer(Path(options.output)))
        tally, done = _survey(options, say)
        if tally.done and tally.done == tally.total and not opening.by_torchrun():  # the other ranks wait for this one
            return _end(options, tally, say)
        write = stack.enter_context(_writer(options))
        stack.enter_context(ends_with_reader())
        try:
            ranks = stack.enter_context(opening.started_ranks(model))
            signum = _answer_all(options, model, console, ranks.wrong, tally, done, write)
        except KeyboardInterrupt:  # a signal while the model was loading
            signum = signal.SIGINT
        if signum is not None:
            say(f"stopped by {signal.Signals(signum).name}: {_left(options, tally)}")
            return 128 + signum
        return _end(options, tally, say)


def _end(options: BatchOptions, tally: Tally, say: Callable[[str], object]) -> int:
    where = "standard output" if options.output == "-" else options.output
    lines = "1 line" if tally.done == 1 else f"{tally.done:,} lines"
    say(f"{lines}: {tally.answered:,} answered, {tally.failed:,} failed, in {where}")
    return 1 if tally.failed else 0


def _left(options: BatchOptions, tally: Tally) -> str:
    """What an interrupted run has done, and how to continue it."""
    goes_on = "; the same command continues" if options.resumes and not options.streams else ""
    return f"{tally} are done{goes_on}"


# --- what earlier runs left


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Within the block no other process writes ``path``, by a lock on the file ``.NAME.lock`` in its folder."""
    path = Path(os.path.realpath(path))
    held = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=False)
    try:
        held.acquire()
    except filelock.Timeout:
        raise ValueError(
            f"{path} is being written by another process: wait for its end, or choose another file with --output"
        ) from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--output {path}: it cannot be locked ({why}): choose a file elsewhere") from None
    try:
        yield
    finally:
        held.release()


def _survey(options: BatchOptions, say: Callable[[str], object]) -> tuple[Tally, set[str]]:
    """The number of lines, and the names of those already answered. If this function raises, it has changed nothing."""
    if options.streams:
        if options.resumes and os.path.exists(options.output) and os.path.getsize(options.output):
            raise ValueError(
                f"--output {options.output} has answers, and --input {options.input} can be read only once, so the "
                "remaining lines are unknown: name a new --output, or an --input that is a file"
            )
        say(f"--input {options.input} can be read only once: if this run is interrupted, it cannot be continued")
        return Tally(), set()
    if os.path.exists(options.output) and os.path.samefile(options.input, options.output):
        raise ValueError(f"--output {options.output} is the --input: expected another file")
    there = options.resumes and os.path.exists(options.output)
    answers, end = _read_answers(options.output) if there else ({}, 0)
    names: set[str] = set()
    for line in _lines_of(options.input):
        if line.name in names:
            raise ValueError(f"--input {options.input}: line {line.number}: custom_id {line.name!r} was used before")
        names.add(line.name)
    if other := next((name for name in answers if name not in names), None):
        raise ValueError(
            f"--output {options.output} belongs to another input: it answers {other!r}, which is not in "
            f"{options.input}; choose another file"
        )
    answered = sum(answers.values())
    tally = Tally(len(names), answered, len(answers) - answered)
    if there and (size := os.path.getsize(options.output)):
        os.truncate(options.output, end)
        say(f"{options.output}: {tally} are done" + (", and a half-written one will be repeated" if size > end else ""))
    return tally, set(answers)


def _lines_of(path: str) -> Iterator[Line]:
    """The lines of a file that are not empty."""
    from ..serving.server.batch import read_line

    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if (line := read_line(text, number)) is not None:
                yield line


def _read_answers(path: str) -> tuple[dict[str, bool], int]:
    """The names in an output, each with whether it succeeded, and the end of the last complete line.

    Raises ValueError for a file that this command did not write.
    """
    from ..serving.server.batch import BEGINS

    answers: dict[str, bool] = {}
    end = 0
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            ours = text.startswith(BEGINS[: len(text)])
            if ours and not text.endswith(b"\n"):
                break  # an incomplete last line
            try:
                found: Any = json.loads(text) if ours else {}
                name, succeeded = found["custom_id"], found["response"]["status_code"] == 200
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"--output {path}: line {number} is not an answer of this command: choose another file"
                ) from None
            if name in answers:
                raise ValueError(f"--output {path}: line {number} answers {name!r} again: choose another file")
            answers[name] = succeeded
            end += len(text)
    return answers, end


# --- the answers


@contextlib.contextmanager
def _writer(options: BatchOptions) -> Iterator[Callable[[bytes], None]]:
    """A function that appends a line to the output at once. After a failed write it appends nothing more."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = sys.stdout.buffer
        if options.output != "-":
            file = stack.enter_context(open(options.output, "ab", buffering=0))
        failed: OSError | None = None

        def write(line: bytes) -> None:
            nonlocal failed
            if failed is not None:  # a line after an incomplete one would make both unreadable
                raise failed
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                file.flush()
            except OSError as error:
                failed = error
                raise

        yield write


def _answer_all(
    options: BatchOptions,
    model: Opening,
    console: Console,
    wrong: Callable[[], str],
    tally: Tally,
    done: set[str],
    write: Callable[[bytes], None],
) -> int | None:
    """Load the model and answer the remaining lines; return the signal that ended the run, or None."""
    from ..serving.server import Served, ServerOptions
    from ..serving.server.errors import ApiError

    if os.environ.get("SHARDFUSE_DEBUG", "0") == "0":  # the output names the failures
        logging.getLogger("shardfuse.server").setLevel(logging.CRITICAL)
    opened = opening.lead(model, lambda text: console.print(text, markup=False))
    with opened.engine as engine:
        server = ServerOptions(
            name=options.name,
            tool_call_parser=options.tool_call_parser,
            max_body_memory_mib=_NO_LIMIT_MIB,
            max_answer_bytes=_NO_LIMIT_MIB << 20,
        )
        served = Served(engine, opened.tokenizer, sorted(opened.stop_ids), server, wrong)
        # Twice the answers computed at once: the next lines are ready when an answer ends, and memory stays bounded.
        window = 2 * model.folder.max_num_seqs
        run = _Run(served, tally, done, write, window)
        plain = options.output == "-" and sys.stdout.isatty()  # a bar would mix with the answers
        lines = _stream(options.input) if options.streams else _again(options.input)
        try:
            return asyncio.run(run.all(lines, _Display(console, tally, plain)))
        except ApiError as error:
            raise RuntimeError(f"{error.detail}; {_left(options, tally)}") from error


class _Run:
    """Answers lines, at most ``window`` of them at a time."""

    def __init__(
        self, served: Served, tally: Tally, done: set[str], write: Callable[[bytes], None], window: int
    ) -> None:
        self._served, self._tally, self._done, self._write, self._window = served, tally, done, write, window
        self._signals: list[int] = []

    async def all(self, lines: AsyncIterator[Line | None], display: _Display) -> int | None:
        """Answer ``lines`` until a signal; return that signal, or None."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for each in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(each) is not signal.SIG_IGN:
                loop.add_signal_handler(each, self._stop, each, task)
        try:
            async with self._served.opened():
                shown = asyncio.create_task(display.run(self._served))
                try:
                    await self._each(lines)
                finally:
                    shown.cancel()
                    await asyncio.gather(shown, return_exceptions=True)
        except asyncio.CancelledError:
            if not self._signals:
                raise
        return self._signals[0] if self._signals else None

    def _stop(self, signum: int, task: asyncio.Task[Any]) -> None:
        if self._signals:  # do not wait for the running step; all answers so far are written
            os._exit(128 + signum)
        self._signals.append(signum)
        task.cancel()

    async def _each(self, lines: AsyncIterator[Line | None]) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            async for line in lines:
                if line is not None and line.name not in self._done:
                    running.add(asyncio.create_task(self._answer(line)))
                while len(running) >= self._window:
                    running = await _some(running)
            while running:
                running = await _some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, line: Line) -> None:
        from ..serving.server import batch

        answer = await batch.answer(self._served, line)
        self._write(json.dumps(answer).encode() + b"\n")
        if answer["response"]["status_code"] == 200:
            self._tally.answered += 1
        else:
            self._tally.failed += 1


async def _some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that still run after one has ended. Raises the error of a failed one."""
    ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return running


async def _again(path: str) -> AsyncIterator[Line | None]:
    for count, line in enumerate(_lines_of(path), 1):
        yield line
        if count % _TURNS == 0:
            await asyncio.sleep(0)


async def _stream(path: str) -> AsyncIterator[Line | None]:
    """The lines of a pipe, read on demand in a thread. The second of two lines with one name becomes an error."""
    from ..serving.server.batch import read_line, renamed

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
    wanted = threading.Semaphore(1)

    def put(item: bytes | OSError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run was stopped
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        try:
            for text in _texts(path):
                wanted.acquire()
                put(text)
            put(None)
        except OSError as error:
            put(error)

    # A daemon thread, because a read that waits for ever must not keep the process alive. It reads without a file
    # object, whose lock would block the exit.
    threading.Thread(target=read, name="shardfuse-input", daemon=True).start()
    names: set[str] = set()
    number = 0
    while (text := await queue.get()) is not None:
        wanted.release()
        if isinstance(text, OSError):
            raise text
        number += 1
        line = read_line(text, number)
        if line is not None:
            if line.name in names:
                line = renamed(line)
            names.add(line.name)
            yield line


def _texts(path: str) -> Iterator[bytes]:
    source = 0 if path == "-" else os.open(path, os.O_RDONLY)
    rest = b""
    while block := os.read(source, _BLOCK):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


class _Display:
    """A progress bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, console: Console, tally: Tally, plain: bool) -> None:
        self._console, self._tally = console, tally
        self._bar = console.is_terminal and not plain
        self._first = tally.done

    async def run(self, served: Served) -> None:
        """Show the progress until cancelled."""
        began = time.monotonic()
        if not self._bar:
            while True:
                await asyncio.sleep(LINE_EVERY)
                self._console.print(self._line(served, time.monotonic() - began), markup=False)
        columns = (
            TextColumn("{task.fields[said]}"),
            BarColumn(),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("", total=self._tally.total, completed=self._first, said="", speed=0.0)
            while True:
                speed = self._speed(served, time.monotonic() - began)
                bar.update(task, completed=self._tally.done, said=self._said(), speed=speed)
                await asyncio.sleep(0.25)

    def _said(self) -> str:
        return f"{self._tally}" + (f", {self._tally.failed:,} failed" if self._tally.failed else "")

    def _speed(self, served: Served, seconds: float) -> float:
        return served.serve.newest_stats.generated_tokens / max(seconds, 1e-9)

    def _line(self, served: Served, seconds: float) -> str:
        tally, left = self._tally, ""
        if tally.total is not None and tally.done > self._first:
            left = f", {(tally.total - tally.done) * seconds / (tally.done - self._first):,.0f} s left"
        return f"  {self._said()}, {self._speed(served, seconds):,.0f} tokens/s{left}"
