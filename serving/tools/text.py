"""Text that arrives in pieces, and generators that read it once, from front to back.

A reader is a generator that yields where it needs more text and returns what it has read. What it must be able to read
again, should it be something else, lies between :meth:`Text.save` and :meth:`Text.forget`. So the time is linear in the
text, however it is cut, and the result does not depend on the cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Read = Generator[None, None, T]

SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]*')


class Text:
    """The text that has arrived: what is not read yet begins at ``at`` of ``held``. ``ended``: no more comes."""

    def __init__(self) -> None:
        self.held = ""
        self.at = 0
        self.ended = False
        self._kept: list[str] | None = None  # what was read since the saved place, and stands in ``held`` no more
        self._from = 0

    def add(self, piece: str) -> None:
        if self._kept is not None:
            self._kept.append(self.held[self._from : self.at])
        self.held, self.at, self._from = self.held[self.at :] + piece, 0, 0

    def save(self) -> None:
        """Keep what is read from here on, for :meth:`back`."""
        self._kept, self._from = [], self.at

    def forget(self) -> None:
        """Keep nothing any more."""
        self._kept = None

    def since(self) -> str:
        """What was read since the saved place."""
        assert self._kept is not None
        return "".join([*self._kept, self.held[self._from : self.at]])

    def back(self) -> int:
        """Continue at the saved place, and return how much was read since then."""
        assert self._kept is not None
        read = sum(map(len, self._kept)) + self.at - self._from
        if self._kept:
            self.held, self._from = "".join([*self._kept, self.held[self._from :]]), 0
        self.at, self._kept = self._from, None
        return read

    def ends_within(self, marks: Collection[str]) -> bool:
        """Whether the text ends here, within one of ``marks`` or before it; if so, that is read."""
        if not self.ended or len(self.held) - self.at > max(map(len, marks), default=0):
            return False
        if not any(each.startswith(self.held[self.at :]) for each in marks):
            return False
        self.at = len(self.held)
        return True

    def more(self) -> Read[bool]:
        """Whether there is a character to read."""
        while self.at == len(self.held):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Read[str]:
        """The next character, which stays; "" at the end."""
        return self.held[self.at] if (yield from self.more()) else ""

    def next(self, letter: str) -> Read[bool]:
        """Read ``letter`` if it is the next character."""
        found = (yield from self.peek()) == letter
        self.at += found
        return found

    def skip(self, run: re.Pattern[str] = SPACE) -> Read[str]:
        """Read all that ``run`` matches, of characters that it matches one by one, and return it."""
        found: list[str] = []
        while (yield from self.more()):
            start, self.at = self.at, _end(run, self.held, self.at)
            found.append(self.held[start : self.at])
            if self.at < len(self.held):
                break
        return "".join(found)

    def mark(self, marks: Collection[str]) -> Read[str]:
        """Read the one of ``marks`` that stands here, and return it; "" if none does."""
        longest = max(map(len, marks), default=0)
        while True:
            ahead = self.held[self.at : self.at + longest]
            for each in marks:
                if ahead.startswith(each):
                    self.at += len(each)
                    return each
            if self.ended or not any(each.startswith(ahead) for each in marks):
                return ""
            yield

    def quoted(self, sink: Callable[[str], object]) -> Read[bool]:
        """Read the JSON string that begins here into ``sink``, as it is written; False if the text ends within it."""
        sink('"')
        self.at += 1
        while (yield from self.more()):
            start, self.at = self.at, _end(_IN_STRING, self.held, self.at)
            ends = self.at < len(self.held) and self.held[self.at] == '"'
            self.at += ends
            sink(self.held[start : self.at])
            if ends:
                return True
            if (yield from self.next("\\")) and (yield from self.more()):
                sink("\\" + self.held[self.at])
                self.at += 1
        return False


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``mark``, and not all of it."""
    most = min(len(text), len(mark) - 1)
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)


def _end(run: re.Pattern[str], text: str, start: int) -> int:
    found = run.match(text, start)
    assert found is not None  # a run may be empty
    return found.end()
