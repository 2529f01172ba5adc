"""Log-probabilities of prompts: those of the training forward, however a prompt is cut, preempted or known already."""

from __future__ import annotations

import dataclasses
import pickle
import tracemalloc
from typing import Any

import pytest
import torch
from serving_case import exact

from shardfuse.serving import Engine, Request, SamplingParams, ScoredToken, TokenEvent, prompt_logprobs
from shardfuse.serving.request import SequenceState
from shardfuse.serving.scheduler import Chunk

# In fp64, where sums in another order differ by about 1e-14.
CLOSE = 1e-9


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(32, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _asked() -> list[Request]:
    """Prompts of 1 to 23 tokens; of three of them no log-probabilities, of one the tokens' own alone."""
    most = [3, None, 0, 5, 32, 3, None, 64, 2, None]
    return [
        Request(
            _prompt(length, i),
            5,
            sampling=SamplingParams(temperature=i % 2, seed=i, prompt_logprobs=most[i], logprobs=1),
        )
        for i, length in enumerate([23, 7, 11, 1, 2, 16, 20, 9, 13, 3])
    ]


@torch.no_grad()
def _assert_scores(request: Request, scores: tuple[ScoredToken, ...]) -> None:
    expected = exact("gated")(torch.tensor([request.prompt]))[0].double().log_softmax(-1)
    assert [each.token for each in scores] == list(request.prompt[1:])
    most = min(request.sampling.prompt_logprobs, 32)
    for row, each in zip(expected, scores):
        best = row.topk(most)
        assert each.logprob == pytest.approx(row[each.token].item(), abs=CLOSE)
        assert [token for token, _ in each.top_logprobs] == best.indices.tolist()
        assert [score for _, score in each.top_logprobs] == pytest.approx(best.values.tolist(), abs=CLOSE)
        assert each.rank == 1 + int((row > row[each.token]).sum())


def _assert_all(requests: list[Request], events: list[TokenEvent], first: int = 0) -> None:
    """The first event of each request that asks for scores has them, and no other event does."""
    for number, request in enumerate(requests, first):
        mine = [event.prompt_logprobs for event in events if event.request == number]
        assert mine[1:] == [None] * (request.max_new_tokens - 1)
        if request.sampling.prompt_logprobs is None:
            assert mine[0] is None
        else:
            _assert_scores(request, mine[0])


def _events(engine: Engine, requests: list[Request]) -> list[TokenEvent]:
    for request in requests:
        engine.add(request)
    return list(engine.run())


SIZES: dict[str, dict[str, Any]] = {
    "whole": {"num_blocks": 100, "max_num_seqs": 10},
    "in pieces": {"num_blocks": 100, "max_num_seqs": 3, "max_num_batched_tokens": 5},
    "a token at a time": {"num_blocks": 100, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    "preempted": {"num_blocks": 28, "block_size": 1, "max_num_seqs": 6, "max_num_batched_tokens": 9},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_scores_are_those_of_the_whole_prompt(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    """``rows`` of a chunk's logits are scored at once."""
    monkeypatch.setattr(prompt_logprobs, "_ELEMENTS", 32 * rows)
    requests = _asked()
    plain = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, prompt_logprobs=None))
        for each in requests
    ]
    engine = Engine(exact("gated"), **{"block_size": 4, **SIZES[name]})
    events = _events(engine, requests)
    _assert_all(requests, events)
    assert (engine.stats.preemptions > 0) == (name == "preempted")
    answers = [[event.token for event in events if event.request == i] for i in range(len(requests))]
    assert answers == Engine(exact("gated"), num_blocks=100, block_size=4).generate(plain)


def test_a_preempted_prompt_is_scored_once():
    """The older one takes the blocks of the younger one, in the middle of whose prompt it is."""
    sampling = SamplingParams(prompt_logprobs=2)
    requests = [Request(_prompt(4, 1), 9, sampling=sampling), Request(_prompt(11, 2), 5, sampling=sampling)]
    engine = Engine(exact("gated"), num_blocks=17, block_size=1, max_num_seqs=2, max_num_batched_tokens=2)
    scored: list[int] = []
    take = prompt_logprobs._score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_logprobs, "_score", lambda *given: scored.append(len(given[2])) or take(*given))
        events = _events(engine, requests)
    assert 0 < engine.stats.recomputed_tokens < 11
    assert sum(scored) == 3 + 10
    _assert_all(requests, events)


def test_a_known_prefix_is_computed_again():
    """A request that asks for scores shares nothing; others share what it computed."""
    prompt = _prompt(21, 3)
    asks = Request(prompt, 5, sampling=SamplingParams(prompt_logprobs=1))
    plain = Request(prompt, 5)
    engine = Engine(exact("gated"), num_blocks=100, block_size=4)
    answer = engine.generate([plain])
    assert engine.stats.shared_tokens == 0
    events = _events(engine, [asks, asks])
    _assert_all([asks, asks], events, first=1)
    assert engine.stats.shared_tokens == 0
    assert engine.generate([plain]) == answer
    assert engine.stats.shared_tokens == 20


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_fails_loses_no_score(call: int):
    class FailsOnce:
        def __init__(self) -> None:
            self.model, self.left = exact("gated"), call
            self.config, self.group, self.parameters = self.model.config, self.model.group, self.model.parameters

        def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self.model(tokens, **kwargs)

        def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if not self.left:
                raise RuntimeError("a fault")
            return logits

        load_state_dict = None

    requests = _asked()
    engine = Engine(FailsOnce(), num_blocks=100, block_size=4, max_num_batched_tokens=8)
    for request in requests:
        engine.add(request)
    events = []
    failures = 0
    while engine.busy:
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    _assert_all(requests, events)


def _scores(length: int, most: int) -> Any:
    """The scores of a prompt of ``length`` tokens."""
    sequence = SequenceState(0, Request(_prompt(length, 5), sampling=SamplingParams(prompt_logprobs=most)), [])
    logits = torch.randn(length, 32, generator=torch.Generator().manual_seed(1))
    prompt_logprobs.take_prompt_scores(logits, [Chunk(sequence, 0, length, True)])
    return sequence.prompt_scores


def test_scores_take_few_bytes():
    """Of 32 tokens for each of 1000, an index and an fp64 number, with room to grow."""
    _scores(2, 32)  # what is imported and made once
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        scores = _scores(1000, 32)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(scores) == 999
    assert held < 999 * 33 * 12 * 1.5 + 100_000


@pytest.mark.parametrize("most", [0, 3])
def test_scores_read_like_a_tuple(most: int):
    scores, again = _scores(6, most), _scores(6, most)
    plain = tuple(scores)
    assert all(type(each) is ScoredToken and len(each.top_logprobs) == most for each in plain)
    assert (scores[-1], scores[1:3], scores[::-1]) == (plain[-1], plain[1:3], plain[::-1])
    assert scores == plain == again == pickle.loads(pickle.dumps(scores))
    assert scores != plain[:-1]
    assert hash(scores) == hash(plain)
    assert repr(scores) == repr(plain)
    with pytest.raises(IndexError):
        scores[5]


@pytest.mark.parametrize("most", [-1, 1.5, True])
def test_what_makes_no_sense_is_refused(most: Any):
    with pytest.raises(ValueError, match=f"prompt_logprobs={most}: expected"):
        SamplingParams(prompt_logprobs=most).check(32)
