"""Choose tokens from logits: for all sequences of a step at once, on the logits' device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from .guide import GuideRefused
from .guiding import masked
from .request import SequenceState
from .sampling_params import NoTokenLeft

_GREATEST = 2.0**-53
# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GAMMA, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_11, _27, _30, _31 = map(np.uint64, (11, 27, 30, 31))


class Sampled(NamedTuple):
    """The next token of a sequence, with log-probabilities if its request asks for them."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the likeliest first


class LogitsNotFinite(ArithmeticError):
    """The model gave a sequence logits of which no token can be chosen: NaN, +inf, or -inf alone."""


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[Sampled | Exception]:
    """The next token of each sequence from ``logits`` [S, V], by its request's :class:`SamplingParams`.

    A row's result depends on that row alone. A draw inverts the cumulative distribution in fp64, summed in the order of
    the vocabulary, at a number derived from seed and position: equal logits give equal tokens on every rank and in
    every batch.

    Instead of a token, a row gives LogitsNotFinite if any logit of the model is NaN or +inf, or all are -inf;
    NoTokenLeft, GuideRefused or ValueError if its guide and its options allow no token that has a finite logit. The
    test is part of the maximum, and its result comes to the host with the tokens.
    """
    params = [sequence.request.sampling for sequence in sequences]
    if all([each.likeliest for each in params]):  # noqa: C419 - a generator takes longer
        told = _to_host(*_likeliest(logits))
        try:
            return [Sampled(token) for token in map(int, told)]
        except ValueError:  # NaN is no int
            return [
                Sampled(int(token)) if token == token else _not_finite(sequence)
                for token, sequence in zip(told, sequences)
            ]
    own = logits  # the model's own
    changed = [row for row, each in enumerate(params) if each.changes_logits]
    if changed:
        logits = logits.clone()
        for row in changed:
            of = sequences[row]
            of.changes.apply_(logits[row], of.request, of.tokens, of.ends)
    guides = [sequence.guide for sequence in sequences]
    if any(guides):
        logits = masked(logits, guides)
    tokens, best = _likeliest(logits)
    drawn = [row for row, each in enumerate(params) if each.temperature > 0]
    if drawn:
        at = _rows(drawn, logits)
        tokens[at] = _draw(logits[at], tokens[at], [sequences[row] for row in drawn])
    if logits is not own:
        score = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        best = torch.add(own.amax(-1), score.clamp(max=0), alpha=0)  # a change may bring a score to +inf, not to -inf
    told = _to_host(tokens, best)
    wrong = {row: _wrong(own[row], sequences[row]) for row, token in enumerate(told) if token != token}
    chosen = [0 if row in wrong else int(token) for row, token in enumerate(told)]
    reported = {row: each.logprobs for row, each in enumerate(params) if each.logprobs is not None and row not in wrong}
    scored = _scored(own, chosen, reported) if reported else {}
    return [wrong.get(row) or scored.get(row) or Sampled(token) for row, token in enumerate(chosen)]


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token [S] with the greatest logit of each row, and that logit [S]: NaN if any of the row is."""
    if logits.is_cpu and logits.itemsize > 2:  # where argmax takes half of max's time
        tokens = logits.argmax(dim=-1)
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best, tokens = logits.max(dim=-1)
    return tokens, best


def _to_host(tokens: torch.Tensor, best: torch.Tensor) -> list[float]:
    """``tokens`` [S] in one copy, with NaN for those whose logit ``best`` [S] is not finite: 0 times it is NaN."""
    wide = best if best.itemsize > 2 else best.float()  # fp32 has all whole numbers up to 2^24
    return torch.add(tokens, wide, alpha=0).tolist()


def _wrong(own: torch.Tensor, sequence: SequenceState) -> Exception:
    """The error of a sequence without a token, from the model's own logits [V]."""
    if not own.amax().isfinite():
        return _not_finite(sequence)
    where, params = f"after {sequence.generated} tokens of the answer", sequence.request.sampling
    if params.excludes:
        named = [f"min_tokens={params.min_tokens}"] if params.min_tokens else []
        named += ["bad_words"] if params.bad_words else []
        return NoTokenLeft(f"{where}, {' and '.join(named)} and what else excludes tokens leave none: exclude fewer")
    if sequence.guide is None:
        return NoTokenLeft(f"{where}, none of allowed_tokens has a finite logit: allow more tokens")
    none = f"guide: {where}, none of the tokens that it allows "
    if params.allowed_tokens is not None:
        return GuideRefused(f"{none}is in allowed_tokens: allow more tokens, or name a stop token")
    return ValueError(f"{none}has a finite logit: allow more tokens, or name a stop token")


def _not_finite(sequence: SequenceState) -> LogitsNotFinite:
    return not_finite(f"for token {sequence.generated + 1} of the answer, at position {len(sequence.tokens)},")


def not_finite(where: str) -> LogitsNotFinite:
    """The error of logits ``where`` they are no numbers."""
    return LogitsNotFinite(
        f"the model's logits {where} are NaN or infinite: look for NaN in its weights, or for a sum beyond its dtype's "
        "range (in fp16: serve it in bf16 or fp32)"
    )


def _draw(logits: torch.Tensor, likeliest: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Tokens [S] drawn from logits [S, V] at their sequences' temperatures; ``likeliest`` [S] where none can be."""
    params = [sequence.request.sampling for sequence in sequences]
    wide, size = logits.to(torch.float64), logits.shape[1]
    numbers = uniform([each.seed for each in sequences], [each.generated for each in sequences])
    table = [(each.temperature, min(each.top_k or size, size) - 1, each.top_p, each.min_p) for each in params]
    columns = torch.cat([torch.tensor(table, dtype=torch.float64), numbers.unsqueeze(1)], 1).to(logits.device)
    temperatures, *limits, numbers = columns.unsqueeze(2).unbind(1)  # [S, 1] each, by one copy to the device
    # Shifted first: at any temperature, the likeliest token's exponent stays 0.
    weights = ((wide - wide.amax(-1, keepdim=True)) / temperatures).exp()
    filtered = [row for row, each in enumerate(params) if each.filters]
    if filtered:
        at = _rows(filtered, weights)
        weights[at] = _filtered(weights[at], *(each[at] for each in limits))
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # The factor is below 1, so the target is below the total and falls on a token with a probability above 0.
    drawn = torch.searchsorted(cumulative, numbers * total, right=True).squeeze(1).clamp(max=size - 1)
    return torch.where(total.squeeze(1) > 0, drawn, likeliest)


def _filtered(weights: torch.Tensor, last: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """``weights`` [S, V], not negative, with 0 for tokens that ``top_k`` = last + 1, ``top_p`` or ``min_p``, each
    [S, 1], exclude.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    kept = ordered.masked_fill(ordered < ordered.gather(1, last.long()), 0.0)
    share = kept / kept.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    kept = kept.masked_fill(before >= top_p, 0.0)
    kept = kept.masked_fill(kept < kept[:, :1] * min_p, 0.0)
    kept[:, 0] = ordered[:, 0]  # despite rounding
    return torch.zeros_like(weights).scatter_(1, order, kept)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """A number in [0, 1) [S] fp64 for each pair of a seed and the position of a token in its answer, from 0 on."""
    state = _mixed(np.array([seed % 2**64 for seed in seeds], np.uint64) + _GAMMA)
    state = _mixed(state + np.array([position + 1 for position in positions], np.uint64) * _GAMMA)  # modulo 2^64
    return torch.from_numpy((state >> _11).astype(np.float64) * _GREATEST)


def _mixed(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


def _rows(rows: Sequence[int], of: torch.Tensor) -> Any:
    """The index of these rows of a matrix: all of them, or a tensor on its device."""
    return slice(None) if len(rows) == len(of) else torch.tensor(rows, device=of.device)


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
