"""The calls of Mistral's models after the mark ``[TOOL_CALLS]``, in both spellings:

    [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Bern"}

The first one, of tokenizers up to v7, has all calls in one list. The other one has the mark before each call, and its
tokenizers differ in whether ``[CALL_ID]`` and ``[ARGS]`` are there.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence

from .format import ToolFormat
from .json_calls import JsonReader
from .lark import Lark, quoted
from .parser import Tool, ToolParser
from .text import Read

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = '{"name": "%s", "arguments": '
_NAME = re.compile(r"[\w.-]*")
_ID = re.compile(r"[A-Za-z0-9]*")
_ID_LETTERS = string.ascii_letters + string.digits


class MistralReader(JsonReader):
    _maybe = re.compile(r"\[")
    _ends = (BEGIN,)

    def _calls(self) -> Read[bool]:
        text = self._text
        if not (yield from text.mark((BEGIN,))):
            return False
        yield from text.skip()
        if (yield from text.mark((BEGIN,))):  # twice, as models do at times
            yield from text.skip()
        first = yield from text.peek()
        return (yield from self._json() if first and first in "{[" else self._named())

    def _named(self) -> Read[bool]:
        """Read a call of the second spelling."""
        text = self._text
        name = yield from text.skip(_NAME)
        if not self._callable(name):
            return False
        if (yield from text.mark((CALL_ID,))):
            yield from text.skip(_ID)
        yield from text.mark((ARGS,))
        yield from text.skip()
        if (yield from text.peek()) == "{":
            yield from self._arguments(name)
            return True
        mark = yield from text.mark((BEGIN,))
        text.at -= len(mark)
        if not (mark or self._end()) or not self._callable(name, False):
            return False
        self._begin(name)
        self._more("{}")
        return True


class Mistral(ToolFormat):
    marks = (BEGIN, CALL_ID, ARGS)

    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        return MistralReader(tools, thought)

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        lark = Lark(added)
        begin = lark.mark(BEGIN)
        if ARGS in self.sample:
            args = lark.mark(ARGS)
            if CALL_ID in self.sample:
                args = f"{lark.mark(CALL_ID)} {lark.rule('/[A-Za-z0-9]{9}/')} {args}"
            calls = [f"{begin} {quoted(each.name)} {args} {lark.object(each.parameters)}" for each in tools]
            return lark.source(calls, most)
        calls = [f"{quoted(_HEAD % each.name)} {lark.object(each.parameters)} {quoted('}')}" for each in tools]
        return lark.source(calls, most, quoted(", "), f"{begin} {quoted(' [')}", quoted("]"))

    def call_id(self) -> str:
        """Nine letters and digits, without which the models' templates refuse the call."""
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
