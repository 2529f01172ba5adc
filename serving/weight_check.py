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


def check_weights(model: Any, group: Group) -> None:
    """ValueError on every rank of ``group`` if a parameter of ``model`` is NaN on any; it reads all of them once."""
    agree(group, lambda: _check_weights(model))


@torch.no_grad()
def _check_weights(model: Any) -> None:
    named = model.named_parameters() if isinstance(model, nn.Module) else enumerate(model.parameters())
    held = {name: each.to_local() if is_dtensor(each) else each for name, each in named}
    sums = {name: _sum(each) for name, each in held.items() if each.is_floating_point()}
    told = torch.stack([*sums.values()]).tolist() if sums else []  # one wait for the device
    wrong = [name for name, total in zip(sums, told) if math.isnan(total) and held[name].isnan().any()]
    if wrong:
        raise ValueError(
            f"Engine: {len(wrong)} of the {len(sums)} parameters of this {type_name(model)} hold NaN, {wrong[0]} "
            "first: every answer would be wrong; load the weights again, or an earlier checkpoint of the training"
        )


def _sum(weight: torch.Tensor) -> torch.Tensor:
    """A number that is NaN if ``weight`` holds NaN, or both infinities."""
    if weight.itemsize > 1:
        return weight.sum().float()  # in the weight's dtype, which torch sums in fp32 and five times as fast
    return torch.stack([part.float().sum() for part in weight.flatten().split(1 << 22)]).sum()
