"""Text of clients and of files in lines that a person reads: a log, a terminal."""

from __future__ import annotations


def printable(text: object, most: int = 200) -> str:
    """``str(text)`` as one line of at most ``most`` characters and a mark where it is cut.

    Control characters, line separators, marks of writing direction and lone surrogates become escapes, so that a text
    neither looks like a line of its own nor reaches a terminal as a command.
    """
    found = str(text)
    left_out = len(found) - most
    found = found[:most]
    if not found.isprintable():
        found = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in found)
    return found if left_out <= 0 else f"{found}... ({left_out:,} more characters)"
