"""Output buffers of kernels, filled with NaN under ``SHARDFUSE_POISON=1``.

A kernel that leaves an element unwritten then fails its test instead of passing on whatever memory held.
"""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def poisoned() -> bool:
    return os.environ.get("SHARDFUSE_POISON", "0") == "1"


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty``, poisoned with NaN (integers: the smallest value) when the process asks for it."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if poisoned():
        out.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min)
    return out
