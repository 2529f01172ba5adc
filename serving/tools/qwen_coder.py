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
from .lark import SIMPLE, Lark, properties_of, quoted, required_of, shared_of
from .literals import dumped, value_of
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
_LONGEST_CHAIN = 16  # of references of a schema as a whole
_MOST_BRANCHES = 128  # alternatives of a property that are looked at: many properties may share many
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


class QwenCoderReader(HermesReader):
    """Also reads Hermes's calls, which these models make at times."""

    _ends = (*_ENDS, *_BEGINS)

    def __init__(self, tools: Iterable[Tool] = (), thought: str = "") -> None:
        self._types: dict[tuple[str, str], set[str]] = {}  # of tools' parameters
        self._schemas: dict[str, Mapping[str, Any]] = {}  # of tools' arguments, unfolded
        super().__init__(tools, thought)

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
        yield from self._parameters(name)
        yield from self._close(_ENDS, _BEGINS, SPACE)
        return True

    def _name(self) -> Read[str]:
        """Read a name and the ``>`` after it; "" if they do not stand here."""
        name = (yield from self._text.skip(_NAME)).strip()
        return name if (yield from self._text.next(">")) else ""

    def _types_of(self, name: str, key: str) -> set[str]:
        if name not in self._schemas:
            self._schemas[name] = unfolded(self._tools[name].parameters if name in self._tools else {})
        if (name, key) not in self._types:
            self._types[name, key] = types_of(self._schemas[name], key)
        return self._types[name, key]

    def _parameters(self, name: str) -> Read[None]:
        """Read the parameters of a call of ``name`` and its end, or up to what is neither."""
        text, separator = self._text, "{"
        while True:
            text.save()
            yield from text.skip()
            mark = yield from text.mark((PARAMETER, FUNCTION_END, *_ENDS, *_BEGINS))
            if mark == PARAMETER and (key := (yield from self._name())):
                self._more(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._parameter(self._types_of(name, key))
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
    """JSON's types that an unfolded ``schema`` takes for its property ``key``; empty: any. One that it lacks: text."""
    properties = properties_of(schema)
    if key not in properties:
        return {"string"}
    found: set[str] = set()
    for each in _branches(properties[key], schema):
        kinds = each.get("type")
        if each.get("nullable") is True:
            found.add("null")
        if isinstance(kinds, str | list):  # others than JSON's are no types, except for Python's name of text
            named = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if isinstance(kind, str)]
            found |= {"string" if kind == "str" else kind for kind in named if kind in (*_TYPES.values(), "str")}
        elif isinstance(each.get("enum"), list):
            found |= {_TYPES[type(value)] for value in each["enum"]}
        elif "const" in each:
            found.add(_TYPES[type(each["const"])])
    return found


def _branches(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """``schema`` and its alternatives, also those that it refers to, each once; ``{}`` for those beyond the most."""
    seen: set[str] = set()
    left = [schema]
    for _ in range(_MOST_BRANCHES):
        if not left:
            return
        each = left.pop()
        if not isinstance(each, Mapping):
            continue
        yield each
        for name in ("anyOf", "oneOf", "allOf"):
            found = each.get(name)
            left += found[:_MOST_BRANCHES] if isinstance(found, list) else []
        path = each.get("$ref")
        if isinstance(path, str) and path not in seen:
            seen.add(path)
            left.append(_target(path, root))
    if left:
        yield {}


def unfolded(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema`` with what it refers to as a whole in the place of the reference."""
    for _ in range(_LONGEST_CHAIN):
        path = schema.get("$ref")
        target = _target(path, schema) if isinstance(path, str) else None
        if not isinstance(target, Mapping):
            break
        schema = {**{name: value for name, value in schema.items() if name != "$ref"}, **target}
    return schema


def _target(path: str, root: Any) -> Any:
    """What the reference ``path`` leads to within ``root``; None if nowhere."""
    if not path.startswith("#"):
        return None
    for part in path.split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def json_of_text(written: str, types: Collection[str]) -> str:
    """The JSON of a value of one of ``types``, empty for any, that is ``written`` without quotes: else its text."""
    word = written.strip()
    if "null" in types and (word == "None" or word.lower() == "null"):
        return "null"
    if "boolean" in types and word.lower() in _BOOLEANS and not (word in "01" and {"integer", "number"} & set(types)):
        return _BOOLEANS[word.lower()]
    try:
        value, found = json.loads(word, parse_constant=_refuse), word
    except (ValueError, RecursionError):
        try:
            value = value_of(word)
            found = dumped(value)
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
        """The grammar, in which a text is any that the parser does not end, whatever its schema says of its form."""
        lark = Lark(added)
        begin, end = next((pair for pair in SEED.items() if pair[0] in self.sample), (BEGIN, END))
        text = lark.rule(_ANY_TEXT, f"[suffix={quoted(PARAMETER_END + chr(10))}]")
        calls = [
            f"{lark.mark(begin)} {quoted(f'{chr(10)}{FUNCTION}{each.name}>{chr(10)}')} "
            f"{_elements(lark, each, text)} {quoted(FUNCTION_END + chr(10))} {lark.mark(end)}"
            for each in tools
        ]
        return lark.source(calls, most, quoted("\n"))


_ANY_TEXT = r"/(.|\n)*/ & ~/(.|\n)*(<parameter=|<\/function>)(.|\n)*/"
_MARKED = re.compile(f"{PARAMETER_END}|{PARAMETER}|{FUNCTION_END}")


def _elements(lark: Lark, tool: Tool, text: str) -> str:
    """Lark of a tool's parameters in the order of its properties; ``text`` is the rule of a text and its end.

    Raises ValueError for a schema that this format cannot write.
    """
    schema = unfolded(tool.parameters)
    properties, required = properties_of(schema), required_of(schema)
    if more := set(schema) - SIMPLE:
        raise _unwritable(tool, f"with {min(more)!r} outside of its properties")
    if absent := required - set(properties):
        raise _unwritable(tool, f"that requires {min(absent)!r}, which is none of its properties")
    if "properties" not in schema:
        name = lark.rule("/[A-Za-z_][A-Za-z0-9_]*/")
        any_ = f"({quoted(PARAMETER)} {name} {quoted('>' + chr(10))} {text})*"
        return "" if not schema or schema.get("additionalProperties") is False else any_
    if (shared := shared_of(schema)) is None:
        raise _unwritable(tool, "that refers to more than its $defs and definitions")
    found = []
    for key in properties:
        if key != key.strip() or not _NAME.fullmatch(key) or not key:
            raise _unwritable(tool, f"with a property {key!r}")
        element = f"{quoted(f'{PARAMETER}{key}>{chr(10)}')} {_value(lark, tool, schema, key, text, shared)}"
        found.append(element if key in required else f"({element})?")
    return " ".join(found)


def _value(lark: Lark, tool: Tool, schema: Mapping[str, Any], key: str, text: str, shared: Mapping[str, Any]) -> str:
    """Lark of the value of the parameter ``key`` of a tool's ``schema``, and of its end."""
    end = quoted(f"\n{PARAMETER_END}\n")
    options = _options(properties_of(schema)[key], schema)
    if options:
        written = [each if isinstance(each, str) else json.dumps(each) for each in options]
        if marked := next(filter(_MARKED.search, written), None):
            raise _unwritable(tool, f"with the value {marked!r}")
        return f"({' | '.join(map(quoted, written))}) {end}"
    if options is None and "string" in types_of(schema, key):
        return text
    return f"{lark.part(properties_of(schema)[key], shared)} {end}"


def _options(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema takes, if it names all of them; None if it does not."""
    found: list[Any] = []
    for each in _branches(schema, root):
        if isinstance(each.get("enum"), list):
            found += each["enum"]
        elif "const" in each:
            found.append(each["const"])
        elif each.get("type") == "null":
            found.append(None)
        elif not {"anyOf", "oneOf", "$ref"} & set(each):
            return None
    return found if any(isinstance(each, str) for each in found) else None


def _unwritable(tool: Tool, what: str) -> ValueError:
    return ValueError(f"tools: {tool.name} has a schema {what}: in this model's format its calls cannot be forced")
