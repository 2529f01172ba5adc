"""The calls of Llama 3.1 to 3.3, and of Llama 4 in JSON, with no marks around them but sometimes one before them:

    {"name": "weather", "parameters": {"city": "Bern"}}

Several stand one after another, with ``;``, ``,`` or space between them, or in a list. Without a mark, such an object
is a call if it has the name of a tool that may be called, and does not stand in code, after a backtick or in a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .format import ToolFormat
from .json_calls import JsonReader
from .lark import Lark, quoted
from .parser import Tool, ToolParser
from .text import Read

MARKS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_HEAD = '{"name": "%s", "parameters": '
_BETWEEN = re.compile(r"[\s;,]*")


class Llama3Reader(JsonReader):
    _maybe = re.compile(r"[<{\[]")
    _again = _marked = False

    def _calls(self) -> Read[bool]:
        text, marked = self._text, False
        while (yield from text.mark(MARKS)):
            marked = True
            yield from text.skip()
        if (self._quoted and not marked) or not (yield from self._json()):
            return False
        while not self.cut:
            text.save()
            yield from text.skip(_BETWEEN)
            if not (yield from self._json()):
                text.back()
                yield from self._close(MARKS[2:], MARKS[:2], _BETWEEN)
                break
        return True


class Llama3(ToolFormat):
    marks = MARKS

    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        return Llama3Reader(tools, thought)

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        lark = Lark(added)
        calls = [f"{quoted(_HEAD % each.name)} {lark.object(each.parameters)} {quoted('}')}" for each in tools]
        return lark.source(calls, most, quoted("; "))
