"""What the host works out of a step's tables for ``cpu.py``: which rows go together, and which pages they visit.

It depends on lengths and tables, on the mask and on the numbers of heads, but on no key: all layers of a step that
share these share a :class:`Plan`. Letters as in ``cpu.py``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import reference
from .cpu_pages import CPU, bias_of
from .options import AttentionOptions

_SHORT = 16  # queries of a sequence, at most, for which pages are visited where they lie
_BRIDGED_BYTES = 64 << 10  # of pages without an owner: a call reads them along, so that their neighbours are one view
_CALL_BYTES = 256 << 10  # of slots that no row sees: a call reads as many in the time of one more call


class Span(NamedTuple):
    """One sequence of the step: its queries are rows ``start`` to ``start + queries`` of q."""

    start: int
    queries: int
    length: int
    prefix: int
    first: int  # page of the sequence that any query sees
    table: tuple[int, ...]  # that one and those behind it


# block_tables, seq_lens, query_start_loc
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Call(NamedTuple):
    """What a plan is made for, beside its tables."""

    heads: tuple[int, int]  # N, K
    page: tuple[int, int]  # slots, and bytes of one slot of all KV heads
    dtype: torch.dtype  # of the scores
    causal: bool
    window: int | None
    prefixes: bool  # whether there are any

    @classmethod
    def of(cls, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, options: AttentionOptions) -> Call:
        heads, page_size = k_cache.shape[1:3]
        slot_bytes = heads * (k_cache.shape[3] + v_cache.shape[3]) * k_cache.element_size()
        wide = torch.promote_types(q.dtype, torch.float32)
        prefixes = options.prefix_lens is not None
        return cls((q.shape[1], heads), (page_size, slot_bytes), wide, options.causal, options.window, prefixes)

    @property
    def options(self) -> AttentionOptions:
        """Those that say what is seen; of the prefixes, that there are some."""
        prefix_lens = torch.empty(0, device=CPU) if self.prefixes else None
        return AttentionOptions(1.0, self.causal, self.window, prefix_lens=prefix_lens)


class Mask(NamedTuple):
    """What the queries of each visit see of their page, and what masks and ALiBi add to the scores.

    Slots that none of them sees at either end are left out: B is here the number of the others.
    """

    slots: slice
    begins: list[int]  # of each visit, the first slot that any of its queries sees
    ends: list[int]  # and the one behind the last
    bias: torch.Tensor | None  # [E, 1 or K, 1 or R, B]
    solid: bool  # whether nothing is added between the begin and the end


class Run(NamedTuple):
    """Visits to pages that lie together: one call."""

    visits: slice
    pages: slice
    slots: slice
    bias: torch.Tensor | None  # [E, 1 or K, 1 or R, B] of these visits and slots


class Bags(NamedTuple):
    """Which visits' results are put together. A bag is one row of one sequence, of S * R' with R' = K * R;
    ``embedding_bag`` adds up what its visits found.
    """

    parts: torch.Tensor  # [S, P]: each sequence's visits
    padding: torch.Tensor  # [S, P, 1]: where it has fewer than P
    which: torch.Tensor  # rows of [E * R', Hv], bag by bag; with P = 1 none
    starts: torch.Tensor  # [S * R'], where each begins


class Visits(NamedTuple):
    """The visits to pages, E of them in the order of the pool."""

    pages: list[int]
    together: list[slice]  # visits to neighbouring pages
    owners: torch.Tensor  # [E], which sequence of the batch
    firsts: torch.Tensor  # [E], position of the page's first token
    asked: list[int]  # visits that are not there to fill a gap
    mask: Mask  # but for trees and ALiBi
    runs: tuple[Run, ...]  # by that mask
    bags: Bags | None  # None: visit i is all that sequence i needs


class Batch(NamedTuple):
    """Sequences that are computed together."""

    spans: tuple[Span, ...]
    rows: slice | torch.Tensor  # of q
    visits: Visits | None  # None: long queries


class Plan:
    """What all layers of a step share that have the same heads, mask and pages.

    It belongs to the contents that the tables had when it was made: :meth:`fits` says whether a call has the same ones.
    """

    def __init__(self, call: Call, tables: Tables, options: AttentionOptions) -> None:
        self.checked: tuple[object, ...] | None = None  # the last call of which everything was checked
        self._call, self._options, self._tables = call, options, (*tables, options.prefix_lens)
        self._versions = [x if x is None else x._version for x in self._tables]

    @functools.cached_property
    def batches(self) -> list[Batch]:
        """How the step is computed; worked out for the first call that the plan fits."""
        return batches(self._call, self._tables[:3], self._options)

    def fits(self, call: Call, tables: Tables, options: AttentionOptions) -> bool:
        """Whether it is for this call: for tables that are the same objects, in which torch counts no change."""
        same = all(x is y for x, y in zip(self._tables, (*tables, options.prefix_lens), strict=True))
        return same and call == self._call and self._versions == [x if x is None else x._version for x in self._tables]


def batches(call: Call, tables: Tables, options: AttentionOptions) -> list[Batch]:
    """How a step is computed."""
    page_size = call.page[0]
    return [
        Batch(spans, _rows(spans), _visits(spans, call, _BRIDGED_BYTES, _CALL_BYTES) if _is_short(spans) else None)
        for spans in _together(*tables, page_size, options)
    ]


def _is_short(spans: Sequence[Span]) -> bool:
    return spans[0].queries <= _SHORT


def _together(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    page_size: int,
    options: AttentionOptions,
) -> list[tuple[Span, ...]]:
    """The sequences with queries: those with equally few together, those with many alone."""
    tables, lens, starts = block_tables.tolist(), seq_lens.tolist(), query_start_loc.tolist()
    prefixes = [0] * len(lens) if options.prefix_lens is None else options.prefix_lens.tolist()
    found: dict[int, list[Span]] = {}
    for s, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        queries, length = end - start, lens[s]
        first = 0 if options.window is None else max(0, length - queries - options.window + 1) // page_size
        table = tuple(tables[s][first : -(-length // page_size)])
        together = queries if queries <= _SHORT else -s
        found.setdefault(together, []).append(Span(start, queries, length, prefixes[s], first, table))
    return [tuple(batch) for batch in found.values()]


def _rows(batch: Sequence[Span]) -> slice | torch.Tensor:
    """The batch's rows of q: a slice where they follow each other, else an index."""
    first, queries = batch[0].start, batch[0].queries
    if all(span.start == first + i * queries for i, span in enumerate(batch)):
        return slice(first, first + len(batch) * queries)
    return torch.tensor([row for span in batch for row in range(span.start, span.start + queries)], device=CPU)


@functools.lru_cache(4)
def _visits(spans: tuple[Span, ...], call: Call, bridged: int, call_bytes: int) -> Visits:
    """Every page that a sequence needs, sorted, gaps of up to ``bridged`` bytes filled. All layers of a step share it.

    In a run no page comes twice: what several sequences share is visited in as many runs.
    """
    page_size, slot_bytes = call.page
    bridged_pages = bridged // (page_size * slot_bytes)
    times: Counter[int] = Counter()
    wanted = []
    for owner, span in enumerate(spans):
        for i, page in enumerate(span.table, start=span.first):
            wanted.append((times[page], page, owner, i * page_size))
            times[page] += 1
    pages: list[int] = []
    owners: list[int] = []
    firsts: list[int] = []
    starts = [0]
    of_owner: list[list[int]] = [[] for _ in spans]
    for _, page, owner, first in sorted(wanted):
        gap = page - pages[-1] - 1 if pages else 0
        if not 0 <= gap <= bridged_pages:
            starts.append(len(pages))
            gap = 0
        pages += range(page - gap, page + 1)
        owners += [owner] * (gap + 1)
        firsts += [first] * (gap + 1)
        of_owner[owner].append(len(pages) - 1)
    together = [slice(*run) for run in pairwise((*starts, len(pages)))]
    asked = [visit for mine in of_owner for visit in mine]
    whose, where = (torch.tensor(x, device=CPU) for x in (owners, firsts))
    if spans[0].queries == 1 and not call.prefixes:
        left = [spans[owner].length - first for owner, first in zip(owners, firsts)]
        begins = [0 if call.window is None else max(0, slots - call.window) for slots in left]
        ends = [min(slots, page_size) for slots in left]
        mask = _mask_between(begins, ends, call)
    else:
        mask = mask_of(whose, where, spans, call, call.options)
    runs = runs_of(pages, together, mask, call, call_bytes)
    in_order = asked == list(range(len(spans))) == owners
    bags = None if in_order else _bags(of_owner, call.heads[0] * spans[0].queries)
    return Visits(pages, together, whose, where, asked, mask, runs, bags)


def _bags(of_owner: list[list[int]], rows: int) -> Bags:
    """Of each sequence's visits, with R' ``rows``."""
    longest = max(map(len, of_owner))
    index = torch.tensor([mine + [mine[0]] * (longest - len(mine)) for mine in of_owner], device=CPU)
    counts = torch.tensor([len(mine) for mine in of_owner], device=CPU)
    padding = torch.arange(longest, device=CPU) >= counts[:, None]
    if longest == 1:
        return Bags(index, padding[:, :, None], counts[:0], counts[:0])
    which = (index[:, None] * rows + torch.arange(rows, device=CPU)[:, None])[~padding[:, None].expand(-1, rows, -1)]
    ends = counts.repeat_interleave(rows).cumsum(0)
    return Bags(index, padding[:, :, None], which, F.pad(ends[:-1], (1, 0)))


def mask_of(
    owners: torch.Tensor,
    firsts: torch.Tensor,
    spans: Sequence[Span],
    call: Call,
    options: AttentionOptions,
) -> Mask:
    """The mask of visits by ``owners`` to pages that begin at the positions ``firsts``."""
    queries = spans[0].queries
    both = torch.tensor([(span.length, span.prefix) for span in spans], device=CPU)[owners]
    lengths, prefixes = both[:, :1, None], both[:, 1:, None]
    context = lengths - queries
    positions = context + torch.arange(queries, device=CPU)[:, None]
    keys = firsts[:, None, None] + torch.arange(call.page[0], device=CPU)
    tree = None if options.tree_mask is None else options.tree_mask.unflatten(0, (len(spans), queries))[owners]
    prefix_len = None if options.prefix_lens is None else prefixes
    seen = reference.visible(positions, keys, lengths, context, options, prefix_len=prefix_len, tree=tree)
    some = seen.flatten(0, 1).any(0).nonzero().flatten().tolist() or [0]
    slots = slice(some[0], some[-1] + 1)
    owned = seen.any(1)  # [E, page]
    count = torch.arange(1, owned.shape[1] + 1, device=CPU)
    begins, ends = owned.shape[1] - (owned * count.flip(0)).amax(1), (owned * count).amax(1)
    seen, distance = seen[..., slots], (positions - keys)[..., slots]
    bias = bias_of(seen, distance, call.heads, call.dtype, options)
    return Mask(slots, begins.tolist(), ends.tolist(), bias, False)


def _mask_between(begins: list[int], ends: list[int], call: Call) -> Mask:
    """As :func:`mask_of`, of visits by one query each, which sees the slots from a begin to an end."""
    slots = slice(min(begins), max(ends))
    where = torch.arange(slots.start, slots.stop, device=CPU)
    lows, highs = torch.tensor((begins, ends), device=CPU).unsqueeze(-1)
    unseen = where >= highs
    if max(begins) > slots.start:
        unseen.logical_or_(where < lows)
    bias = torch.zeros(unseen.shape, dtype=call.dtype, device=CPU).masked_fill_(unseen, float("-inf"))
    return Mask(slots, begins, ends, bias[:, None, None], True)


def runs_of(
    pages: Sequence[int], together: Sequence[slice], mask: Mask, call: Call, call_bytes: int = _CALL_BYTES
) -> tuple[Run, ...]:
    """The calls for visits that lie ``together``: cut where the slots that no row sees would take longer to read than
    one more call takes, which is as long as reading ``call_bytes`` takes.
    """
    begins, ends, edge = mask.begins, mask.ends, mask.slots.start
    found = []
    for visits in together:
        for some in _cut(visits, [min(x, y) for x, y in zip(begins, ends)], ends, call_bytes // call.page[1]):
            low, high = min(begins[some]), max(ends[some])
            slots = slice(low, high) if low < high else slice(edge, edge + 1)  # none is seen
            bias = mask.bias
            if mask.solid and max(begins[some]) == low and min(ends[some]) == high:
                bias = None
            elif bias is not None:
                bias = bias[some, ..., slots.start - edge : slots.stop - edge]
                bias = bias if mask.solid or bias.any() else None
            first = pages[some.start]
            found.append(Run(some, slice(first, first + some.stop - some.start), slots, bias))
    return tuple(found)


def _cut(visits: slice, begins: Sequence[int], ends: Sequence[int], call_slots: int) -> list[slice]:
    """``visits`` in parts, each of which reads from its first to its last slot that any of them sees."""
    lows, highs = begins[visits], ends[visits]
    count = len(lows)
    before = [high - low for low, high in zip(accumulate(lows, min), accumulate(highs, max))]
    behind = [high - low for low, high in zip(accumulate(lows[::-1], min), accumulate(highs[::-1], max))][::-1]
    costs = [i * before[i - 1] + (count - i) * behind[i] for i in range(1, count)]
    if not costs or count * before[-1] - min(costs) <= call_slots:
        return [visits]
    middle = visits.start + 1 + costs.index(min(costs))
    parts = slice(visits.start, middle), slice(middle, visits.stop)
    return [part for each in parts for part in _cut(each, begins, ends, call_slots)]
