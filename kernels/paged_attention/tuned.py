"""What ties a tile to the tables of measured configurations: its bucket, and whether an entry still fits.

Invariant mode asks no table, nor does fp32: one rule gives a chip one tile for everything there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..runtime.chips import CHIPS
from ..runtime.dtypes import CACHE_NAMES

if TYPE_CHECKING:
    from .config import AttentionConfig, Problem

OP = "paged_attention"
SOURCES = tuple(f"paged_attention/{name}.py" for name in ("launch", "plan", "plan_triton", "triton"))
_REGISTERS = 160  # fp32 per thread of scores and sums; more leave the rest too few of 255


def bucket(problem: Problem, rows: int) -> str | None:
    """The key under which the tile for up to ``rows`` rows is measured; None where no table may decide.

    How many tokens and keys there are is not in it: a server's steps would change tiles from one to the next.
    """
    if problem.invariant or problem.q_dtype == torch.float32:
        return None
    parts = [f"r{rows}", f"h{problem.head_size}"]
    parts += [f"v{problem.v_size}"] if problem.v_size != problem.head_size else []
    parts.append(CACHE_NAMES[problem.q_dtype])
    parts += [f"over_{CACHE_NAMES[problem.kv_dtype]}"] if problem.kv_dtype != problem.q_dtype else []
    masks = {"window": problem.window is not None, "tree": problem.tree, "full": not problem.causal}
    return "-".join([*parts, *(name for name, there in masks.items() if there)])


def fits(problem: Problem, config: AttentionConfig) -> bool:
    """Whether ``config`` can run on the problem's chip, by arithmetic: block sizes, accumulators, shared memory.

    What the compiler makes of it (spills above all) only the compiler knows. On a chip that nobody described, True.
    """
    sizes = (config.block_m, config.block_n, config.num_warps)
    if config.quantum or any(size & (size - 1) for size in sizes):
        return False
    chip = CHIPS.get(problem.arch)
    if chip is None:
        return True
    if min(sizes[:2]) < 16:  # tl.dot's own limit
        return False
    head, width = (max(16, 1 << (size - 1).bit_length()) for size in (problem.head_size, problem.v_size))
    registers = config.block_m * (config.block_n + width) / (config.num_warps * chip.warp_size)
    # Of the stages one is the look at the table, and one is computed on; matrix instructions that run asynchronously
    # keep that one too.
    stages = config.num_stages - (2 if problem.arch in ("sm_90", "sm_100") and config.block_m >= 64 else 3)
    shared = max(stages, 0) * config.block_n * (head + width) * problem.kv_dtype.itemsize
    shared += config.block_m * head * problem.q_dtype.itemsize
    return registers <= _REGISTERS and shared <= chip.shared_per_block
