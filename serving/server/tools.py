"""Calls of tools in the text of an answer, in the format of Hermes and Qwen:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

:class:`ToolParser` reads them while the text arrives in arbitrary pieces: it returns a call's name when that is
complete, and its arguments as they arrive, as the JSON text that the model wrote. The result does not depend on the
cuts between pieces. :func:`grammar` makes a model write nothing but calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MARK = re.compile(f"{END}|{BEGIN}")  # models may omit the end mark and start the next call
_LONGEST_HEAD = 1024  # characters; a call must have its head within them


@dataclass(frozen=True)
class Call:
    """A piece of the ``index``-th call: its ``name`` in the first piece, then only more of ``arguments``."""

    index: int
    name: str | None
    arguments: str


class ToolParser:
    """Splits the text of one answer into content and calls; ``calls`` counts those that have begun.

    The time is linear in the text: what was read is not read again, except for a few characters of a mark or a head.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""  # text that is undecided yet
        self._at = 0  # the first character of it that is not read yet
        self._space: list[str] = []  # read before it: the space before a call, or before more content
        self._state = "content"  # then "head", "arguments", "tail"
        self._value = _Value()

    def push(self, text: str) -> list[str | Call]:
        """The pieces of content and calls that ``text`` makes certain."""
        self._held += text
        found: list[str | Call] = []
        while (piece := self._next()) is not None:
            if piece:
                found.append(piece)
        self._held, self._at = self._held[self._at :], 0
        return found

    def flush(self) -> list[str | Call]:
        """The rest at the end of the answer; text that did not become a call is content."""
        held, self._held = self._held, ""
        if self._state == "head":
            return ["".join([*self._space, BEGIN, held])]
        if self._state != "content" or (self.calls and not held.strip()):
            return []
        held, self._space = "".join([*self._space, held]), []
        return [held] if held else []

    def _next(self) -> str | Call | None:
        """The next piece, "" for a step without one, or None if more text is needed."""
        return getattr(self, f"_{self._state}")()

    def _content(self) -> str | None:
        mark = self._held.find(BEGIN, self._at)
        end = mark if mark >= 0 else len(self._held) - _overlap(self._held, self._at, BEGIN)
        read = self._held[self._at : end]
        piece = read.rstrip()  # space before a call belongs to it
        space = read[len(piece) :]
        if piece:
            piece, self._space = "".join([*self._space, piece]), []
        if space:
            self._space.append(space)
        self._at = end
        if mark < 0:
            return piece or None
        self._at, self._state = end + len(BEGIN), "head"
        return piece

    def _head(self) -> str | Call | None:
        most = self._at + _LONGEST_HEAD
        match = _HEAD.match(self._held, self._at, most)
        if match is None:
            end = self._held.find(END, self._at, most)
            if end < 0 and len(self._held) < most:
                return None
            cut = most if end < 0 else end + len(END)
            piece = "".join([*self._space, BEGIN, self._held[self._at : cut]])
            self._at, self._space, self._state = cut, [], "content"
            return piece
        self._at, self._space = match.end(), []
        self._state, self._value = "arguments", _Value()
        self.calls += 1
        return Call(self.calls - 1, match[1], "")

    def _arguments(self) -> str | Call | None:
        if self._at == len(self._held):
            return None
        start, self._at = self._at, self._value.take(self._held, self._at)
        if self._value.done:
            self._state = "tail"
        return Call(self.calls - 1, None, self._held[start : self._at])

    def _tail(self) -> str | None:
        mark = _MARK.search(self._held, self._at)
        if mark is None:
            self._at = len(self._held) - max(_overlap(self._held, self._at, each) for each in (BEGIN, END))
            return None
        self._at = mark.end()
        self._state = "content" if mark[0] == END else "head"
        return ""


class _Value:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_text = self._escaped = False

    def take(self, text: str, start: int) -> int:
        """The end of the characters of ``text`` from ``start`` on that belong to the object."""
        for at in range(start, len(text)):
            letter = text[at]
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_text = False
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return at + 1
        return len(text)


def _overlap(text: str, start: int, mark: str) -> int:
    """The length of the longest end of ``text``, from ``start`` on, that is a beginning of ``mark``."""
    most = min(len(text) - start, len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)


def grammar(
    tools: Sequence[tuple[str, dict[str, Any] | None]], most: int, added: Mapping[str, int] | None = None
) -> str:
    """llguidance's grammar of 1 to ``most`` calls of ``tools``, each a name and the schema of its arguments.

    ``added`` are the tokenizer's added tokens: a mark that is one is written as that token, and not spelled.
    """
    begin, end = (f"<[{added[mark]}]>" if added and mark in added else json.dumps(mark) for mark in (BEGIN, END))
    rules, names = [], []
    for number, (name, schema) in enumerate(tools):
        head = f"{begin} " + json.dumps(f'\n{{"name": "{name}", "arguments": ')
        tail = json.dumps("}\n") + f" {end}"
        value = json.dumps({**(schema or {}), "type": "object", "x-guidance": {"whitespace_flexible": False}})
        rules.append(f"call_{number}: {head} arguments_{number} {tail}\narguments_{number}: %json {value}")
        names.append(f"call_{number}")
    start = "start: call" if most == 1 else f'start: call ("\\n" call){{0,{most - 1}}}'
    return "\n".join([start, "call: " + " | ".join(names), *rules])
