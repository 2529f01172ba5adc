"""Quantisation to fp8.

Maths, with x [R, C] and L the largest number of the fp8 format (448 in e4m3, 57344 in e5m2):

    scale    amax * 2^margin / L, not below 2^-126; 1 where amax is 0 or not finite
    values   round(clamp(x / scale, -L, L)), ties to even; NaN where x is NaN or infinite
    amax     max |x|; inf where x holds NaN or inf

``scale`` multiplies to dequantise. It is one number (amax over x, over the parts of x that ``_amax_kernel`` left, or
over a history of earlier calls) or one for each row. The tensor cores multiply fp8 only with the contracted dimension
contiguous in both operands, so a gradient's products need x^T beside x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.tiles import load_tile

TINY = tl.constexpr(2.0**-126)  # the smallest normal number: its inverse is finite


@triton.jit
def _pointers(ptr, r, c, R, C, strides, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, RUN: tl.constexpr):
    """Pointers and mask of the tile at (r, c), [BLOCK_R, BLOCK_C] each; a thread takes RUN columns in a row at most.

    x and its values in fp8 share their threads. With 16 bytes of values each would load 32 or 64 bytes of x, by
    requests that each touch all their sectors.
    """
    offs_r = r + tl.arange(0, BLOCK_R)
    offs_c = c + tl.max_contiguous(tl.arange(0, BLOCK_C), RUN)
    ptrs = ptr + offs_r.to(tl.int64)[:, None] * strides[0] + offs_c.to(tl.int64)[None, :] * strides[1]
    return ptrs, (offs_r < R)[:, None] & (offs_c < C)[None, :]


@triton.jit
def _magnitude(x):
    """|x|, and inf for NaN: a plain maximum over these shows both."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def _scale_of(amax, stretch, LARGEST: tl.constexpr):
    """The scale for a largest magnitude, stretched by 2^margin."""
    amax = amax * stretch
    usable = (amax > 0.0) & (amax < float("inf"))
    amax = tl.where(usable, amax, LARGEST)
    return tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), TINY)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _to_fp8(x, inverse, DTYPE: tl.constexpr, LARGEST: tl.constexpr, EMULATE: tl.constexpr):
    """x * inverse in fp8: finite values saturate, the others become NaN, so that an overflow stays visible."""
    finite = tl.abs(x) < float("inf")
    q = tl.minimum(tl.maximum(tl.where(finite, x, 0.0) * inverse, -LARGEST), LARGEST)
    if EMULATE:
        return _round_to_fp8(q, finite, DTYPE)
    else:
        return tl.where(finite, q, float("nan")).to(DTYPE)


@triton.jit
def _round_to_fp8(q, finite, DTYPE: tl.constexpr):
    """What the hardware's cast does, from its definition: Triton's goes through fp16 on sm_89, and so rounds twice; the
    interpreter's (Triton 3.6 and 3.7) rounds ties away from zero, flushes subnormals and makes numbers of NaN. (It also
    reads NaN as a number, so NaN gets through a product on a GPU only.)"""
    MANTISSA: tl.constexpr = 3 if DTYPE.is_fp8e4nv() else 2
    LEAST: tl.constexpr = -6 if DTYPE.is_fp8e4nv() else -14  # exponent of the smallest normal number
    bits = q.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 255) - 127, LEAST)
    per_unit = ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)  # one over the last place
    # Adding 2^23 leaves no bits behind the point; fp32 addition rounds ties to even.
    units = (tl.abs(q) * per_unit + 8388608.0) - 8388608.0
    code = ((exponent - LEAST) << MANTISSA) + units.to(tl.int32)
    code = tl.where(finite, code | (((bits >> 31) & 1) << 7), 127)
    return code.to(tl.uint8).to(DTYPE, bitcast=True)


# R and C change places in a transposed view, and one of them is the number of tokens: instead of their values a kernel
# knows the divisors ALIGN_R and ALIGN_C, without which masks would be made, and bytes loaded and stored, one by one.
@triton.jit(do_not_specialize=["R", "C"])
def _amax_kernel(
    x_ptr,
    parts_ptr,
    R,
    C,
    x_strides,
    ALIGN_R: tl.constexpr,
    ALIGN_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The largest magnitude in each program's share of x, for the cast to reduce. Grid: (parts,)."""
    R, C = R // ALIGN_R * ALIGN_R, C // ALIGN_C * ALIGN_C
    tiles_c = tl.cdiv(C, BLOCK_C)
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, BLOCK_R) * tiles_c, tl.num_programs(0)):
        r, c = tile // tiles_c * BLOCK_R, tile % tiles_c * BLOCK_C
        x = load_tile(x_ptr, r, c, R, C, x_strides, BLOCK_R, BLOCK_C, False).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    tl.store(parts_ptr + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit(do_not_specialize=["R", "C", "count"])
def _cast_kernel(
    x_ptr,  # [R, C], any strides
    values_ptr,  # [R, C] in rows of ``pitch``
    scale_ptr,  # one number: read if there are no amaxes, else written
    amaxes_ptr,  # magnitudes whose largest makes the scale, or None
    amax_ptr,  # where that largest goes, or None
    parts_ptr,  # where each tile's magnitude goes, or None
    R,
    C,
    count,  # of amaxes
    stretch,  # 2^margin
    x_strides,
    pitch,
    LARGEST: tl.constexpr,
    ALIGN_R: tl.constexpr,
    ALIGN_C: tl.constexpr,
    EMULATE: tl.constexpr,  # the compiler's cast rounds twice (sm_89), or the interpreter's is wrong
    RUN: tl.constexpr,
    COUNT: tl.constexpr,  # a power of two, at least ``count``
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast x with one scale. Grid: (tiles of x,).

    Not with a transposed copy beside it: ptxas 12 assembles a kernel that stores an fp8 tile and its transpose so that
    the latter holds bytes of neither (triton-lang/triton#11111; seen on an H200 with x in fp32).
    """
    R, C = R // ALIGN_R * ALIGN_R, C // ALIGN_C * ALIGN_C
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    tile = tl.program_id(0)
    tiles_c = tl.maximum(tl.cdiv(C, BLOCK_C), 1)  # an empty x has one program, for the scale
    r, c = tile // tiles_c * BLOCK_R, tile % tiles_c * BLOCK_C
    if amaxes_ptr is None:
        scale = tl.load(scale_ptr)
    else:
        offs = tl.arange(0, COUNT)
        amax = tl.max(tl.load(amaxes_ptr + offs, mask=offs < count, other=0.0), 0)
        scale = _scale_of(amax, stretch, LARGEST)
        if tile == 0:
            tl.store(scale_ptr, scale)
            if amax_ptr is not None:
                tl.store(amax_ptr, amax)
    ptrs, mask = _pointers(x_ptr, r, c, R, C, x_strides, BLOCK_R, BLOCK_C, RUN)
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if parts_ptr is not None:
        tl.store(parts_ptr + tile, tl.max(tl.max(_magnitude(x), 1), 0))
    q = _to_fp8(x, _inverse(scale), DTYPE, LARGEST, EMULATE)
    ptrs, mask = _pointers(values_ptr, r, c, R, C, (pitch, 1), BLOCK_R, BLOCK_C, RUN)
    tl.store(ptrs, q, mask=mask)


@triton.jit(do_not_specialize=["R", "C"])
def _cast_rows_kernel(
    x_ptr,  # [R, C], any strides
    values_ptr,  # [R, C] in rows of ``pitch``
    scale_ptr,  # [R]
    amax_ptr,  # [R]
    R,
    C,
    x_strides,
    pitch,
    LARGEST: tl.constexpr,
    ALIGN_R: tl.constexpr,
    ALIGN_C: tl.constexpr,
    EMULATE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast x with a scale for each row; the second read of a program's rows hits the cache. Grid: (blocks of rows,)."""
    R, C = R // ALIGN_R * ALIGN_R, C // ALIGN_C * ALIGN_C
    r = tl.program_id(0) * BLOCK_R
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for c in range(0, C, BLOCK_C):
        x = load_tile(x_ptr, r, c, R, C, x_strides, BLOCK_R, BLOCK_C, False).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    amax = tl.max(largest, 1)
    scale = _scale_of(amax, 1.0, LARGEST)
    offs_r = r + tl.arange(0, BLOCK_R)
    tl.store(amax_ptr + offs_r, amax, mask=offs_r < R)
    tl.store(scale_ptr + offs_r, scale, mask=offs_r < R)
    inverse = _inverse(scale)[:, None]
    for c in range(0, C, BLOCK_C):
        ptrs, mask = _pointers(x_ptr, r, c, R, C, x_strides, BLOCK_R, BLOCK_C, RUN)
        x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        q = _to_fp8(x, inverse, values_ptr.dtype.element_ty, LARGEST, EMULATE)
        ptrs, mask = _pointers(values_ptr, r, c, R, C, (pitch, 1), BLOCK_R, BLOCK_C, RUN)
        tl.store(ptrs, q, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _push_kernel(
    parts_ptr,  # [count] magnitudes
    history_ptr,  # [length], newest first, or None
    amax_ptr,  # one number
    count,
    length,
    LENGTH: tl.constexpr,  # a power of two, at least ``length``
    BLOCK: tl.constexpr,
):
    """The largest of all parts, and that pushed in front of a history. Grid: (1,)."""
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(parts_ptr + offs, mask=offs < count, other=0.0))
    amax = tl.max(largest, 0)
    tl.store(amax_ptr, amax)
    if history_ptr is not None:
        place = tl.arange(0, LENGTH)
        older = tl.load(history_ptr + place - 1, mask=(place > 0) & (place < length), other=0.0)
        tl.debug_barrier()  # all is read before anything moves
        tl.store(history_ptr + place, tl.where(place == 0, amax, older), mask=place < length)
