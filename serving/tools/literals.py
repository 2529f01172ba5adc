"""Python's literals as JSON: what models write as a call's arguments where they write calls as Python."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_DEEPEST = 64  # lists and dictionaries within each other
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*)?\.?\d[\d_]*\.?(?:[eE][-+]?\d+)?))"""
    r"""|(?P<name>[A-Za-z]+)|(?P<sign>[][{}(),:]))""",
    re.DOTALL,
)
_ENDS = {"{": "}", "[": "]", "(": ")"}
_NAMES: dict[str, Any] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class NotLiteral(ValueError):
    """The text is not the literal of a value that JSON has."""


def value_of(source: str) -> Any:
    """The value of a literal: texts, numbers, booleans, None, lists, tuples, sets, and dictionaries with texts as keys.

    JSON's ``true``, ``false`` and ``null`` are taken as well. Unlike ``ast.literal_eval`` it is safe for hostile text.
    Raises NotLiteral.
    """
    reader = _Reader(source)
    found = reader.value(0)
    if source[reader.at :].strip():
        raise NotLiteral
    return found


def json_of(source: str) -> str | None:
    """The JSON of a literal; None if there is none."""
    try:
        return json.dumps(value_of(source), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None


class _Reader:
    def __init__(self, source: str) -> None:
        self.source, self.at = source, 0

    def next(self) -> tuple[str, str]:
        """The kind and the text of the next token."""
        found = _TOKEN.match(self.source, self.at)
        if found is None or found.lastgroup is None:
            raise NotLiteral
        self.at = found.end()
        return found.lastgroup, found[found.lastgroup]

    def value(self, depth: int) -> Any:
        kind, text = self.next()
        if depth > _DEEPEST:
            raise NotLiteral
        if kind == "string":
            return _text(text)
        if kind == "number":
            return _number(text)
        if kind == "name" and text in _NAMES:
            return _NAMES[text]
        if text in _ENDS:
            return self.items(_ENDS[text], depth + 1)
        raise NotLiteral

    def items(self, end: str, depth: int) -> list[Any] | dict[str, Any]:
        """The values up to ``end``; those of a dictionary have keys, and a set is a list."""
        found: list[Any] = []
        keys: list[str] = []
        while not self.ends(end):
            value = self.value(depth)
            if end == "}" and self.ends(":"):
                if not isinstance(value, str):
                    raise NotLiteral
                keys.append(value)
                value = self.value(depth)
            found.append(value)
            if not self.ends(","):
                if not self.ends(end):
                    raise NotLiteral
                break
        if len(keys) not in (0, len(found)):
            raise NotLiteral
        return dict(zip(keys, found)) if keys or (end == "}" and not found) else found

    def ends(self, sign: str) -> bool:
        """Read ``sign`` if it is next."""
        found = _TOKEN.match(self.source, self.at)
        if found is None or found["sign"] != sign:
            return False
        self.at = found.end()
        return True


def _text(source: str) -> str:
    if "\n" in source and source[:3] not in ("'''", '"""'):  # models write line breaks in strings
        source = source.replace("\r", "\\r").replace("\n", "\\n")
    try:
        found: str = ast.literal_eval(source)
    except (ValueError, SyntaxError) as error:
        raise NotLiteral from error
    return found


def _number(source: str) -> int | float:
    try:
        return int(source, 0)
    except ValueError:
        pass
    try:
        return float(source)
    except ValueError as error:
        raise NotLiteral from error
