"""A step's batch over the paged cache: its layout, what it refuses, and a prompt that is fed in pieces."""

from __future__ import annotations

import pytest
import torch
from serving_case import STYLES, build, exact

from shardfuse.kernels.dev.accuracy import judge
from shardfuse.layers.attention.paged import PagedBatch, PagedKVCache, Span


def test_batch_layout() -> None:
    cache = PagedKVCache(1, 6, num_kv_heads=2, head_dim=8, block_size=4)
    batch = PagedBatch.of(cache, [Span([5, 2], 3, 3, logits=False), Span([0], 0, 2), Span([4, 1, 3], 8, 1)])
    assert batch.block_tables.tolist() == [[5, 2, -1], [0, -1, -1], [4, 1, 3]]
    assert batch.seq_lens.tolist() == [6, 2, 9]
    assert batch.query_start_loc.tolist() == [0, 3, 5, 6]
    assert batch.slot_mapping.tolist() == [23, 8, 9, 0, 1, 12]
    assert batch.positions.tolist() == [3, 4, 5, 0, 1, 8]
    assert batch.logit_indices.tolist() == [4, 5]
    more = PagedBatch.of(cache, [Span([5, 2], 3, 3, logits=2), Span([0], 0, 2, False), Span([4], 0, 3, logits=3)])
    assert more.logit_indices.tolist() == [1, 2, 5, 6, 7]
    assert (batch.min_query_len, batch.max_query_len, batch.max_seq_len) == (1, 3, 9)
    assert cache.layer(0).shape == (6, 2, 4, 16)
    assert cache.nbytes == 6 * 2 * 4 * 16 * 4


def test_batch_and_cache_refuse() -> None:
    cache = PagedKVCache(1, 6, num_kv_heads=2, head_dim=8, block_size=4)
    with pytest.raises(ValueError, match="a span to position 5 has 1 blocks of 4"):
        PagedBatch.of(cache, [Span([0], 3, 2)])
    with pytest.raises(ValueError, match="expected at least one"):
        PagedBatch.of(cache, [Span([0], 3, 0)])
    for count in (-1, 3):
        with pytest.raises(ValueError, match=f"logits={count} of a span of 2 tokens: expected 0 to 2"):
            PagedBatch.of(cache, [Span([0], 0, 2, logits=count)])
    with pytest.raises(ValueError, match=r"blocks \[6\]: expected 0 to 5"):
        PagedBatch.of(cache, [Span([6], 3, 1)])
    shared = [Span([2, 1], 4, 2), Span([2, 1], 5, 2)]
    with pytest.raises(ValueError, match="spans write slot 1 of block 1 twice: expected a slot of its own"):
        PagedBatch.of(cache, shared)
    PagedBatch.of(cache, [shared[0], Span([2, 3], 5, 2)])  # what lies before a span may be shared
    with pytest.raises(ValueError, match="num_kv_heads=0"):
        PagedKVCache(1, 6, num_kv_heads=0, head_dim=8)


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cuts", [[13], [5, 6, 2], [1] * 13])
def test_logits_of_a_prompt_in_pieces(style: str, cuts: list[int]) -> None:
    """A sequence fed through the cache in pieces has the logits that it has whole."""
    model = exact(style)
    config = model.config
    tokens = torch.randint(32, (1, 13), generator=torch.Generator().manual_seed(2))
    oracle, low = model(tokens)[0], build(style, dtype=torch.float32)(tokens)[0]
    ours = build(style, dtype=torch.float32)
    heads = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    cache = PagedKVCache(config.num_layers, 8, block_size=4, **heads)
    start, found = 0, []
    for length in cuts:
        batch = PagedBatch.of(cache, [Span([6, 1, 3, 0], start, length)])
        start += length
        found.append(ours(tokens[0, start - length : start], positions=batch.positions, cache=batch))
    last = torch.tensor(cuts).cumsum(0) - 1
    verdict = judge("logits", torch.cat(found), low[last], oracle[last], terms=256)  # two small layers
    assert verdict.ok, verdict
