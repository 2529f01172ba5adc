"""What a kernel tells the compiler of strides and columns, so that its accesses are vectors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_vectors(first_ptr, second_ptr, third_ptr, BLOCK: tl.constexpr):
    """0 .. BLOCK - 1, of which a thread takes no more in a row than are 16 bytes of the widest of three tensors.

    Where all are as wide that is what the compiler does. Else it would take as many as are 16 bytes of the narrowest:
    32 or 64 of another, by requests that each touch all their sectors, and through shared memory to where they are
    stored.
    """
    first: tl.constexpr = first_ptr.dtype.element_ty.primitive_bitwidth
    second: tl.constexpr = second_ptr.dtype.element_ty.primitive_bitwidth
    third: tl.constexpr = third_ptr.dtype.element_ty.primitive_bitwidth
    wider: tl.constexpr = first if first > second else second
    widest: tl.constexpr = wider if wider > third else third
    unlike: tl.constexpr = first != second or second != third
    columns = tl.arange(0, BLOCK)  # the compiler keeps what it is told of an operation, not of a parameter
    if unlike and BLOCK * widest >= 128:
        columns = tl.max_contiguous(columns, 128 // widest)
    return columns


@triton.jit
def multiple(stride, ALIGN: tl.constexpr):
    """``stride``, which is a multiple of ALIGN (``vectors.told``)."""
    if ALIGN > 1:
        return stride // ALIGN * ALIGN
    else:
        return stride
