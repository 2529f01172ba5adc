"""Calls that are JSON objects: ``{"name": "weather", "arguments": {"city": "Bern"}}``.

The keys may stand in any order, others among them; ``parameters`` means ``arguments``. Their value may be an object,
null, or its JSON as text; without it there are no arguments, ``{}``. Where the arguments come first, they wait for the
name. No incremental parser of JSON that we know tells where a value stands in the text (``ijson``, ``jiter``), and
clients get the arguments as they are written, so this module reads JSON itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .parser import CallReader
from .text import Read

_ARGUMENTS = ("arguments", "parameters")
_PLAIN = re.compile(r'[^"{}\[\]<\\]*')  # the rest of a list or an object outside of strings
_SCALAR = re.compile(r"[-+.\w]*")
CLOSERS = re.compile(r"[\s}\]]*")


class JsonReader(CallReader):
    """Reads objects and lists of them. Outside of a string, one of ``_ends`` ends arguments that are no JSON."""

    _ends: tuple[str, ...] = ()
    _marked = True  # whether marks tell calls from other JSON

    def _json(self) -> Read[bool]:
        """Read an object or a list of objects; whether there is a call."""
        first = yield from self._text.peek()
        if first == "{":
            return (yield from self._object())
        if first == "[":
            return (yield from self._list())
        return False

    def _list(self) -> Read[bool]:
        text, found = self._text, False
        text.at += 1
        yield from text.skip()
        while (yield from text.peek()) == "{" and (yield from self._object()):
            found = True
            text.save()
            yield from text.skip()
            if not (yield from text.next(",")):
                if (yield from text.next("]")):
                    text.forget()
                else:
                    text.back()
                return True
            yield from text.skip()
        if found and self._end():
            text.forget()
        elif found:
            text.back()
        return found

    def _object(self) -> Read[bool]:
        """Read an object, at least up to the end of the arguments if it is a call, and whether it is."""
        before = self.calls
        whole = yield from self._members()
        if self.calls == before:
            return False
        if not (whole or self._end()):
            self._say(self._text.since())  # what is no JSON after the arguments
        self._text.forget()
        return True

    def _members(self) -> Read[bool]:
        """Read the members of an object, and begin the call; whether the object is complete."""
        text, before = self._text, self.calls
        name: str | None = None
        arguments: str | None = None
        text.at += 1
        while True:
            yield from text.skip()
            if (key := (yield from self._string())) is None:
                return False
            yield from text.skip()
            if not (yield from text.next(":")):
                return False
            yield from text.skip()
            pieces: list[str] = []
            if key == "name" and name is None:
                name = yield from self._string()
                if name is None or not self._callable(name, self._marked):
                    return False
            elif key in _ARGUMENTS and name is not None and arguments is None:
                if not (yield from self._arguments(name)):
                    return False
                arguments = ""
                text.save()
            elif not (yield from self._value(pieces.append, strict=True)):
                return False
            elif key in _ARGUMENTS and arguments is None:
                arguments = _text_of("".join(pieces))
            yield from text.skip()
            if (yield from text.next("}")):
                break
            if not (yield from text.next(",")):
                return False
        if name is None:
            return False
        if self.calls == before:
            self._begin(name)
            self._more("{}" if arguments is None else arguments)
        return True

    def _arguments(self, name: str) -> Read[bool]:
        """Read the arguments' value, and begin the call of ``name`` as soon as it is certain; False: broken or none."""
        text = self._text
        first, pieces = (yield from text.peek()), list[str]()
        if first and first in "{[":
            self._begin(name)
            whole = yield from self._value(self._more)
        elif first == '"':
            self._begin(name)
            whole = yield from self._value(pieces.append)
            self._more(_text_of("".join(pieces)) if whole else "".join(pieces))
        else:
            if not (yield from self._value(pieces.append)):
                return False
            self._begin(name)
            self._more(_text_of("".join(pieces)))
            whole = True
        if not whole:
            self.cut = self._end()
            text.save()  # a mark follows, or nothing
        return whole

    def _string(self) -> Read[str | None]:
        """Read a string, and return its text; None if none stands here."""
        pieces: list[str] = []
        if (yield from self._text.peek()) != '"' or not (yield from self._text.quoted(pieces.append)):
            return None
        found = _loaded("".join(pieces))
        return found if isinstance(found, str) else None

    def _value(self, sink: Callable[[str], object], strict: bool = False) -> Read[bool]:
        """Read a value into ``sink``, as it is written; False if there is none, or not all of it.

        A ``strict`` one has no backslash outside of strings: then of two readings that begin at different places within
        a text one ends soon, and reading again what became no call takes no more than linear time.
        """
        text = self._text
        first = yield from text.peek()
        if first == '"':
            return (yield from text.quoted(sink))
        if not first or first not in "{[":
            scalar = yield from text.skip(_SCALAR)
            sink(scalar)
            return not self._end() and not isinstance(_loaded(scalar), _Broken)
        depth = 0
        while (yield from text.more()):
            run = _PLAIN.match(text.held, text.at)
            assert run is not None
            sink(run[0])
            text.at = run.end()
            letter = text.held[text.at : text.at + 1]
            if letter == '"':
                if not (yield from text.quoted(sink)):
                    return False
            elif letter and self._ends and letter == self._ends[0][0] and (mark := (yield from text.mark(self._ends))):
                text.at -= len(mark)
                return False
            elif letter == "\\" and strict:
                return False
            elif letter:
                sink(letter)
                text.at += 1
                depth += (letter in "{[") - (letter in "}]")
                if not depth:
                    return True
        return False


class _Broken:
    """In the place of a value: the text is no JSON."""


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)  # models write line breaks in strings
    except (ValueError, RecursionError):
        return _Broken()


def _text_of(value: str) -> str:
    """The arguments' JSON, for the ``value`` that was written."""
    if value == "null":
        return "{}"
    found = _loaded(value) if value.startswith('"') else None
    if not isinstance(found, str):
        return value
    return "{}" if not found.strip() else found if isinstance(_loaded(found), dict) else value
