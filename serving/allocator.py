"""Assigns the blocks of the paged KV cache to sequences."""

from __future__ import annotations

from ..kernels.runtime.checks import whole_number


class BlockAllocator:
    """A free list of blocks, and the block table of each sequence.

    A sequence's blocks grow one at a time with its tokens, so only the last one can be partly empty: a sequence wastes
    less than one block (Kwon et al., "PagedAttention", arXiv:2309.06180, section 4).

    ``peak_blocks`` is the largest number of blocks in use at once.

    Raises ValueError unless both sizes are at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = whole_number("BlockAllocator: num_blocks", num_blocks)
        self.block_size = whole_number("BlockAllocator: block_size", block_size)
        self.peak_blocks = 0
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: the last block freed is the first one reused
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def used_slots(self) -> int:
        """Tokens that all sequences together have room for."""
        return sum(self._tokens.values())

    @property
    def allocated_slots(self) -> int:
        """Token slots of all blocks in use."""
        return self.used_blocks * self.block_size

    def grow(self, sequence: int, tokens: int) -> bool:
        """Extend ``sequence`` to room for ``tokens`` tokens in all; False, changing nothing, if blocks run out."""
        table = self._tables.get(sequence, [])
        missing = self.blocks_for(tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            table.append(self._free.pop())
        self._tables[sequence] = table
        self._tokens[sequence] = max(tokens, self._tokens.get(sequence, 0))
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
        return True

    def table(self, sequence: int) -> list[int]:
        """The blocks of ``sequence`` in order of its tokens; ``grow`` appends to this very list."""
        return self._tables[sequence]

    def release(self, sequence: int) -> None:
        """Free every block of ``sequence``; it may have none."""
        self._free += reversed(self._tables.pop(sequence, []))
        self._tokens.pop(sequence, None)
