"""Launches of the kernels in ``triton.py``; the products go through the GEMM of ``kernels/linear``."""

from __future__ import annotations

import torch
import triton

from ..linear import launch as linear
from ..runtime import alloc, device
from ..runtime.chips import rounds_fp8_twice
from ..runtime.dtypes import LARGEST
from . import triton as kernels

_PARTS = 512  # of x, whose magnitudes every program of the cast reduces again: 2 KiB from the cache


def _matrix(rows: int, cols: int, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """[rows, cols] whose rows start at multiples of 16 bytes, as TMA asks for."""
    return alloc.empty((rows, padded(cols)), dtype, where)[:, :cols]


def padded(cols: int) -> int:
    """The pitch of fp8 rows, in elements that are bytes."""
    return -(-cols // 16) * 16


def _blocks(where: torch.device, *, rows: int = 64, cols: int = 128) -> tuple[int, int]:
    return (16, 32) if device.architecture(where) == device.INTERPRETER else (rows, cols)


def _common(x: torch.Tensor, dtype: torch.dtype) -> dict[str, object]:
    arch = device.architecture(x.device)
    return {
        "x_ptr": x,
        "R": x.shape[0],
        "C": x.shape[1],
        "x_strides": x.stride(),
        "ALIGN_R": device.divisor(x.shape[0]),
        "ALIGN_C": device.divisor(x.shape[1]),
        "LARGEST": LARGEST[dtype],
        "RUN": 16 // x.element_size() if x.stride(1) == 1 else 16,
        "EMULATE": arch == device.INTERPRETER or rounds_fp8_twice(arch),
    }


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    transpose: bool,
    *,
    scale: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    margin: int = 0,
) -> list[torch.Tensor]:
    """One scale for x [R, C]: the given one, the history's, or else that of x itself.

    -> values [R, C], scale [], amax [], and with ``transpose`` values^T [C, R]. ``history`` [length] fp32 contiguous:
    amaxes of earlier calls, newest first; this call's is pushed in front.
    """
    rows, cols = x.shape
    where = x.device
    values = _matrix(rows, cols, dtype, where)
    amax = alloc.empty((), torch.float32, where)
    given = scale is not None
    scale = scale.reshape(()) if scale is not None else alloc.empty((), torch.float32, where)
    block_r, block_c = _blocks(where)
    tiles = triton.cdiv(rows, block_r) * triton.cdiv(cols, block_c)
    amaxes, parts = history, None
    if given or history is not None:
        parts = alloc.empty((max(tiles, 1),), torch.float32, where)
    elif tiles:
        amaxes = alloc.empty((min(tiles, _PARTS),), torch.float32, where)
        _largest_of_parts(x, amaxes, block_r, block_c)
    else:
        amaxes = torch.zeros(1, dtype=torch.float32, device=where)
    _cast(x, values, scale, amaxes, amax if parts is None else None, parts, margin)
    if parts is not None:
        _push(parts, history, amax)
    if not transpose:
        return [values, scale, amax]
    values_t = _matrix(cols, rows, dtype, where)
    if tiles:
        _cast(x.t(), values_t, scale)
    return [values, scale, amax, values_t]


def _cast(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    amaxes: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
    margin: int = 0,
) -> None:
    """x [R, C] into ``values`` [R, C] by ``scale``, which is written first if there are ``amaxes``."""
    block_r, block_c = _blocks(x.device)
    args = _common(x, values.dtype) | {
        "values_ptr": values,
        "scale_ptr": scale,
        "amaxes_ptr": amaxes,
        "amax_ptr": amax,
        "parts_ptr": parts,
        "count": 0 if amaxes is None else amaxes.numel(),
        "stretch": 2.0**margin,
        "pitch": values.stride(0),
        # Not so many as there are parts, which follow from x's rows: each power of two would be another kernel.
        "COUNT": 1 if amaxes is None else triton.next_power_of_2(max(amaxes.numel(), _PARTS)),
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    # An empty x has no tile, but a scale.
    grid = (max(1, triton.cdiv(x.shape[0], block_r) * triton.cdiv(x.shape[1], block_c)),)
    config = f"{block_r}x{block_c}"
    device.launch(kernels._cast_kernel, grid, args, num_warps=8, num_stages=1, on=values, config=config)


def _largest_of_parts(x: torch.Tensor, parts: torch.Tensor, block_r: int, block_c: int) -> None:
    args = {
        "x_ptr": x,
        "parts_ptr": parts,
        "R": x.shape[0],
        "C": x.shape[1],
        "x_strides": x.stride(),
        "ALIGN_R": device.divisor(x.shape[0]),
        "ALIGN_C": device.divisor(x.shape[1]),
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    grid = (parts.numel(),)
    device.launch(kernels._amax_kernel, grid, args, num_warps=8, num_stages=2, on=x, config=f"{block_r}x{block_c}")


def _push(parts: torch.Tensor, history: torch.Tensor | None, amax: torch.Tensor) -> None:
    length = 1 if history is None else history.numel()
    args = {
        "parts_ptr": parts,
        "history_ptr": history,
        "amax_ptr": amax,
        "count": parts.numel(),
        "length": length,
        "LENGTH": triton.next_power_of_2(length),
        "BLOCK": 1024,
    }
    device.launch(kernels._push_kernel, (1,), args, num_warps=4, num_stages=1, on=amax, config=str(args["LENGTH"]))


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> list[torch.Tensor]:
    """A scale for each row of x [R, C] -> values [R, C], scale [R, 1], amax [R, 1].

    With ``transpose`` also values^T [C, R] and its own scale for each of its rows, [C, 1]: a scale must not change
    along the contracted dimension.
    """
    found = _cast_rows(x, dtype, 4, 1024)
    if transpose:
        values_t, scale_t, _ = _cast_rows(x.t(), dtype, 32, 128)
        found += [values_t, scale_t]
    return found


def _cast_rows(x: torch.Tensor, dtype: torch.dtype, block_r: int, block_c: int) -> list[torch.Tensor]:
    rows, cols = x.shape
    values = _matrix(rows, cols, dtype, x.device)
    scale, amax = (alloc.empty((rows, 1), torch.float32, x.device) for _ in range(2))
    block_r, block_c = _blocks(x.device, rows=block_r, cols=block_c)
    args = _common(x, dtype) | {
        "values_ptr": values,
        "scale_ptr": scale,
        "amax_ptr": amax,
        "pitch": values.stride(0),
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    if rows:
        grid = (triton.cdiv(rows, block_r),)
        config = f"{block_r}x{block_c}"
        device.launch(kernels._cast_rows_kernel, grid, args, num_warps=8, num_stages=2, on=values, config=config)
    return [values, scale, amax]


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """act((x * x_scale) @ (W * weight_scale)^T + b). x [T, D], W [F, D] in fp8 -> [T, F] in ``out_dtype``."""
    y = alloc.empty((x.shape[0], weight.shape[0]), out_dtype, x.device)
    scales = _fitting(x, weight, x_scale, weight_scale)
    linear.run_gemm("nt", (x,), (weight,), ((y,),), activation=activation, biases=(bias,), scales=scales)
    return y


def scaled_linear_(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """The same product added to what ``out`` [T, F] holds, in its own precision. It is contiguous."""
    scales = _fitting(x, weight, x_scale, weight_scale)
    linear.run_gemm("nt", (x,), (weight,), ((out,),), epilogue="accumulate", scales=scales)


def _fitting(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both scales as single numbers, or both by row."""
    if x_scale.numel() == weight_scale.numel() == 1:
        return x_scale, weight_scale
    by_row = [scale.reshape(-1).expand(rows.shape[0]) for scale, rows in ((x_scale, x), (weight_scale, weight))]
    return by_row[0].contiguous(), by_row[1].contiguous()
