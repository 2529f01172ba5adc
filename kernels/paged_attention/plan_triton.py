"""The kernel that cuts a call's work into programs; ``plan.py`` says how, and holds the same in plain Python.

One program for each sequence (the padding behind the last one counts as one) and class of tiles. Each looks at all
lengths, a few loads that the cache serves, to learn how long a fair share is and where its own items begin: no program
waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lengths(query_start_loc_ptr, seq_lens_ptr, seqs, num_seqs, num_tokens, max_keys):
    """(q_start, q_len, keys) of ``seqs``, int32; nothing where there is no such sequence. The padding has no keys."""
    real = seqs < num_seqs
    start = tl.load(query_start_loc_ptr + seqs, mask=seqs <= num_seqs, other=0)
    end = tl.load(query_start_loc_ptr + seqs + 1, mask=real, other=0)
    end = tl.where(seqs == num_seqs, num_tokens, end)
    keys = tl.load(seq_lens_ptr + seqs, mask=real, other=0)
    q_len = tl.where(seqs <= num_seqs, end - start, 0)
    return start, q_len, tl.minimum(keys, max_keys)


@triton.jit
def _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP: tl.constexpr):
    """(tiles in this class, the most units of keys that one of them sees) of sequences."""
    rows = q_len * GROUP
    tiles = tl.where((rows > above) & (rows <= upto), tl.cdiv(rows, block_m), 0)
    return tiles, tl.minimum(tl.cdiv(keys, unit), reach)


@triton.jit
def _plan_section(
    plan_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    num_seqs,
    num_tokens,
    max_keys,
    window,  # None without one
    section,  # above, upto, block_m, unit, reach, smallest, balance, max_slots, header_at, items_at, merges_at
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    QUANTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    above, upto, block_m, unit, reach = section[0], section[1], section[2], section[3], section[4]
    smallest, balance, max_slots = section[5], section[6], section[7]
    header_at, items_at, merges_at = section[8], section[9], section[10]
    me = tl.program_id(0)
    offs = tl.arange(0, BLOCK)

    work = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, num_seqs + 1, BLOCK):
        _, q_len, keys = _lengths(query_start_loc_ptr, seq_lens_ptr, first + offs, num_seqs, num_tokens, max_keys)
        tiles, units = _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP)
        work += tiles.to(tl.int64) * units
    fair = tl.cdiv(tl.sum(work, 0), tl.maximum(balance, 1).to(tl.int64))
    fair = tl.where(balance > 0, tl.maximum(fair, smallest), 2147483647).to(tl.int32)
    chunk = fair
    if QUANTA:
        chunk = tl.full((), 1, tl.int32)

    # What comes before this sequence: items, merges and slots; slots count where they no longer fit, too.
    items = tl.full((), 0, tl.int32)
    merges = tl.full((), 0, tl.int32)
    slots = tl.full((), 0, tl.int32)
    all_items = tl.full((), 0, tl.int32)
    all_merges = tl.full((), 0, tl.int32)
    all_slots = tl.full((), 0, tl.int32)
    my_splits = tl.full((), 1, tl.int32)
    for first in tl.range(0, num_seqs + 1, BLOCK):
        seqs = first + offs
        _, q_len, keys = _lengths(query_start_loc_ptr, seq_lens_ptr, seqs, num_seqs, num_tokens, max_keys)
        tiles, units = _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP)
        splits = tl.where((units > fair) & (tiles > 0), tl.cdiv(units, chunk), 1)
        needed = tl.where(splits > 1, tiles * splits, 0)
        fits = all_slots + tl.cumsum(needed, 0) <= max_slots
        splits = tl.where(fits, splits, 1)
        before = seqs < me
        slots += tl.sum(tl.where(before, needed, 0), 0)
        items += tl.sum(tl.where(before, tiles * splits, 0), 0)
        merges += tl.sum(tl.where(before & (splits > 1), tiles, 0), 0)
        all_slots += tl.sum(needed, 0)
        all_items += tl.sum(tiles * splits, 0)
        all_merges += tl.sum(tl.where(splits > 1, tiles, 0), 0)
        my_splits = tl.maximum(my_splits, tl.max(tl.where(seqs == me, splits, 1), 0))
    if me == num_seqs:
        tl.store(plan_ptr + header_at, all_items)
        tl.store(plan_ptr + header_at + 1, all_merges)

    q_start, q_len, keys = _lengths(query_start_loc_ptr, seq_lens_ptr, me, num_seqs, num_tokens, max_keys)
    tiles, _ = _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP)
    context = keys - q_len
    prefix = 0
    if prefix_lens_ptr is not None:
        prefix = tl.load(prefix_lens_ptr + me, mask=me < num_seqs, other=0)
    for first in tl.range(0, tiles * my_splits, BLOCK):
        index = first + offs
        tile = tiles - 1 - index // my_splits
        split = index % my_splits
        mask = index < tiles * my_splits
        first_row = tile * block_m
        # The keys that the tile's rows see between them.
        first_token = first_row // GROUP
        last_token = (tl.minimum(first_row + block_m, q_len * GROUP) - 1) // GROUP
        low = tl.zeros((BLOCK,), tl.int32)
        high = tl.zeros((BLOCK,), tl.int32) + keys
        if CAUSAL and not TREE:
            high = context + last_token + 1
            if prefix_lens_ptr is not None:
                high = tl.maximum(high, prefix)
        if window is not None:
            low = tl.maximum(context + first_token - window + 1, 0)
            if not CAUSAL:
                high = context + last_token + window
        high = tl.maximum(tl.minimum(high, keys), 0)
        begin = low // unit
        parts = tl.maximum(tl.cdiv(high - begin * unit, unit * chunk.to(tl.int64)), 1).to(tl.int32)

        is_split = my_splits > 1
        kv_begin = (begin + tl.where(is_split, split * chunk, 0)) * unit
        kv_end = tl.where(is_split, tl.minimum(high, kv_begin + chunk.to(tl.int64) * unit).to(tl.int32), high)
        slot = tl.where(is_split, slots + tile * my_splits + split, -1)
        slot = tl.where(is_split & (split >= parts), -2, slot)
        item_ptr = plan_ptr + items_at + (items + index) * 8
        tl.store(item_ptr, q_start, mask=mask)
        tl.store(item_ptr + 1, q_len, mask=mask)
        tl.store(item_ptr + 2, keys, mask=mask)
        tl.store(item_ptr + 3, me, mask=mask)
        tl.store(item_ptr + 4, first_row, mask=mask)
        tl.store(item_ptr + 5, kv_begin, mask=mask)
        tl.store(item_ptr + 6, kv_end, mask=mask)
        tl.store(item_ptr + 7, slot, mask=mask)
        mask &= is_split & (split == 0)
        merge_ptr = plan_ptr + merges_at + (merges + tile) * 8
        tl.store(merge_ptr, q_start, mask=mask)
        tl.store(merge_ptr + 1, q_len, mask=mask)
        tl.store(merge_ptr + 2, first_row, mask=mask)
        tl.store(merge_ptr + 3, slots + tile * my_splits, mask=mask)
        tl.store(merge_ptr + 4, parts, mask=mask)


# All of them change from step to step, or mean nothing to the code.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_keys", "window", "short", "long"])
def _plan_kernel(
    plan_ptr,
    query_start_loc_ptr,  # [S + 1]
    seq_lens_ptr,  # [S]
    prefix_lens_ptr,  # [S], or None
    num_seqs,
    num_tokens,
    max_keys,
    window,
    short,  # the first section, or the only one
    long,  # the second, or None
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    QUANTA: tl.constexpr,  # sequences are cut at every quantum, or not at all
    BLOCK: tl.constexpr,
):
    """Grid: (S + 1, sections)."""
    if tl.program_id(1) == 0:
        _plan_section(
            plan_ptr, query_start_loc_ptr, seq_lens_ptr, prefix_lens_ptr, num_seqs, num_tokens, max_keys, window,
            short, GROUP, CAUSAL, TREE, QUANTA, BLOCK,
        )  # fmt: skip
    elif long is not None:
        _plan_section(
            plan_ptr, query_start_loc_ptr, seq_lens_ptr, prefix_lens_ptr, num_seqs, num_tokens, max_keys, window,
            long, GROUP, CAUSAL, TREE, QUANTA, BLOCK,
        )  # fmt: skip
