"""quack's RMSNorm, in CuTe DSL: the signature of quack-kernels 0.6.5. No GPU has run this adapter."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..harness import forms
from ..harness.rivals import Rival
from .eager import refuses_norm

Tensor = torch.Tensor


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """With ``prenorm`` it returns the sum beside the norm."""
    function = importlib.import_module("quack.rmsnorm").rmsnorm
    return function(x, weight, residual=residual, eps=eps, prenorm=residual is not None)


RIVALS = (
    Rival(
        "quack",
        "rms_norm",
        forms.norm(rms_norm, bias=False),
        package="quack",
        distribution="quack-kernels",
        least="0.6",
        devices=("cuda",),
        refuses=refuses_norm,
    ),
)
