"""The outcome of a step for a sequence: its next token, or an error of this sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.runtime import dispatch
from .request import SequenceState, TokenEvent
from .sampling import Sampled, not_finite, sample


class New(NamedTuple):
    """The outcome of a step for one sequence."""

    sequence: SequenceState
    what: Sampled | Exception


def draw(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[Sampled | Exception]:
    """The next token of each sequence from logits [S, V], or the error of choosing it."""
    if len(sequences) == 1 or not dispatch.row_by_row(logits):
        try:
            return sample(logits, sequences)
        except Exception as error:
            if len(sequences) == 1:
                return [error]
    return [draw(logits[row : row + 1].clone(), [each])[0] for row, each in enumerate(sequences)]


def event_of(sequence: SequenceState, new: Sampled | Exception) -> TokenEvent:
    """Apply a step's outcome to its sequence; return the event that reports it."""
    if not isinstance(new, Exception):
        try:
            finish, text = sequence.accept(new.token)
            scores = cached = scheduled = None
            if not sequence.begun:
                sequence.begun, scheduled = True, sequence.scheduled
                if not sequence.index:
                    cached = sequence.cached
                    scores = None if sequence.request.sampling.prompt_logprobs is None else sequence.prompt_scores
                    if scores is not None and (at := scores.first_wrong()) is not None:
                        raise not_finite(f"after token {at + 1} of the prompt")
            reason = sequence.stop_reason if finish == "stop" else None
            token, logprob, likeliest = new
            index = sequence.index
            return TokenEvent(
                sequence.number, token, finish, None, logprob, likeliest, text, scores, index, reason, cached, scheduled
            )
        except Exception as error:  # an error of the tokenizer, the guide or the prompt's scores
            new = error
    return TokenEvent(sequence.number, None, "error", new, text=sequence.rest(), index=sequence.index)
