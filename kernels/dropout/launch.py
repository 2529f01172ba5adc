"""The launch of the kernel in ``triton.py``."""

from __future__ import annotations

import torch
import triton

from ..runtime import alloc, device
from . import triton as kernels
from .reference import threshold


def dropout(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    rng_key: torch.Tensor,
    p: float,
    stream: int,
    row_start: int,
    col_start: int,
) -> torch.Tensor:
    """y = dropout(x) [+ residual]. x and residual [R, C], rows contiguous -> y [R, C]."""
    rows, cols = x.shape
    y = alloc.empty((rows, cols), x.dtype, x.device)
    if not y.numel():
        return y
    block_c = min(triton.next_power_of_2(max(cols, 4)), 1024)
    block_r = max(1, 4096 // block_c)
    if device.architecture(x.device) == device.INTERPRETER:
        block_r, block_c = 4, min(block_c, 32)
    args = {
        "x_ptr": x,
        "residual_ptr": residual,
        "rng_key_ptr": rng_key,
        "y_ptr": y,
        "R": rows,
        "C": cols,
        "x_stride": x.stride(0),
        "residual_stride": 0 if residual is None else residual.stride(0),
        "mask_stream": stream,
        "threshold": threshold(p),
        "row_start": row_start,
        "col_start": col_start,
        "scale": 1 / (1 - p),
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    grid = (triton.cdiv(rows, block_r) * triton.cdiv(cols, block_c),)
    config = f"{block_r}x{block_c}"
    device.launch(kernels._dropout_kernel, grid, args, num_warps=4, num_stages=1, on=y, config=config)
    return y
