"""Which norm takes which row-parallel layer's sum over the ranks into its own launch: see :mod:`partial_sum`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..parallel.overlap import partial_sum
from ..parallel.overlap.policy import Path
from .linear import RowParallelLinear
from .module import untouched
from .norm import RMSNorm

OP = partial_sum.OP


def last_layer(module: nn.Module, *names: str) -> nn.Module | None:
    """The layer of ``module`` that comes last, called one of ``names``, where nobody looks on at either."""
    last = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    return last if last is not None and untouched(module) and untouched(last) else None


def owing(module: nn.Module, *names: str, norm: nn.Module | None) -> RowParallelLinear | None:
    """The layer at the end of ``module`` whose sum ``norm`` could take: both as they were made, over several ranks."""
    if not (isinstance(norm, RMSNorm) and untouched(norm)):
        return None
    last = last_layer(module, *names)
    if not isinstance(last, RowParallelLinear) or last.group.size == 1 or last.sequence_parallel:
        return None
    return last


def waits(last: RowParallelLinear | None, norm: nn.Module | None, x: torch.Tensor) -> bool:
    """Whether the sum of ``last``, an :func:`owing` layer, waits for ``norm`` with the tokens of x [..., D]."""
    if last is None or torch.is_grad_enabled():  # training pays for no more than this
        return False
    return partial_sum.may_wait(x, group=last.group, site=f"{last.site}.out", **_what(last, norm))


def told(last: RowParallelLinear, norm: nn.Module | None, device: torch.device, tokens: int | None) -> Path | None:
    """How the sum of an :func:`owing` layer crosses the ranks in ``norm``; None where it does not."""
    return partial_sum.told(tokens, group=last.group, device=device, **_what(last, norm))


def _what(last: RowParallelLinear, norm: Any) -> dict[str, Any]:
    return {
        "dtype": torch.promote_types(last.weight.dtype, norm.weight.dtype),
        "features_in": last.in_features // last.group.size,
        "features_out": last.out_features,
        "overlap": last.overlap,
        "impl": norm.impl,
    }
