"""API keys: the texts that may be one, and a file of them. No message contains a key."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

_KEY = frozenset(map(chr, range(0x21, 0x7F)))  # what a header can carry, without spaces
_WRONG = "has a space, a control character or one outside ASCII"
_EXPECTED = "it is sent in a header, so expected letters, digits and punctuation"
_READABLE = stat.S_IRGRP | stat.S_IROTH


def check_keys(keys: Sequence[str]) -> None:
    """Raise ValueError for a key that no header can carry."""
    for number, key in enumerate(keys, 1):
        which = "the API key" if len(keys) == 1 else f"API key {number} of {len(keys)}"
        if not key:
            raise ValueError(f"{which} is empty (--api-key, SHARDFUSE_API_KEY): give a text, or leave the option out")
        if not _KEY.issuperset(key):
            raise ValueError(f"{which} {_WRONG} (--api-key, SHARDFUSE_API_KEY): {_EXPECTED}")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Warns if other users may read the file. Raises OSError if it cannot be read, ValueError if it has no key or a wrong
    one.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        lines = [line.strip() for line in file.read().decode("utf-8-sig", "replace").split("\n")]
    found = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for number, key in found.items():
        if not _KEY.issuperset(key):
            raise ValueError(f"{path} (--api-key-file): line {number} {_WRONG}: {_EXPECTED}")
    if not found:
        raise ValueError(f"{path} (--api-key-file): there is no key in it: expected one a line")
    if mode & _READABLE:
        warnings.warn(f"{path} (--api-key-file): other users may read it: chmod 600 it", stacklevel=2)
    return tuple(found.values())
