"""The specification of ``paged_attention`` in plain torch: every feature, clear rather than fast.

Sequence s owns the queries query_start_loc[s] : query_start_loc[s + 1] of this step, the last of its seq_lens[s] cached
tokens; before them lie context[s] = seq_lens[s] - q_len[s]. Query i of s stands at p = context[s] + i, and token j of s
lives in slot j % B of block block_tables[s, j // B].

    score_ij = scale * q_i . k_j * k_scale           (k_scale 1 where the cache is not quantised)
    score_ij = softcap * tanh(score_ij / softcap)    with softcap
    score_ij = score_ij - slope * |p - j|            with alibi_slopes
    out_i = sum_j exp(score_ij) v_j v_scale / (sum_j exp(score_ij) + exp(sink))     over the keys j that i sees
    lse_i = log of that denominator

``visible`` says which keys are seen. A row that sees none gives 0, and its lse is its head's sink, or -inf without one.
Rows of q past query_start_loc[S] are padding and see nothing. Keys that no query sees are not read, nor are the entries
of the table that only such keys need.

Letters: T tokens of this step, S sequences, Q queries of one, N query heads, K KV heads, G = N / K, H head size of q
and k, Hv of v, B block size, P table columns, L keys.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from einops import einsum, rearrange

from .options import AttentionOptions

_SCORES_AT_ONCE = 2**24  # scores held at a time: queries of a long prefill go in chunks


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend; see above.

    q [T, N, H], k_cache [blocks, K, B, H], v_cache [blocks, K, B, Hv], block_tables [S, P], seq_lens [S],
    query_start_loc [S + 1] -> out [T, N, Hv] in q's dtype, lse [T, N] in fp32 (fp64 for an fp64 q).

    Sums and exponentials are fp32, or fp64 for an fp64 q. Under a 16-bit q, what a product takes is rounded to it
    first: k, v and the weights.
    """
    tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, heads, v_cache.shape[-1])
    lse = torch.full((tokens, heads), float("-inf"), dtype=wide, device=q.device)
    if options.sinks is not None:
        lse[:] = options.sinks
    starts = query_start_loc.tolist()
    for s, ((start, end), length) in enumerate(zip(pairwise(starts), seq_lens.tolist())):
        step = max(1, _SCORES_AT_ONCE // max(1, heads * length))
        for row in range(start, end, step):
            rows = slice(row, min(row + step, end))
            positions = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (length - end)
            seen = visible(
                positions,
                torch.arange(length, device=q.device),
                length,
                length - (end - start),
                options,
                prefix_len=None if options.prefix_lens is None else options.prefix_lens[s],
                tree=None if options.tree_mask is None else options.tree_mask[rows],
            )
            out[rows], lse[rows] = _attend(q[rows], k_cache, v_cache, block_tables[s], positions, seen, options)
    return out, lse


def visible(
    positions: torch.Tensor,
    keys: torch.Tensor,
    length: int | torch.Tensor,
    context: int | torch.Tensor,
    options: AttentionOptions,
    *,
    prefix_len: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys the queries see: bool [..., Q, L].

    Args:
        positions: [..., Q, 1] of the queries.
        keys: [..., L] or [..., 1, L], positions of the keys; one that is not below ``length`` is never seen.
        length, context: the sequence's tokens with and without this step's; numbers, or tensors that broadcast.
        options: ``causal`` and ``window`` are read here.
        prefix_len: ``options.prefix_lens`` of this sequence (or of each, as something that broadcasts).
        tree: [..., Q, W], rows of ``options.tree_mask`` for these queries.
    """
    seen = keys < length
    if tree is not None:
        node = (keys - context).expand(*positions.shape[:-1], keys.shape[-1])
        in_tree = torch.take_along_dim(tree, node.clamp(0, tree.shape[-1] - 1), dim=-1)
        return seen & ((node < 0) | in_tree)
    if options.causal:
        past = keys <= positions
        seen = seen & (past if prefix_len is None else past | (keys < prefix_len))
    if options.window is not None:
        seen = seen & (keys > positions - options.window)
        if not options.causal:
            seen = seen & (keys < positions + options.window)
    return torch.broadcast_tensors(seen, positions)[0]


def scores(
    products: torch.Tensor,
    options: AttentionOptions,
    *,
    k_scale: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    distance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores from q . k, [..., Q, L] in fp32 or fp64.

    ``k_scale``, ``slopes`` and ``distance`` (|p - j|; asked for with ``slopes``) broadcast against the products.
    """
    scored = products * options.scale
    if k_scale is not None:
        scored = scored * k_scale
    if options.softcap is not None:
        scored = options.softcap * torch.tanh(scored / options.softcap)
    if slopes is not None and distance is not None:
        scored = scored - slopes * distance
    return scored


def gather(cache: torch.Tensor, table: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Tokens ``keys`` [L] of the sequence with ``table`` [P]: from cache [blocks, K, B, ...] a copy [K, L, ...]."""
    block_size = cache.shape[2]
    return cache[table[keys // block_size].long(), :, keys % block_size].transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    seen: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of one sequence: q [Q, N, H], positions [Q, 1], seen [Q, L] -> [Q, N, Hv], [Q, N]."""
    # A masked score becomes weight 0, but 0 * NaN is NaN: what nobody sees must not be there at all.
    keys = seen.any(0).nonzero().flatten()
    seen = seen[:, keys]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (gather(cache, table, keys).to(q.dtype).to(wide) for cache in (k_cache, v_cache))
    k_scale, v_scale = (_per_key(scale, table, keys, wide) for scale in (options.k_scale, options.v_scale))
    grouped = rearrange(q.to(wide), "q (k g) h -> k g q h", k=len(k))

    def per_head(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else rearrange(x.to(wide), "(k g) -> k g 1 1", k=len(k))

    scored = scores(
        einsum(grouped, k, "k g q h, k l h -> k g q l"),
        options,
        k_scale=k_scale,
        slopes=per_head(options.alibi_slopes),
        distance=(positions - keys).abs(),
    )
    scored = scored.masked_fill(~seen, float("-inf"))
    sinks = per_head(options.sinks)
    lse = torch.logsumexp(scored, -1, keepdim=True)  # -inf where nothing is seen
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    top = scored.amax(-1, keepdim=True) if len(keys) else torch.zeros_like(lse)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scored - top)
    if v_scale is not None:
        weights = weights * v_scale
    weighted = einsum(weights.to(q.dtype).to(wide), v, "k g q l, k l h -> k g q h")
    # exp(top - lse) is 1 over the sum of exp(score - top); where nothing is seen the sum of values is 0 already.
    out = weighted * torch.exp(top - lse).masked_fill(lse == float("-inf"), 0.0)
    return rearrange(out, "k g q h -> q (k g) h").to(q.dtype), rearrange(lse, "k g q 1 -> q (k g)")


def _per_key(
    scale: torch.Tensor | None, table: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """A quantised cache's scale as it multiplies scores [K, G, Q, L]: one number, or [K, 1, 1, L]."""
    if scale is None or scale.numel() == 1:
        return None if scale is None else scale.to(dtype).reshape(())
    return rearrange(gather(scale, table, keys).to(dtype), "k l -> k 1 1 l")
