"""What a user asks for, what comes back, and what is known of it in between."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Finish = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: how many to generate at most.
        stop: token ids that end the answer; the one that does is its last token.
        temperature: 0 takes the likeliest token each time; above 0 samples from softmax(logits / temperature).
        seed: of the sampling. The same seed draws the same numbers whatever else is being served.
        arrival: the engine's step at which the request comes in (0: at once).
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    stop: Collection[int] = ()
    temperature: float = 0.0
    seed: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One token of one request, as it is made. ``finish`` says why, where it is the last.

    A cancelled request ends in an event without a token.
    """

    request: int
    token: int | None
    finish: Finish | None = None


@dataclass(eq=False)
class SequenceState:
    """A request on its way.

    ``tokens`` are the prompt and what was generated so far; the first ``computed`` of them are in the cache.
    """

    id: int
    request: Request
    tokens: list[int]
    generator: torch.Generator
    computed: int = 0
    most_computed: int = 0  # before a preemption took the cache away

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def finish(self) -> Finish | None:
        """Why this sequence is complete, or None while it is not."""
        if self.generated and self.tokens[-1] in self.request.stop:
            return "stop"
        return "length" if self.generated >= self.request.max_new_tokens else None
