"""Configurations and launches of the kernels in ``triton.py``."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from ..rope.config import NUM_WARPS, pick_config
from ..runtime import alloc, device, dispatch
from ..runtime.chips import converts_e4m3, rounds_fp8_twice
from ..runtime.dtypes import LARGEST
from ..runtime.vectors import told
from . import triton as kernels
from .reference import Scale

_COPY_BYTES = 16384  # twice a tile's: a copy holds nothing but what it moves
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width
_OF_FP8 = torch.uint8  # in place of it: not every chip's compiler knows the type


def write_kv_(
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """The write on checked input; shapes as in ``reference.write_kv_``."""
    _write(None, k, v, None, kv_cache, v_cache, slot_mapping, None, None, False, None, None, 0.0, 0.0, k_scale, v_scale)


def norm_rope_write_kv_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    k_scale: Scale,
    v_scale: Scale,
) -> torch.Tensor:
    """The same with q and k normalised and rotated first; the new q, contiguous."""
    out = alloc.empty(q.shape, q.dtype, q.device)
    _write(
        q, k, v, out, kv_cache, v_cache, slot_mapping, cos, sin, interleaved, q_norm, k_norm, eps, norm_offset,
        k_scale, v_scale,
    )  # fmt: skip
    return out


class Settled:
    """Writes of one kind; :func:`settle` makes them."""

    def __init__(self, op: str, kernel: device.Prepared, programs: int, as_bytes: bool) -> None:
        self._counted, self._launch, self._grid, self._as_bytes = (
            (op, "triton"),
            kernel.launch,
            (programs, 1, 1),
            as_bytes,
        )

    def __call__(
        self,
        kv_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        *others: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The new q; ``others`` are those of :func:`settle`."""
        dispatch.counts[self._counted] += 1
        if self._as_bytes:
            kv_cache, v_cache = kv_cache.view(_OF_FP8), None if v_cache is None else v_cache.view(_OF_FP8)
        out = None if q is None else alloc.new_empty(q, *q.shape)
        caches = kv_cache, kv_cache if v_cache is None else v_cache
        self._launch(self._grid, (q, k, v, out, *caches, *others), on=k)
        return out


def settle(
    op: str,
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    *,
    interleaved: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Settled | None:
    """What launches writes like this one, of checked input; None where an operand has to be copied first."""
    slots = kv_cache.shape[:3]
    k_scales, v_scales = (
        Scale(written=x) if x is not None and x.shape == slots else Scale(given=x) for x in (k_scale, v_scale)
    )
    out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device="meta")
    kernel, programs, given = _prepared(
        q, k, v, out, kv_cache, v_cache, slot_mapping, cos, sin, interleaved, q_norm, k_norm, eps, norm_offset,
        k_scales, v_scales,
    )  # fmt: skip
    operands = q, k, v, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale
    if not programs or any(x is not y for x, y in zip((*given[:3], *given[6:]), operands, strict=True)):
        return None
    return Settled(op, kernel, programs, kv_cache.dtype == torch.float8_e4m3fn)


class _Call(NamedTuple):
    """What the arguments of a launch depend on, but for addresses."""

    arch: str
    sizes: tuple[int, ...]  # T, N, K, H, Hv, page size
    half: int
    interleaved: bool
    eps: float
    norm_offset: float
    split: bool  # K and V in caches of their own
    largest: float
    written: tuple[bool, bool]  # whether the scales of k and v are written
    itemsizes: tuple[int, int]  # of k, and of the cache
    kinds: tuple[Any, ...]  # what Triton specialises the kernel on: (dtype, aligned) of each tensor
    strides: tuple[tuple[int, ...], ...]
    table_stride: int


def _write(q: torch.Tensor | None, k: torch.Tensor, *others: Any) -> None:
    kernel, programs, tensors = _prepared(q, k, *others)
    if programs:
        kernel.launch((programs, 1, 1), tensors, on=k)


def _prepared(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    q_out: torch.Tensor | None,
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    k_scale: Scale,
    v_scale: Scale,
) -> tuple[device.Prepared, int, tuple[torch.Tensor | None, ...]]:
    """The kernel, its number of programs, and the tensors that it takes."""
    largest = LARGEST.get(kv_cache.dtype, 0.0)
    if kv_cache.dtype == torch.float8_e4m3fn:
        kv_cache, v_cache = kv_cache.view(_OF_FP8), None if v_cache is None else v_cache.view(_OF_FP8)
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    q, k, v = None if q is None else device.dense_rows(q), device.dense_rows(k), device.dense_rows(v)
    scales = [given if written is None else written for given, written in (k_scale, v_scale)]
    tensors = (
        q, k, v, q_out,
        kv_cache, kv_cache if v_cache is None else v_cache, slot_mapping.contiguous(),
        cos, sin,
        None if q_norm is None else q_norm.contiguous(), None if k_norm is None else k_norm.contiguous(),
        *scales,
    )  # fmt: skip
    call = _Call(
        device.architecture(k.device),
        (k.shape[0], 0 if q is None else q.shape[1], k.shape[1], k.shape[2], v.shape[2], kv_cache.shape[2]),
        0 if cos is None else cos.shape[1],
        interleaved,
        eps,
        norm_offset,
        v_cache is not None,
        largest,
        (k_scale.written is not None, v_scale.written is not None),
        (k.dtype.itemsize, kv_cache.dtype.itemsize),
        device.kinds_of(tensors),
        tuple([(0, 0, 0) if x is None else x.stride() for x in (*tensors[:6], k_scale.written, v_scale.written)]),
        0 if cos is None else cos.stride(0),
    )
    return *_plan(call), tensors


@functools.lru_cache(4096)
def _plan(call: _Call) -> tuple[device.Prepared, int]:
    T, N, K, H, V, page_size = call.sizes
    rest = H - 2 * call.half
    config = pick_config(call.arch, N, K, row=max(2 * call.half, rest, V), itemsize=call.itemsizes[0])
    q, k, v, q_out, k_cache, v_cache, k_scale, v_scale = call.strides
    kernel = device.Prepared(
        kernels._write_kv_kernel,
        {
            "T": T,
            "N": N,
            "K": K,
            "eps": call.eps,
            "norm_offset": call.norm_offset,
            "q_strides": q[:2],
            "k_strides": k[:2],
            "v_strides": v[:2],
            "q_out_strides": q_out[:2],
            "k_cache_strides": k_cache[:3],
            "v_cache_strides": v_cache[:3],
            "k_scale_strides": k_scale,
            "v_scale_strides": v_scale,
            "table_stride": call.table_stride,
            "H": H,
            "V_SIZE": V,
            "V_FIRST": 0 if call.split else H,
            "HALF": call.half,
            "INTERLEAVED": call.interleaved,
            "PAGE_SIZE": page_size,
            "LARGEST": call.largest,
            "WRITE_K_SCALE": call.written[0],
            "WRITE_V_SCALE": call.written[1],
            "NATIVE_FP8": _rounds_natively(call.arch),
            "EMULATE": call.arch == device.INTERPRETER,
            "ALIGN": told((*q[:2], *k[:2], *v[:2], *q_out[:2]), call.itemsizes[0]),
            "TABLE_ALIGN": told((call.table_stride,), 4),
            "CACHE_ALIGN": told((*k_cache[:3], *v_cache[:3]), call.itemsizes[1]),
            "RUN": _run(call),
            "BLOCK_TQ": config.block_tq,
            "BLOCK_N": config.block_n,
            "BLOCK_TK": config.block_tk,
            "BLOCK_K": config.block_k,
            "BLOCK_HALF": triton.next_power_of_2(max(call.half, 1)),
            "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
            "BLOCK_V": triton.next_power_of_2(V),
        },
        num_warps=NUM_WARPS,
        num_stages=1,
        config=config,
    )
    q_tiles = triton.cdiv(T, config.block_tq) * triton.cdiv(N, config.block_n)
    return kernel, q_tiles + 2 * triton.cdiv(T, config.block_tk) * triton.cdiv(K, config.block_k)


def _run(call: _Call) -> int:
    """Elements that a thread takes in a row: what are 16 bytes of the wider of k and the cache.

    But 16 codes where each takes the chip many instructions and nothing is rotated: issue slots bind these kernels, and
    with 8 a thread would find the pages of two rows. int8 takes 722 cycles a block with 16 codes, 792 with 8; memory
    takes 692.
    """
    codes = call.itemsizes[1] == 1 and (call.largest == LARGEST[torch.int8] or not _rounds_natively(call.arch))
    return 16 if codes and not call.half else 16 // max(call.itemsizes)


def _rounds_natively(arch: str) -> bool:
    return converts_e4m3(arch) and not rounds_fp8_twice(arch)


# ---------------------------------------------------------------------------------------------------- copies


def copy_blocks_(caches: list[torch.Tensor], pairs: torch.Tensor, block_dim: int) -> None:
    """The copies on checked input; shapes as in ``reference.copy_blocks_``. One launch for each cache."""
    pairs = pairs.contiguous()
    for cache in caches:
        cache = cache.view(_INTEGERS[cache.dtype.itemsize])
        aligned = not cache.data_ptr() & 15, not pairs.data_ptr() & 15
        arch = device.architecture(cache.device)
        kernel, chunks = _copy_plan(arch, cache.dtype, cache.shape, cache.stride(), block_dim, aligned)
        if chunks and len(pairs):
            kernel.launch((len(pairs) * chunks, 1, 1), (cache, pairs), on=cache)


@functools.lru_cache(256)
def _copy_plan(
    arch: str,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    block_dim: int,
    aligned: tuple[bool, bool],
) -> tuple[device.Prepared, int]:
    """The kernel that copies blocks of one kind of cache, and how many programs a block takes."""
    sizes, steps = _merged([pair for d, pair in enumerate(zip(shape, strides)) if d != block_dim])
    count = math.prod(sizes)
    block = 32 if arch == device.INTERPRETER else _COPY_BYTES // dtype.itemsize
    block = min(block, triton.next_power_of_2(max(count, 1)))
    kernel = device.Prepared(
        kernels._copy_blocks_kernel,
        {"stride_block": strides[block_dim], "strides": steps, "SIZES": sizes, "COUNT": count, "BLOCK": block},
        num_warps=NUM_WARPS,
        num_stages=1,
        config=f"{block}-w{NUM_WARPS}",
    )
    return kernel, triton.cdiv(count, block)


def _merged(dims: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the same elements in as few dimensions as there can be, the last one of stride 1.

    ``dims`` are pairs of size and stride. The order in which elements are copied is free.
    """
    merged: list[tuple[int, int]] = [(1, 1)]  # from the innermost out
    for size, stride in sorted((pair for pair in dims if pair[0] != 1), key=lambda pair: pair[1]):
        inner, inner_stride = merged[-1]
        if stride == inner * inner_stride:
            merged[-1] = inner * size, inner_stride
        else:
            merged.append((size, stride))
    sizes, strides = zip(*reversed(merged))
    return sizes, strides
