"""The block allocator and the scheduler, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfuse.serving import BlockAllocator, Request, Scheduler
from shardfuse.serving.request import SequenceState
from shardfuse.serving.scheduler import Chunk


def _sequence(number: int, prompt: int, new: int) -> SequenceState:
    request = Request([0] * prompt, max_new_tokens=new)
    return SequenceState(number, request, list(request.prompt))


def _compute(scheduler: Scheduler, chunks: list[Chunk]) -> list[SequenceState]:
    """Act as an engine after a model call that returns only token 0; returns the complete sequences."""
    done = []
    for chunk in chunks:
        chunk.sequence.computed = chunk.start + chunk.length
        chunk.sequence.most_computed = max(chunk.sequence.most_computed, chunk.sequence.computed)
        if chunk.samples:
            chunk.sequence.tokens.append(0)
            if chunk.sequence.finish():
                scheduler.remove(chunk.sequence)
                done.append(chunk.sequence)
    return done


# ------------------------------------------------------------------------------------------------------------ allocator


def test_blocks_are_taken_as_tokens_come_and_given_back() -> None:
    allocator = BlockAllocator(4, block_size=4)
    assert allocator.grow(7, 1)
    assert allocator.grow(7, 4)
    assert len(allocator.table(7)) == allocator.used_blocks == 1
    assert allocator.grow(7, 5)
    assert allocator.grow(8, 8)
    assert sorted(allocator.table(7) + allocator.table(8)) == [0, 1, 2, 3]
    assert (allocator.allocated_slots, allocator.used_slots, allocator.free_blocks) == (16, 13, 0)

    before = list(allocator.table(8))
    assert not allocator.grow(8, 9)
    assert allocator.table(8) == before
    assert allocator.used_slots == 13
    allocator.release(7)
    assert allocator.grow(8, 9)
    allocator.release(8)
    allocator.release(8)
    assert (allocator.free_blocks, allocator.used_slots, allocator.peak_blocks) == (4, 0, 4)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_allocator_refuses_no_room(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        BlockAllocator(num_blocks, block_size)


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 8]),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=40),
)
def test_allocator_never_loses_or_shares_a_block(
    num_blocks: int, block_size: int, moves: list[tuple[int, int]]
) -> None:
    """Sequences grow to any length or, at 0, leave; tables and free list together always hold the whole pool."""
    allocator = BlockAllocator(num_blocks, block_size)
    want: dict[int, int] = {}
    for sequence, tokens in moves:
        if tokens == 0:
            allocator.release(sequence)
            want.pop(sequence, None)
            continue
        tokens = max(tokens, want.get(sequence, 0))
        others = sum(-(-n // block_size) for s, n in want.items() if s != sequence)
        fits = others + -(-tokens // block_size) <= num_blocks
        assert allocator.grow(sequence, tokens) == fits
        if fits:
            want[sequence] = tokens
        owned = [block for s in want for block in allocator.table(s)]
        assert len(set(owned)) == len(owned) == allocator.used_blocks
        assert set(owned) <= set(range(num_blocks))
        assert [len(allocator.table(s)) for s in want] == [-(-n // block_size) for n in want.values()]
        assert allocator.used_slots == sum(want.values())
    for sequence in list(want):
        allocator.release(sequence)
    assert allocator.free_blocks == num_blocks


# ------------------------------------------------------------------------------------------------------------ scheduler


def test_prefill_and_decode_share_a_step_within_the_budget() -> None:
    scheduler = Scheduler(BlockAllocator(100, 4), max_num_seqs=3, max_num_batched_tokens=10)
    first, second, third = sequences = [_sequence(0, 4, 9), _sequence(1, 11, 9), _sequence(2, 2, 9)]
    for sequence in sequences:
        scheduler.add(sequence)
    steps = []
    for _ in range(3):
        chunks = scheduler.schedule()
        steps.append([(c.sequence, c.start, c.length, c.samples, c.decodes) for c in chunks])
        _compute(scheduler, chunks)
    assert steps == [
        [(first, 0, 4, True, False), (second, 0, 6, False, False)],
        [(first, 4, 1, True, True), (second, 6, 5, True, False), (third, 0, 2, True, False)],
        [(first, 5, 1, True, True), (second, 11, 1, True, True), (third, 2, 1, True, True)],
    ]


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    """Two sequences outgrow the pool: the older continues, the younger returns to the queue and is recomputed."""
    allocator = BlockAllocator(5, 2)
    scheduler = Scheduler(allocator, max_num_seqs=3, max_num_batched_tokens=16)
    old, young, late = _sequence(0, 4, 4), _sequence(1, 2, 5), _sequence(2, 1, 1)
    for sequence in (old, young, late):
        scheduler.add(sequence)
    assert [c.sequence for c in _step(scheduler)] == [old, young]  # the third would leave no room to grow
    while scheduler.preemptions == 0:
        _step(scheduler)
    assert list(scheduler.waiting) == [young, late]
    assert young.computed == 0
    kept = list(young.tokens)
    assert len(kept) > 2
    with pytest.raises(KeyError):
        allocator.table(young.id)
    while young not in scheduler.running:
        _step(scheduler)
    assert young.tokens[: len(kept)] == kept
    while scheduler.running:
        _step(scheduler)
    assert [s.generated for s in (old, young, late)] == [4, 5, 1]
    assert allocator.free_blocks == 5


def _step(scheduler: Scheduler) -> list[Chunk]:
    chunks = scheduler.schedule()
    _compute(scheduler, chunks)
    return chunks


def test_recomputed_tokens_are_told_from_new_ones() -> None:
    sequence = _sequence(0, 3, 9)
    sequence.tokens += [0, 0]
    sequence.most_computed = 4
    again = Chunk(sequence, 0, 5, samples=True)
    assert (again.recomputed, again.decodes) == (4, False)
    sequence.computed = sequence.most_computed = 5
    assert Chunk(sequence, 5, 1, samples=True).decodes


def test_scheduler_refuses_sizes_that_stall() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        Scheduler(BlockAllocator(4, 4), max_num_seqs=0, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="max_num_batched_tokens=7 is less than max_num_seqs=8"):
        Scheduler(BlockAllocator(4, 4), max_num_seqs=8, max_num_batched_tokens=7)


@dataclass(frozen=True)
class Load:
    """A scheduler's sizes and its requests: (prompt, new tokens, step of arrival or cancellation) each."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: list[tuple[int, int, int]]
    cancelled: dict[int, int]


@st.composite
def _loads(draw: st.DrawFn) -> Load:
    block_size, max_num_seqs = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 5))
    length = st.integers(1, 30)
    requests = draw(st.lists(st.tuples(length, length, st.integers(0, 20)), min_size=1, max_size=8))
    longest = max(-(-(prompt + new - 1) // block_size) for prompt, new, _ in requests)
    return Load(
        num_blocks=longest + draw(st.integers(0, 6)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 40)),
        requests=requests,
        cancelled=draw(st.dictionaries(st.integers(0, len(requests) - 1), st.integers(0, 40), max_size=2)),
    )


@given(_loads())
def test_every_load_is_served(load: Load) -> None:
    """Limits hold in each step, every request progresses, order is kept, and at the end no block is missing."""
    allocator = BlockAllocator(load.num_blocks, load.block_size)
    scheduler = Scheduler(allocator, max_num_seqs=load.max_num_seqs, max_num_batched_tokens=load.max_num_batched_tokens)
    sequences = [_sequence(i, prompt, new) for i, (prompt, new, _) in enumerate(load.requests)]
    arrival_order: list[int] = []
    gone: set[int] = set()
    step = 0
    while len(gone) < len(sequences):
        for sequence, (_, _, arrival) in zip(sequences, load.requests):
            if arrival == step:
                scheduler.add(sequence)
                arrival_order.append(sequence.id)
            if load.cancelled.get(sequence.id) == step and sequence.id in set(arrival_order) - gone:
                scheduler.remove(sequence)
                gone.add(sequence.id)
        chunks = scheduler.schedule()
        if not chunks:
            assert set(arrival_order) <= gone, "somebody waits and nobody runs"
        _check_step(load, scheduler, chunks)
        in_order = [arrival_order.index(s.id) for s in (*scheduler.running, *scheduler.waiting)]
        assert in_order == sorted(in_order)
        gone |= {sequence.id for sequence in _compute(scheduler, chunks)}
        step += 1
    assert allocator.free_blocks == load.num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    for sequence, (_, new, _) in zip(sequences, load.requests):
        assert sequence.generated == new or sequence.id in load.cancelled


def _check_step(load: Load, scheduler: Scheduler, chunks: list[Chunk]) -> None:
    allocator = scheduler.allocator
    assert [chunk.sequence for chunk in chunks] == scheduler.running  # every running sequence is scheduled
    assert len(chunks) <= load.max_num_seqs
    assert sum(chunk.length for chunk in chunks) <= load.max_num_batched_tokens
    for chunk in chunks:
        assert chunk.start == chunk.sequence.computed
        assert chunk.samples == (chunk.start + chunk.length == len(chunk.sequence.tokens))
        assert len(allocator.table(chunk.sequence.id)) == allocator.blocks_for(chunk.start + chunk.length)
    owned = [block for chunk in chunks for block in allocator.table(chunk.sequence.id)]
    assert len(set(owned)) == len(owned) == allocator.used_blocks
    wasted = allocator.allocated_slots - allocator.used_slots
    assert 0 <= wasted <= len(chunks) * (load.block_size - 1)
