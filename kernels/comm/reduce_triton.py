"""Sums over ranks, and what follows them: bias, residual and norm. One kernel for all exchanges that end in a sum.

Maths, by row of [T, D], in fp32, over ranks r = 0 .. R-1 in this order, so that all ranks form the same bits:

    t = sum_r addend_r;  s = t + bias + residual, rounded to s's dtype;  y = norm(s), as kernels/norm has it

How the addends come together:

    one-shot    x is this rank's addend. Each program stores its rows of x with every peer, waits for its namesakes
                there, and adds up its rows.
    two-shot    a program's rows have owners by turns. It stores a row of x with its owner; the owner adds it up, rounds
                t once, and stores it with every peer.
    sent        x is None: a GEMM has sent the addends to owners of T/R rows in a row. They add up, and either keep s
                (reduce-scatter) or (GATHER) store t with every peer, as in two-shot.

Program b of a rank exchanges only with programs b of its peers. Programs start in their order, so the first unfinished
one of every rank runs or comes next, and no grid waits for a program that it keeps from running. Programs without rows
raise their flags all the same: then whoever begins the exchange after the next knows that this one has been read
(``signals.py``).

A slot, rows of D: addends [R, n, D] by source (one-shot n = T, sent n = ceil(T/R), two-shot as ``reduce_config.py``
says), then, in two shots, sums [T, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..norm.triton import _merge, _put_out
from ..runtime.signals import CHUNKS, DONE, EPOCH, GAVE_UP, LIMIT_MS
from ..runtime.signals_triton import _now, _report, _ticks, arrived_last, exchange_of, flag_index, spin_on_flags
from ..runtime.vectors_triton import in_vectors

_CHUNKS = tl.constexpr(CHUNKS)
_DONE = tl.constexpr(DONE)
_EPOCH = tl.constexpr(EPOCH)
_GAVE_UP = tl.constexpr(GAVE_UP)
_LIMIT_MS = tl.constexpr(LIMIT_MS)


@triton.jit
def _raise_everywhere(table_ptr, state_ptr, size, index, epoch, R: tl.constexpr, LANES: tl.constexpr):
    """Raise flag ``index`` of every pad at once, a lane each: one after another each release would wait for the last.

    A rank that has given up holds no data to vouch for. It stays silent, and its peers' waits end in their own report.
    ``size`` is R, read by the caller: addresses that no second call shares need no registers in between.
    """
    tl.debug_barrier()  # the lanes release what all threads have stored
    peers = tl.arange(0, LANES)
    pads = tl.load(table_ptr + size + peers, mask=peers < R, other=0).to(tl.pointer_type(tl.int32))
    well = tl.load(state_ptr + _GAVE_UP, volatile=True) == 0
    epochs = tl.zeros((LANES,), tl.int32) + epoch
    tl.atomic_xchg(pads + index, epochs, mask=(peers < R) & well, sem="release", scope="sys")


@triton.jit
def _wait_everywhere(
    pad_ptr, index, epoch, state_ptr, report_ptr, R: tl.constexpr, LANES: tl.constexpr, CLOCK: tl.constexpr
):
    """``wait_flags`` for one flag of every source, a lane each; ``index`` is source 0's."""
    lanes = tl.arange(0, LANES)
    flags = index + tl.minimum(lanes, R - 1) * _CHUNKS
    if CLOCK == "cuda":
        spin_on_flags(pad_ptr, flags, epoch, state_ptr, report_ptr)
    else:
        limit = _ticks(tl.load(state_ptr + _LIMIT_MS), CLOCK)
        started = _now(CLOCK)
        epochs = tl.zeros((LANES,), tl.int32) + epoch
        missing = 0
        while missing < LANES:
            seen = tl.atomic_cas(pad_ptr + flags, epochs, epochs, sem="acquire", scope="sys")
            missing = tl.min(tl.where(seen - epochs >= 0, LANES, lanes), 0)
            if missing < LANES:
                if tl.load(state_ptr + _GAVE_UP, volatile=True) != 0:
                    missing = LANES
                else:
                    if _now(CLOCK) - started > limit:
                        last_seen = tl.sum(tl.where(lanes == missing, seen, 0), 0)
                        _report(missing * _CHUNKS + index, epoch, last_seen, state_ptr, report_ptr)
                        missing = LANES
    tl.debug_barrier()  # what the lanes have acquired, all threads may read


@triton.jit
def _send(
    tile, row, table_ptr, like_ptr, offset, peer, cols, mask,
    D: tl.constexpr, R: tl.constexpr, COUNT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A row to the same place in the slots of COUNT ranks from ``peer`` on, whose addresses come TOGETHER at a time.

    Slots begin at multiples of 16 bytes: rows of a fitting D are vectors.
    """
    here = tl.cast(row, tl.int64) * D + cols
    for first in range(0, COUNT, TOGETHER):
        slots = ()
        for i in tl.static_range(TOGETHER):
            slot = tl.multiple_of(tl.load(table_ptr + (peer + first + i) % R).to(like_ptr.dtype), 16)
            slots += (tl.multiple_of(slot + offset, 16),)
        for i in tl.static_range(TOGETHER):
            tl.store(slots[i] + here, tile, mask=mask)


@triton.jit
def _total(slot_ptr, row, pitch, cols, mask, D: tl.constexpr, COUNT: tl.constexpr, TOGETHER: tl.constexpr):
    """The sum of COUNT rows of this rank's slot that are ``pitch`` rows apart, in their order, fp32.

    The wait has acquired what is read here, so no cache may serve an older state; volatile has it read where peers
    write anyway, past L1, which has no use for what is read once.
    """
    total = tl.zeros(cols.shape, tl.float32)
    for first in range(0, COUNT, TOGETHER):
        parts = ()
        for i in tl.static_range(TOGETHER):
            here = (tl.cast(pitch, tl.int64) * (first + i) + row) * D + cols
            parts += (tl.load(slot_ptr + here, mask=mask, other=0.0, volatile=True),)
        for i in tl.static_range(TOGETHER):
            total += parts[i].to(tl.float32)
    return total


@triton.jit
def _finish(
    total, row, residual_ptr, bias_ptr, weight_ptr, norm_bias_ptr, y_ptr, s_ptr, cols, mask, eps, weight_offset,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """s and, if there is a y, y of a row from its sum."""
    here = tl.cast(row, tl.int64) * D + cols[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + here, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + here, rounded, mask=mask)
    if y_ptr is not None:
        s = rounded.to(tl.float32)  # what is normalised is what is returned
        nothing = tl.zeros((1,), tl.float32)
        mean, squares = _merge(nothing, nothing, s, mask, 0, D, BLOCK_D, CENTRED, True)
        rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(squares / D + eps))
        rows = tl.zeros((1,), tl.int64) + row
        _put_out(s, mean, rstd, y_ptr, weight_ptr, norm_bias_ptr, rows, cols, mask, weight_offset, D)


@triton.jit(do_not_specialize=["T", "per", "epoch", "slot_stride"])
def _reduce_kernel(
    x_ptr,  # [T, D], or None: the addends were sent
    residual_ptr,  # rows of s, or None
    bias_ptr,  # [D] or None
    weight_ptr,  # [D] or None
    norm_bias_ptr,  # [D] or None
    y_ptr,  # rows of s, or None: no norm
    s_ptr,  # [T, D], or after a reduce-scatter this rank's rows of it
    slot_ptr,  # this rank's slot
    pad_ptr,  # this rank's flags
    table_ptr,
    state_ptr,
    report_ptr,
    T,
    per,  # rows of an addend in a slot, n above
    epoch,  # of this exchange, or None: the device counts, and slots take turns slot_stride elements apart
    slot_stride,
    eps,
    weight_offset,
    D: tl.constexpr,
    R: tl.constexpr,
    LANES: tl.constexpr,  # the power of two that R ranks fit in
    PROGRAMS: tl.constexpr,
    TOGETHER: tl.constexpr,  # divides R
    BLOCK_D: tl.constexpr,
    GATHER: tl.constexpr,
    CENTRED: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """See above. Grid: (PROGRAMS,), at most CHUNKS where a program raises flags."""
    rank, size = exchange_of(state_ptr)
    b = tl.program_id(0)
    if epoch is None:
        now = tl.load(state_ptr + _EPOCH) + 1
        offset = (now & 1).to(tl.int64) * slot_stride
    else:
        now = epoch
        offset = 0
    own_ptr = tl.multiple_of(slot_ptr + offset, 16)
    cols = in_vectors(slot_ptr, s_ptr, s_ptr if y_ptr is None else y_ptr, BLOCK_D)
    mask = (cols < D)[None, :]
    across = cols[None, :]
    source = rank.to(tl.int64) * per  # the first row of this rank's addend in a slot
    sums = per.to(tl.int64) * R  # the first row of the slot's second part

    if x_ptr is not None:
        for row in range(b, T, PROGRAMS):
            tile = tl.load(x_ptr + tl.cast(row, tl.int64) * D + across, mask=mask, other=0.0)
            if GATHER:
                owner = b + row // PROGRAMS
                at = source + row // (PROGRAMS * R) * PROGRAMS + b
                _send(tile, at, table_ptr, slot_ptr, offset, owner, across, mask, D, R, 1, 1)
            else:  # to this rank last: not all to the same at a time
                at = source + row
                _send(tile, at, table_ptr, slot_ptr, offset, rank + 1, across, mask, D, R, R, TOGETHER)
        _raise_everywhere(table_ptr, state_ptr, size, flag_index(0, rank, b, R), now, R, LANES)
        _wait_everywhere(pad_ptr, flag_index(0, 0, b, R), now, state_ptr, report_ptr, R, LANES, CLOCK)
    else:
        _wait_everywhere(pad_ptr, flag_index(0, 0, 0, R), now, state_ptr, report_ptr, R, LANES, CLOCK)

    # The rows that this program adds up. Two-shot: those of its own whose turn it is to be this rank's.
    if x_ptr is None:
        begin = rank * per + b
        end = tl.minimum((rank + 1) * per, T)
        step = PROGRAMS
    else:
        begin = b + (rank + R - b % R) % R * PROGRAMS if GATHER else b
        end = T
        step = PROGRAMS * R if GATHER else PROGRAMS
    for row in range(begin, end, step):
        if x_ptr is None:
            at = row - rank * per
        else:
            at = row // (PROGRAMS * R) * PROGRAMS + b if GATHER else row
        total = _total(own_ptr, at, per, across, mask, D, R, TOGETHER)
        if GATHER:
            t = total.to(slot_ptr.dtype.element_ty)
            _send(t, sums + row, table_ptr, slot_ptr, offset, rank + 1, across, mask, D, R, R, TOGETHER)
        else:
            _finish(
                total, at, residual_ptr, bias_ptr, weight_ptr, norm_bias_ptr, y_ptr, s_ptr, cols, mask,
                eps, weight_offset, D, BLOCK_D, CENTRED,
            )  # fmt: skip

    if GATHER:
        _, size = exchange_of(state_ptr)  # once more, which is cheaper than to keep it
        _raise_everywhere(table_ptr, state_ptr, size, flag_index(1, rank, b, R), now, R, LANES)
        _wait_everywhere(pad_ptr, flag_index(1, 0, b, R), now, state_ptr, report_ptr, R, LANES, CLOCK)
        # What programs b have added up: this program's own rows, or of sent addends rows b, b + P, ... of each owner.
        owners = 1 if x_ptr is not None else R
        rows_each = T if x_ptr is not None else per
        for owner in range(owners):
            for row in range(owner * rows_each + b, tl.minimum((owner + 1) * rows_each, T), PROGRAMS):
                t = _total(own_ptr, sums + row, 0, across, mask, D, 1, 1)
                _finish(
                    t, row, residual_ptr, bias_ptr, weight_ptr, norm_bias_ptr, y_ptr, s_ptr, cols, mask,
                    eps, weight_offset, D, BLOCK_D, CENTRED,
                )  # fmt: skip
    if epoch is None:  # noqa: SIM102  # a constant, which decides whether the rest is compiled
        if arrived_last(state_ptr + _DONE, PROGRAMS):
            tl.store(state_ptr + _EPOCH, tl.load(state_ptr + _EPOCH) + 1)
