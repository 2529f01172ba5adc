"""What files of data hold, and what a tokenizer makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

TRAIN_ON = ("answers", "all")  # what the loss counts of a chat


class DataError(ValueError):
    """Unusable data; the message is one line with the reason and the remedy."""


class RecordError(DataError):
    """A record that cannot be trained on. The message is the reason alone, without the record's place."""


class Item(NamedTuple):
    """A record, or a piece of a text file.

    ``place`` is where it stands, in words ("data.jsonl, line 12"). ``value`` is the record, a text file's being
    ``{"text": piece}``; None where it cannot be read, and ``problem`` then says why and what was expected. ``size`` is
    in bytes of its source. ``first`` and ``last`` are whether it begins and ends its document: only large text files
    come in several pieces.
    """

    place: str
    value: dict[str, Any] | None
    size: int
    problem: str = ""
    first: bool = True
    last: bool = True


class Sample(NamedTuple):
    """The tokens of an item: ``ids`` [n] int64, and ``counted`` [n] bool, whether the loss counts each as a target."""

    ids: np.ndarray
    counted: np.ndarray
