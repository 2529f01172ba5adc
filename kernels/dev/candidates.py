"""Configurations worth measuring for a GEMM, the most promising first. For ``shardfuse bench tune``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product

from ..linear.config import pick_config
from ..linear.gemm import Gemm, GemmConfig
from ..linear.tuned import fits
from ..runtime import cost, device
from ..runtime.chips import CHIPS

SMALL_M = 64  # rows up to which operands are worth swapping, and loading through pointers where TMA could
SHORTEST_PART = 256  # of a split K: shorter ones cost more in partial products than they gain
VARIANT_PENALTY = 0.05
_GROUPS = (8, 4, 16)


def candidates(arch: str, gemm: Gemm) -> list[GemmConfig]:
    """Every configuration that fits by arithmetic, the most promising first; pick_config's is among them.

    In the order of the cost model's times. The model hardly tells apart the variants of one tile (pipeline, warps,
    order of tiles), so each variant after a tile's first waits behind tiles that are VARIANT_PENALTY slower: the first
    dozen are not all the same tile. The interpreter's, which nobody times, come in any order.

    Raises ValueError for a chip that ``chips.py`` does not describe.
    """
    if arch == device.INTERPRETER:
        return list(dict.fromkeys([pick_config(arch, gemm), *_interpreted(gemm)]))
    if arch not in CHIPS:
        raise ValueError(
            f"nothing is known of {arch}: known are {', '.join(CHIPS)}; describe it in kernels/runtime/chips.py"
        )
    chosen = pick_config(arch, gemm)
    times = {config: predicted_us(arch, gemm, config) for config in (chosen, *_fitting(arch, gemm))}
    tiles: dict[tuple[int, ...], list[GemmConfig]] = {}
    for config in times:
        tile = (config.block_m, config.block_n, config.split_k, config.swap, config.use_tma)
        tiles.setdefault(tile, []).append(config)
    ranks: dict[GemmConfig, float] = {}
    for variants in tiles.values():
        good = min(times[config] for config in variants) * (1 + VARIANT_PENALTY)
        variants.sort(key=lambda config: (times[config] > good, _preference(gemm, config)))
        ranks |= {config: times[config] * (1 + VARIANT_PENALTY * place) for place, config in enumerate(variants)}
    return sorted(ranks, key=lambda config: (ranks[config], str(config), config.group_m))


def _fitting(arch: str, gemm: Gemm) -> Iterator[GemmConfig]:
    return (config for config in _grid(arch, gemm) if fits(arch, gemm, config))


def _preference(gemm: Gemm, config: GemmConfig) -> tuple[object, ...]:
    """What experience prefers among variants of one tile, which cost the same in the model."""
    accumulators = config.block_m * config.block_n // config.num_warps
    return (
        config.block_k * gemm.dtype.itemsize % 128 != 0,  # rows of tiles in whole cache lines
        accumulators > 64 * 32,  # registers are left for the epilogue
        config.num_stages < 3,  # a load is always under way
        -config.block_k * config.num_stages,  # bytes in flight
        _GROUPS.index(config.group_m) if config.group_m in _GROUPS else len(_GROUPS),
    )


def predicted_us(arch: str, gemm: Gemm, config: GemmConfig) -> float:
    """The cost model's time."""
    return cost.predict(CHIPS[arch], gemm, config).time_us


def _grid(arch: str, gemm: Gemm) -> Iterator[GemmConfig]:
    """Tiles, pipelines and splits in all combinations that make sense for the operands."""
    for (block_m, block_n), (block_k, stages), warps, splits in product(
        _tiles(gemm), _pipelines(arch, gemm), (4, 8), _splits(arch, gemm)
    ):
        if block_m * block_n <= 64 * 64 and warps == 8:  # too little for eight warps to share
            continue
        groups = _GROUPS if _cdiv(gemm.M, block_m) > min(_GROUPS) else _GROUPS[:1]
        for swap, use_tma, epilogue_subtile, group in product(
            _swaps(arch, gemm, block_m, block_n), _loads(arch, gemm), _may_subtile(gemm, block_n, splits), groups
        ):
            if epilogue_subtile and not use_tma and _takes_tma(arch, gemm):  # halves are for TMA's tiles on the way out
                continue
            yield GemmConfig(block_m, block_n, block_k, warps, stages, use_tma, group, splits, epilogue_subtile, swap)


def _tiles(gemm: Gemm) -> list[tuple[int, int]]:
    if gemm.fp32 and gemm.precision == "ieee":
        return [(32, 64), (64, 64), (64, 128), (128, 64)]
    tall = [(64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128)]
    if gemm.layout == "tn" or gemm.M > SMALL_M:
        return tall
    rows = max(16, 1 << (gemm.M - 1).bit_length())
    # Narrow ones occupy the chip without a split, whose sum is a second launch.
    return [(m, n) for m, n in product({rows, 64}, (16, 32, 64, 128, 256))]


def _pipelines(arch: str, gemm: Gemm) -> list[tuple[int, int]]:
    """(block_k, num_stages): deeper in shorter blocks."""
    if gemm.fp32:
        return [(16, 2), (16, 3), (32, 2), (32, 3)]
    if arch.startswith("gfx"):
        return [(32, 2), (64, 2), (128, 2)]
    return [(32, 3), (32, 4), (32, 5), (64, 2), (64, 3), (64, 4), (64, 5), (128, 2), (128, 3), (128, 4), (128, 5)]


def _splits(arch: str, gemm: Gemm) -> list[int]:
    """Parts of K: only where the tiles could leave multiprocessors idle, and never in a sum of several products."""
    tiles = _cdiv(gemm.M * gemm.N, 128 * 128)
    if gemm.combine == "chained" or gemm.row_invariant or tiles >= 2 * CHIPS[arch].sms:
        return [1]
    longest = gemm.K // SHORTEST_PART
    return [1, *(splits for splits in (2, 3, 4, 6, 8, 16) if splits <= longest)]


def _swaps(arch: str, gemm: Gemm, block_m: int, block_n: int) -> tuple[bool, ...]:
    """Hopper's matrix instruction has at least 64 rows: swap what has fewer, where the other side has them."""
    if gemm.layout == "tn" or gemm.M > SMALL_M:
        return (False,)
    if CHIPS[arch].asynchronous and min(block_m, block_n) < 64:
        return (block_m < 64 <= block_n,)
    return (False, True)


def _may_subtile(gemm: Gemm, block_n: int, splits: int) -> tuple[bool, ...]:
    """Whether the epilogue may take half a tile at a time; a split product has none, a gated one takes all of it."""
    return (False, True) if gemm.combine != "gated" and block_n >= 128 and splits == 1 else (False,)


def _loads(arch: str, gemm: Gemm) -> tuple[bool, ...]:
    """By TMA where it can take the operands. A kernel of few rows ends soon after it has built its tensor maps, one
    after the other before its first load, so there pointers compete.
    """
    takes_tma = _takes_tma(arch, gemm)
    return (True, False) if takes_tma and gemm.layout != "tn" and gemm.M <= SMALL_M else (takes_tma,)


def _takes_tma(arch: str, gemm: Gemm) -> bool:
    ieee = gemm.fp32 and gemm.precision == "ieee"
    return CHIPS[arch].asynchronous and gemm.aligned and not ieee


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _interpreted(gemm: Gemm) -> list[GemmConfig]:
    """A few unlike each other, to go the whole way with."""
    config = GemmConfig(16, 32, 32, 4, 2, use_tma=gemm.aligned)
    found = [config, dataclasses.replace(config, use_tma=False, swap=gemm.layout != "tn")]
    if gemm.combine != "chained" and not gemm.row_invariant:
        found.append(dataclasses.replace(config, split_k=2))
    return found
