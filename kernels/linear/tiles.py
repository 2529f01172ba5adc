"""Tiles of matrices in memory, for the kernels of this folder: where a tile lies, how it is loaded and stored.

Loads and stores go through the tensor memory accelerator (TMA) where USE_TMA, through pointers and masks elsewhere.
The functions here are the only ones that know which.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def open_matrix(ptr, rows, cols, stride_row, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """What tiles of a matrix [rows, cols] are loaded from and stored to: a TMA descriptor, or the pointer itself."""
    if USE_TMA:
        return tl.make_tensor_descriptor(ptr, [rows, cols], [stride_row, 1], [BLOCK_ROWS, BLOCK_COLS])
    else:
        return ptr


@triton.jit
def open_all(ptrs, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """The same for several contiguous matrices [rows, cols]."""
    opened = ()
    for i in tl.static_range(len(ptrs)):
        opened += (open_matrix(ptrs[i], rows, cols, cols, BLOCK_ROWS, BLOCK_COLS, USE_TMA),)  # type: ignore[assignment]
    return opened


@triton.jit
def tile_pointers(
    ptr, row, col, rows, cols, stride_row, stride_col, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Pointers and mask of the tile at (row, col). Offsets are 64-bit: rows * stride may pass 2^31."""
    offs_row = row + tl.arange(0, BLOCK_ROWS)
    offs_col = col + tl.arange(0, BLOCK_COLS)
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_col.to(tl.int64)[None, :] * stride_col
    return ptrs, (offs_row < rows)[:, None] & (offs_col < cols)[None, :]  # [BLOCK_ROWS, BLOCK_COLS] each


@triton.jit
def load_tile(
    src, row, col, rows, cols, strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr
):
    """The tile [BLOCK_ROWS, BLOCK_COLS] at (row, col), zero outside the matrix."""
    if USE_TMA:
        return src.load([row, col])
    else:
        ptrs, mask = tile_pointers(src, row, col, rows, cols, strides[0], strides[1], BLOCK_ROWS, BLOCK_COLS)
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_operand(
    src, row, col, rows, cols, strides,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, TRANS: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """The tile [BLOCK_ROWS, BLOCK_COLS] of op(X) [rows, cols] at (row, col); X is stored [cols, rows] if TRANS.

    Pointers address the tile as it is multiplied: one that is turned after its load passes through registers, where
    others are copied to shared memory ahead of their use.
    """
    if not TRANS:
        return load_tile(src, row, col, rows, cols, strides, BLOCK_ROWS, BLOCK_COLS, USE_TMA)
    elif USE_TMA:
        return src.load([col, row]).T
    else:
        return load_tile(src, row, col, rows, cols, (strides[1], strides[0]), BLOCK_ROWS, BLOCK_COLS, False)


@triton.jit
def store_tile(
    dst, tile, row, col, rows, cols, strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr
):
    """Store the tile at (row, col), dropping what lies outside the matrix."""
    if USE_TMA:
        dst.store([row, col], tile)
    else:
        ptrs, mask = tile_pointers(dst, row, col, rows, cols, strides[0], strides[1], BLOCK_ROWS, BLOCK_COLS)
        tl.store(ptrs, tile, mask=mask)


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile [BLOCK_M, BLOCK_N]; no data moves between threads."""
    return tl.split(tile.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))


@triton.jit
def store_partial(dst, tile, split, m, n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Leave the product of one part of K in a workspace [splits, M, N]."""
    ptrs, mask = tile_pointers(dst + tl.cast(split, tl.int64) * M * N, m, n, M, N, N, 1, BLOCK_M, BLOCK_N)
    tl.store(ptrs, tile, mask=mask)


@triton.jit
def store_row_sum(dst, row_sum, m, M, wanted, ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The column of tiles that holds the sums, for which ``wanted`` is true, writes them."""
    offs_m = m + tl.arange(0, BLOCK_M)
    mask = (offs_m < M) & wanted
    if ACCUMULATE:
        row_sum += tl.load(dst + offs_m, mask=mask, other=0.0).to(tl.float32)
    tl.store(dst + offs_m, row_sum.to(dst.dtype.element_ty), mask=mask)


@triton.jit
def sum_parts(src, m, n, M, N, splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile at (m, n) of a workspace [splits, M, N], summed over the parts."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    ptrs, mask = tile_pointers(src, m, n, M, N, N, 1, BLOCK_M, BLOCK_N)
    for split in range(splits):
        acc += tl.load(ptrs + tl.cast(split, tl.int64) * M * N, mask=mask, other=0.0)
    return acc


@triton.jit
def tile_position(tile, first_row, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of a tile in an order that keeps GROUP_M rows of tiles together, for the L2 cache.

    The order begins with the tiles that hold row ``first_row`` and wraps around.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    tile_m = first_m + within % rows
    if first_row is not None:
        tile_m = (tile_m + first_row // BLOCK_M) % tiles_m
    return tile_m * BLOCK_M, within // rows * BLOCK_N
