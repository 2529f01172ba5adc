"""Assign the blocks of the paged KV cache to sequences."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from ..kernels.runtime.checks import whole_number
from .prefix_cache import PrefixCache


class BlockAllocator:
    """A free list of blocks, the block table of each sequence, and the blocks that sequences share.

    A sequence's blocks grow one at a time with its tokens, so only the last one can be partly empty: a sequence wastes
    less than one block (Kwon et al., "PagedAttention", arXiv:2309.06180, section 4). Sequences share full blocks, which
    no sequence writes to. The answers of one request also share the last block of the prompt; the next answer to write
    to it copies it first (:meth:`grow`).

    ``peak_blocks`` is the largest number of blocks that sequences owned at once, ``unused_slots`` the number of token
    slots that they own and that hold no token; those of shared blocks count once. ``copies`` are the pairs (block, its
    copy) that the scheduler must have copied.

    Raises ValueError unless both sizes are at least 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = whole_number("BlockAllocator: num_blocks", num_blocks)
        self.block_size = whole_number("BlockAllocator: block_size", block_size)
        self.peak_blocks = self.unused_slots = 0
        self.copies: list[tuple[int, int]] = []
        self._free = list(range(self.num_blocks))  # a heap: blocks in use lie together, for attention on a CPU
        self._owners = [0] * self.num_blocks  # sequences that have the block in their tables
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, int] = {}
        self._prefixes = PrefixCache()

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free) + self._prefixes.idle_blocks

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def allocated_slots(self) -> int:
        """Token slots of all blocks in use."""
        return self.used_blocks * self.block_size

    def known(self, hashes: Sequence[bytes]) -> list[int]:
        """The known blocks that a new sequence with these ``hashes`` could share."""
        return self._prefixes.find(hashes)

    def needed(self, tokens: int, shared: Sequence[int]) -> int:
        """The number of free blocks, ``shared`` ones among them, that a new sequence of ``tokens`` tokens takes."""
        owned = sum(not self._prefixes.is_idle(block) for block in shared)
        return self.blocks_for(tokens) - owned

    def share(self, sequence: int, blocks: Sequence[int]) -> None:
        """Begin a sequence with full ``blocks``, of :meth:`known`."""
        assert sequence not in self._tables, "a sequence that has blocks already"
        for block in blocks:
            self._prefixes.take(block)
            self._owners[block] += 1
        self._tables[sequence] = list(blocks)
        self._tokens[sequence] = len(blocks) * self.block_size
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)

    def fork(self, parent: int, child: int) -> None:
        """Begin the sequence ``child`` with all blocks of ``parent``, the last one included."""
        for block in self._tables[parent]:
            self._owners[block] += 1
        self._tables[child], self._tokens[child] = list(self._tables[parent]), self._tokens[parent]

    def take_slot(self, sequence: int, tokens: int) -> bool:
        """:meth:`grow` by the last of ``tokens`` tokens, where the last block has room for it and is not shared."""
        table = self._tables[sequence]
        if tokens > len(table) * self.block_size or self._owners[table[-1]] > 1:
            return False
        before = self._tokens[sequence]
        if tokens > before:
            self._tokens[sequence] = tokens
            self.unused_slots -= tokens - before
        return True

    def grow(self, sequence: int, tokens: int, first: int | None = None) -> bool:
        """Give ``sequence`` room for ``tokens`` tokens in all; False, changing nothing, if blocks run out.

        The sequence is about to write tokens from ``first`` on. If another sequence shares that block, this one gets a
        new block instead, and ``copies`` names the block to copy into it before the write.
        """
        table, before = self._tables.get(sequence, []), self._tokens.get(sequence, 0)
        missing = max(0, self.blocks_for(tokens) - len(table))
        index = len(table) if first is None else first // self.block_size
        shared = index < len(table) and self._owners[table[index]] > 1
        if missing + shared > self.free_blocks:
            return False
        after = max(tokens, before)
        self.unused_slots += missing * self.block_size - (after - before)
        if shared:  # the slots after its tokens are the others' as well
            self.unused_slots += len(table) * self.block_size - before
            self._owners[table[index]] -= 1
            self.copies.append((table[index], self._new_block()))
            table[index] = self.copies[-1][1]
        table += [self._new_block() for _ in range(missing)]
        self._tables[sequence] = table
        self._tokens[sequence] = after
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
        return True

    def _new_block(self) -> int:
        block = heappop(self._free) if self._free else self._prefixes.evict()
        assert block is not None
        self._owners[block] = 1
        return block

    def publish(self, sequence: int, index: int, digest: bytes) -> None:
        """Let others share the ``index``-th block of ``sequence``, which is full and computed, by its hash."""
        self._prefixes.add(digest, self._tables[sequence][index])

    def table(self, sequence: int) -> list[int]:
        """The blocks of ``sequence`` in order of its tokens; ``grow`` appends to this very list."""
        return self._tables[sequence]

    def release(self, sequence: int) -> None:
        """Give up every block of ``sequence``; it may have none."""
        table = self._tables.pop(sequence, [])
        if table and self._owners[table[-1]] == 1:
            self.unused_slots -= len(table) * self.block_size - self._tokens[sequence]
        for block in reversed(table):
            self._owners[block] -= 1
            if not self._owners[block] and not self._prefixes.leave(block):
                heappush(self._free, block)
        self._tokens.pop(sequence, None)

    def distrust(self, sequence: int) -> None:
        """Let no later sequence share the blocks of ``sequence``; it may have none."""
        for block in self._tables.get(sequence, ()):
            self._prefixes.forget(block)

    def forget(self) -> None:
        """Let no later sequence share the blocks computed so far."""
        self._free = sorted(self._free + self._prefixes.clear())
