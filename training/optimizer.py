"""AdamW as every run here uses it."""

from __future__ import annotations

import torch
from torch import nn


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW with ``weight_decay`` on matrices, not on biases and norms.

    Two groups, in the same order on every rank, empty ones included: checkpoints put the stages of a pipeline together
    by them. ``fused`` because the other forms take a DTensor's detour at every one of their small steps.
    """
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=betas,
        eps=eps,
        fused=True,
    )
