"""Kernels of dropout, and the mask that other kernels draw. ``reference.py`` says what the mask is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_mask(rng_key, stream, threshold, rows, first_col, COLS: tl.constexpr):
    """Which elements of a block stay: int1 [R, COLS], for the whole tensor's ``rows`` (int64 [R]) and the columns from
    ``first_col`` on. That and COLS are multiples of 4: one draw of Philox decides on four elements of a row.
    """
    zero = tl.zeros([rows.shape[0], COLS // 4], tl.uint32)
    quads = (first_col // 4 + tl.arange(0, COLS // 4)).to(tl.uint32)[None, :] + zero
    low, high = rows.to(tl.uint32)[:, None] + zero, (rows >> 32).to(tl.uint32)[:, None] + zero
    a, b, c, d = tl.philox(rng_key, quads, low, high, zero + stream.to(tl.uint32))
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], COLS)  # a, b, c, d of each draw in a row
    return words >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["mask_stream", "threshold", "row_start", "col_start"])
def _dropout_kernel(
    x_ptr,
    residual_ptr,  # contiguous, as y; or None
    rng_key_ptr,
    y_ptr,
    R,
    C,
    x_stride,  # of rows
    residual_stride,
    mask_stream,  # not "stream", which Triton's launcher keeps for itself
    threshold,
    row_start,
    col_start,
    scale,  # 1 / (1 - p)
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """y = dropout(x) [+ residual]. Backward is the same on dy. Grid: (row blocks * column blocks,)."""
    col_blocks = tl.cdiv(C, BLOCK_C)
    rows = (tl.program_id(0) // col_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first_col = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_C
    cols = first_col + tl.arange(0, BLOCK_C)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    keep = keep_mask(tl.load(rng_key_ptr), mask_stream, threshold, row_start + rows, col_start + first_col, BLOCK_C)
    y = tl.where(keep, x * scale, 0.0)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(y_ptr + rows[:, None] * C + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
