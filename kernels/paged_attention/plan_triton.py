"""The kernel that cuts a call's work into programs; ``plan.py`` says how.

One program for each sequence (the padding behind the last one counts as one). Each looks at all lengths, a few loads
that the cache serves, to learn how long a fair share is and where its own items begin: no program waits for another.
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
def _store_fields(ptrs, mask, a, b, c, d):
    """Four integers of each record, numbers or [BLOCK], to ``ptrs`` [BLOCK]: what a thread stores at once."""
    zero = tl.zeros_like(mask.to(tl.int32))
    fields = tl.join(tl.join(a + zero, c + zero), tl.join(b + zero, d + zero))  # what is joined last alternates fastest
    fields = tl.reshape(fields, (mask.shape[0], 4))
    tl.store(ptrs[:, None] + tl.arange(0, 4)[None, :], fields, mask=mask[:, None])


# All numbers change from step to step, or mean nothing to the code.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "max_keys", "window", "above", "upto", "block_m", "unit", "reach", "smallest",
        "balance", "max_slots", "max_items", "max_merges", "header_at", "items_at", "merges_at",
    ]
)  # fmt: skip
def _plan_kernel(
    plan_ptr,
    query_start_loc_ptr,  # [S + 1]
    seq_lens_ptr,  # [S]
    prefix_lens_ptr,  # [S], or None
    num_seqs,
    num_tokens,
    max_keys,
    window,  # None without one
    above,  # the section's tiles are those of sequences with more rows
    upto,  # and no more than these
    block_m,
    unit,
    reach,  # units that a tile sees at most
    smallest,
    balance,
    max_slots,
    max_items,
    max_merges,
    header_at,
    items_at,
    merges_at,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    QUANTA: tl.constexpr,  # sequences are cut at every quantum, or not at all
    BLOCK: tl.constexpr,
):
    """Grid: (S + 1,), for one section."""
    me = tl.program_id(0)
    offs = tl.arange(0, BLOCK)

    work = tl.zeros((BLOCK,), tl.int64)
    for first in tl.range(0, num_seqs + 1, BLOCK):
        _, q_len, keys = _lengths(query_start_loc_ptr, seq_lens_ptr, first + offs, num_seqs, num_tokens, max_keys)
        tiles, units = _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP)
        work += tiles.to(tl.int64) * units
    fair = tl.cdiv(tl.sum(work, 0), tl.maximum(balance, 1).to(tl.int64))
    fair = tl.where(balance > 0, tl.maximum(fair, smallest), 2147483647).to(tl.int32)

    # What lies before this sequence. Wanted slots count where they no longer fit, too.
    wanted = tl.full((), 0, tl.int32)
    slots = tl.full((), 0, tl.int32)
    merges = tl.full((), 0, tl.int32)
    all_merges = tl.full((), 0, tl.int32)
    split_items = tl.full((), 0, tl.int32)
    all_split_items = tl.full((), 0, tl.int32)
    whole_items = tl.full((), 0, tl.int32)
    all_whole_items = tl.full((), 0, tl.int32)
    my_splits = tl.full((), 1, tl.int32)
    my_units = tl.full((), 0, tl.int32)
    for first in tl.range(0, num_seqs + 1, BLOCK):
        seqs = first + offs
        _, q_len, keys = _lengths(query_start_loc_ptr, seq_lens_ptr, seqs, num_seqs, num_tokens, max_keys)
        tiles, units = _amounts(q_len, keys, above, upto, block_m, unit, reach, GROUP)
        splits = units
        if not QUANTA:
            splits = ((units.to(tl.int64) + fair - 1) // fair).to(tl.int32)
        splits = tl.where((units > fair) & (tiles > 0), splits, 1)
        needed = tl.where(splits > 1, tiles * splits, 0)
        fits = wanted + tl.cumsum(needed, 0) <= max_slots
        splits = tl.where(fits, splits, 1)
        wanted += tl.sum(needed, 0)
        is_split = splits > 1
        before = seqs < me
        slots += tl.sum(tl.where(before & is_split, needed, 0), 0)
        merges += tl.sum(tl.where(before & is_split, tiles, 0), 0)
        all_merges += tl.sum(tl.where(is_split, tiles, 0), 0)
        split_items += tl.sum(tl.where(before & is_split, needed, 0), 0)
        all_split_items += tl.sum(tl.where(is_split, needed, 0), 0)
        whole_items += tl.sum(tl.where(before & (splits == 1), tiles, 0), 0)
        all_whole_items += tl.sum(tl.where(splits == 1, tiles, 0), 0)
        my_splits = tl.maximum(my_splits, tl.max(tl.where(seqs == me, splits, 1), 0))
        my_units = tl.maximum(my_units, tl.max(tl.where(seqs == me, units, 0), 0))
    if me == num_seqs:
        tl.store(plan_ptr + header_at, all_split_items + all_whole_items)
        tl.store(plan_ptr + header_at + 1, all_merges)
    chunk = tl.cdiv(my_units, my_splits)
    is_split = my_splits > 1
    items = tl.where(is_split, split_items, all_split_items + whole_items)

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
        # More items than fit: starts that go past q, which a graph could not have looked at.
        mask = (index < tiles * my_splits) & (items + index < max_items)
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
        parts = tl.maximum(tl.cdiv(tl.cdiv(high, unit) - begin, tl.maximum(chunk, 1)), 1)

        kv_begin = (begin + tl.where(is_split, split * chunk, 0)) * unit
        kv_end = tl.where(is_split, tl.minimum(high, kv_begin + chunk * unit), high)
        slot = tl.where(is_split, slots + tile * my_splits + split, -1)
        slot = tl.where(is_split & (split >= parts), -2, slot)
        item_ptrs = plan_ptr + items_at // 8 * 8 + (items + index) * 8  # records begin at sectors, as the header does
        _store_fields(item_ptrs, mask, q_start, q_len, keys, me)
        _store_fields(item_ptrs + 4, mask, first_row, kv_begin, kv_end, slot)
        mask &= is_split & (split == 0) & (merges + tile < max_merges)
        merge_ptrs = plan_ptr + merges_at // 8 * 8 + (merges + tile) * 8
        _store_fields(merge_ptrs, mask, q_start, q_len, first_row, slots + tile * my_splits)
        _store_fields(merge_ptrs + 4, mask, parts, 0, 0, 0)
