"""Who owns which block of the paged KV cache."""

from __future__ import annotations


class BlockAllocator:
    """A free list of blocks, and the block table of each sequence.

    A sequence's blocks grow one at a time with its tokens, so only the last one can be partly empty: what is wasted is
    less than a block per sequence (Kwon et al., "PagedAttention", arXiv:2309.06180, section 4).

    ``peak_blocks`` is the most that were ever in use at once.

    Raises ValueError unless both sizes are at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"BlockAllocator: {name}={value}: expected at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.peak_blocks = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was freed last is used first
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def used_slots(self) -> int:
        """Tokens that all sequences together have asked room for."""
        return sum(self._tokens.values())

    @property
    def allocated_slots(self) -> int:
        """Token slots of all blocks in use."""
        return self.used_blocks * self.block_size

    def grow(self, sequence: int, tokens: int) -> bool:
        """Give ``sequence`` room for ``tokens`` tokens in all; False, and nothing changes, where blocks are short."""
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
        """The blocks of ``sequence`` in order of its tokens; the list itself, which ``grow`` appends to."""
        return self._tables[sequence]

    def release(self, sequence: int) -> None:
        """Take back every block of ``sequence``; nothing happens where it has none."""
        self._free += reversed(self._tables.pop(sequence, []))
        self._tokens.pop(sequence, None)
