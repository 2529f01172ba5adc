"""Scores of keys in base 2, and which keys a row sees."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softcap(s, cap):
    """cap * tanh(s / cap). Near 0, where the exponential form would lose all digits, by tanh's power series."""
    x = s * (1.0 / cap)
    y = x * x
    near = s * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return tl.where(y < 0.02, near, cap * (1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))))


@triton.jit
def sees(offs_n, kv_end, position, context, prefix, window, tree_ptrs, tree_width, CAUSAL: tl.constexpr):
    """Which keys [BLOCK_N] the rows at ``position`` [BLOCK_M] may see, [BLOCK_M, BLOCK_N]."""
    keys = offs_n[None, :]
    seen = keys < kv_end
    if tree_ptrs is not None:
        node = keys - context
        known = tl.load(tree_ptrs + node, mask=seen & (node >= 0) & (node < tree_width), other=0)
        seen = seen & ((node < 0) | (known != 0))
    elif CAUSAL:
        before = keys <= position[:, None]
        if prefix is not None:
            before = before | (keys < prefix)
        seen = seen & before
    if window is not None:
        seen = seen & (keys > position[:, None] - window)
        if not CAUSAL:
            seen = seen & (keys < position[:, None] + window)
    return seen


@triton.jit
def scores(s, scale, softcap, slopes, position, offs_n):
    """Scores in base 2 of the products ``s``."""
    if softcap is not None:
        s = _softcap(s * scale, softcap) * LOG2E
    else:
        s = s * scale  # log2(e) is in it
    if slopes is not None:
        distance = tl.abs(position[:, None] - offs_n[None, :]).to(tl.float32)
        s = s - (slopes * LOG2E)[:, None] * distance
    return s
