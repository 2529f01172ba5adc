"""What ties a tile to the tables of measured configurations: its bucket, and whether an entry still fits.

Invariant mode asks no table, nor does fp32: one rule gives a chip one tile for everything there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..runtime import device, fences
from ..runtime.chips import described
from ..runtime.dtypes import CACHE_NAMES

if TYPE_CHECKING:
    from .config import AttentionConfig, Problem

OP = "paged_attention"
SOURCES = tuple(f"paged_attention/{name}.py" for name in ("launch", "plan", "plan_triton", "triton"))
_OTHER = 1024  # bytes of shared memory: pages, and rows' sums on their way from warp to warp
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

    What the compiler makes of it (spills above all) only the compiler knows.
    """
    sizes = (config.block_m, config.block_n, config.num_warps)
    if config.quantum or any(size & (size - 1) for size in sizes):
        return False
    if problem.arch == device.INTERPRETER:
        return True
    if min(sizes[:2]) < 16:  # tl.dot's own limit
        return False
    if not problem.fenced and fences.asynchronous(problem.arch, config.block_m, config.num_warps):
        return False
    chip = described(problem.arch)
    _, width = _padded(problem)
    registers = config.block_m * (config.block_n + width) / (config.num_warps * chip.warp_size)
    return registers <= _REGISTERS and shared_bytes(problem, config) <= chip.shared_per_block


def shared_bytes(problem: Problem, config: AttentionConfig) -> int:
    """Shared memory of one block, an estimate: the pipeline's keys and values, queries and scores."""
    head, width = _padded(problem)
    # Of the stages one is the look at the table, and one is computed on; matrix instructions that run asynchronously
    # keep that one too.
    asynchronous = fences.asynchronous(problem.arch, config.block_m, config.num_warps)
    stages = max(0, config.num_stages - (2 if asynchronous else 3))
    keys = stages * config.block_n * (head + width) * problem.kv_dtype.itemsize
    itemsize = 4 if mixed(problem) else problem.q_dtype.itemsize
    # Synchronous products get the scores in another layout than they come in, through shared memory.
    scores = _OTHER + (0 if asynchronous else config.block_m * config.block_n * itemsize)
    return keys + config.block_m * head * itemsize + scores


def mixed(problem: Problem) -> bool:
    """Whether both are 16-bit formats, and others: they are multiplied in fp32's, which holds both."""
    return problem.kv_dtype.itemsize == 2 == problem.q_dtype.itemsize and problem.kv_dtype != problem.q_dtype


def _padded(problem: Problem) -> tuple[int, int]:
    """The head sizes of q and k, and of v, as a tile holds them."""
    return (
        max(16, 1 << (problem.head_size - 1).bit_length()),
        max(16, 1 << (problem.v_size - 1).bit_length()),
    )
