"""Launches of the kernel in ``reduce_triton.py``: from an exchange and tensors to arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ..runtime import alloc, device
from ..runtime.signals import CHUNKS, Signals, rows_of
from ..runtime.signals_triton import clock_of
from . import reduce_triton as kernels
from .reduce_config import Norm, flagged_programs, pick_config, rows_per_owner

Optional = torch.Tensor | None
Peers = list[torch.Tensor]

_PER_SM = 2  # programs of a kernel that raises no flags, for each multiprocessor


class _Call(NamedTuple):
    """All that a kernel and its fixed arguments depend on."""

    arch: str
    D: int
    R: int
    itemsize: int
    gather: bool
    programs: int
    kinds: tuple[Any, ...]
    device_counted: bool
    eps: float
    weight_offset: float
    centred: bool


@functools.lru_cache(4096)
def _plan(call: _Call) -> device.Prepared:
    scattered = not call.gather and call.kinds[0] is None
    config = pick_config(call.arch, call.D, call.R, call.itemsize, scattered)
    rest = {
        "eps": call.eps,
        "weight_offset": call.weight_offset,
        "D": call.D,
        "R": call.R,
        "LANES": triton.next_power_of_2(call.R),
        "PROGRAMS": call.programs,
        "TOGETHER": config.together,
        "BLOCK_D": config.block_d,
        "GATHER": call.gather,
        "CENTRED": call.centred,
        "CLOCK": clock_of(call.arch),
    }
    return device.Prepared(kernels._reduce_kernel, rest, num_warps=config.num_warps, num_stages=1, config=config)


def all_reduce_rmsnorm(
    x: torch.Tensor,
    peers: Peers,
    signals: Signals,
    *,
    bias: Optional = None,
    residual: Optional = None,
    norm: Norm | None = None,
    shots: int = 1,
    programs: int | None = None,
) -> list[torch.Tensor]:
    """s [T, D], the sum of all ranks' x with bias and residual; with ``norm`` its norm y before it.

    x [T, D]; ``peers`` of ``reduce_config.slot_shape``; residual [T, D], bias [D]. T may be 0: the exchange is made.
    """
    T, D = x.shape
    programs = programs or flagged_programs(device.architecture(x.device))
    per = T if shots == 1 else rows_per_owner(T, len(peers), programs)
    adding = (x.contiguous(), bias, residual, norm)
    return _run((T, per, D, T), peers, signals, adding, x.dtype, gather=shots == 2, programs=programs)


def reduce_scattered(
    peers: Peers,
    signals: Signals,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    *,
    bias: Optional = None,
    residual: Optional = None,
    norm: Norm | None = None,
    gather: bool,
    programs: int | None = None,
) -> list[torch.Tensor]:
    """The same of addends in ``dtype`` that a GEMM has sent: flag [0, source, 0] says that all of a source's are there.

    T tokens in all, of which rank r owns ceil(T/R) beginning with row r * ceil(T/R). The results, and the residual, are
    this rank's rows, [T/R, D], of ``peers`` [R, ceil(T/R), D]; or with ``gather`` all rows, [T, D], of ``peers``
    [R * ceil(T/R) + T, D].
    """
    R = len(peers)
    first, last = rows_of(signals.rank, R, tokens)
    rows = tokens if gather else last - first
    own = peers[signals.rank]
    if programs is None and gather:
        programs = device.capped(flagged_programs(device.architecture(own.device)))
    elif programs is None:
        programs = device.capped(_PER_SM * device.program_slots(own.device))
    sizes = (tokens, -(-tokens // R), width, rows)
    return _run(sizes, peers, signals, (None, bias, residual, norm), dtype, gather=gather, programs=programs)


def _run(
    sizes: tuple[int, int, int, int],
    peers: Peers,
    signals: Signals,
    adding: tuple[Optional, Optional, Optional, Norm | None],
    dtype: torch.dtype,
    *,
    gather: bool,
    programs: int,
) -> list[torch.Tensor]:
    """``sizes``: T, rows of an addend in a slot, D, rows of the results."""
    T, per, D, rows = sizes
    x, bias, residual, norm = adding
    own = peers[signals.rank]
    flagged = gather or x is not None
    assert programs <= CHUNKS or not flagged, "each program has a chunk of flags"
    assert own.dtype is dtype, "addends travel in their own dtype"
    device_counted = signals.epoch is None
    slot_stride = own.stride(0) if device_counted and own.numel() else 0
    assert not (own.data_ptr() | slot_stride * own.element_size()) & 15, "slots begin at multiples of 16 bytes"
    s_dtype = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
    s = alloc.empty((rows, D), s_dtype, own.device)
    y = None if norm is None else alloc.empty((rows, D), s_dtype, own.device)
    weight, norm_bias = (None, None) if norm is None else (norm.weight, norm.bias)
    operands = (residual, bias, weight, norm_bias)
    tensors = (
        *(x, *[t if t is None else t.contiguous() for t in operands], y, s),
        *(own, signals.pads[signals.rank], signals.table, signals.state, signals.report),
    )
    norm = norm or Norm()
    call = _Call(
        device.architecture(own.device),
        D,
        len(peers),
        own.element_size(),
        gather,
        programs,
        device.kinds_of(tensors),
        device_counted,
        norm.eps,
        norm.weight_offset,
        norm.centred,
    )
    run = _plan(call)
    run.launch((programs, 1, 1), (*tensors, T, per, signals.epoch, slot_stride), on=s)
    return [s] if y is None else [y, s]
