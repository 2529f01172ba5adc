"""Random requests, faults and cancellations: no request gets other tokens than alone, and the engine ends idle.

A case draws an engine's sizes, requests (some of them invalid), and for some requests a fault that persists: in the
model, in the batch's layout over the cache, or in sampling. Batches of several sequences also fail now and then. The
model's faults strike in attention, because a replayed step (serving/recording.py) runs none of the model's own Python.
Models compute in fp64, so tokens do not depend on rounding (tests/serving/test_serving.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from fuzz import Fuzz
from serving_case import STYLES, exact

from shardfuse.layers.attention.paged import PagedBatch
from shardfuse.serving import Engine, Request, SamplingParams, TokenEvent, sampling
from shardfuse.serving.request import SequenceState
from shardfuse.serving.runner import Runner
from shardfuse.serving.scheduler import Chunk
from shardfuse.testing import solo_tokens

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

VOCABULARY, POSITIONS = 32, 64
ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AssertionError, MemoryError, torch.OutOfMemoryError)
KINDS = ("model", "layout", "sampling")
INVALID: dict[str, tuple[Any, ...]] = {
    "prompt": (
        [],
        [VOCABULARY],
        [-1],
        [1.5],
        "text",
        b"text",
        3,
        None,
        [None],
        [[1]],
        [True],
        [1] * POSITIONS,
        [10**30],
    ),
    "max_new_tokens": (0, -1, 1.5, "4", None, True, 10**30, float("nan")),
    "stop": ("x", 3, None, ["x"], [1.5], [[1]], [False]),
    "sampling": (
        *(
            SamplingParams(temperature=each)
            for each in (-1.0, float("nan"), float("inf"), "1", None, True, 10**400, 1j)
        ),
        *(SamplingParams(seed=each) for each in (1.5, "1", None, 2**64, -(2**63) - 1, True)),
        *(SamplingParams(top_p=each) for each in (0.0, 1.5, -1, float("nan"), "1", None)),
        *(SamplingParams(top_k=each) for each in (-1, 1.5, None)),
        *(SamplingParams(min_tokens=each) for each in (-1, 11, 1.5, "1", None, True)),
        *(SamplingParams(bad_words=each) for each in ("x", 3, None, [3], ["x"], [[]], [[VOCABULARY]], [[1.5]])),
        *(None, {}, "greedy"),
    ),
    "stop_strings": ("x", 3, None, [""], [1], ["without a tokenizer"]),
    "priority": (1.5, "1", None, True),
    "cache_salt": (1, None, b"x"),
    "client": (1, None, b"x"),
    "timeout_s": (0, -1.0, float("nan"), float("inf"), "1", True),
    "arrival": (1.5, "1", None, True),
}


@dataclasses.dataclass
class Fault:
    """A request's fault: from its step ``after`` on, ``kind`` raises ``error``."""

    kind: str
    after: int
    error: type[Exception]
    steps: int = 0
    raised: bool = False

    def strike(self) -> None:
        self.steps += 1
        if self.steps > self.after:
            self.raised = True
            raise self.error(f"a fault of {self.kind}")


class Case:
    """One engine and the faults of its requests."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.model = exact(random.choice(STYLES))
        self.batch_fails = random.choice((0.0, 0.0, 0.1, 0.5))
        self.faults: dict[int, Fault] = {}
        self.laid_out: set[int] = set()  # the requests of the step
        self.sizes = self._sizes()
        self.engine = Engine(self.model, **self.sizes)

    def _sizes(self) -> dict[str, int]:
        seqs, block_size = self.random.randint(1, 5), self.random.choice((1, 2, 3, 4, 16))
        return {
            "block_size": block_size,
            "num_blocks": -(-24 // block_size) + self.random.choice((0, 2, 20)),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + self.random.choice((0, 1, 5, 40)),
            "max_overtakes": self.random.choice((0, 2, 64)),
        }

    # --- where faults strike

    def attend(self, batch: PagedBatch, layer: int, *args: Any, **options: Any) -> torch.Tensor:
        out = ATTEND(batch, layer, *args, **options)
        if layer < self.model.config.num_layers - 1:
            return out
        for number, fault in self._struck("model"):  # the cache is written
            if number in self.laid_out:
                fault.strike()
        if len(self.laid_out) > 1 and self.random.random() < self.batch_fails:
            raise self.random.choice(ERRORS)("a fault of the batch")
        return out

    def lay_out(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        self.laid_out = {chunk.sequence.number for chunk in chunks}
        for number, fault in self._struck("layout"):
            if number in self.laid_out:
                fault.strike()
        return Runner.logits(self.engine._runner, chunks)

    def draw(self, logits: torch.Tensor, likeliest: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
        for number, fault in self._struck("sampling"):
            if any(sequence in self.engine._live.get(number, ()) for sequence in sequences):
                fault.strike()
        return DRAW(logits, likeliest, sequences)

    def _struck(self, kind: str) -> list[tuple[int, Fault]]:
        return [(number, fault) for number, fault in self.faults.items() if fault.kind == kind]

    # --- requests

    def request(self) -> Request:
        random = self.random
        most = random.randint(1, 10)
        return Request(
            [random.randrange(VOCABULARY) for _ in range(random.randint(1, 14))],
            max_new_tokens=most,
            stop=[random.randrange(VOCABULARY) for _ in range(random.choice((0, 0, 3)))],
            sampling=SamplingParams(
                temperature=random.choice((0.0, 0.0, 0.7, 1.5)),
                top_k=random.choice((0, 0, 5)),
                top_p=random.choice((1.0, 0.9)),
                min_p=random.choice((0.0, 0.1)),
                repetition_penalty=random.choice((1.0, 1.3)),
                frequency_penalty=random.choice((0.0, 0.5)),
                prompt_logprobs=random.choice((None, None, 0, 3)),
                min_tokens=random.choice((0, 0, random.randint(0, most))),
                bad_words=random.choice(((), (), self.words())),
                seed=random.randrange(2**63),
            ),
            priority=random.choice((0, 0, -1, 3)),
            cache_salt=random.choice(("", "", "b")),
            client=random.choice(("", "", "b", "c")),
            arrival=random.choice((0, 0, random.randrange(30))),
        )

    def words(self) -> list[list[int]]:
        """Sequences of one to three tokens, which leave most of the vocabulary."""
        return [[self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 3))] for _ in range(12)]

    def add_invalid(self) -> None:
        """Add a request that must be refused, and change nothing."""
        field = self.random.choice(list(INVALID))
        values = vars(self.request()) | {field: self.random.choice(INVALID[field])}
        before = self._state()
        with pytest.raises(ValueError, match=r".+"):
            self.engine.add(Request(**values))
        assert self._state() == before

    def _state(self) -> Any:
        engine = self.engine
        return engine._next_id, list(engine._live), engine.load.waiting, engine._allocator.free_blocks

    def expected(self, request: Request) -> list[int]:
        return solo_tokens(self.model, request)

    def idle(self) -> bool:
        engine, scheduler = self.engine, self.engine._scheduler
        left = (engine._live, engine._cancelled, scheduler.running, scheduler.waiting, scheduler.clients._clients)
        return not engine.busy and not any(left) and not engine._allocator.used_blocks


ATTEND, DRAW = PagedBatch.attend, sampling._draw


def _run(case: Case, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Serve the case's requests; returns how they ended."""
    random, engine = case.random, case.engine
    coming = [case.request() for _ in range(random.randint(1, 9))]
    expected = [case.expected(request) for request in coming]
    added: dict[int, int] = {}  # the engine's number -> index in coming
    cancelled: set[int] = set()
    events: list[TokenEvent] = []
    failures = 0

    patch.setattr(PagedBatch, "attend", lambda batch, *args, **options: case.attend(batch, *args, **options))
    patch.setattr(engine._runner, "logits", case.lay_out)
    patch.setattr(sampling, "_draw", case.draw)
    for _ in range(5000):
        while len(added) < len(coming) and (not engine.busy or random.random() < 0.5):
            number = engine.add(coming[len(added)])
            added[number] = len(added)
            if random.random() < 0.25:
                case.faults[number] = Fault(random.choice(KINDS), random.randint(0, 6), random.choice(ERRORS))
        if random.random() < 0.2:
            case.add_invalid()
        if added and random.random() < 0.03:
            number = random.choice(list(added))
            if engine.cancel(number):
                cancelled.add(number)
        if not engine.busy and len(added) == len(coming):
            break
        try:
            events += engine.step()
            failures = 0
        except ERRORS:
            failures += 1
            assert failures < 2, "a step after a failed one raised"
    assert case.idle()
    ends: Counter[str] = Counter()
    for number, index in added.items():
        mine = [event for event in events if event.request == number]
        tokens = [event.token for event in mine if event.token is not None]
        finish = mine[-1].finish
        assert finish is not None
        assert [event.finish for event in mine[:-1]] == [None] * (len(mine) - 1)
        ends[finish] += 1
        fault = case.faults.get(number)
        assert (finish == "cancelled") == (number in cancelled)
        assert (finish == "error") == (fault is not None and fault.raised and number not in cancelled), fault
        assert (mine[-1].error is not None) == (finish == "error")
        if finish in ("length", "stop"):
            assert tokens == expected[index]
            asked, found = coming[index].sampling.prompt_logprobs is not None, mine[0].prompt_logprobs
            assert (found is not None) == asked
            assert [each.token for each in found or ()] == list(coming[index].prompt[1:] if asked else ())
        else:
            assert tokens == expected[index][: len(tokens)]
    recordings = engine._runner.recordings
    assert recordings is not None
    assert not recordings._off, "a fault ended the recording of steps"
    patch.undo()
    case.faults.clear()
    case.batch_fails = 0.0
    assert engine.generate([dataclasses.replace(request, arrival=0) for request in coming]) == expected
    assert case.idle()
    return ends


def test_no_request_costs_another(fuzz: Fuzz) -> None:
    ends: Counter[str] = Counter()

    def check(number: int, random: Random) -> str:
        case = Case(random)
        try:
            with pytest.MonkeyPatch.context() as patch:
                found = _run(case, patch)
        except BaseException:
            print(f"case {number}: {case.sizes}, batches fail at {case.batch_fails}, {case.faults}")
            raise
        ends.update(found)
        return "without errors" if "error" not in found else "with errors"

    fuzz.run(check)
    print("requests by their end:", dict(ends))
