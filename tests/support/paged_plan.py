"""The twin of ``_plan_kernel`` (``paged_attention/plan_triton.py``) in plain Python: the same plan, on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from shardfuse.kernels.paged_attention.config import AttentionConfig, Problem
from shardfuse.kernels.paged_attention.plan import IDLE, ITEM, MERGE, WHOLE, Section, max_units, sections


class _Tile(NamedTuple):
    begin: int  # in units
    end: int
    last_key: int


def make_plan_on_host(
    problem: Problem, seq_lens: list[int], query_start_loc: list[int], prefix_lens: list[int] | None
) -> torch.Tensor:
    """What ``_plan_kernel`` writes, [end of the last section] int32; entries that it leaves alone are 0."""
    data = torch.zeros(sections(problem)[-1].end, dtype=torch.int32)
    starts = [*query_start_loc, problem.tokens]
    lens = [*(min(n, problem.max_keys) for n in seq_lens), 0]
    prefixes = [*(prefix_lens or [0] * problem.seqs), 0]
    for section in sections(problem):
        _plan_section(data, problem, section, starts, lens, prefixes)
    return data


def _plan_section(
    data: torch.Tensor, problem: Problem, section: Section, starts: list[int], lens: list[int], prefixes: list[int]
) -> None:
    config, group = section.config, problem.group
    tiles, units = [], []
    for s, keys in enumerate(lens):
        rows = (starts[s + 1] - starts[s]) * group
        mine = rows > section.tiles.above and (section.tiles.upto is None or rows <= section.tiles.upto)
        tiles.append(triton.cdiv(rows, config.block_m) if mine else 0)
        units.append(max_units(problem, config, keys))
    work = sum(t * u for t, u in zip(tiles, units))
    fair = max(config.smallest_split, triton.cdiv(work, section.balance)) if section.balance else 2**31 - 1
    splits, slots = [], 0
    for t, u in zip(tiles, units):
        wanted = (u if config.quantum else triton.cdiv(u, fair)) if u > fair and t else 1
        slots += t * wanted if wanted > 1 else 0
        splits.append(wanted if slots <= section.max_slots else 1)
    items = merges = slots = 0
    for s in sorted(range(len(lens)), key=lambda s: splits[s] == 1):
        chunk = triton.cdiv(units[s], splits[s])
        q_start, q_len = starts[s], starts[s + 1] - starts[s]
        for index in range(tiles[s] * splits[s]):
            t, j = tiles[s] - 1 - index // splits[s], index % splits[s]
            tile = _keys_of(problem, config, t * config.block_m, q_len, lens[s], prefixes[s])
            kv_begin, kv_end, slot = tile.begin * config.unit, tile.last_key, WHOLE
            if splits[s] > 1:
                kv_begin = (tile.begin + j * chunk) * config.unit
                kv_end = min(kv_begin + chunk * config.unit, tile.last_key)
                slot = slots + t * splits[s] + j if j < _parts(tile, chunk) else IDLE
            fields = [q_start, q_len, lens[s], s, t * config.block_m, kv_begin, kv_end, slot]
            at = section.items_at + (items + index) * ITEM
            data[at : at + ITEM] = torch.tensor(fields, dtype=torch.int32)
        items += tiles[s] * splits[s]
        if splits[s] == 1:
            continue
        for t in range(tiles[s]):
            tile = _keys_of(problem, config, t * config.block_m, q_len, lens[s], prefixes[s])
            fields = [q_start, q_len, t * config.block_m, slots + t * splits[s], _parts(tile, chunk)]
            at = section.merges_at + (merges + t) * MERGE
            data[at : at + len(fields)] = torch.tensor(fields, dtype=torch.int32)
        merges += tiles[s]
        slots += tiles[s] * splits[s]
    data[section.header_at] = items
    data[section.header_at + 1] = merges


def _parts(tile: _Tile, chunk: int) -> int:
    return max(1, triton.cdiv(tile.end - tile.begin, chunk))


def _keys_of(problem: Problem, config: AttentionConfig, first_row: int, q_len: int, keys: int, prefix: int) -> _Tile:
    """The keys that the rows of a tile see between them."""
    context = keys - q_len
    first = first_row // problem.group
    last = (min(first_row + config.block_m, q_len * problem.group) - 1) // problem.group
    low, high = 0, keys
    if problem.causal and not problem.tree:
        high = context + last + 1
        if problem.prefix:
            high = max(high, prefix)
    if problem.window is not None:
        low = max(0, context + first - problem.window + 1)
        if not problem.causal:
            high = context + last + problem.window
    high = max(0, min(high, keys))
    return _Tile(low // config.unit, triton.cdiv(high, config.unit), high)
