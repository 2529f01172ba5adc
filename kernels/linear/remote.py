"""The GEMM's two ends when they lie on other ranks: rows of A that peers push, tiles of C that peers add up.

Rank r of R owns rows [r * per, (r + 1) * per) of the T tokens, per = ceil(T / R); the last ranks may own fewer or none.

A arrives in a buffer [T, K] of this rank's own, each rank's rows in PIECES of equal length, a flag each (phase 0). A
tile waits for the pieces that hold its rows, and the tiles begin with this rank's own rows, which arrive first.

C is this rank's addend. A tile is stored to the owners of its rows, each of which keeps [R, per, N] by source; the last
tile for an owner raises this rank's flag there (phase 0, chunk 0). The tiles end with this rank's own rows, so that
what travels has a head start. See ``signals.py`` for flags, ``kernels/comm`` for what happens before and after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.signals_triton import (
    _CHUNKS,
    _COUNTERS,
    _GAVE_UP,
    barrier,
    exchange_of,
    flag_index,
    spin_on_flags,
    wait_flags,
)


@triton.jit
def first_own_row(T, state_ptr):
    """The row with which the tiles begin where A arrives: the first of this rank's own."""
    rank, size = exchange_of(state_ptr)
    return min(rank * tl.cdiv(T, size), T - 1)


@triton.jit
def first_sent_row(T, state_ptr):
    """The row with which they begin where C is sent: the next rank's first, so that the own ones come last."""
    rank, size = exchange_of(state_ptr)
    return (rank + 1) % size * tl.cdiv(T, size) % T


@triton.jit
def wait_for_rows(
    m,
    last_m,
    T,
    wait_ptrs,
    epoch,
    PIECES: tl.constexpr,
    FLAGS: tl.constexpr,
    CLOCK: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Wait until rows [m, last_m) of A are there; returns ``m``, so that what is loaded depends on the wait."""
    pad_ptr, state_ptr, report_ptr = wait_ptrs
    _, size = exchange_of(state_ptr)
    per = tl.cdiv(T, size)
    piece = tl.cdiv(per, PIECES)
    first = m // per * PIECES + m % per // piece
    last = (last_m - 1) // per * PIECES + (last_m - 1) % per // piece
    if CLOCK == "cuda":
        flag = tl.minimum(first + tl.arange(0, FLAGS), last)
        spin_on_flags(pad_ptr, flag // PIECES * _CHUNKS + flag % PIECES, epoch, state_ptr, report_ptr)
        return barrier(m, CLOCK, FENCE)
    else:
        wait_flags(pad_ptr, 0, first, last, epoch, state_ptr, report_ptr, PIECES, CLOCK)
        return m


@triton.jit
def wait_for_all(wait_ptrs, epoch, PIECES: tl.constexpr, FLAGS: tl.constexpr, CLOCK: tl.constexpr):
    """Hear from every rank, those without rows included: who has begun this exchange has finished the one before."""
    pad_ptr, state_ptr, report_ptr = wait_ptrs
    _, size = exchange_of(state_ptr)
    if CLOCK == "cuda":  # all at once: one after another is a trip to memory for each
        flag = tl.minimum(tl.arange(0, FLAGS), size * PIECES - 1)
        spin_on_flags(pad_ptr, flag // PIECES * _CHUNKS + flag % PIECES, epoch, state_ptr, report_ptr)
        barrier(size, CLOCK, False)
    else:
        wait_flags(pad_ptr, 0, 0, size * PIECES - 1, epoch, state_ptr, report_ptr, PIECES, CLOCK)


@triton.jit
def send_tile(tile, m, n, T, N, send_ptrs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile [BLOCK_M, BLOCK_N] of this rank's addend where the owners of its rows add up."""
    table_ptr, state_ptr = send_ptrs
    rank, size = exchange_of(state_ptr)
    per = tl.cdiv(T, size)
    offs_m = m + tl.arange(0, BLOCK_M)
    offs_n = n + tl.arange(0, BLOCK_N)
    owner = tl.minimum(offs_m, T - 1) // per
    # A slot begins at a multiple of 16 bytes: told, or stores would go out one element at a time.
    slots = tl.multiple_of(tl.load(table_ptr + owner).to(tl.pointer_type(tile.dtype)), 16)
    rows = (rank * per + offs_m - owner * per).to(tl.int64)
    ptrs = slots[:, None] + rows[:, None] * N + offs_n[None, :]
    tl.store(ptrs, tile, mask=(offs_m < T)[:, None] & (offs_n < N)[None, :])


@triton.jit
def announce(
    m,
    T,
    N,
    send_ptrs,
    epoch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWNERS: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """Count the tile in rows [m, m + BLOCK_M) for each owner of its rows; the last for an owner raises the flag there.

    Whoever counts last has heard of the other programs' stores, and with its flag the owner does. No loop over owners:
    one would keep the tiles' own from being pipelined.
    """
    state_ptr = send_ptrs[1]
    m = barrier(m, CLOCK, False)  # all threads' stores come before
    rank, size = exchange_of(state_ptr)
    per = tl.cdiv(T, size)
    owner = tl.arange(0, OWNERS)
    first_row, last_row = owner * per, tl.minimum((owner + 1) * per, T) - 1
    touched = (owner < size) & (first_row < min(m + BLOCK_M, T)) & (last_row >= m)
    expected = (last_row // BLOCK_M - first_row // BLOCK_M + 1) * tl.cdiv(N, BLOCK_N)
    counters = state_ptr + _COUNTERS + owner
    before = tl.atomic_add(counters, 1, mask=touched, sem="acq_rel", scope="gpu")
    complete = touched & (before == expected - 1)
    tl.store(counters, 0, mask=complete)  # for the next exchange
    _raise_flags(owner, complete, rank, size, send_ptrs, epoch)


@triton.jit
def announce_empty(T, send_ptrs, epoch, OWNERS: tl.constexpr):
    """No tile goes to a rank without rows, which waits for its peers all the same."""
    rank, size = exchange_of(send_ptrs[1])
    owner = tl.arange(0, OWNERS)
    _raise_flags(owner, (owner < size) & (owner * tl.cdiv(T, size) >= T), rank, size, send_ptrs, epoch)


@triton.jit
def _raise_flags(owner, mask, rank, size, send_ptrs, epoch):
    """This rank's flag at each ``owner``. A rank that has given up a wait has nothing to vouch for: it stays silent."""
    table_ptr, state_ptr = send_ptrs
    mask &= tl.load(state_ptr + _GAVE_UP) == 0
    pads = tl.load(table_ptr + size + owner, mask=mask, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(pads + flag_index(0, rank, 0, size), epoch, mask=mask, sem="release", scope="sys")
