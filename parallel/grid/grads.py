"""The gradients of a layer's parameters over a grid, from blocks that are on this rank."""

from __future__ import annotations

import torch

from ...kernels.linear import functional
from ...kernels.runtime.dispatch import Choice
from ..core import collectives
from .grid import Axes


def weight_grad(dy: torch.Tensor, x: torch.Tensor, choice: Choice) -> torch.Tensor:
    """dy^T @ x, of this rank's blocks [T/i, N/k] and [T/i, K/j]."""
    ((dw,), _) = functional.param_grads([dy], x, [True], [False], choice)
    assert dw is not None
    return dw


def bias_grad(dy: torch.Tensor, axes: Axes, site: str) -> torch.Tensor:
    """The sum over all tokens of ``dy`` [T/i, N/k], as the bias is stored."""
    db = dy.sum(0)
    if axes.weight_dim == 0:
        db = collectives.reduce_scatter(db, axes.tokens, site=f"{site}.bias.grad")
    else:
        db = collectives.all_reduce(db, axes.tokens, site=f"{site}.bias.grad", inplace=True)
    return collectives.all_reduce(db, axes.depth, site=f"{site}.bias.grad", inplace=True)
