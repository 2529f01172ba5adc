"""Scheduler, allocator and prefix cache against a model of what the cache's slots hold, without a transformer.

Hypothesis adds, cancels, steps, fails, preempts and changes weights in any order. A slot holds everything that its keys
and values follow from: weights, salt, and all tokens up to its own. So a block that is shared wrongly, written twice,
given away while somebody reads it, or found again under other weights shows as a slot with the wrong content.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardfuse.serving import BlockAllocator, Request, Scheduler
from shardfuse.serving.prefix_cache import block_hash, root_hash
from shardfuse.serving.request import SequenceState
from shardfuse.serving.scheduler import Chunk

LONGEST = 24  # tokens of a prompt, and of an answer
PICK = st.integers(0, 99)  # of a list: modulo its length


class Content(NamedTuple):
    weights: int
    salt: str
    tokens: tuple[int, ...]


class Bookkeeping(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 6),
        max_num_seqs=st.integers(1, 5),
        more_tokens=st.integers(0, 20),
        max_overtakes=st.integers(0, 3),
        prefix_caching=st.sampled_from([True, True, True, False]),
        priorities=st.booleans(),
        clients=st.sampled_from([1, 1, 3]),
    )
    def begin(
        self,
        block_size: int,
        spare: int,
        max_num_seqs: int,
        more_tokens: int,
        max_overtakes: int,
        prefix_caching: bool,
        priorities: bool,
        clients: int,
    ) -> None:
        longest = -(-(2 * LONGEST - 1) // block_size)
        self.allocator = BlockAllocator(longest + spare, block_size)
        self.max_overtakes, self.priorities, self.clients = max_overtakes, priorities, clients
        self.scheduler = Scheduler(
            self.allocator,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more_tokens,
            prefix_caching=prefix_caching,
            max_overtakes=max_overtakes,
        )
        self.live: list[SequenceState] = []  # in the order in which they came
        self.slots: dict[tuple[int, int], Content] = {}  # (block, offset) -> what it holds
        self.weights = self.came = self.peak = 0
        self.left: dict[int, int] = {}  # how many may be admitted before one that waits, until only earlier ones may

    # --- what happens

    @rule(
        prompt=st.integers(1, LONGEST),
        new=st.sampled_from([1, 2, 5, LONGEST]),
        first=st.integers(0, 1),
        salt=st.sampled_from(["", "", "b"]),
        priority=st.integers(-1, 1),
        times=st.integers(1, 3),
        client=st.integers(0, 2),
    )
    def add(self, prompt: int, new: int, first: int, salt: str, priority: int, times: int, client: int = 0) -> None:
        """Prompts differ in their first token and their length alone, so that most have a beginning in common."""
        for _ in range(times):
            tokens = [first] + [0] * (prompt - 1)
            name = str(client % self.clients)
            request = Request(
                tokens, max_new_tokens=new, cache_salt=salt, priority=priority * self.priorities, client=name
            )
            sequence = SequenceState(self.came, request, tokens)
            self.came += 1
            self.left[sequence.id] = len(_of(name, self.scheduler.waiting)) + self.max_overtakes
            self.scheduler.add(sequence)
            self.live.append(sequence)

    @precondition(lambda self: self.priorities and self.scheduler.waiting)
    @rule(times=st.integers(2, 12), prompt=st.sampled_from([1, LONGEST]))
    def overtake(self, times: int, prompt: int) -> None:
        """Short requests of the best priority come one by one, while others wait."""
        for _ in range(times):
            self.add(prompt=prompt, new=1, first=0, salt="", priority=-1, times=1)
            self.step(times=1, token=0)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        self._end(self.live[pick % len(self.live)])

    @rule(times=st.sampled_from([1, 1, 2, 9]), token=st.integers(0, 1))
    def step(self, times: int, token: int) -> None:
        for _ in range(times):
            for chunk in self._computed():
                self._advance(chunk, token)

    @rule()
    def step_that_fails(self) -> None:
        """The model has written to the cache, and its results are lost."""
        self._computed()

    @rule(pick=PICK)
    def step_in_which_one_fails(self, pick: int) -> None:
        chunks = self._computed()
        for index, chunk in enumerate(chunks):
            if index == pick % len(chunks):
                self._end(chunk.sequence)
            else:
                self._advance(chunk, 0)

    @rule()
    def new_weights(self) -> None:
        self.scheduler.new_weights()
        self.weights += 1

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.scheduler._stop_last()

    def teardown(self) -> None:
        """Whatever happened, all that live are served, in as many steps as tests/fuzz/test_load.py derives."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range((len(self.live) + 1) ** 2 * (self.scheduler.max_num_seqs + 1) * LONGEST * 2):
            if not self.live:
                break
            self.step(times=1, token=0)
            self.books_balance()
        assert not self.live, "requests starve"
        assert not self.scheduler.clients._clients
        assert self.allocator.used_blocks == 0
        self.allocator.forget()
        assert sorted(self.allocator._free) == list(range(self.allocator.num_blocks))

    # --- what it means

    def _computed(self) -> list[Chunk]:
        """The chunks of a step, checked, after the model has written and read the cache."""
        scheduler, allocator = self.scheduler, self.allocator
        before = set(scheduler.running)
        chunks = scheduler.schedule()
        assert bool(chunks) == bool(self.live), "requests wait, and none runs"
        assert sorted(chunk.sequence.id for chunk in chunks) == sorted(each.id for each in scheduler.running)
        assert all(chunk.length > 0 for chunk in chunks)
        assert len(chunks) <= scheduler.max_num_seqs
        assert sum(chunk.length for chunk in chunks) <= scheduler.max_num_batched_tokens
        for chunk in chunks:
            end = chunk.start + chunk.length
            assert chunk.start == chunk.sequence.computed
            assert chunk.samples == (end == len(chunk.sequence.tokens))
            assert len(allocator.table(chunk.sequence.id)) == allocator.blocks_for(end)
        self._check_overtaking(before)
        written = [self._slot(chunk, position) for chunk in chunks for position in self._positions(chunk)]
        assert len(set(written)) == len(written)
        for chunk in chunks:
            for position in self._positions(chunk):
                self.slots[self._slot(chunk, position)] = self._content(chunk, position)
        for chunk in chunks:  # after all writes: none may have hit what others read
            for position in range(chunk.start + chunk.length):
                assert self.slots[self._slot(chunk, position)] == self._content(chunk, position)
        return chunks

    def _check_overtaking(self, before: set[SequenceState]) -> None:
        """Once as many of its client were admitted as may be before one that waits, only those before it are."""
        for waiting in self.scheduler.waiting:
            if waiting not in before:  # else it was preempted in this very step
                running = _of(waiting.request.client, self.scheduler.running)
                new = [each for each in running if each not in before]
                late = [each for each in new if each.id > waiting.id]
                assert self.left[waiting.id] > 0 or not late, "overtaken too often"
                self.left[waiting.id] -= len(new)

    @staticmethod
    def _positions(chunk: Chunk) -> range:
        return range(chunk.start, chunk.start + chunk.length)

    def _slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        size = self.allocator.block_size
        return self.allocator.table(chunk.sequence.id)[position // size], position % size

    def _content(self, chunk: Chunk, position: int) -> Content:
        sequence = chunk.sequence
        return Content(self.weights, sequence.request.cache_salt, tuple(sequence.tokens[: position + 1]))

    def _advance(self, chunk: Chunk, token: int) -> None:
        sequence = chunk.sequence
        self.scheduler.advance(chunk)
        if chunk.samples:
            sequence.tokens.append(token)
            if sequence.finish():
                self._end(sequence)

    def _end(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)

    # --- what always holds

    @invariant()
    def books_balance(self) -> None:
        allocator = self.allocator
        tables: dict[int, list[int]] = allocator._tables
        owners = Counter(block for table in tables.values() for block in table)
        assert [owners[block] for block in range(allocator.num_blocks)] == allocator._owners
        assert all(len(set(table)) == len(table) for table in tables.values())
        free, idle, owned = allocator._free, list(allocator._prefixes._idle), list(owners)
        assert sorted([*free, *idle, *owned]) == list(range(allocator.num_blocks)), "a block is lost, or in two places"
        assert allocator.free_blocks == len(free) + len(idle)
        assert allocator.used_blocks == len(owned)
        assert allocator.used_blocks + allocator.free_blocks == allocator.num_blocks
        self.peak = max(self.peak, allocator.used_blocks)
        assert allocator.peak_blocks >= self.peak
        last = {table[-1]: number for number, table in tables.items() if table}  # a shared block counts once
        held = [len(tables[number]) * allocator.block_size - allocator._tokens[number] for number in last.values()]
        assert allocator.unused_slots == sum(held)
        assert all(0 <= each < allocator.block_size for each in held)

    @invariant()
    def known_blocks_hold_what_their_hash_says(self) -> None:
        size, prefixes = self.allocator.block_size, self.allocator._prefixes
        assert {block: digest for digest, block in prefixes._blocks.items()} == prefixes._hashes
        assert prefixes._hashes.keys().isdisjoint(self.allocator._free)
        assert prefixes._idle.keys() <= prefixes._hashes.keys()
        for block, digest in prefixes._hashes.items():
            held = self.slots[block, size - 1]
            assert held.weights == self.weights, "a block of weights that are gone"
            assert digest == _digest(held, size)

    @invariant()
    def each_request_is_in_one_queue_in_order(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert sorted(each.id for each in [*running, *waiting]) == [each.id for each in self.live]
        assert self.allocator._tables.keys() == {each.id for each in running}
        assert all(not each.computed for each in waiting)
        for name in map(str, range(self.clients)):
            for queue in (running, waiting):
                places = [(each.rank, each.order) for each in _of(name, queue)]
                assert places == sorted(places)
        rounds = [len(_of(each.request.client, running[:index])) for index, each in enumerate(running)]
        assert rounds == sorted(rounds), "a client that runs more does not give way first"
        clients = self.scheduler.clients
        assert (clients.num_running, clients.num_waiting, clients.answers) == (len(running), len(waiting), len(waiting))
        assert sum(map(_left, waiting)) == clients.tokens
        assert len({each.request.client for each in waiting}) == clients.queueing
        if self.clients == 1 and not self.priorities:
            assert [each.id for each in [*running, *waiting]] == [each.id for each in self.live]


def _of(client: str, sequences: list[SequenceState]) -> list[SequenceState]:
    return [each for each in sequences if each.request.client == client]


def _left(sequence: SequenceState) -> int:
    return len(sequence.request.prompt) + sequence.request.max_new_tokens


@functools.cache
def _digest(held: Content, size: int) -> bytes:
    """The hash of a block whose last slot holds this."""
    digest = root_hash(held.salt, held.weights)
    for begin in range(0, len(held.tokens), size):
        digest = block_hash(digest, held.tokens[begin : begin + size])
    return digest


TestBookkeeping: Any = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=100, stateful_step_count=40)
