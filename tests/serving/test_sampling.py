"""Sampling of the next token: its distribution, its seed, and its range, which is the vocabulary."""

from __future__ import annotations

import pytest
import torch

from shardfuse.serving import Request
from shardfuse.serving.request import SequenceState
from shardfuse.serving.sampling import sample


def test_sampling_follows_the_distribution() -> None:
    """4000 draws at temperature 2: each token's share within 5 standard deviations of its probability."""
    logits = torch.tensor([0.0, 1.0, 2.0, float("-inf"), -1.0])
    request = Request([0], temperature=2.0)
    state = SequenceState(0, request, [0], torch.Generator().manual_seed(0))
    draws = 4000
    drawn = torch.tensor([sample(logits[None], [state])[0] for _ in range(draws)])
    expected = torch.softmax(logits / 2, 0)
    seen = torch.bincount(drawn, minlength=5) / draws
    assert seen[3] == 0
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_sampling_depends_on_nothing_but_logits_and_seed() -> None:
    """Greedy and sampled rows in one batch: neither neighbours nor the batch's precision change a draw."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=generator)

    def state(temperature: float, seed: int) -> SequenceState:
        return SequenceState(0, Request([0], temperature=temperature), [0], torch.Generator().manual_seed(seed))

    together = sample(logits, [state(1.0, 1), state(0.0, 0), state(1.0, 2)])
    assert together[1] == int(logits[1].argmax())
    assert [sample(logits[:1], [state(1.0, 1)]), sample(logits[2:], [state(1.0, 2)])] == [together[:1], together[2:]]
    seeds = {sample(logits[:1], [state(1.0, seed)])[0] for seed in range(20)}
    assert len(seeds) > 5


@pytest.mark.parametrize(("logits", "temperature"), [([0.0, 2.0, 1.0], 1e-310), ([0.0, float("nan"), 1.0], 1.0)])
def test_a_drawn_token_is_always_in_the_vocabulary(logits: list[float], temperature: float) -> None:
    request = Request([0], temperature=temperature)
    sequence = SequenceState(0, request, [0], torch.Generator().manual_seed(0))
    assert sample(torch.tensor([logits]), [sequence]) == [1]
