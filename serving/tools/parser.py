"""Reads the calls of tools in an answer while its text arrives: what all formats have in common.

The rule for calls that are cut or broken, whole and streamed alike: what does not become a call is content, as it was
written. A call begins with its name once that is certain, and stays one: its arguments are what the model wrote, JSON
or not. :attr:`ToolParser.cut` says whether the answer ended within them. Text before, between and after calls is
content, without the whitespace before a call. A thought at the beginning of an answer is content too, calls or not.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...layers.hf.chat_template import THOUGHTS
from .text import Read, Text, overlap

_TICKS = re.compile("`+|[^`]+")
LONGEST_NAME = 256  # characters


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments; empty: any."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A piece of the ``index``-th call: its ``name`` in the first piece, then only more of ``arguments``, JSON."""

    index: int
    name: str | None
    arguments: str


class ToolParser(Protocol):
    """Splits the text of one answer into content and calls. The result does not depend on how the text is cut.

    ``calls`` counts the calls that have begun; ``cut``: the answer ended within the arguments of the last one.
    """

    calls: int
    cut: bool

    def push(self, text: str) -> Sequence[str | Call]:
        """The pieces of content and calls that ``text`` makes certain."""
        ...

    def flush(self) -> Sequence[str | Call]:
        """The rest, at the end of the answer."""
        ...


class CallReader(ABC):
    """A ToolParser of one format, which :meth:`_calls` reads. The time is linear in the text.

    ``tools``: those that the model may call; empty: any. ``thought``: the mark of a thought that the prompt has begun.
    """

    _maybe: re.Pattern[str]  # the first character of what may be calls
    _again = True  # whether calls may stand within what was read and became none

    def __init__(self, tools: Iterable[Tool] = (), thought: str = "") -> None:
        self.calls = 0
        self.cut = False
        self._tools = {each.name: each for each in tools}
        self._text = Text()
        self._found: list[str | Call] = []
        self._space: list[str] = []  # after the content so far: it belongs to a call, or to more content
        self._ticks = 0  # at the end of the content
        self._fenced = False  # whether it ends within a block of code
        self._run = self._all(thought)
        self._resume()

    def push(self, text: str) -> list[str | Call]:
        self._text.add(text)
        return self._resume()

    def flush(self) -> list[str | Call]:
        self._text.ended = True
        return self._resume()

    @abstractmethod
    def _calls(self) -> Read[bool]:
        """Read what stands at a character of ``_maybe``: whether calls do. If not, the reader goes back itself."""

    def _resume(self) -> list[str | Call]:
        with contextlib.suppress(StopIteration):
            next(self._run)
        found, self._found = self._found, []
        return _joined(found)

    def _all(self, thought: str) -> Read[None]:
        text = self._text
        yield from self._thought(thought)
        while (yield from text.more()):
            maybe = self._maybe.search(text.held, text.at)
            start, text.at = text.at, len(text.held) if maybe is None else maybe.start()
            self._say(text.held[start : text.at])
            if maybe is None:
                continue
            text.save()
            if not (yield from self._calls()):
                read, start = text.back(), text.at
                text.at += 1 if self._again or not read else read
                self._say(text.held[start : text.at])
            text.forget()
        if not self.calls:
            self._found.extend(self._space)

    def _thought(self, begin: str) -> Read[None]:
        """Read the thought at the beginning, if there is one: a model that considers a call does not make it."""
        text = self._text
        if not begin:
            self._say((yield from text.skip()))
            begin = yield from text.mark(THOUGHTS)
            self._say(begin)
        end = THOUGHTS.get(begin, "")
        while end and (yield from text.more()):
            at = text.held.find(end, text.at)
            start, text.at = text.at, at + len(end) if at >= 0 else len(text.held) - overlap(text.held[text.at :], end)
            self._say(text.held[start : text.at])
            if at >= 0:
                return
            if text.ended:
                self._say(text.held[text.at :])
                text.at = len(text.held)
            elif text.at < len(text.held):
                yield

    def _say(self, content: str) -> None:
        """Tell content, except for the space at its end."""
        if not content:
            return
        piece = content.rstrip()
        if piece:
            self._found.extend([*self._space, piece])
            self._space = []
        if len(piece) < len(content):
            self._space.append(content[len(piece) :])
        if self._ticks or "`" in content:
            for run in _TICKS.findall(content):
                if run[0] == "`":
                    self._ticks += len(run)
                else:
                    self._fenced ^= self._ticks >= 3
                    self._ticks = 0

    @property
    def _quoted(self) -> bool:
        """Whether the content ends within code, which shows a call and makes none."""
        return self._fenced or bool(self._ticks)

    def _begin(self, name: str) -> None:
        """From here on there is a call of ``name``."""
        self._text.forget()
        self._space = []
        self._found.append(Call(self.calls, name, ""))
        self.calls += 1

    def _more(self, arguments: str) -> None:
        """Tell more of the last call's arguments."""
        if arguments:
            self._found.append(Call(self.calls - 1, None, arguments))

    def _callable(self, name: str, marked: bool = True) -> bool:
        """Whether a call may have this ``name``; without a mark it is that of a tool, where tools are known."""
        known = marked or not self._tools or name in self._tools
        return 0 < len(name) <= LONGEST_NAME and name.isprintable() and known

    def _end(self) -> bool:
        """Whether the answer has ended here."""
        return self._text.ended and self._text.at == len(self._text.held)

    def _close(self, end: Sequence[str], begin: Sequence[str], closers: re.Pattern[str]) -> Read[None]:
        """Read one of ``end`` after calls, where it stands, with ``closers`` before it.

        A model may forget it, and begin the next call or write text.
        """
        text = self._text
        text.save()
        yield from text.skip(closers)
        mark = yield from text.mark([*end, *begin])
        if mark in begin:
            text.at -= len(mark)
        elif not mark and not text.ends_within(end):
            text.back()
        text.forget()


def _joined(found: list[str | Call]) -> list[str | Call]:
    """The pieces with those that follow each other made one."""
    joined: list[str | Call] = []
    for call, pieces in itertools.groupby(
        found, lambda each: None if isinstance(each, str) else (each.index, each.name)
    ):
        if call is None:
            joined.append("".join(each for each in pieces if isinstance(each, str)))
        else:
            joined.append(Call(*call, "".join(each.arguments for each in pieces if isinstance(each, Call))))
    return joined
