"""Where preempted sequences may keep their keys and values: blocks in host memory.

A sequence that gives up its blocks either computes its tokens again later or takes its keys and values along and brings
them back (Kwon et al., arXiv:2309.06180, section 4.5). The cheaper way is taken, by what both have cost so far: seconds
for a token of prefill, from the engine's statistics, and seconds for a block to go and come back, measured when the
memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..kernels.runtime.checks import whole_number


class HostSpace:
    """The free host blocks, and those that sequences have.

    Args:
        num_blocks: in host memory; 0: everything is computed again.
        token_seconds: returns how long a token takes to be computed again, 0 while that is unknown.

    ``block_seconds`` is how long a block takes there and back.
    """

    def __init__(self, num_blocks: int, token_seconds: Callable[[], float]) -> None:
        self.num_blocks = whole_number("num_host_blocks", num_blocks, least=0)
        self.block_seconds = 0.0
        self._token_seconds = token_seconds
        self._free = list(range(num_blocks))
        self._leaving: list[int] = []  # free after the next step's copies, which read them
        self._held: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free) + len(self._leaving)

    def settle(self) -> None:
        """The copies of the last step were made."""
        self._free += self._leaving
        self._leaving = []

    def keep(self, sequence: int, tokens: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Keep a sequence's ``blocks`` with its ``tokens`` if there is room and it pays: copies (block, host block)."""
        again = tokens * self._token_seconds()
        if not blocks or len(blocks) > len(self._free) or again <= len(blocks) * self.block_seconds:
            return []
        self._held[sequence] = [self._free.pop() for _ in blocks]
        return list(zip(blocks, self._held[sequence]))

    def bring(self, sequence: int, first: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Copies (host block, block) that bring back what a sequence keeps from its ``first``-th block on."""
        copies = list(zip(self._held[sequence][first:], blocks))
        self.release(sequence)
        return copies

    def release(self, sequence: int) -> None:
        """A sequence keeps nothing here any longer; perhaps it did not."""
        self._leaving += self._held.pop(sequence, [])
