"""Autograd of one linear layer by oneDNN, in as few steps as it can have: a small product takes 0.1 ms.

The Functions of ``op.py`` do the same, and all that this one leaves to them: several weights, a residual, gradients
added to buffers, casts, torch.compile and modes, and a backward that is split in two passes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import autograd, library
from ..runtime.onednn import product
from . import onednn, reference
from .functional import as_rows, shaped
from .reference import ACTIVATIONS, act_grad


def takes(dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear_act` may run this call, which oneDNN runs, in ``dtype``, with one weight and no more."""
    alike = x.dtype is dtype is weight.dtype
    return alike and weight.numel() > 0 and not (library.watched() or autograd.splitting())


class _LinearAct(torch.autograd.Function):
    """y = act(x @ W^T + b): x [..., D], W [F, D], b [F] or None -> y [..., F]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        z = product(as_rows(x), weight, bias)
        ctx.activation, ctx.shape = activation, x.shape
        need_x, need_weight, _, _ = ctx.needs_input_grad
        # Of a weight whose gradient is wanted second derivatives may be asked for.
        kept_x, kept_weight = x if need_weight else None, weight if need_x or need_weight else None
        ctx.save_for_backward(kept_x, kept_weight, bias, None if activation == "identity" else z)
        y = z if activation == "identity" else ACTIVATIONS[activation](z)
        return y if x.dim() == 2 else shaped(y, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, bias, z = ctx.saved_tensors
        want = autograd.needed_grads(ctx)
        if torch.is_grad_enabled():
            return _differentiable(ctx, x, weight, bias, dy, want)
        dy = as_rows(dy)
        dz = dy if z is None else act_grad(dy, z, ctx.activation)
        dx = dw = None
        if want[0]:
            dx = product(dz, weight.t())
            dx = dx if len(ctx.shape) == 2 else shaped(dx, ctx.shape[:-1])
        if want[1]:
            (dw,) = onednn.linear_wgrad([dz], as_rows(x), [False])
        return dx, dw, dz.sum(0) if want[2] else None, None


def _differentiable(ctx: Any, x: Any, weight: Any, bias: Any, dy: torch.Tensor, want: Any) -> Any:
    """The gradients by torch's own functions, which have derivatives themselves."""
    if x is None or weight is None:
        raise RuntimeError(autograd.NO_SECOND)
    (y,) = reference.linear_act(x, (weight,), (bias,), ctx.activation)
    given = [tensor for tensor, wanted in zip((x, weight, bias), want) if wanted]
    grads = iter(torch.autograd.grad(y, given, dy, create_graph=True))
    return (*(next(grads) if wanted else None for wanted in want[:3]), None)


linear_act = autograd.direct(_LinearAct)
