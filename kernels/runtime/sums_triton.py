"""Terms of sums over the lanes of a warp."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b):
    """a * b in fp32, rounded: a term for ``tl.sum``.

    Of a plain product the compiler makes one instruction with the first addition, in each lane with the lane's own
    term. The lanes of one sum then hold results that differ in the last place, and which of them is stored is left to
    the hardware.
    """
    return tl.fma(a, b, 0.0)
