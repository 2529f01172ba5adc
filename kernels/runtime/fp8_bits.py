"""e4m3 by its bits, for chips whose compiler has no conversion: NVIDIA's below sm_89, and AMD's.

There Triton refuses pointers to ``float8_e4m3fn``, so that a kernel gets ``tensor.view(torch.uint8)`` and calls these.
The format is Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), table 1: a sign, four bits of
exponent with bias 7, three of mantissa; no infinity, one NaN (all bits set but the sign), largest number 448.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_bits_to_fp16(bits):
    """What the e4m3 numbers with these bits (uint8) stand for, in fp16: exact, subnormal numbers included; NaN is NaN.

    Shifted to fp16's places, the exponent reads as if its bias were fp16's 15, for subnormal numbers too: 2^-8 times
    the number.
    """
    wide = bits.to(tl.uint16)
    size = (wide & 0x7F) << 7
    size = size | ((size + 0x80) & 0x4000)  # carries out of the exponent from e4m3's NaN only, and makes it fp16's
    return (size | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def fp32_to_e4m3_bits(x):
    """fp32 rounded to e4m3, ties to even, as bits in uint8. Saturates at +-448, infinity too; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    finite = tl.minimum(size, 0x43E00000)  # 448
    # 20 of 23 bits of mantissa go; the exponent's bias was 127.
    normal = ((finite + 0x7FFFF + ((finite >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9, which is the unit in the last place of numbers from 2^14 on.
    shifted = finite.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(finite < 0x3C800000, subnormal, normal)
    rounded = tl.where(size > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
