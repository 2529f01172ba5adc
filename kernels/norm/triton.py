"""RMSNorm and LayerNorm, forward and backward, with the residual sum and its dropout in the same pass.

Maths, by row, in fp32, with w = weight_offset + weight (1 without a weight) and mean = 0 for RMSNorm:

    forward    s = residual + dropout(x), rounded to s's dtype;  xhat = (s - mean) * rstd;  y = xhat * w + bias
               rstd = 1 / sqrt(mean((s - mean)^2) + eps)
    backward   g = dy * w;  ds' = rstd * (g - mean(g) - xhat * mean(g * xhat)) + ds  (RMSNorm: without mean(g))
               dresidual = ds';  dx = dropout'(ds');  dweight = sum_T dy * xhat;  dbias = sum_T dy

x, residual, s, y, dy, ds [T, D], in rows of any pitch where they are read, contiguous where they are written; rstd and
mean [T]. A block holds whole rows where D <= BLOCK_D: each tensor is then read once. Wider rows go by in blocks of
columns, and are read again for what depends on their statistics. Gradients of the parameters are summed by each program
over its rows, and those sums by a second kernel in a fixed order: nothing is added atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout.triton import keep_mask
from ..runtime.sums_triton import product
from ..runtime.vectors_triton import in_vectors


@triton.jit
def _load(ptr, rows, cols, mask, stride, ALIGN: tl.constexpr, EVICT: tl.constexpr):
    """A tile in fp32 from rows ``stride`` elements apart, a multiple of ALIGN; 0 outside the mask. 64-bit offsets."""
    ptrs = ptr + rows[:, None] * (stride // ALIGN * ALIGN) + cols[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def _store(ptr, tile, rows, cols, mask, D: tl.constexpr):
    tl.store(ptr + rows[:, None] * D + cols[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale(weight_ptr, weight_offset, cols, D: tl.constexpr):
    """w, [1, columns]."""
    if weight_ptr is None:
        return tl.full((1, cols.shape[0]), 1.0, tl.float32)
    else:
        weight = tl.load(weight_ptr + cols[None, :], mask=cols[None, :] < D, other=0.0)
        return weight.to(tl.float32) + weight_offset


@triton.jit
def _drop(x, rng_key_ptr, rows, first_col, row_start, mask_stream, threshold, kept_scale, COLS: tl.constexpr):
    """Dropout of a tile that begins at column ``first_col``. Its own transpose, and so its own gradient."""
    keep = keep_mask(tl.load(rng_key_ptr), mask_stream, threshold, row_start + rows, first_col, COLS)
    return tl.where(keep, x * kept_scale, 0.0)


@triton.jit
def _merge(
    mean, squares, s, mask, c, D: tl.constexpr, BLOCK_D: tl.constexpr, CENTRED: tl.constexpr, FIRST: tl.constexpr
):
    """Mean and sum of squared distances from it, of the columns before c and those of the tile at c.

    Chan et al., "Algorithms for computing the sample variance" (1983): no difference of large sums.
    """
    if CENTRED:
        count = min(D - c, BLOCK_D) * 1.0
        share = count / (count + c)
        tile_mean = tl.sum(s, 1) / count
        # The sum's rounding may be all that a constant row differs from its mean by: once more, from nearby.
        tile_mean += tl.sum(tl.where(mask, s - tile_mean[:, None], 0.0), 1) / count
        away = tl.where(mask, s - tile_mean[:, None], 0.0)
        if FIRST:  # nothing to merge with, and a large mean squared may overflow
            return tile_mean, tl.sum(product(away, away), 1)
        step = tile_mean - mean
        return mean + step * share, squares + tl.sum(product(away, away), 1) + step * step * (c * share)
    else:
        return mean, squares + tl.sum(product(s, s), 1)


@triton.jit
def _take_in(
    x_ptr, residual_ptr, s_ptr, rng_key_ptr, rows, cols, mask, c, stride_xt, stride_rt,
    kept_scale, threshold, mask_stream, row_start, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tile of s at column c, stored if it is not x itself."""
    s = _load(x_ptr, rows, cols, mask, stride_xt, ALIGN, "")
    if rng_key_ptr is not None:
        s = _drop(s, rng_key_ptr, rows, c, row_start, mask_stream, threshold, kept_scale, BLOCK_D)
    if residual_ptr is not None:
        s += _load(residual_ptr, rows, cols, mask, stride_rt, ALIGN, "")
        s = s.to(s_ptr.dtype.element_ty).to(tl.float32)  # what is normalised is what is returned
        _store(s_ptr, s, rows, cols, mask, D)
    return s


@triton.jit
def _put_out(s, mean, rstd, y_ptr, weight_ptr, bias_ptr, rows, cols, mask, weight_offset, D: tl.constexpr):
    y = (s - mean[:, None]) * rstd[:, None] * _scale(weight_ptr, weight_offset, cols, D)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols[None, :], mask=cols[None, :] < D, other=0.0).to(tl.float32)
    _store(y_ptr, y, rows, cols, mask, D)


@triton.jit(do_not_specialize=["T", "stride_xt", "stride_rt", "threshold", "mask_stream", "row_start"])
def _norm_fwd_kernel(
    x_ptr,  # [T, D]
    residual_ptr,  # [T, D] or None
    weight_ptr,  # [D] or None
    bias_ptr,  # [D] or None
    rng_key_ptr,  # one int64, or None: nothing is dropped
    y_ptr,  # [T, D]
    s_ptr,  # [T, D] where there is a residual, else None
    rstd_ptr,  # [T] fp32
    mean_ptr,  # [T] fp32, or None for RMSNorm
    T,
    stride_xt,
    stride_rt,
    eps,
    weight_offset,
    kept_scale,  # of dropout, 1 / (1 - p)
    threshold,
    mask_stream,
    row_start,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y, and what backward needs. Grid: (blocks of rows,)."""
    CENTRED: tl.constexpr = mean_ptr is not None
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    cols = in_vectors(x_ptr, x_ptr if s_ptr is None else s_ptr, y_ptr, BLOCK_D)
    mask = (rows < T)[:, None] & (cols < D)[None, :]  # [BLOCK_T, BLOCK_D]
    mean = tl.zeros((BLOCK_T,), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    s = _take_in(
        x_ptr, residual_ptr, s_ptr, rng_key_ptr, rows, cols, mask, 0, stride_xt, stride_rt,
        kept_scale, threshold, mask_stream, row_start, D, ALIGN, BLOCK_D,
    )  # fmt: skip
    mean, squares = _merge(mean, squares, s, mask, 0, D, BLOCK_D, CENTRED, True)
    for c in range(BLOCK_D, D, BLOCK_D):
        mask = (rows < T)[:, None] & (c + cols < D)[None, :]
        more = _take_in(
            x_ptr, residual_ptr, s_ptr, rng_key_ptr, rows, c + cols, mask, c, stride_xt, stride_rt,
            kept_scale, threshold, mask_stream, row_start, D, ALIGN, BLOCK_D,
        )  # fmt: skip
        mean, squares = _merge(mean, squares, more, mask, c, D, BLOCK_D, CENTRED, False)
    rstd = tl.div_rn(tl.full((BLOCK_T,), 1.0, tl.float32), tl.sqrt_rn(squares / D + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < T)
    if CENTRED:
        tl.store(mean_ptr + rows, mean, mask=rows < T)
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    _put_out(s, mean, rstd, y_ptr, weight_ptr, bias_ptr, rows, cols, mask, weight_offset, D)
    if D > BLOCK_D:
        if s_ptr is not None:
            tl.debug_barrier()  # s was written by other threads of this program
        for c in range(BLOCK_D, D, BLOCK_D):
            mask = (rows < T)[:, None] & (c + cols < D)[None, :]
            if s_ptr is None:
                s = _load(x_ptr, rows, c + cols, mask, stride_xt, ALIGN, "")
            else:
                s = tl.load(s_ptr + rows[:, None] * D + c + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            _put_out(s, mean, rstd, y_ptr, weight_ptr, bias_ptr, rows, c + cols, mask, weight_offset, D)


@triton.jit
def _statistics(rstd_ptr, mean_ptr, rows, T):
    """rstd and mean of rows, [BLOCK_T, 1]; 0 past the end."""
    rstd = tl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
    if mean_ptr is None:
        mean = tl.zeros_like(rstd)
    else:
        mean = tl.load(mean_ptr + rows, mask=rows < T, other=0.0)
    return rstd[:, None], mean[:, None]


@triton.jit
def _around(
    dy_ptr, s_ptr, weight_ptr, rstd, mean, rows, cols, mask, stride_dyt, stride_st, weight_offset,
    D: tl.constexpr, ALIGN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """dy, g and xhat of a tile. dy and g are 0 outside the mask; xhat is not."""
    dy = _load(dy_ptr, rows, cols, mask, stride_dyt, ALIGN, EVICT)
    s = _load(s_ptr, rows, cols, mask, stride_st, ALIGN, EVICT)
    return dy, dy * _scale(weight_ptr, weight_offset, cols, D), (s - mean) * rstd


@triton.jit
def _beside(ds_ptr, rows, cols, mask, stride_dst, ALIGN: tl.constexpr):
    """A tile of what comes to s beside the norm."""
    if ds_ptr is None:
        return 0.0
    else:
        return _load(ds_ptr, rows, cols, mask, stride_dst, ALIGN, "")


@triton.jit
def _give_back(
    g, xhat, rstd, mean_gx, mean_g, beside, dx_ptr, dresidual_ptr, rng_key_ptr, rows, cols, mask, c,
    kept_scale, threshold, mask_stream, row_start, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the tile at column c of the gradients of residual and x."""
    ds = (g - xhat * mean_gx - mean_g) * rstd + beside
    if dresidual_ptr is not None:
        _store(dresidual_ptr, ds, rows, cols, mask, D)
    if dx_ptr is not None:
        if rng_key_ptr is not None:
            ds = _drop(ds, rng_key_ptr, rows, c, row_start, mask_stream, threshold, kept_scale, BLOCK_D)
        _store(dx_ptr, ds, rows, cols, mask, D)


@triton.jit
def _row_means(gx, g, D: tl.constexpr, CENTRED: tl.constexpr):
    """Of g * xhat, and of g where it counts, from tiles of their sums: [BLOCK_T, 1]."""
    mean_gx = tl.sum(gx, 1, keep_dims=True) / D
    if CENTRED:
        return mean_gx, tl.sum(g, 1, keep_dims=True) / D
    else:
        return mean_gx, 0.0


@triton.jit(
    do_not_specialize=["T", "blocks", "stride_dyt", "stride_dst", "stride_st", "threshold", "mask_stream", "row_start"]
)
def _norm_bwd_kernel(
    dy_ptr,  # [T, D]
    ds_ptr,  # [T, D], the gradient of s itself, or None
    s_ptr,  # [T, D]
    weight_ptr,  # [D] or None
    rstd_ptr,  # [T] fp32
    mean_ptr,  # [T] fp32, or None for RMSNorm
    rng_key_ptr,  # one int64, or None
    dx_ptr,  # [T, D] or None
    dresidual_ptr,  # [T, D] or None
    dweight_ptr,  # [programs, D] fp32, the sums of each program's rows, or None
    dbias_ptr,  # likewise
    T,
    blocks,  # of rows
    stride_dyt,
    stride_dst,
    stride_st,
    weight_offset,
    kept_scale,
    threshold,
    mask_stream,
    row_start,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    N: tl.constexpr,  # blocks of columns
):
    """Gradients of x, residual and parameters, whose sums stay in registers while rows pass. Grid: (programs,).

    With one block of columns, so does a row; with several it is read again, while the cache still holds it.
    """
    CENTRED: tl.constexpr = mean_ptr is not None
    FIRST: tl.constexpr = "" if N == 1 else "evict_last"
    first = tl.program_id(0)
    cols = in_vectors(dy_ptr, s_ptr, s_ptr if dx_ptr is None else dx_ptr, BLOCK_D)
    dweight = ()
    dbias = ()
    for _ in tl.static_range(N):
        dweight += (tl.zeros((BLOCK_T, BLOCK_D), tl.float32),)
        dbias += (tl.zeros((BLOCK_T, BLOCK_D), tl.float32),)
    for block in range(first, blocks, tl.num_programs(0)):
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        rstd, mean = _statistics(rstd_ptr, mean_ptr, rows, T)
        gx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        sum_g = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for i in tl.static_range(N):
            here = i * BLOCK_D + cols
            mask = (rows < T)[:, None] & (here < D)[None, :]  # [BLOCK_T, BLOCK_D]
            dy, g, xhat = _around(
                dy_ptr, s_ptr, weight_ptr, rstd, mean, rows, here, mask, stride_dyt, stride_st, weight_offset,
                D, ALIGN, FIRST,
            )  # fmt: skip
            gx += g * xhat
            sum_g += g
        if N == 1:  # on its way before the sums along the row, for which threads wait
            beside = _beside(ds_ptr, rows, cols, mask, stride_dst, ALIGN)
        mean_gx, mean_g = _row_means(gx, sum_g, D, CENTRED)
        more_dweight = ()
        more_dbias = ()
        for i in tl.static_range(N):
            here = i * BLOCK_D + cols
            if N > 1:
                mask = (rows < T)[:, None] & (here < D)[None, :]
                # Another policy than before: the compiler must not keep what was loaded then.
                dy, g, xhat = _around(
                    dy_ptr, s_ptr, weight_ptr, rstd, mean, rows, here, mask, stride_dyt, stride_st, weight_offset,
                    D, ALIGN, "evict_first",
                )  # fmt: skip
                beside = _beside(ds_ptr, rows, here, mask, stride_dst, ALIGN)
            more_dweight += (dweight[i] + dy * xhat,)
            more_dbias += (dbias[i] + dy,)
            _give_back(
                g, xhat, rstd, mean_gx, mean_g, beside, dx_ptr, dresidual_ptr, rng_key_ptr, rows, here, mask,
                i * BLOCK_D, kept_scale, threshold, mask_stream, row_start, D, BLOCK_D,
            )  # fmt: skip
        dweight = more_dweight
        dbias = more_dbias
    for i in tl.static_range(N):
        here = (i * BLOCK_D + cols)[None, :]
        if dweight_ptr is not None:
            tl.store(dweight_ptr + first * D + here, tl.sum(dweight[i], 0, keep_dims=True), mask=here < D)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + first * D + here, tl.sum(dbias[i], 0, keep_dims=True), mask=here < D)


@triton.jit(
    do_not_specialize=["T", "blocks", "stride_dyt", "stride_dst", "stride_st", "threshold", "mask_stream", "row_start"]
)
def _norm_bwd_wide_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    rstd_ptr,
    mean_ptr,
    rng_key_ptr,
    dx_ptr,
    dresidual_ptr,
    T,
    blocks,
    stride_dyt,
    stride_dst,
    stride_st,
    weight_offset,
    kept_scale,
    threshold,
    mask_stream,
    row_start,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """As ``_norm_bwd_kernel`` for rows of any width, without the parameters. Grid: (blocks of rows,)."""
    CENTRED: tl.constexpr = mean_ptr is not None
    cols = in_vectors(dy_ptr, s_ptr, s_ptr if dx_ptr is None else dx_ptr, BLOCK_D)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    rstd, mean = _statistics(rstd_ptr, mean_ptr, rows, T)
    gx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    sum_g = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for c in range(0, D, BLOCK_D):
        mask = (rows < T)[:, None] & (c + cols < D)[None, :]
        _, g, xhat = _around(
            dy_ptr, s_ptr, weight_ptr, rstd, mean, rows, c + cols, mask, stride_dyt, stride_st, weight_offset,
            D, ALIGN, "",
        )  # fmt: skip
        gx += g * xhat
        sum_g += g
    mean_gx, mean_g = _row_means(gx, sum_g, D, CENTRED)
    for c in range(0, D, BLOCK_D):
        mask = (rows < T)[:, None] & (c + cols < D)[None, :]
        _, g, xhat = _around(
            dy_ptr, s_ptr, weight_ptr, rstd, mean, rows, c + cols, mask, stride_dyt, stride_st, weight_offset,
            D, ALIGN, "",
        )  # fmt: skip
        beside = _beside(ds_ptr, rows, c + cols, mask, stride_dst, ALIGN)
        _give_back(
            g, xhat, rstd, mean_gx, mean_g, beside, dx_ptr, dresidual_ptr, rng_key_ptr, rows, c + cols, mask,
            c, kept_scale, threshold, mask_stream, row_start, D, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "blocks", "stride_dyt", "stride_st"])
def _norm_params_kernel(
    dy_ptr,  # [T, D]
    s_ptr,  # [T, D]
    rstd_ptr,  # [T] fp32
    mean_ptr,  # [T] fp32, or None for RMSNorm
    dweight_ptr,  # [stripes, D] fp32, or None
    dbias_ptr,  # [stripes, D] fp32, or None
    T,
    blocks,  # of rows
    stride_dyt,
    stride_st,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parameters' gradients alone, summed over stripes of rows. Grid: (blocks of columns, stripes)."""
    cols = tl.program_id(0) * BLOCK_D + in_vectors(dy_ptr, s_ptr, s_ptr, BLOCK_D)
    stripe = tl.program_id(1)
    dweight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for block in range(stripe, blocks, tl.num_programs(1)):
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        mask = (rows < T)[:, None] & (cols < D)[None, :]  # [BLOCK_T, BLOCK_D]
        dy = _load(dy_ptr, rows, cols, mask, stride_dyt, ALIGN, "")
        if dweight_ptr is not None:
            rstd, mean = _statistics(rstd_ptr, mean_ptr, rows, T)
            dweight += dy * ((_load(s_ptr, rows, cols, mask, stride_st, ALIGN, "") - mean) * rstd)
        if dbias_ptr is not None:
            dbias += dy
    here = cols[None, :]
    if dweight_ptr is not None:
        tl.store(dweight_ptr + stripe * D + here, tl.sum(dweight, 0, keep_dims=True), mask=here < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + stripe * D + here, tl.sum(dbias, 0, keep_dims=True), mask=here < D)


@triton.jit
def _add_up(parts_ptr, out_ptr, parts, cols, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        mask = (part < parts)[:, None] & (cols < D)[None, :]
        total += tl.load(parts_ptr + part[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < D)


@triton.jit(do_not_specialize=["parts"])
def _norm_sum_kernel(
    dweight_parts_ptr,  # [parts, D] fp32, or None
    dbias_parts_ptr,  # likewise
    dweight_ptr,  # [D] or None
    dbias_ptr,  # [D] or None
    parts,
    D,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up what the programs of backward left, in an order that is always the same. Grid: (blocks of columns,)."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    if dweight_ptr is not None:
        _add_up(dweight_parts_ptr, dweight_ptr, parts, cols, D, BLOCK_P, BLOCK_D)
    if dbias_ptr is not None:
        _add_up(dbias_parts_ptr, dbias_ptr, parts, cols, D, BLOCK_P, BLOCK_D)
