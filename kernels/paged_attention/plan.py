"""How a call's work is cut into programs: what the host decides, and the plan that the device makes of it.

A plan is a list of *items* for each class of tiles (``config.py``). An item is one tile of rows and a range of keys;
every item is a program for each KV head. Long sequences are cut into several items, as many as make all programs about
equally long, and their partial results are merged. How many items there are follows from lengths that only the device
knows, but no more than ``max_items``: the launch's grid is constant, and programs behind the last item leave at once.
The bounds follow from shapes and from what the caller promises, and are close: an idle program still costs its start.

In fast mode a sequence that is longer than a fair share is cut into equal ranges of blocks of keys. In invariant mode,
where it may only be cut at multiples of the quantum, it is cut at all of them or not at all, and both give the same
bits. What was cut comes first, and a sequence's tiles with the most keys: short items at the end leave few idle.

``_plan_kernel`` (``plan_triton.py``) makes the plan; ``tests/support/paged_plan.py`` has its twin in plain Python.

Letters: T tokens of this step, S sequences, K KV heads, G query heads per KV head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from ..runtime import tuning
from .config import AttentionConfig, Problem, TileClass, tile_classes

HEADER = 8  # integers: how many items and merges there are
ITEM = 8  # q_start, q_len, seq_len, seq, first_row, kv_begin, kv_end, slot
MERGE = 8  # q_start, q_len, first_row, the first slot, how many slots
WHOLE, IDLE = -1, -2  # in place of a slot: the only item of its rows; nothing to do
_WAVES = 3  # items for each program that runs at once, so that the last ones leave few idle
_INVARIANT_SLOTS = 3  # partial results of whole tiles, for each item of a fair share


@dataclass(frozen=True)
class Section:
    """One class of a plan: bounds, and where its parts begin in the plan's data (in integers)."""

    tiles: TileClass
    balance: int  # fair shares that the work of a KV head is cut into; 0: nothing is split
    max_items: int
    max_merges: int
    max_slots: int
    part_rows: int  # of a tile, that any sequence fills
    header_at: int
    items_at: int
    merges_at: int
    end: int

    @property
    def config(self) -> AttentionConfig:
        return self.tiles.config


@functools.lru_cache(4096)
def sections(problem: Problem) -> tuple[Section, ...]:
    """The sections of a plan, one behind the other."""
    found: list[Section] = []
    at = 0
    for tiles in tile_classes(problem):
        config = tiles.config
        part_rows = config.block_m if problem.max_rows is None else min(config.block_m, problem.max_rows)
        balance = max(1, _WAVES * problem.slots * config.per_sm // problem.kv_heads)
        splits = _most_splits(problem, config)
        if splits == 1:
            balance = 0
        # A tile that is split has more than a fair share of the units, so there are no more of these than shares.
        max_merges = min(_most_tiles(problem, tiles, padding=False), balance)
        most = balance * (_INVARIANT_SLOTS * config.block_m // part_rows if config.quantum else 2)
        max_slots = min(most, max_merges * splits)
        max_items = _most_tiles(problem, tiles, padding=True)
        max_items += max_slots if config.quantum else min(max_slots, balance)
        items_at = at + HEADER
        merges_at = items_at + max_items * ITEM
        end = merges_at + max_merges * MERGE
        assert items_at % 8 == merges_at % 8 == 0, "plan_triton tells the compiler so"
        where = (at, items_at, merges_at, end)
        found.append(Section(tiles, balance, max_items, max_merges, max_slots, part_rows, *where))
        at = end
    return tuple(found)


tuning.also_forget.append(sections.cache_clear)


def _most_tiles(problem: Problem, tiles: TileClass, *, padding: bool) -> int:
    """No step within the problem's bounds has more tiles of this class, with or without the padding's."""
    block_m = tiles.config.block_m
    rows = problem.tokens * problem.group
    seqs = min(problem.seqs + padding, rows // max(problem.group, tiles.above + 1))
    if tiles.upto is not None and tiles.upto <= block_m:
        return seqs
    # A sequence's first row begins a tile, and each block_m-th behind it; a token begins no more than it has rows for.
    most = min(seqs + (rows - seqs) // block_m, problem.tokens * triton.cdiv(problem.group, block_m))
    if problem.max_rows is None or padding:
        return most
    return min(most, seqs * triton.cdiv(problem.max_rows, block_m))


def _most_splits(problem: Problem, config: AttentionConfig) -> int:
    """No tile is cut into more items than these."""
    keys = problem.max_keys if problem.max_seq_len is None else min(problem.max_keys, problem.max_seq_len)
    units = max_units(problem, config, keys)
    if units <= config.smallest_split:
        return 1
    return units if config.quantum else triton.cdiv(units, config.smallest_split)


def max_units(problem: Problem, config: AttentionConfig, keys: int) -> int:
    """No tile of a sequence of ``keys`` keys sees more units than these."""
    whole = triton.cdiv(keys, config.unit)
    if problem.window is None or problem.prefix:
        return whole
    reach = problem.window * (1 if problem.causal else 2) + triton.cdiv(config.block_m, problem.group) + 1
    return min(whole, triton.cdiv(reach, config.unit) + 1)
