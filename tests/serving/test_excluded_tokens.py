"""``min_tokens`` and ``bad_words``: which tokens they exclude, when, and whatever else an engine does meanwhile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from serving_case import exact

from shardfuse.serving import Engine, Guide, Request, SamplingParams, TokenEvent
from shardfuse.serving.request import SequenceState
from shardfuse.serving.sampling import sample
from shardfuse.serving.sampling_params import NoTokenLeft
from shardfuse.serving.text import AnswerText, StopStrings

FALLING = torch.arange(8.0, 0.0, -1.0).unsqueeze(0)  # token 0 is the likeliest, then 1, ...


def _state(answer: tuple[int, ...], prompt: tuple[int, ...] = (5, 1), stop: tuple[int, ...] = (), **params: Any) -> Any:
    request = Request(prompt, stop=stop, sampling=SamplingParams(**params))
    return SequenceState(0, request, [*prompt, *answer], stop=request.stops(()))


def _next(state: SequenceState) -> int:
    before = FALLING.clone()
    (found,) = sample(FALLING, [state])
    assert torch.equal(before, FALLING)
    return found.token


@pytest.mark.parametrize(
    ("words", "answer", "token"),
    [
        ([[0]], (), 1),
        ([[0], [1]], (3,), 2),
        ([[3, 0]], (), 0),
        ([[3, 0]], (3,), 1),
        ([[3, 0]], (3, 2), 0),
        ([[1, 0]], (), 0),  # the prompt's own 1 does not count
        ([[1, 3, 0]], (3,), 0),
        ([[2, 3, 0], [3, 1]], (2, 3), 2),
        ([[2, 3, 0]], (3,), 0),
        ([[3, 3, 0]], (3, 3, 3), 1),
    ],
)
def test_the_last_token_of_a_bad_word_does_not_follow_the_others(words: Any, answer: Any, token: int) -> None:
    assert _next(_state(answer, bad_words=words)) == token


@pytest.mark.parametrize(("answer", "token"), [((), 2), ((2,), 2), ((2, 2), 0)])
def test_no_stop_token_before_min_tokens(answer: tuple[int, ...], token: int) -> None:
    """Also with a stop token that the model does not have."""
    assert _next(_state(answer, stop=(0, 1, 99), min_tokens=2)) == token


def test_log_probabilities_stay_the_models_own() -> None:
    (found,) = sample(FALLING, [_state((), bad_words=[[0]], logprobs=1)])
    own = FALLING[0].double().log_softmax(0)
    assert (found.token, found.logprob) == (1, pytest.approx(own[1].item()))
    assert found.top_logprobs == ((0, pytest.approx(own[0].item())),)


@pytest.mark.parametrize("params", [{"bad_words": [[2]]}, {"min_tokens": 1}], ids=["bad_words", "min_tokens"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_excludes_every_token_fails_alone(params: Any, temperature: float) -> None:
    request = Request([1, 2], 3, stop=[2], sampling=SamplingParams(temperature, allowed_tokens=[2], **params))
    engine = Engine(exact("gated"), num_blocks=8, block_size=4)
    engine.add(request)
    engine.add(Request([1, 2], 3))
    events = list(engine.run())
    (failed,) = [event for event in events if event.request == 0]
    assert isinstance(failed.error, NoTokenLeft)
    assert "after 0 tokens of the answer" in str(failed.error)
    assert [event.finish for event in events if event.request == 1] == [None, None, "length"]


def test_more_min_tokens_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=4: expected at most max_new_tokens=3"):
        Request([1], 3, sampling=SamplingParams(min_tokens=4)).check(32)
    Request([1], 3, sampling=SamplingParams(min_tokens=3)).check(32)


# --- the engine -------------------------------------------------------------------------------------------------------


def _asked() -> list[Request]:
    """Several answers each, greedy and drawn, that would repeat the words and end early."""
    words = [[token] for token in range(8)] + [[a, b] for a in range(8, 32) for b in range(8, 32) if a % 3 != b % 3]
    return [
        Request(
            torch.randint(32, (9,), generator=torch.Generator().manual_seed(i)).tolist(),
            12,
            stop=range(8, 24),
            n=1 + i % 3,
            sampling=SamplingParams(temperature=i % 2 * 1.5, seed=i, min_tokens=i, bad_words=words),
        )
        for i in range(9)
    ]


SIZES: dict[str, dict[str, Any]] = {
    "together": {"num_blocks": 400},
    "in pieces": {"num_blocks": 400, "max_num_seqs": 3, "max_num_batched_tokens": 4},
    "preempted": {"num_blocks": 30, "block_size": 1, "max_num_seqs": 6, "max_num_batched_tokens": 9},
}


@pytest.mark.parametrize("name", SIZES)
def test_answers_have_no_bad_word_and_no_early_end(name: str) -> None:
    engine = Engine(exact("gated"), **{"block_size": 4, **SIZES[name]})
    requests = _asked()
    answers = engine.generate(requests)
    assert (engine.stats.preemptions > 0) == (name == "preempted")
    of = [request for request in requests for _ in range(request.n)]
    for request, answer in zip(of, answers):
        assert all(token >= 8 for token in answer)
        assert all(a % 3 == b % 3 for a, b in itertools.pairwise(answer))
        ends = [at for at, token in enumerate(answer) if token in request.stop]
        assert ends in ([], [len(answer) - 1])
        assert len(answer) == 12 if not ends else len(answer) > request.sampling.min_tokens
    alone = Engine(exact("gated"), num_blocks=400, block_size=4, max_num_seqs=1)
    assert answers == [answer for request in requests for answer in alone.generate([request])]


# --- stop strings -----------------------------------------------------------------------------------------------------


class _Letters:
    """A tokenizer with a token for each letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("least", "text", "tokens"), [(0, "x", 3), (2, "x", 3), (3, "xabx", 6), (5, "xabx", 6), (6, "xabxaby", 7)]
)
def test_a_stop_string_counts_after_min_tokens(least: int, text: str, tokens: int) -> None:
    """Its last token decides; an earlier one is text."""
    answer, found, used = AnswerText(_Letters().decode, ["ab"], False, least), "", 0
    for letter in "xabxaby":
        found += answer.push(ord(letter))
        used += 1
        if answer.stop_string is not None:
            break
    assert (found + answer.flush(), used) == (text, tokens)
    assert answer.stop_string == ("ab" if tokens < 7 else None)


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_may_begin_in_a_piece_that_cannot_end(included: bool) -> None:
    search = StopStrings(["abc", "b"], included)
    assert search.push("xab", ends=False) == "x"
    assert search.found is None
    assert search.push("cd") == ("abc" if included else "")
    assert search.found == "abc"


# --- guides -----------------------------------------------------------------------------------------------------------


def _guided(guide: Guide, **params: Any) -> list[TokenEvent]:
    import tokenizer_case as case

    tokenizer = case.byte_level()
    end = tokenizer.token_to_id(case.END)
    with Engine(case.model(), num_blocks=64, block_size=4, tokenizer=tokenizer) as engine:
        sampling = SamplingParams(guide=guide, **params)
        engine.add(Request(tokenizer.encode("a").ids, 12, stop=[end], sampling=sampling))
        return list(engine.run())


def test_with_a_guide() -> None:
    """The tokens that may end an answer are excluded, and a guide that ends it by itself is refused."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")
    pytest.importorskip("llguidance", reason="llguidance is not installed (pip install .[guided])")
    from shardfuse.serving.guide import GuideRefused

    often = [len(_guided(Guide.regex("[ab]*"), temperature=1.5, seed=seed, min_tokens=5)) for seed in range(4)]
    assert all(5 < count <= 12 for count in often)
    refused = _guided(Guide.regex("[ab]"), min_tokens=3)[-1]
    assert isinstance(refused.error, GuideRefused)
    assert "it ends the answer after 1 tokens, and min_tokens=3" in str(refused.error)
    for words, expected in (([[65]], {"bbbbbb"}), ([[66]], {"aaaaaa"}), ([[65, 65], [66, 66]], {"ababab", "bababa"})):
        text = "".join(event.text for event in _guided(Guide.regex("[ab]{6}"), bad_words=words))
        assert text in expected
