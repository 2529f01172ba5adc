"""What the ops of the paged KV cache refuse, and how they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kv_cache_case import E4M3, INT8

from shardfuse.kernels.kv_cache import copy_blocks_, gather_kv, norm_rope_write_kv_, swap_blocks_, write_kv_

SLOTS = torch.arange(5)
K5, CACHE = torch.zeros(5, 3, 8), torch.zeros(4, 3, 4, 16)
FP8_CACHE, INT8_CACHE, ONE = CACHE.to(E4M3), CACHE.to(INT8), torch.zeros(1)
BAD_WRITES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "kv_cache is a sequence of 3": (([CACHE] * 3, K5, K5, SLOTS), {}),
    "k has shape": ((CACHE, K5[0], K5[0], SLOTS), {}),
    "v is torch.float32 .4, 3, 8.": ((CACHE, K5, K5[:4], SLOTS), {}),
    "v is torch.float16": ((CACHE, K5, K5.half(), SLOTS), {}),
    "k is torch.int64": ((CACHE, K5.long(), K5.long(), SLOTS), {}),
    r"kv_cache has shape \(4, 3, 4, 15\)": ((CACHE[..., 1:], K5, K5, SLOTS), {}),
    "kv_cache has shape .* 2 KV heads": ((CACHE, K5[:, :2], K5[:, :2], SLOTS), {}),
    r"kv_cache has shape \(4, 3, 0, 16\)": ((CACHE[:, :, :0], K5, K5, SLOTS), {}),
    r"kv_cache\[1\] has shape": (((CACHE[..., :8], CACHE), K5, K5, SLOTS), {}),
    r"kv_cache\[1\] is torch.float16": (((CACHE[..., :8], CACHE[..., 8:].half()), K5, K5, SLOTS), {}),
    "kv_cache is torch.int32": ((CACHE.int(), K5, K5, SLOTS), {}),
    "slot_mapping is torch.int32": ((CACHE, K5, K5, SLOTS.int()), {}),
    r"slot_mapping is torch.int64 \(4,\)": ((CACHE, K5, K5, SLOTS[:4]), {}),
    "v is on meta": ((CACHE, K5, K5.to("meta"), SLOTS), {}),
    "names slot 16: kv_cache has 16 slots": ((CACHE, K5, K5, SLOTS + 12), {}),
    "names slot 3 twice": ((CACHE, K5, K5, SLOTS.clamp(max=3)), {}),
    "k_scale and v_scale belong to": ((CACHE, K5, K5, SLOTS), {"k_scale": ONE, "v_scale": ONE}),
    "k_scale comes alone": ((FP8_CACHE, K5, K5, SLOTS), {"k_scale": ONE}),
    "kv_cache is int8": ((INT8_CACHE, K5, K5, SLOTS), {}),
    r"v_scale has shape \(4, 3\)": ((INT8_CACHE, K5, K5, SLOTS), {"k_scale": ONE, "v_scale": torch.zeros(4, 3)}),
    "k_scale is torch.float16": ((INT8_CACHE, K5, K5, SLOTS), {"k_scale": ONE.half(), "v_scale": ONE}),
    "k_scale is on meta": ((FP8_CACHE, K5, K5, SLOTS), {"k_scale": ONE.to("meta"), "v_scale": ONE}),
}


@pytest.mark.parametrize("message", BAD_WRITES)
def test_write_refuses(message):
    args, kwargs = BAD_WRITES[message]
    with pytest.raises(ValueError, match=f"^write_kv_: .*{message}"):
        write_kv_(*args, **kwargs)
    with pytest.raises(ValueError, match=f"^norm_rope_write_kv_: .*{message}"):
        norm_rope_write_kv_(args[1], args[1], args[2], args[0], args[3], **kwargs)


def test_contents_are_checked_where_asked():
    cache = CACHE.clone()
    write_kv_(cache, K5 + 1, K5 + 1, SLOTS.clamp(max=3), check=False)
    assert cache[0].all()


TABLE = torch.zeros(5, 4)
BAD_FUSED: dict[str, dict[str, Any]] = {
    r"q has shape \(4, 3, 8\)": {"q": K5[:4]},
    r"q has shape \(5, 3, 6\)": {"q": K5[..., :6]},
    "q is torch.float16 but k": {"q": K5.half()},
    "cos comes alone": {"cos": TABLE},
    r"cos has shape \(4, 4\)": {"cos": TABLE[:4], "sin": TABLE[:4]},
    r"sin has shape \(5, 5\)": {"cos": TABLE, "sin": torch.zeros(5, 5)},
    r"cos has shape \(5, 4\) and sin \(5, 3\)": {"cos": TABLE, "sin": TABLE[:, :3]},
    "cos is torch.bfloat16": {"cos": TABLE.bfloat16(), "sin": TABLE},
    r"q_norm is torch.float32 \(4,\)": {"q_norm": torch.zeros(4)},
    "k_norm is torch.int64": {"k_norm": torch.zeros(8).long()},
    "sin is on meta": {"cos": TABLE, "sin": TABLE.to("meta")},
}


@pytest.mark.parametrize("message", BAD_FUSED)
def test_norm_rope_write_refuses(message):
    x = {"q": K5, "k": K5, "v": K5, "kv_cache": CACHE, "slot_mapping": SLOTS} | BAD_FUSED[message]
    with pytest.raises(ValueError, match=f"^norm_rope_write_kv_: {message}"):
        norm_rope_write_kv_(**x)


PAIRS = torch.tensor([[0, 1], [2, 3]])
BAD_COPIES: dict[str, tuple[Any, Any, int]] = {
    "kv_caches is empty": ([], PAIRS, 0),
    "block_dim=4, but kv_caches has shape": (CACHE, PAIRS, 4),
    "holds 4 and 3 blocks": ([CACHE, CACHE[:3]], PAIRS, 0),
    "kv_caches is on cpu and meta": ([CACHE, CACHE.to("meta")], PAIRS, 0),
    "pairs is torch.int32": (CACHE, PAIRS.int(), 0),
    r"pairs is torch.int64 \(4,\)": (CACHE, PAIRS.flatten(), 0),
    "pairs is on meta": (CACHE, PAIRS.to("meta"), 0),
    "names source block 4: there are 4": (CACHE, PAIRS + torch.tensor([2, 0]), 0),
    "names target block 3: there are 3": (CACHE, PAIRS, 1),
    "a target block twice": (CACHE, PAIRS.clamp(max=1) + torch.tensor([0, 2]), 0),
    "names block 2 as source and as target": (CACHE, torch.tensor([[0, 2], [2, 3]]), 0),
}


@pytest.mark.parametrize("message", BAD_COPIES)
def test_copy_refuses(message):
    caches, pairs, block_dim = BAD_COPIES[message]
    with pytest.raises(ValueError, match=f"^copy_blocks_: .*{message}"):
        copy_blocks_(caches, pairs, block_dim=block_dim)


def test_swap_and_gather_refuse():
    for message, source, target, pairs in (
        ("source has 1 tensors and target 2", CACHE, [CACHE, CACHE], PAIRS),
        ("source is torch.float32 .* but target torch.float16", CACHE, CACHE.half(), PAIRS),
        (r"target torch.float32 \(4, 3, 4, 15\)", CACHE, CACHE[..., 1:], PAIRS),
        ("target block 3: there are 2", CACHE, CACHE[:2].clone(), PAIRS),
        ("pairs is on meta", CACHE, CACHE.clone(), PAIRS.to("meta")),
    ):
        with pytest.raises(ValueError, match=f"^swap_blocks_: .*{message}"):
            swap_blocks_(source, target, pairs)
    tables, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([13, 1])
    for message, arguments, options in (
        ("block_tables has shape", (CACHE, tables, lens[:1]), {}),
        ("13 tokens does not fit 3 pages of 4", (CACHE, tables, lens), {}),
        ("head_size=16", (CACHE, tables, lens - 1), {"head_size": 16}),
        (r"v_scale has shape \(4, 3\)", (CACHE, tables, lens - 1), {"v_scale": CACHE[:, :, 0, 0]}),
    ):
        with pytest.raises(ValueError, match=f"^gather_kv: .*{message}"):
            gather_kv(*arguments, **options)
