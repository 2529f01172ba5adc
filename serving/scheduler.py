"""The scheduler: it decides which sequences compute how many tokens in the next step.

Continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi", arXiv:2308.16369): a
step is a list of chunks, each the next tokens of one sequence that are not in the cache. A decode is a chunk of one
token, so one rule covers both.

- Running sequences come first, oldest first, then waiting ones in the order of arrival, as long as the limits on
  sequences, blocks and the step's tokens allow. At most one sequence, the youngest, gets only part of its tokens.
- Blocks are allocated as tokens come, not reserved. When they run out, the youngest running sequence frees all of its
  blocks and returns to the head of the queue; it keeps its tokens and computes their keys and values again.
- A sequence is admitted when its tokens fit and every running one could still take a block, so that it is not
  preempted in the next step.

There is no deadlock: the oldest running sequence can take the blocks of all others, and the engine refuses a sequence
that needs more blocks than exist. There is no starvation: the order of arrival is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..kernels.runtime.checks import whole_number
from .allocator import BlockAllocator
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

    def __init__(self, allocator: BlockAllocator, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
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
        while budget and self._admits():
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            chunk = _next_chunk(sequence, budget)
            fits = self._make_room(chunk)
            assert fits
            chunks.append(chunk)
            budget -= chunk.length
        assert chunks or not self.waiting, "requests wait and nothing runs: blocks are missing"
        return chunks

    def _admits(self) -> bool:
        """Whether the head of the queue may run."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return False
        needed = self.allocator.blocks_for(len(self.waiting[0].tokens))
        return needed + len(self.running) <= self.allocator.free_blocks

    def _make_room(self, chunk: Chunk) -> bool:
        """Allocate blocks up to the end of ``chunk``, if need be the youngest's; False if that is its own sequence."""
        while not self.allocator.grow(chunk.sequence.id, chunk.start + chunk.length):
            youngest = self.running.pop()
            self.allocator.release(youngest.id)
            youngest.computed = 0
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
