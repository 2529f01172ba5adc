"""The scheduler: it decides which sequences compute how many tokens in the next step.

Continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi", arXiv:2308.16369): a
step is a list of chunks, each the next tokens of one sequence that are not in the cache. A decode is a chunk of one
token, so one rule covers both.

- Running sequences come first, oldest first, then waiting ones in the order of arrival, as long as the limits on
  sequences, blocks and the step's tokens allow. At most one sequence, the youngest, gets only part of its tokens.
- Blocks are allocated as tokens come, not reserved. When they run out, the youngest running sequence frees all of its
  blocks and returns to the head of the queue; it keeps its tokens and computes their keys and values again.
- A sequence is admitted when its tokens fit and every running one could still take a block, so that it is not
  preempted in the next step. It begins with the blocks that are known to hold its first tokens (``prefix_cache.py``);
  its last token is always computed, since the next one follows from it.

There is no deadlock: the oldest running sequence can take the blocks of all others, and the engine refuses a sequence
that needs more blocks than exist. There is no starvation: the order of arrival is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..kernels.runtime.checks import whole_number
from .allocator import BlockAllocator
from .prefix_cache import block_hash, root_hash
from .request import SequenceState


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + length`` of ``sequence``; ``samples`` if the next token follows from them."""

    sequence: SequenceState
    start: int
    length: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether this is the token that the last step generated, not prefill."""
        sequence = self.sequence
        return self.start >= max(len(sequence.request.prompt), sequence.most_computed)

    @property
    def recomputed(self) -> int:
        """The number of its tokens that were in the cache before a preemption."""
        return max(0, min(self.start + self.length, self.sequence.most_computed) - self.start)


class Scheduler:
    """Queues and the limits on sequences and tokens, over one :class:`BlockAllocator`.

    ``max_num_seqs`` bounds the running sequences, ``max_num_batched_tokens`` the tokens of a step; it is at least
    ``max_num_seqs``, so that each running sequence advances in every step. ``preemptions`` counts how often blocks ran
    out.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        whole_number("max_num_seqs", max_num_seqs)
        whole_number("max_num_batched_tokens", max_num_batched_tokens)
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than max_num_seqs={max_num_seqs}: each "
                "running request needs one token a step; raise the former or lower the latter"
            )
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of admission
        self.preemptions = 0
        self.shared_tokens = 0  # of admitted sequences, that were in the cache already
        self.weights = 0  # their version
        self._prefix_caching = prefix_caching

    def add(self, sequence: SequenceState) -> None:
        """Queue ``sequence`` behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Drop ``sequence``, waiting or running, and free its blocks: it is complete or was cancelled."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.allocator.release(sequence.id)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with room in the cache for all of them; empty when nothing waits or runs."""
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            chunk = _next_chunk(sequence, budget)
            if self._make_room(chunk):
                chunks.append(chunk)
                budget -= chunk.length
                index += 1
        while budget and self._admit():
            sequence = self.running[-1]
            chunk = _next_chunk(sequence, budget)
            fits = self._make_room(chunk)
            assert fits
            chunks.append(chunk)
            budget -= chunk.length
        assert chunks or not self.waiting, "requests wait and nothing runs: blocks are missing"
        return chunks

    def advance(self, chunk: Chunk) -> None:
        """A chunk was computed: its full blocks may be shared from now on."""
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.length
        sequence.most_computed = max(sequence.most_computed, sequence.computed)
        if self._prefix_caching:
            full = sequence.computed // self.allocator.block_size
            self._hash(sequence, full)
            for index in range(sequence.published, full):
                self.allocator.publish(sequence.id, index, sequence.hashes[index])
            sequence.published = full

    def new_weights(self) -> None:
        """From now on nothing is shared that earlier weights computed. Nothing may be running."""
        assert not self.running
        self.weights += 1
        for sequence in self.waiting:
            sequence.hashes.clear()
        self.allocator.forget()

    def _admit(self) -> bool:
        """Let the head of the queue run, if it may."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return False
        sequence = self.waiting[0]
        shared: list[int] = []
        if self._prefix_caching:
            whole = (len(sequence.tokens) - 1) // self.allocator.block_size
            self._hash(sequence, whole)
            shared = self.allocator.known(sequence.hashes[:whole])
        if self.allocator.needed(len(sequence.tokens), shared) + len(self.running) > self.allocator.free_blocks:
            return False
        self.running.append(self.waiting.popleft())
        self.allocator.share(sequence.id, shared)
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.allocator.block_size
        self.shared_tokens += sequence.computed
        return True

    def _hash(self, sequence: SequenceState, blocks: int) -> None:
        """Have the hashes of a sequence's first ``blocks`` blocks."""
        size, hashes = self.allocator.block_size, sequence.hashes
        for index in range(len(hashes), blocks):
            before = hashes[-1] if hashes else root_hash(sequence.request.cache_salt, self.weights)
            hashes.append(block_hash(before, sequence.tokens[index * size : (index + 1) * size]))

    def _make_room(self, chunk: Chunk) -> bool:
        """Allocate blocks up to the end of ``chunk``, if need be the youngest's; False if that is its own sequence."""
        while not self.allocator.grow(chunk.sequence.id, chunk.start + chunk.length):
            youngest = self.running.pop()
            self.allocator.release(youngest.id)
            youngest.computed = youngest.published = 0
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is chunk.sequence:
                return False
        return True


def _next_chunk(sequence: SequenceState, budget: int) -> Chunk:
    missing = len(sequence.tokens) - sequence.computed
    length = min(missing, budget)
    assert length > 0
    return Chunk(sequence, sequence.computed, length, samples=length == missing)
