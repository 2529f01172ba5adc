"""Hundreds of random requests through one engine with few blocks, and every token against a forward without a cache.

Requests come in bursts, with priorities, salts, shared beginnings, stops and deadlines; the queue is bounded; some are
cancelled; the model fails on batches now and then, and always on requests that hold POISON; the weights change. The
clock is the test's: a step takes a second.

The tokens are checked by teacher forcing: one dense forward over a finished sequence gives the logits of every
position, and each token has to be the choice from its position's, with the weights of the step that made it. By
induction the answer is then what the request gives alone. Models compute in fp64, so rounding decides nothing
(tests/serving/test_serving.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from fuzz import Fuzz
from serving_case import build

from shardfuse.layers.attention.paged import PagedBatch
from shardfuse.serving import Engine, QueueFull, Request, SamplingParams, TokenEvent
from shardfuse.serving.request import SequenceState
from shardfuse.serving.sampling import sample
from shardfuse.testing import assert_idle, tiny_model

POISON = 31  # a token that no request is answered with
LONGEST = 64
SIZES: dict[str, Any] = {
    "num_blocks": 24,  # of the 16 that the longest request needs
    "block_size": 4,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 32,
    "max_queued_requests": 12,
    "max_queued_tokens": 400,
    "max_overtakes": 4,
    "num_host_blocks": 6,
}


class BatchError(RuntimeError):
    pass


class Model:
    """A model that never gives POISON, and fails where it is told to."""

    def __init__(self, random: Random) -> None:
        self.model, self.random = build("gated"), random
        self.config, self.group = self.model.config, self.model.group
        self.parameters, self.load_state_dict = self.model.parameters, self.model.load_state_dict

    def __call__(self, tokens: torch.Tensor, *, cache: PagedBatch, **kwargs: Any) -> torch.Tensor:
        logits = self.model(tokens, cache=cache, **kwargs)  # the cache is written, whatever comes now
        if (tokens == POISON).any():
            raise ValueError("a fault of a request")
        if len(cache.seq_lens) > 1 and self.random.random() < 0.02:
            raise BatchError("a fault of a batch")
        return logits

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return self.model.gather_logits(logits)[..., :POISON]


@dataclass
class Served:
    """An answer to a request: its tokens, and which weights made each."""

    request: Request
    poisoned: bool
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    end: TokenEvent | None = None


class Load:
    """One engine, and the requests that it has served."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"load/{seed}")
        self.model = Model(self.random)
        self.states = [tiny_model(seed=each, vocab_size=32, max_positions=LONGEST).state_dict() for each in range(3)]
        self.model.load_state_dict(self.states[0])
        self.engine = Engine(self.model, **SIZES)
        self.engine._host.block_seconds = 0.0  # it always pays
        self.weights = 0
        self.requests = 0
        self.served: dict[tuple[int, int], Served] = {}
        self.live: list[int] = []
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self._beginnings = [self._drawn(40) for _ in range(4)]

    def _drawn(self, count: int) -> list[int]:
        return [self.random.randrange(POISON) for _ in range(count)]

    def _request(self) -> tuple[Request, bool]:
        random = self.random
        begin = random.choice(self._beginnings)[: random.choice((0, 0, 9, 20, 40))]
        prompt = begin + self._drawn(random.randint(not begin, 8))
        poisoned = random.random() < 0.03
        if poisoned:
            prompt[random.randrange(len(prompt))] = POISON
        sampled = random.random() < 0.7
        sampling = SamplingParams(
            temperature=random.choice((0.5, 1.0, 2.0)) if sampled else 0.0,
            top_k=random.choice((0, 0, 5)),
            top_p=random.choice((1.0, 1.0, 0.8)),
            repetition_penalty=random.choice((1.0, 1.0, 1.3)),
            presence_penalty=random.choice((0.0, 0.0, 0.4)),
            seed=random.randrange(2**63),
        )
        request = Request(
            prompt,
            max_new_tokens=random.randint(1, random.choice((4, LONGEST - len(prompt)))),
            stop=self._drawn(random.choice((0, 0, 2))),
            sampling=sampling,
            priority=random.choice((0, 0, 0, -1, 5)),
            arrival=random.choice((0, 0, 0, self.engine.stats.steps + random.randint(0, 20))),
            timeout_s=random.choice((None, None, None, random.uniform(1, 60))),
            cache_salt=random.choice(("", "", "a")),
            client=random.choice(("", "", "a", "b")),
            n=random.choice((1, 1, 1, 1, 1, 2, 4)),
        )
        return request, poisoned

    def arrive(self, most: int) -> None:
        """A burst of requests, at most ``most``; what the queue refuses is dropped."""
        for _ in range(min(most, self.random.choice((0, 0, 0, 1, 1, 2, 9)))):
            request, poisoned = self._request()
            try:
                number = self.engine.add(request)
            except QueueFull:
                self.seen["full"] += 1
                continue
            self.served[number, 0] = Served(request, poisoned)
            self.live.append(number)
            self.requests += 1

    def disturb(self) -> None:
        """Now and then cancel a request, or change the weights."""
        if self.live and self.random.random() < 0.02:
            number = self.random.choice(self.live)
            assert self.engine.cancel(number)
            self.seen["cancels"] += 1
        if self.random.random() < 0.005:
            self.weights = (self.weights + 1) % len(self.states)
            self.engine.update_weights(self.states[self.weights])
            self.seen["updates"] += 1

    def step(self) -> int:
        """Take a step; returns how many requests ended."""
        self.now += 1
        try:
            events = self.engine.step()
        except BatchError:
            self.seen["faults"] += 1
            return 0
        for event in events:
            first = self.served[event.request, 0]
            served = self.served.setdefault(
                (event.request, event.index), Served(first.request, first.poisoned, event.index)
            )
            assert served.end is None, "an event after the last one"
            if event.token is not None:
                served.tokens.append(event.token)
                served.weights.append(self.weights)
            if event.finish is not None:
                served.end = event
                self.seen[event.finish] += 1
        for number in {event.request for event in events}:
            answers = [self.served.get((number, index)) for index in range(self.served[number, 0].request.n)]
            # What has no token ends as a whole.
            if all(each is None or each.end is not None for each in answers):
                assert all(answers) or not answers[0].tokens  # type: ignore[union-attr]
                self.live.remove(number)
        return sum(event.finish is not None for event in events)


def _serve(load: Load, requests: int) -> None:
    """Serve ``requests`` requests. Fails where none ends or comes for longer than that can take.

    The first of the running sequences gets a token in each step, and nothing takes its blocks but a better one that was
    admitted later. So without promotions (at most one for each request that lives) the running ones have ended, and
    the first that waits is admitted, after ``max_num_seqs`` times the longest answer; and each step may fail once.
    """
    at_once = SIZES["max_num_seqs"] * LONGEST
    idle = 0
    while load.requests < requests or load.engine.busy:
        came = load.requests
        load.arrive(requests - came)
        load.disturb()
        ended = load.step()
        idle = 0 if ended or load.requests > came or not load.live else idle + 1
        assert idle <= 2 * (len(load.live) + 1) * (at_once + LONGEST), "requests live, and none ends"


def _check_ends(load: Load) -> None:
    for number, served in load.served.items():
        request, end = served.request, served.end
        assert end is not None, f"request {number} has no end"
        assert (end.error is not None) == (end.finish == "error")
        assert not served.poisoned or end.finish in ("error", "cancelled", "timeout")
        assert served.poisoned or end.finish != "error"
        whole = [token in request.stop for token in served.tokens]
        assert not any(whole[:-1])
        assert (end.finish == "stop") == (whole[-1:] == [True])
        if end.finish == "length":
            assert len(served.tokens) == request.max_new_tokens
        else:
            assert len(served.tokens) <= request.max_new_tokens


@torch.no_grad()
def _check_tokens(load: Load, numbers: list[tuple[int, int]]) -> int:
    """Compare the tokens of requests with the choices from dense forwards; returns how many tokens."""
    checked = 0
    for weights, state in enumerate(load.states):
        load.model.load_state_dict(state)
        for batch in _batches([load.served[number] for number in numbers if weights in load.served[number].weights]):
            rows = torch.zeros(len(batch), LONGEST, dtype=torch.int64)
            for row, served in zip(rows, batch):
                known = [*served.request.prompt, *served.tokens]
                row[: len(known)] = torch.tensor(known)
            logits = load.model.gather_logits(load.model.model(rows))
            at, states, expected = [], [], []
            for index, served in enumerate(batch):
                prompt = len(served.request.prompt)
                for position, (token, made_by) in enumerate(zip(served.tokens, served.weights)):
                    if made_by == weights:
                        at.append(index * LONGEST + prompt + position - 1)
                        before = [*served.request.prompt, *served.tokens[:position]]
                        states.append(SequenceState(0, served.request, before, index=served.index))
                        expected.append(token)
            found = sample(logits.flatten(0, 1)[torch.tensor(at)], states)
            assert [each.token for each in found] == expected
            checked += len(expected)
    return checked


def _batches(served: list[Served]) -> Iterator[list[Served]]:
    for begin in range(0, len(served), 64):
        yield served[begin : begin + 64]


def _prove(seed: int, requests: int, sampled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(seed)
    monkeypatch.setattr(time, "monotonic", lambda: load.now)
    _serve(load, requests)
    assert_idle(load.engine)
    assert load.engine._allocator.free_blocks == SIZES["num_blocks"]
    _check_ends(load)

    drawn = [number for number, served in load.served.items() if served.request.sampling.temperature > 0]
    greedy = [number for number in load.served if number not in set(drawn)]
    assert load.requests == requests
    assert sum(bool(load.served[number].tokens) for number in drawn) >= sampled
    tokens = _check_tokens(load, drawn) + _check_tokens(load, greedy)
    assert tokens == sum(len(served.tokens) for served in load.served.values())
    answers = Counter(token for served in load.served.values() for token in served.tokens)
    assert len(answers) == POISON  # not a model that repeats itself
    # Else the load did not test what it says.
    assert min(load.seen[each] for each in ("length", "stop", "cancelled", "timeout", "error")) >= requests // 200
    assert min(load.seen[each] for each in ("full", "cancels", "faults")) >= requests // 200
    assert load.seen["updates"] >= requests // 200
    stats = load.engine.stats
    assert stats.preemptions > requests // 50
    assert stats.shared_tokens > requests // 2
    assert stats.kept_tokens > requests // 4
    assert sum(index > 0 for _, index in load.served) > requests // 10
    print(f"\n{requests} requests, {tokens} tokens, {stats.steps} steps, {stats.preemptions} preemptions, {load.seen}")


def test_five_hundred_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    _prove(0, 500, 250, monkeypatch)


@pytest.mark.nightly
@pytest.mark.fuzz
def test_random_loads(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is another load of two thousand."""

    def load(number: int, draw: Random) -> str:
        with monkeypatch.context() as clock:
            _prove(draw.randrange(2**32), 2_000, 1_000, clock)
        return "served"

    assert set(fuzz.run(load)) == {"served"}
