"""Launches of the kernels in ``triton.py``: from tensors to arguments. Configurations are in ``config.py``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ..dropout.reference import threshold
from ..runtime import alloc, device
from . import config as configs
from . import triton as kernels
from .config import NormConfig

Optional = torch.Tensor | None


class _Dropping(NamedTuple):
    """What decides on a mask, beside the rng_key."""

    p: float
    stream: int
    row_start: int

    def args(self) -> dict[str, Any]:
        return {
            "kept_scale": 1 / (1 - self.p),
            "threshold": threshold(self.p),
            "mask_stream": self.stream,  # Triton has an option called "stream"
            "row_start": self.row_start,
        }


def _pitch(x: Optional) -> int:
    """The distance of rows, in elements. A single row may claim any."""
    return 0 if x is None else x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _align(*pitches: int) -> int:
    """The largest power of two up to 16 that divides all pitches."""
    return next(power for power in (16, 8, 4, 2, 1) if not any(pitch % power for pitch in pitches))


def _prepared(fn: Any, rest: dict[str, Any], config: NormConfig) -> device.Prepared:
    return device.Prepared(fn, rest, num_warps=config.num_warps, num_stages=1, config=config)


@functools.lru_cache(4096)
def _forward(
    arch: str,
    T: int,
    D: int,
    pitches: tuple[int, int],
    kinds: tuple[Any, ...],
    eps: float,
    weight_offset: float,
    dropping: _Dropping,
) -> tuple[device.Prepared, tuple[int, int, int]]:
    config = configs.forward_config(arch, D)
    rest = {
        "T": T,
        "stride_xt": pitches[0],
        "stride_rt": pitches[1],
        "eps": eps,
        "weight_offset": weight_offset,
        **dropping.args(),
        "D": D,
        "ALIGN": _align(*pitches),
        "BLOCK_T": config.block_t,
        "BLOCK_D": config.block_d,
    }
    return _prepared(kernels._norm_fwd_kernel, rest, config), (triton.cdiv(T, config.block_t), 1, 1)


def norm_fwd(
    x: torch.Tensor,
    residual: Optional,
    weight: Optional,
    bias: Optional,
    rng_key: Optional,
    centred: bool,
    eps: float,
    weight_offset: float,
    p: float,
    stream: int,
    row_start: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """y in ``dtype``, rstd, the mean if ``centred``, s if there is a residual.

    x and residual [T, D], weight and bias [D] -> y and s [T, D], rstd and mean [T] fp32. Nothing is dropped without a
    rng_key.
    """
    T, D = x.shape
    where = x.device
    x, residual = device.dense_rows(x), None if residual is None else device.dense_rows(residual)
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    y = alloc.empty((T, D), dtype, where)
    rstd = alloc.empty((T,), torch.float32, where)
    mean = alloc.empty((T,), torch.float32, where) if centred else None
    s = None
    if residual is not None:
        s = alloc.empty((T, D), torch.promote_types(x.dtype, residual.dtype), where)
    if y.numel():
        tensors = (x, residual, weight, bias, rng_key, y, s, rstd, mean)
        run, grid = _forward(
            device.architecture(where),
            T,
            D,
            (_pitch(x), _pitch(residual)),
            device.kinds_of(tensors),
            eps,
            weight_offset,
            _Dropping(p, stream, row_start),
        )
        run.launch(grid, tensors, on=y)
    return [t for t in (y, rstd, mean, s) if t is not None]


Grads = list["torch.Tensor | None"]  # of weight and bias


def norm_bwd(
    dy: torch.Tensor,
    ds: Optional,
    s: torch.Tensor,
    weight: Optional,
    rstd: torch.Tensor,
    mean: Optional,
    rng_key: Optional,
    weight_offset: float,
    p: float,
    stream: int,
    row_start: int,
    dx_dtype: torch.dtype | None,
    dresidual_dtype: torch.dtype | None,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """The gradients whose dtype is given, in this order: dx and dresidual [T, D], dweight and dbias [D].

    dy and s [T, D], ds [T, D] or None (what comes to s beside the norm), rstd and mean [T] as :func:`norm_fwd` left
    them.
    """
    T, D = s.shape
    where = s.device
    inputs = [None if t is None else alloc.empty((T, D), t, where) for t in (dx_dtype, dresidual_dtype)]
    params = [None if t is None else alloc.empty((D,), t, where) for t in (dweight_dtype, dbias_dtype)]
    some_input = any(t is not None for t in inputs)
    sums = sum(t is not None for t in params)
    if s.numel():
        dy, ds, s = device.dense_rows(dy), None if ds is None else device.dense_rows(ds), device.dense_rows(s)
        itemsize = max(t.element_size() for t in (dy, ds, s) if t is not None)
        together = some_input and configs.sums_fit(device.architecture(where), D, itemsize, sums)
        parts: Grads = [None, None]
        if some_input:
            weight = weight if weight is None else weight.contiguous()
            tensors = (dy, ds, s, weight, rstd, mean, rng_key, *inputs)
            parts = _input_grads(tensors, params if together else None, weight_offset, _Dropping(p, stream, row_start))
        if sums:
            _add_up(parts if together else _param_grads(dy, s, rstd, mean, params), params)
    else:
        params = [t if t is None else t.zero_() for t in params]
    return [t for t in (*inputs, *params) if t is not None]


def _input_grads(
    tensors: tuple[Optional, ...], params: Grads | None, weight_offset: float, dropping: _Dropping
) -> Grads:
    """Fill in the last two of ``tensors``; the sums that programs leave for those of ``params`` that are not None.

    ``params=None``: rows too wide for these sums.
    """
    dy, ds, s, *_ = tensors
    assert dy is not None
    assert s is not None
    run, programs = _input_plan(
        device.architecture(s.device),
        device.program_slots(s.device),
        s.shape,
        (_pitch(dy), _pitch(ds), _pitch(s)),
        device.kinds_of(tensors),
        device.kinds_of(params),
        weight_offset,
        dropping,
    )
    if params is None:
        run.launch((programs, 1, 1), tensors, on=s)
        return [None, None]
    parts = _parts(params, programs)
    run.launch((programs, 1, 1), (*tensors, *parts), on=s)
    return parts


def _param_grads(dy: torch.Tensor, s: torch.Tensor, rstd: torch.Tensor, mean: Optional, params: Grads) -> Grads:
    """The sums that stripes of rows leave, in a pass of its own."""
    run, grid = _params_plan(
        device.architecture(s.device),
        device.program_slots(s.device),
        s.shape,
        (_pitch(dy), _pitch(s)),
        device.kinds_of((dy, s, rstd, mean)),
        device.kinds_of(params),
    )
    parts = _parts(params, grid[1])
    run.launch(grid, (dy, s, rstd, mean, *parts), on=s)
    return parts


def _parts(params: Grads, parts: int) -> Grads:
    return [t if t is None else alloc.empty((parts, t.shape[0]), torch.float32, t.device) for t in params]


def _add_up(parts: Grads, params: Grads) -> None:
    tensors = (*parts, *params)
    some = next(part for part in parts if part is not None)
    run, grid = _sum_plan(device.architecture(some.device), *some.shape, device.kinds_of(tensors))
    run.launch(grid, tensors, on=some)


@functools.lru_cache(4096)
def _input_plan(
    arch: str,
    slots: int,
    shape: torch.Size,
    pitches: tuple[int, int, int],
    kinds: tuple[Any, ...],
    params: tuple[Any, ...] | None,
    weight_offset: float,
    dropping: _Dropping,
) -> tuple[device.Prepared, int]:
    """How ``_norm_bwd_kernel`` or the one for wide rows is launched, and in how many programs."""
    (T, D), config = shape, configs.backward_config(arch, shape[1])
    blocks = triton.cdiv(T, config.block_t)
    rest = {
        "T": T,
        "blocks": blocks,
        "stride_dyt": pitches[0],
        "stride_dst": pitches[1],
        "stride_st": pitches[2],
        "weight_offset": weight_offset,
        **dropping.args(),
        "D": D,
        "ALIGN": _align(*pitches),
        "BLOCK_T": config.block_t,
        "BLOCK_D": config.block_d,
    }
    if params is None:
        return _prepared(kernels._norm_bwd_wide_kernel, rest, config), blocks
    rest["N"] = triton.cdiv(D, config.block_d)
    return _prepared(kernels._norm_bwd_kernel, rest, config), min(blocks, slots * config.per_sm)


@functools.lru_cache(4096)
def _params_plan(
    arch: str,
    slots: int,
    shape: torch.Size,
    pitches: tuple[int, int],
    kinds: tuple[Any, ...],
    params: tuple[Any, ...],
) -> tuple[device.Prepared, tuple[int, int, int]]:
    (T, D), config = shape, configs.params_config(arch)
    across, blocks = triton.cdiv(D, config.block_d), triton.cdiv(T, config.block_t)
    rest = {
        "T": T,
        "blocks": blocks,
        "stride_dyt": pitches[0],
        "stride_st": pitches[1],
        "D": D,
        "ALIGN": _align(*pitches),
        "BLOCK_T": config.block_t,
        "BLOCK_D": config.block_d,
    }
    stripes = min(blocks, triton.cdiv(slots * config.per_sm, across))
    return _prepared(kernels._norm_params_kernel, rest, config), (across, stripes, 1)


@functools.lru_cache(4096)
def _sum_plan(arch: str, parts: int, D: int, kinds: tuple[Any, ...]) -> tuple[device.Prepared, tuple[int, int, int]]:
    config = configs.sum_config(arch)
    rest = {"parts": parts, "D": D, "BLOCK_P": config.block_t, "BLOCK_D": config.block_d}
    return _prepared(kernels._norm_sum_kernel, rest, config), (triton.cdiv(D, config.block_d), 1, 1)
