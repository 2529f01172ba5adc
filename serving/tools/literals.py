"""Python's literals as JSON: what models write as a call's arguments where they write calls as Python."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_DEEPEST = 64  # lists and dictionaries within each other
_NUMBER = r"[-+]?(?:0[xX][0-9a-fA-F]+|(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w.])"
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    rf"|(?P<number>{_NUMBER})|(?P<name>[A-Za-z]+)|(?P<sign>[][{{}}(),:]))",
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
        return dumped(value_of(source))
    except ValueError:
        return None


def dumped(value: Any) -> str:
    """The JSON of ``value``, with escapes only where it needs them. Raises ValueError for an infinity."""
    found = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        found.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        found = json.dumps(value, allow_nan=False)
    return found


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
        if text not in _ENDS:
            raise NotLiteral
        found, comma = self.items(_ENDS[text], depth + 1)
        return found[0] if text == "(" and len(found) == 1 and not comma else found

    def items(self, end: str, depth: int) -> tuple[Any, bool]:
        """The values up to ``end``, and whether a comma is last; those of a dictionary have keys, a set is a list."""
        found: list[Any] = []
        keys: list[str] = []
        comma = False
        while not self.ends(end):
            value = self.value(depth)
            if end == "}" and self.ends(":"):
                if not isinstance(value, str):
                    raise NotLiteral
                keys.append(value)
                value = self.value(depth)
            found.append(value)
            comma = self.ends(",")
            if not comma:
                if not self.ends(end):
                    raise NotLiteral
                break
        if len(keys) not in (0, len(found)):
            raise NotLiteral
        return (dict(zip(keys, found)) if keys or (end == "}" and not found) else found), comma

    def ends(self, sign: str) -> bool:
        """Read ``sign`` if it is next."""
        found = _TOKEN.match(self.source, self.at)
        if found is None or found["sign"] != sign:
            return False
        self.at = found.end()
        return True


def _text(source: str) -> str:
    if source[0] == '"':
        try:
            found = json.loads(source, strict=False)  # of surrogate pairs and of \\/ JSON knows more
            if isinstance(found, str):
                return found
        except ValueError:
            pass
    if source[:3] not in ("'''", '"""'):  # models write line breaks in strings
        source = f"{2 * source[0]}{source}{2 * source[0]}"
    try:
        found = ast.literal_eval(source)
    except (ValueError, SyntaxError) as error:
        raise NotLiteral from error
    return str(found)


def _number(source: str) -> int | float:
    try:
        return int(source, 0)
    except ValueError:
        pass
    try:
        return float(source)
    except ValueError as error:
        raise NotLiteral from error
