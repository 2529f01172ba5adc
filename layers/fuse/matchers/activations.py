"""Recognise which of our activations a module or function computes, by its values and gradients, not by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ....kernels.linear import ACTIVATIONS, apply_activation
from ..probing import Foreign, foreign

_TOLERANCE = 1e-9


def activation_of(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The name in ``ACTIVATIONS`` of the activation that ``function`` computes element by element, or None."""
    points = _points()
    try:
        theirs = _with_grad(function, points, foreign)
    except Foreign:
        return None
    if theirs is None:
        return None
    for name in ACTIVATIONS:
        if name != "identity":
            ours = _with_grad(partial(apply_activation, activation=name), points, contextlib.nullcontext)
            assert ours is not None
            if all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in zip(ours, theirs)):
                return name
    return None


def _points() -> torch.Tensor:
    """They are dense where activations bend, and reach far out, where some are clipped. In fp64 two ways to write one
    formula agree to 1e-9; two different formulas do not.
    """
    far = torch.logspace(1, 6, 16, dtype=torch.float64)
    return torch.cat([torch.linspace(-8, 8, 1025, dtype=torch.float64) + 1e-4, -far, far])


@torch.enable_grad()
def _with_grad(
    function: Callable[[torch.Tensor], Any],
    points: torch.Tensor,
    whose: Callable[[str], AbstractContextManager[Any]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The function's values and its derivative; None where these are not of its argument's shape and dtype."""
    z = points.clone().requires_grad_()
    given = z * 1.0  # a copy: the function may work in place
    with whose("its activation"):
        y = function(given)
    if not isinstance(y, torch.Tensor) or y.shape != z.shape or y.dtype != z.dtype or y.layout is not z.layout:
        return None
    if not y.requires_grad:
        return None
    with whose("its activation's backward"):
        (grad,) = torch.autograd.grad(y.sum(), z, allow_unused=True)
    return None if grad is None else (y.detach(), grad)
