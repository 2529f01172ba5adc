"""The scheduler decides which sequences compute how many tokens in the next step.

Continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi", arXiv:2308.16369): a
step is a list of chunks, each the next tokens of one sequence that are not in the cache. A decode is a chunk of one
token, so one rule covers both.

- Running sequences come first, then waiting ones, within the limits on sequences, blocks and the step's tokens. Clients
  take turns; each has its sequences by priority and then in the order of arrival (``clients.py``). Every running
  sequence gets at least one token.
- Blocks are allocated as tokens are scheduled, not reserved. When they run out, the last running sequence in that order
  frees all of its blocks and waits again; it keeps its tokens, and later recomputes their keys and values or gets them
  back from host memory (``host_space.py``).
- A sequence is admitted when its tokens fit and every running one could still take a block, so that it is not
  preempted in the next step. It begins with the known blocks of its first tokens (``prefix_cache.py``). The step always
  computes its last token, since the next one follows from it, and all of a prompt with requested log-probabilities.

There is no deadlock: the first running sequence can take the blocks of all others, and the engine refuses a sequence
that needs more blocks than exist. There is no starvation. Suppose that some sequence never ended, and take the oldest.
Its client gets turns, since newcomers come behind it in the end; so the sequence runs, or enough of its client's later
ones overtake it, and it is then the client's first. Once all older ones have ended, it is the first of all.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import NamedTuple

from ..kernels.runtime.checks import whole_number
from .allocator import BlockAllocator
from .clients import Clients
from .host_space import HostSpace
from .prefix_cache import block_hash, root_hash
from .request import SequenceState


class Chunk(NamedTuple):
    """Tokens ``start`` to ``start + length`` of ``sequence``; ``samples`` if the next token follows from them."""

    sequence: SequenceState
    start: int
    length: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether this is the token that the last step generated, not prefill."""
        sequence = self.sequence
        return self.start >= sequence.most_computed and self.start >= len(sequence.request.prompt)

    @property
    def recomputed(self) -> int:
        """The number of its tokens that were in the cache before a preemption."""
        return max(0, min(self.start + self.length, self.sequence.most_computed) - self.start)


class Way(IntEnum):
    """The direction of a block copy: to host memory, within the cache, from host memory."""

    OUT = 0
    WITHIN = 1
    IN = 2


class Copy(NamedTuple):
    """A copy of a block's contents in every layer."""

    way: Way
    source: int
    target: int


class Scheduler:
    """The ``clients`` and the limits on sequences and tokens, over one :class:`BlockAllocator`.

    ``max_num_seqs`` bounds the running sequences, ``max_num_batched_tokens`` the tokens of a step; it is at least
    ``max_num_seqs``, so that each running sequence advances in every step. ``preemptions`` counts preempted sequences.
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
        self.clients = Clients(max_overtakes)
        self.preemptions = 0
        self.kept_tokens = 0  # tokens of preempted sequences brought back from host memory
        self.shared_tokens = 0  # tokens of admitted sequences found in the cache
        self.weights = 0  # the version of the weights
        self._rows = list(range(max_num_seqs - 1, -1, -1))  # free rows of the device's block table
        self._host = HostSpace(0, lambda: 0.0) if host is None else host
        self._copies: list[Copy] = []
        self._prefix_caching = prefix_caching

    @property
    def waiting(self) -> list[SequenceState]:
        """The waiting sequences, client after client."""
        return self.clients.waiting

    @property
    def running(self) -> list[SequenceState]:
        """The running sequences in the order in which they are served."""
        return self.clients.running

    def add(self, sequence: SequenceState) -> None:
        """Queue ``sequence`` after the others of its client and priority."""
        self.clients.add(sequence)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Start ``child``, another answer to the request of ``parent``, which has just computed their prompt.

        The child runs at once, with the parent's blocks, if a row and a block for each running sequence are free.
        Otherwise it waits, and later finds the prompt's full blocks in the cache.
        """
        self.clients.fork(parent, child)
        child.hashes = list(parent.hashes)
        running = self.clients.num_running
        if running == self.max_num_seqs or running >= self.allocator.free_blocks:
            self.clients.wait(child)
            return
        self.allocator.fork(parent.id, child.id)
        child.computed = child.most_computed = parent.computed
        child.published = parent.published
        child.row = self._rows.pop()
        self.clients.run(child)

    def remove(self, sequence: SequenceState) -> None:
        """Drop ``sequence``, waiting or running, and free its blocks: it is complete or was cancelled."""
        if sequence.queued:
            self._host.release(sequence.id)
        else:
            self._leave(sequence)
        self.clients.remove(sequence)

    def distrust(self, sequence: SequenceState) -> None:
        """Let no later sequence share what this one has computed, before :meth:`remove`."""
        self.allocator.distrust(sequence.id)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, with blocks allocated for all of them; empty if no sequence waits or runs.

        The caller must make the copies that :meth:`copies` then returns before it computes the chunks, and before the
        next call.
        """
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        index = 0
        running = self.running  # preemption takes the last one
        while index < len(running):
            sequence = running[index]
            start, end = sequence.computed, len(sequence.tokens)
            if end - start == 1 and self.allocator.take_slot(sequence.id, end):  # the usual case: a decode
                chunks.append(Chunk(sequence, start, 1, True))
                budget -= 1
                index += 1
                continue
            chunk = _next_chunk(sequence, budget - (len(running) - index - 1))  # leaves a token for each later one
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
        assert chunks or not self.clients.num_waiting, "requests wait and nothing runs: blocks are missing"
        return chunks

    def copies(self) -> list[Copy]:
        """The block copies that the scheduled chunks need, in an order in which none overwrites another's source:
        copies to host memory come first, copies from there last.
        """
        if not (self._copies or self.allocator.copies):
            return []
        within = [Copy(Way.WITHIN, *pair) for pair in self.allocator.copies]
        return sorted(self._copies + within, key=lambda copy: copy.way)

    def copied(self) -> None:
        """Record that these copies were made."""
        self._copies, self.allocator.copies = [], []
        self._host.settle()

    def advance(self, chunk: Chunk) -> None:
        """Record a computed chunk: others may share its full blocks from now on."""
        sequence = chunk.sequence
        sequence.computed = computed = chunk.start + chunk.length
        if computed > sequence.most_computed:
            sequence.most_computed = computed
        if self._prefix_caching:
            full = sequence.computed // self.allocator.block_size
            if full > sequence.published:
                self._hash(sequence, full)
                for index in range(sequence.published, full):
                    self.allocator.publish(sequence.id, index, sequence.hashes[index])
                sequence.published = full

    def new_weights(self) -> None:
        """Discard everything computed so far: running sequences wait again, and no block of it is shared."""
        while self.clients.num_running:
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
        """Preempt the last running sequence and free its blocks; with ``keep`` they may be copied to host memory."""
        last = self.clients.preempt()
        if keep and last.computed:
            blocks = self.allocator.table(last.id)[: self.allocator.blocks_for(last.computed)]
            out = self._host.keep(last.id, last.computed, blocks)
            last.kept = last.computed if out else 0
            self._copies += [Copy(Way.OUT, *pair) for pair in out]
        self._leave(last)
        last.computed = last.published = 0
        return last

    def _leave(self, sequence: SequenceState) -> None:
        """Free the blocks and the row of a running sequence."""
        self.allocator.release(sequence.id)
        self._rows.append(sequence.row)

    def _admit(self) -> SequenceState | None:
        """Admit the next of the waiting sequences if the limits allow."""
        if self.clients.num_running == self.max_num_seqs or (sequence := self.clients.head()) is None:
            return None
        shared: list[int] = []
        if self._prefix_caching:
            whole = sequence.skippable // self.allocator.block_size
            self._hash(sequence, whole)
            shared = self.allocator.known(sequence.hashes[:whole])
        running = self.clients.num_running
        if self.allocator.needed(len(sequence.tokens), shared) + running > self.allocator.free_blocks:
            return None
        self.clients.admit(sequence)
        sequence.row, sequence.sent = self._rows.pop(), 0
        self.allocator.share(sequence.id, shared)
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.allocator.block_size
        self.shared_tokens += sequence.computed
        if sequence.scheduled is None:
            sequence.scheduled, sequence.cached = time.monotonic(), sequence.computed
        if sequence.kept:
            self._bring(sequence, len(shared))
        return sequence

    def _bring(self, sequence: SequenceState, shared: int) -> None:
        """Bring back a preempted sequence's kept blocks, without the first ``shared`` ones, still in the cache."""
        fits = self.allocator.grow(sequence.id, sequence.kept)
        assert fits
        blocks = self.allocator.table(sequence.id)[shared : self.allocator.blocks_for(sequence.kept)]
        self._copies += [Copy(Way.IN, *pair) for pair in self._host.bring(sequence.id, shared, blocks)]
        self.kept_tokens += max(0, sequence.kept - sequence.computed)
        sequence.computed, sequence.kept = max(sequence.kept, sequence.computed), 0

    def _hash(self, sequence: SequenceState, blocks: int) -> None:
        """Compute the hashes of a sequence's first ``blocks`` blocks."""
        size, hashes = self.allocator.block_size, sequence.hashes
        for index in range(len(hashes), blocks):
            before = hashes[-1] if hashes else root_hash(sequence.request.cache_salt, self.weights)
            hashes.append(block_hash(before, sequence.tokens[index * size : (index + 1) * size]))

    def _make_room(self, chunk: Chunk) -> bool:
        """Allocate blocks up to the end of ``chunk``, preempting later sequences; False if its own had to yield."""
        copied = len(self.allocator.copies)
        while not self.allocator.grow(chunk.sequence.id, chunk.start + chunk.length, chunk.start):
            last = self._stop_last()
            self.preemptions += 1
            if last is chunk.sequence:
                return False
        if len(self.allocator.copies) > copied:  # the device's table still holds the shared block
            chunk.sequence.sent = min(chunk.sequence.sent, chunk.start // self.allocator.block_size)
        return True


def _next_chunk(sequence: SequenceState, budget: int) -> Chunk:
    missing = len(sequence.tokens) - sequence.computed
    length = min(missing, budget)
    assert length > 0
    return Chunk(sequence, sequence.computed, length, samples=length == missing)
