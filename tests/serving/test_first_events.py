"""What the first event of an answer tells: when the engine first scheduled it, and what the prefix cache held."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from shardfuse.serving import Engine, Request, TokenEvent, scheduler
from shardfuse.testing import tiny_engine

BLOCK = 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # two blocks and two tokens


def _count_calls(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Let the scheduler's clock say ``first`` at its first call, and one more at each later one."""
    clock = itertools.count(first)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))


def _told(engine: Engine, *requests: Request) -> dict[tuple[int, int], list[TokenEvent]]:
    """The events of each answer, by request and index."""
    found: dict[tuple[int, int], list[TokenEvent]] = {}
    engine.add_all(requests)
    for event in engine.run():
        found.setdefault((event.request, event.index), []).append(event)
    return found


def test_the_first_event_has_the_cached_tokens() -> None:
    """Those of whole blocks before the last token, once for all answers to a prompt."""
    with tiny_engine(block_size=BLOCK) as engine:
        for prompt, wanted in (
            (PROMPT, 0),
            (PROMPT, 2 * BLOCK),
            (PROMPT[: 2 * BLOCK], BLOCK),
            ([*PROMPT[:9], 0], BLOCK),
        ):
            answers = _told(engine, Request(prompt, max_new_tokens=3, n=2, ignore_eos=True))
            told = {index: [event.cached_tokens for event in events] for (_, index), events in answers.items()}
            assert told == {0: [wanted, None, None], 1: [None, None, None]}


def test_nothing_is_cached_without_the_cache() -> None:
    with tiny_engine(block_size=BLOCK, prefix_caching=False) as engine:
        for _ in range(2):
            (events,) = _told(engine, Request(PROMPT, max_new_tokens=2)).values()
            assert [event.cached_tokens for event in events] == [0, None]


def test_tokens_found_again_after_a_preemption_are_not_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is preempted after its first block is admitted twice, and finds that block."""
    _count_calls(monkeypatch, 100)
    with tiny_engine(block_size=BLOCK, max_num_batched_tokens=8) as engine:
        engine.add(Request(PROMPT, max_new_tokens=2, ignore_eos=True))
        assert engine.step() == []
        engine._scheduler._stop_last()
        events = list(engine.run())
        assert engine.stats.shared_tokens == BLOCK
    assert [(event.cached_tokens, event.scheduled) for event in events] == [(0, 100.0), (None, None)]


def test_the_clock_is_read_once_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to one prompt have its time, also one that has to wait for its own first step."""
    _count_calls(monkeypatch, 1)
    with tiny_engine(block_size=BLOCK, max_num_seqs=2) as engine:
        answers = _told(engine, *(Request([each, 1], max_new_tokens=4, n=2, ignore_eos=True) for each in (1, 2)))
    told = {key: [event.scheduled for event in events] for key, events in answers.items()}
    assert {key: each[1:] for key, each in told.items()} == dict.fromkeys(told, [None] * 3)
    assert {key: each[0] for key, each in told.items()} == {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 2.0, (1, 1): 2.0}
