"""Recognise which of our activations a module or function computes, by its values and gradients, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ....kernels.linear import ACTIVATIONS, apply_activation

# The points are dense where activations bend, and reach far out, where some are clipped. In fp64 two ways to write one
# formula agree to 1e-9; two different formulas do not.
_FAR = torch.logspace(1, 6, 16, dtype=torch.float64)
_POINTS = torch.cat([torch.linspace(-8, 8, 1025, dtype=torch.float64) + 1e-4, -_FAR, _FAR])
_TOLERANCE = 1e-9


def activation_of(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The name in ``ACTIVATIONS`` of the activation that ``function`` computes element by element, or None."""
    try:
        theirs = _with_grad(function)
    except Exception:  # any error of a foreign function means: not one of our activations
        return None
    for name in ACTIVATIONS:
        if name != "identity":
            ours = _with_grad(partial(apply_activation, activation=name))
            if all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in zip(ours, theirs)):
                return name
    return None


@torch.enable_grad()
def _with_grad(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    z = _POINTS.clone().requires_grad_()
    y = function(z * 1.0)  # a copy: the function may work in place
    if y.shape != z.shape or y.dtype != z.dtype:
        raise TypeError("no activation")
    return y.detach(), torch.autograd.grad(y.sum(), z)[0]
