"""A look at a model's weights before they are served."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..kernels.runtime.checks import type_name
from ..parallel.core.agreement import agree
from ..parallel.core.mesh import Group
from ..parallel.core.sharding import is_dtensor

_PART = 1 << 22  # elements of 8 bits that are widened at once


def check_weights(model: Any, group: Group) -> None:
    """ValueError on every rank of ``group`` if a parameter of ``model`` is NaN on any; it reads all of them once."""
    agree(group, lambda: _check_weights(model))


@torch.no_grad()
def _check_weights(model: Any) -> None:
    named = model.named_parameters() if isinstance(model, nn.Module) else enumerate(model.parameters())
    held = {name: each.to_local() if is_dtensor(each) else each for name, each in named}
    dense = {name: _real(each) for name, each in held.items() if each.layout is torch.strided and _may_be_nan(each)}
    sums: dict[torch.device, dict[Any, torch.Tensor]] = {}
    for name, each in dense.items():
        sums.setdefault(each.device, {})[name] = _sum(each)
    # One wait for each device.
    told = {name: total for of in sums.values() for name, total in zip(of, torch.stack([*of.values()]).tolist())}
    wrong = [name for name, total in told.items() if math.isnan(total) and bool(dense[name].isnan().any())]
    if wrong:
        raise ValueError(
            f"Engine: {len(wrong)} of the {len(held)} parameters of this {type_name(model)} hold NaN, {wrong[0]} "
            "first: every answer would be wrong; load the weights again, or an earlier checkpoint of the training"
        )


def _may_be_nan(weight: torch.Tensor) -> bool:
    """Whether its dtype has NaN: whole numbers and fp4, two to a byte, have none."""
    return weight.is_complex() or (weight.is_floating_point() and "float4" not in str(weight.dtype))


def _real(weight: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight


def _sum(weight: torch.Tensor) -> torch.Tensor:
    """A number that is NaN if ``weight`` holds NaN, or both infinities."""
    if weight.itemsize > 1:
        return weight.sum().float()  # in the weight's dtype, which torch sums in fp32 and five times as fast
    return torch.stack([part.float().sum() for part in weight.flatten().split(_PART)]).sum()
