"""AdamW, and learning rates with warm-up and decay, on torch's own scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


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


# The decay after the warm-up: x, the share of it that is over -> the rate, where 0 is the smallest and 1 the peak.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),  # without restarts: Loshchilov, Hutter, arXiv:1608.03983
}


def rate(step: int, *, steps: int, shape: str, warmup: int = 0, floor: float = 0.0) -> float:
    """The rate of ``step`` (from 0) of ``steps``, as a share of the peak.

    The last step of ``warmup`` has the peak rate; without a warm-up, the first step has it. The rate would reach
    ``floor`` at the step after the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    peak = max(0, warmup - 1)
    over = min(1.0, (step - peak) / max(1, steps - peak))
    return floor + (1.0 - floor) * SHAPES[shape](over)


def make_scheduler(
    optimizer: Optimizer, *, steps: int, shape: str, warmup: int = 0, floor: float = 0.0, done: int = 0
) -> LambdaLR:
    """A scheduler to step after each step of ``optimizer``; ``done`` steps are already finished.

    Each group's ``initial_lr`` is its peak (its ``lr``, if ``done`` is 0).
    """
    return LambdaLR(
        optimizer, lambda step: rate(step, steps=steps, shape=shape, warmup=warmup, floor=floor), last_epoch=done - 1
    )
