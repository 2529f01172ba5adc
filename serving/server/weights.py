"""What JSON takes in memory, estimated before it is parsed.

A few megabytes can hold a million values, each of which takes some time and many times its bytes. The estimate counts
punctuation alone, so what would take too much is refused unparsed.
"""

from __future__ import annotations

from collections.abc import Iterator

from .errors import ApiError

# About the bytes of memory that a value takes, parsed by pydantic-core and checked by pydantic; an object is one of a
# model, as a message is, and numbers weigh less, since they are fast to parse. Eight megabytes of any of them are
# parsed in 10 to 20 ms, in which no other thread runs.
NUMBER, TEXT, KEY, LIST, OBJECT = 32, 80, 100, 200, 800
_SLICE = 1 << 16  # bytes counted at a time, within which nothing else runs


def check_weight(most: int, *texts: bytes) -> None:
    """Raise ApiError 413 if the values in ``texts``, each JSON, together take more than ``most`` bytes."""
    if sum(weight(each, most) for each in texts) > most:
        raise ApiError(
            413,
            f"the body's numbers, texts, lists and objects would take more than the {most >> 20} MiB of memory that "
            "this server gives them (--max-body-memory-mib): send fewer",
            code="request_too_large",
        )


def weight(raw: bytes, most: int) -> int:
    """The memory in bytes that the values of the JSON ``raw`` take, the characters of its texts aside; the counting
    ends above ``most``.

    The first estimate also counts what is within texts. Only if that is above ``most``, texts are left out.
    """
    found = 0
    for piece in _pieces(raw):
        found += _counted(piece) + TEXT * piece.count(b'"') // 2
    if found <= most:
        return found
    found, quotes = 0, 0
    for piece in _pieces(raw):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        found += _counted(b"".join(parts[quotes % 2 :: 2]))
        quotes += len(parts) - 1
        if found + TEXT * (quotes // 2) > most:
            break
    return found + TEXT * (quotes // 2)


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Parts of ``raw``, none of which ends between a backslash and what that escapes."""
    start = 0
    while start < len(raw):
        piece = raw[start : start + _SLICE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]
        yield piece
        start += len(piece)


def _counted(raw: bytes) -> int:
    lists, objects = raw.count(b"["), raw.count(b"{")
    values = NUMBER * (raw.count(b",") + lists + objects)
    return values + KEY * raw.count(b":") + LIST * lists + OBJECT * objects
