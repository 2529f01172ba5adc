"""How many rows and columns a block of the norms' kernels has, and how many warps work on it.

A pure function of the width and the chip. It does not look at the number of rows, so a row's result does not depend on
how many are computed with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..runtime import device
from ..runtime.chips import described

_FORWARD = 16384  # columns of rows that a program of the forward kernel holds; wider ones are read twice
_BACKWARD = 8192  # the same of backward, whose sums of the parameters' gradients take registers beside the row
# Bytes of rows, if wider than that, up to which so many of those sums fit at all: for still wider rows they are a pass
# of their own. (Two of them for 16384 columns spill.)
_SUMS = {0: 32768, 1: 32768, 2: 24576}
_BLOCK_D = 4096  # of rows that are not held


@dataclass(frozen=True)
class NormConfig:
    """Blocks of [block_t, block_d]; ``per_sm``: programs of a persistent kernel for each multiprocessor, which are to
    be resident at once.
    """

    block_t: int
    block_d: int
    num_warps: int
    per_sm: int = 1

    def __str__(self) -> str:
        return f"{self.block_t}x{self.block_d}-w{self.num_warps}"


def _held(width: int, elements: int) -> tuple[int, int]:
    """(block_t, block_d) of whole rows, narrow ones together up to ``elements``. A draw of dropout takes 4 columns."""
    block_d = max(4, 1 << (width - 1).bit_length())
    return max(1, elements // block_d), block_d


def _warps(arch: str, elements: int, each: int) -> int:
    """For blocks of so many elements, ``each`` for a thread: at least 4 warps, at most 1024 threads."""
    lanes = 64 if arch.startswith("gfx") else 32
    return min(1024 // lanes, max(4, elements // (each * lanes)))


@functools.cache
def forward_config(arch: str, width: int) -> NormConfig:
    if arch == device.INTERPRETER:
        return NormConfig(4, _held(width, 0)[1] if width <= 512 else 512, 4)
    if width > _FORWARD:
        return NormConfig(1, _BLOCK_D, _warps(arch, _BLOCK_D, 16))
    block_t, block_d = _held(width, 2048)
    return NormConfig(block_t, block_d, _warps(arch, block_t * block_d, 16))


@functools.cache
def backward_config(arch: str, width: int) -> NormConfig:
    if arch == device.INTERPRETER:
        return NormConfig(4, _held(width, 0)[1] if width <= 512 else 512, 4)
    if width > _BACKWARD:
        return NormConfig(1, _BLOCK_D, _warps(arch, _BLOCK_D, 8))
    block_t, block_d = _held(width, 1024)
    chip = described(arch)
    num_warps = _warps(arch, block_t * block_d, 32 if chip.spills_early else 16)
    # With 16 for a thread ptxas halves the registers there, and spills.
    if chip.matrix == "mma" and not chip.spills_early:
        num_warps = max(num_warps, min(16, _warps(arch, block_t * block_d, 8)))
    return NormConfig(block_t, block_d, num_warps, per_sm=max(1, 16 // num_warps))


def sums_fit(arch: str, width: int, itemsize: int, sums: int) -> bool:
    """Whether backward adds ``sums`` (0 to 2) of the parameters' gradients up as rows of so many bytes pass."""
    if arch == device.INTERPRETER:
        return width <= 1024
    return width <= _BACKWARD or width * itemsize <= _SUMS[sums]


@functools.cache
def params_config(arch: str) -> NormConfig:
    """Of the parameters' gradients alone: blocks of columns, which need no whole rows."""
    return NormConfig(4, 64, 4) if arch == device.INTERPRETER else NormConfig(16, 256, 8, per_sm=4)


@functools.cache
def sum_config(arch: str) -> NormConfig:
    """Of the sum over programs; block_t counts these."""
    return NormConfig(4, 64, 4) if arch == device.INTERPRETER else NormConfig(64, 32, 4)
