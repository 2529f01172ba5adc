"""Paged attention in Triton: one ragged kernel for prefill, decode and everything between, and the merge of its parts.

    s = scale * log2(e) * q @ k^T        softcap, ALiBi; -inf where a row does not see a key
    m' = max(m, rowmax(s));  p = 2^(s - m');  l = l * 2^(m - m') + rowsum(p);  acc = acc * 2^(m - m') + p @ v
    out = acc / l        lse = (m + log2(l)) / log2(e)

Online softmax (Milakov and Gimelshein, arXiv:1805.02867) in base 2, tiled as in FlashAttention-2 (arXiv:2307.08691),
sequences cut into parts as in Flash-Decoding.

A program takes one item of the plan (``plan.py``): BLOCK_M rows of one sequence and KV head, and a range of keys. Row r
of a sequence is head r % GROUP of its token r // GROUP. An item that holds all keys of its rows writes the result; of
the others each writes (acc, m, l) to its slot, and ``_merge_kernel`` puts them together in the order of their keys.

Invariant mode (QUANTUM > 0). Keys are summed up in quanta at fixed positions, each from nothing, and the quanta folded
into the row's result one after another, by the same instructions whether a program does several of them or the merge
does. What a row does not see adds exact zeros, if it is finite. So a row's bits depend on its own keys only. Two things
keep the compiler from telling the ways apart: every tile runs through the one masked loop, and ``_fold`` spells out
which product and sum are fused.

Letters: T tokens, S sequences, N query heads, K KV heads, G = N / K, H head size of q and k, Hv of v, B block size of
the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.sums_triton import product
from ..runtime.vectors_triton import multiple
from .scores_triton import LOG2E, scores, sees
from .widen_triton import widen, widen_pairs

# How scales are stored (K_SCALES, V_SCALES).
NO_SCALE = tl.constexpr(0)
ONE_SCALE = tl.constexpr(1)
TOKEN_SCALES = tl.constexpr(2)

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b in fp32. UPCAST is set under the interpreter only, whose dot of two bf16 operands is wrong."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load(ptrs, mask_n, mask_h, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of keys or values. What lies behind the keys may be NaN, and 0 * NaN is NaN: it is not loaded."""
    if MASKED and PADDED:
        return tl.load(ptrs, mask=mask_n & mask_h, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=mask_n, other=0.0)
    elif PADDED:
        return tl.load(ptrs, mask=mask_h, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _finite(m):
    """A maximum that can be subtracted: -inf, of rows that have seen nothing yet, as 0."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _token_scales(scale_ptr, strides, page, offset, mask_n, MASKED: tl.constexpr):
    """A scale for each key of a tile, [BLOCK_N]."""
    ptrs = scale_ptr + page * strides[0] + offset * strides[1]
    if MASKED:
        return tl.load(ptrs, mask=mask_n, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _attend(
    m,
    l,  # noqa: E741 (the name it has in the paper)
    sums,  # one [BLOCK_M, BLOCK_V]; of pairs two of half that width, the even columns and the odd ones
    q,  # [BLOCK_M, BLOCK_H]
    begin,
    end,
    kv_low,  # what lies before belongs to nobody any more; None without a window
    kv_end,
    k_ptr,  # the KV head's keys
    v_ptr,
    table_ptr,  # the sequence's
    k_scale_ptr,
    v_scale_ptr,
    k_strides,  # of blocks and slots
    v_strides,
    k_scale_strides,
    v_scale_strides,
    position,  # of the rows, [BLOCK_M]
    context,
    prefix,
    window,
    tree_ptrs,  # [BLOCK_M, 1]
    tree_width,
    scale,
    softcap,
    slopes,  # [BLOCK_M]
    HEAD_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    RUN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from ``begin``, a multiple of BLOCK_N, to ``end`` to the rows' sums.

    Where not MASKED every row sees all of them.
    """
    offs_h = tl.max_contiguous(tl.arange(0, BLOCK_H), RUN)
    offs_v = tl.max_contiguous(tl.arange(0, sums[0].shape[1]), RUN)
    mask_h = (offs_h < HEAD_SIZE)[:, None]
    mask_v = (offs_v < V_SIZE // len(sums))[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kv_end
        if kv_low is not None:
            mask_n = mask_n & (offs_n >= kv_low)
        if PAGE_SIZE % BLOCK_N == 0:  # the tile lies within a page
            page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
        elif MASKED:
            page = tl.load(table_ptr + offs_n // PAGE_SIZE, mask=mask_n, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + offs_n // PAGE_SIZE).to(tl.int64)
        offset = offs_n % PAGE_SIZE

        k_rows = page * k_strides[0] + offset * k_strides[1]  # [BLOCK_N]
        k = _load(k_ptr + k_rows[None, :] + offs_h[:, None], mask_n[None, :], mask_h, MASKED, BLOCK_H != HEAD_SIZE)
        s = _dot(q, widen(k, q.dtype), PRECISION, UPCAST)  # [BLOCK_M, BLOCK_N]
        if K_SCALES == TOKEN_SCALES:
            s *= _token_scales(k_scale_ptr, k_scale_strides, page, offset, mask_n, MASKED)[None, :]
        s = scores(s, scale, softcap, slopes, position, offs_n)
        if MASKED:
            seen = sees(offs_n, kv_end, position, context, prefix, window, tree_ptrs, tree_width, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1))
        top = m_next
        if MASKED:
            top = _finite(m_next)
        p = tl.exp2(s - top[:, None])
        correction = tl.exp2(m - top)
        l = l * correction + tl.sum(p, 1)  # noqa: E741
        m = m_next

        v_rows = page * v_strides[0] + offset * v_strides[1]
        v = _load(v_ptr + v_rows[:, None] + offs_v[None, :], mask_n[:, None], mask_v, MASKED, BLOCK_V != V_SIZE)
        if V_SCALES == TOKEN_SCALES:
            p *= _token_scales(v_scale_ptr, v_scale_strides, page, offset, mask_n, MASKED)[None, :]
        if V_SCALES == TOKEN_SCALES and q.dtype == tl.float16:
            # As shares of the row's largest: small scales would leave fp16's range.
            largest = tl.max(p, 1)
            p *= (1.0 / tl.where(largest == 0.0, 1.0, largest))[:, None]
        else:
            largest = None
        p = p.to(q.dtype)
        if len(sums) == 1:
            sums = (_add_dot(sums[0], correction, p, widen(v, q.dtype), largest, PRECISION, UPCAST),)
        else:
            even, odd = widen_pairs(v, k.dtype, q.dtype, PTX)
            even = _add_dot(sums[0], correction, p, even, largest, PRECISION, UPCAST)
            odd = _add_dot(sums[1], correction, p, odd, largest, PRECISION, UPCAST)
            sums = (even, odd)
    return m, l, sums


@triton.jit
def _add_dot(acc, correction, p, v, largest, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc * correction + p @ v. If not None, ``largest`` is what p's rows are shares of."""
    acc = acc * correction[:, None]
    product = _dot(p, v, PRECISION, UPCAST)
    if largest is not None:
        product *= largest[:, None]
    return acc + product


@triton.jit
def _columns(sums):
    """Sums of all columns in their order."""
    if len(sums) == 1:
        return sums[0]
    else:
        return tl.interleave(sums[0], sums[1])


@triton.jit
def _fold(m, l, acc, m_part, l_part, acc_part):  # noqa: E741
    """(m, l, acc) of all keys so far and of the next part, [...], [...], [..., Hv]: the one order of operations."""
    m_next = tl.maximum(m, m_part)
    top = _finite(m_next)
    old, new = tl.exp2(m - top), tl.exp2(m_part - top)
    l = tl.fma(l, old, l_part * new)  # noqa: E741
    old, new = tl.expand_dims(old, -1), tl.expand_dims(new, -1)
    acc = tl.fma(acc, tl.broadcast_to(old, acc.shape), acc_part * new)
    return m_next, l, acc


@triton.jit
def _finish(m, l, acc, sinks, v_scale):  # noqa: E741
    """(out, lse) of whole sums; ``sinks`` are scores in base 2, or None."""
    if sinks is not None:
        m_next = tl.maximum(m, sinks)
        top = _finite(m_next)
        correction = tl.exp2(m - top)
        l = tl.fma(l, correction, tl.exp2(sinks - top))  # noqa: E741
        acc = acc * tl.expand_dims(correction, -1)
        m = m_next
    total = tl.where(l == 0.0, 1.0, l)  # of a row that has seen nothing: out is 0, and m says -inf
    return acc * tl.expand_dims(v_scale / total, -1), (m + tl.log2(total)) * _LN2


@triton.jit
def _one_scale(scale_ptr, SCALES: tl.constexpr):
    if SCALES == ONE_SCALE:
        return tl.load(scale_ptr).to(tl.float32)
    else:
        return 1.0


# Strides of tables and masks change with every step's widest; specialising on them would compile the same code again.
@triton.jit(
    do_not_specialize=["stride_table", "stride_tree", "tree_width", "window", "part_rows", "header_at", "items_at"]
)
def _paged_attention_fwd_kernel(
    q_ptr,  # [T, N, H]
    k_ptr,  # [blocks, K, B, H]
    v_ptr,  # [blocks, K, B, Hv]
    tables_ptr,  # [S, max_blocks]
    plan_ptr,
    out_ptr,  # [T, N, Hv]
    lse_ptr,  # [T, N]
    part_ptr,  # [slots, K, PART_ROWS, Hv] and behind it [slots, K, PART_ROWS, 2] fp32; anything where nothing is split
    sinks_ptr,  # [N], or None
    slopes_ptr,  # [N], or None
    prefix_lens_ptr,  # [S], or None
    tree_ptr,  # [T, W], or None
    k_scale_ptr,  # [] or [blocks, K, B], or None
    v_scale_ptr,
    part_rows,  # slots * K * PART_ROWS
    header_at,
    items_at,
    scale,  # in base 2, unless there is a softcap
    softcap,
    window,
    tree_width,
    stride_table,
    stride_tree,
    q_strides,  # of tokens and heads
    k_strides,  # of blocks, heads and slots
    v_strides,
    k_scale_strides,
    v_scale_strides,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    Q_ALIGN: tl.constexpr,  # divide the strides
    K_ALIGN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,  # HEAD_SIZE rounded up to a power of two
    BLOCK_V: tl.constexpr,
    PART_ROWS: tl.constexpr,  # of a tile, that any sequence fills
    QUANTUM: tl.constexpr,  # 0 in fast mode
    CAUSAL: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    WIDE: tl.constexpr,  # products in fp32's format: q and the cache have no narrower one in common
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    PAIRS: tl.constexpr,  # values are bytes, read two by two; their strides count pairs
    PTX: tl.constexpr,
    RUN: tl.constexpr,  # stored keys and values that a thread takes in a row, at most
):
    """Grid: (max_items, K)."""
    item_ptr = plan_ptr + items_at + tl.program_id(0) * 8
    slot = tl.load(item_ptr + 7)
    if (tl.program_id(0) >= tl.load(plan_ptr + header_at)) | (slot == -2):
        return
    q_start = tl.load(item_ptr)
    q_len = tl.load(item_ptr + 1)
    seq_len = tl.load(item_ptr + 2)
    seq = tl.load(item_ptr + 3).to(tl.int64)
    first_row = tl.load(item_ptr + 4)
    kv_begin = tl.load(item_ptr + 5)
    kv_end = tl.load(item_ptr + 6)
    kv_head = tl.program_id(1)

    offs_m = tl.arange(0, BLOCK_M)
    offs_h = tl.arange(0, BLOCK_H)
    offs_v = tl.arange(0, BLOCK_V)
    row = first_row + offs_m
    mask_m = row < q_len * GROUP
    row = tl.minimum(row, q_len * GROUP - 1)  # so that rows behind the last ask for nothing that the last does not
    token = row // GROUP
    where = (q_start + token).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    DTYPE: tl.constexpr = tl.float32 if WIDE else q_ptr.dtype.element_ty
    q_rows = where * multiple(q_strides[0], Q_ALIGN) + head * multiple(q_strides[1], Q_ALIGN)
    q_ptrs = q_ptr + q_rows[:, None] + offs_h[None, :]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & (offs_h < HEAD_SIZE)[None, :], other=0.0).to(DTYPE)

    context = seq_len - q_len
    position = context + token
    prefix = None
    if prefix_lens_ptr is not None:
        prefix = tl.load(prefix_lens_ptr + seq, mask=seq_len > 0, other=0)  # the padding has no keys, and no prefix
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head).to(tl.float32)
    tree_ptrs = None
    if tree_ptr is not None:
        tree_ptrs = tree_ptr + (where * stride_tree)[:, None]

    if PAIRS:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    heads = kv_head.to(tl.int64)
    k_ptr += heads * multiple(k_strides[1], K_ALIGN)
    v_ptr += heads * multiple(v_strides[1], V_ALIGN)
    table_ptr = tables_ptr + seq * stride_table
    k_scales_ptr = k_scale_ptr
    v_scales_ptr = v_scale_ptr
    if K_SCALES == TOKEN_SCALES:
        k_scales_ptr += heads * k_scale_strides[1]
    if V_SCALES == TOKEN_SCALES:
        v_scales_ptr += heads * v_scale_strides[1]
    k_steps = (multiple(k_strides[0], K_ALIGN), multiple(k_strides[2], K_ALIGN))
    v_steps = (multiple(v_strides[0], V_ALIGN), multiple(v_strides[2], V_ALIGN))
    k_scale_steps = (k_scale_strides[0], k_scale_strides[2])
    v_scale_steps = (v_scale_strides[0], v_scale_strides[2])
    scale = scale * _one_scale(k_scale_ptr, K_SCALES)

    kv_low = None
    if window is not None:
        kv_low = context + first_row // GROUP - window + 1

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
    if PAIRS:
        half = tl.zeros((BLOCK_M, BLOCK_V // 2), tl.float32)
        sums = (half, half)
    else:
        sums = (tl.zeros((BLOCK_M, BLOCK_V), tl.float32),)
    if QUANTUM > 0:
        nothing = m
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        for first in tl.range(kv_begin, kv_end, QUANTUM, num_stages=1):
            end = tl.minimum(first + QUANTUM, kv_end)
            m_part, l_part, part = _attend(
                nothing, tl.zeros_like(l), sums, q, first, end, kv_low, kv_end,
                k_ptr, v_ptr, table_ptr, k_scales_ptr, v_scales_ptr, k_steps, v_steps, k_scale_steps, v_scale_steps,
                position, context, prefix, window, tree_ptrs, tree_width, scale, softcap, slopes,
                HEAD_SIZE, V_SIZE, PAGE_SIZE, BLOCK_N, BLOCK_H, BLOCK_V, CAUSAL, K_SCALES, V_SCALES, PRECISION, UPCAST,
                PTX, RUN, MASKED=True,
            )  # fmt: skip
            m, l, acc = _fold(m, l, acc, m_part, l_part, _columns(part))  # noqa: E741
    else:
        # Keys that all rows see need no mask: behind the windows of the last row, before the first row's own key.
        first_position = context + first_row // GROUP
        free_end = kv_end
        if tree_ptr is not None:
            free_end = tl.minimum(kv_end, context)
        elif CAUSAL:
            free_end = first_position + 1
            if prefix_lens_ptr is not None:
                free_end = tl.maximum(free_end, prefix)
            free_end = tl.minimum(kv_end, free_end)
        elif window is not None:
            free_end = tl.minimum(kv_end, first_position + window)
        free_begin = kv_begin
        if window is not None:
            last_position = context + (tl.minimum(first_row + BLOCK_M, q_len * GROUP) - 1) // GROUP
            free_begin = tl.maximum(kv_begin, tl.cdiv(last_position - window + 1, BLOCK_N) * BLOCK_N)
            free_begin = tl.minimum(free_begin, tl.cdiv(kv_end, BLOCK_N) * BLOCK_N)
        free_end = tl.maximum(free_begin, free_end // BLOCK_N * BLOCK_N)
        for stretch in tl.static_range(0 if window is not None else 1, 3):
            begin = kv_begin if stretch == 0 else free_begin if stretch == 1 else free_end
            end = tl.minimum(free_begin, kv_end) if stretch == 0 else free_end if stretch == 1 else kv_end
            m, l, sums = _attend(  # noqa: E741
                m, l, sums, q, begin, end, kv_low, kv_end,
                k_ptr, v_ptr, table_ptr, k_scales_ptr, v_scales_ptr, k_steps, v_steps, k_scale_steps, v_scale_steps,
                position, context, prefix, window, tree_ptrs, tree_width, scale, softcap, slopes,
                HEAD_SIZE, V_SIZE, PAGE_SIZE, BLOCK_N, BLOCK_H, BLOCK_V, CAUSAL, K_SCALES, V_SCALES, PRECISION, UPCAST,
                PTX, RUN, MASKED=stretch != 1,
            )  # fmt: skip
        acc = _columns(sums)

    mask = mask_m[:, None] & (offs_v < V_SIZE)[None, :]
    if slot < 0:
        sinks = None
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        out, lse = _finish(m, l, acc, sinks, _one_scale(v_scale_ptr, V_SCALES))
        out_row = where * (tl.num_programs(1) * GROUP) + head
        out_ptrs = out_ptr + (where * (tl.num_programs(1) * GROUP * V_SIZE) + head * V_SIZE)[:, None] + offs_v[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + out_row, lse, mask=mask_m)
    else:
        part = (slot.to(tl.int64) * tl.num_programs(1) + kv_head) * PART_ROWS + offs_m
        tl.store(part_ptr + part[:, None] * V_SIZE + offs_v[None, :], acc, mask=mask)
        ml_ptrs = part_ptr + part_rows.to(tl.int64) * V_SIZE + part * 2
        tl.store(ml_ptrs, m, mask=mask_m)
        tl.store(ml_ptrs + 1, l, mask=mask_m)


@triton.jit(do_not_specialize=["part_rows", "kv_heads", "header_at", "merges_at"])
def _merge_kernel(
    plan_ptr,
    part_ptr,  # as the attention kernel leaves it
    out_ptr,  # [T, N, Hv]
    lse_ptr,  # [T, N]
    sinks_ptr,
    v_scale_ptr,
    part_rows,
    kv_heads,
    header_at,
    merges_at,
    GROUP: tl.constexpr,
    V_SIZE: tl.constexpr,
    PART_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows, of K * PART_ROWS in a slot; both are powers of two
    BLOCK_V: tl.constexpr,  # columns
    BLOCK_P: tl.constexpr,  # parts at a time; 1 in invariant mode
    QUANTA: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    """Grid: (max_merges, programs for a tile of every KV head, blocks of columns): each takes every so many rows.

    A program is one warp, whose threads lie along rows and columns and hold all parts of their own: sums over parts
    stay in a thread, and what threads tell each other needs no barrier.
    """
    if tl.program_id(0) >= tl.load(plan_ptr + header_at + 1):
        return
    merge_ptr = plan_ptr + merges_at + tl.program_id(0) * 8
    q_start = tl.load(merge_ptr)
    first_row = tl.load(merge_ptr + 2)
    rows = tl.load(merge_ptr + 1) * GROUP - first_row  # more than PART_ROWS where this is not the last tile
    slot = tl.load(merge_ptr + 3).to(tl.int64)
    parts = tl.load(merge_ptr + 4)
    pitch = kv_heads * PART_ROWS
    ml_ptr = part_ptr + part_rows.to(tl.int64) * V_SIZE
    offs_p = tl.arange(0, BLOCK_P)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V_SIZE
    for begin in tl.range(tl.program_id(1) * BLOCK_R, pitch, tl.num_programs(1) * BLOCK_R):
        if begin % PART_ROWS < rows:
            place = begin + tl.arange(0, BLOCK_R)
            mask_r = (place < pitch) & (place % PART_ROWS < rows)
            m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            l = tl.zeros((BLOCK_R,), tl.float32)  # noqa: E741
            acc = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
            for first in tl.range(0, parts, BLOCK_P, loop_unroll_factor=4 if QUANTA else 1):
                part = (slot + first + offs_p)[:, None] * pitch + place[None, :]
                mask = (first + offs_p < parts)[:, None] & mask_r[None, :]  # [BLOCK_P, BLOCK_R]
                acc_ptrs = part_ptr + part[:, :, None] * V_SIZE + offs_v[None, None, :]
                acc_part = tl.load(acc_ptrs, mask=mask[:, :, None] & mask_v[None, None, :], other=0.0)
                ml_ptrs = ml_ptr + part[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
                m_part, l_part = tl.split(tl.load(ml_ptrs, mask=mask[:, :, None], other=0.0))
                if QUANTA:
                    m_part, l_part, acc_part = tl.max(m_part, 0), tl.sum(l_part, 0), tl.sum(acc_part, 0)  # of one
                    m, l, acc = _fold(m, l, acc, m_part, l_part, acc_part)  # noqa: E741
                else:
                    m_part = tl.where(mask, m_part, float("-inf"))
                    m_next = tl.maximum(m, tl.max(m_part, 0))
                    top = _finite(m_next)
                    weight, correction = tl.exp2(m_part - top[None, :]), tl.exp2(m - top)
                    l = l * correction + tl.sum(product(l_part, weight), 0)  # noqa: E741
                    acc = acc * correction[:, None] + tl.sum(product(acc_part, weight[:, :, None]), 0)
                    m = m_next
            row = first_row + place % PART_ROWS
            head = (place // PART_ROWS * GROUP + row % GROUP).to(tl.int64)
            where = (q_start + row // GROUP).to(tl.int64)
            sinks = None
            if sinks_ptr is not None:
                sinks = tl.load(sinks_ptr + head, mask=mask_r, other=0.0).to(tl.float32) * LOG2E
            out, lse = _finish(m, l, acc, sinks, _one_scale(v_scale_ptr, V_SCALES))
            out_row = where * (kv_heads * GROUP) + head
            out_ptrs = out_ptr + out_row[:, None] * V_SIZE + offs_v[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_v[None, :])
            if tl.program_id(2) == 0:
                tl.store(lse_ptr + out_row, lse, mask=mask_r)
