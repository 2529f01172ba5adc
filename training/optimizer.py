"""AdamW, and learning rates (``rates.py``) on torch's own scheduler."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .rates import rate


def adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW with ``weight_decay`` on matrices, not on biases and norms.

    Every rank has the same two groups in the same order, even empty ones: checkpoints merge the stages of a pipeline by
    group. ``fused``, because the other forms pay DTensor's dispatch cost for each of their small operations.
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


def make_scheduler(
    optimizer: Optimizer, *, steps: int, shape: str, warmup: int = 0, floor: float = 0.0, done: int = 0
) -> LambdaLR:
    """A scheduler to step after each step of ``optimizer``; ``done`` steps are already finished.

    Each group's ``initial_lr`` is its peak (its ``lr``, if ``done`` is 0).
    """
    return LambdaLR(
        optimizer, lambda step: rate(step, steps=steps, shape=shape, warmup=warmup, floor=floor), last_epoch=done - 1
    )
