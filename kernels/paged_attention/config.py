"""Which tiles attend to what: pure functions of chip, shapes and dtypes. Nothing is tuned while a model runs.

A tile's rows are consecutive query heads of one KV head, token after token: row r of a sequence is head r % G of its
token r // G, so that a tile is full whatever G is and each key is read once for all rows that share it.

Letters: T tokens of this step, S sequences, K KV heads, G = N / K query heads per KV head, H head size of q and k, Hv
of v.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..runtime import device, fences, tuning
from ..runtime.chips import described
from . import tuned

QUANTUM = 1024  # keys that invariant mode sums up by themselves: what a sequence is cut at, wherever it is
_SMALLEST_SPLIT = 256  # keys, in fast mode: less is over before its partial result is written
_INTERPRETED = 32  # keys, for both: small tests cross borders
# Of NVIDIA's pipelines. The look at the table is one; with four, every step waits for the tile that it asked for last.
_STAGES = 5


class Problem(NamedTuple):
    """What the host knows of a call. Bounds, None where it knows none, are powers of two: few in a server's life."""

    arch: str
    slots: int  # multiprocessors
    tokens: int
    seqs: int
    max_keys: int  # of a sequence, that its table can hold
    group: int
    kv_heads: int
    head_size: int
    v_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    window: int | None
    prefix: bool
    tree: bool
    invariant: bool
    min_rows: int | None  # of a sequence that has any: queries times ``group``
    max_rows: int | None
    max_seq_len: int | None
    forced: AttentionConfig | None = None  # by :func:`forced`
    fenced: bool = True  # as in runtime/fences.py: products of 64 rows and more may read what cp.async copied


@dataclass(frozen=True)
class AttentionConfig:
    """The tile of one launch: rows and keys per step of its loop; ``quantum`` keys are summed up apart, if not 0."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    quantum: int = 0
    split_keys: int = _SMALLEST_SPLIT  # in fast mode, the fewest that are worth a program of their own
    per_sm: int = 2  # programs that run on a multiprocessor at once

    def __str__(self) -> str:
        invariant = f"-quanta{self.quantum}" if self.quantum else ""
        return f"{self.block_m}x{self.block_n}-w{self.num_warps}-s{self.num_stages}{invariant}"

    @property
    def unit(self) -> int:
        """Keys that a sequence is cut at multiples of."""
        return self.quantum or self.block_n

    @property
    def smallest_split(self) -> int:
        """In units."""
        return 1 if self.quantum else max(1, self.split_keys // self.block_n)


class TileClass(NamedTuple):
    """The sequences with ``above`` < rows <= ``upto`` (None: no limit), and the tile that they run in."""

    config: AttentionConfig
    above: int
    upto: int | None


forced: tuning.Forced[AttentionConfig] = tuning.Forced()  # of every tile that a table may decide


def tile_classes(problem: Problem) -> tuple[TileClass, ...]:
    """The launches of a call."""
    if problem.invariant:
        return (TileClass(_invariant(problem), 0, None),)
    if problem.q_dtype == torch.float32 and problem.arch != device.INTERPRETER:
        return (TileClass(_fp32(problem), 0, None),)
    return tuple([TileClass(pick_tile(problem, rows), above, upto) for rows, above, upto in row_classes(problem)])


def row_classes(problem: Problem) -> tuple[tuple[int, int, int | None], ...]:
    """The launches of a call as (rows of the tile to ask for, above, upto): one for sequences of few rows, one for the
    others, unless one tile does for both.
    """
    least, most, long = (4, 16, 16) if problem.arch == device.INTERPRETER else (16, 64, 128)
    if problem.max_rows is not None and problem.max_rows <= most:
        return ((max(least, problem.max_rows), 0, None),)
    short = max(least, 1 << (problem.group - 1).bit_length())
    if short > most or (problem.min_rows or 0) > short:  # no sequence has as few rows
        return ((long, 0, None),)
    return (short, 0, short), (long, short, None)


def pick_tile(problem: Problem, rows: int) -> AttentionConfig:
    """The tile for up to ``rows`` rows: what was measured on the chip where it was and fits, what the rules say
    elsewhere.
    """
    if problem.forced is not None:
        tile = problem.forced
        if not problem.fenced and fences.asynchronous(problem.arch, tile.block_m, tile.num_warps):
            raise ValueError(fences.refusal(f"paged_attention: the tile {problem.forced}"))
        return problem.forced
    if problem.arch == device.INTERPRETER:
        return AttentionConfig(rows, 16, 4, 1, split_keys=_INTERPRETED)
    measured = tuning.lookup(problem.arch, tuned.OP, tuned.bucket(problem, rows), AttentionConfig)
    return measured if measured is not None and tuned.fits(problem, measured) else _tile(problem, rows)


def _tile(problem: Problem, rows: int) -> AttentionConfig:
    """A tile of up to ``rows``. Its other sizes are the largest whose builds (``paged_builds.py``) do not spill."""
    chip = described(problem.arch)
    wide = _wide(problem)
    loaded = _loaded(problem)
    if wide and tuned.mixed(problem):
        return _widest(problem, rows)
    if chip.matrix == "mfma":  # 64 KiB of shared memory
        if loaded and rows > 32:
            return AttentionConfig(64, 32, 4, 2)
        return AttentionConfig(rows, 32 if wide else 64, 8 if rows == 128 else 4, 1 if problem.tree else 2)
    rows = min(rows, _most_rows(problem))
    small = max(problem.head_size, problem.v_size) <= 64
    two_sizes = problem.head_size != problem.v_size  # on Blackwell they spill in two warps, and over 64 keys
    if rows <= 32:
        if chip.matrix == "mma" and wide:
            tile = AttentionConfig(rows, 64, 8, _STAGES, per_sm=1)
            fits = tuned.shared_bytes(problem, tile) <= chip.shared_per_block
            return tile if fits else AttentionConfig(rows, 16, 8, _STAGES)
        padded = any(size & (size - 1) for size in (problem.head_size, problem.v_size))  # they spill in four warps
        all_rows = rows == 32 and not problem.fenced  # prefill as well, with all that it may be asked for
        if chip.matrix == "tcgen05" and not wide:
            warps = 2 if padded and rows == 16 and not two_sizes else 4
            few = (all_rows and not small) or (padded and not problem.fenced)  # keys may come through registers
            return AttentionConfig(rows, 16 if few else 32, warps, _STAGES, per_sm=3)
        narrow = wide or (all_rows and problem.tree) or (chip.spills_early and _quantised(problem))
        warps = 8 if chip.spills_early and padded else 4
        return _within(problem, AttentionConfig(rows, 32 if narrow else 64, warps, _STAGES, per_sm=3), programs=2)
    if chip.matrix == "mma":
        tile = AttentionConfig(64 if loaded else rows, 64 if small and not loaded else 32, 8, _STAGES)
        return _within(problem, tile)
    if wide:
        most = 64 if problem.tree or problem.kv_dtype != problem.q_dtype else 128
        return AttentionConfig(min(rows, most), 32, 8, _STAGES, per_sm=1)
    blackwell = chip.matrix == "tcgen05"
    if problem.tree or _quantised(problem):
        return AttentionConfig(64, 64 if blackwell and not problem.tree else 32, 8, _STAGES, per_sm=1)
    # Where tcgen05 takes 64 rows, two programs with three stages hide more than one with five.
    stages = 3 if blackwell and rows == 64 else _STAGES
    keys = 32 if blackwell and (small or two_sizes) else 64
    return AttentionConfig(rows, keys, rows // 16, stages, per_sm=128 // rows)


def _fp32(problem: Problem) -> AttentionConfig:
    """IEEE fp32 has no tensor cores: few rows, so that operands stay in registers."""
    chip = described(problem.arch)
    keys = 16 if _wide(problem) or problem.kv_dtype != torch.float32 or chip.matrix == "mma" else 32
    if chip.matrix == "mfma":
        return AttentionConfig(16, keys, 4, 2)
    few = chip.matrix == "mma" and (_wide(problem) or (chip.spills_early and problem.kv_dtype == torch.float32))
    tile = AttentionConfig(16, keys, 4 if few else 8, _STAGES)
    return _within(problem, tile)


def _invariant(problem: Problem) -> AttentionConfig:
    """One tile for everything. In 16 bits 64 rows, the fewest that a warp group multiplies."""
    if problem.arch == device.INTERPRETER:
        return AttentionConfig(16, 16, 4, 1, _INTERPRETED)
    if problem.q_dtype == torch.float32:
        return dataclasses.replace(_fp32(problem), quantum=QUANTUM)
    if _wide(problem) and tuned.mixed(problem):
        return dataclasses.replace(_widest(problem, 32), quantum=QUANTUM)
    chip = described(problem.arch)
    if chip.matrix == "mfma":
        return AttentionConfig(64, 32, 4, 2, QUANTUM)
    rows = _most_rows(problem)
    if _loaded(problem):
        rows = min(rows, 64 if chip.matrix == "wgmma" else 32)
        return _within(problem, AttentionConfig(rows, 32, 8, _STAGES, QUANTUM))
    tile = AttentionConfig(min(64, rows), 32, 8 if chip.matrix == "mma" else 4, _STAGES, QUANTUM)
    return _within(problem, tile)


def _widest(problem: Problem, rows: int) -> AttentionConfig:
    """Wide heads, multiplied in fp32's format: products of 32 rows where a block holds them, or of 16."""
    if described(problem.arch).matrix == "mfma":
        return AttentionConfig(min(rows, 32), 32, 4, 2)
    tile = AttentionConfig(min(rows, 32), 32, 8, _STAGES, per_sm=1)
    fits = tuned.shared_bytes(problem, tile) <= described(problem.arch).shared_per_block
    return tile if fits else _within(problem, dataclasses.replace(tile, block_m=16))


def _most_rows(problem: Problem) -> int:
    """Products of 32 rows are not asynchronous: what cp.async copied needs no fence for them."""
    return 128 if problem.fenced else 32


def _within(problem: Problem, tile: AttentionConfig, programs: int = 1) -> AttentionConfig:
    """``tile`` with as many keys, then rows, as let so many programs fit a multiprocessor; ``per_sm`` follows."""
    chip = described(problem.arch)
    while tile.block_n > 16:
        used = tuned.shared_bytes(problem, tile)
        if used <= chip.shared_per_block and programs * (used + chip.shared_reserved) <= chip.shared_per_sm:
            break
        tile = dataclasses.replace(tile, block_n=tile.block_n // 2)
    while tile.block_m > 16 and tuned.shared_bytes(problem, tile) > chip.shared_per_block:
        tile = dataclasses.replace(tile, block_m=tile.block_m // 2)
    fit = chip.shared_per_sm // (tuned.shared_bytes(problem, tile) + chip.shared_reserved)
    return dataclasses.replace(tile, per_sm=max(1, min(tile.per_sm, fit)))


def _quantised(problem: Problem) -> bool:
    return problem.kv_dtype.itemsize == 1


def _loaded(problem: Problem) -> bool:
    """Whether a tile takes more registers than the plain one."""
    return _wide(problem) or problem.tree or problem.kv_dtype != problem.q_dtype


def _wide(problem: Problem) -> bool:
    return max(problem.head_size, problem.v_size) > 128
