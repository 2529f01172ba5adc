"""The required form of an answer: a JSON value of a schema, a match of a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

GuideKind = Literal["json_schema", "regex", "choice", "grammar"]


class GuideRefused(ValueError):
    """A guide that cannot be compiled, or cannot go on; the message says why."""


class GuideBusy(GuideRefused):
    """A guide that could be compiled later, when others are."""


@dataclass(frozen=True)
class Guide:
    """The required form of an answer's text, made by one of the class methods. Equal guides are compiled once.

    ``source`` is the schema or the choices as JSON, the pattern, or the grammar.
    """

    kind: GuideKind
    source: str
    any_whitespace: bool = True

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = True) -> Guide:
        """A JSON value of ``schema``, a dictionary or its JSON.

        Without ``any_whitespace`` its parts have no whitespace between them, with which a weak model may fill an
        answer.

        Raises ValueError for a schema that is not a JSON object.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"Guide.json_schema: the schema is no JSON ({error}): expected an object") from None
        if not isinstance(parsed, Mapping):
            raise ValueError(f"Guide.json_schema: {text}: expected an object, such as {{'type': 'integer'}}")
        return cls("json_schema", text, any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """A text that ``pattern`` matches as a whole, in the syntax of Rust's crate ``regex``."""
        return cls("regex", _text("regex", pattern))

    @classmethod
    def choice(cls, options: Collection[str]) -> Guide:
        """One of ``options``. Raises ValueError unless they are non-empty texts."""
        if isinstance(options, str) or not isinstance(options, Collection) or not options:
            raise ValueError(f"Guide.choice: {options!r}: expected a collection of texts, such as ['yes', 'no']")
        return cls("choice", json.dumps([_text("choice", option) for option in options]))

    @classmethod
    def grammar(cls, lark: str) -> Guide:
        """A text of a grammar in llguidance's dialect of Lark, whose first rule is ``start``."""
        return cls("grammar", _text("grammar", lark))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"Guide.{name}: {value!r}: expected text of at least one character")
    return value
