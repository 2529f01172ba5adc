"""The paged cache's storage, a step's batch over it, and the layer that attends over both, alone and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.kv_cache import gather_kv
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.attention import paged
from shardfuse.layers.attention.paged import (
    PagedAttention,
    PagedBatch,
    PagedKVCache,
    Span,
    alibi_slopes,
    default_block_size,
    local_kv_heads,
)
from shardfuse.layers.attention.rope import Rotary, rope_tables
from shardfuse.layers.attention.sdpa import attend
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.rendezvous import init_mesh

H = 16


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _group(rank: int, size: int) -> Group:
    return Group(None, rank, size, None)


# -------------------------------------------------------------------------------------------------------------- storage


def test_which_kv_heads_a_rank_holds() -> None:
    assert [list(local_kv_heads(4, _group(rank, 2))) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(local_kv_heads(2, _group(rank, 4))) for rank in range(4)] == [[0], [0], [1], [1]]
    assert list(local_kv_heads(3, _group(0, 1))) == [0, 1, 2]
    for heads, size in ((3, 2), (2, 3), (0, 1)):
        with pytest.raises(ValueError, match=f"num_kv_heads={heads} over {size} ranks"):
            local_kv_heads(heads, _group(0, size))


def test_storage_of_a_rank() -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "block_size": 3}
    for kv_heads, size in ((2, 1), (1, 2), (1, 4)):
        cache = PagedKVCache(5, 6, **sizes, mesh=_group(0, size), dtype=torch.bfloat16)
        assert cache.layer(4).shape == (6, kv_heads, 3, 12)
        assert cache.nbytes == 5 * 6 * kv_heads * 3 * 12 * 2
        assert cache.scales(0) == {}
    assert default_block_size("cpu") == PagedKVCache(1, 1, num_kv_heads=1, head_dim=8).block_size == 256
    assert default_block_size(torch.device("cuda", 1)) == 16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_scales_of_a_quantised_cache(dtype: torch.dtype) -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 8, "block_size": 4, "dtype": dtype}
    token = PagedKVCache(3, 5, **sizes)
    assert {name: x.shape for name, x in token.scales(1).items()} == {"k_scale": (5, 2, 4), "v_scale": (5, 2, 4)}
    assert token.nbytes == 3 * 5 * 2 * 4 * (16 + 2 * 4)
    tensor = PagedKVCache(3, 5, kv_scales="tensor", **sizes)
    assert tensor.v_scale is not None
    tensor.v_scale[1] = 0.5
    assert {name: x.tolist() for name, x in tensor.scales(1).items()} == {"k_scale": [1.0], "v_scale": [0.5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 0}, "head_dim=0: expected at least 1"),
        ({"block_size": 0}, "block_size=0: expected at least 1"),
        ({"kv_scales": "token"}, "kv_scales='token' with torch.float32"),
        ({"kv_scales": "head", "dtype": torch.int8}, "kv_scales='head' with torch.int8: expected one of tensor, token"),
    ],
)
def test_storage_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKVCache(1, 2, **{"num_kv_heads": 1, "head_dim": 8, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_blocks_are_copied_and_swapped_with_their_scales(dtype: torch.dtype) -> None:
    sizes = {"num_kv_heads": 2, "head_dim": 4, "block_size": 2, "dtype": dtype}
    here, there = PagedKVCache(3, 5, **sizes), PagedKVCache(3, 2, **sizes)
    parts = [(a, b) for a, b in zip(here.by_block(), there.by_block())]
    assert len(parts) == (3 if dtype == torch.int8 else 1)
    for a, b in parts:
        a.copy_(torch.arange(a.numel()).view(a.shape) % 100)
        b.zero_()
    before = [a.clone() for a, _ in parts]
    here.copy_blocks([(1, 4)])
    here.swap_blocks(there, [(4, 0), (2, 1)])
    for old, (a, b) in zip(before, parts):
        assert torch.equal(a[:, :4], old[:, :4])
        assert torch.equal(a[:, 4], old[:, 1])
        assert torch.equal(b, old[:, [1, 2]])
    there.swap_blocks(here, [(1, 0)])
    assert all(torch.equal(a[:, 0], old[:, 2]) for old, (a, _) in zip(before, parts))


# ------------------------------------------------------------------------------------------------------------ attention


def _serve(layer: PagedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """One sequence of all tokens through ``layer`` in pieces, layer 1 of 2; blocks of 3 in no order."""
    sizes = {"num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim, "v_head_dim": layer.v_head_dim}
    cache = PagedKVCache(2, 9, block_size=3, dtype=q.dtype, mesh=layer.group, **sizes)
    outs, start = [], 0
    for length in cuts:
        batch = PagedBatch.of(cache, [Span([6, 1, 8, 3, 0, 5], start, length)])
        here = slice(start, start + length)
        outs.append(layer(q[here], k[here], v[here], batch, 1))
        start += length
    return torch.cat(outs)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4, "scale": 0.3},
    "softcap": {"softcap": 1.5, "sinks": True},
    "alibi": {"alibi": True},
}


@torch.no_grad()
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("cuts", [[17], [5, 1, 11], [1] * 17], ids=str)
def test_attention_in_pieces_is_attention(cuts: list[int], features: dict[str, Any]) -> None:
    layer = PagedAttention(6, 2, H, **features)
    if layer.sinks is not None:
        layer.sinks.copy_(torch.linspace(-1, 2, 6))
    q, k, v = _draw(17, 6, H), _draw(17, 2, H, seed=1), _draw(17, 2, H, seed=2)
    options = {name: x for name, x in features.items() if name in ("window", "softcap", "scale")}
    if layer.alibi:
        position = torch.arange(17)
        bias = -torch.tensor(alibi_slopes(6))[:, None, None] * (position[:, None] - position).abs()
        bias = bias.masked_fill(position[:, None] < position, float("-inf"))

        def plain(*tensors: torch.Tensor) -> torch.Tensor:
            heads = [x.transpose(0, 1) for x in tensors]
            return F.scaled_dot_product_attention(*heads, bias.to(heads[0].dtype), enable_gqa=True).transpose(0, 1)
    else:

        def plain(*tensors: torch.Tensor) -> torch.Tensor:
            sinks = None if layer.sinks is None else layer.sinks.to(tensors[0].dtype)
            return attend(*tensors, batch_size=1, sinks=sinks, **options)

    low = tuple(x.float() for x in (q, k, v))
    verdict = judge("out", _serve(layer, *low, cuts), plain(*low), plain(q, k, v), terms=2 * H)
    assert verdict.ok, verdict


def test_values_may_be_of_another_size() -> None:
    layer = PagedAttention(4, 2, H, v_head_dim=5)
    q, k, v = _draw(7, 4, H), _draw(7, 2, H, seed=1), _draw(7, 2, 5, seed=2)

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1) for x in tensors]
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)

    low = tuple(x.float() for x in (q, k, v))
    verdict = judge("out", _serve(layer, *low, [4, 3]), plain(*low), plain(q, k, v), terms=2 * H)
    assert verdict.ok, verdict


@pytest.mark.parametrize("scales", ["token", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_quantised_cache_is_what_is_attended_to(dtype: torch.dtype, scales: str) -> None:
    """Attention over what ``gather_kv`` reads back, which is not quite what was written."""
    cache = PagedKVCache(2, 4, num_kv_heads=2, head_dim=H, block_size=5, dtype=dtype, kv_scales=scales)
    if scales == "tensor":
        for scale in (cache.k_scale, cache.v_scale):
            assert scale is not None
            scale.fill_(4.0 / (127 if dtype == torch.int8 else 448))
    batch = PagedBatch.of(cache, [Span([2, 0], 0, 8)])
    q, k, v = (_draw(8, heads, H, seed=heads, dtype=torch.float32) for heads in (4, 2, 2))
    out = PagedAttention(4, 2, H)(q, k, v, batch, 1)
    stored = gather_kv(cache.layer(1), batch.block_tables, batch.seq_lens, **cache.scales(1), dtype=torch.float64)
    read = [x[0].transpose(0, 1) for x in stored]
    assert 0 < (read[0] - k).abs().max() < 0.2
    low, oracle = (attend(*(x.to(to) for x in (q, *read)), batch_size=1) for to in (torch.float32, torch.float64))
    verdict = judge("out", out, low, oracle, terms=2 * H)
    assert verdict.ok, verdict


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_norms_on_the_way(interleaved: bool) -> None:
    """As if q and k had come normalised and rotated."""
    layer, rotary = PagedAttention(4, 2, H), Rotary(H, interleaved=interleaved)
    q, k, v = (_draw(6, heads, H, seed=heads) for heads in (4, 2, 2))
    weights = _draw(2, H, seed=9)
    outs = []
    for fused in (True, False):
        cache = PagedKVCache(1, 2, num_kv_heads=2, head_dim=H, block_size=4, dtype=torch.float64)
        batch = PagedBatch.of(cache, [Span([1, 0], 0, 6)])
        rope = rope_tables(batch.positions, rotary)
        if fused:
            norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5, "norm_offset": 1.0}
            outs.append(layer(q, k, v, batch, 0, rope=rope, interleaved=interleaved, **norms))
        else:
            normed = [F.rms_norm(x, (H,), 1.0 + w, 1e-5) for x, w in zip((q, k), weights)]
            outs.append(layer(*apply_rope(*normed, *rope, interleaved=interleaved), v, batch, 0))
    verdict = judge("out", *outs, outs[1], terms=2 * H)
    assert verdict.ok, verdict


def test_prefixes_and_trees_go_to_every_layer() -> None:
    layer = PagedAttention(2, 1, H)
    q, k, v = (_draw(5, heads, H, seed=heads) for heads in (2, 1, 1))
    cache = PagedKVCache(1, 2, num_kv_heads=1, head_dim=H, block_size=4, dtype=torch.float64)
    everything = {
        "prefix_lens": torch.tensor([5], dtype=torch.int32),
        "tree_mask": torch.ones(5, 5, dtype=torch.bool),
    }
    expected = attend(q, k, v, batch_size=1, causal=False)
    for name, mask in everything.items():
        out = layer(q, k, v, PagedBatch.of(cache, [Span([0, 1], 0, 5)], **{name: mask}), 0)
        verdict = judge(name, out, expected, expected, terms=2 * H)
        assert verdict.ok, verdict


def test_attention_refuses_other_heads_than_its_own() -> None:
    layer = PagedAttention(4, 2, H)
    cache = PagedKVCache(1, 2, num_kv_heads=2, head_dim=H)
    batch = PagedBatch.of(cache, [Span([0], 0, 3)])
    q, k = _draw(3, 4, H), _draw(3, 2, H)
    with pytest.raises(ValueError, match=r"k is \[3, 1, 16\]: expected \[tokens, 2, 16\]"):
        layer(q, k[:, :1], k, batch, 0)
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        PagedAttention(4, 3, H)
    with pytest.raises(ValueError, match="num_heads=2 does not divide by the 4 tensor-parallel ranks"):
        PagedAttention(2, 1, H, mesh=_group(0, 4))


@pytest.mark.parametrize(("heads", "slopes"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (3, [2**-4, 2**-8, 2**-2])])
def test_alibi_slopes(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == slopes


def test_a_plan_serves_all_layers_with_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window, without one, and without causality: three plans a step."""
    made, used = [], []

    def plan(*_: Any, **options: Any) -> str:
        assert (options["min_query_len"], options["max_query_len"], options["invariant"]) == (3, 3, True)
        made.append((options["window"], options["causal"], options["max_seq_len"]))
        return f"plan {len(made)}"

    def paged_attention(q: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        used.append(options["plan"])
        return q

    monkeypatch.setattr(paged, "plan_attention", plan)
    monkeypatch.setattr(paged, "paged_attention", paged_attention)
    cache = PagedKVCache(4, 2, num_kv_heads=1, head_dim=H, block_size=4)
    local, whole, both = (PagedAttention(2, 1, H, **mask) for mask in ({"window": 3}, {}, {"causal": False}))
    q, k = _draw(3, 2, H, dtype=torch.float32), _draw(3, 1, H, dtype=torch.float32)
    for start in (0, 3):
        batch = PagedBatch.of(cache, [Span([0, 1], start, 3)], invariant=True)
        for index, layer in enumerate((local, whole, local, both)):
            layer(q, k, k, batch, index)
    masks = ((3, True), (None, True), (None, False))
    assert made == [(*mask, length) for length in (3, 6) for mask in masks]
    assert used == [f"plan {i}" for i in (1, 2, 1, 3, 4, 5, 4, 6)]


def test_spans_are_checked_once_and_tables_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardfuse.kernels.kv_cache import checks as of_writes
    from shardfuse.kernels.paged_attention import checks as of_attention

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("contents were read in a layer")

    monkeypatch.setattr(of_attention, "check_contents", read)
    monkeypatch.setattr(of_writes, "check_slots", read)
    before = dispatch.counts["write_kv_", "reference"]
    layer = PagedAttention(2, 1, H)
    _serve(layer, *(_draw(4, heads, H) for heads in (2, 1, 1)), [3, 1])
    assert dispatch.counts["write_kv_", "reference"] == before + 2


# ---------------------------------------------------------------------------------------------------------------- ranks


def _on_rank(rank: int, world: int, num_kv_heads: int) -> torch.Tensor:
    """This rank's heads of six through a layer with everything that is split: sinks and slopes."""
    group = tp_group(init_mesh(tp=world, device_type="cpu"))
    layer = PagedAttention(6, num_kv_heads, H, window=7, softcap=3.0, sinks=True, alibi=True, mesh=group)
    mine, kv = slice(rank * 6 // world, (rank + 1) * 6 // world), slice(layer.kv_heads.start, layer.kv_heads.stop)
    k, v = (_draw(11, num_kv_heads, H, seed=seed)[:, kv] for seed in (1, 2))
    with torch.no_grad():
        (sinks,) = layer.local("sinks")
        sinks.copy_(torch.linspace(-1, 2, 6)[mine])
        return _serve(layer, _draw(11, 6, H)[:, mine], k, v, [6, 1, 4])


@pytest.mark.ranks
@pytest.mark.parametrize("num_kv_heads", [2, 1], ids=["split", "repeated"])
def test_ranks_hold_the_heads_of_one_process(num_kv_heads: int, ranks: Any) -> None:
    expected = _on_rank(0, 1, num_kv_heads)
    found = torch.cat(ranks(2, _on_rank, num_kv_heads), dim=1)
    verdict = judge("out", found, expected, expected, terms=2 * H)
    assert verdict.ok, verdict
