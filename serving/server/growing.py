"""JSON that grows with an answer: log-probabilities are written as they come, and only their text is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Piece = bytes | bytearray


class JsonList:
    """The JSON of a list, one element after the other."""

    def __init__(self) -> None:
        self._text = bytearray()

    def __len__(self) -> int:
        """Bytes."""
        return len(self._text)

    def add(self, value: Any) -> int:
        """Append ``value``; return the bytes that it takes."""
        size = len(self._text)
        if size:
            self._text += b","
        self._text += json.dumps(value).encode()
        return len(self._text) - size

    def json(self, before: JsonList | None = None) -> bytes:
        """The list, after the elements of ``before``."""
        parts = [each._text for each in (before, self) if each]
        return b"[%b]" % b",".join(parts)

    def pieces(self) -> list[Piece]:
        """The pieces of the list's JSON, without a copy: they are read before the next :meth:`add`."""
        return [b"[", self._text, b"]"]


def size_of(text: str) -> int:
    """The most bytes of a text in JSON, but for control characters and quotes."""
    return len(text) if text.isascii() else 12 * len(text)


def with_fields(value: dict[str, Any], **more: bytes) -> bytes:
    """The JSON of ``value``, which has a field already, with ``more`` fields, given as JSON."""
    parts = [json.dumps(value).encode()[:-1]]
    for name, field in more.items():
        parts += [b',"%b":' % name.encode(), field]
    return b"".join([*parts, b"}"])


def with_pieces(value: dict[str, Any], name: str, field: Sequence[Piece]) -> list[Piece]:
    """:func:`with_fields` of one ``field`` in pieces, which are not copied."""
    return [b'%b,"%b":' % (json.dumps(value).encode()[:-1], name.encode()), *field, b"}"]


def body_of(head: dict[str, Any], choices: Sequence[bytes], usage: dict[str, Any], **more: bytes) -> list[bytes]:
    """The pieces of an answer's JSON: ``head``, ``choices``, ``usage``, and ``more`` fields, given as JSON."""
    pieces = [json.dumps(head).encode()[:-1] + b',"choices":[']
    for number, choice in enumerate(choices):
        pieces += [b",", choice] if number else [choice]
    pieces.append(b'],"usage":%b' % json.dumps(usage).encode())
    for name, field in more.items():
        pieces += [b',"%b":' % name.encode(), field]
    return [*pieces, b"}"]
