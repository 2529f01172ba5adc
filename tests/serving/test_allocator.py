"""The block allocator and the scheduler, without a model; test_bookkeeping.py has them under random loads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfuse.serving import BlockAllocator, Request, Scheduler
from shardfuse.serving.prefix_cache import block_hash, root_hash
from shardfuse.serving.request import SequenceState
from shardfuse.serving.scheduler import Chunk


def _sequence(
    number: int, prompt: int, new: int, first: int | None = None, salt: str = "", priority: int = 0
) -> SequenceState:
    """A request for ``prompt`` tokens 0 after one that is its own number, or ``first``."""
    tokens = [100 + number if first is None else first] + [0] * (prompt - 1)
    request = Request(tokens, max_new_tokens=new, cache_salt=salt, priority=priority)
    return SequenceState(number, request, list(request.prompt))


def _compute(scheduler: Scheduler, chunks: list[Chunk]) -> list[SequenceState]:
    """Act as an engine after a model call that returns only token 0; returns the complete sequences."""
    done = []
    for chunk in chunks:
        scheduler.advance(chunk)
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
    assert (allocator.allocated_slots, allocator.unused_slots, allocator.free_blocks) == (16, 3, 0)

    before = list(allocator.table(8))
    assert not allocator.grow(8, 9)
    assert allocator.table(8) == before
    assert allocator.unused_slots == 3
    allocator.release(7)
    assert allocator.grow(8, 9)
    allocator.release(8)
    allocator.release(8)
    assert (allocator.free_blocks, allocator.unused_slots, allocator.peak_blocks) == (4, 0, 4)


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
        assert allocator.allocated_slots - allocator.unused_slots == sum(want.values())
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


# ----------------------------------------------------------------------------------------------------------- priorities


def _admissions(scheduler: Scheduler) -> list[int]:
    """Who was admitted, in order."""
    order: list[int] = []
    while scheduler.waiting or scheduler.running:
        order += [chunk.sequence.id for chunk in _step(scheduler) if chunk.sequence.id not in order]
    return order


def test_lower_priorities_go_first_and_equal_ones_as_they_came() -> None:
    scheduler = _scheduler(num_blocks=64, max_overtakes=100)
    scheduler.max_num_seqs = 1
    for number, priority in enumerate([1, 0, 2, 0, -5]):
        scheduler.add(_sequence(number, 3, 2, priority=priority))
    assert _admissions(scheduler) == [4, 1, 3, 0, 2]


def test_what_was_overtaken_often_enough_goes_first() -> None:
    scheduler = _scheduler(num_blocks=64, max_overtakes=2)
    scheduler.max_num_seqs = 1
    scheduler.add(_sequence(0, 3, 2, priority=9))
    order: list[int] = []
    for number in range(1, 6):
        scheduler.add(_sequence(number, 3, 2))
        order += [chunk.sequence.id for chunk in _step(scheduler) if chunk.sequence.id not in order]
        _step(scheduler)
    assert order + _admissions(scheduler) == [1, 2, 0, 3, 4, 5]


def test_one_that_found_few_waiting_is_due_before_an_older_one_that_found_many() -> None:
    """Those that the older one found were cancelled: the younger one must not wait for its turn."""
    scheduler = _scheduler(num_blocks=64, max_overtakes=2)
    scheduler.max_num_seqs = 1
    scheduler.add(_sequence(0, 1, 3))
    _step(scheduler)
    found = [_sequence(number, 1, 1) for number in range(1, 11)]
    older, younger = _sequence(11, 1, 1, priority=5), _sequence(12, 1, 1, priority=4)
    for sequence in (*found, older):
        scheduler.add(sequence)
    for sequence in found:
        scheduler.remove(sequence)
    scheduler.add(younger)
    later = [_sequence(number, 1, 1, priority=-1) for number in range(13, 40)]
    for sequence in later:
        scheduler.add(sequence)
        _step(scheduler)
        if younger not in scheduler.waiting:
            break
    assert sum(sequence not in scheduler.waiting for sequence in later[: sequence.id - 12]) <= 1 + 2


def test_the_last_in_order_gives_its_blocks() -> None:
    """The first to come, of a worse priority, gives way to the second; a promoted one does not."""
    for rank in (1.0, float("-inf")):
        scheduler = Scheduler(BlockAllocator(6, 2), max_num_seqs=2, max_num_batched_tokens=16)
        worse, better = _sequence(0, 4, 8, priority=1), _sequence(1, 4, 8)
        scheduler.add(worse)
        worse.rank = rank
        _step(scheduler)
        scheduler.add(better)
        while not scheduler.preemptions:
            _step(scheduler)
        assert scheduler.waiting == [worse if rank == 1.0 else better]
        _admissions(scheduler)
        assert (worse.generated, better.generated) == (8, 8)


def test_a_long_prompt_leaves_a_token_to_each_that_runs() -> None:
    scheduler = Scheduler(BlockAllocator(100, 4), max_num_seqs=4, max_num_batched_tokens=8)
    running = [_sequence(number, 1, 50, priority=1) for number in range(3)]
    for sequence in running:
        scheduler.add(sequence)
    _step(scheduler)
    scheduler.add(_sequence(3, 40, 2))
    for _ in range(8):
        lengths = {chunk.sequence.id: chunk.length for chunk in _step(scheduler)}
        assert [lengths[number] for number in range(3)] == [1, 1, 1]
        assert lengths[3] == 5
    assert {chunk.sequence.id: chunk.length for chunk in _step(scheduler)} == {0: 1, 1: 1, 2: 1, 3: 1}


# --------------------------------------------------------------------------------------------------------- prefix cache


def _serve(scheduler: Scheduler, *sequences: SequenceState) -> list[int]:
    """Serve sequences together; returns how many of their tokens were found in the cache."""
    for sequence in sequences:
        scheduler.add(sequence)
    before = scheduler.shared_tokens
    found = []
    while scheduler.running or scheduler.waiting:
        _step(scheduler)
        found.append(scheduler.shared_tokens - before)
    return found


def _scheduler(num_blocks: int = 16, **options: Any) -> Scheduler:
    return Scheduler(BlockAllocator(num_blocks, 4), max_num_seqs=4, max_num_batched_tokens=64, **options)


def test_blocks_in_use_lie_together() -> None:
    allocator = BlockAllocator(8, block_size=4)
    for number in range(4):
        assert allocator.grow(number, 4)
    for number in (2, 0, 1):
        allocator.release(number)
    for number in (4, 5):
        assert allocator.grow(number, 4)
    assert sorted(allocator.table(number)[0] for number in (3, 4, 5)) == [0, 1, 3]
    allocator.publish(5, 0, b"known")
    allocator.release(5)
    allocator.release(4)
    allocator.forget()
    assert allocator.grow(6, 12)
    assert allocator.table(6) == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "salt", "found"),
    [
        (13, "", 12),
        (12, "", 8),  # the last token is always computed
        (30, "", 12),  # no more is known: the answer's block is not full
        (3, "", 0),
        (13, "tenant", 0),
    ],
)
def test_a_beginning_is_found_after_its_request_has_ended(prompt: int, salt: str, found: int) -> None:
    scheduler = _scheduler()
    assert _serve(scheduler, _sequence(0, 13, 1, first=7))[-1] == 0
    assert _serve(scheduler, _sequence(1, prompt, 1, first=7, salt=salt))[-1] == found
    assert _serve(scheduler, _sequence(2, 13, 1, first=8))[-1] == 0
    assert scheduler.allocator.used_blocks == 0


def test_a_beginning_is_shared_while_its_request_runs() -> None:
    scheduler = _scheduler(num_blocks=6)
    first, second = _sequence(0, 13, 8, first=7), _sequence(1, 13, 4, first=7)
    scheduler.add(first)
    _step(scheduler)
    scheduler.add(second)
    _step(scheduler)
    tables = [scheduler.allocator.table(number) for number in (0, 1)]
    assert tables[0][:3] == tables[1][:3]
    assert set(tables[0][3:]).isdisjoint(tables[1][3:])
    assert scheduler.allocator.used_blocks == 5  # of a pool that could not hold both apart
    while scheduler.running:
        _step(scheduler)
    assert (first.generated, second.generated, scheduler.preemptions) == (8, 4, 0)


def test_answers_are_found_too() -> None:
    scheduler = _scheduler()
    sequence = _sequence(0, 6, 8, first=7)
    _serve(scheduler, sequence)
    longer = SequenceState(1, Request([*sequence.tokens, 5, 5]), [*sequence.tokens, 5, 5])
    longer.request = Request(longer.tokens, max_new_tokens=1)
    assert _serve(scheduler, longer)[-1] == 12  # of 13 that were computed


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    scheduler = _scheduler(num_blocks=6)
    _serve(scheduler, _sequence(0, 9, 1, first=1))  # two full blocks, and one in part
    _serve(scheduler, _sequence(1, 9, 1, first=2))
    _serve(scheduler, _sequence(0, 9, 1, first=1))  # used again
    _serve(scheduler, _sequence(2, 13, 1, first=3))  # wants 4: 2 are free, 2 of the second's are forgotten
    assert _serve(scheduler, _sequence(3, 9, 1, first=1))[-1] == 8
    assert _serve(scheduler, _sequence(4, 9, 1, first=2))[-1] == 0
    scheduler = _scheduler(num_blocks=4)
    _serve(scheduler, _sequence(0, 13, 1, first=1))  # three full blocks
    _serve(scheduler, _sequence(1, 5, 1, first=2))  # wants 2: the free one, and the last of the three
    assert _serve(scheduler, _sequence(2, 13, 1, first=1))[-1] == 8


def test_new_weights_know_nothing_of_old_ones() -> None:
    scheduler = _scheduler()
    _serve(scheduler, _sequence(0, 13, 1, first=7))
    scheduler.new_weights()
    assert scheduler.allocator.free_blocks == 16
    assert _serve(scheduler, _sequence(1, 13, 1, first=7))[-1] == 0
    assert _serve(scheduler, _sequence(2, 13, 1, first=7))[-1] == 12


def test_without_prefix_caching_nothing_is_found() -> None:
    scheduler = _scheduler(prefix_caching=False)
    assert _serve(scheduler, _sequence(0, 13, 1, first=7))[-1] == 0
    assert _serve(scheduler, _sequence(1, 13, 1, first=7))[-1] == 0


def test_hashes_tell_blocks_and_their_beginnings_apart() -> None:
    roots = [root_hash(salt, weights) for salt in ("", "a", "0") for weights in (0, 1)]
    hashes = [block_hash(before, tokens) for before in roots for tokens in ([1, 2], [2, 1], [1, 2, 0], [-1, 2])]
    assert len({*roots, *hashes}) == len(roots) + len(hashes)
    assert block_hash(roots[0], [1, 2]) == block_hash(roots[0], (1, 2))
