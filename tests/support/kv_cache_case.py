"""What tests of the paged KV cache share: its low-precision types, memory that nobody has set, bytes to compare."""

from __future__ import annotations

import torch

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def bits(x):
    """The bytes of a tensor, in which NaN equals itself."""
    return x.contiguous().view(torch.uint8)


def noise(*shape, dtype):
    """Memory that nobody has set: any bits, many of them NaN."""
    width = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8).view(dtype)
