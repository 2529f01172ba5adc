"""Learning rates with warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable

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
