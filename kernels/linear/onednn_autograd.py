"""Autograd of one linear layer by oneDNN, in as few steps as it can have: a small product takes 0.1 ms.

The Functions of ``op.py`` do the same, and all that this one leaves to them: several weights, a residual, gradients
added to buffers, casts, torch.compile and modes, and a backward that is split in two passes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import autograd, library
from ..runtime.onednn import product
from .functional import as_rows, shaped
from .reference import ACTIVATIONS, act_grad


def takes(dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear_act` may run this call, which oneDNN runs, in ``dtype``, with one weight and no more."""
    return x.dtype is dtype is weight.dtype and x.shape[-1] > 0 and not (library.watched() or autograd.splitting())


class _LinearAct(torch.autograd.Function):
    """y = act(x @ W^T + b): x [..., D], W [F, D], b [F] or None -> y [..., F]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        rows = as_rows(x)
        z = product(rows, weight, bias)
        ctx.activation, ctx.shape = activation, x.shape
        ctx.save_for_backward(rows, weight, None if activation == "identity" else z)
        y = z if activation == "identity" else ACTIVATIONS[activation](z)
        return y if x.dim() == 2 else shaped(y, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(autograd.NO_SECOND)
        rows, weight, z = ctx.saved_tensors
        want_x, want_weight, want_bias, _ = autograd.needed_grads(ctx)
        dy = as_rows(dy)
        dz = dy if z is None else act_grad(dy, z, ctx.activation)
        dx = dw = None
        if want_x:
            dx = product(dz, weight.t())
            dx = dx if len(ctx.shape) == 2 else shaped(dx, ctx.shape[:-1])
        if want_weight:
            dw = product(dz.t(), rows.t()) if len(rows) else torch.zeros_like(weight)
        return dx, dw, dz.sum(0) if want_bias else None, None


linear_act = autograd.direct(_LinearAct)
