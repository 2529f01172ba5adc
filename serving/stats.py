"""An engine's counters and rates."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple

STEP_SIZES = tuple(2**power for power in range(15))  # tokens of a step, at most; the last count is of larger steps


class EngineLoad(NamedTuple):
    """The load of an engine at one moment: running and waiting requests, and blocks of its cache."""

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int


@dataclass
class EngineStats:
    """Counters since the engine was created.

    Prefill fills the cache before a new token can follow: with prompts, and with tokens that a preemption lost. A step
    with any prefill counts as prefill time, any other as decode time; each rate divides the tokens by their steps'
    time.
    """

    steps: int = 0  # steps that computed something
    prefill_tokens: int = 0
    recomputed_tokens: int = 0  # of these, tokens that a preemption had lost
    kept_tokens: int = 0  # brought back from host memory after a preemption
    shared_tokens: int = 0  # found in the cache, of prompts and of tokens that a preemption had lost
    generated_tokens: int = 0
    not_finite: int = 0  # answers that ended because the model's logits were NaN or infinite
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0  # generated in steps without prefill
    peak_seqs: int = 0  # most sequences in one step
    peak_blocks: int = 0
    slot_steps: int = 0  # allocated token slots, summed over steps
    unused_slot_steps: int = 0  # of these, slots that held no token
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))  # steps, by STEP_SIZES

    def __copy__(self) -> EngineStats:
        return replace(self, step_sizes=list(self.step_sizes))

    def count_step(self, tokens: int) -> None:
        """Count a step of so many tokens, prefill's and generated ones together."""
        self.steps += 1
        self.step_sizes[bisect_left(STEP_SIZES, tokens)] += 1

    @property
    def prefill_token_seconds(self) -> float:
        """The rate, or 0 before the first one."""
        return _ratio(self.prefill_seconds, self.prefill_tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        return _ratio(self.prefill_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_s(self) -> float:
        return _ratio(self.decode_tokens, self.decode_seconds)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over all time spent in steps."""
        return _ratio(self.generated_tokens, self.prefill_seconds + self.decode_seconds)

    @property
    def kv_waste(self) -> float:
        """Share of the allocated token slots that held no token, over all steps: 0 to 1."""
        return _ratio(self.unused_slot_steps, self.slot_steps)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
