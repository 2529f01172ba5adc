"""Which blocks hold which tokens: for requests that begin as others did.

A full block is known by a hash of its tokens and of everything before them, chained from block to block (the method of
vLLM's prefix cache): equal hashes stand for equal keys and values. The chain begins with the request's salt, so that
tenants with different ones share nothing, and with the version of the weights. Hashes are of 16 bytes of BLAKE2b: one
that meets another by chance, or by intent, is not to be expected.

Blocks that no sequence owns stay known until their memory is wanted: the longest unused goes first, and of one sequence
the last block before those that it follows.
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Sequence


def root_hash(salt: str, weights: int) -> bytes:
    """What the chain of a request with ``salt`` begins with, under the ``weights``-th weights of an engine."""
    return hashlib.blake2b(f"{weights}\0{salt}".encode(), digest_size=16).digest()


def block_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of ``tokens`` after the one with the hash ``before``, or the root."""
    return hashlib.blake2b(before + array.array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """The known blocks by their hash, and those of them that nobody owns."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    @property
    def idle_blocks(self) -> int:
        """Known blocks that nobody owns."""
        return len(self._idle)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain that is known."""
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
        """A sequence begins to own a block that :meth:`find` gave; others may own it already."""
        self._idle.pop(block, None)

    def add(self, digest: bytes, block: int) -> None:
        """A block that a sequence owns is full and computed. Another one with the same tokens stays the known one."""
        if digest not in self._blocks and block not in self._hashes:
            self._blocks[digest] = block
            self._hashes[block] = digest

    def leave(self, block: int) -> bool:
        """Nobody owns a block any longer; whether it is known, and so stays."""
        if block not in self._hashes:
            return False
        self._idle[block] = None
        return True

    def evict(self) -> int | None:
        """Forget the block that was not used for the longest time; None where every known one has an owner."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._hashes.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Forget every block; returns those that nobody owned."""
        idle = list(self._idle)
        self._blocks.clear()
        self._hashes.clear()
        self._idle.clear()
        return idle
