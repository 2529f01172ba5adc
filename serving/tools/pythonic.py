"""Calls as a list of Python's calls, as those of Llama 4, ToolACE, LFM2 and Olmo 3, with or without marks around it:

    [weather(city="Bern", days=3), time(zone="CET")]

Arguments have names, and literals as values; each becomes JSON once it is complete, and one that is no literal stays as
it is written. Without a mark, a list is one of calls if it begins with the name of a tool that may be called, and does
not stand in code, after a backtick or in a block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .format import ToolFormat
from .lark import ANNOTATIONS, SIMPLE, Lark, properties_of, quoted, required_of, shared_of
from .literals import json_of
from .parser import CallReader, Tool, ToolParser
from .text import Read

# The marks of Llama 4, Llama 3, LFM2, and Olmo 3, which has lines instead of a list
PAIRS = {
    "<|python_start|>": "<|python_end|>",
    "<|python_tag|>": "",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}
_CODE = "```python"  # within the marks of MiniCPM 3
_NAME = re.compile(r"[\w.-]*")
_BETWEEN = re.compile(r"[\s,]*")
_CLOSERS = re.compile(r"[\s`]*")
_PLAIN = re.compile(r"""[^"'(){}\[\],]*""")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


class PythonicReader(CallReader):
    _maybe = re.compile(r"[<\[]")
    _again = False
    _first = True  # whether the call has no argument yet
    _before = ""  # read before a value that has no name

    def _calls(self) -> Read[bool]:
        text = self._text
        mark = yield from text.mark(PAIRS)
        if mark:
            yield from text.skip()
            yield from text.mark((_CODE,))
            yield from text.skip()
        elif self._quoted:
            return False
        listed = yield from text.next("[")
        yield from text.skip()
        if not (mark or listed) or not (yield from self._call(bool(mark))):
            return False
        while not self.cut:
            text.save()
            between = yield from text.skip(_BETWEEN)
            if ("," not in between if listed else not between) or not (yield from self._call(bool(mark))):
                text.back()
                yield from self._close(["]"] if listed else [], [], _BETWEEN)
                yield from self._close([PAIRS[mark]] if mark and PAIRS[mark] else [], [], _CLOSERS)
                break
        return True

    def _call(self, marked: bool) -> Read[bool]:
        """Read a call, and begin it once one of its arguments has a name, or it has none; False if that is not so."""
        text, before = self._text, self.calls
        name = yield from text.skip(_NAME)
        if not self._callable(name, marked) or not (yield from text.next("(")):
            return False
        while True:
            yield from text.skip()
            if (yield from text.next(")")):
                if self.calls == before:
                    self._start(name)
                self._more("}")
                return True
            start = (yield from text.mark(("**",))) or (yield from self._key())
            if self.calls == before:
                if not start:
                    return False
                self._start(name)
            yield from self._argument(start)
            if self.cut:
                return True
            yield from text.next(",")

    def _start(self, name: str) -> None:
        self._begin(name)
        self._more("{")
        self._first = True

    def _key(self) -> Read[str]:
        """Read an argument's name and ``=``; "" if they do not stand here, and what does is the value."""
        text = self._text
        name = yield from text.skip(_NAME)
        space = yield from text.skip()
        if name and (yield from text.next("=")):
            return name
        self._before = name + space
        return ""

    def _argument(self, key: str) -> Read[None]:
        """Read a value, and tell it as JSON; as it is written where it is no literal."""
        pieces = [] if key else [self._before]
        self.cut = not (yield from self._value(pieces.append))
        written = "".join(pieces).strip()
        value = None if self.cut else json_of(written)
        if key == "**":  # its braces are the call's
            told = value[1:-1] if value is not None and value[0] == "{" else written.removeprefix("{")
        else:
            told = f"{json.dumps(key)}: " * bool(key) + (written if value is None else value)
        if told:
            self._more(told if self._first else f", {told}")
            self._first = False

    def _value(self, sink: Callable[[str], object]) -> Read[bool]:
        """Read up to the comma or the parenthesis after a value; False if the text ends before that."""
        text, depth = self._text, 0
        while (yield from text.more()):
            sink((yield from text.skip(_PLAIN)))
            letter = yield from text.peek()
            if letter in _IN_STRING:
                yield from self._string(letter, sink)
                continue
            if not letter or (not depth and letter in ",)"):
                return bool(letter)
            text.at += 1
            depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
            sink(letter)
        return False

    def _string(self, quote: str, sink: Callable[[str], object]) -> Read[None]:
        text = self._text
        text.at += 1
        sink(quote)
        end = quote
        if (yield from text.next(quote)):
            sink(quote)
            if not (yield from text.next(quote)):
                return
            sink(quote)
            end = 3 * quote
        found = 0  # quotes in a row
        while found < len(end) and (yield from text.more()):
            run = yield from text.skip(_IN_STRING[quote])
            sink(run)
            if (yield from text.next(quote)):
                found = 1 if run else found + 1
                sink(quote)
            elif (yield from text.next("\\")):
                found = 0
                sink("\\" + (yield from text.peek()))
                text.at += yield from text.more()


class Pythonic(ToolFormat):
    marks = (*PAIRS, *filter(None, PAIRS.values()))

    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        return PythonicReader(tools, thought)

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        lark = Lark(added)
        begin, end = next((pair for pair in PAIRS.items() if pair[0] in self.sample), ("", ""))
        listed = begin != "<function_calls>"
        calls = [f"{quoted(f'{each.name}(')} {_keywords(lark, each.parameters)} {quoted(')')}" for each in tools]
        return lark.source(
            calls,
            most,
            quoted(", " if listed else "\n"),
            f"{lark.mark(begin) if begin else ''} {quoted('[') if listed else ''}",
            f"{quoted(']') if listed else ''} {lark.mark(end) if end else ''}",
        )


def _keywords(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Lark of the arguments of ``schema``: ``key=value`` in the order of its properties, required ones first.

    Values are JSON, which the parser takes, too. A schema that says more than its properties gets ``**{...}``.
    """
    properties, wanted = properties_of(schema), required_of(schema)
    required = [each for each in properties if each in wanted]
    if not schema or (not properties and schema.get("additionalProperties") is False):
        return ""
    if (
        not properties
        or set(schema) - SIMPLE
        or wanted - set(properties)
        or not all(each.isidentifier() and each.isascii() for each in properties)
        or (shared := shared_of(schema)) is None
    ):
        return f"{quoted('**')} {lark.object(schema)}"
    parts = {each: lark.rule(f"{quoted(each + '=')} {_literal(lark, properties[each], shared)}") for each in properties}
    rest, optional = "", []
    for each in reversed([each for each in properties if each not in required]):
        optional.append(f"{parts[each]} {rest}")
        rest = lark.rule(f"({quoted(', ')} {parts[each]})? {rest}")
    if required:
        return f" {quoted(', ')} ".join(parts[each] for each in required) + f" {rest}"
    return f"({' | '.join(reversed(optional))})?"


def _literal(lark: Lark, schema: Any, shared: Mapping[str, Any]) -> str:
    if isinstance(schema, Mapping) and schema.get("type") == "boolean" and not set(schema) - {"type", *ANNOTATIONS}:
        return '("True" | "False")'
    return lark.part(schema, shared)
