"""The specification of ``paged_attention`` and ``write_kv_``, in plain torch.

Sequence s owns the queries query_start_loc[s] : query_start_loc[s + 1] of this step, the last of its seq_lens[s] cached
tokens. Token j of s lives in slot j % B of block block_tables[s, j // B]; a slot holds a KV head's K and V side by
side. Query i sits at position seq_lens[s] - q_len[s] + i and sees every key up to and including its own:

    out = softmax(scale * q @ k^T + causal mask) @ v

Letters: T tokens of this step, S sequences, N query heads, K KV heads, G = N / K, H head size, B block size, L length.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [T, N, H], kv_cache [blocks, K, B, 2H], tables [S, P], seq_lens [S], query_start_loc [S + 1] -> [T, N, H].

    Rows of q past query_start_loc[S] are padding and give zeros. Computes in q's dtype (fp64 too).
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    q_lens = [end - start for start, end in pairwise(starts)]
    decodes = [s for s, q_len in enumerate(q_lens) if q_len == 1]
    if decodes:
        rows = torch.tensor([starts[s] for s in decodes], device=q.device)
        chosen = torch.tensor(decodes, device=q.device)
        longest = max(lens[s] for s in decodes)
        out[rows] = _decode(q[rows], kv_cache, block_tables[chosen], seq_lens[chosen], longest, scale)
    for s, q_len in enumerate(q_lens):
        if q_len > 1:
            span = slice(starts[s], starts[s + 1])
            out[span] = _prefill(q[span], kv_cache, block_tables[s], lens[s], scale)
    return out


def _gather(kv_cache: torch.Tensor, tables: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` slots of each table [S, P], as one contiguous copy [S, K, length, 2H].

    A short sequence's table may end in anything; what lies there is read from block 0 and is the caller's to mask.
    """
    block_size = kv_cache.shape[2]
    used = tables[:, : -(-length // block_size)].long().clamp(0, kv_cache.shape[0] - 1)
    return rearrange(kv_cache[used], "s p k b h -> s k (p b) h")[:, :, :length]


def _decode(
    q: torch.Tensor, kv_cache: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """One query per sequence: q [S, N, H] -> [S, N, H], all sequences in one call, padded to the longest."""
    kv = _gather(kv_cache, tables, longest)
    seen = torch.arange(longest, device=q.device) < seq_lens[:, None]  # [S, L]
    # A masked score becomes probability 0, but 0 * NaN is NaN: what is not ours must not be there at all.
    k, v = kv.masked_fill_(~seen[:, None, :, None], 0.0).chunk(2, dim=-1)
    grouped = rearrange(q, "s (k g) h -> s k g h", k=k.shape[1])
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None, :], scale=scale)
    return rearrange(out, "s k g h -> s (k g) h")


def _prefill(q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """Several queries of one sequence: q [Q, N, H] -> [Q, N, H]; the group's heads are extra rows of their KV head."""
    k, v = _gather(kv_cache, table[None], length).chunk(2, dim=-1)
    positions = torch.arange(length - len(q), length, device=q.device)
    seen = torch.arange(length, device=q.device) <= positions[:, None]  # [Q, L]
    heads = k.shape[1]
    group = q.shape[1] // heads
    grouped = rearrange(q, "q (k g) h -> 1 k (g q) h", k=heads)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen.repeat(group, 1), scale=scale)
    return rearrange(out, "1 k (g q) h -> q (k g) h", g=group)


def write_kv_(kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """k, v [T, K, H] into kv_cache [blocks, K, B, 2H] at slot_mapping [T]; a negative slot is padding, skipped."""
    block_size = kv_cache.shape[2]
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    kv_cache[slots // block_size, :, slots % block_size] = torch.cat((k[real], v[real]), dim=-1)
