"""Several answers to one prompt: the tokens of separate requests, the prompt computed and kept once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from serving_case import build, exact

from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, Request, SamplingParams
from shardfuse.serving.scheduler import Copy

PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [6, 5], [8, 9, 7, 9, 3, 2, 3, 8])
HOT = SamplingParams(temperature=1.2, seed=2**64 - 2)


def _requests(n: int, new: int = 7) -> list[Request]:
    return [Request(prompt, max_new_tokens=new, sampling=HOT, n=n) for prompt in PROMPTS]


def _separately(requests: list[Request]) -> list[list[int]]:
    engine = Engine(exact("gated"), num_blocks=64, block_size=4)
    return [
        engine.generate(
            [dataclasses.replace(each, n=1, sampling=dataclasses.replace(HOT, seed=(HOT.seed + i) % 2**64))]
        )[0]
        for each in requests
        for i in range(each.n)
    ]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 64, "block_size": 4, "max_num_seqs": 16},
        {"num_blocks": 64, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 3},  # they wait for a row
        {"num_blocks": 6, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 16},  # and for blocks
        {"num_blocks": 60, "block_size": 1, "max_num_seqs": 16},
        {"num_blocks": 8, "block_size": 16, "max_num_seqs": 16},
    ],
    ids=["room", "rows", "blocks", "block of one", "large blocks"],
)
def test_answers_are_those_of_separate_requests(sizes: dict[str, int], prefix_caching: bool) -> None:
    requests = _requests(4)
    engine = Engine(exact("gated"), prefix_caching=prefix_caching, **sizes)
    answers = engine.generate(requests)
    assert answers == _separately(requests)
    assert len({tuple(answer) for answer in answers}) > 6
    assert not engine._allocator.used_blocks


def test_the_prompt_is_computed_and_kept_once() -> None:
    """What is copied is the last block, by all but one of those that write to it."""
    request = Request(PROMPTS[0], max_new_tokens=4, sampling=HOT, n=5)
    engine = Engine(exact("gated"), num_blocks=64, block_size=4, max_num_seqs=8)
    copied: list[Copy] = []
    copy = engine._runner.copy_blocks
    engine._runner.copy_blocks = lambda pairs: (copied.extend(pairs), copy(pairs))  # type: ignore[method-assign,assignment,func-returns-value]
    engine.add(request)
    events = engine.step()
    assert [(event.index, event.finish) for event in events] == [(i, None) for i in range(5)]
    assert (engine.stats.prefill_tokens, engine.stats.generated_tokens) == (7, 5)
    assert (engine._allocator.used_blocks, engine._allocator.unused_slots) == (2, 1)
    engine.step()
    assert len(copied) == 4
    assert len({each.source for each in copied}) == 1
    assert engine._allocator.used_blocks == 6
    assert engine.stats.prefill_tokens == 7


def test_ends_are_told_for_each_answer() -> None:
    engine = Engine(exact("gated"), num_blocks=64, block_size=4)
    number = engine.add(Request(PROMPTS[0], max_new_tokens=9, sampling=HOT, n=3))
    engine.step()
    assert engine.cancel(number)
    assert [(event.request, event.index, event.finish) for event in engine.step()] == [
        (number, index, "cancelled") for index in range(3)
    ]
    assert not engine.busy
    number = engine.add(Request(PROMPTS[0], max_new_tokens=3, n=3))
    engine.cancel(number)
    assert [(event.index, event.finish) for event in engine.step()] == [(0, "cancelled")]
    assert not engine._allocator.used_blocks


def test_the_queue_counts_every_answer() -> None:
    engine = Engine(exact("gated"), num_blocks=64, block_size=4, max_queued_tokens=50)
    engine.add(Request([1, 2], max_new_tokens=9, n=4))
    with pytest.raises(Exception, match=r"4 answers of 38 tokens wait, this request has 20 "):
        engine.add(Request([1, 2], max_new_tokens=9, n=2))


@pytest.mark.parametrize("n", [0, 129, 1.5, True])
def test_other_numbers_are_refused(n: Any) -> None:
    with pytest.raises(ValueError, match="n="):
        Engine(exact("gated"), num_blocks=64, block_size=4).add(Request([1], n=n))


def _on_rank(rank: int, world: int) -> list[list[int]] | None:
    mesh = init_mesh(tp=world, device_type="cpu")
    with Engine(build("gated", mesh), num_blocks=24, block_size=4, max_num_seqs=6) as engine:
        return engine.follow() if rank else engine.generate(_requests(3))


@pytest.mark.ranks
def test_every_rank_copies(ranks: Any) -> None:
    assert ranks(2, _on_rank)[0] == _separately(_requests(3))
