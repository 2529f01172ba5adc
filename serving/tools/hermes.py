"""The calls of Hermes, Qwen 2.5 and 3, Granite 4 and others, each between marks:

<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .format import ToolFormat
from .json_calls import CLOSERS, JsonReader
from .lark import Lark, quoted
from .parser import Tool, ToolParser
from .text import Read

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = '\n{"name": "%s", "arguments": '


class HermesReader(JsonReader):
    _maybe = re.compile("<")
    _ends: tuple[str, ...] = (END, BEGIN)

    def _calls(self) -> Read[bool]:
        if not (yield from self._text.mark((BEGIN,))):
            return False
        yield from self._text.skip()
        if (yield from self._text.mark((BEGIN,))):  # twice, as models do at times
            yield from self._text.skip()
        if not (yield from self._json()):
            return False
        yield from self._close((END,), (BEGIN,), CLOSERS)
        return True


class Hermes(ToolFormat):
    marks = (BEGIN, END)

    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        return HermesReader(tools, thought)

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        lark = Lark(added)
        tail = f"{quoted('}' + chr(10))} {lark.mark(END)}"
        calls = [
            f"{lark.mark(BEGIN)} {quoted(_HEAD % each.name)} {lark.object(each.parameters)} {tail}" for each in tools
        ]
        return lark.source(calls, most, quoted("\n"))
