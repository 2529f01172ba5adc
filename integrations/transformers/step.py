"""What the layers of one forward pass share: block tables and slots, made of transformers' indices by the first one.

transformers names the place of every token that a step reads or writes. Tokens of a page follow each other, so a block
table is every P-th read index, divided by P. A pass that reads nothing from before has no read indices; what it writes
is then what it reads.

A sliding layer keeps a ring of ``window`` tokens, whose order in memory is not the order of the sequence: its tables
hold a page of one token for each. Where sequences have one query each, a query overwrites what slid out of its window,
and the ring is read in place. A chunk of several queries overwrites what its first ones still see: transformers copies
those keys before it writes, and tables count through the copy.

Letters: S sequences, T tokens of a step, P page size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..pages import Batch
from .cache import LayerPages


class Keys(Enum):
    """Where the keys and values of a group of layers are read in a step."""

    PAGES = "in the cache's pages"
    RING = "in the cache, token by token"
    FRESH = "in this step's keys and values"
    COPIED = "in the copy that transformers makes"


@dataclass(frozen=True)
class Tables:
    """A step, as the layers of one group see it."""

    keys: Keys
    batch: Batch
    slots: torch.Tensor  # [T] int64, where this step's tokens are written; negative: nowhere


class Step:
    """One forward pass over a paged cache."""

    def __init__(self) -> None:
        self._tables: dict[int, Tables] = {}  # by group

    def tables(self, layer: LayerPages, given: dict[str, Any]) -> Tables:
        """The tables of the layer's group. ``given``: the keyword arguments that transformers gives to attention."""
        if layer.group not in self._tables:
            self._tables[layer.group] = _make(layer, given)
        return self._tables[layer.group]


class _Here(threading.local):
    step: Step | None = None  # of the pass that this thread is in


_here = _Here()


def current() -> Step | None:
    """The step that this thread computes; None outside of continuous batching."""
    return _here.step


def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Before an enabled model's forward pass."""
    _here.step = Step() if kwargs.get("cache") is not None else None


def end(module: Any, args: Any, output: Any) -> None:
    """After an enabled model's forward pass, whether it raised or not."""
    _here.step = None


def _make(layer: LayerPages, given: dict[str, Any]) -> Tables:
    reads, writes = given["read_index"][layer.group], given["write_index"][layer.group]
    starts = _of_type(given["cu_seq_lens_k"], layer)  # [S + 1], where each sequence's keys start among the reads
    longest = _of_type(_named(given, "max_length_k", "max_seqlen_k"), layer)
    queries, most = given["cu_seq_lens_q"], _named(given, "max_length_q", "max_seqlen_q")
    stride = 1
    if layer.layer_type == "full_attention":
        keys, stride = Keys.PAGES, layer.page_size
        tables = _every(reads if reads.numel() else writes, starts, longest, stride) // stride
    elif not reads.numel():
        keys, tables = Keys.FRESH, _every(None, starts, longest)
    elif most == 1:
        keys, tables = Keys.RING, _every(reads, starts, longest)
        own = _take(writes, queries[:-1]).unsqueeze(1)  # [S, 1], where each sequence's one token is written
        tables = torch.where(tables == layer.sentinel, own, tables)
    else:
        keys, tables = Keys.COPIED, _every(None, starts, longest)
    batch = Batch(
        tables.to(torch.int32), starts.diff().to(torch.int32), queries.to(torch.int32),
        max_query_len=most, max_seq_len=longest,
    )  # fmt: skip
    return Tables(keys, batch, writes.masked_fill(writes == layer.trash, -1))


def _every(index: torch.Tensor | None, starts: torch.Tensor, longest: int, stride: int = 1) -> torch.Tensor:
    """[S, columns]: every ``stride``-th element of ``index`` from each sequence's start on; None: the position itself.

    Columns past a sequence's end hold anything that exists.
    """
    steps = torch.arange(0, max(longest, 1), stride, device=starts.device)
    at = starts[:-1].unsqueeze(1) + steps
    return at if index is None else _take(index, at)


def _take(index: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return index[at.clamp(max=index.shape[0] - 1)]


def _of_type(value: Any, layer: LayerPages) -> Any:
    """Until 5.18 a value for all layers, where all are of one type."""
    return value[layer.layer_type] if isinstance(value, dict) else value


def _named(given: dict[str, Any], name: str, until_5_17: str) -> Any:
    return given[name] if name in given else given[until_5_17]
