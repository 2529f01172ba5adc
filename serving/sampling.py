"""Samples tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .request import SequenceState


def sample(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[int | Exception]:
    """The next token of each sequence from ``logits`` [S, V], or the error of a draw, which is that sequence's alone.

    Greedy at temperature 0. Above, it inverts the cumulative distribution in fp64 at one number per token from the
    sequence's own generator: equal logits and seed give equal tokens on every rank and in every batch.
    """
    tokens: list[int | Exception] = logits.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        if sequence.request.temperature > 0:
            try:
                tokens[row] = _draw(logits[row], sequence.request.temperature, sequence.generator)
            except Exception as error:
                tokens[row] = error
    return tokens


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    exact = logits.to("cpu", torch.float64)
    # Shifted first: at any temperature, the likeliest token's exponent stays 0.
    cumulative = torch.softmax((exact - exact.max()) / temperature, dim=-1).cumsum(dim=-1)
    if not cumulative[-1] > 0:  # the logits contain NaN: there is no distribution to draw from
        return int(exact.argmax())
    # rand is below 1, so the target stays below the total and falls on a token of probability above 0.
    target = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    return int(torch.searchsorted(cumulative, target, right=True))
