"""One persistent GEMM for every matrix product of a linear layer, with what stands before and after it in its epilogue.

Maths, with x [T, D], W_i [F_i, D], b_i [F_i], z_i, y_i and everything after "epilogue" [M, N] of the product:

    forward   z_i = x @ W_i^T + b_i       epilogue "act"         y_i = act(z_i) + residual_i; z_i stored beside it
                                          epilogue "gated"       h = act(z_0) * z_1; z_0 and z_1 stored beside it
    dgrad     dx = sum_i dz_i @ W_i       epilogue "act"         dx
              dh = dy @ W                 epilogue "act_grad"    dz = dh * act'(z); h = act(z) stored beside it
                                          epilogue "gated_grad"  dg = dh * u * act'(g), du = dh * act(g); h = act(g) * u
    wgrad     dW_i = dz_i^T @ x           epilogue "act"         dW_i; db_i = sum_T dz_i from the main loop
                                          epilogue "accumulate"  dW_i and db_i added to what is there

All are C = op(A) @ op(B) with C [M, N], over up to three operand *pairs* in one launch. A kernel takes its operands as
tuples, one entry per pair, so parameters are never packed to be fused. The pairs are COMBINEd:

    grouped   each pair has its own C; their tile lists stand one after another (forward: A is shared; wgrad: B is)
    chained   the pairs add up in one C before it leaves the accumulator (dgrad)
    gated     two products with the same tile, which meet in the epilogue (forward)

Where the tiles are too few to fill the chip, several programs share a tile: each multiplies its part of K and leaves
the fp32 product in a workspace (epilogue "partial"); ``_split_sum_kernel`` adds the parts in a fixed order and runs the
epilogue that was meant. Nothing is ever added atomically, so every result is bitwise repeatable.

Two things may happen across ranks (``remote.py``): the rows of A arrive from their owners while the kernel runs, and a
tile waits for those it touches; or C is an addend, and the epilogue "send" stores each tile where its owner adds up.

Memory is in ``tiles.py``, the activations in ``activations.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import act, act_grad, tied
from .remote import announce, announce_empty, first_own_row, first_sent_row, send_tile, wait_for_all, wait_for_rows
from .tiles import (
    halves,
    load_operand,
    load_tile,
    open_all,
    open_matrix,
    store_partial,
    store_row_sum,
    store_tile,
    sum_parts,
    tile_pointers,
    tile_position,
)

# ------------------------------------------------------------------------------------------------- main loop


@triton.jit
def _part_of(K, split, splits, BLOCK_K: tl.constexpr):
    """The part [first, last) of K that falls to one of ``splits`` programs, in whole blocks; the last may be empty."""
    part = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
    return split * part, min(K, (split + 1) * part)


@triton.jit
def _multiply(
    acc,  # [BLOCK_M, BLOCK_N] fp32, transposed if SWAP
    row_sum,  # [BLOCK_M, BLOCK_K] fp32: where these terms of the row sums add up
    a,
    b,
    m,
    n,
    first_k,
    last_k,
    M,
    N,
    K,
    a_strides,
    b_strides,
    ROW_SUM: tl.constexpr,
    RELOAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_IMPRECISE_ACC: tl.constexpr,
    UPCAST: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """acc += op(A)[m:, first_k:last_k] @ op(B)[first_k:last_k, n:]; where n = 0, with ROW_SUM row_sum += op(A).

    A is stored [M, K], or [K, M] if TRANS_A; B is stored [K, N], or [N, K] if TRANS_B.
    """
    for k in range(first_k, last_k, BLOCK_K):
        a_tile = load_operand(a, m, k, M, K, a_strides, BLOCK_M, BLOCK_K, TRANS_A, USE_TMA)
        b_tile = load_operand(b, k, n, K, N, b_strides, BLOCK_K, BLOCK_N, TRANS_B, USE_TMA)
        if ROW_SUM and n == 0:
            if RELOAD:
                summed = load_operand(a, m, k, M, K, a_strides, BLOCK_M, BLOCK_K, TRANS_A, USE_TMA)
            else:
                summed = a_tile
            row_sum += summed.to(tl.float32)
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        if SWAP:
            acc = tl.dot(b_tile.T, a_tile.T, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
        else:
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE_ACC)
    return acc, row_sum


@triton.jit
def _multiply_gated(
    acc,  # [BLOCK_M, BLOCK_N] fp32 each, transposed if SWAP
    acc_up,
    a,
    b,
    b_up,
    m,
    n,
    first_k,
    last_k,
    M,
    N,
    K,
    a_strides,
    b_strides,
    b_up_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Both products of a gated layer, each tile of A loaded once. A is stored [M, K], both Bs [N, K]."""
    for k in range(first_k, last_k, BLOCK_K):
        a_tile = load_tile(a, m, k, M, K, a_strides, BLOCK_M, BLOCK_K, USE_TMA)
        b_tile = load_operand(b, k, n, K, N, b_strides, BLOCK_K, BLOCK_N, True, USE_TMA)
        up_tile = load_operand(b_up, k, n, K, N, b_up_strides, BLOCK_K, BLOCK_N, True, USE_TMA)
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
            up_tile = up_tile.to(tl.float32)
        if SWAP:
            acc = tl.dot(b_tile.T, a_tile.T, acc, input_precision=PRECISION)
            acc_up = tl.dot(up_tile.T, a_tile.T, acc_up, input_precision=PRECISION)
        else:
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
            acc_up = tl.dot(a_tile, up_tile, acc_up, input_precision=PRECISION)
    return acc, acc_up


# -------------------------------------------------------------------------------------------------- epilogue


@triton.jit
def _add_bias(z, bias_ptr, n, N, BLOCK_N: tl.constexpr):
    """z + b, where there is a bias."""
    if bias_ptr is not None:
        offs_n = n + tl.arange(0, BLOCK_N)
        z += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _scales(scale_ptrs, m, n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_SCALES: tl.constexpr):
    """What a product of scaled fp8 operands is multiplied by: [BLOCK_M, BLOCK_N] by row and column, or one number."""
    if ROW_SCALES:
        offs_m = m + tl.arange(0, BLOCK_M)
        offs_n = n + tl.arange(0, BLOCK_N)
        of_row = tl.load(scale_ptrs[0] + offs_m, mask=offs_m < M, other=0.0)
        of_col = tl.load(scale_ptrs[1] + offs_n, mask=offs_n < N, other=0.0)
        return of_row[:, None] * of_col[None, :]
    else:
        return tl.load(scale_ptrs[0]) * tl.load(scale_ptrs[1])


@triton.jit
def _epilogue(
    acc,  # [BLOCK_M, BLOCK_N] fp32
    acc_up,  # the second product ("gated"), or None
    biases,  # [N] of each product, or None
    scale_ptrs,  # of A and B, or None
    sources,  # matrices [M, N] that are read, or None
    targets,  # matrices [M, N] that are written: the output, then those stored beside it
    m,
    n,
    M,
    N,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    APPROX: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """What the legend at the top says of EPILOGUE, on one tile."""
    pitch = (N, 1)
    if scale_ptrs is not None:
        acc *= _scales(scale_ptrs, m, n, M, N, BLOCK_M, BLOCK_N, ROW_SCALES)
    if EPILOGUE == "act":
        z = _add_bias(acc, biases[0], n, N, BLOCK_N)
        if len(targets) == 2:
            store_tile(targets[1], z.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
        y = act(z, ACTIVATION, APPROX)
        if sources is not None:
            y += load_tile(sources[0], m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA).to(tl.float32)
        store_tile(targets[0], y.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
    elif EPILOGUE == "gated":
        g = _add_bias(acc, biases[0], n, N, BLOCK_N)
        u = _add_bias(acc_up, biases[1], n, N, BLOCK_N)
        if len(targets) == 3:
            store_tile(targets[1], g.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
            store_tile(targets[2], u.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
        h = act(g, ACTIVATION, APPROX) * u
        store_tile(targets[0], h.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
    elif EPILOGUE == "act_grad":
        z = load_tile(sources[0], m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA).to(tl.float32)
        if len(targets) == 2:
            z = tied(z, acc, ACTIVATION, APPROX)
        dz = acc * act_grad(z, ACTIVATION, APPROX)
        store_tile(targets[0], dz.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
        if len(targets) == 2:
            store_tile(targets[1], act(z, ACTIVATION, APPROX).to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
    elif EPILOGUE == "gated_grad":
        g = load_tile(sources[0], m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA).to(tl.float32)
        if len(targets) == 3:
            g = tied(g, acc, ACTIVATION, APPROX)
        act_g = act(g, ACTIVATION, APPROX)
        du = acc * act_g
        store_tile(targets[1], du.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
        u = load_tile(sources[1], m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA).to(tl.float32)
        dg = acc * u * act_grad(g, ACTIVATION, APPROX)
        store_tile(targets[0], dg.to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
        if len(targets) == 3:
            store_tile(targets[2], (act_g * u).to(DTYPE), m, n, M, N, pitch, BLOCK_M, BLOCK_N, USE_TMA)
    else:
        tl.static_assert(EPILOGUE == "accumulate")
        ptrs, mask = tile_pointers(targets[0], m, n, M, N, N, 1, BLOCK_M, BLOCK_N)
        tl.store(ptrs, (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + acc).to(DTYPE), mask=mask)


@triton.jit
def _total(row_sum, wanted, BLOCK_M: tl.constexpr):
    """The sums of rows [BLOCK_M], zeros unless ``wanted``: between warps they take many wavefronts."""
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if wanted:
        total = tl.sum(row_sum, 1)
    return total


# --------------------------------------------------------------------------------------------------- kernels


# T changes with every batch: specialising on it would only compile the same code again.
@triton.jit(do_not_specialize=["epoch", "T"])
def _gemm_kernel(
    a_ptrs,  # of each pair
    b_ptrs,
    bias_ptrs,  # [N] of each pair, or None
    scale_ptrs,  # of A and B (fp8), or None
    source_ptrs,  # for each output the contiguous matrices [M, N] that its epilogue reads, or None
    target_ptrs,  # and those that it writes; "partial": workspaces [splits, M, N] in fp32, one per product
    row_sum_ptrs,  # where the row sums of each op(A) go (wgrad: the bias gradient), or None
    wait_ptrs,  # this rank's flags, the channel's state, the report: A's rows arrive from peers; or None
    send_ptrs,  # the peers' table, the channel's state: C goes to peers (epilogue "send"); or None
    epoch,  # of the exchange, 0 without one
    T,  # tokens
    Ms,  # of each pair; None: T (forward, dgrad)
    Ns,
    Ks,  # of each pair; None: T (wgrad)
    a_strides,
    b_strides,
    splits,  # parts of K, 1 unless the epilogue is "partial"
    COMBINE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    APPROX: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    SWAP: tl.constexpr,  # multiply (op(B)^T, op(A)^T): wide N fills the tensor core's rows where M is small
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32 products: "ieee" or "tf32"
    MAX_IMPRECISE_ACC: tl.constexpr,  # fp8 products summed in the tensor core's own 14 bits before fp32; None: any
    ROW_SCALES: tl.constexpr,  # scales by row and column, not one for each operand
    UPCAST: tl.constexpr,  # the interpreter's bf16 dot is wrong: multiply in fp32 there
    # Beside asynchronous products Triton gives a tile that a sum reads too one buffer less than they need, and the next
    # load overwrites it beneath them (triton-lang/triton#6691): what is summed is loaded again.
    RELOAD: tl.constexpr,
    USE_TMA: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,  # what the epilogue reads and writes has the alignment that TMA asks for
    EPILOGUE_SUBTILE: tl.constexpr,  # run the epilogue on the left and the right half of a tile, in half the registers
    FLATTEN: tl.constexpr,  # let the next tile's loads run under this tile's epilogue; every K is positive
    PIECES: tl.constexpr,  # in which a rank's rows of A arrive
    FLAGS: tl.constexpr,  # a power of two that is no less than the flags that are waited for, or raised
    CLOCK: tl.constexpr,  # what waits are timed with
):
    # A block of an operand as it is stored.
    A_ROWS: tl.constexpr = BLOCK_K if TRANS_A else BLOCK_M
    A_COLS: tl.constexpr = BLOCK_M if TRANS_A else BLOCK_K
    B_ROWS: tl.constexpr = BLOCK_N if TRANS_B else BLOCK_K
    B_COLS: tl.constexpr = BLOCK_K if TRANS_B else BLOCK_N
    ACC_ROWS: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    ACC_COLS: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    OUT_N: tl.constexpr = BLOCK_N // 2 if EPILOGUE_SUBTILE else BLOCK_N
    PAIRS: tl.constexpr = len(a_ptrs)
    OUTPUTS: tl.constexpr = len(target_ptrs)
    PARTIAL: tl.constexpr = EPILOGUE == "partial"
    # What is read back at once, or has no alignment of its own, goes through pointers.
    TMA_OUT: tl.constexpr = OUT_ALIGNED and USE_TMA and not PARTIAL and EPILOGUE != "accumulate"

    a_srcs = ()
    b_srcs = ()
    for p in tl.static_range(PAIRS):
        M, K = T if Ms is None else Ms[p], T if Ks is None else Ks[p]
        a_rows, a_cols = (K, M) if TRANS_A else (M, K)
        b_rows, b_cols = (Ns[p], K) if TRANS_B else (K, Ns[p])
        a_srcs += (open_matrix(a_ptrs[p], a_rows, a_cols, a_strides[p][0], A_ROWS, A_COLS, USE_TMA),)
        b_srcs += (open_matrix(b_ptrs[p], b_rows, b_cols, b_strides[p][0], B_ROWS, B_COLS, USE_TMA),)

    programs = tl.num_programs(0)
    first_row = None
    if wait_ptrs is not None:
        first_row = first_own_row(T, wait_ptrs[1])
    if send_ptrs is not None:
        first_row = first_sent_row(T, send_ptrs[1])
    tiles_before = 0
    for i in tl.static_range(OUTPUTS):
        M, N, K = T if Ms is None else Ms[i], Ns[i], T if Ks is None else Ks[i]
        if FLATTEN:
            tl.assume(K > 0)  # or the compiler keeps a second epilogue, for tiles without a main loop
        sources = None
        if source_ptrs[i] is not None:
            sources = open_all(source_ptrs[i], M, N, BLOCK_M, OUT_N, TMA_OUT)
        targets = open_all(target_ptrs[i], M, N, BLOCK_M, OUT_N, TMA_OUT)
        dtype = target_ptrs[i][0].dtype.element_ty

        # One list of tiles runs through all outputs; this program takes every programs-th of it.
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        first = (tl.program_id(0) + programs - tiles_before % programs) % programs
        for item in tl.range(first, tiles * splits, programs, flatten=FLATTEN):
            if PARTIAL:
                tile, split = item % tiles, item // tiles
                first_k, last_k = _part_of(K, split, splits, BLOCK_K)
            else:
                tile, split, first_k, last_k = item, 0, 0, K
            m, n = tile_position(tile, first_row, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            if wait_ptrs is not None:
                m = wait_for_rows(m, min(m + BLOCK_M, M), M, wait_ptrs, epoch, PIECES, FLAGS, CLOCK, USE_TMA)
            acc = tl.zeros((ACC_ROWS, ACC_COLS), dtype=tl.float32)
            row_sum = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
            if COMBINE == "gated":
                acc_up = tl.zeros((ACC_ROWS, ACC_COLS), dtype=tl.float32)
                acc, acc_up = _multiply_gated(
                    acc, acc_up, a_srcs[0], b_srcs[0], b_srcs[1], m, n, first_k, last_k, M, N, K,  # type: ignore[misc]
                    a_strides[0], b_strides[0], b_strides[1],
                    BLOCK_M, BLOCK_N, BLOCK_K, SWAP, PRECISION, UPCAST, USE_TMA,
                )  # fmt: skip
                if SWAP:
                    acc_up = acc_up.T
            elif COMBINE == "chained":
                acc_up = None
                for p in tl.static_range(PAIRS):
                    acc, row_sum = _multiply(
                        acc, row_sum, a_srcs[p], b_srcs[p], m, n, 0, Ks[p], M, N, Ks[p], a_strides[p], b_strides[p],
                        False, RELOAD,
                        BLOCK_M, BLOCK_N, BLOCK_K, TRANS_A, TRANS_B, SWAP, PRECISION, MAX_IMPRECISE_ACC, UPCAST,
                        USE_TMA,
                    )  # fmt: skip
            else:
                acc_up = None
                acc, row_sum = _multiply(
                    acc, row_sum, a_srcs[i], b_srcs[i], m, n, first_k, last_k, M, N, K, a_strides[i], b_strides[i],
                    row_sum_ptrs[i] is not None, RELOAD,
                    BLOCK_M, BLOCK_N, BLOCK_K, TRANS_A, TRANS_B, SWAP, PRECISION, MAX_IMPRECISE_ACC, UPCAST, USE_TMA,
                )  # fmt: skip
            if SWAP:
                acc = acc.T

            if PARTIAL:
                store_partial(target_ptrs[i][0], acc, split, m, n, M, N, BLOCK_M, BLOCK_N)
                if COMBINE == "gated":
                    store_partial(target_ptrs[i][1], acc_up, split, m, n, M, N, BLOCK_M, BLOCK_N)
                if row_sum_ptrs[i] is not None:
                    total = _total(row_sum, n == 0, BLOCK_M)
                    store_row_sum(row_sum_ptrs[i] + split * M, total, m, M, n == 0, False, BLOCK_M)
            elif EPILOGUE == "send":
                if EPILOGUE_SUBTILE:
                    left, right = halves(acc, BLOCK_M, BLOCK_N)
                    send_tile(left.to(dtype), m, n, M, N, send_ptrs, BLOCK_M, OUT_N)
                    send_tile(right.to(dtype), m, n + OUT_N, M, N, send_ptrs, BLOCK_M, OUT_N)
                else:
                    send_tile(acc.to(dtype), m, n, M, N, send_ptrs, BLOCK_M, BLOCK_N)
                announce(m, M, N, send_ptrs, epoch, BLOCK_M, BLOCK_N, FLAGS, CLOCK)
            else:
                if EPILOGUE_SUBTILE:
                    left, right = halves(acc, BLOCK_M, BLOCK_N)
                    _epilogue(
                        left, None, bias_ptrs[i:], scale_ptrs, sources, targets, m, n, M, N,
                        EPILOGUE, ACTIVATION, APPROX, ROW_SCALES, dtype, BLOCK_M, OUT_N, TMA_OUT,
                    )  # fmt: skip
                    _epilogue(
                        right, None, bias_ptrs[i:], scale_ptrs, sources, targets, m, n + OUT_N, M, N,
                        EPILOGUE, ACTIVATION, APPROX, ROW_SCALES, dtype, BLOCK_M, OUT_N, TMA_OUT,
                    )  # fmt: skip
                else:
                    _epilogue(
                        acc, acc_up, bias_ptrs[i:], scale_ptrs, sources, targets, m, n, M, N,
                        EPILOGUE, ACTIVATION, APPROX, ROW_SCALES, dtype, BLOCK_M, OUT_N, TMA_OUT,
                    )  # fmt: skip
                if row_sum_ptrs[i] is not None:
                    total = _total(row_sum, n == 0, BLOCK_M)
                    store_row_sum(row_sum_ptrs[i], total, m, M, n == 0, EPILOGUE == "accumulate", BLOCK_M)
        tiles_before += tiles * splits
    if wait_ptrs is not None and tl.program_id(0) == 0:
        wait_for_all(wait_ptrs, epoch, PIECES, FLAGS, CLOCK)
    if EPILOGUE == "send" and tl.program_id(0) == 0:
        announce_empty(T, send_ptrs, epoch, FLAGS)


@triton.jit(do_not_specialize=["T"])
def _split_sum_kernel(
    partial_ptrs,  # for each output its products' workspaces [splits, M, N] in fp32
    partial_sum_ptrs,  # [splits, M] in fp32, or None
    bias_ptrs,  # these as in _gemm_kernel
    scale_ptrs,
    source_ptrs,
    target_ptrs,
    row_sum_ptrs,
    T,
    Ms,
    Ns,
    splits,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    APPROX: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the parts of a split GEMM, first to last, and run its epilogue. Grid: (tiles of the largest output,)."""
    tile = tl.program_id(0)
    for i in tl.static_range(len(target_ptrs)):
        M, N = T if Ms is None else Ms[i], Ns[i]
        if tile < tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N):
            m, n = tile_position(tile, None, M, N, BLOCK_M, BLOCK_N, 1)
            acc = sum_parts(partial_ptrs[i][0], m, n, M, N, splits, BLOCK_M, BLOCK_N)
            acc_up = None
            if EPILOGUE == "gated":
                acc_up = sum_parts(partial_ptrs[i][1], m, n, M, N, splits, BLOCK_M, BLOCK_N)
            _epilogue(
                acc, acc_up, bias_ptrs[i:], scale_ptrs, source_ptrs[i], target_ptrs[i], m, n, M, N,
                EPILOGUE, ACTIVATION, APPROX, ROW_SCALES, target_ptrs[i][0].dtype.element_ty, BLOCK_M, BLOCK_N, False,
            )  # fmt: skip
            if row_sum_ptrs[i] is not None and n == 0:
                offs_m = m + tl.arange(0, BLOCK_M)
                row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
                for split in range(splits):
                    row_sum += tl.load(partial_sum_ptrs[i] + split * M + offs_m, mask=offs_m < M, other=0.0)
                store_row_sum(row_sum_ptrs[i], row_sum, m, M, True, EPILOGUE == "accumulate", BLOCK_M)


# -------------------------------------------------------------------------- an activation's gradient by itself


@triton.jit(do_not_specialize=["T"])
def _act_grad_kernel(
    dy_ptr,  # [T, F] with strides
    source_ptrs,  # z, or g and u: [T, F] contiguous
    target_ptrs,  # dz, or dg and du: [T, F] contiguous
    T,
    F,
    dy_strides,
    EPILOGUE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    APPROX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """The epilogues "act_grad" and "gated_grad", for a gradient that another op has left in memory."""
    t = tl.program_id(0) * BLOCK_T
    f = tl.program_id(1) * BLOCK_F
    dy_ptrs, mask = tile_pointers(dy_ptr, t, f, T, F, dy_strides[0], dy_strides[1], BLOCK_T, BLOCK_F)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    _epilogue(
        dy, None, (None,), None, source_ptrs, target_ptrs, t, f, T, F,
        EPILOGUE, ACTIVATION, APPROX, False, target_ptrs[0].dtype.element_ty, BLOCK_T, BLOCK_F, False,
    )  # fmt: skip
