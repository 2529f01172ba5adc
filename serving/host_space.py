"""Blocks in host memory that hold the keys and values of preempted sequences.

A preempted sequence either recomputes its tokens later, or its keys and values move to host memory and back (Kwon et
al., arXiv:2309.06180, section 4.5). The engine takes the cheaper way by measured costs: the seconds of a token of
prefill, from its statistics, and the seconds of a block's round trip, measured when the memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..kernels.runtime.checks import whole_number


class HostSpace:
    """The free host blocks, and those that sequences own.

    Args:
        num_blocks: in host memory; 0: preempted sequences recompute everything.
        token_seconds: returns the seconds to recompute a token, 0 while that is unknown.

    ``block_seconds`` is the time of a block's round trip.
    """

    def __init__(self, num_blocks: int, token_seconds: Callable[[], float]) -> None:
        self.num_blocks = whole_number("num_host_blocks", num_blocks, least=0)
        self.block_seconds = 0.0
        self._token_seconds = token_seconds
        self._free = list(range(num_blocks))
        self._leaving: list[int] = []  # freed after the next step's copies, which read them
        self._held: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free) + len(self._leaving)

    def settle(self) -> None:
        """Record that the last step's copies were made."""
        self._free += self._leaving
        self._leaving = []

    def keep(self, sequence: int, tokens: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Keep a sequence's ``blocks`` with its ``tokens`` if that fits and pays; return copies (block, host block)."""
        again = tokens * self._token_seconds()
        if not blocks or len(blocks) > len(self._free) or again <= len(blocks) * self.block_seconds:
            return []
        self._held[sequence] = [self._free.pop() for _ in blocks]
        return list(zip(blocks, self._held[sequence]))

    def bring(self, sequence: int, first: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The copies (host block, block) that bring a sequence's kept blocks back, from its ``first``-th one on."""
        copies = list(zip(self._held[sequence][first:], blocks))
        self.release(sequence)
        return copies

    def release(self, sequence: int) -> None:
        """Drop a sequence's host blocks, if it has any."""
        self._leaving += self._held.pop(sequence, [])
