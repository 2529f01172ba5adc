"""What the ops of this folder refuse. Shapes, dtypes and devices cost nothing to look at; contents are read on a CPU,
or where a caller asks for it (on a GPU that stops the stream)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime.dtypes import FLOATS, QUANTISED
from .reference import Scale

Cache = torch.Tensor | Sequence[torch.Tensor]


def parts_of(op: str, kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(kv_cache, None), or the pair (k, v)."""
    if isinstance(kv_cache, torch.Tensor):
        return kv_cache, None
    if len(kv_cache) != 2:
        raise ValueError(f"{op}: kv_cache is a sequence of {len(kv_cache)}: expected one tensor, or a pair of k and v")
    return kv_cache[0], kv_cache[1]


def check_write(
    op: str,
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What is written against where it goes."""
    _no_grad(op, kv_cache, v_cache, k, v)
    if k.dim() != 3:
        raise ValueError(f"{op}: k has shape {tuple(k.shape)}: expected [tokens, KV heads, head size]")
    if v.dim() != 3 or v.shape[:2] != k.shape[:2] or v.dtype != k.dtype:
        raise ValueError(
            f"{op}: v is {v.dtype} {tuple(v.shape)}: expected {k.dtype} [{k.shape[0]}, {k.shape[1]}, head size of v], "
            "as k is"
        )
    if k.dtype not in FLOATS:
        raise ValueError(f"{op}: k is {k.dtype}: expected fp16, bf16 or fp32")
    H, V = k.shape[2], v.shape[2]
    _check_cache(op, "kv_cache", kv_cache, k, H + V if v_cache is None else H)
    if v_cache is not None:
        _check_cache(op, "kv_cache[1]", v_cache, k, V)
        if v_cache.shape[:3] != kv_cache.shape[:3] or v_cache.dtype != kv_cache.dtype:
            raise ValueError(
                f"{op}: kv_cache[1] is {v_cache.dtype} {tuple(v_cache.shape)} but kv_cache[0] {kv_cache.dtype} "
                f"{tuple(kv_cache.shape)}: expected the same dtype, blocks, heads and block size"
            )
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"{op}: slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}: expected torch.int64 "
            f"[{k.shape[0]}], a slot for each token"
        )
    where = kv_cache.device
    for name, x in (("k", k), ("v", v), ("slot_mapping", slot_mapping), ("kv_cache[1]", v_cache)):
        if x is not None and x.device != where:
            raise ValueError(f"{op}: {name} is on {x.device}: expected {where}, where kv_cache is")


def _check_cache(op: str, name: str, cache: torch.Tensor, k: torch.Tensor, width: int) -> None:
    if cache.dim() != 4 or cache.shape[1] != k.shape[1] or cache.shape[3] != width or cache.shape[2] < 1:
        raise ValueError(
            f"{op}: {name} has shape {tuple(cache.shape)}: expected [blocks, {k.shape[1]} KV heads, block size, "
            f"{width}] to hold k {tuple(k.shape)} and its v"
        )
    if cache.dtype not in FLOATS and cache.dtype not in QUANTISED:
        raise ValueError(f"{op}: {name} is {cache.dtype}: expected a floating-point dtype, float8_e4m3fn or int8")


def scales_of(
    op: str, kv_cache: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[Scale, Scale]:
    """What the scales of k and v are: given, or to be written."""
    _no_grad(op, k_scale, v_scale)
    if kv_cache.dtype not in QUANTISED:
        if k_scale is not None or v_scale is not None:
            raise ValueError(
                f"{op}: k_scale and v_scale belong to a cache in float8_e4m3fn or int8, and this is {kv_cache.dtype}: "
                "leave them out"
            )
        return Scale(), Scale()
    if (k_scale is None) != (v_scale is None):
        raise ValueError(f"{op}: {'v_scale' if k_scale is None else 'k_scale'} comes alone: pass both or neither")
    if k_scale is None and kv_cache.dtype == torch.int8:
        raise ValueError(f"{op}: kv_cache is int8, in which whole numbers mean nothing alone: pass k_scale and v_scale")
    return _scale(op, "k_scale", k_scale, kv_cache, k), _scale(op, "v_scale", v_scale, kv_cache, k)


def _scale(op: str, name: str, scale: torch.Tensor | None, kv_cache: torch.Tensor, k: torch.Tensor) -> Scale:
    if scale is None:
        return Scale()
    slots = tuple(kv_cache.shape[:3])
    if scale.shape != slots and scale.numel() != 1:
        raise ValueError(
            f"{op}: {name} has shape {tuple(scale.shape)}: expected one element, or {list(slots)} to be written, "
            "one for each block, head and slot"
        )
    if scale.dtype != torch.float32 and k.dtype != torch.float64:
        raise ValueError(f"{op}: {name} is {scale.dtype}: expected torch.float32")
    if scale.device != kv_cache.device:
        raise ValueError(f"{op}: {name} is on {scale.device}: expected {kv_cache.device}, where kv_cache is")
    return Scale(written=scale) if scale.shape == slots else Scale(given=scale)


def check_norm_rope(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    """What is done to q and k on the way."""
    _no_grad(op, q, cos, sin, q_norm, k_norm)
    if q.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{op}: q has shape {tuple(q.shape)}: expected [{k.shape[0]}, heads, {k.shape[2]}], as k has "
            f"{tuple(k.shape)}"
        )
    if q.dtype != k.dtype:
        raise ValueError(f"{op}: q is {q.dtype} but k is {k.dtype}: expected the same dtype")
    if (cos is None) != (sin is None):
        raise ValueError(f"{op}: {'sin' if cos is None else 'cos'} comes alone: pass both tables or neither")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        if table.dim() != 2 or table.shape[0] != k.shape[0] or not 0 < 2 * table.shape[1] <= k.shape[2]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(table.shape)}: expected [{k.shape[0]}, 1 to {k.shape[2] // 2}], a row "
                "for each token and a column for each pair that is rotated"
            )
        if table.dtype != torch.float32 and k.dtype != torch.float64:
            raise ValueError(f"{op}: {name} is {table.dtype}: expected fp32, whatever k's dtype")
    if cos is not None and sin is not None and cos.shape != sin.shape:
        raise ValueError(f"{op}: cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}: expected the same")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != k.shape[2:] or weight.dtype not in FLOATS):
            raise ValueError(
                f"{op}: {name} is {weight.dtype} {tuple(weight.shape)}: expected a floating-point weight "
                f"[{k.shape[2]}], one for each element of a head"
            )
    for name, x in (("q", q), ("cos", cos), ("sin", sin), ("q_norm", q_norm), ("k_norm", k_norm)):
        if x is not None and x.device != k.device:
            raise ValueError(f"{op}: {name} is on {x.device}: expected {k.device}, where k is")


def _no_grad(op: str, *tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise RuntimeError(f"{op} has no gradient: call it under torch.no_grad() or torch.inference_mode()")


def check_slots(op: str, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Reads the slots: each within the cache, none named twice."""
    slots = [slot for slot in slot_mapping.tolist() if slot >= 0]
    there = kv_cache.shape[0] * kv_cache.shape[2]
    if slots and max(slots) >= there:
        raise ValueError(f"{op}: slot_mapping names slot {max(slots)}: kv_cache has {there} slots")
    if len(set(slots)) != len(slots):
        twice = next(slot for slot in slots if slots.count(slot) > 1)
        raise ValueError(f"{op}: slot_mapping names slot {twice} twice: expected a slot of its own for every token")


# ---------------------------------------------------------------------------------------------------- blocks


def check_read_scale(op: str, name: str, scale: torch.Tensor, cache: torch.Tensor) -> None:
    """A scale that dequantises ``cache``."""
    if scale.numel() != 1 and scale.shape != cache.shape[:3]:
        raise ValueError(
            f"{op}: {name} has shape {tuple(scale.shape)}: expected one element, or {list(cache.shape[:3])}, one for "
            "each block, head and slot"
        )


def check_blocks(op: str, name: str, caches: Sequence[torch.Tensor], block_dim: int) -> None:
    """Caches with as many blocks each, on one device."""
    if not caches:
        raise ValueError(f"{op}: {name} is empty: expected at least one tensor")
    _no_grad(op, *caches)
    for cache in caches:
        if not 0 <= block_dim < cache.dim():
            raise ValueError(
                f"{op}: block_dim={block_dim}, but {name} has shape {tuple(cache.shape)}: expected the dimension that "
                f"counts blocks, 0 to {cache.dim() - 1}"
            )
        if cache.shape[block_dim] != caches[0].shape[block_dim]:
            raise ValueError(
                f"{op}: {name} holds {caches[0].shape[block_dim]} and {cache.shape[block_dim]} blocks along dimension "
                f"{block_dim}: expected as many in each"
            )
        if cache.device != caches[0].device:
            raise ValueError(f"{op}: {name} is on {caches[0].device} and {cache.device}: expected one device")


def check_pairs(op: str, pairs: torch.Tensor, where: torch.device, why: str) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(
            f"{op}: pairs is {pairs.dtype} {tuple(pairs.shape)}: expected torch.int64 [n, 2], source and target "
            "block of each copy"
        )
    if pairs.device != where:
        raise ValueError(f"{op}: pairs is on {pairs.device}: expected {where}, {why}")


def check_targets(op: str, pairs: Sequence[Sequence[int]], blocks: tuple[int, int]) -> list[tuple[int, int]]:
    """The pairs that are no padding, with sources and targets within ``blocks`` of them, and no target named twice."""
    real = [(source, target) for source, target in pairs if source >= 0 and target >= 0]
    for i, name in enumerate(("source", "target")):
        most = max((pair[i] for pair in real), default=-1)
        if most >= blocks[i]:
            raise ValueError(f"{op}: pairs names {name} block {most}: there are {blocks[i]} blocks")
    targets = {target for _, target in real}
    if len(targets) != len(real):
        raise ValueError(f"{op}: pairs names a target block twice: expected one source for each")
    return real


def check_apart(op: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Within one cache, no block is copied from and to."""
    both = {source for source, _ in pairs} & {target for _, target in pairs}
    if both:
        raise ValueError(
            f"{op}: pairs names block {min(both)} as source and as target: copies run in any order, so that it would "
            "be read before or after it is written; make it two calls"
        )
