"""What an audit counts: calls of collectives, with their payload and what a rank sends of it.

The payload of a collective is the size of the whole tensor, the same on all ranks: the sum of an all-reduce, the result
of an all-gather, the input of a reduce-scatter. In rings over R ranks each rank sends

    all-reduce                                 2 (R - 1) / R  of the payload
    all-gather, reduce-scatter, all-to-all     (R - 1) / R
    broadcast, reduce, send                    1

so an all-reduce is a reduce-scatter and an all-gather of the same payload (Thakur et al., IJHPCA 19(1), 2005).
:func:`one_way` counts in these halves. :mod:`forms` has the closed forms to compare the counts with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
TORCH = "torch"  # the site of the collectives of torch's engines


@dataclass(frozen=True)
class Entry:
    """Calls of one kind at one site of one group in one step."""

    step: int
    group: str  # the mesh's dimensions in which its ranks differ: "dp", "dp_replicate x dp"
    ranks: int
    kind: str
    site: str
    calls: int
    payload: int  # bytes of all calls

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        return sent(self.kind, self.payload, self.ranks)


def sent(kind: str, payload: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends in a ``kind`` with ``payload`` bytes."""
    return _ROUNDS[kind] * (ranks - 1) / ranks * payload if kind in _ROUNDS else float(payload)


def one_way(entries: Iterable[Entry]) -> int:
    """The payload in halves, in bytes: an all-reduce counts as its reduce-scatter and its all-gather."""
    return sum(entry.payload * (2 if entry.kind == "all_reduce" else 1) for entry in entries)
