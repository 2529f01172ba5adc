"""Choose tokens from logits: for all sequences of a step at once, on the logits' device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
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
    own = logits  # the model's own
    changed = [row for row, each in enumerate(params) if each.penalises or each.logit_bias or each.allowed_tokens]
    if changed:
        logits = logits.clone()
        for row in changed:
            sequences[row].changes.apply_(logits[row], sequences[row].request, sequences[row].tokens)
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
    reported = {row: each.logprobs for row, each in enumerate(params) if each.logprobs is not None}
    scored = _scored(own, chosen, reported) if reported else {}
    return [scored.get(row) or Sampled(token) for row, token in enumerate(chosen)]


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


def _scored(logits: torch.Tensor, tokens: Sequence[int], reported: Mapping[int, int]) -> dict[int, Sampled]:
    """The chosen token of each row in ``reported`` with its log-probability and those of so many likeliest ones.

    ``logits`` [S, V] are the model's own. Only one row of log-probabilities [V] exists at a time, in fp64.
    """
    values, indices = [], []
    for row, most in reported.items():
        scores = logits[row].double().log_softmax(-1)
        best = scores.topk(min(most, len(scores)))
        values += [scores[tokens[row]].unsqueeze(0), best.values]
        indices.append(best.indices)
    every, likeliest = iter(torch.cat(values).tolist()), iter(torch.cat(indices).tolist())
    found = {}
    for row, top in zip(reported, indices):
        logprob = next(every)
        found[row] = Sampled(tokens[row], logprob, tuple(zip(islice(likeliest, len(top)), islice(every, len(top)))))
    return found
