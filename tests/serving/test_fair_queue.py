"""Clients share an engine fairly: equal turns in answers, shares of a full queue, and who gives way for blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest
from serving_case import exact

from shardfuse.serving import BlockAllocator, Engine, QueueFull, Request, SamplingParams, Scheduler
from shardfuse.serving.request import SequenceState
from shardfuse.testing import assert_idle, solo_tokens


class Queue:
    """A scheduler, and the order in which it admits what is added. By default one answer runs at a time, for a step."""

    def __init__(self, max_num_seqs: int = 1, num_blocks: int = 64, **options: Any) -> None:
        allocator = BlockAllocator(num_blocks, 4)
        self.scheduler = Scheduler(
            allocator, max_num_seqs=max_num_seqs, max_num_batched_tokens=8 * max_num_seqs, **options
        )
        self.admitted: list[SequenceState] = []
        self._numbers = count()

    def add(self, client: str, times: int = 1, new: int = 1, **options: Any) -> list[SequenceState]:
        request = Request([1, 2, 3], max_new_tokens=new, client=client, **options)
        added = [SequenceState(next(self._numbers), request, [1, 2, 3]) for _ in range(times)]
        for sequence in added:
            self.scheduler.add(sequence)
        return added

    def step(self) -> None:
        before = set(self.scheduler.running)
        for chunk in self.scheduler.schedule():
            if chunk.sequence not in before:
                self.admitted.append(chunk.sequence)
            self.scheduler.advance(chunk)
            if chunk.samples:
                chunk.sequence.tokens.append(0)
                if chunk.sequence.finish():
                    self.scheduler.remove(chunk.sequence)

    def run(self, steps: int = 10_000) -> str:
        """Take steps until nothing is left; returns the clients of the admitted sequences, in order."""
        for _ in range(steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            self.step()
        return "".join(sequence.request.client for sequence in self.admitted)

    @property
    def known(self) -> int:
        return len(self.scheduler.clients._clients)


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("served", [0, 30])
def test_a_client_with_many_waiting_does_not_delay_another(max_num_seqs: int, served: int) -> None:
    queue = Queue(max_num_seqs)
    queue.add("a", 200)
    while len(queue.admitted) < served:
        queue.step()
    before = len(queue.admitted)
    (first,) = queue.add("b")
    queue.run()
    assert queue.admitted.index(first) - before < max_num_seqs + (not served)


def test_clients_take_turns() -> None:
    queue = Queue()
    for client in "abc":
        queue.add(client, 3)
    assert queue.run() == "abcabcabc"


def test_each_answer_is_a_turn() -> None:
    queue = Queue()
    queue.add("a", 3, n=3)
    queue.add("b", 9)
    assert queue.run() == "abbb" * 3


def test_a_client_that_comes_back_has_not_been_forgotten() -> None:
    """Its many answers have ended, and nothing of it waits: the others' turns come first nevertheless."""
    queue = Queue()
    queue.add("a", n=8)
    queue.add("b", 20)
    queue.step()
    queue.step()
    assert [each.request.client for each in queue.admitted] == ["a", "b"]
    queue.add("a")
    assert queue.run().index("a", 1) in (9, 10)


@pytest.mark.parametrize("runs", [True, False])
def test_a_time_without_requests_earns_nothing(runs: bool) -> None:
    """Also while an answer of the client runs, so that it stays known."""
    queue = Queue(max_num_seqs=2)
    queue.add("b", new=200 if runs else 1)
    queue.add("a", 200)
    for _ in range(30):
        queue.step()
    before = len(queue.admitted)
    queue.add("b", 10)
    assert Counter(queue.run()[before : before + 10]) == {"a": 5, "b": 5}


def test_priority_orders_the_requests_of_one_client() -> None:
    queue = Queue()
    late, early = queue.add("a", priority=5) + queue.add("a", priority=-5)
    queue.add("b", 4, priority=0)
    queue.add("c", 4, priority=-9)
    assert queue.run() == "abcabcbcbc"
    assert queue.admitted.index(early) < queue.admitted.index(late)


@pytest.mark.parametrize("max_overtakes", [0, 3])
def test_the_bound_on_overtaking_holds_within_a_client(max_overtakes: int) -> None:
    """However many others are admitted, the client's own better requests overtake as often as before."""
    queue = Queue(max_overtakes=max_overtakes)
    queue.add("a", 2)
    (worse,) = queue.add("a", priority=9)
    for _ in range(60):
        for client in "abcd":
            queue.add(client)
        queue.step()
    own = [sequence for sequence in queue.admitted if sequence.request.client == "a"]
    assert own.index(worse) == 2 + max_overtakes
    assert len(queue.admitted) > 4 * len(own) - 8


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("at_once", [1, 3])
def test_newcomers_do_not_starve_a_client(n: int, at_once: int) -> None:
    """New clients come as fast as they are served, or faster; at most 13 wait at once, A included."""
    queue = Queue()
    first, second = queue.add("a", 2, n=n)
    names = count()
    for _ in range(2000):
        for _ in range(at_once if len(queue.scheduler.waiting) < 12 else 1):
            queue.add(f"new{next(names)}", n=2)
        queue.step()
        if second in queue.admitted:
            break
    assert queue.admitted.index(second) - queue.admitted.index(first) <= (n + 2) * 13


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_always_wait_get_equal_numbers_of_answers(seed: int) -> None:
    random = Random(seed)
    queue = Queue(max_num_seqs=random.choice((1, 3)))
    most = {"a": 1, "b": 4, "c": 16}
    for _ in range(600):
        for client, n in most.items():
            while sum(each.request.client == client for each in queue.scheduler.waiting) < 3:
                queue.add(client, new=random.randint(1, 3), n=random.randint(1, n), priority=random.randint(-1, 1))
        if random.random() < 0.3:
            queue.add(f"new{random.random()}", n=random.randint(1, 3))
        queue.step()
        answers = Counter[str]()
        for sequence in queue.admitted:
            answers[sequence.request.client] += sequence.request.n
        for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
            assert abs(answers[one] - answers[other]) <= most[one] + most[other]
    assert answers["a"] > 60


def test_clients_without_requests_are_forgotten() -> None:
    queue = Queue(max_num_seqs=2)
    for number in range(500):
        queue.add("always")
        queue.add("always")
        queue.add(f"once{number}", n=2, new=1 + number % 3)
        queue.step()
        if number % 3 == 0:
            queue.scheduler.remove(queue.add(f"cancelled{number}")[0])
        while len(queue.scheduler.waiting) > 6:
            queue.scheduler.remove(queue.scheduler.waiting[-1])
        assert queue.known < 40
    queue.run()
    assert not queue.known
    assert not queue.scheduler.clients._turns
    assert not queue.scheduler.clients._ahead


def test_a_client_is_forgotten_when_the_last_one_that_waits_is_cancelled() -> None:
    queue = Queue()
    queue.add("many", n=8)
    (waiting,) = queue.add("cancelled")
    queue.step()
    assert queue.known == 2
    queue.scheduler.remove(waiting)
    assert not queue.known


# --- those that have run ----------------------------------------------------------------------------------------------


def test_a_preempted_answer_comes_back_first_and_costs_no_turn() -> None:
    queue = Queue(max_num_seqs=2)
    queue.add("a", 5, new=3)
    queue.step()
    preempted = queue.scheduler._stop_last()
    queue.add("b", 5, new=3)
    queue.admitted.clear()
    queue.step()
    assert queue.admitted == [preempted]
    assert queue.run()[:7] == "abababa"  # it, and then equal turns


def test_other_answers_of_a_request_take_turns_with_newcomers() -> None:
    """They wait for a row; another client comes meanwhile, and waits for none but the one that runs."""
    engine = Engine(exact("gelu"), num_blocks=64, block_size=4, max_num_seqs=1)
    for _ in range(2):
        engine.add(Request([1, 2], max_new_tokens=2, n=3, sampling=SamplingParams(temperature=1.0), client="a"))
    engine.step()
    for _ in range(4):
        engine.add(Request([3], max_new_tokens=2, client="b"))
    ends = [event.request for event in engine.run() if event.finish is not None]
    assert ends == [0, 2, 0, 3, 0, 4, 1, 5, 1, 1]
    assert_idle(engine)


def test_the_client_that_runs_most_gives_its_blocks() -> None:
    """B comes last, with the worst priority; A's later answers yield to both first ones."""
    queue = Queue(max_num_seqs=4, num_blocks=14)
    firsts = queue.add("a", 3, new=20)[:1]
    queue.step()
    firsts += queue.add("b", new=20, priority=9)
    queue.step()
    assert [sequence.id for sequence in queue.scheduler.running] == [0, 3, 1, 2]
    while not all(sequence.finish() for sequence in firsts):
        before = set(queue.scheduler.running)
        queue.step()
        assert not before.intersection(firsts).intersection(queue.scheduler.waiting)
    assert queue.scheduler.preemptions
    queue.run()
    assert all(sequence.finish() for sequence in queue.admitted)
    assert not queue.scheduler.allocator.used_blocks


def test_running_ones_of_clients_alternate() -> None:
    queue = Queue(max_num_seqs=9)
    for client in "aabbbc":
        queue.add(client, new=9)
    queue.add("b", new=9, priority=-1)
    queue.step()
    order = [(each.request.client, each.id) for each in queue.scheduler.running]
    assert order == [("a", 0), ("c", 5), ("b", 6), ("a", 1), ("b", 2), ("b", 3), ("b", 4)]
    queue.scheduler.remove(queue.scheduler.running[0])
    assert [each.id for each in queue.scheduler.running] == [1, 5, 6, 2, 3, 4]


# --- a full queue -----------------------------------------------------------------------------------------------------


def _engine(**options: Any) -> Engine:
    """An engine whose only row is taken, and in whose queue nothing waits."""
    engine = Engine(exact("gelu"), num_blocks=16, block_size=4, max_num_seqs=1, **options)
    engine.add(Request([1], max_new_tokens=8, client="first"))
    engine.step()
    assert engine.load[:2] == (1, 0)
    return engine


def _accepted(engine: Engine, *requests: Request) -> int:
    """How many of ``requests`` the queue takes, one by one."""
    taken = 0
    for request in requests:
        try:
            engine.add(request)
        except QueueFull:
            continue
        taken += 1
    return taken


@pytest.mark.parametrize("limit", [{"max_queued_requests": 8}, {"max_queued_tokens": 8 * 4}], ids=["answers", "tokens"])
def test_a_full_queue_has_a_share_for_each_client(limit: dict[str, int]) -> None:
    engine = _engine(**limit)
    request = Request([1, 2], max_new_tokens=2)
    clients = ("a", "b", "c")
    taken = [_accepted(engine, *[replace(request, client=client)] * 20) for client in clients]
    assert taken == [8, 4, 2]
    assert _accepted(engine, *(replace(request, client=client) for client in clients)) == 0
    # The shares end: with more clients than the limit, the queue is full for new ones as well.
    many = [replace(request, client=f"new{number}") for number in range(100)]
    assert _accepted(engine, *many) == 5 if "max_queued_requests" in limit else 29
    assert sum(event.finish is not None for event in engine.run()) == 1 + engine._next_id - 1
    assert_idle(engine)
    assert not engine._scheduler.clients._clients


def test_the_queue_counts_answers() -> None:
    engine = _engine(max_queued_requests=10)
    eight = Request([1, 2], max_new_tokens=2, n=8, client="a")
    assert _accepted(engine, eight, replace(eight, n=3), replace(eight, n=2), replace(eight, n=1)) == 2
    with pytest.raises(QueueFull, match="10 answers wait, this request has 1, and max_queued_requests=10: send it lat"):
        engine.add(replace(eight, n=1))
    other = replace(eight, client="b")
    assert _accepted(engine, replace(other, n=128), replace(other, n=1)) == 1  # its first
    clients = engine._scheduler.clients
    assert (clients.answers, clients.queued("a"), clients.queued("b")) == (138, (10, 24), (128, 258))
    assert engine.cancel(1)
    assert (clients.answers, clients.queued("a"), clients.queueing) == (130, (2, 6), 2)


def test_a_request_counts_once_for_each_answer_that_is_left() -> None:
    engine = Engine(exact("gelu"), num_blocks=16, block_size=4, max_num_seqs=2)
    engine.add(Request([1, 2], max_new_tokens=3, n=8))
    clients, seen = engine._scheduler.clients, []
    while engine.busy:
        seen.append((clients.answers, clients.tokens))
        engine.step()
    assert [answers for answers, _ in seen] == [8, 6, 6, 6, 4, 4, 2, 2, 0]
    assert all(tokens == 5 * answers for answers, tokens in seen[1:])
    assert seen[0][1] == 26
    assert (clients.answers, clients.tokens, clients.queueing) == (0, 0, 0)


@pytest.mark.parametrize("together", [True, False])
def test_requests_that_come_together_count_as_one(together: bool) -> None:
    """All or none are queued; an empty queue takes any number of them, and a full one a client's first ones."""
    engine = _engine(max_queued_requests=4)
    three = [Request([1], max_new_tokens=2, client="a")] * 3
    if not together:
        assert _accepted(engine, *three, *three) == 4
        return
    assert engine.add_all([*three, *three]) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(QueueFull, match="6 answers wait, this request has 3,"):
        engine.add_all(three)
    others = [replace(request, client="b") for request in three]
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.add_all([*others, Request([])])
    assert engine.load.waiting == 6
    assert engine.add_all(others) == [7, 8, 9]
    assert _accepted(engine, *others) == 0
    assert sum(event.finish is not None for event in engine.run()) == 10


def _calls(work: Callable[[], None]) -> int:
    """The number of functions that ``work`` calls, C functions included."""
    calls = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("arrived", [True, False])
def test_adding_and_cancelling_do_not_walk_the_queue(arrived: bool) -> None:
    """A queue that is 16 times as long costs a search of 4 more steps in each of a few sorted lists."""

    def cost(length: int) -> tuple[int, int]:
        engine = _engine(max_queued_requests=100_000, max_queued_tokens=10_000_000)
        requests = [Request([1], max_new_tokens=2, client=f"c{number % 5}") for number in range(length)]
        engine.add_all(requests)
        if arrived:
            engine.pause()
            engine.step()
        numbers: list[int] = []
        added = _calls(lambda: numbers.extend(map(engine.add, requests[:32])))
        if arrived:
            engine.step()
        chosen = [*numbers, *range(1, length, length // 32)]
        cancelled = _calls(lambda: [engine.cancel(number) for number in chosen] and None)
        return added, cancelled

    for short, long in zip(cost(64), cost(1024)):
        assert long < 1.5 * short


# --- whatever comes ---------------------------------------------------------------------------------------------------


def _alone(request: Request) -> list[list[int]]:
    """The tokens of each answer, each by a forward over the whole sequence."""
    sampling = request.sampling
    seeds = [replace(sampling, seed=sampling.seed + index) for index in range(request.n)]
    return [solo_tokens(exact("gated"), replace(request, n=1, sampling=each)) for each in seeds]


def _requests(random: Random) -> Sequence[Request]:
    return [
        Request(
            [random.randrange(32) for _ in range(random.randint(1, 6))],
            max_new_tokens=random.randint(1, 14),
            sampling=SamplingParams(temperature=random.choice((0.0, 1.0)), seed=random.randrange(2**32)),
            client=random.choice("aaabc"),
            priority=random.choice((0, 0, -1, 2)),
            arrival=random.choice((0, random.randrange(25))),
            n=random.choice((1, 1, 1, 3)),
        )
        for _ in range(14)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_one_that_its_request_has_alone(seed: int) -> None:
    random = Random(seed)
    engine = Engine(
        exact("gated"),
        num_blocks=6,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=12,
        max_overtakes=random.choice((0, 2)),
        prefix_caching=random.random() < 0.7,
    )
    requests = _requests(random)
    answers = engine.generate(requests)
    assert answers == [answer for request in requests for answer in _alone(request)]
    assert engine.stats.preemptions
    assert_idle(engine)
    clients = engine._scheduler.clients
    assert not any((clients._clients, clients._lanes, clients.coming, clients.answers, clients.tokens))
