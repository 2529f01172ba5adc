"""``paged_attention`` on a CPU in invariant mode: a query's result follows from its position, and from what it sees.

A library may add up in another order wherever a shape differs. Here every call has one shape: queries go in blocks of
``_QUERIES`` and keys in segments of ``_KEYS``, both cut at multiples of these, counted in positions of the sequence.
Query p is row p % _QUERIES of its block, whatever else the step holds; rows without a query are zero and see nothing,
slots without a key are zero and unseen. Segments are visited in ascending order, from the first that the block's first
position may see, and put together by an online softmax (Milakov and Gimelshein, arXiv:1805.02867):

    m' = max(m, scores)    l' = l e^(m - m') + sum e^(scores - m')    o' = o e^(m - m') + e^(scores - m') V

A segment of which a query sees nothing leaves its m, l and o as they are: factors of 1 and sums of 0 are exact.
One thread computes. Neither batch nor chunks, blocks of the cache nor the number of threads change any bit.

Semantics and letters: ``reference.py``; C = _QUERIES and B = _KEYS.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange

from ..runtime.processor import one_thread
from . import reference
from .cpu_pages import CPU, bits_of
from .options import AttentionOptions

_QUERIES = 8
_KEYS = 256  # a multiple of _QUERIES: the queries of a block are in one segment


class _Block:
    """Queries at the positions ``base`` to ``base + C`` of one sequence, and what they have found so far."""

    def __init__(self, base: int, q: torch.Tensor, rows: slice, v_size: int) -> None:
        """q [Q, N, H]: the block's queries, its ``rows``."""
        self.base, self.rows = base, rows
        x = q.new_zeros(_QUERIES, *q.shape[1:])
        x[rows] = q
        self.q = x
        self.top = q.new_full((q.shape[1], _QUERIES, 1), float("-inf"))  # m
        self.sum = q.new_zeros(q.shape[1], _QUERIES, 1)  # l
        self.out = q.new_zeros(q.shape[1], _QUERIES, v_size)  # o

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.base, self.base + _QUERIES, device=CPU)[:, None]


class _Segment(NamedTuple):
    """Keys at the positions ``first`` to ``first + B`` of one sequence."""

    first: int
    k: torch.Tensor  # [K, B, H]
    v: torch.Tensor  # [K, B, Hv]
    k_scale: torch.Tensor | None  # one element, or [K, 1, 1, B]
    v_scale: torch.Tensor | None


class _Sequence(NamedTuple):
    table: torch.Tensor  # [P]
    length: int
    context: int
    prefix: torch.Tensor | None  # a scalar
    tree: torch.Tensor | None  # [Q, W]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.paged_attention``, arguments and results. Queries of a sequence of length 0 are padding."""
    tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, heads, v_cache.shape[-1])
    lse = torch.full((tokens, heads), float("-inf"), dtype=wide, device=CPU)
    if options.sinks is not None:
        lse[:] = options.sinks
    with one_thread():
        for s, ((start, end), length) in enumerate(zip(pairwise(query_start_loc.tolist()), seq_lens.tolist())):
            if start == end or not length:
                continue
            prefix = None if options.prefix_lens is None else options.prefix_lens[s]
            tree = None if options.tree_mask is None else options.tree_mask[start:end]
            sequence = _Sequence(block_tables[s], length, length - (end - start), prefix, tree)
            for block in _attend(q[start:end], k_cache, v_cache, sequence, options):
                first = start + block.base + block.rows.start - sequence.context
                rows = slice(first, first + block.rows.stop - block.rows.start)
                mine, its_lse = _result(block, options)
                out[rows], lse[rows] = mine[block.rows], its_lse[block.rows]
    return out, lse


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sequence: _Sequence, options: AttentionOptions
) -> list[_Block]:
    """The queries q [Q, N, H] of one sequence, in blocks."""
    length, context = sequence.length, sequence.context
    wide = torch.promote_types(q.dtype, torch.float32)
    blocks = []
    for base in range(context // _QUERIES * _QUERIES, length, _QUERIES):
        rows = slice(max(context - base, 0), min(length - base, _QUERIES))
        mine = q[base + rows.start - context : base + rows.stop - context]
        blocks.append(_Block(base, mine.to(wide), rows, v_cache.shape[-1]))
    ranges = [_segments(block.base, sequence, options) for block in blocks]
    for index in range(min(each.start for each in ranges), max(each.stop for each in ranges)):
        segment = _gather(k_cache, v_cache, sequence, index * _KEYS, q.dtype, options)
        for block, visited in zip(blocks, ranges):
            if index in visited:
                _visit_(block, segment, sequence, q.dtype, options)
    return blocks


def _segments(base: int, sequence: _Sequence, options: AttentionOptions) -> range:
    """The segments that a block's queries may see, but for those that its own sequence does not have."""
    last = base + _QUERIES - 1
    low, high = 0, sequence.length - 1
    if options.causal and options.tree_mask is None:
        high = last if sequence.prefix is None else max(last, int(sequence.prefix) - 1)
    if options.window is not None:
        low = max(0, base - options.window + 1)
        high = high if options.causal else last + options.window - 1
    return range(low // _KEYS, min(high, sequence.length - 1) // _KEYS + 1)


def _gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sequence: _Sequence,
    first: int,
    dtype: torch.dtype,
    options: AttentionOptions,
) -> _Segment:
    """The keys from position ``first`` on, rounded to ``dtype`` as in the reference; zero where no query sees one.

    Blocks that every window has left may be another sequence's by now.
    """
    low = 0 if options.window is None else max(first, sequence.context - options.window + 1) - first
    keys = torch.arange(first + low, min(first + _KEYS, sequence.length), device=CPU)
    wide = torch.promote_types(dtype, torch.float32)

    def padded(cache: torch.Tensor) -> torch.Tensor:  # [K, B, ...]
        bits = bits_of(cache)
        found = bits.new_zeros(cache.shape[1], _KEYS, *cache.shape[3:])
        found[:, low : low + len(keys)] = reference.gather(bits, sequence.table, keys)
        return found.view(cache.dtype)

    def scale(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or x.numel() == 1:
            return None if x is None else x.to(wide).reshape(())
        return padded(x).to(wide)[:, None, None]

    k, v = (padded(cache).to(dtype).to(wide) for cache in (k_cache, v_cache))
    return _Segment(first, k, v, scale(options.k_scale), scale(options.v_scale))


def _visit_(
    block: _Block, segment: _Segment, sequence: _Sequence, dtype: torch.dtype, options: AttentionOptions
) -> None:
    """Add to ``block`` what its queries see of ``segment``."""
    kv_heads, positions = len(segment.k), block.positions
    keys = torch.arange(segment.first, segment.first + _KEYS, device=CPU)
    seen = reference.visible(
        positions,
        keys,
        sequence.length,
        sequence.context,
        options,
        prefix_len=sequence.prefix,
        tree=None if sequence.tree is None else _tree(block, sequence.context, sequence.tree),
    )
    grouped = rearrange(block.q, "c (k g) h -> k (g c) h", k=kv_heads)
    products = (grouped @ segment.k.mT).unflatten(1, (-1, _QUERIES))  # [K, G, C, B]
    slopes = options.alibi_slopes
    scored = reference.scores(
        products,
        options,
        k_scale=segment.k_scale,
        slopes=None if slopes is None else slopes.to(products.dtype).view(kv_heads, -1, 1, 1),
        distance=(positions - keys).abs(),
    )
    scored = scored.masked_fill(~seen, float("-inf")).flatten(0, 1)  # [N, C, B]
    top = torch.maximum(block.top, scored.amax(-1, keepdim=True))
    finite = top.masked_fill(top == float("-inf"), 0.0)
    kept = (block.top - finite).exp()
    weights = (scored - finite).exp()
    block.top, block.sum = top, block.sum * kept + weights.sum(-1, keepdim=True)
    weights = weights.unflatten(0, (kv_heads, -1))
    if segment.v_scale is not None:
        weights = weights * segment.v_scale
    found = weights.to(dtype).to(products.dtype).flatten(1, 2) @ segment.v  # [K, G * C, Hv]
    block.out = block.out * kept + found.view_as(block.out)


def _tree(block: _Block, context: int, tree: torch.Tensor) -> torch.Tensor:
    """The block's rows of ``tree`` [Q, W], those without a query False: [C, W]."""
    rows = tree.new_zeros(_QUERIES, tree.shape[1])
    first = block.base + block.rows.start - context
    rows[block.rows] = tree[first : first + block.rows.stop - block.rows.start]
    return rows


def _result(block: _Block, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """out [C, N, Hv] and lse [C, N]."""
    lse = block.top + block.sum.log()  # -inf where nothing was seen
    if options.sinks is not None:
        lse = torch.logaddexp(lse, options.sinks.to(lse.dtype).view(-1, 1, 1))
    share = (block.top - lse).exp().masked_fill(block.top == float("-inf"), 0.0)
    return (block.out * share).transpose(0, 1), lse.squeeze(-1).t()
