"""Shared by tests of the paged KV cache: its low-precision types, uninitialised memory, bytes to compare."""

from __future__ import annotations

import torch

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def bits(x):
    """The bytes of a tensor, in which NaN equals itself."""
    return x.contiguous().view(torch.uint8)


def noise(*shape, dtype):
    """Uninitialised memory: any bits, many of them NaN."""
    width = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8).view(dtype)
