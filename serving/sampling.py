"""Choose tokens from logits: for all sequences of a step at once, on the logits' device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .guide import GuideRefused
from .guiding import masked
from .request import SequenceState

_GREATEST = 2.0**-53
# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), its constants as signed numbers.
_GAMMA, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


class Sampled(NamedTuple):
    """The next token of a sequence, with log-probabilities if its request asks for them."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the likeliest first


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[Sampled]:
    """The next token of each sequence from ``logits`` [S, V], by its request's :class:`SamplingParams`.

    A row's result depends on that row alone. A draw inverts the cumulative distribution in fp64, summed in the order of
    the vocabulary, at a number derived from seed and position: equal logits give equal tokens on every rank and in
    every batch. A row with NaN gives the index of its first NaN.

    Raises ValueError if a row's guide allows no token that its request allows.
    """
    params = [sequence.request.sampling for sequence in sequences]
    reported = _logprobs(logits, sequences)
    changed = [row for row, each in enumerate(params) if each.penalises or each.logit_bias or each.allowed_tokens]
    if changed:
        logits = logits.clone()
        for row in changed:
            _change_(logits[row], sequences[row])
    guides = [sequence.guide for sequence in sequences]
    guided = any(guides)
    if guided:
        logits = masked(logits, guides)
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        tokens[at] = _draw(logits[at], tokens[at], [sequences[row] for row in drawn])
    chosen = tokens.tolist()
    if guided:
        _check_allowed(logits.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist(), sequences)
    return [
        Sampled(token) if scores is None else _with_logprobs(token, scores, each.request.sampling.logprobs)
        for token, scores, each in zip(chosen, reported, sequences)
    ]


def _check_allowed(scores: Sequence[float], sequences: Sequence[SequenceState]) -> None:
    """Raise ValueError for a guided sequence whose chosen token has the score -inf: then all tokens have."""
    for score, sequence in zip(scores, sequences):
        if sequence.guide is not None and score == float("-inf"):
            where = f"guide: after {sequence.generated} tokens of the answer, none of the tokens that it allows "
            if sequence.request.sampling.allowed_tokens is not None:
                raise GuideRefused(where + "is in allowed_tokens: allow more tokens, or name a stop token")
            raise ValueError(where + "has a finite logit: allow more tokens, or name a stop token")


def _draw(logits: torch.Tensor, likeliest: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Tokens [S] drawn from logits [S, V] at their sequences' temperatures; ``likeliest`` [S] of those with NaN."""
    params = [sequence.request.sampling for sequence in sequences]
    wide, on = logits.to(torch.float64), logits.device
    temperatures = torch.tensor([each.temperature for each in params], dtype=torch.float64, device=on).unsqueeze(1)
    # Shifted first: at any temperature, the likeliest token's exponent stays 0.
    weights = ((wide - wide.amax(-1, keepdim=True)) / temperatures).exp()
    filtered = [row for row, each in enumerate(params) if each.filters]
    if filtered:
        at = torch.tensor(filtered, device=on)
        weights[at] = _filtered(weights[at], [params[row] for row in filtered])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # The factor is below 1, so the target is below the total and falls on a token with a probability above 0.
    numbers = uniform([each.seed for each in sequences], [each.generated for each in sequences])
    target = numbers.to(on).unsqueeze(1) * total
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    return torch.where(total.squeeze(1) > 0, drawn, likeliest)


def _filtered(weights: torch.Tensor, params: Sequence[Any]) -> torch.Tensor:
    """``weights`` [S, V], not negative, with 0 for tokens that ``top_k``, ``top_p`` or ``min_p`` exclude."""
    on, size = weights.device, weights.shape[1]
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)

    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=on).unsqueeze(1)

    last = column([min(each.top_k or size, size) - 1 for each in params], torch.int64)
    kept = ordered.masked_fill(ordered < ordered.gather(1, last), 0.0)
    share = kept / kept.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    kept = kept.masked_fill(before >= column([each.top_p for each in params], torch.float64), 0.0)
    kept = kept.masked_fill(kept < kept[:, :1] * column([each.min_p for each in params], torch.float64), 0.0)
    kept[:, 0] = ordered[:, 0]  # despite rounding
    return torch.zeros_like(weights).scatter_(1, order, kept)


def _change_(logits: torch.Tensor, sequence: SequenceState) -> None:
    """Apply a request's allowed tokens, biases and penalties to its logits [V], in place."""
    params, on = sequence.request.sampling, logits.device
    if params.allowed_tokens is not None:
        allowed = torch.tensor(sorted(params.allowed_tokens), device=on)
        kept = logits[allowed]
        logits.fill_(float("-inf"))[allowed] = kept
    if params.logit_bias:
        at = torch.tensor(list(params.logit_bias), device=on)
        logits[at] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=on)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=on)
        scores = logits[seen]
        logits[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    answer = sequence.tokens[len(sequence.request.prompt) :]
    if answer and (params.presence_penalty or params.frequency_penalty):
        made, times = torch.tensor(answer, device=on).unique(return_counts=True)
        logits[made] -= (params.presence_penalty + params.frequency_penalty * times.double()).to(logits.dtype)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """A number in [0, 1) [S] fp64 for each pair of a seed and the position of a token in its answer, from 0 on."""
    state = _mixed(torch.tensor([_signed(seed) for seed in seeds]) + _GAMMA)
    state = _mixed(state + (torch.tensor(positions) + 1) * _GAMMA)  # integer overflow is intended
    return _shifted(state, 11).double() * _GREATEST


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift x >> bits of 64-bit numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _logprobs(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[torch.Tensor | None]:
    """The log-probabilities [V] in fp64 for each sequence that asks for them."""
    found: list[torch.Tensor | None] = [None] * len(sequences)
    for row, sequence in enumerate(sequences):
        if sequence.request.sampling.logprobs is not None:
            found[row] = logits[row].double().log_softmax(-1)
    return found


def _with_logprobs(token: int, scores: torch.Tensor, most: int | None) -> Sampled:
    assert most is not None
    best = scores.topk(min(most, len(scores)))
    return Sampled(token, float(scores[token]), tuple(zip(best.indices.tolist(), best.values.tolist())))
