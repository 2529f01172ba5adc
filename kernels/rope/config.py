"""Tiles of heads for kernels that hold some rows of q, k and v at once: those of this folder and of ``kv_cache/``."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ..runtime import device

_TILE_BYTES = 8192  # 64 for each thread of four warps: four loads of 16 bytes
NUM_WARPS = 4


@dataclass(frozen=True)
class TileConfig:
    """The tiles of one launch, tokens x heads: those of q, and those of k (and of v)."""

    block_tq: int
    block_n: int
    block_tk: int
    block_k: int

    def __str__(self) -> str:
        return f"{self.block_tq}x{self.block_n}-{self.block_tk}x{self.block_k}-w{NUM_WARPS}"


def pick_config(arch: str, heads: int, kv_heads: int, *, row: int, itemsize: int) -> TileConfig:
    """Tiles of about ``_TILE_BYTES``, for rows of up to ``row`` elements that are handled at once; no heads: 0.

    As many heads of one token as there are, since they lie side by side and share the token's slot and tables; more
    tokens where heads are few. An eighth of a tile's heads may be idle lanes.
    """
    rows = 8 if arch == device.INTERPRETER else max(_TILE_BYTES // (triton.next_power_of_2(row) * itemsize), 1)
    block_n, block_k = (_head_block(n, rows) for n in (heads, kv_heads))
    return TileConfig(rows // block_n, block_n, rows // block_k, block_k)


def _head_block(heads: int, most: int) -> int:
    """The largest power of two up to ``most`` whose blocks have few idle lanes at their end."""
    block = most
    while block > 1 and 8 * (triton.cdiv(heads, block) * block - heads) > heads:
        block //= 2
    return block
