"""Blocks of a paged KV cache: copied, swapped with the host's, gathered into contiguous keys and values."""

from __future__ import annotations

import math

import pytest
import torch
from kv_cache_case import E4M3, INT8, bits, noise

from shardfuse.kernels.kv_cache import copy_blocks_, gather_kv, swap_blocks_, write_kv_

pytestmark = pytest.mark.usefixtures("on_device")

IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block_dim", [0, 1, 2])
def test_copy_blocks(impl, block_dim):
    caches = [
        noise(6, 6, 6, 5, 2, dtype=torch.bfloat16),
        noise(6, 6, 6, dtype=E4M3),
        noise(6, 6, 6, 7, 2, dtype=torch.float32)[..., 1:4, :],
        noise(2, 6, 6, 6, dtype=INT8).permute(1, 3, 2, 0),
        noise(6, 6, 12, dtype=torch.int64)[..., ::2],
    ]
    expected = [cache.clone() for cache in caches]
    pairs = torch.tensor([[4, 0], [-1, 3], [4, 5], [2, -1], [1, 2]])
    for cache in expected:
        blocks = cache.view(getattr(torch, f"uint{8 * cache.dtype.itemsize}")).movedim(block_dim, 0)
        for source, target in ((4, 0), (4, 5), (1, 2)):
            blocks[target].copy_(blocks[source].clone())
    copy_blocks_(caches, pairs, block_dim=block_dim, impl=impl)
    assert all(torch.equal(bits(ours), bits(want)) for ours, want in zip(caches, expected))
    one = caches[0].clone()
    copy_blocks_(one, torch.tensor([[3, 1]]), block_dim=block_dim, impl=impl)
    assert torch.equal(bits(one.select(block_dim, 1)), bits(one.select(block_dim, 3)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
@pytest.mark.parametrize(
    ("shape", "pad", "start"),
    [((5, 3, 7), 0, 1), ((5, 2, 33), 1, 0), ((5, 1, 1), 3, 2), ((5, 3, 16), 0, 3), ((5, 2, 40, 3), 5, 7)],
)
def test_copy_blocks_of_odd_sizes_and_views(impl, shape, pad, start, dtype):
    """Blocks whose rows are of any length and begin at any address; between them nothing is written."""
    *outer, width = shape
    count = start + math.prod(outer) * (width + pad)
    room = noise(count, dtype=dtype)
    cache = room[start:].view(*outer, width + pad)[..., :width]
    expected, pairs = room.clone(), torch.tensor([[4, 0], [-1, 1], [2, 3]])
    wanted = expected.view(getattr(torch, f"uint{8 * dtype.itemsize}"))[start:].view(*outer, width + pad)[..., :width]
    for source, target in ((4, 0), (2, 3)):
        wanted[target].copy_(wanted[source].clone())
    copy_blocks_(cache, pairs, impl=impl)
    assert torch.equal(bits(room), bits(expected))


@pytest.mark.parametrize("block_dim", [0, 1])
def test_swap_blocks(monkeypatch, block_dim):
    shapes = [(7, 2, 3), (9, 2, 3)] if block_dim == 0 else [(2, 7, 3), (2, 9, 3)]
    source, target = torch.randn(shapes[0]), torch.randn(shapes[1])
    expected = target.clone()
    pairs = torch.tensor([[3, 5], [2, 4], [-1, 0], [6, 1], [4, 6], [0, 8]], device="cpu")
    for s, t in pairs.tolist():
        if s >= 0:
            expected.select(block_dim, t).copy_(source.select(block_dim, s))
    copied, copy_ = [], torch.Tensor.copy_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda x, *args, **kw: copied.append(len(x)) or copy_(x, *args, **kw))
        swap_blocks_(source, target, pairs, block_dim=block_dim)
    assert torch.equal(target, expected)
    assert sorted(copied) == sorted([1, 1, 3] * (1 + block_dim))  # blocks 2 to 4 are a run, in each layer
    again = torch.zeros_like(target)
    swap_blocks_([source, source], [again, target], pairs, block_dim=block_dim)
    assert torch.equal(target, expected)
    assert again.count_nonzero() == 5 * target.numel() // 9


@pytest.mark.parametrize("page", [1, 3, 8])
@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3, INT8])
def test_gather(cache_dtype, page):
    K, H, V, lens = 2, 6, 4, (5, 0, 9)
    quantised = cache_dtype != torch.float32
    pages = [-(-n // page) for n in lens]
    deal = torch.randperm(sum(pages) + 2)
    tables, cache = (
        torch.full((3, max(pages)), -1, dtype=torch.int32),
        noise(len(deal), K, page, H + V, dtype=cache_dtype),
    )
    scales = [noise(len(deal), K, page, dtype=torch.float32) for _ in range(2)] if quantised else [None, None]
    k, v, slots = torch.randn(sum(lens), K, H), torch.randn(sum(lens), K, V), []
    for s, n in enumerate(lens):
        mine, deal = deal[: pages[s]], deal[pages[s] :]
        tables[s, : pages[s]] = mine
        slots += [int(mine[j // page]) * page + j % page for j in range(n)]
    write_kv_(cache, k, v, torch.tensor(slots), k_scale=scales[0], v_scale=scales[1], impl="reference")
    seq_lens = torch.tensor(lens)
    given = {"head_size": H, "k_scale": scales[0], "v_scale": scales[1]}
    keys, values = gather_kv(cache, tables, seq_lens, **given)
    assert keys.shape == (3, K, 9, H)
    assert values.shape == (3, K, 9, V)
    start = 0
    for s, n in enumerate(lens):
        for ours, x in ((keys, k), (values, v)):
            mine = x[start : start + n].transpose(0, 1)
            # Half a step of e4m3's three bits, or of one in 127, of the largest in a row.
            allowed = mine.abs().amax(-1, keepdim=True) / (28 if cache_dtype == E4M3 else 250) if quantised else 0.0
            assert bool(((ours[s, :, :n] - mine).abs() <= allowed).all()) if n else True
            assert not ours[s, :, n:].any()
        start += n
    longer = gather_kv(
        cache, tables.long(), seq_lens.int(), max_seq_len=max(pages) * page, dtype=torch.float64, **given
    )
    assert longer[0].dtype == torch.float64
    assert torch.equal(longer[0][:, :, :9].float(), keys)
    pair = cache[..., :H], cache[..., H:]
    del given["head_size"]
    assert torch.equal(gather_kv(pair, tables, seq_lens, **given)[1], values)
    if quantised:
        raw = gather_kv(pair, tables, seq_lens)[0]
        assert raw.dtype == cache_dtype
        assert torch.equal(bits(raw[0, 0, 0]), bits(pair[0][tables[0, 0], 0, 0]))
