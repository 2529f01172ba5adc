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
    return _poison(out) if poisoned() else out


def new_empty(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The same with the dtype and device of ``like``, in half the host time."""
    out = like.new_empty(*sizes)
    return _poison(out) if poisoned() else out


def _poison(out: torch.Tensor) -> torch.Tensor:
    return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)
