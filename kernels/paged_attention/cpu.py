"""``paged_attention`` on a CPU: the pages are read where they lie. Semantics and letters: ``reference.py``.

Short queries (decode, speculation) read the whole cache once, so a copy of it would cost more than the work itself.
Attention to one page needs nothing of the others: each gives a result and the log of its denominator, and these merge
exactly (arXiv:2402.05099, appendix A). So pages are visited in the order in which they lie in the pool, where
neighbours are one view and one call, whoever owns them:

    the owner's rows of q [E, K, R, H]  x  E neighbouring pages [E, K, B, ...]  ->  out [E, K, R, Hv], lse [E, K, R]

with R = G * Q rows, the grouped heads of a sequence's Q queries. Keys that a row does not see are masked. Slots that
nobody owns are masked too, but NaN times a weight of 0 is NaN: where one comes out, the pages that are owned in part
are visited again, each by itself, up to the last slot that is seen.

Long queries (prefill) share a copy of the keys, made segment by segment, so that memory does not grow with the
sequence. A causal mask alone wants one causal call over the step's own keys and one without a mask for each segment
before them; other masks are formed for a block of queries at a time, where not all of them see a key.

What is done with pages that lie together is in ``cpu_pages.py``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange

from . import reference
from .cpu_pages import CPU, Pages, Partial, at, attend, bias_of, bits_of, converted, flash, flashes
from .options import AttentionOptions

_SHORT = 16  # queries of a sequence, at most, for which pages are visited where they lie
_BRIDGED_BYTES = 64 << 10  # of pages that nobody asked for, read along to keep what lies around them one view
_SEGMENT = 2048  # keys that long queries copy at a time
_BLOCK = 128  # queries that attend to a segment at a time


class _Span(NamedTuple):
    """One sequence of the step: its queries are rows ``start`` to ``start + queries`` of q."""

    start: int
    queries: int
    length: int
    prefix: int
    first: int  # page of the sequence that any query sees
    table: tuple[int, ...]  # that one and those behind it


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.paged_attention``, arguments and results."""
    tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(tokens, heads, v_cache.shape[-1])
    lse = torch.full((tokens, heads), float("-inf"), dtype=wide, device=CPU)
    pool = Pages(k_cache, v_cache, options.k_scale, options.v_scale)
    q = q if flashes(pool, options) and k_cache.dtype == v_cache.dtype == q.dtype else q.to(wide)
    for batch in _batches(block_tables, seq_lens, query_start_loc, k_cache.shape[2], options):
        rows = _rows(batch)
        part = _short if batch[0].queries <= _SHORT else _long
        mine = part(q[rows], pool, batch, options._replace(tree_mask=at(options.tree_mask, rows)))
        out[rows], lse[rows] = mine[0].to(out.dtype), mine[1]
    if options.sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, options.sinks.to(wide))
    share = (lse - whole.masked_fill(whole == float("-inf"), 0.0)).exp_()
    return out.mul_(share.unsqueeze(-1).to(out.dtype)), whole


def _batches(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    page_size: int,
    options: AttentionOptions,
) -> list[tuple[_Span, ...]]:
    """The sequences with queries: those with equally few together, those with many alone."""
    tables, lens, starts = block_tables.tolist(), seq_lens.tolist(), query_start_loc.tolist()
    prefixes = [0] * len(lens) if options.prefix_lens is None else options.prefix_lens.tolist()
    found: dict[int, list[_Span]] = {}
    for s, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        queries, length = end - start, lens[s]
        first = 0 if options.window is None else max(0, length - queries - options.window + 1) // page_size
        table = tuple(tables[s][first : -(-length // page_size)])
        together = queries if queries <= _SHORT else -s
        found.setdefault(together, []).append(_Span(start, queries, length, prefixes[s], first, table))
    return [tuple(batch) for batch in found.values()]


def _rows(batch: Sequence[_Span]) -> slice | torch.Tensor:
    """The batch's rows of q: a slice where they follow each other, else an index."""
    first, queries = batch[0].start, batch[0].queries
    if all(span.start == first + i * queries for i, span in enumerate(batch)):
        return slice(first, first + len(batch) * queries)
    return torch.tensor([row for span in batch for row in range(span.start, span.start + queries)], device=CPU)


def _grouped(q: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
    """[S * Q, N, H] -> [S, K, G * Q, H]: the grouped heads of all queries are rows of their KV head."""
    return rearrange(q, "(s q) (k g) h -> s k (g q) h", s=count, k=kv_heads)


def _ungrouped(x: torch.Tensor, queries: int) -> torch.Tensor:
    """[S, K, G * Q, ...] -> [S * Q, N, ...]"""
    return rearrange(x, "s k (g q) ... -> (s q) (k g) ...", q=queries)


# ----------------------------------------------------------------------------------------------------- short queries


class _Mask(NamedTuple):
    """What the queries of each visit see of their page, and what masks and ALiBi add to the scores.

    Slots that none of them sees at either end are left out: B is here the number of the others.
    """

    slots: slice
    seen: torch.Tensor  # [E, Q, B] bool
    bias: torch.Tensor | None  # [E, 1 or K, 1 or R, B]


class _Visits(NamedTuple):
    """The visits to pages, E of them in the order of the pool, and how their results are put together.

    A bag is one row of one sequence, of S * R' with R' = K * R; ``embedding_bag`` adds up what its visits found.
    """

    pages: list[int]
    runs: list[slice]  # visits to neighbouring pages
    owners: torch.Tensor  # [E], which sequence of the batch
    firsts: torch.Tensor  # [E], position of the page's first token
    asked: list[int]  # visits that are not there to fill a gap
    mask: _Mask  # but for trees and ALiBi
    parts: torch.Tensor  # [S, P]: each sequence's visits
    padding: torch.Tensor  # [S, P, 1]: where it has fewer than P
    which: torch.Tensor  # rows of [E * R', Hv], bag by bag
    bags: torch.Tensor  # [S * R'], where each begins


def _short(q: torch.Tensor, pool: Pages, batch: tuple[_Span, ...], options: AttentionOptions) -> Partial:
    """q [S * Q, N, H], Q queries of each sequence -> out [S * Q, N, Hv], lse [S * Q, N]."""
    queries, heads = batch[0].queries, (q.shape[1], pool.k.shape[1])
    page_bytes = (pool.k[0].numel() + pool.v[0].numel()) * pool.k.element_size()
    wide = torch.promote_types(q.dtype, torch.float32)
    kind = (options.causal, options.window, options.prefix_lens is not None)
    visits = _visits(batch, pool.k.shape[2], _BRIDGED_BYTES // page_bytes, heads, kind, wide)
    mask = visits.mask
    if not (options.tree_mask is options.alibi_slopes is None):
        mask = _mask(visits.owners, visits.firsts, batch, pool.k.shape[2], heads, wide, options)
    rows = _grouped(q, len(batch), heads[1])[visits.owners]
    found = []
    for run in visits.runs:
        first = visits.pages[run.start]
        pages = pool.at(slice(first, first + run.stop - run.start), slice(None), mask.slots)
        found.append(attend(rows[run], pages, at(mask.bias, run), options))
    outs, lses = found[0] if len(found) == 1 else (torch.cat(x) for x in zip(*found))
    out, lse = _merge_visits(outs, lses, visits)
    if out.sum().isnan():
        _visit_again(rows, pool, visits, mask, (outs, lses), options)
        out, lse = _merge_visits(outs, lses, visits)
    return _ungrouped(out, queries), _ungrouped(lse, queries)


@functools.lru_cache(4)
def _visits(
    batch: tuple[_Span, ...],
    page_size: int,
    bridged: int,
    heads: tuple[int, int],
    kind: tuple[bool, int | None, bool],
    dtype: torch.dtype,
) -> _Visits:
    """Every page that a sequence needs, sorted, gaps of up to ``bridged`` pages filled. All layers of a step share it.

    In a run no page comes twice: what several sequences share is visited in as many runs. ``heads`` are N and K,
    ``kind`` says whether the mask is causal, its window, and whether there are prefixes.
    """
    times: Counter[int] = Counter()
    wanted = []
    for owner, span in enumerate(batch):
        for i, page in enumerate(span.table, start=span.first):
            wanted.append((times[page], page, owner, i * page_size))
            times[page] += 1
    pages: list[int] = []
    owners: list[int] = []
    firsts: list[int] = []
    starts = [0]
    of_owner: list[list[int]] = [[] for _ in batch]
    for _, page, owner, first in sorted(wanted):
        gap = page - pages[-1] - 1 if pages else 0
        if not 0 <= gap <= bridged:
            starts.append(len(pages))
            gap = 0
        pages += range(page - gap, page + 1)
        owners += [owner] * (gap + 1)
        firsts += [first] * (gap + 1)
        of_owner[owner].append(len(pages) - 1)
    runs = [slice(*run) for run in pairwise((*starts, len(pages)))]
    asked = [visit for mine in of_owner for visit in mine]
    whose, where = (torch.tensor(x, device=CPU) for x in (owners, firsts))
    options = AttentionOptions(1.0, *kind[:2], prefix_lens=torch.empty(0, device=CPU) if kind[2] else None)
    mask = _mask(whose, where, batch, page_size, heads, dtype, options)
    return _Visits(pages, runs, whose, where, asked, mask, *_bags(of_owner, heads[0] * batch[0].queries))


def _bags(of_owner: list[list[int]], rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``parts``, ``padding``, ``which`` and ``bags`` of _Visits; ``rows`` is R'."""
    longest = max(map(len, of_owner))
    index = torch.tensor([mine + [mine[0]] * (longest - len(mine)) for mine in of_owner], device=CPU)
    counts = torch.tensor([len(mine) for mine in of_owner], device=CPU)
    padding = torch.arange(longest, device=CPU) >= counts[:, None]
    which = (index[:, None] * rows + torch.arange(rows, device=CPU)[:, None])[~padding[:, None].expand(-1, rows, -1)]
    ends = counts.repeat_interleave(rows).cumsum(0)
    return index, padding[:, :, None], which, F.pad(ends[:-1], (1, 0))


def _mask(
    owners: torch.Tensor,
    firsts: torch.Tensor,
    batch: Sequence[_Span],
    page_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    options: AttentionOptions,
) -> _Mask:
    """The mask of visits by ``owners`` to pages that begin at the positions ``firsts``."""
    queries = batch[0].queries
    both = torch.tensor([(span.length, span.prefix) for span in batch], device=CPU)[owners]
    lengths, prefixes = both[:, :1, None], both[:, 1:, None]
    context = lengths - queries
    positions = context + torch.arange(queries, device=CPU)[:, None]
    keys = firsts[:, None, None] + torch.arange(page_size, device=CPU)
    tree = None if options.tree_mask is None else options.tree_mask.unflatten(0, (len(batch), queries))[owners]
    prefix_len = None if options.prefix_lens is None else prefixes
    seen = reference.visible(positions, keys, lengths, context, options, prefix_len=prefix_len, tree=tree)
    some = seen.flatten(0, 1).any(0).nonzero().flatten().tolist() or [0]
    slots = slice(some[0], some[-1] + 1)
    seen, distance = seen[..., slots], (positions - keys)[..., slots]
    return _Mask(slots, seen, bias_of(seen, distance, heads, dtype, options))


def _visit_again(
    rows: torch.Tensor, pool: Pages, visits: _Visits, mask: _Mask, results: Partial, options: AttentionOptions
) -> None:
    """Put right the results of pages that are owned in part: one at a time, over the slots that are seen alone."""
    outs, lses = results
    owned = mask.seen.any(1)  # [E, B]
    whole = owned.all(-1).tolist()
    for i in (visit for visit in visits.asked if not whole[visit]):
        outs[i], lses[i] = 0.0, float("-inf")
        some = owned[i].nonzero().flatten().tolist()
        if some:
            one, slots = slice(i, i + 1), slice(mask.slots.start + some[0], mask.slots.start + some[-1] + 1)
            page = pool.at(slice(visits.pages[i], visits.pages[i] + 1), slice(None), slots)
            bias = None if mask.bias is None else mask.bias[one, ..., some[0] : some[-1] + 1]
            outs[one], lses[one] = attend(rows[one], page, bias, options)


def _merge_visits(outs: torch.Tensor, lses: torch.Tensor, visits: _Visits) -> Partial:
    """Every sequence's visits as one result: outs [E, K, R, Hv], lses [E, K, R] -> [S, K, R, Hv], [S, K, R]."""
    if visits.parts.shape[1] == 1:
        only = visits.parts[:, 0]
        return outs[only], lses[only]
    outs, lses = outs.transpose(1, 2), lses.transpose(1, 2)  # as FlashAttention lays them out
    parts = lses.flatten(1)[visits.parts].masked_fill_(visits.padding, float("-inf"))  # [S, P, R']
    lse = torch.logsumexp(parts, 1)
    weights = (parts - lse.masked_fill(lse == float("-inf"), 0.0)[:, None]).exp_().transpose(1, 2)
    if len(visits.which) < weights.numel():
        weights = weights[~visits.padding.mT.expand_as(weights)]
    values = outs.reshape(-1, outs.shape[-1]).to(lse.dtype)
    out = F.embedding_bag(visits.which, values, visits.bags, mode="sum", per_sample_weights=weights.flatten())
    shape = (len(visits.parts), *outs.shape[1:3])
    return out.view(*shape, -1).transpose(1, 2), lse.view(shape).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------ long queries


def _long(q: torch.Tensor, pool: Pages, batch: Sequence[_Span], options: AttentionOptions) -> Partial:
    """q [Q, N, H] of one sequence -> out [Q, N, Hv], lse [Q, N]."""
    (span,) = batch
    context = span.length - span.queries
    if _plain(pool, options):  # one causal call over the step's own keys, and calls without a mask over those before
        step, segments = span.queries, [*_cut(0, context, _SEGMENT), range(context, span.length)]
    else:
        step, segments = _BLOCK, _cut(span.first * pool.k.shape[2], span.length, _SEGMENT)
    blocks = [slice(block.start, block.stop) for block in _cut(0, span.queries, step)]
    parts: list[list[Partial]] = [[] for _ in blocks]
    for keys in segments:
        segment = converted(_joined(pool, span, keys), q.dtype)
        for block, found in zip(blocks, parts):
            if keys.start == context and _plain(pool, options):
                found.append(_causal(q[block], segment, options))
            else:
                found += _over_segment(q[block], segment, keys, block, span, options)
    out = q.new_zeros(*q.shape[:2], pool.v.shape[-1])
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32), device=CPU)
    for block, found in zip(blocks, parts):
        if found:
            out[block], lse[block] = (_ungrouped(x, block.stop - block.start) for x in _merge(found))
    return out, lse


def _plain(pool: Pages, options: AttentionOptions) -> bool:
    others = (options.window, options.tree_mask, options.prefix_lens, options.alibi_slopes)
    return options.causal and flashes(pool, options) and all(x is None for x in others)


def _cut(start: int, stop: int, step: int) -> list[range]:
    return [range(i, min(i + step, stop)) for i in range(start, stop, step)]


def _joined(pool: Pages, span: _Span, keys: range) -> Pages:
    """``keys`` of one sequence, end to end, as one page: a copy [1, K, keys, ...]."""
    page_size = pool.k.shape[2]
    first, end = keys.start // page_size, -(-keys.stop // page_size)
    pages = span.table[first - span.first : end - span.first]
    slots = slice(keys.start - first * page_size, keys.stop - first * page_size)

    def join(x: torch.Tensor) -> torch.Tensor:
        bits = bits_of(x)
        return torch.cat([bits[page] for page in pages], 1)[None, :, slots].view(x.dtype)

    return pool.map(join)


def _causal(q: torch.Tensor, segment: Pages, options: AttentionOptions) -> Partial:
    """The step's queries q [Q, N, H] over its own keys [1, K, Q, ...]."""
    heads = rearrange(q, "q (k g) h -> k g q h", k=segment.k.shape[1])
    k, v = (x[0].unsqueeze(1).expand(-1, heads.shape[1], -1, -1) for x in (segment.k, segment.v))
    out, lse = flash(heads, k, v, is_causal=True, scale=options.scale)
    return out.flatten(1, 2)[None], lse.flatten(1, 2)[None]


def _over_segment(
    q: torch.Tensor, segment: Pages, keys: range, block: slice, span: _Span, options: AttentionOptions
) -> list[Partial]:
    """The queries ``block`` of the sequence, q [Q, N, H], over a segment of its keys; nothing where they see none."""
    rows = _grouped(q, 1, segment.k.shape[1])
    context = span.length - span.queries
    positions = torch.arange(context + block.start, context + block.stop, device=CPU)[:, None]
    tree = at(options.tree_mask, block)
    prefix = None if options.prefix_lens is None else torch.tensor(span.prefix, device=CPU)
    parts = []
    for piece, masked in _pieces(context + block.start, context + block.stop - 1, span, options):
        some = range(max(piece.start, keys.start), min(piece.stop, keys.stop))
        if not some:
            continue
        bias = None
        if masked:
            where = torch.arange(some.start, some.stop, device=CPU)
            seen = reference.visible(positions, where, span.length, context, options, prefix_len=prefix, tree=tree)
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = bias_of(seen[None], (positions - where)[None], (q.shape[1], rows.shape[1]), wide, options)
        slots = slice(some.start - keys.start, some.stop - keys.start)
        parts.append(attend(rows, segment.at(slice(None), slice(None), slots), bias, options))
    return parts


def _pieces(first: int, last: int, span: _Span, options: AttentionOptions) -> list[tuple[range, bool]]:
    """Keys that queries at positions ``first`` to ``last`` may see, in ranges; which of these want a mask.

    What all of them see wants none, and is most of a long sequence.
    """
    low = some_low = 0
    high = some_high = span.length
    if options.tree_mask is not None:
        high = span.length - span.queries
    elif options.causal:
        high, some_high = (max(p + 1, min(span.prefix, span.length)) for p in (first, last))
    if options.window is not None:
        low, some_low = (max(0, p - options.window + 1) for p in (last, first))
        if not options.causal:
            high, some_high = (min(span.length, p + options.window) for p in (first, last))
    if options.alibi_slopes is not None or low >= high:
        return [(range(some_low, some_high), True)]
    return [(range(some_low, low), True), (range(low, high), False), (range(high, some_high), True)]


def _merge(parts: list[Partial]) -> Partial:
    """Partial results of the same rows as one."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = (torch.stack(x) for x in zip(*parts))
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
    return (outs * weights.unsqueeze(-1)).sum(0).to(outs.dtype), lse
