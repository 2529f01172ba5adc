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

``cpu_plan.py`` says which pages are visited, ``cpu_pages.py`` does what is done with pages that lie together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import reference
from .cpu_pages import CPU, Pages, Partial, at, attend, bias_of, bits_of, converted, flash, flashes
from .cpu_plan import Bags, Call, Mask, Plan, Span, Tables, Visits, batches, mask_of, runs_of
from .options import AttentionOptions

__all__ = ["Plan", "make_plan", "paged_attention"]

_SEGMENT = 2048  # keys that long queries copy at a time
_BLOCK = 128  # queries that attend to a segment at a time


def make_plan(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tables: Tables, options: AttentionOptions
) -> Plan | None:
    """For all calls over ``tables`` with heads, pages and mask like these; None if torch counts no changes of them."""
    prefixes = () if options.prefix_lens is None else (options.prefix_lens,)
    if any(x.is_inference() for x in (*tables, *prefixes)):
        return None
    return Plan(Call.of(q, k_cache, v_cache, options), tables, options)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
    plan: Plan | None = None,
    *,
    want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.paged_attention``, arguments and results; lse in any shape unless it is wanted.

    A plan that is not for this call is not used.
    """
    tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    pool = Pages(k_cache, v_cache, options.k_scale, options.v_scale)
    call, tables = Call.of(q, k_cache, v_cache, options), (block_tables, seq_lens, query_start_loc)
    planned = plan.batches if plan is not None and plan.fits(call, tables, options) else batches(call, tables, options)
    x = q if flashes(pool, options) and k_cache.dtype == v_cache.dtype == q.dtype else q.to(wide)
    if len(planned) == 1 and planned[0].visits is not None and planned[0].rows == slice(0, tokens):
        out, lse = _short(x, pool, planned[0].spans, planned[0].visits, call, options)
        out = out.to(q.dtype)
        lse = _ungrouped(lse, planned[0].spans[0].queries) if want_lse or options.sinks is not None else lse
    else:
        out = q.new_zeros(tokens, heads, v_cache.shape[-1])
        lse = torch.full((tokens, heads), float("-inf"), dtype=wide, device=CPU)
        for spans, rows, visits in planned:
            mine = options._replace(tree_mask=at(options.tree_mask, rows))
            if visits is None:
                found = _long(x[rows], pool, spans, mine)
            else:
                found = _short(x[rows], pool, spans, visits, call, mine)
                found = found[0], _ungrouped(found[1], spans[0].queries)
            out[rows], lse[rows] = found[0].to(out.dtype), found[1]
    if options.sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, options.sinks.to(wide))
    share = (lse - whole.masked_fill(whole == float("-inf"), 0.0)).exp_()
    return out.mul_(share.unsqueeze(-1).to(out.dtype)), whole


def _grouped(q: torch.Tensor, count: int, kv_heads: int) -> torch.Tensor:
    """[S * Q, N, H] -> [S, K, G * Q, H]: the grouped heads of all queries are rows of their KV head."""
    q = q.view(count, -1, kv_heads, q.shape[1] // kv_heads, q.shape[2])  # [S, Q, K, G, H]
    return q[:, 0] if q.shape[1] == 1 else q.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x: torch.Tensor, queries: int) -> torch.Tensor:
    """[S, K, G * Q, ...] -> [S * Q, N, ...]"""
    if queries == 1:
        return x.flatten(1, 2)
    x = x.unflatten(2, (-1, queries)).movedim(3, 1)  # [S, Q, K, G, ...]
    return x.flatten(2, 3).flatten(0, 1)


# ----------------------------------------------------------------------------------------------------- short queries


def _short(
    q: torch.Tensor, pool: Pages, spans: tuple[Span, ...], visits: Visits, call: Call, options: AttentionOptions
) -> Partial:
    """q [S * Q, N, H], Q queries of each sequence -> out [S * Q, N, Hv], lse [S, K, G * Q]."""
    mask, runs = visits.mask, visits.runs
    if not (options.tree_mask is options.alibi_slopes is None):
        mask = mask_of(visits.owners, visits.firsts, spans, call, options)
        runs = runs_of(visits.pages, visits.together, mask, call)
    rows = _grouped(q, len(spans), call.heads[1])
    if visits.bags is not None:
        rows = rows[visits.owners]
    found = []
    for run in runs:
        pages = pool.at(run.pages, slice(None), run.slots)
        found.append(attend(rows[run.visits], pages, run.bias, options))
    outs, lses = found[0] if len(found) == 1 else (torch.cat(x) for x in zip(*found))
    out, lse = _merge_visits(outs, lses, visits.bags)
    if math.isnan(out.sum().item()):
        _visit_again(rows, pool, visits, mask, (outs, lses), options)
        out, lse = _merge_visits(outs, lses, visits.bags)
    return _ungrouped(out, spans[0].queries), lse


def _visit_again(
    rows: torch.Tensor, pool: Pages, visits: Visits, mask: Mask, results: Partial, options: AttentionOptions
) -> None:
    """Put right the results of pages that are owned in part: one at a time, over the slots that are seen alone."""
    outs, lses = results
    for i in visits.asked:
        begin, end = mask.begins[i], mask.ends[i]
        if (begin, end) == (mask.slots.start, mask.slots.stop):
            continue
        outs[i], lses[i] = 0.0, float("-inf")
        if begin < end:
            one, page = slice(i, i + 1), slice(visits.pages[i], visits.pages[i] + 1)
            first = mask.slots.start
            bias = None if mask.bias is None else mask.bias[one, ..., begin - first : end - first]
            outs[one], lses[one] = attend(rows[one], pool.at(page, slice(None), slice(begin, end)), bias, options)


def _merge_visits(outs: torch.Tensor, lses: torch.Tensor, bags: Bags | None) -> Partial:
    """Every sequence's visits as one result: outs [E, K, R, Hv], lses [E, K, R] -> [S, K, R, Hv], [S, K, R]."""
    if bags is None:
        return outs, lses
    if bags.parts.shape[1] == 1:
        only = bags.parts[:, 0]
        return outs[only], lses[only]
    outs, lses = outs.transpose(1, 2), lses.transpose(1, 2)  # as FlashAttention lays them out
    parts = lses.flatten(1)[bags.parts].masked_fill_(bags.padding, float("-inf"))  # [S, P, R']
    lse = torch.logsumexp(parts, 1)
    weights = (parts - lse.masked_fill(lse == float("-inf"), 0.0)[:, None]).exp_().transpose(1, 2)
    if len(bags.which) < weights.numel():
        weights = weights[~bags.padding.mT.expand_as(weights)]
    values = outs.reshape(-1, outs.shape[-1]).to(lse.dtype)
    out = F.embedding_bag(bags.which, values, bags.starts, mode="sum", per_sample_weights=weights.flatten())
    shape = (len(bags.parts), *outs.shape[1:3])
    return out.view(*shape, -1).transpose(1, 2), lse.view(shape).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------ long queries


def _long(q: torch.Tensor, pool: Pages, batch: Sequence[Span], options: AttentionOptions) -> Partial:
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
    if len(blocks) == 1 and parts[0]:
        out, lse = _merge(parts[0])
        return _ungrouped(out, span.queries), _ungrouped(lse, span.queries)
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


def _joined(pool: Pages, span: Span, keys: range) -> Pages:
    """``keys`` of one sequence, end to end, as one page [1, K, keys, ...]: a copy, or a view of the only page."""
    page_size = pool.k.shape[2]
    first, end = keys.start // page_size, -(-keys.stop // page_size)
    pages = span.table[first - span.first : end - span.first]
    slots = slice(keys.start - first * page_size, keys.stop - first * page_size)
    if len(pages) == 1:
        return pool.at(slice(pages[0], pages[0] + 1), slice(None), slots)

    def join(x: torch.Tensor) -> torch.Tensor:
        bits = bits_of(x)
        return torch.cat([bits[page] for page in pages], 1)[None, :, slots].view(x.dtype)

    return pool.map(join)


def _causal(q: torch.Tensor, segment: Pages, options: AttentionOptions) -> Partial:
    """The step's queries q [Q, N, H] over its own keys [1, K, Q, ...]."""
    heads = q.unflatten(1, (segment.k.shape[1], -1)).permute(1, 2, 0, 3)  # [K, G, Q, H]
    k, v = (x[0].unsqueeze(1).expand(-1, heads.shape[1], -1, -1) for x in (segment.k, segment.v))
    out, lse = flash(heads, k, v, is_causal=True, scale=options.scale)
    return out.flatten(1, 2)[None], lse.flatten(1, 2)[None]


def _over_segment(
    q: torch.Tensor, segment: Pages, keys: range, block: slice, span: Span, options: AttentionOptions
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


def _pieces(first: int, last: int, span: Span, options: AttentionOptions) -> list[tuple[range, bool]]:
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
