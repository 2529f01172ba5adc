"""The tile and pipeline that a GEMM launch runs with.

``pick_config`` is a pure function of chip and :class:`Gemm`: what was measured on the chip (``tuning.py``) where there
is a measurement, the rules below elsewhere. Nothing is tuned while a model runs, and all ranks agree without asking.
"""

from __future__ import annotations

import dataclasses
import functools

from ..runtime import fences, tuning
from ..runtime.chips import INTERPRETER, Chip, described
from . import tuned
from .gemm import Gemm, GemmConfig

forced: tuning.Forced[GemmConfig] = tuning.Forced()  # of every GEMM


def pick_config(arch: str, gemm: Gemm) -> GemmConfig:
    """The configuration for ``gemm`` on ``arch``."""
    config = forced.config or _pick(arch, gemm, True)
    if tuned.needs_fence(arch, gemm, config) and not fences.fenced(arch):  # asked only where it matters
        if forced.config is not None:
            raise ValueError(fences.refusal(f"a product in tiles of {config}"))
        config = _pick(arch, gemm, False)
    assert config.split_k == 1 or _may_split(gemm), "chained or remote products are not split"
    return config


@functools.lru_cache(4096)
def _pick(arch: str, gemm: Gemm, fenced: bool) -> GemmConfig:
    """Blocks are the largest whose accumulators, epilogue and pipeline fit the chip without a spill."""
    if arch == INTERPRETER:
        config = GemmConfig(32, 32, 32, 4, 2, use_tma=gemm.aligned)
        if gemm.row_invariant or (gemm.layout != "tn" and gemm.M > 16):
            return config
        split = gemm.K > 64 and _may_split(gemm)
        return dataclasses.replace(config, swap=gemm.layout != "tn", split_k=2 if split else 1)
    measured = tuning.lookup(arch, tuned.OP, tuned.bucket(gemm), GemmConfig)
    if measured is not None and tuned.fits(arch, gemm, measured):
        return measured
    chip = described(arch)
    if gemm.fp32:
        return _fp32(chip, gemm, fenced)
    if chip.asynchronous:
        return _hopper(chip, gemm, fenced)
    return _through_pointers(chip, gemm)


tuning.also_forget.append(_pick.cache_clear)


def _fp32(chip: Chip, gemm: Gemm, fenced: bool) -> GemmConfig:
    crowded = gemm.combine == "gated" or gemm.reads > 0  # more than one tile of fp32 in registers
    if gemm.precision == "ieee":  # no tensor cores: plain FMAs
        narrow = crowded or "preact" in gemm.epilogue or (chip.spills_early and "row_sum" in gemm.epilogue)
        return GemmConfig(64, 32 if narrow else 64, 16, 8, 2, use_tma=False)
    # Beside TMA, Triton gives tf32 operands that are turned in registers one buffer, which tcgen05 may still read.
    aligned = gemm.aligned and (chip.matrix == "wgmma" or gemm.layout == "nt")
    if chip.asynchronous and not aligned and not fenced:
        return GemmConfig(32, 32 if crowded else 128, 32, 4, 2, use_tma=False)
    if chip.asynchronous:
        width = 64 if crowded else 128
        return GemmConfig(128, width, 32, 8, 3 if chip.matrix == "wgmma" else 2, use_tma=aligned)
    if not gemm.aligned and chip.spills_early and "row_sum" in gemm.epilogue:
        crowded = True
    return GemmConfig(64, 32 if crowded else 128 if gemm.aligned else 64, 32, 4, 2, use_tma=False)


def _hopper(chip: Chip, gemm: Gemm, fenced: bool) -> GemmConfig:
    """16-bit and fp8 operands on chips with TMA."""
    line = 128 // gemm.dtype.itemsize  # elements of a swizzled row of shared memory
    if not gemm.aligned:
        crowded = gemm.combine == "gated" or gemm.reads > 0
        if not fenced:  # rows of an aligned pitch that TMA does not take, as of a transposed view, are copied ahead
            return GemmConfig(32, 32 if crowded else 64, line, 4, 3, use_tma=False)
        return GemmConfig(128, 32 if crowded else 64, line, 8, 3, use_tma=False)
    if gemm.layout != "tn" and gemm.M <= 64 and not gemm.row_invariant:
        # Weights stream through once: the blocks hold as many bytes in flight as fit, and all multiprocessors pull.
        gated = gemm.combine == "gated"
        warps = 8 if chip.matrix == "tcgen05" and "preact" in gemm.epilogue and not gated else 4  # or it may spill
        config = GemmConfig(
            max(16, _power_of_two(gemm.M)), 64, 2 * line, warps, 4 if gated else 5, use_tma=True, swap=True
        )
        return dataclasses.replace(config, split_k=_splits(chip, config, gemm))
    epilogue_subtile = _wants_subtile(chip, gemm)
    stages = 4 if chip.matrix == "wgmma" else 3
    narrow = GemmConfig(128, 128, line, 8, stages, use_tma=True, epilogue_subtile=epilogue_subtile)
    if gemm.row_invariant or _tiles(narrow, gemm) < 2 * chip.sms or _wants_narrow(chip, gemm):
        return dataclasses.replace(narrow, split_k=_splits(chip, narrow, gemm))
    # Half a tile on its way out leaves room for a fourth stage, which row sums need for the tile that they read.
    if chip.matrix == "wgmma" and not gemm.reads and "row_sum" not in gemm.epilogue:
        return GemmConfig(128, 256, line, 8, 4, use_tma=True, epilogue_subtile=True)
    return GemmConfig(128, 256, line, 8, 3, use_tma=True, epilogue_subtile=epilogue_subtile)


def _wants_subtile(chip: Chip, gemm: Gemm) -> bool:
    """Whether the epilogue on a whole tile would spill. Two products leave too little shared memory for halves."""
    if gemm.combine == "gated":
        return False
    heavy = bool(gemm.reads) or not gemm.out_aligned
    return heavy or (chip.matrix == "tcgen05" and bool(set(gemm.epilogue) - {"bias", "row_sum"}))


def _wants_narrow(chip: Chip, gemm: Gemm) -> bool:
    """Whether 128 x 256 accumulators would leave too few registers even for an epilogue on half a tile."""
    if gemm.combine == "gated" or gemm.reads == 2 or gemm.fp32_sums or not gemm.out_aligned:
        return True
    return chip.matrix == "tcgen05" and "accumulate" in gemm.epilogue


def _through_pointers(chip: Chip, gemm: Gemm) -> GemmConfig:
    """16-bit operands on chips without TMA."""
    amd = chip.matrix == "mfma"
    if gemm.layout != "tn" and gemm.M <= 64 and not gemm.row_invariant:
        warps = 8 if chip.spills_early and gemm.combine == "gated" else 4
        config = GemmConfig(32, 64, 64, warps, 2 if amd else 4, use_tma=False)
        return dataclasses.replace(config, split_k=_splits(chip, config, gemm))
    # Two products in one tile, unaligned rows and two factors' gradients need the registers of half a tile.
    width = 64 if gemm.combine == "gated" or not gemm.aligned or gemm.reads == 2 else 128
    if gemm.combine == "gated" and (gemm.remote or not gemm.aligned):
        width = 32
    if gemm.reads == 2 and not gemm.aligned and not amd:
        width = 32
    halves = gemm.reads > 0 and "accumulate" not in gemm.epilogue
    if chip.spills_early and gemm.combine != "gated":
        halves = not gemm.out_aligned if not gemm.reads else gemm.reads == 1 and gemm.writes > 1
        halves |= gemm.remote == "gather" and gemm.pairs > 1 and gemm.writes > 1
    epilogue_subtile = gemm.remote == "send" or halves
    config = GemmConfig(
        128, width, 64 if amd else 32, 8, 2 if amd else 4, use_tma=False, epilogue_subtile=epilogue_subtile
    )
    return dataclasses.replace(config, split_k=_splits(chip, config, gemm))


def _splits(chip: Chip, config: GemmConfig, gemm: Gemm) -> int:
    """Into how many parts to cut K so that few tiles still occupy the chip.

    Each part costs its tile a trip through memory, so it must be long enough to be worth one.
    """
    if gemm.row_invariant or not _may_split(gemm):
        return 1
    longest = min(8, gemm.K // (8 * config.block_k))
    return max(1, min(longest, chip.sms // max(1, _tiles(config, gemm))))


def _may_split(gemm: Gemm) -> bool:
    """Chained pairs share one pass over their Ks; what is sent must be whole; and behind a product that waits for its
    peers no second kernel may want to be loaded before these have been sent to.
    """
    return gemm.combine != "chained" and not gemm.remote


def _tiles(config: GemmConfig, gemm: Gemm) -> int:
    return -(-gemm.M // config.block_m) * -(-gemm.N // config.block_n)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else 1
