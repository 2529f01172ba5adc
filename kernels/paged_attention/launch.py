"""Configurations and launches of the kernels in ``triton.py``.

``pick_config`` is a pure function of chip, shapes and dtype: nothing is tuned while a model runs, and nothing is asked
of the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from .. import alloc, device
from . import triton as kernels

_LOG2E = math.log2(math.e)
_WRITE_WARPS = 4


@dataclass(frozen=True)
class AttentionConfig:
    """The tile of one attention launch: rows (tokens x grouped heads) and keys per step of its loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}-w{self.num_warps}-s{self.num_stages}"


def pick_config(
    arch: str, num_tokens: int, num_seqs: int, *, group: int, head_size: int, dtype: torch.dtype
) -> AttentionConfig:
    """The configuration for ``num_tokens`` queries of ``num_seqs`` sequences on ``arch``.

    The smallest tile that holds an average sequence's rows: 16 (the smallest MMA) for decode, 64 for a few queries
    each (speculation, short chunks), 128 for prefill. In a mixed batch decodes ride in a prefill tile: what they cost
    is reading the cache, not the products. IEEE fp32 has no tensor cores and keeps to tiles whose operands fit the
    register file, as do heads beyond 128. No tile spills in the builds of ``cases.py``; the codegen tests hold that.
    """
    smallest = max(16, triton.next_power_of_2(group))  # at least one token's heads
    rows = triton.cdiv(num_tokens, max(num_seqs, 1)) * group
    if arch == device.INTERPRETER:
        return AttentionConfig(max(smallest, 16 if rows <= 16 else 32), 32, 4, 1)
    num_stages = 2 if arch.startswith("gfx") else 3  # AMD: 64 KiB of shared memory
    if dtype == torch.float32 or head_size > 128:
        if rows <= 16:
            return AttentionConfig(smallest, 32, 8, num_stages)
        return AttentionConfig(max(smallest, 32), 32, 4, num_stages)
    if rows <= 16:
        return AttentionConfig(smallest, 64, 4, num_stages)
    return AttentionConfig(max(smallest, 64 if rows <= 64 else 128), 64, 8, num_stages)


def paged_attention_fwd(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention on checked input; shapes as in ``op.paged_attention``."""
    out = alloc.empty(q.shape, q.dtype, q.device)
    if out.numel() == 0:
        return out
    num_tokens, heads, head_size = q.shape
    (num_seqs,), (_, kv_heads, page_size, _) = seq_lens.shape, kv_cache.shape
    group = heads // kv_heads
    arch = device.architecture(q.device)
    config = pick_config(arch, num_tokens, num_seqs, group=group, head_size=head_size, dtype=q.dtype)
    q, block_tables = _dense_rows(q), _dense_rows(block_tables)
    args = {
        "q_ptr": q,
        "kv_ptr": kv_cache,
        "tables_ptr": block_tables,
        "seq_lens_ptr": _dense_rows(seq_lens),
        "query_start_loc_ptr": _dense_rows(query_start_loc),
        "out_ptr": out,
        "num_tokens": num_tokens,
        "num_seqs": num_seqs,
        "scale_log2": scale * _LOG2E,
        "stride_qt": q.stride(0),
        "stride_qn": q.stride(1),
        "stride_kv_block": kv_cache.stride(0),
        "stride_kv_head": kv_cache.stride(1),
        "stride_kv_slot": kv_cache.stride(2),
        "stride_table": block_tables.stride(0),
        "stride_ot": out.stride(0),
        "stride_on": out.stride(1),
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "PAGE_SIZE": page_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_H": max(16, triton.next_power_of_2(head_size)),
        "UPCAST": arch == device.INTERPRETER,
    }
    q_blocks = num_tokens // (config.block_m // group) + num_seqs + 1
    device.launch(
        kernels._paged_attention_fwd_kernel,
        (q_blocks, kv_heads),
        args,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        on=q,
        config=config,
    )
    return out


def write_kv_(kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """The write on checked input; shapes as in ``op.write_kv_``."""
    if k.numel() == 0:
        return
    num_tokens, kv_heads, head_size = k.shape
    k, v = _dense_rows(k), _dense_rows(v)
    block_h = triton.next_power_of_2(head_size)
    block_t = max(1, 2048 // block_h)
    args = {
        "kv_ptr": kv_cache,
        "k_ptr": k,
        "v_ptr": v,
        "slot_mapping_ptr": _dense_rows(slot_mapping),
        "num_tokens": num_tokens,
        "stride_kv_block": kv_cache.stride(0),
        "stride_kv_head": kv_cache.stride(1),
        "stride_kv_slot": kv_cache.stride(2),
        "stride_kt": k.stride(0),
        "stride_kn": k.stride(1),
        "stride_vt": v.stride(0),
        "stride_vn": v.stride(1),
        "HEAD_SIZE": head_size,
        "PAGE_SIZE": kv_cache.shape[2],
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
    }
    device.launch(
        kernels._write_kv_kernel,
        (triton.cdiv(num_tokens, block_t), kv_heads),
        args,
        num_warps=_WRITE_WARPS,
        num_stages=1,
        on=kv_cache,
        config=f"{block_t}x{block_h}-w{_WRITE_WARPS}",
    )


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied only where its last dimension is strided; the kernels take every other stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
