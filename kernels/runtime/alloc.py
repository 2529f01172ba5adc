"""Output buffers of kernels, filled with NaN under ``SHARDFUSE_POISON=1``.

A kernel that leaves an element unwritten then fails its test instead of passing on whatever memory held.
"""

from __future__ import annotations

import os

import torch

_POISONED = os.environ.get("SHARDFUSE_POISON", "0") == "1"


def poisoned() -> bool:
    return _POISONED


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty``, poisoned with NaN (integers: the smallest value) when the process asks for it."""
    out = torch.empty(shape, dtype=dtype, device=device)
    return _poison(out) if _POISONED else out


def new_empty(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The same with the dtype and device of ``like``, in half the host time."""
    out = like.new_empty(*sizes)
    return _poison(out) if _POISONED else out


def empty_like(like: torch.Tensor) -> torch.Tensor:
    """The same with the strides of ``like`` as well, or, if it has gaps, with their order."""
    out = torch.empty_like(like)
    return _poison(out) if _POISONED else out


def new_empty_of(like: torch.Tensor, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """The same in another dtype."""
    out = like.new_empty(*sizes) if like.dtype is dtype else like.new_empty(sizes, dtype=dtype)
    return _poison(out) if _POISONED else out


def _poison(out: torch.Tensor) -> torch.Tensor:
    return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)
