"""What puts keys and values into their pages, and what copies pages.

Maths of a head x of q or k, in fp32 with one rounding at the end (v is only scaled and stored):

    x   <- x / sqrt(mean(x^2) + eps) * (norm_offset + weight)       with a weight
    a   <- a cos - b sin,   b <- b cos + a sin                      with tables; pairs (a, b) of the first P elements
    out <- round(x)             q, and a cache that is not quantised
    out <- round(x (1 / scale)) a cache in fp8 or int8; ``scale`` is given, or max|x| / L and stored as well

A program's rows are BLOCK_T tokens times BLOCK_N heads of q, of k or of v: one launch covers all three. A head is held
in parts: the two halves that rotation turns into one another (elements i and i + P/2, or 2i and 2i + 1 with
INTERLEAVED), and the rest. Norm, scale and rounding go through the parts one by one, whatever there are.

Letters: T tokens, N heads of q, K of k and v, H head size of q and k, Hv of v, P rotated elements, B slots of a page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.fp8_bits import fp32_to_e4m3_bits
from ..runtime.sums_triton import product
from ..runtime.vectors_triton import multiple

TINY = tl.constexpr(2.0**-126)  # the smallest normal number: its inverse is finite
ROUND = tl.constexpr(1.5 * 2.0**23)  # adding it leaves no bits behind the point, ties to even


@triton.jit
def _columns(BLOCK: tl.constexpr, RUN: tl.constexpr):
    """0 .. BLOCK - 1, [1, BLOCK], of which a thread takes RUN in a row at most.

    x and what is stored share their threads: with 16 bytes of a narrow cache each would load 32 or 64 bytes of x, by
    requests that each touch all their sectors.
    """
    columns = tl.max_contiguous(tl.arange(0, BLOCK), RUN if RUN < BLOCK else BLOCK)
    return columns[None, :]


@triton.jit
def _read(x_row, mask_r, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr,
          BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    """Heads that start at x_row [R, 1], as parts in fp32: (a, b, rest), of which HALF or REST may be 0 and left out."""
    parts = ()
    if HALF > 0:
        offs_i = _columns(BLOCK_HALF, RUN)
        if INTERLEAVED:
            offs_p = _columns(2 * BLOCK_HALF, RUN)
            pairs = tl.load(x_row + offs_p, mask=mask_r & (offs_p < 2 * HALF), other=0.0)
            a, b = tl.split(tl.reshape(pairs, (pairs.shape[0], BLOCK_HALF, 2)))
        else:
            mask = mask_r & (offs_i < HALF)
            a = tl.load(x_row + offs_i, mask=mask, other=0.0)
            b = tl.load(x_row + HALF + offs_i, mask=mask, other=0.0)
        parts += (a.to(tl.float32), b.to(tl.float32))
    if REST > 0:
        offs_c = _columns(BLOCK_REST, RUN)
        c = tl.load(x_row + 2 * HALF + offs_c, mask=mask_r & (offs_c < REST), other=0.0)
        parts += (c.to(tl.float32),)
    return parts


@triton.jit
def _write(out_row, parts, mask_r, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
           RUN: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr):  # fmt: skip
    """The opposite of ``_read``; ``parts`` in the dtype that is stored."""
    if HALF > 0:
        offs_i = _columns(BLOCK_HALF, RUN)
        if INTERLEAVED:
            offs_p = _columns(2 * BLOCK_HALF, RUN)
            tl.store(out_row + offs_p, tl.interleave(parts[0], parts[1]), mask=mask_r & (offs_p < 2 * HALF))
        else:
            mask = mask_r & (offs_i < HALF)
            tl.store(out_row + offs_i, parts[0], mask=mask)
            tl.store(out_row + HALF + offs_i, parts[1], mask=mask)
    if REST > 0:
        offs_c = _columns(BLOCK_REST, RUN)
        tl.store(out_row + 2 * HALF + offs_c, parts[len(parts) - 1], mask=mask_r & (offs_c < REST))


@triton.jit
def _normalised(parts, weights, eps, norm_offset, H: tl.constexpr):
    squares = tl.sum(product(parts[0], parts[0]), 1)
    for i in tl.static_range(1, len(parts)):
        squares += tl.sum(product(parts[i], parts[i]), 1)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(squares / H + eps))[:, None]
    normed = ()
    for i in tl.static_range(len(parts)):
        normed += (parts[i] * rstd * (norm_offset + weights[i]),)
    return normed


@triton.jit
def _rotated(parts, cos, sin):
    a, b = parts[0], parts[1]
    turned = (a * cos - b * sin, b * cos + a * sin)
    for i in tl.static_range(2, len(parts)):
        turned += (parts[i],)
    return turned


@triton.jit
def _scale_of(parts, LARGEST: tl.constexpr):
    """max|x| / LARGEST of each row [R]; 1 of zeros, infinite of what is not finite."""
    amax = tl.zeros((parts[0].shape[0],), tl.float32)
    for i in tl.static_range(len(parts)):
        size = tl.abs(parts[i])
        amax = tl.maximum(amax, tl.max(tl.where(size < float("inf"), size, float("inf")), 1))
    scale = tl.maximum(tl.div_rn(amax, LARGEST), TINY)
    return tl.where(amax > 0.0, scale, 1.0)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 in the dtype of the cache, or of q: uint8 stands for fp8."""
    if DTYPE.is_uint8():
        if NATIVE_FP8:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return fp32_to_e4m3_bits(x)
    elif DTYPE.is_int8():
        nearest = (tl.minimum(tl.maximum(x, -128.0), 127.0) + ROUND) - ROUND
        return tl.where(x == x, nearest, 0.0).to(tl.int8)
    elif EMULATE and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _quantised(parts, inverse, DTYPE: tl.constexpr, NATIVE_FP8: tl.constexpr, EMULATE: tl.constexpr):
    """``parts`` times inverse, a number or [R, 1] (None: 1), in the dtype of the cache."""
    found = ()
    for i in tl.static_range(len(parts)):
        x = parts[i]
        if inverse is not None:
            x = x * inverse
        found += (_rounded(x, DTYPE, NATIVE_FP8, EMULATE),)
    return found


@triton.jit
def _rows_of(tile, T, heads, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile's first token; of each of its rows [BLOCK_T * BLOCK_N] token and head, and whether they are there."""
    tiles_n = tl.cdiv(heads, BLOCK_N)
    row = tl.arange(0, BLOCK_T * BLOCK_N)
    first = (tile // tiles_n) * BLOCK_T
    token = first + row // BLOCK_N
    head = (tile % tiles_n) * BLOCK_N + row % BLOCK_N
    return first.to(tl.int64), token.to(tl.int64), head.to(tl.int64), (token < T) & (head < heads)


@triton.jit
def _computed(
    x_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    first,
    token,
    head,
    mask_r,
    strides,  # of tokens, heads
    table_stride,
    eps,
    norm_offset,
    H: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The rows' heads in parts, normalised and rotated."""
    REST: tl.constexpr = H - 2 * HALF
    x_row = x_ptr + (token * multiple(strides[0], ALIGN) + head * multiple(strides[1], ALIGN))[:, None]
    mask_r = mask_r[:, None]
    parts = _read(x_row, mask_r, HALF, REST, INTERLEAVED, RUN, BLOCK_HALF, BLOCK_REST)
    if norm_ptr is not None:
        weights = _read(norm_ptr + tl.zeros((1, 1), tl.int32), tl.full((1, 1), True, tl.int1), HALF, REST, INTERLEAVED,
                        RUN, BLOCK_HALF, BLOCK_REST)  # fmt: skip
        parts = _normalised(parts, weights, eps, norm_offset, H)
    if HALF > 0:
        offs_i = _columns(BLOCK_HALF, RUN)
        if BLOCK_T == 1:  # all rows share the token's tables
            table, mask = first * multiple(table_stride, TABLE_ALIGN) + offs_i, offs_i < HALF
        else:
            table, mask = token[:, None] * multiple(table_stride, TABLE_ALIGN) + offs_i, mask_r & (offs_i < HALF)
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
        parts = _rotated(parts, cos, sin)
    return parts


@triton.jit
def _store_in_pages(
    cache_ptr,
    scale_ptr,
    parts,
    slot,
    head,
    mask_r,
    strides,  # of blocks, heads, slots
    scale_strides,  # likewise
    FIRST: tl.constexpr,  # where in a slot the head begins
    H: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    WRITE_SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    EMULATE: tl.constexpr,
    ALIGN: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads in parts to their slots, quantised where the cache is."""
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    if WRITE_SCALE:
        scale = _scale_of(parts, LARGEST)
        where = page * scale_strides[0] + head * scale_strides[1] + offset * scale_strides[2]
        tl.store(scale_ptr + where, scale, mask=mask_r)
        inverse = tl.div_rn(1.0, scale)[:, None]
    elif scale_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))
    else:
        inverse = None
    parts = _quantised(parts, inverse, cache_ptr.dtype.element_ty, NATIVE_FP8, EMULATE)
    where = page * multiple(strides[0], ALIGN) + head * multiple(strides[1], ALIGN)
    row = cache_ptr + FIRST + (where + offset * multiple(strides[2], ALIGN))[:, None]
    _write(row, parts, mask_r[:, None], HALF, H - 2 * HALF, INTERLEAVED, RUN, BLOCK_HALF, BLOCK_REST)


@triton.jit(do_not_specialize=["T"])
def _write_kv_kernel(
    q_ptr,  # [T, N, H], or None
    k_ptr,  # [T, K, H]
    v_ptr,  # [T, K, Hv]
    q_out_ptr,  # [T, N, H], or None
    k_cache_ptr,  # [blocks, K, B, .. H], fp8 as uint8
    v_cache_ptr,  # [blocks, K, B, .. Hv]
    slot_mapping_ptr,  # [T] int64
    cos_ptr,  # [T, P/2] fp32, or None
    sin_ptr,
    q_norm_ptr,  # [H], or None
    k_norm_ptr,
    k_scale_ptr,  # one number, or [blocks, K, B] with WRITE_K_SCALE, or None
    v_scale_ptr,
    T,
    N,  # 0 without q
    K,
    eps,
    norm_offset,
    q_strides,
    k_strides,
    v_strides,
    q_out_strides,
    k_cache_strides,
    v_cache_strides,
    k_scale_strides,
    v_scale_strides,
    table_stride,
    H: tl.constexpr,
    V_SIZE: tl.constexpr,  # Hv
    V_FIRST: tl.constexpr,  # where in a slot V begins
    HALF: tl.constexpr,  # P / 2
    INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,  # of the cache's dtype
    WRITE_K_SCALE: tl.constexpr,
    WRITE_V_SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,  # whether the chip rounds to fp8, in one step
    EMULATE: tl.constexpr,  # the interpreter's cast to bf16 cuts off
    ALIGN: tl.constexpr,  # divides the strides of q, k and v
    TABLE_ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    RUN: tl.constexpr,  # elements that a thread takes in a row
    BLOCK_TQ: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid: (tiles of q + tiles of k + tiles of v,)."""
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(T, BLOCK_TQ) * tl.cdiv(N, BLOCK_N)
    kv_tiles = tl.cdiv(T, BLOCK_TK) * tl.cdiv(K, BLOCK_K)
    if tile < q_tiles:
        if q_ptr is not None:
            first, token, head, mask_r = _rows_of(tile, T, N, BLOCK_TQ, BLOCK_N)
            q = _computed(
                q_ptr, q_norm_ptr, cos_ptr, sin_ptr, first, token, head, mask_r, q_strides, table_stride, eps,
                norm_offset, H, HALF, INTERLEAVED, ALIGN, TABLE_ALIGN, RUN, BLOCK_TQ, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            q = _quantised(q, None, q_out_ptr.dtype.element_ty, False, EMULATE)
            row = token * multiple(q_out_strides[0], ALIGN) + head * multiple(q_out_strides[1], ALIGN)
            row = q_out_ptr + row[:, None]
            _write(row, q, mask_r[:, None], HALF, H - 2 * HALF, INTERLEAVED, RUN, BLOCK_HALF, BLOCK_REST)
    else:
        tile -= q_tiles
        first, token, head, mask_r = _rows_of(tile % kv_tiles, T, K, BLOCK_TK, BLOCK_K)
        slot = tl.load(slot_mapping_ptr + token, mask=mask_r, other=-1)
        mask_r = slot >= 0  # others are padding
        if tile < kv_tiles:
            k = _computed(
                k_ptr, k_norm_ptr, cos_ptr, sin_ptr, first, token, head, mask_r, k_strides, table_stride, eps,
                norm_offset, H, HALF, INTERLEAVED, ALIGN, TABLE_ALIGN, RUN, BLOCK_TK, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            _store_in_pages(
                k_cache_ptr, k_scale_ptr, k, slot, head, mask_r, k_cache_strides, k_scale_strides, 0, H, HALF,
                INTERLEAVED, PAGE_SIZE, LARGEST, WRITE_K_SCALE, NATIVE_FP8, EMULATE, CACHE_ALIGN, RUN, BLOCK_HALF,
                BLOCK_REST,
            )  # fmt: skip
        else:
            v = _computed(
                v_ptr, None, None, None, first, token, head, mask_r, v_strides, 0, eps, norm_offset,
                V_SIZE, 0, False, ALIGN, 1, RUN, BLOCK_TK, 1, BLOCK_V,
            )  # fmt: skip
            _store_in_pages(
                v_cache_ptr, v_scale_ptr, v, slot, head, mask_r, v_cache_strides, v_scale_strides, V_FIRST, V_SIZE,
                0, False, PAGE_SIZE, LARGEST, WRITE_V_SCALE, NATIVE_FP8, EMULATE, CACHE_ALIGN, RUN, 1, BLOCK_V,
            )  # fmt: skip


@triton.jit
def _copy_blocks_kernel(
    cache_ptr,  # [blocks, *SIZES], an integer dtype of the elements' width
    pairs_ptr,  # [n, 2] int64: source, target
    stride_block,
    strides,  # of the dimensions in SIZES, the last one 1
    SIZES: tl.constexpr,
    COUNT: tl.constexpr,  # elements of a block
    BLOCK: tl.constexpr,
):
    """One program copies BLOCK elements of one pair. Grid: (pairs * cdiv(COUNT, BLOCK),)."""
    CHUNKS: tl.constexpr = (COUNT + BLOCK - 1) // BLOCK
    pair = (tl.program_id(0) // CHUNKS).to(tl.int64)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    if (source >= 0) & (target >= 0):  # else padding
        element = (tl.program_id(0) % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
        mask = element < COUNT
        offset = (element % SIZES[len(SIZES) - 1]).to(tl.int64)
        outer = element // SIZES[len(SIZES) - 1]
        for d in tl.static_range(len(SIZES) - 2, -1, -1):
            offset += (outer % SIZES[d]).to(tl.int64) * strides[d]
            outer = outer // SIZES[d]
        values = tl.load(cache_ptr + source * stride_block + offset, mask=mask)
        tl.store(cache_ptr + target * stride_block + offset, values, mask=mask)
