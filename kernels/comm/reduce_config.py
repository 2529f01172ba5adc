"""How the reducing kernels cut their rows into programs and columns, and how a slot is laid out for them.

All pure functions of shapes and of the chip: ranks that call alike agree without asking each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..runtime import device
from ..runtime.chips import described
from ..runtime.signals import CHUNKS

WIDEST = 16384  # columns of a row that a program holds
_INTERPRETED_PROGRAMS = 3  # so that small tests have several rows to a program, and programs without any
# Bytes that a rank stores in the time that another round takes: 300 GB/s for 4 us, not measured.
_ROUND_BYTES = 1_200_000


class Norm(NamedTuple):
    """What follows the sum of a row: RMSNorm, or with ``centred`` LayerNorm, as ``kernels/norm`` defines them."""

    weight: torch.Tensor | None = None  # [D]
    bias: torch.Tensor | None = None  # [D], of LayerNorm
    eps: float = 1e-6
    weight_offset: float = 0.0
    centred: bool = False


@dataclass(frozen=True)
class ReduceConfig:
    """A program holds a row of at most ``block_d`` columns and the parts of ``together`` ranks at once."""

    block_d: int
    num_warps: int
    together: int

    def __str__(self) -> str:
        return f"{self.block_d}-w{self.num_warps}-r{self.together}"


@functools.cache
def pick_config(arch: str, width: int, ranks: int, itemsize: int, scattered: bool) -> ReduceConfig:
    """16 elements of a row for each thread, 8 if nothing is sent on, and as many ranks' parts as 16 registers hold.

    With more ptxas spills addresses to fit one more program on a multiprocessor, under one Triton or another.
    """
    block_d = max(4, 1 << (width - 1).bit_length())
    lanes = 64 if arch.startswith("gfx") else 32
    most_warps = 16 if arch != device.INTERPRETER and described(arch).spills_early else 1024 // lanes
    num_warps = min(most_warps, max(4, block_d // ((8 if scattered else 16) * lanes)))
    registers = max(1, block_d // (num_warps * lanes) * itemsize // 4)  # of a thread, for one rank's part
    most = max(1, min(8, 16 // registers))
    return ReduceConfig(block_d, num_warps, max(n for n in range(1, most + 1) if ranks % n == 0))


def flagged_programs(arch: str) -> int:
    """Programs of a kernel in which every program has flags of its own: one chunk of the pad each.

    It depends on no size: exchanges of one channel, with whatever rows, raise the same flags.
    """
    return _INTERPRETED_PROGRAMS if arch == device.INTERPRETER else CHUNKS


def pick_shots(tokens: int, width: int, itemsize: int, ranks: int) -> int:
    """1 or 2: in how many rounds to reduce [T, D] over all ranks.

    In one round a rank stores (R - 1) T D elements with its peers, in two 2 (R - 1) T D / R and waits twice.
    """
    saved = tokens * width * itemsize * (ranks - 1) * (ranks - 2) / ranks
    return 1 if saved <= _ROUND_BYTES else 2


def rows_per_owner(tokens: int, ranks: int, programs: int) -> int:
    """Rows that an owner's part of a slot has room for where the owners of a program's rows take turns."""
    rows_each = -(-tokens // programs)  # of a program
    return -(-rows_each // ranks) * programs


def slot_shape(tokens: int, width: int, ranks: int, shots: int, programs: int) -> tuple[int, ...]:
    """Of a slot for ``all_reduce_rmsnorm``: addends by source and, after them, with two shots, the sums.

    One shot: [R, T, D]. Two: [R * n + T, D], n rows of addends from each source (:func:`rows_per_owner`).
    """
    if shots == 1:
        return ranks, tokens, width
    return ranks * rows_per_owner(tokens, ranks, programs) + tokens, width


def gathered_slot_shape(tokens: int, width: int, ranks: int) -> tuple[int, int]:
    """Of a slot whose addends a GEMM sends, [R, ceil(T/R), D] by source, and after them the sums, [T, D]."""
    return ranks * -(-tokens // ranks) + tokens, width
