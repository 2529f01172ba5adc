"""One persistent GEMM for every matrix product of a linear layer, and the pass that undoes its activation.

Maths, with x [T, D], W_i [F_i, D], b_i [F_i], z_i and y_i [T, F_i]:

    forward   z_i  = x @ W_i^T + b_i        y_i  = act(z_i)
    dgrad     dx   = sum_i dz_i @ W_i       dz_i = dy_i * act'(z_i)
    wgrad     dW_i = dz_i^T @ x             db_i = sum_T dz_i

All three are C = op(A) @ op(B) with C [M, N], over up to three operand *pairs* in one launch:

    grouped   each pair has its own C; their tile lists stand one after another (forward: A is shared; wgrad: B is)
    chained   the pairs add up in one C before it leaves the accumulator (dgrad)

A kernel takes its operands as tuples, one entry per pair, so parameters are never packed to be fused. Loads and stores
go through the tensor memory accelerator (TMA) where USE_TMA, through pointers and masks elsewhere; `_open`, `_load`
and `_store` are the only functions that know which. Prologue, main loop and epilogue are separate functions that a
kernel with other needs (waiting for a peer, scattering to one) can put together differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---------------------------------------------------------------------------------------------------- memory


@triton.jit
def _open(ptr, rows, cols, stride_row, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """What tiles of a matrix [rows, cols] are loaded from and stored to: a TMA descriptor, or the pointer itself."""
    if USE_TMA:
        return tl.make_tensor_descriptor(ptr, [rows, cols], [stride_row, 1], [BLOCK_ROWS, BLOCK_COLS])
    else:
        return ptr


@triton.jit
def _tile_pointers(
    ptr, row, col, rows, cols, stride_row, stride_col, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Pointers and mask of the tile at (row, col). Offsets are 64-bit: rows * stride may pass 2^31."""
    offs_row = row + tl.arange(0, BLOCK_ROWS)
    offs_col = col + tl.arange(0, BLOCK_COLS)
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_col.to(tl.int64)[None, :] * stride_col
    return ptrs, (offs_row < rows)[:, None] & (offs_col < cols)[None, :]  # [BLOCK_ROWS, BLOCK_COLS] each


@triton.jit
def _load(
    src, row, col, rows, cols, strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr
):
    """The tile [BLOCK_ROWS, BLOCK_COLS] at (row, col), zero outside the matrix."""
    if USE_TMA:
        return src.load([row, col])
    else:
        ptrs, mask = _tile_pointers(src, row, col, rows, cols, strides[0], strides[1], BLOCK_ROWS, BLOCK_COLS)
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _store(
    dst, tile, row, col, rows, cols, strides, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr
):
    """Store the tile at (row, col), dropping what lies outside the matrix."""
    if USE_TMA:
        dst.store([row, col], tile)
    else:
        ptrs, mask = _tile_pointers(dst, row, col, rows, cols, strides[0], strides[1], BLOCK_ROWS, BLOCK_COLS)
        tl.store(ptrs, tile, mask=mask)


# ----------------------------------------------------------------------------------------------- activations


@triton.jit
def _gelu_tanh_gate(z):
    """0.5 * (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2/pi) * (z + 0.044715 z^3): one exponential instead of a tanh."""
    return tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))


@triton.jit
def act(z, ACTIVATION: tl.constexpr):
    """y = act(z), in fp32."""
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0)
    elif ACTIVATION == "gelu_erf":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return z * _gelu_tanh_gate(z)
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return z


@triton.jit
def act_grad(z, ACTIVATION: tl.constexpr):
    """act'(z), in fp32."""
    if ACTIVATION == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "gelu_erf":
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        gate = _gelu_tanh_gate(z)
        return gate + z * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    else:
        tl.static_assert(ACTIVATION == "silu")
        gate = tl.sigmoid(z)
        return gate * (1.0 + z * (1.0 - gate))


# ------------------------------------------------------------------------------------------------- main loop


@triton.jit
def _tile_position(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of a tile in an order that keeps GROUP_M rows of tiles together, for the L2 cache."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return (first_m + within % rows) * BLOCK_M, within // rows * BLOCK_N


@triton.jit
def _multiply(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    row_sum,  # [BLOCK_M] fp32
    a,
    b,
    m,
    n,
    M,
    N,
    K,
    a_strides,
    b_strides,
    ROW_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """acc += op(A)[m:, :] @ op(B)[:, n:]; with ROW_SUM, row_sum += the row sums of op(A).

    A is stored [M, K], or [K, M] if TRANS_A; B is stored [K, N], or [N, K] if TRANS_B.
    """
    for k in range(0, K, BLOCK_K):
        if TRANS_A:
            a_tile = _load(a, k, m, K, M, a_strides, BLOCK_K, BLOCK_M, USE_TMA).T
        else:
            a_tile = _load(a, m, k, M, K, a_strides, BLOCK_M, BLOCK_K, USE_TMA)
        if TRANS_B:
            b_tile = _load(b, n, k, N, K, b_strides, BLOCK_N, BLOCK_K, USE_TMA).T
        else:
            b_tile = _load(b, k, n, K, N, b_strides, BLOCK_K, BLOCK_N, USE_TMA)
        if ROW_SUM:
            row_sum += tl.sum(a_tile.to(tl.float32), 1)
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc, row_sum


@triton.jit
def _epilogue(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    bias_ptr,  # [N], or None
    preact,  # where z goes, or None
    c,
    m,
    n,
    M,
    N,
    strides,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """z = acc + bias; store z where it is wanted, and act(z)."""
    if bias_ptr is not None:
        offs_n = n + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if preact is not None:
        _store(preact, acc.to(DTYPE), m, n, M, N, strides, BLOCK_M, BLOCK_N, USE_TMA)
    _store(c, act(acc, ACTIVATION).to(DTYPE), m, n, M, N, strides, BLOCK_M, BLOCK_N, USE_TMA)


# T changes with every batch: specialising on it would only compile the same code again.
@triton.jit(do_not_specialize=["T"])
def _gemm_kernel(
    a_ptrs,
    b_ptrs,
    c_ptrs,
    bias_ptrs,  # [N] of each output, or None
    preact_ptrs,  # where each output's pre-activation goes, or None
    row_sum_ptrs,  # where the row sums of each op(A) go (wgrad: the bias gradient), or None
    T,  # tokens
    Ms,  # of each pair; None: T (forward, dgrad)
    Ns,
    Ks,  # of each pair; None: T (wgrad)
    a_strides,
    b_strides,
    c_strides,
    CHAINED: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32 products: "ieee" or "tf32"
    UPCAST: tl.constexpr,  # the interpreter's bf16 dot is wrong: multiply in fp32 there
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,  # let the next tile's loads run under this tile's epilogue
):
    # A block of an operand as it is stored.
    A_ROWS: tl.constexpr = BLOCK_K if TRANS_A else BLOCK_M
    A_COLS: tl.constexpr = BLOCK_M if TRANS_A else BLOCK_K
    B_ROWS: tl.constexpr = BLOCK_N if TRANS_B else BLOCK_K
    B_COLS: tl.constexpr = BLOCK_K if TRANS_B else BLOCK_N
    PAIRS: tl.constexpr = len(a_ptrs)
    OUTPUTS: tl.constexpr = len(c_ptrs)

    a_srcs = ()
    b_srcs = ()
    for p in tl.static_range(PAIRS):
        M = T if Ms is None else Ms[p]
        K = T if Ks is None else Ks[p]
        a_rows, a_cols = (K, M) if TRANS_A else (M, K)
        b_rows, b_cols = (Ns[p], K) if TRANS_B else (K, Ns[p])
        a_srcs += (_open(a_ptrs[p], a_rows, a_cols, a_strides[p][0], A_ROWS, A_COLS, USE_TMA),)
        b_srcs += (_open(b_ptrs[p], b_rows, b_cols, b_strides[p][0], B_ROWS, B_COLS, USE_TMA),)

    programs = tl.num_programs(0)
    tiles_before = 0
    for i in tl.static_range(OUTPUTS):
        M, N = T if Ms is None else Ms[i], Ns[i]
        c = _open(c_ptrs[i], M, N, c_strides[i][0], BLOCK_M, BLOCK_N, USE_TMA)
        preact = None
        if preact_ptrs[i] is not None:
            preact = _open(preact_ptrs[i], M, N, c_strides[i][0], BLOCK_M, BLOCK_N, USE_TMA)

        # One list of tiles runs through all outputs; this program takes every programs-th of it.
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        first = (tl.program_id(0) + programs - tiles_before % programs) % programs
        for tile in tl.range(first, tiles, programs, flatten=FLATTEN):
            m, n = _tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
            if CHAINED:
                for p in tl.static_range(PAIRS):
                    acc, row_sum = _multiply(
                        acc, row_sum, a_srcs[p], b_srcs[p], m, n, M, N, Ks[p], a_strides[p], b_strides[p],
                        False, BLOCK_M, BLOCK_N, BLOCK_K, TRANS_A, TRANS_B, PRECISION, UPCAST, USE_TMA,
                    )  # fmt: skip
            else:
                acc, row_sum = _multiply(
                    acc, row_sum, a_srcs[i], b_srcs[i], m, n, M, N,
                    T if Ks is None else Ks[i], a_strides[i], b_strides[i], row_sum_ptrs[i] is not None,
                    BLOCK_M, BLOCK_N, BLOCK_K, TRANS_A, TRANS_B, PRECISION, UPCAST, USE_TMA,
                )  # fmt: skip
            _epilogue(
                acc, bias_ptrs[i], preact, c, m, n, M, N, c_strides[i],
                ACTIVATION, c_ptrs[i].dtype.element_ty, BLOCK_M, BLOCK_N, USE_TMA,
            )  # fmt: skip
            if row_sum_ptrs[i] is not None:
                # Every column of tiles holds the same sums: the first one writes them.
                offs_m = m + tl.arange(0, BLOCK_M)
                sums = row_sum.to(row_sum_ptrs[i].dtype.element_ty)
                tl.store(row_sum_ptrs[i] + offs_m, sums, mask=(offs_m < M) & (n == 0))
        tiles_before += tiles


# ------------------------------------------------------------------------------------- activation's gradient


@triton.jit(do_not_specialize=["T"])
def _act_grad_kernel(
    dy_ptr,  # [T, F] with strides
    z_ptr,  # [T, F] contiguous
    dz_ptr,  # [T, F] contiguous
    T,
    F,
    dy_strides,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T
    f = tl.program_id(1) * BLOCK_F
    dy_ptrs, mask = _tile_pointers(dy_ptr, t, f, T, F, dy_strides[0], dy_strides[1], BLOCK_T, BLOCK_F)
    z_ptrs, _ = _tile_pointers(z_ptr, t, f, T, F, F, 1, BLOCK_T, BLOCK_F)
    dz_ptrs, _ = _tile_pointers(dz_ptr, t, f, T, F, F, 1, BLOCK_T, BLOCK_F)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dz_ptrs, (dy * act_grad(z, ACTIVATION)).to(dz_ptr.dtype.element_ty), mask=mask)
