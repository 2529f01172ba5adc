"""Statistics of a chunk of logits, and its gradient in place. The maths, and what statistics are, is in
``reference.py``.

A program owns one row of the chunk [t, n]. It reads it once to find the statistics, each lane keeping a maximum and a
sum of its own so that nothing crosses threads before the end (Milakov & Gimelshein, "Online normalizer calculation for
softmax", arXiv:1805.02867), and, to form the gradient, once more, from the cache where the rows in flight fit there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.sums_triton import product


@triton.jit
def _exp(x):
    """e^x. Unlike those of ``tl.exp``, results below 2^-126 are 0 on NVIDIA's chips: ``tl.exp`` pays for them by two
    products and a comparison a number, and callers add them to, or divide them by, a sum of at least 1.
    """
    return tl.exp2(x * 1.4426950408889634)  # log2(e)


@triton.jit
def _tanh(x):
    """Accurate near 0 as well, where the quotient would be a difference of almost equal numbers."""
    square = x * x
    small = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = _exp(-2.0 * tl.abs(x))
    large = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, small, large)


@triton.jit
def _cap(a, softcap):
    return a if softcap is None else softcap * _tanh(a / softcap)


@triton.jit
def _load_scores(row, offs, width, columns, softcap, EVICT: tl.constexpr):
    """z at ``offs`` of a row of ``width``, -inf where there is no column.

    The rest of the row is padding. It is loaded, too: the number of columns may be odd, the width seldom is.
    """
    a = tl.load(row + offs, mask=offs < width, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return tl.where(offs < columns, _cap(a, softcap), -float("inf"))


@triton.jit
def _shift(peak):
    """What to subtract before exp; 0 where all scores are -inf, whose exp then is 0 and not NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _row_statistics(row, target, first, width, columns, softcap, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, sum of exponentials, the target's score, sum) of a row's scores."""
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    exps = tl.zeros((BLOCK,), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        z = _load_scores(row, offs, width, columns, softcap, "evict_last")
        higher = tl.maximum(peaks, z)
        shift = _shift(higher)
        exps = exps * _exp(peaks - shift) + _exp(z - shift)
        peaks = higher
        if SMOOTH:
            totals += tl.where(offs < columns, z, 0.0)
    column = target - first
    here = (column >= 0) & (column < columns)
    a = tl.load(row + column, mask=here, other=0.0).to(tl.float32)
    score = tl.where(here, _cap(a, softcap), 0.0)
    peak = tl.max(peaks, 0)
    return peak, tl.sum(product(exps, _exp(peaks - _shift(peak))), 0), score, tl.sum(totals, 0)


@triton.jit
def _combined(stats, pitch, ranks):
    """The statistics of one token from those of ``ranks`` parts of the vocabulary, [ranks, 4, pitch]."""
    peak = -float("inf")
    exps = 0.0
    score = 0.0
    total = 0.0
    for _ in range(ranks):
        theirs = tl.load(stats)
        higher = tl.maximum(peak, theirs)
        shift = _shift(higher)
        exps = exps * _exp(peak - shift) + tl.load(stats + pitch) * _exp(theirs - shift)
        peak = higher
        score += tl.load(stats + 2 * pitch)
        total += tl.load(stats + 3 * pitch)
        stats += 4 * pitch
    return peak, exps, score, total


@triton.jit
def _multiple(count, ALIGN: tl.constexpr):
    """``count``, of which ALIGN is a divisor: said so, rows begin and masks end where 16 bytes are loaded at once."""
    return count // ALIGN * ALIGN


# Ranks and blocks of the vocabulary differ in the first, chunks in their tokens, vocabularies in the rest: specialising
# on these would compile the same code again. ALIGN says all of them that matters.
@triton.jit(do_not_specialize=["stride", "pitch", "width", "first", "columns", "ignore_index"])
def _statistics_kernel(
    logits_ptr,  # [t, n], rows contiguous
    targets_ptr,  # [t]
    stats_ptr,  # [4, t] in rows of ``pitch``
    stride,  # of logits' rows
    pitch,
    width,  # n
    first,
    columns,
    ignore_index,
    softcap,  # or None
    SMOOTH: tl.constexpr,
    ALIGN: tl.constexpr,  # divides stride and width
    PADDED: tl.constexpr,  # whether there are fewer columns than the width
    BLOCK: tl.constexpr,
):
    """Grid: (t,)."""
    t = tl.program_id(0).to(tl.int64)
    stride, width = _multiple(stride, ALIGN), _multiple(width, ALIGN)
    if not PADDED:
        columns = width
    target = tl.load(targets_ptr + t).to(tl.int64)
    stats = stats_ptr + t
    if target == ignore_index:
        tl.store(stats, -float("inf"))
        for i in tl.static_range(1, 4):
            tl.store(stats + i * pitch, 0.0)
    else:
        row = logits_ptr + t * stride
        peak, exps, score, total = _row_statistics(row, target, first, width, columns, softcap, SMOOTH, BLOCK)
        tl.store(stats, peak)
        tl.store(stats + pitch, exps)
        tl.store(stats + 2 * pitch, score)
        tl.store(stats + 3 * pitch, total)


@triton.jit
def _row_gradient(
    logits_ptr, targets_ptr, stats_ptr, gain_ptr, losses_ptr, t, stride, pitch, ranks, width, first, columns,
    vocab_size, ignore_index, smoothing, uniform, z_loss, softcap, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of row ``t``, and the gradient of its logits in their place; arguments as ``_gradient_kernel`` has."""
    target = tl.load(targets_ptr + t).to(tl.int64)
    row = logits_ptr + t * stride
    if target == ignore_index:
        for start in range(0, width, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            tl.store(row + offs, tl.zeros((BLOCK,), row.dtype.element_ty), mask=offs < width)
        if losses_ptr is not None:
            tl.store(losses_ptr + t, 0.0)
    else:
        if stats_ptr is None:
            peak, exps, score, total = _row_statistics(row, target, first, width, columns, softcap, SMOOTH, BLOCK)
            tl.debug_barrier()  # every thread has the target's score before the row is written
        else:
            peak, exps, score, total = _combined(stats_ptr + t, pitch, ranks)
        shift = _shift(peak)
        lse = shift + tl.log(exps)
        inside = (target >= 0) & (target < vocab_size)
        gain = tl.where(inside, 1.0, float("nan"))
        if losses_ptr is not None:
            loss = tl.log(exps) + (1.0 - smoothing) * (shift - score) + z_loss * lse * lse
            if SMOOTH:
                loss += smoothing * shift - uniform * total
            tl.store(losses_ptr + t, loss * gain)
        if gain_ptr is not None:
            gain *= tl.load(gain_ptr + t)
        slope = gain * (1.0 + 2.0 * z_loss * lse) / exps
        column = target - first
        for start in range(0, width, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            z = _load_scores(row, offs, width, columns, softcap, "evict_first")
            dz = _exp(z - shift) * slope - uniform * gain
            dz -= tl.where(offs == column, (1.0 - smoothing) * gain, 0.0)
            if softcap is not None:
                share = z / softcap
                dz *= 1.0 - share * share
            dz = tl.where(offs < columns, dz, 0.0)
            tl.store(row + offs, dz.to(row.dtype.element_ty), mask=offs < width)


@triton.jit(
    do_not_specialize=[
        "rows", "stride", "pitch", "ranks", "width", "first", "columns", "vocab_size", "ignore_index"
    ]
)  # fmt: skip
def _gradient_kernel(
    logits_ptr,  # [t, n], rows contiguous; becomes the gradient
    targets_ptr,  # [t]
    stats_ptr,  # [ranks, 4, t] of the whole vocabulary, or None: it is all here
    gain_ptr,  # [t] gradients of the losses, or None: ones
    losses_ptr,  # [t] or None
    rows,  # t
    stride,  # of logits' rows
    pitch,  # of stats' rows
    ranks,
    width,  # n
    first,
    columns,
    vocab_size,
    ignore_index,
    smoothing,
    uniform,  # smoothing / vocab_size
    z_loss,
    softcap,  # or None
    SMOOTH: tl.constexpr,
    ALIGN: tl.constexpr,  # divides stride and width
    PADDED: tl.constexpr,  # whether there are fewer columns than the width
    LOOP: tl.constexpr,  # whether there are fewer programs than rows
    BLOCK: tl.constexpr,
):
    """Grid: (t,); with LOOP fewer, so that a row is still in the cache when it is read again."""
    stride, width = _multiple(stride, ALIGN), _multiple(width, ALIGN)
    if not PADDED:
        columns = width
    if LOOP:
        for t in range(tl.program_id(0), rows, tl.num_programs(0)):
            _row_gradient(
                logits_ptr, targets_ptr, stats_ptr, gain_ptr, losses_ptr, tl.cast(t, tl.int64), stride, pitch, ranks,
                width, first, columns, vocab_size, ignore_index, smoothing, uniform, z_loss, softcap, SMOOTH, BLOCK,
            )  # fmt: skip
    else:
        _row_gradient(
            logits_ptr, targets_ptr, stats_ptr, gain_ptr, losses_ptr, tl.program_id(0).to(tl.int64), stride, pitch,
            ranks, width, first, columns, vocab_size, ignore_index, smoothing, uniform, z_loss, softcap, SMOOTH, BLOCK,
        )  # fmt: skip
