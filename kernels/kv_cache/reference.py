"""The specification of the ops in this folder, in plain torch.

Slot ``block * B + offset`` of a cache holds a token's K and V of every KV head. What is written there is, with x the
token's k or v after normalisation and rotation, in fp32 (fp64 for fp64):

    unquantised     x, rounded once to the cache's dtype
    fp8, int8       x (1 / scale), rounded to nearest, ties to even, saturated (+-448; -128 and 127); ``scale``
                    multiplies to dequantise. In fp8 NaN stays NaN; int8 has none and holds 0
    scale, given    one number for the whole cache; fp8 does without one
    scale, written  one for each token and head: max|x| / L with L = 448 or 127, not below 2^-126; 1 where x is all
                    zero, infinite where x holds NaN or infinity, so that the head reads as NaN

Normalisation is RMSNorm over each head, with ``norm_offset`` added to the weight (Qwen3: 0; Gemma 3: 1), and rotation
that of ``kernels/rope/``: both as in those folders' references, but nothing is rounded between them.

Letters: T tokens, N query heads, K KV heads, H head size of q and k, Hv of v, P rotated elements, B block size, S
sequences, L length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange

from ..norm.reference import rms_norm
from ..rope.reference import apply_rope
from ..runtime.dtypes import LARGEST, QUANTISED

_TINY = 2.0**-126  # the smallest normal number: its inverse is finite


class Scale(NamedTuple):
    """How a cache of fp8 or int8 is scaled: by one given number, or by those that a write leaves behind."""

    given: torch.Tensor | None = None  # one element
    written: torch.Tensor | None = None  # [blocks, K, B]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of each row of x [..., H] that is to be quantised to ``dtype``: [...]."""
    amax = x.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(-1)
    # Over a tensor: torch's GPU kernels multiply by the inverse of a number, which rounds twice.
    return torch.where(amax > 0, (amax / torch.full_like(amax, LARGEST[dtype])).clamp_min(_TINY), 1.0)


def quantise(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x over ``scale``, which broadcasts, in fp8 or int8; None is 1."""
    if scale is not None:
        x = x * (1.0 / scale)  # a kernel cannot afford to divide every element
    if dtype == torch.int8:
        return x.round().nan_to_num(nan=0.0).clamp(-128, 127).to(dtype)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def dequantise(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the entries x of a cache stand for, in ``dtype``; ``scale`` broadcasts, None is 1."""
    values = x.to(wide(dtype))
    return (values if scale is None else values * scale).to(dtype)


def norm_rope(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    weight: torch.Tensor | None,
    eps: float,
    norm_offset: float,
) -> torch.Tensor:
    """x [T, heads, H] normalised where there is a weight, rotated where there are tables; fp32, fp64 for fp64."""
    x = x.to(wide(x.dtype))
    if weight is not None:
        x = rms_norm(x, weight.to(x.dtype), eps, norm_offset, x.dtype)
    if cos is not None and sin is not None:
        x, _ = apply_rope(x, None, cos, sin, interleaved)
    return x


def write_kv_(
    kv_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """k [T, K, H] and v [T, K, Hv] into kv_cache [blocks, K, B, H + Hv], or [.., H] and v_cache [.., Hv]; in place.

    A token whose slot is negative is padding: nothing is written.
    """
    k_cache = kv_cache
    if v_cache is None:
        k_cache, v_cache = kv_cache[..., : k.shape[-1]], kv_cache[..., k.shape[-1] :]
    real = slot_mapping >= 0
    if not bool(real.all()):
        k, v, slot_mapping = k[real], v[real], slot_mapping[real]
    block_size = kv_cache.shape[2]
    where = slot_mapping // block_size, slot_mapping % block_size
    for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        _put_(cache, x, where, scale)


def _put_(cache: torch.Tensor, x: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], scale: Scale) -> None:
    if cache.dtype in QUANTISED:
        x, by = x.to(wide(x.dtype)), scale.given
        if scale.written is not None:
            rows = scale_of(x, cache.dtype)
            scale.written.transpose(1, 2)[where] = rows.to(scale.written.dtype)
            by = rows.unsqueeze(-1)
        x = quantise(x, by, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # not every device moves it by index
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    cache.transpose(1, 2)[where] = x.to(cache.dtype)


def copy_blocks_(caches: list[torch.Tensor], pairs: torch.Tensor, block_dim: int) -> None:
    """Block ``pairs[i, 0]`` over block ``pairs[i, 1]`` in each cache, counted along ``block_dim``; in place.

    Pairs with a negative entry are padding.
    """
    sources, targets = pairs[(pairs >= 0).all(1)].unbind(1)
    for cache in caches:
        if cache.dtype == torch.float8_e4m3fn:
            cache = cache.view(torch.uint8)
        blocks = cache.movedim(block_dim, 0)
        blocks[targets] = blocks[sources]


def gather(cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` slots of each sequence [S, K, length, ...], zero from its end on.

    cache [blocks, K, B, ...], tables [S, pages], seq_lens [S]. A short sequence's table may end in anything.
    """
    table = block_tables[:, : -(-length // cache.shape[2])].long()
    bits = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    slots = rearrange(bits[table.clamp(0, cache.shape[0] - 1)], "s p k b ... -> s k (p b) ...")[:, :, :length]
    seen = torch.arange(length, device=seq_lens.device) < seq_lens[:, None]  # [S, L]
    seen = seen[:, None].reshape(len(seen), 1, length, *[1] * (slots.dim() - 3))
    return torch.where(seen, slots, 0).view(cache.dtype)
