"""The block tables and slots that the layers of a forward pass share; the first layer computes them from transformers'
indices.

transformers gives the place of every token that a step reads or writes. Tokens of a page are consecutive, so a block
table is every P-th read index, divided by P. A pass without earlier tokens has no read indices; it then reads the
places that it writes.

A sliding layer keeps a ring of ``window`` tokens, whose order in memory is not the order of the sequence: its tables
hold a page of one token for each. If sequences have one query each, a query overwrites the token that left its window,
and the kernel reads the ring in place. A chunk of several queries overwrites tokens that its first queries still see:
transformers copies those keys before it writes, and tables refer to the copy.

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
    """The places from which a group of layers reads keys and values in a step."""

    PAGES = "in the cache's pages"
    RING = "in the cache, token by token"
    FRESH = "in this step's keys and values"
    COPIED = "in the copy that transformers makes"


@dataclass(frozen=True)
class Tables:
    """A step for the layers of one group."""

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
    step: Step | None = None  # the pass of this thread


_here = _Here()


def current() -> Step | None:
    """The step that this thread computes; None outside of continuous batching."""
    return _here.step


def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """The hook before an enabled model's forward pass."""
    _here.step = Step() if kwargs.get("cache") is not None else None


def end(module: Any, args: Any, output: Any) -> None:
    """The hook after an enabled model's forward pass, also after an error."""
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

    Columns past a sequence's end hold any valid index.
    """
    steps = torch.arange(0, max(longest, 1), stride, device=starts.device)
    at = starts[:-1].unsqueeze(1) + steps
    return at if index is None else _take(index, at)


def _take(index: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return index[at.clamp(max=index.shape[0] - 1)]


def _of_type(value: Any, layer: LayerPages) -> Any:
    """Up to 5.18 transformers has one value for all layers if all are of one type."""
    return value[layer.layer_type] if isinstance(value, dict) else value


def _named(given: dict[str, Any], name: str, until_5_17: str) -> Any:
    return given[name] if name in given else given[until_5_17]
