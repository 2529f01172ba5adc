"""Learning rates: a rise over the first steps, then a fall, on torch's own scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# What follows the warm-up: the share of the way from the smallest rate to the peak, when the share x of it is over.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),  # without restarts: Loshchilov, Hutter, arXiv:1608.03983
}


def rate(step: int, *, steps: int, shape: str, warmup: int = 0, floor: float = 0.0) -> float:
    """The rate of ``step`` (from 0) of ``steps``, as a share of the peak.

    The last step of ``warmup`` has the peak, without one the first step; the step after the last would have ``floor``.
    """
    if step < warmup:
        return (step + 1) / warmup
    peak = max(0, warmup - 1)
    over = min(1.0, (step - peak) / max(1, steps - peak))
    return floor + (1.0 - floor) * SHAPES[shape](over)


def make_scheduler(
    optimizer: Optimizer, *, steps: int, shape: str, warmup: int = 0, floor: float = 0.0, done: int = 0
) -> LambdaLR:
    """A scheduler to step after each step of ``optimizer``, of which ``done`` steps are past.

    Each group's ``initial_lr`` is its peak (its ``lr``, where nothing is past).
    """
    return LambdaLR(
        optimizer, lambda step: rate(step, steps=steps, shape=shape, warmup=warmup, floor=floor), last_epoch=done - 1
    )
