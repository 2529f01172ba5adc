"""A wait by itself, where no product of this rank's waits for the rows that arrive."""

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.remote import wait_for_all


@triton.jit(do_not_specialize=["epoch"])
def _wait_kernel(wait_ptrs, epoch, PIECES: tl.constexpr, FLAGS: tl.constexpr, CLOCK: tl.constexpr):
    """Hold the stream until every rank's rows are here. ``wait_ptrs``, PIECES and FLAGS as in the GEMM. Grid: (1,)."""
    wait_for_all(wait_ptrs, epoch, PIECES, FLAGS, CLOCK)
