"""Launches of the kernels in ``triton.py``: from tensors to arguments. Configurations are in ``config.py``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ..dropout.reference import threshold
from ..runtime import alloc, device, repeated
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


_KEEPING = _Dropping(0.0, 0, 0)
Grads = list["torch.Tensor | None"]  # of inputs, and of weight and bias


class Forward:
    """:func:`norm_fwd` without dropout for operands of one kind: what remains is to allocate, and to launch.

    x and residual may have any number of dimensions if their rows lie as those of [T, D] do; y and s get the same.
    """

    def __init__(
        self,
        x: torch.Tensor,
        residual: Optional,
        weight: Optional,
        bias: Optional,
        centred: bool,
        eps: float,
        weight_offset: float,
    ) -> None:
        rows, added = (t if t is None or t.dim() == 2 else t.flatten(0, -2) for t in (x, residual))
        assert rows is not None
        self._shape, self._rows, self._centred = tuple(x.shape), rows.shape[0], centred
        self._dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        meta = torch.empty(0, dtype=x.dtype, device="meta")  # outputs without memory, of the same kinds
        tensors = (rows, added, weight, bias, None, *self._outputs(meta, residual))
        where = device.architecture(x.device)
        pitches = _pitch(rows), _pitch(added)
        kinds = device.kinds_of(tensors)
        self._run, self._grid = _forward(where, *rows.shape, pitches, kinds, eps, weight_offset, _KEEPING)
        self._weight_offset = weight_offset
        self._backwards: dict[Any, _Backward | None] = {}

    def __call__(self, x: torch.Tensor, residual: Optional, weight: Optional, bias: Optional) -> tuple[Any, ...]:
        """y, s or None, rstd, mean or None."""
        outputs = self._outputs(x, residual)
        self._run.launch(self._grid, (x, residual, weight, bias, None, *outputs), on=x)
        return outputs

    def backward(self, saved: tuple[Any, ...], dtypes: tuple[torch.dtype | None, ...]) -> Grads | None:
        """The gradients whose dtype is given, as :func:`norm_bwd` has them, of dy, ds, s, weight, rstd and mean.

        dx and dresidual have the shape of s. None where this needs other launches than one and the sum of its parts.
        """
        read = [t for t in saved if t is not None]
        if any(t.data_ptr() & 15 for t in read):  # hooks on saved tensors may bring others
            return None
        kinds = [(t.shape, t.stride(), t.dtype) for t in read]
        key = repeated.settings(saved[2].dtype), dtypes, saved[1] is None, *kinds
        if key not in self._backwards:
            self._backwards[key] = _Backward.of(saved, dtypes, self._weight_offset)
        steps = self._backwards[key]
        return None if steps is None else steps(saved)

    def _outputs(self, x: torch.Tensor, residual: Optional) -> tuple[Any, ...]:
        y = alloc.new_empty_of(x, self._dtype, *self._shape)
        s = None if residual is None else alloc.new_empty_of(x, self._dtype, *self._shape)
        rstd = alloc.new_empty_of(x, torch.float32, self._rows)
        return y, s, rstd, alloc.new_empty_of(x, torch.float32, self._rows) if self._centred else None


class _Backward:
    """:func:`norm_bwd` without dropout for operands of one kind."""

    @classmethod
    def of(
        cls, saved: tuple[Any, ...], dtypes: tuple[torch.dtype | None, ...], weight_offset: float
    ) -> _Backward | None:
        dy, ds, s, *others = saved
        lie = all(repeated.rows_lie(t) for t in (dy, ds, s) if t is not None)
        lie = lie and all(t is None or t.is_contiguous() for t in others)
        some_input, sums = any(dtypes[:2]), sum(t is not None for t in dtypes[2:])
        if not lie or not some_input:
            return None
        itemsize = max(t.element_size() for t in (dy, ds, s) if t is not None)
        if not configs.sums_fit(device.architecture(s.device), s.shape[-1], itemsize, sums):
            return None
        return cls(saved, dtypes, weight_offset)

    def __init__(self, saved: tuple[Any, ...], dtypes: tuple[torch.dtype | None, ...], weight_offset: float) -> None:
        dy, ds, s, weight, *statistics = saved
        self._dtypes, self._sizes = dtypes, [tuple(s.shape)] * 2 + [(s.shape[-1],)] * 2
        rows: list[Any] = [None if t is None else t.flatten(0, -2) for t in (dy, ds, s)]
        meta = torch.empty(0, dtype=s.dtype, device="meta")
        outs = self._outputs(meta)
        inputs, params = [None if t is None else t.flatten(0, -2) for t in outs[:2]], outs[2:]
        tensors = (*rows, weight, *statistics, None, *inputs)
        self._run, self._programs = _input_plan(
            device.architecture(s.device),
            device.program_slots(s.device),
            rows[2].shape,
            (_pitch(rows[0]), _pitch(rows[1]), _pitch(rows[2])),
            device.kinds_of(tensors),
            device.kinds_of(params),
            weight_offset,
            _KEEPING,
        )
        self._sum = None
        if any(dtypes[2:]):
            parts = self._parts(meta)
            kinds = device.kinds_of((*parts, *params))
            self._sum = _sum_plan(device.architecture(s.device), self._programs, s.shape[-1], kinds)

    def __call__(self, saved: tuple[Any, ...]) -> Grads:
        s = saved[2]
        outs, parts = self._outputs(s), self._parts(s)
        self._run.launch((self._programs, 1, 1), (*saved, None, *outs[:2], *parts), on=s)
        if self._sum is not None:
            run, grid = self._sum
            run.launch(grid, (*parts, *outs[2:]), on=s)
        return outs

    def _outputs(self, s: torch.Tensor) -> Grads:
        return [
            None if dtype is None else alloc.new_empty_of(s, dtype, *size)
            for dtype, size in zip(self._dtypes, self._sizes)
        ]

    def _parts(self, s: torch.Tensor) -> Grads:
        size = self._programs, s.shape[-1]
        return [None if dtype is None else alloc.new_empty_of(s, torch.float32, *size) for dtype in self._dtypes[2:]]


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
        rstd, mean = rstd.contiguous(), None if mean is None else mean.contiguous()  # hooks may bring others
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
