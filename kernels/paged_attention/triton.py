"""Paged attention in Triton: one ragged kernel for prefill and decode, and the kernel that writes the pages.

    s = scale * log2(e) * q @ k^T        masked where key > query position
    m' = max(m, rowmax(s));  p = 2^(s - m');  l = l * 2^(m - m') + rowsum(p);  acc = acc * 2^(m - m') + p @ v
    out = acc / l

Online softmax (Milakov and Gimelshein, arXiv:1805.02867) in base 2, tiled as in FlashAttention-2 (arXiv:2307.08691).

A tile's BLOCK_M rows are BLOCK_Q = BLOCK_M // GROUP tokens of one sequence times the GROUP query heads that share one
KV head, so that each K and V is read once for the whole group. Sequence s owns the q-blocks from
query_start_loc[s] // BLOCK_Q + s on: a number that rises by at least ceil(q_len / BLOCK_Q) per sequence, so a constant
grid of T // BLOCK_Q + S + 1 covers every batch and each program finds its sequence by binary search (vLLM's unified
attention kernel does the same). The last q-blocks belong to padding tokens, which give zeros and read no table.

Letters: T tokens, S sequences, N query heads, K KV heads, G = N / K, H head size, B block size of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """a @ b in fp32. UPCAST is set under the interpreter only, whose dot of two bf16 operands is wrong."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _find_sequence(query_start_loc_ptr, num_seqs, q_block, BLOCK_Q: tl.constexpr):
    """The sequence that owns ``q_block``; ``num_seqs`` where it lies behind the last one, in the padding."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= q_block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _page_of(table_ptr, start, offs_n, mask_n, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of each key of a tile, int64: one for the tile where it lies within a page, else [BLOCK_N]."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
    else:
        return tl.load(table_ptr + offs_n // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)


# Counts change with every step; specialising on them would only compile the same code again.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "stride_table"])
def _paged_attention_fwd_kernel(
    q_ptr,  # [T, N, H]
    kv_ptr,  # [blocks, K, B, 2H]
    tables_ptr,  # [S, max_blocks]
    seq_lens_ptr,  # [S]
    query_start_loc_ptr,  # [S + 1]
    out_ptr,  # [T, N, H]
    num_tokens,
    num_seqs,
    scale_log2,  # scale * log2(e)
    stride_qt,
    stride_qn,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_table,
    stride_ot,
    stride_on,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)

    seq = _find_sequence(query_start_loc_ptr, num_seqs, q_block, BLOCK_Q)
    q_start = tl.load(query_start_loc_ptr + seq)
    is_padding = seq == num_seqs
    q_end = num_tokens
    if not is_padding:
        q_end = tl.load(query_start_loc_ptr + seq + 1)
    q_len = q_end - q_start
    first = (q_block - q_start // BLOCK_Q - seq) * BLOCK_Q
    if first >= q_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_h = tl.arange(0, BLOCK_H)
    token = first + offs_m // GROUP  # within the sequence, [BLOCK_M]
    # Rows beyond BLOCK_Q * GROUP (a group that is no power of two) belong to a token of the next q-block.
    mask_m = (offs_m < BLOCK_Q * GROUP) & (token < q_len)
    mask_h = offs_h < HEAD_SIZE
    mask_q = mask_m[:, None] & mask_h[None, :]
    row = (q_start + token).to(tl.int64)
    head = kv_head * GROUP + offs_m % GROUP
    out_ptrs = out_ptr + row[:, None] * stride_ot + head[:, None] * stride_on + offs_h[None, :]
    if is_padding:
        tl.store(out_ptrs, tl.zeros((BLOCK_M, BLOCK_H), out_ptr.dtype.element_ty), mask=mask_q)
        return

    q_ptrs = q_ptr + row[:, None] * stride_qt + head[:, None] * stride_qn + offs_h[None, :]
    q = tl.load(q_ptrs, mask=mask_q, other=0.0)  # [BLOCK_M, BLOCK_H]
    context = tl.load(seq_lens_ptr + seq) - q_len
    position = context + token
    kv_end = context + tl.minimum(first + BLOCK_Q, q_len)  # one past the last key that any row sees
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    kv_ptr += kv_head.to(tl.int64) * stride_kv_head

    # Every row, masked ones too, sees key 0 in the first tile: m is finite from then on and l positive.
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741 (the name it has in the paper)
    acc = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for start in tl.range(0, kv_end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kv_end
        page = _page_of(table_ptr, start, offs_n, mask_n, PAGE_SIZE, BLOCK_N)
        slot = page * stride_kv_block + (offs_n % PAGE_SIZE) * stride_kv_slot  # [BLOCK_N]
        # What lies behind kv_end may be NaN, and 0 * NaN is NaN: masked loads keep it out of both products.
        k_ptrs = kv_ptr + slot[None, :] + offs_h[:, None]
        k = tl.load(k_ptrs, mask=mask_h[:, None] & mask_n[None, :], other=0.0)  # [BLOCK_H, BLOCK_N]
        scores = _dot(q, k, UPCAST) * scale_log2
        scores = tl.where(offs_n[None, :] <= position[:, None], scores, float("-inf"))  # [BLOCK_M, BLOCK_N]

        m_next = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_next[:, None])
        correction = tl.exp2(m - m_next)
        l = l * correction + tl.sum(p, 1)  # noqa: E741
        m = m_next

        v_ptrs = kv_ptr + slot[:, None] + (HEAD_SIZE + offs_h)[None, :]
        v = tl.load(v_ptrs, mask=mask_n[:, None] & mask_h[None, :], other=0.0)  # [BLOCK_N, BLOCK_H]
        acc = acc * correction[:, None] + _dot(p.to(v.dtype), v, UPCAST)

    tl.store(out_ptrs, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kv_kernel(
    kv_ptr,  # [blocks, K, B, 2H]
    k_ptr,  # [T, K, H]
    v_ptr,  # [T, K, H]
    slot_mapping_ptr,  # [T]
    num_tokens,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_kt,
    stride_kn,
    stride_vt,
    stride_vn,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program copies BLOCK_T tokens of one KV head."""
    head = tl.program_id(1).to(tl.int64)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.arange(0, BLOCK_H)
    slot = tl.load(slot_mapping_ptr + offs_t, mask=offs_t < num_tokens, other=-1)  # int64
    mask = (slot >= 0)[:, None] & (offs_h < HEAD_SIZE)[None, :]
    k = tl.load(k_ptr + offs_t[:, None] * stride_kt + head * stride_kn + offs_h[None, :], mask=mask)
    v = tl.load(v_ptr + offs_t[:, None] * stride_vt + head * stride_vn + offs_h[None, :], mask=mask)
    target = (
        kv_ptr + (slot // PAGE_SIZE) * stride_kv_block + head * stride_kv_head + (slot % PAGE_SIZE) * stride_kv_slot
    )
    tl.store(target[:, None] + offs_h[None, :], k, mask=mask)
    tl.store(target[:, None] + HEAD_SIZE + offs_h[None, :], v, mask=mask)
