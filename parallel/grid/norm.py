"""LayerNorm and RMSNorm of rows whose features are split over ranks.

x, y, dy, dx are [T, D/R]; weight, bias [D/R]. Each rank's mean and sum of squared deviations travel in one all-gather,
from which every rank forms those of the whole row (Chan et al., 1979: no difference of large numbers, as a sum of
squares minus a squared sum would be). An RMSNorm needs the sum of squares alone. Backward sums as many numbers:

    x^ = (x - mean) * r, r = 1 / sqrt(var + eps);   g = dy * weight
    dx = r * (g - mean_D(g) - x^ * mean_D(g * x^)), without mean_D(g) in an RMSNorm

The arithmetic is fp32, or fp64 for fp64.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.runtime import autograd
from ..core import collectives
from ..core.mesh import Group


def split_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float,
    centre: bool,
    group: Group,
) -> torch.Tensor:
    """The norm of x [T, D/R] over all D features: a LayerNorm with ``centre``, else an RMSNorm. No collective of the
    parameters' gradients."""
    return _SplitNorm.apply(x, weight, bias, eps, weight_offset, centre, group)


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        weight_offset: float,
        centre: bool,
        group: Group,
    ) -> torch.Tensor:
        wide = _wide(x)
        mine = wide.mean(1) if centre else wide.new_zeros(len(wide))
        squares = (wide - mine[:, None]).square().sum(1)
        numbers = torch.stack((squares, mine) if centre else (squares,))[None]
        squares, *means = collectives.all_gather(numbers, group, site="norm.numbers").unbind(1)  # [R, T] each
        width = x.shape[1]
        mean = means[0].mean(0) if centre else mine
        spread = ((means[0] - mean).square() * width).sum(0) if centre else 0.0
        rstd = ((squares.sum(0) + spread) / (width * group.size) + eps).rsqrt()
        y = (wide - mean[:, None]) * rstd[:, None] * (weight.to(wide.dtype) + weight_offset)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.offset, ctx.centre, ctx.group = weight_offset, centre, group
        return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        want_x, want_weight, want_bias, *_ = autograd.needed_grads(ctx)
        wide, wide_dy = _wide(x), _wide(dy)
        normed = (wide - mean[:, None]) * rstd[:, None]
        dx = None
        if want_x:
            g = wide_dy * (weight.to(wide.dtype) + ctx.offset)
            numbers = torch.stack(((g * normed).sum(1), g.sum(1)) if ctx.centre else ((g * normed).sum(1),))
            numbers = collectives.all_reduce(numbers, ctx.group, site="norm.numbers.grad", inplace=True)
            along, *level = (numbers / (x.shape[1] * ctx.group.size))[:, :, None]
            dx = g - normed * along
            dx = ((dx - level[0] if level else dx) * rstd[:, None]).to(x.dtype)
        dw = (wide_dy * normed).sum(0).to(weight.dtype) if want_weight else None
        db = wide_dy.sum(0).to(weight.dtype) if want_bias else None
        return dx, dw, db, None, None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
