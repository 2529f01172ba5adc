"""Files that are checked before they are used: JSON with a checksum over its own content, and CRC-32s of other files.

A checksum detects damage. It does not stop an attacker, who can compute a matching one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from ..core.mesh import Group

_DIGEST = "sha256"

Sum = list[int]  # size and CRC-32 of a file
Sums = Mapping[str, Sum]  # by the file's name


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content``, which is JSON, with a checksum over it, and flush it to disk."""
    write_text(path, json.dumps({**content, _DIGEST: _digest(content)}))


def write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def parse_checked(path: Path, data: bytes, form: str, *, remedy: str) -> dict[str, Any]:
    """Parse ``data``, written by :func:`write_json`; return the content without its checksum. Its ``format`` is
    ``form``.

    Raises ValueError for any other content; the message names ``path`` and ends in ``remedy``.
    """
    content = parse(path, data, remedy=remedy)
    if not isinstance(content, dict) or content.get("format") != form:
        raise ValueError(f"{path}: not written by this version of shardfuse (expected format {form!r}); {remedy}")
    written = content.pop(_DIGEST, None)
    try:
        found = _digest(content)
    except RecursionError as error:
        raise ValueError(f"{path}: corrupt (it nests too deeply); {remedy}") from error
    if written != found:
        raise ValueError(f"{path}: corrupt (its content does not have the checksum in its {_DIGEST!r}); {remedy}")
    return content


def read(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


def parse(path: Path, data: bytes, *, remedy: str) -> Any:
    """The JSON in ``data``, the content of ``path``. Raises ValueError; also where it nests too deeply."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cut short or corrupt ({error}); {remedy}") from error


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def checksum(path: Path) -> Sum:
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return [size, crc]


def sum_of(data: bytes) -> Sum:
    return [len(data), zlib.crc32(data)]


def is_sums(value: Any) -> TypeGuard[Sums]:
    return isinstance(value, dict) and all(
        isinstance(each, list) and len(each) == 2 and all(map(is_count, each)) for each in value.values()
    )


def is_count(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a size, an offset or the like."""
    return type(value) is int and 0 <= value < 1 << 63


def check_regular(path: Path) -> None:
    """ValueError for a link, which may lead outside the folder, and for an endless file, such as a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path}: a link, or not a file; put the file itself there or load another checkpoint")


def check_sum(path: Path, found: Sum, written: Sum) -> None:
    """ValueError unless the file has the size and CRC-32 that were ``written``."""
    if found != written:
        how = "cut short" if found[0] < written[0] else "corrupt"
        raise ValueError(
            f"{path}: {how} ({found[0]} bytes with CRC-32 {found[1]:08x}, written were {written[0]} with "
            f"{written[1]:08x}); copy it again or load another checkpoint"
        )


def check_files(folder: Path, sums: Sums, group: Group) -> None:
    """ValueError on every rank if a file is missing or was changed; each rank reads its share."""
    from ..core.agreement import together

    together(group, lambda: check_share(folder, sums, group.rank, group.size))


def check_share(folder: Path, sums: Sums, part: int, parts: int) -> None:
    """:func:`check_files` for the share ``part`` of ``parts`` alone."""
    for name, written in sorted(sums.items())[part::parts]:
        path = folder / name
        if not os.path.lexists(path):
            raise ValueError(f"{path}: missing; copy it again or load another checkpoint")
        check_regular(path)
        check_sum(path, checksum(path), written)
