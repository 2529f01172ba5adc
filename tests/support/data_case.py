"""Reading the items of data files, and what holds for all of them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from shardfuse.training.data.items import DataError, Item
from shardfuse.training.data.sources import Files

MIB = 1 << 20


def items_of(*paths: str | os.PathLike[str]) -> list[Item]:
    return [item for batch, _ in Files(paths).batches() for item in batch]


def values_of(*paths: str | os.PathLike[str]) -> list[Any]:
    return [item.value for item in items_of(*paths)]


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def refusal(*paths: str | os.PathLike[str]) -> str:
    """The one-line message with which the files are refused, at once or while they are read."""
    with pytest.raises(DataError) as caught:
        items_of(*paths)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data.path = ")
    return message


def texts(items: list[Item]) -> list[str]:
    return [item.value["text"] for item in items if item.value]


def check_shares(files: Files) -> None:
    """Shares interleave to all batches; batches keep their limits, and their ends grow up to the size."""
    whole = list(files.batches())
    for shares in (2, 3):
        parts = [list(files.batches(share, shares)) for share in range(shares)]
        assert [parts[i % shares][i // shares] for i in range(len(whole))] == whole
        assert sum(map(len, parts)) == len(whole)
    ends = [end for _, end in whole]
    assert ends == sorted(ends)
    assert ends[-1] == files.size
    for batch, _ in whole:
        assert 1 <= len(batch) <= 256
        assert len(batch) == 1 or sum(item.size for item in batch) <= MIB
