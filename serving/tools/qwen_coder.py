"""The calls of Qwen3-Coder, Qwen 3.5, Nemotron 3 and others, in elements that look like XML:

    <tool_call>
    <function=weather>
    <parameter=city>
    Bern
    </parameter>
    </function>
    </tool_call>

Values are texts without quotes or escapes, or by the types of the tool's schema other JSON, or Python's literals. A
parameter that the schema does not have is text. A model may omit ``<tool_call>``, or the end of a parameter before the
next one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .format import ToolFormat
from .hermes import BEGIN, END, HermesReader
from .json_calls import CLOSERS
from .lark import Lark, properties_of, quoted, required_of, shared_of
from .literals import value_of
from .parser import Tool, ToolParser
from .text import SPACE, Read

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SEED = {"<seed:tool_call>": "</seed:tool_call>"}  # of Seed-OSS
_BEGINS = (BEGIN, *SEED)
_ENDS = (END, *SEED.values())
_MARKS = (PARAMETER, FUNCTION_END, *_ENDS)
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, PARAMETER, "\n" + FUNCTION_END, FUNCTION_END)
_NAME = re.compile(r"[^<>\n]*")
_TEXT = re.compile(r"[^<\n]*")
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    type(None): "null",
    dict: "object",
}
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_DEEPEST = 16  # references and alternatives of a schema


class QwenCoderReader(HermesReader):
    """Also reads Hermes's calls, which these models make at times."""

    _ends = (*_ENDS, *_BEGINS)

    def _calls(self) -> Read[bool]:
        text = self._text
        mark = yield from text.mark((*_BEGINS, FUNCTION))
        if not mark:
            return False
        if mark != FUNCTION:
            yield from text.skip()
            if not (yield from text.mark((FUNCTION,))):
                if not (yield from self._json()):
                    return False
                yield from self._close(_ENDS, _BEGINS, CLOSERS)
                return True
        name = yield from self._name()
        if not self._callable(name, mark != FUNCTION):
            return False
        self._begin(name)
        yield from self._parameters(self._tools.get(name, Tool(name)).parameters)
        yield from self._close(_ENDS, _BEGINS, SPACE)
        return True

    def _name(self) -> Read[str]:
        """Read a name and the ``>`` after it; "" if they do not stand here."""
        name = (yield from self._text.skip(_NAME)).strip()
        return name if (yield from self._text.next(">")) else ""

    def _parameters(self, schema: Mapping[str, Any]) -> Read[None]:
        """Read the parameters of a call and its end, or up to what is neither."""
        text, separator = self._text, "{"
        while True:
            text.save()
            yield from text.skip()
            mark = yield from text.mark((PARAMETER, FUNCTION_END, *_ENDS, *_BEGINS))
            if mark == PARAMETER and (key := (yield from self._name())):
                self._more(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._parameter(types_of(schema, key))
                if not self.cut:
                    continue
            elif mark != FUNCTION_END and (self._end() or text.ends_within(_MARKS)):
                self.cut = True
            if self.cut:
                return
            if mark != FUNCTION_END:
                text.back()
            text.forget()
            self._more("{}" if separator == "{" else "}")
            return

    def _parameter(self, types: Collection[str]) -> Read[None]:
        """Read a value, and tell it as JSON; text as it arrives, and other values once they are complete."""
        text, is_text = self._text, set(types) == {"string"}
        pieces: list[str] = []

        def tell(piece: str) -> None:
            if is_text:
                self._more(json.dumps(piece, ensure_ascii=False)[1:-1])
            else:
                pieces.append(piece)

        if is_text:
            self._more('"')
        yield from text.next("\n")
        while (yield from text.more()):
            start, text.at = text.at, _TEXT.match(text.held, text.at).end()  # type: ignore[union-attr]
            tell(text.held[start : text.at])
            if not (yield from text.more()):
                break
            mark = yield from text.mark(_VALUE_ENDS)
            if mark:
                text.at -= 0 if mark in _VALUE_ENDS[:2] else len(mark)
                self._more('"' if is_text else json_of_text("".join(pieces), types))
                return
            if text.ends_within(_VALUE_ENDS):
                break
            tell(text.held[text.at])
            text.at += 1
        self._more("".join(pieces))
        self.cut = True


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """JSON's types that ``schema`` takes for its property ``key``; empty: any. One that it does not have is text."""
    properties = properties_of(schema)
    return set(_types(properties[key], schema, 0)) if key in properties else {"string"}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    kinds = schema.get("type")
    if schema.get("nullable") is True:
        yield "null"
    if isinstance(kinds, str | list):  # others than JSON's are no types, except for Python's name of text
        named = [kinds] if isinstance(kinds, str) else kinds
        yield from ("string" if each == "str" else each for each in named if each in (*_TYPES.values(), "str"))
    elif "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        yield from (_TYPES.get(type(each), "object") for each in values)
    else:
        for name in ("anyOf", "oneOf", "allOf"):
            found = schema.get(name)
            for each in found if isinstance(found, list) else ():
                yield from _types(each, root, depth + 1)
        target: Any = root
        if isinstance(path := schema.get("$ref"), str) and path.startswith("#"):
            for part in path.split("/")[1:]:
                target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            yield from _types(target, root, depth + 1)


def json_of_text(written: str, types: Collection[str]) -> str:
    """The JSON of a value of one of ``types``, empty for any, that is ``written`` without quotes: else its text."""
    word = written.strip()
    if "null" in types and (word == "None" or word.lower() == "null"):
        return "null"
    if "boolean" in types and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    try:
        value, found = json.loads(word, parse_constant=_refuse), word
    except (ValueError, RecursionError):
        try:
            value = value_of(word)
            found = json.dumps(value, ensure_ascii=False)
        except ValueError:
            value = found = ""
    kind = _TYPES[type(value)]
    if kind == "number" and not math.isfinite(value):
        kind = "string"
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    fits = kind in types or not types or (kind == "integer" and "number" in types)
    return found if fits and kind != "string" else json.dumps(written, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class QwenCoder(ToolFormat):
    marks = (*_BEGINS, *_ENDS)

    def parser(self, tools: Iterable[Tool], thought: str = "") -> ToolParser:
        return QwenCoderReader(tools, thought)

    def grammar(self, tools: Sequence[Tool], most: int, added: Mapping[str, int]) -> str:
        """The grammar, in which a text is any without an end mark, whatever its schema says of its form."""
        lark = Lark(added)
        begin, end = next((pair for pair in SEED.items() if pair[0] in self.sample), (BEGIN, END))
        text = lark.rule("/(.|\\n)*/", f"[suffix={quoted(_AFTER)}]")
        calls = [
            f"{lark.mark(begin)} {quoted(f'{chr(10)}{FUNCTION}{each.name}>{chr(10)}')} "
            f"{_elements(lark, each.parameters, text)} {quoted(FUNCTION_END + chr(10))} {lark.mark(end)}"
            for each in tools
        ]
        return lark.source(calls, most, quoted("\n"))


_AFTER = f"\n{PARAMETER_END}\n"


def _elements(lark: Lark, schema: Mapping[str, Any], text: str) -> str:
    """Lark of the parameters of ``schema`` in the order of its properties; ``text`` is the rule of a text's rest."""
    properties, required = properties_of(schema), required_of(schema)
    if "properties" not in schema:
        name = lark.rule("/[A-Za-z_][A-Za-z0-9_]*/")
        return f"({quoted(PARAMETER)} {name} {quoted('>' + chr(10))} {text})*" if schema else ""
    found = []
    shared = shared_of(schema)
    if shared is None:
        raise ValueError(
            "tools: in this model's format of calls a schema refers only to its $defs and definitions: move there "
            "what it refers to"
        )
    for key, each in properties.items():
        if key != key.strip() or not _NAME.fullmatch(key) or not key:
            raise ValueError(
                f"tools: the property {key!r} cannot be written in this model's format of calls: rename it"
            )
        begin = quoted(f"{PARAMETER}{key}>\n")
        if types_of(schema, key) != {"string"}:
            value = f"{lark.json({**each, **shared} if isinstance(each, Mapping) else {})} {quoted(_AFTER)}"
        elif isinstance(options := each.get("enum", [each.get("const")]), list) and all(
            isinstance(option, str) for option in options
        ):
            value = f"({' | '.join(map(quoted, options))}) {quoted(_AFTER)}"
        else:
            value = text
        found.append(f"{begin} {value}" if key in required else f"({begin} {value})?")
    return " ".join(found)
