"""The demo's verdict on the agreement between a sharded and an unsharded run."""

from __future__ import annotations

import torch

from shardfuse.training.checks import Agreement


def test_agreement_needs_numbers():
    losses = (5.5, 5.0, 4.5)
    eps = torch.finfo(torch.float32).eps
    assert Agreement(losses, losses, losses).ok
    assert Agreement(losses, losses, losses).budget == 8 * eps
    assert not Agreement((5.5, 5.0, float("nan")), losses, losses).ok
    assert not Agreement((5.5, 5.0, 4.5 * (1 + 9 * eps)), losses, losses).ok
    rounded = tuple(loss * (1 + 2 * eps) for loss in losses)
    assert Agreement((5.5, 5.0, 4.5 * (1 + 9 * eps)), losses, rounded).ok
