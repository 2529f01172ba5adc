"""The prefix cache: which blocks hold which tokens, for requests with a common beginning.

A full block is known by a hash of its tokens and of everything before them, chained from block to block (the method of
vLLM's prefix cache): equal hashes stand for equal keys and values. The chain begins with the request's salt, so that
tenants with different ones share nothing, and with the version of the weights. Hashes are 16 bytes of BLAKE2b, so
collisions, accidental or intended, are not to be expected.

Blocks that no sequence owns stay known until their memory is needed: the least recently used one is evicted first, and
of one sequence the last block before the earlier ones.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Sequence


def root_hash(salt: str, weights: int) -> bytes:
    """The root of the hash chain of a request with ``salt``, under the ``weights``-th weights of an engine."""
    return hashlib.blake2b(f"{weights}\0{salt}".encode(), digest_size=16).digest()


def block_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of ``tokens`` after the one with the hash ``before``, or the root."""
    return hashlib.blake2b(before + array.array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """The known blocks by their hash, and those among them without an owner."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def idle_blocks(self) -> int:
        """The known blocks without an owner."""
        return len(self._idle)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain."""
        found: list[int] = []
        for each in hashes:
            block = self._blocks.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def take(self, block: int) -> None:
        """Record that a sequence owns a block from :meth:`find`; others may own it already."""
        self._idle.pop(block, None)

    def add(self, digest: bytes, block: int) -> None:
        """Record a full, computed block of a sequence. If a block with the same tokens is known, that one stays."""
        if digest not in self._blocks and block not in self._hashes:
            self._blocks[digest] = block
            self._hashes[block] = digest

    def leave(self, block: int) -> bool:
        """Record that a block has no owner any more; return whether it is known and therefore stays."""
        if block not in self._hashes:
            return False
        self._idle[block] = None
        return True

    def forget(self, block: int) -> None:
        """Let no later sequence find a block that has an owner."""
        if (digest := self._hashes.pop(block, None)) is not None:
            del self._blocks[digest]

    def evict(self) -> int | None:
        """Forget and return the least recently used block; None if every known block has an owner."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._hashes.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Forget every block; return those without an owner."""
        idle = list(self._idle)
        self._blocks.clear()
        self._hashes.clear()
        self._idle.clear()
        return idle
