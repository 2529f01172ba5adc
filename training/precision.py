"""The number formats of a run: fp32 throughout, or 16-bit products over fp32 parameters.

Under "bf16" and "fp16" autocast casts what products read, and parameters, their gradients, Adam's moments and the loss
stay fp32 (mixed precision: Micikevicius et al., arXiv:1710.03740). fp16's small exponents also need the loss scaled up
and the gradients scaled down again: torch's GradScaler, which leaves out steps whose gradients overflowed. Where
parameters are DTensors it agrees on that over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """``precision`` of PRECISIONS, for one optimizer on ``device``."""

    def __init__(self, precision: str, optimizer: torch.optim.Optimizer, device: str) -> None:
        self._dtype = PRECISIONS[precision]
        self._device = device
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device, enabled=self._dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[None]:
        """Where forward runs."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        self._scaler.scale(loss).backward()

    def step(self, clip: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Clip the gradients, unscaled by now, and take the step; the norm that ``clip`` found."""
        self._scaler.unscale_(self._optimizer)
        norm = clip()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return norm
