"""Sampling of the next token: its distribution, what is left out of it, its numbers, and what it does not depend on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfuse.serving import Request, SamplingParams, logit_changes
from shardfuse.serving import request as request_module
from shardfuse.serving import sampling_params as params_module
from shardfuse.serving.request import SequenceState
from shardfuse.serving.sampling import Sampled, sample, uniform

VOCABULARY = 50


def _state(answer: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,), **params: Any) -> SequenceState:
    return SequenceState(0, Request(prompt, sampling=SamplingParams(**params)), [*prompt, *answer])


def _tokens(logits: torch.Tensor, *states: SequenceState) -> list[int]:
    return [each.token for each in _sampled(logits, states)]


def _sampled(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
    found = sample(logits, states)
    assert all(isinstance(each, Sampled) for each in found), found
    return cast(list[Sampled], found)


def _can_be_drawn(logits: torch.Tensor, draws: int = 3000, **params: Any) -> set[int]:
    rows = logits.expand(draws, -1)
    return set(_tokens(rows, *(_state(temperature=1.0, seed=seed, **params) for seed in range(draws))))


# ---------------------------------------------------------------------------------------------------------- the numbers
def test_numbers_follow_from_seed_and_position_alone():
    together = uniform([3, 3, 2**64 - 1, -1, 4], [0, 1, 5, 5, 0])
    assert together.dtype == torch.float64
    assert together[2] == together[3]  # the same 64 bits
    assert len(set(together.tolist())) == 4
    assert uniform([3], [1]) == together[1]


def test_numbers_are_uniform_and_independent():
    """Of one seed's positions, and of one position's seeds: mean, variance and the correlation of neighbours."""
    many = 40_000
    for numbers in (uniform([7] * many, range(many)), uniform(range(many), [3] * many)):
        assert 0 <= numbers.min() < 1e-3
        assert 1 - 1e-3 < numbers.max() < 1
        centred = numbers - 0.5
        assert abs(centred.mean()) < 5 / math.sqrt(12 * many)
        assert abs((centred**2).mean() - 1 / 12) < 5 / math.sqrt(180 * many)
        assert abs((centred[1:] * centred[:-1]).mean() * 12) < 5 / math.sqrt(many)
        seen = torch.bincount((numbers * 64).long(), minlength=64) - many / 64
        assert (seen**2 / (many / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)  # chi square


def test_numbers_are_those_of_splitmix64():
    """In Python's own integers."""
    mask = 2**64 - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def number(seed: int, position: int) -> float:
        gamma = 0x9E3779B97F4A7C15
        state = mixed(seed + gamma & mask) + (position + 1) * gamma & mask
        return (mixed(state) >> 11) * 2.0**-53

    pairs = [(0, 0), (1, 0), (2**63, 9), (-1, 10**6), (12345, 77)]
    expected = torch.tensor([number(*pair) for pair in pairs], dtype=torch.float64)
    assert torch.equal(uniform(*zip(*pairs)), expected)


# ----------------------------------------------------------------------------------------------------- the distribution
def test_sampling_follows_the_distribution():
    """4000 draws at temperature 2: each token's share within 5 standard deviations of its probability."""
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf"), -1.0])
    draws = 4000
    drawn = torch.tensor(_tokens(logits.expand(draws, -1), *(_state(temperature=2.0, seed=i) for i in range(draws))))
    expected = torch.softmax(logits / 2, 0)
    seen = torch.bincount(drawn, minlength=5) / draws
    assert seen[3] == 0
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_at_the_lowest_temperature_the_likeliest_token_is_drawn():
    assert _tokens(torch.tensor([[0.0, 2.0, 1.0]]), _state(temperature=1e-310)) == [1]


EVERY = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 3, 49, 50, 99]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 1.0, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.sampled_from([None, {3: 5.0, 4: -100.0}]),
        "allowed_tokens": st.sampled_from([None, (1, 2, 3), frozenset({49})]),
        "logprobs": st.sampled_from([None, 0, 5]),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)


def _spelled_out(logits: torch.Tensor, sequence: SequenceState) -> Sampled:
    """One token by the definitions, in Python's own arithmetic."""
    params, scores = sequence.request.sampling, [float(each) for each in logits]
    raw = torch.tensor(scores, dtype=torch.float64).log_softmax(0).tolist()
    answer = sequence.tokens[len(sequence.request.prompt) :]
    for token in range(len(scores)):
        if params.allowed_tokens is not None and token not in params.allowed_tokens:
            scores[token] = -math.inf
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in sequence.tokens:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.presence_penalty * (token in answer) + params.frequency_penalty * answer.count(token)
    token = max(range(len(scores)), key=scores.__getitem__)
    if params.temperature > 0:
        weights = {t: math.exp((s - scores[token]) / params.temperature) for t, s in enumerate(scores)}
        order = sorted(weights, key=lambda t: (-weights[t], t))
        last = weights[order[min(params.top_k or len(order), len(order)) - 1]]
        kept = [t for t in order if weights[t] >= last]
        total, before, most = math.fsum(weights[t] for t in kept), 0.0, []
        for t in kept:
            if not most or before < params.top_p * total:
                most.append(t)
            before += weights[t]
        left = {t for t in most if weights[t] >= params.min_p * weights[order[0]]}
        target = uniform([params.seed], [len(answer)]).item() * math.fsum(weights[t] for t in left)
        for t in range(len(scores)):
            target -= weights[t] if t in left else 0.0
            if target < 0:
                token = t
                break
    if params.logprobs is None:
        return Sampled(token)
    best = sorted(range(len(raw)), key=lambda t: -raw[t])[: params.logprobs]
    return Sampled(token, raw[token], tuple((t, raw[t]) for t in best))


@given(st.lists(EVERY, min_size=1, max_size=6), st.integers(0, 2**31))
def test_every_row_is_what_the_definitions_say(params: list[dict[str, Any]], seed: int):
    drawn = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCABULARY, generator=drawn, dtype=torch.float64) * 3
    before = logits.clone()
    states = []
    for each in params:
        prompt = torch.randint(VOCABULARY, (4,), generator=drawn).tolist()
        answer = torch.randint(VOCABULARY, (5,), generator=drawn).tolist()
        states.append(_state(tuple(answer), tuple(prompt), **each))
    found = sample(logits, states)
    assert torch.equal(logits, before)
    for row, (got, state) in enumerate(zip(found, states)):
        expected = _spelled_out(logits[row], state)
        assert got.token == expected.token
        assert (got.logprob is None) == (expected.logprob is None)
        if expected.logprob is not None:
            assert got.logprob == pytest.approx(expected.logprob)
            assert [token for token, _ in got.top_logprobs] == [token for token, _ in expected.top_logprobs]
        assert _sampled(logits[row : row + 1], [state]) == [got]  # whatever the other rows are


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype):
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = [_state(temperature=(i % 3) / 2, top_k=i % 5, top_p=1 - (i % 4) / 10, seed=i) for i in range(64)]
    together = _sampled(logits, states)
    assert together == [_sampled(logits[i : i + 1], states[i : i + 1])[0] for i in range(64)]
    assert len({each.token for each in together}) > 10


# -------------------------------------------------------------------------------------------------- what is left out
def test_what_transformers_leaves_out_is_left_out():
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    ours_and_theirs = [
        ({"top_k": 4}, transformers.TopKLogitsWarper(4)),
        ({"top_p": 0.8}, transformers.TopPLogitsWarper(0.8)),
        ({"min_p": 0.2}, transformers.MinPLogitsWarper(0.2)),
    ]
    for params, warper in ours_and_theirs:
        kept = warper(torch.zeros(1, 1, dtype=torch.long), logits[None])[0] > float("-inf")
        assert 1 < kept.sum() < 30
        assert _can_be_drawn(logits, **params) == set(kept.nonzero().flatten().tolist())
    answer = (3, 7, 7)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[5, *answer]]), logits[None].clone())
    assert _tokens(logits[None], _state(answer, (5,), repetition_penalty=1.7)) == theirs.argmax(-1).tolist()


def test_equally_likely_tokens_are_kept_together():
    assert _can_be_drawn(torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]), top_k=2) == {1, 2, 3}
    assert _can_be_drawn(torch.tensor([0.0, 0.0, 0.0, 0.0]), top_p=0.5) == {0, 1}


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    expected = torch.log_softmax(logits[0].double(), 0).tolist()
    (found,) = _sampled(logits, [_state(logprobs=2, logit_bias={0: 50.0}, temperature=3.0)])
    assert (found.token, found.logprob) == (0, pytest.approx(expected[0]))
    assert [token for token, _ in found.top_logprobs] == [2, 1]
    assert [score for _, score in found.top_logprobs] == pytest.approx([expected[2], expected[1]])
    assert _sampled(logits, [_state(logprobs=0)])[0].top_logprobs == ()


# ---------------------------------------------------------------------------------------------- what is prepared once
def _naive(logits: torch.Tensor, sequence: SequenceState) -> torch.Tensor:
    """The changed logits [V], from the whole prompt and answer."""
    params, logits, prompt = sequence.request.sampling, logits.clone(), len(sequence.request.prompt)
    if params.allowed_tokens is not None:
        allowed = torch.tensor(sorted(params.allowed_tokens))
        kept = logits[allowed]
        logits.fill_(float("-inf"))[allowed] = kept
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    seen = torch.tensor(sorted(set(sequence.tokens)))
    if params.repetition_penalty != 1.0:
        scores, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if sequence.generated:
        made, times = torch.tensor(sequence.tokens[prompt:]).unique(return_counts=True)
        less = params.presence_penalty + params.frequency_penalty * times.double()
        if params.presence_penalty or params.frequency_penalty:
            logits[made] -= less.to(logits.dtype)
    return logits


@given(EVERY, st.integers(0, 2**31), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_answers_that_grow_change_logits_as_if_they_were_new(params: dict[str, Any], seed: int, dtype: torch.dtype):
    """Bit for bit, for two answers to one request, of which one pauses and gets several tokens at once."""
    drawn = torch.Generator().manual_seed(seed)
    first = _state((), tuple(torch.randint(VOCABULARY, (4,), generator=drawn).tolist()), **params)
    second = first.fork(1, 1)
    for step in range(6):
        for sequence in (first, second)[: 1 + (step != 2)]:
            logits = torch.randn(VOCABULARY, generator=drawn).to(dtype)
            expected = _naive(logits, sequence)
            for _ in range(1 + step % 2):  # a step may be computed again
                changed = logits.clone()
                sequence.changes.apply_(changed, sequence.request, sequence.tokens)
                assert torch.equal(changed, expected)
        for sequence in (first, second):
            sequence.tokens.append(int(torch.randint(VOCABULARY, (1,), generator=drawn)))


@pytest.mark.parametrize(
    ("params", "constants"),
    [
        ({"allowed_tokens": list(range(1000)) * 3}, 1000),
        ({"logit_bias": dict.fromkeys(range(1000), 1.0)}, 2000),
        ({"repetition_penalty": 1.5}, 1000),
        ({"frequency_penalty": 1.0, "presence_penalty": 0.5}, 0),
    ],
    ids=["allowed", "bias", "repetition", "frequency"],
)
def test_constants_become_tensors_once(params: dict[str, Any], constants: int, monkeypatch: pytest.MonkeyPatch):
    """Of all answers and steps; and a step reads the new token of an answer, not the answer."""
    sizes, tensor = [], torch.tensor

    def counting(values: Any, **more: Any) -> torch.Tensor:
        made = tensor(values, **more)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "tensor", counting)
    lead = _state((), tuple(range(1000)), **params)
    answers = [lead, *(lead.fork(index, index) for index in range(1, 8))]
    logits = torch.randn(8, 2000, generator=torch.Generator().manual_seed(0))
    for step in range(20):
        for answer in answers:
            answer.tokens.append(1990 + step % 2)
        _sampled(logits, answers)
    assert sum(sizes) <= constants + len(answers) * 2 * 3


def test_repetitions_are_not_kept():
    params = SamplingParams(allowed_tokens=[7, 3] * 1000)
    assert params.allowed_tokens == (7, 3)
    assert SamplingParams(allowed_tokens={7, 3}).allowed_tokens == frozenset({7, 3})
    assert SamplingParams(allowed_tokens=range(10**12)).allowed_tokens == range(10**12)
    request = Request([1], stop=[5] * 1000, stop_strings=["b", "a"] * 1000, sampling=params)
    assert (request.stop, request.stop_strings) == ({5}, ("b", "a"))


def test_what_the_caller_changes_later_changes_nothing():
    bias, allowed = {3: 1.0}, [3]
    params = SamplingParams(logit_bias=bias, allowed_tokens=allowed)
    bias[99] = 2.0
    allowed.append(99)
    assert (params.logit_bias, params.allowed_tokens) == ({3: 1.0}, (3,))


def test_python_looks_at_no_token_of_a_valid_request(monkeypatch: pytest.MonkeyPatch):
    looks: list[Any] = []
    for module, name in ((request_module, "_token"), (params_module, "_whole"), (params_module, "_number")):
        look = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, look=look: looks.append(given) or look(*given))
    many = list(range(5000))
    sampling = SamplingParams(allowed_tokens=many, logit_bias=dict.fromkeys(many, 2))
    Request(many, stop=many, sampling=sampling).check(5000)
    assert len(looks) < 20
    with pytest.raises(ValueError, match=r"prompt\[4999\] is 4999: expected 0 to 4998"):
        Request(many).check(4999)
    with pytest.raises(ValueError, match="logit_bias: a token=4999: expected 0 to 4998"):
        sampling.check(4999)


# --------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0: expected 0 \(greedy\) or a positive number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 10**400}, "expected 0 .greedy. or a positive number"),
        ({"temperature": True}, "temperature=True: expected a number"),
        ({"temperature": None}, "temperature=None: expected a number"),
        ({"top_k": -1}, r"top_k=-1: expected 0 \(all tokens\) or more"),
        ({"top_k": 1.5}, "top_k=1.5: expected a whole number"),
        ({"top_p": 0.0}, "top_p=0.0: expected a number above 0, at most 1"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": 1.5}, "min_p=1.5: expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: expected a positive number"),
        ({"presence_penalty": float("inf")}, "presence_penalty=inf: expected a finite number"),
        ({"frequency_penalty": "1"}, "frequency_penalty='1': expected a number"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]: expected a dictionary"),
        ({"logit_bias": {50: 1.0}}, "logit_bias: a token=50: expected 0 to 49"),
        ({"logit_bias": {1: float("-inf")}}, r"logit_bias\[1\]=-inf: expected a finite number"),
        ({"allowed_tokens": ()}, "allowed_tokens is empty"),
        ({"allowed_tokens": "abc"}, "allowed_tokens='abc': expected a collection"),
        ({"allowed_tokens": (3, -1)}, "allowed_tokens: a token=-1: expected 0 to 49"),
        ({"allowed_tokens": [3, 50]}, "allowed_tokens: a token=50: expected 0 to 49"),
        ({"allowed_tokens": [1, True]}, "allowed_tokens: a token=True: expected a whole number"),
        ({"allowed_tokens": [1, 1.0]}, "allowed_tokens: a token=1.0: expected a whole number"),
        ({"allowed_tokens": range(10**12)}, "allowed_tokens: a token=50: expected 0 to 49"),
        ({"logit_bias": {True: 1.0}}, "logit_bias: a token=True: expected a whole number"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]=nan: expected a finite number"),
        ({"logit_bias": {1: True}}, r"logit_bias\[1\]=True: expected a number"),
        ({"logit_bias": {1: 10**400}}, r"logit_bias\[1\]=10*: expected a finite number"),
        ({"logprobs": -1}, "logprobs=-1: expected None, or 0 or more"),
        ({"min_tokens": -1}, "min_tokens=-1: expected 0 or more"),
        ({"min_tokens": True}, "min_tokens=True: expected a whole number"),
        ({"bad_words": "ab"}, "bad_words='ab': expected a collection of sequences of token ids"),
        ({"bad_words": ["ab"]}, "bad_words: one is 'ab': expected token ids"),
        ({"bad_words": [3]}, "bad_words: one is 3: expected token ids"),
        ({"bad_words": [[1], []]}, "bad_words: one has no token"),
        ({"bad_words": [[1, 50]]}, "bad_words: a token=50: expected 0 to 49"),
        ({"bad_words": [[True]]}, "bad_words: a token=True: expected a whole number"),
        ({"seed": 2**64}, "seed=18446744073709551616: expected a 64-bit integer"),
        ({"seed": "1"}, "seed='1': expected a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params).check(VOCABULARY)


def test_tokens_are_counted_once_although_counting_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails is computed again."""
    request = Request([1, 2], sampling=SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0))
    whole, changes = logit_changes.LogitChanges(), logit_changes.LogitChanges()
    for tokens in ([1, 2], [1, 2, 5], [1, 2, 5, 5], [1, 2, 5, 5, 6]):
        expected, logits = torch.ones(8), torch.ones(8)
        whole.apply_(expected, request, tokens)
        for name in ("cat", "tensor"):
            with monkeypatch.context() as patch:
                patch.setattr(torch, name, lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError))
                with contextlib.suppress(torch.OutOfMemoryError):
                    changes.apply_(torch.ones(8), request, tokens)
        changes.apply_(logits, request, tokens)
        assert torch.equal(logits, expected), tokens
