"""Requests, the events of their tokens, and the state of a request in the engine."""

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
        max_new_tokens: the most tokens to generate.
        stop: token ids that end the answer; the stopping token is its last one.
        temperature: 0 always takes the likeliest token; above 0 samples from softmax(logits / temperature).
        seed: of the sampling. The same seed draws the same numbers, independent of other requests.
        arrival: the engine's step at which the request arrives (0: at once).
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    stop: Collection[int] = ()
    temperature: float = 0.0
    seed: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of one request. ``finish`` is the reason if it is the last.

    A cancelled request ends in an event without a token.
    """

    request: int
    token: int | None
    finish: Finish | None = None


@dataclass(eq=False)
class SequenceState:
    """A request in the engine.

    ``tokens`` are the prompt and the generated tokens; the first ``computed`` of them are in the cache.
    """

    id: int
    request: Request
    tokens: list[int]
    generator: torch.Generator
    computed: int = 0
    most_computed: int = 0  # the value of computed before a preemption freed the cache

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def finish(self) -> Finish | None:
        """Why this sequence is complete, or None if it is not."""
        if self.generated and self.tokens[-1] in self.request.stop:
            return "stop"
        return "length" if self.generated >= self.request.max_new_tokens else None
