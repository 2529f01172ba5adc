"""The scheduler: it decides which sequences compute how many tokens in the next step.

Continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi", arXiv:2308.16369): a
step is a list of chunks, each the next tokens of one sequence that are not in the cache. A decode is a chunk of one
token, so one rule covers both.

- Running sequences come first, then waiting ones, each by priority and then in the order of arrival, as long as the
  limits on sequences, blocks and the step's tokens allow. Every running sequence gets a token at least.
- Blocks are allocated as tokens come, not reserved. When they run out, the last of the running sequences in that order
  frees all of its blocks and waits again; it keeps its tokens, and either computes their keys and values again or finds
  them in host memory (``host_space.py``).
- A sequence is admitted when its tokens fit and every running one could still take a block, so that it is not
  preempted in the next step. It begins with the blocks that are known to hold its first tokens (``prefix_cache.py``);
  its last token is always computed, since the next one follows from it, and so is a prompt whose log-probabilities are
  wanted.
- Priorities overtake, but not for ever: of a request before which W others waited when it came, once W +
  ``max_overtakes`` others were admitted, only those that came before it go first, and nobody takes its blocks for a
  later one.

There is no deadlock: the first running sequence can take the blocks of all others, and the engine refuses a sequence
that needs more blocks than exist. There is no starvation: by the last rule for any priorities, and where all are equal
the order of arrival is kept.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..kernels.runtime.checks import whole_number
from .allocator import BlockAllocator
from .host_space import HostSpace
from .prefix_cache import block_hash, root_hash
from .request import MAX_ANSWERS, SequenceState


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


class Way(IntEnum):
    """Where a block is copied: to host memory, within the cache, from host memory."""

    OUT = 0
    WITHIN = 1
    IN = 2


class Copy(NamedTuple):
    """A copy of a block's contents in every layer."""

    way: Way
    source: int
    target: int


class Scheduler:
    """Queues and the limits on sequences and tokens, over one :class:`BlockAllocator`.

    ``waiting`` and ``running`` are in the order in which they are served.

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
        max_overtakes: int = 64,
        host: HostSpace | None = None,
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
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.preemptions = 0
        self.kept_tokens = 0  # of preempted sequences, that were brought back from host memory
        self.shared_tokens = 0  # of admitted sequences, that were in the cache already
        self.weights = 0  # their version
        self._rows = list(range(max_num_seqs - 1, -1, -1))  # of the device's block table, those without a sequence
        self._host = HostSpace(0, lambda: 0.0) if host is None else host
        self._copies: list[Copy] = []
        self._prefix_caching = prefix_caching
        self._max_overtakes = whole_number("max_overtakes", max_overtakes, least=0)
        self._came = 0  # sequences so far
        self._admitted = 0
        self._queued: dict[float, SequenceState] = {}  # what waits, by its order
        self._oldest: list[tuple[int, float]] = []  # heap of (due, order), of which some wait no longer

    def add(self, sequence: SequenceState) -> None:
        """Queue ``sequence`` behind those of its priority."""
        sequence.order = self._came
        sequence.rank = sequence.request.priority
        sequence.due = self._admitted + len(self.waiting) + self._max_overtakes
        self._came += 1
        self._wait(sequence)

    def _wait(self, sequence: SequenceState) -> None:
        insort(self.waiting, sequence, key=_place)
        self._queued[sequence.order] = sequence
        heapq.heappush(self._oldest, (sequence.due, sequence.order))

    def _promote(self) -> None:
        """Put the one that is due first before all others, if it was overtaken often enough; what runs and came before
        it stays so.
        """
        while self._oldest[0][1] not in self._queued:
            heapq.heappop(self._oldest)
        oldest = self._queued[self._oldest[0][1]]
        if oldest.due <= self._admitted and oldest.rank > _FIRST:
            for sequence in (oldest, *(each for each in self.running if each.order < oldest.order)):
                sequence.rank = _FIRST
            self.waiting.sort(key=_place)
            self.running.sort(key=_place)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """``parent``, which runs, has just computed the prompt of both: the other answer begins where it is.

        The child runs at once, with the parent's blocks, if a row and a block for each that runs are free; else it
        waits, and finds the prompt's full blocks in the cache.
        """
        child.order, child.rank = parent.order + child.index / (2 * MAX_ANSWERS), parent.rank
        child.due = self._admitted + len(self.waiting) + self._max_overtakes
        child.hashes = list(parent.hashes)
        if len(self.running) == self.max_num_seqs or len(self.running) >= self.allocator.free_blocks:
            self._wait(child)
            return
        self.allocator.fork(parent.id, child.id)
        child.computed = child.most_computed = parent.computed
        child.published = parent.published
        child.row = self._rows.pop()
        insort(self.running, child, key=_place)
        self._admitted += 1

    def remove(self, sequence: SequenceState) -> None:
        """Drop ``sequence``, waiting or running, and free its blocks: it is complete or was cancelled."""
        if self._queued.pop(sequence.order, None) is sequence:
            self.waiting.remove(sequence)
            self._host.release(sequence.id)
        else:
            self.running.remove(sequence)
            self._leave(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with room in the cache for all of them; empty when nothing waits or runs.

        What :meth:`copies` returns afterwards has to be copied before they are computed, and before the next call.
        """
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            chunk = _next_chunk(sequence, budget - (len(self.running) - index - 1))  # a token for each behind it
            if self._make_room(chunk):
                chunks.append(chunk)
                budget -= chunk.length
                index += 1
        while budget and (admitted := self._admit()):
            chunk = _next_chunk(admitted, budget)
            fits = self._make_room(chunk)
            assert fits
            chunks.append(chunk)
            budget -= chunk.length
        assert chunks or not self.waiting, "requests wait and nothing runs: blocks are missing"
        return chunks

    def copies(self) -> list[Copy]:
        """The copies of blocks that the scheduled chunks rest on, in an order in which none overwrites another's
        source: blocks go to host memory before others take them, and come from there last.
        """
        within = [Copy(Way.WITHIN, *pair) for pair in self.allocator.copies]
        return sorted(self._copies + within, key=lambda copy: copy.way)

    def copied(self) -> None:
        """These copies were made."""
        self._copies, self.allocator.copies = [], []
        self._host.settle()

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
        """What was computed so far counts no more: running sequences wait again, and nothing of it is shared."""
        while self.running:
            self._stop_last(keep=False)
        self.weights += 1
        for sequence in self.waiting:
            sequence.hashes.clear()
            if not sequence.generated:
                sequence.prompt_scores.clear()
            sequence.kept = 0
            self._host.release(sequence.id)
        self.allocator.forget()

    def _stop_last(self, keep: bool = True) -> SequenceState:
        """Have the last running sequence wait, without its blocks; with ``keep``, their contents may go to the host."""
        last = self.running.pop()
        if keep and last.computed:
            blocks = self.allocator.table(last.id)[: self.allocator.blocks_for(last.computed)]
            out = self._host.keep(last.id, last.computed, blocks)
            last.kept = last.computed if out else 0
            self._copies += [Copy(Way.OUT, *pair) for pair in out]
        self._leave(last)
        last.computed = last.published = 0
        self._wait(last)
        return last

    def _leave(self, sequence: SequenceState) -> None:
        """What ran gives up its blocks and its row."""
        self.allocator.release(sequence.id)
        self._rows.append(sequence.row)

    def _admit(self) -> SequenceState | None:
        """Let the head of the queue run, if it may."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return None
        self._promote()
        sequence = self.waiting[0]
        shared: list[int] = []
        if self._prefix_caching:
            whole = sequence.skippable // self.allocator.block_size
            self._hash(sequence, whole)
            shared = self.allocator.known(sequence.hashes[:whole])
        if self.allocator.needed(len(sequence.tokens), shared) + len(self.running) > self.allocator.free_blocks:
            return None
        insort(self.running, self.waiting.pop(0), key=_place)
        del self._queued[sequence.order]
        self._admitted += 1
        sequence.row, sequence.sent = self._rows.pop(), 0
        self.allocator.share(sequence.id, shared)
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.allocator.block_size
        self.shared_tokens += sequence.computed
        if sequence.kept:
            self._bring(sequence, len(shared))
        return sequence

    def _bring(self, sequence: SequenceState, shared: int) -> None:
        """Bring back what a preempted sequence kept, but for its first ``shared`` blocks, which the cache still has."""
        fits = self.allocator.grow(sequence.id, sequence.kept)
        assert fits
        blocks = self.allocator.table(sequence.id)[shared : self.allocator.blocks_for(sequence.kept)]
        self._copies += [Copy(Way.IN, *pair) for pair in self._host.bring(sequence.id, shared, blocks)]
        self.kept_tokens += max(0, sequence.kept - sequence.computed)
        sequence.computed, sequence.kept = max(sequence.kept, sequence.computed), 0

    def _hash(self, sequence: SequenceState, blocks: int) -> None:
        """Have the hashes of a sequence's first ``blocks`` blocks."""
        size, hashes = self.allocator.block_size, sequence.hashes
        for index in range(len(hashes), blocks):
            before = hashes[-1] if hashes else root_hash(sequence.request.cache_salt, self.weights)
            hashes.append(block_hash(before, sequence.tokens[index * size : (index + 1) * size]))

    def _make_room(self, chunk: Chunk) -> bool:
        """Allocate blocks up to the end of ``chunk``, if need be the last one's; False if that is its own sequence."""
        copied = len(self.allocator.copies)
        while not self.allocator.grow(chunk.sequence.id, chunk.start + chunk.length, chunk.start):
            last = self._stop_last()
            self.preemptions += 1
            if last is chunk.sequence:
                return False
        if len(self.allocator.copies) > copied:  # the device's table still has the block that was shared
            chunk.sequence.sent = min(chunk.sequence.sent, chunk.start // self.allocator.block_size)
        return True


def _next_chunk(sequence: SequenceState, budget: int) -> Chunk:
    missing = len(sequence.tokens) - sequence.computed
    length = min(missing, budget)
    assert length > 0
    return Chunk(sequence, sequence.computed, length, samples=length == missing)


_FIRST = -math.inf  # the rank of what was overtaken often enough


def _place(sequence: SequenceState) -> tuple[float, float]:
    return sequence.rank, sequence.order
