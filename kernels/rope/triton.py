"""Rotary position embedding in Triton: one kernel for q and k, forward and backward, in place or not.

Maths, for a pair (a, b) of a head and the cosine c and sine s of its token's angle (Su et al., "RoFormer",
arXiv:2104.09864, equation 15):

    a' = a c - b s        b' = b c + a s

a and b are elements i and i + P/2 (GPT-NeoX, Llama), or 2i and 2i + 1 with INTERLEAVED (GPT-J, RoFormer). The rotation
is orthogonal, so that its transpose, which backward applies, is the rotation by -s (CONJUGATE). Elements from P on are
handed through. fp32 arithmetic, one rounding.

A program's rows are BLOCK_T tokens times BLOCK_N heads of q or of k; each element is read once and written once. Tokens
have two dimensions, ``T // S`` and S, because a batch of sequences that shares its tables (or heads that were
transposed behind the sequence) has no single stride.

Letters: T tokens, S of them along the inner dimension, N heads of q, K of k, H head size, P rotated elements of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.vectors_triton import multiple


@triton.jit
def _turn(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _heads(outer, inner, head, strides, ALIGN: tl.constexpr):
    """Where heads begin."""
    token = outer * multiple(strides[0], ALIGN) + inner * multiple(strides[1], ALIGN)
    return token + head.to(tl.int64) * multiple(strides[2], ALIGN)


@triton.jit
def _rotate_tile(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    tile,
    T,
    S,
    heads,
    x_strides,  # of outer tokens, inner tokens, heads
    out_strides,
    table_strides,  # of outer tokens, inner tokens
    HALF: tl.constexpr,  # P / 2
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    DENSE_TABLES: tl.constexpr,
    PASS: tl.constexpr,  # elements behind P that are to be copied
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Rotate one tile of rows of x."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(heads, BLOCK_N)
    row = tl.arange(0, BLOCK_T * BLOCK_N)
    first = (tile // tiles_n) * BLOCK_T
    token = first + row // BLOCK_N
    head = (tile % tiles_n) * BLOCK_N + row % BLOCK_N
    mask_r = ((token < T) & (head < heads))[:, None]
    outer, inner = (token // S).to(tl.int64), (token % S).to(tl.int64)
    x_row = x_ptr + _heads(outer, inner, head, x_strides, ALIGN)[:, None]
    out_row = out_ptr + _heads(outer, inner, head, out_strides, ALIGN)[:, None]

    offs_i = tl.arange(0, BLOCK_HALF)
    # As a constant it shows how rows of 40 elements, say, are aligned.
    stride_table = HALF if DENSE_TABLES else multiple(table_strides[1], TABLE_ALIGN)
    outer_table = multiple(table_strides[0], TABLE_ALIGN)
    if BLOCK_T == 1:  # all rows share the token's tables
        table = (first // S).to(tl.int64) * outer_table + (first % S).to(tl.int64) * stride_table + offs_i
        mask_table = (offs_i < HALF) & (first < T)
        cos = tl.load(cos_ptr + table, mask=mask_table, other=0.0)[None, :]
        sin = tl.load(sin_ptr + table, mask=mask_table, other=0.0)[None, :]
    else:
        table = (outer * outer_table + inner * stride_table)[:, None] + offs_i[None, :]
        mask_table = mask_r & (offs_i < HALF)[None, :]
        cos = tl.load(cos_ptr + table, mask=mask_table, other=0.0)
        sin = tl.load(sin_ptr + table, mask=mask_table, other=0.0)
    if CONJUGATE:
        sin = -sin

    if INTERLEAVED:
        offs_p = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = mask_r & (offs_p < 2 * HALF)
        pairs = tl.load(x_row + offs_p, mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(pairs, (BLOCK_T * BLOCK_N, BLOCK_HALF, 2)))
        a, b = _turn(a, b, cos, sin)
        tl.store(out_row + offs_p, tl.interleave(a.to(DTYPE), b.to(DTYPE)), mask=mask)
    else:
        offs_a = offs_i[None, :]
        offs_b = HALF + offs_a
        mask = mask_r & (offs_a < HALF)
        a = tl.load(x_row + offs_a, mask=mask, other=0.0)
        b = tl.load(x_row + offs_b, mask=mask, other=0.0)
        a, b = _turn(a, b, cos, sin)
        tl.store(out_row + offs_a, a.to(DTYPE), mask=mask)
        tl.store(out_row + offs_b, b.to(DTYPE), mask=mask)
    if PASS > 0:
        rest = tl.arange(0, BLOCK_PASS)[None, :]
        mask = mask_r & (rest < PASS)
        tl.store(out_row + 2 * HALF + rest, tl.load(x_row + 2 * HALF + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["T", "S"])
def _rope_kernel(
    q_ptr,  # [T, N, H]
    k_ptr,  # [T, K, H], or None
    q_out_ptr,  # q_ptr itself in place
    k_out_ptr,
    cos_ptr,  # [T, P/2] fp32
    sin_ptr,
    T,
    S,  # T % S == 0
    N,
    K,
    q_strides,
    k_strides,
    q_out_strides,
    k_out_strides,
    table_strides,
    HALF: tl.constexpr,
    ALIGN: tl.constexpr,  # divides the strides of q and k, and of what they become
    TABLE_ALIGN: tl.constexpr,  # those of tables
    DENSE_TABLES: tl.constexpr,  # the inner one of table_strides is HALF
    PASS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK_TQ: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Grid: (tiles of q + tiles of k,)."""
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(T, BLOCK_TQ) * tl.cdiv(N, BLOCK_N)
    if tile < q_tiles:
        _rotate_tile(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, tile, T, S, N, q_strides, q_out_strides, table_strides,
            HALF, ALIGN, TABLE_ALIGN, DENSE_TABLES, PASS, INTERLEAVED, CONJUGATE, BLOCK_TQ, BLOCK_N, BLOCK_HALF,
            BLOCK_PASS,
        )  # fmt: skip
    elif k_ptr is not None:
        _rotate_tile(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, tile - q_tiles, T, S, K, k_strides, k_out_strides, table_strides,
            HALF, ALIGN, TABLE_ALIGN, DENSE_TABLES, PASS, INTERLEAVED, CONJUGATE, BLOCK_TK, BLOCK_K, BLOCK_HALF,
            BLOCK_PASS,
        )  # fmt: skip
