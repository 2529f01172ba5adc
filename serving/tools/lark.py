"""Grammars in llguidance's dialect of Lark, for answers that are calls and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
SIMPLE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", *ANNOTATIONS}
_MOST = 8 << 20  # characters of a grammar
_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')


class Lark:
    """A grammar of 1 to ``most`` calls with ``separator`` between them, both of them Lark, which :meth:`source` writes.

    ``added`` are the tokenizer's added tokens: where a mark is one, the model writes that token and does not spell it.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._rules: list[str] = []
        self._size = 0

    def mark(self, text: str) -> str:
        return f"<[{self._added[text]}]>" if text in self._added else quoted(text)

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a new rule, with llguidance's ``attributes``."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        self._size += len(self._rules[-1])
        if self._size > _MOST:
            raise ValueError(
                f"tools: their schemas make a grammar of more than {_MOST >> 20} MiB in this model's format of calls: "
                "give fewer tools, or shorter definitions"
            )
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """The name of a rule for a JSON value of ``schema``, without space, with which a weak model might go on."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}")

    def part(self, schema: Any, shared: Mapping[str, Any]) -> str:
        """The name of a rule for a value of a property's ``schema``, which may refer to the ``shared`` definitions."""
        if not isinstance(schema, Mapping):
            return self.json({})
        return self.json({**schema, **shared} if '"$ref"' in json.dumps(schema) else schema)

    def object(self, schema: Mapping[str, Any]) -> str:
        return self.json({**schema, "type": "object"})

    def source(self, calls: list[str], most: int, separator: str = "", begin: str = "", end: str = "") -> str:
        """The grammar of ``begin``, any of ``calls`` and ``end``."""
        more = f"({separator} call){{0,{most - 1}}}" if most > 1 else ""
        return "\n".join([f"start: {begin} call {more} {end}", f"call: {' | '.join(calls)}", *self._rules])


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of a client's ``schema``; none if it has no object of them."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of required properties; none if ``schema`` has no list of them."""
    found = schema.get("required")
    return {each for each in found if isinstance(each, str)} if isinstance(found, list) else set()


def shared_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The definitions that each of a schema's properties needs by itself; None if a reference leads elsewhere."""
    if _ELSEWHERE.search(json.dumps(properties_of(schema))):
        return None
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def quoted(text: str) -> str:
    return json.dumps(text)
