"""Changes of logits before a token is chosen: allowed tokens, biases, penalties of earlier tokens, and the tokens that
an answer's length or its last tokens exclude.

What is constant for a request is prepared once, at its first token, for all of its answers and steps. Each answer
counts its tokens as they come, so no step reads the prompt or the answer again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .request import Request
    from .sampling_params import SamplingParams


class _Constants:
    """What is constant for ``request``, as tensors for logits of [V]."""

    def __init__(self, request: Request, logits: torch.Tensor) -> None:
        params, on = request.sampling, logits.device
        self.form = on, logits.dtype
        self.in_prompt: frozenset[int] = frozenset()
        self.prompt: torch.Tensor | None = None  # its different tokens, for the repetition penalty
        key = on, logits.dtype, len(logits)
        if key not in params.prepared:
            params.prepared[key] = _refused(params, logits), _bias(params, logits), _Words(params, on)
        self.refused, self.bias, self.words = params.prepared[key]
        self.ends: torch.Tensor | None = None  # the tokens that may end the answer
        if params.repetition_penalty != 1.0:
            self.in_prompt = frozenset(request.prompt)
            self.prompt = torch.tensor(list(self.in_prompt), device=on)


def _refused(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor | None:
    """A mask [V] of all tokens but the allowed ones."""
    if params.allowed_tokens is None:
        return None
    refused = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    refused[torch.tensor(list(params.allowed_tokens), device=logits.device)] = False
    return refused


def _bias(params: SamplingParams, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens, and what is added to their logits."""
    if not params.logit_bias:
        return None
    values = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    return torch.tensor(list(params.logit_bias), device=logits.device), values


class _Words:
    """The bad words of ``params``: those of one token, and the others by the token before their last one."""

    def __init__(self, params: SamplingParams, on: torch.device) -> None:
        single = {word[0] for word in params.bad_words if len(word) == 1}
        self._single = torch.tensor(sorted(single), device=on) if single else None
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def exclude_(self, logits: torch.Tensor, tokens: Sequence[int], begin: int) -> None:
        """Give -inf to the tokens that complete a word in the answer, ``tokens`` from position ``begin`` on."""
        if self._single is not None:
            logits[self._single] = float("-inf")
        if len(tokens) == begin:
            return
        last = [
            end
            for before, end in self._longer.get(tokens[-1], ())
            if len(before) <= len(tokens) - begin and list(tokens[-len(before) :]) == before
        ]
        if last:
            logits[torch.tensor(last, device=logits.device)] = float("-inf")


class _Shared:
    """The constants of one request, for all of its answers."""

    def __init__(self) -> None:
        self._constants: _Constants | None = None

    def of(self, request: Request, logits: torch.Tensor) -> _Constants:
        if self._constants is None or self._constants.form != (logits.device, logits.dtype):
            self._constants = _Constants(request, logits)
        return self._constants


class LogitChanges:
    """The changes of one answer's logits. ``shared`` is that of the other answers to its request."""

    def __init__(self, shared: _Shared | None = None) -> None:
        self._shared = _Shared() if shared is None else shared
        self._counted = 0  # tokens of the answer
        self._places: dict[int, int] = {}  # of the answer's different tokens in the next two
        self._made: torch.Tensor | None = None
        self._times: torch.Tensor | None = None  # fp64
        self._seen: torch.Tensor | None = None  # the different tokens of the prompt and the answer

    def fork(self) -> LogitChanges:
        """The changes of another answer to the same request, before either has a token."""
        return LogitChanges(self._shared)

    def apply_(self, logits: torch.Tensor, request: Request, tokens: Sequence[int], ends: Collection[int] = ()) -> None:
        """Change the logits [V] of the token after ``tokens``, the prompt and the answer so far, in place. A token of
        ``ends``, the same for each step, may end the answer.
        """
        params, constants = request.sampling, self._shared.of(request, logits)
        if constants.refused is not None:
            logits.masked_fill_(constants.refused, float("-inf"))
        if constants.bias is not None:
            at, values = constants.bias
            logits[at] += values
        if params.penalises:
            self._penalise_(logits, request, tokens, constants)
        if len(tokens) - len(request.prompt) < params.min_tokens:
            if constants.ends is None:
                known = [token for token in ends if 0 <= token < len(logits)]
                constants.ends = torch.tensor(known, dtype=torch.int64, device=logits.device)
            logits[constants.ends] = float("-inf")
        if params.bad_words:
            constants.words.exclude_(logits, tokens, len(request.prompt))

    def _penalise_(self, logits: torch.Tensor, request: Request, tokens: Sequence[int], constants: _Constants) -> None:
        params = request.sampling
        self._count(tokens[len(request.prompt) + self._counted :], constants, logits.device)
        if constants.prompt is not None:
            seen = constants.prompt if self._seen is None else self._seen
            scores, penalty = logits[seen], params.repetition_penalty
            logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if self._times is not None and (params.presence_penalty or params.frequency_penalty):
            less = params.presence_penalty + params.frequency_penalty * self._times
            logits[self._made] -= less.to(logits.dtype)

    def _count(self, tokens: Sequence[int], constants: _Constants, on: torch.device) -> None:
        """Count the answer's new ``tokens``; none of them after an error, which any allocation may raise."""
        counts = Counter(tokens)
        new = {token: times for token, times in counts.items() if token not in self._places}
        made, times, seen = self._made, self._times, self._seen
        if new:
            made = _extended(made, torch.tensor(list(new), device=on))
            times = _extended(times, torch.tensor(list(new.values()), dtype=torch.float64, device=on))
            unseen = [token for token in new if token not in constants.in_prompt]
            if constants.prompt is not None and unseen:
                seen = _extended(constants.prompt if seen is None else seen, torch.tensor(unseen, device=on))
        again = [(self._places[token], counts[token]) for token in counts.keys() - new.keys()]
        self._made, self._times, self._seen = made, times, seen
        self._places.update(zip(new, range(len(self._places), len(self._places) + len(new))))
        self._counted += len(tokens)
        for place, count in again:
            assert times is not None
            times[place] += count


def _extended(before: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if before is None else torch.cat([before, more])
