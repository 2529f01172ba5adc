"""How paged attention's work is cut: the plan's promises, and the kernel that makes it against its twin on the host."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_plan import make_plan_on_host

from shardfuse.kernels.paged_attention import launch, paged_attention, plan_attention
from shardfuse.kernels.paged_attention.config import Problem
from shardfuse.kernels.paged_attention.options import AttentionOptions, Bounds
from shardfuse.kernels.paged_attention.plan import IDLE, ITEM, MERGE, WHOLE, Section, sections
from shardfuse.kernels.runtime import dispatch
from shardfuse.kernels.runtime.chips import CHIPS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _problem(context: list[int], queries: list[int], **changes: Any) -> Problem:
    lengths = [c + q for c, q in zip(context, queries)]
    found = Problem(
        arch="interpreter",
        slots=7,
        tokens=sum(queries) + 3,
        seqs=len(queries),
        max_keys=-(-max(lengths) // 16) * 16,
        group=3,
        kv_heads=2,
        head_size=32,
        v_size=32,
        q_dtype=torch.float16,
        kv_dtype=torch.float16,
        causal=True,
        window=None,
        prefix=False,
        tree=False,
        invariant=False,
        min_rows=None,
        max_rows=None,
        max_seq_len=None,
    )
    return found._replace(**changes)


def _starts(queries: list[int]) -> list[int]:
    return [0, *accumulate(queries)]


def _rows(data: torch.Tensor, at: int, count: int, width: int) -> list[list[int]]:
    return data[at : at + count * width].view(-1, width).tolist()


def _parts(data: torch.Tensor, section: Section) -> tuple[list[list[int]], list[list[int]]]:
    """(items, merges) of a section that it says it has."""
    items, merges = data[section.header_at : section.header_at + 2].tolist()
    assert items <= section.max_items
    assert merges <= section.max_merges
    return _rows(data, section.items_at, items, ITEM), _rows(data, section.merges_at, merges, MERGE)


def _sees(problem: Problem, token: int, q_len: int, length: int, prefix: int) -> tuple[int, int]:
    """The keys from the first to behind the last that a token may see; a tree's may be any."""
    position = length - q_len + token
    low, high = 0, length
    if problem.causal and not problem.tree:
        high = max(position + 1, prefix)
    if problem.window is not None:
        low = max(0, position - problem.window + 1)
        if not problem.causal:
            high = min(high, position + problem.window)
    return low, max(low, min(high, length))


def _check(problem: Problem, context: list[int], queries: list[int], prefixes: list[int] | None) -> int:
    """Every key that a row may see is in exactly one item of its tile; how many merges there are."""
    lengths = [c + q for c, q in zip(context, queries)]
    data = make_plan_on_host(problem, lengths, _starts(queries), prefixes)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    merged = 0
    for section in sections(problem):
        items, merges = _parts(data, section)
        config, taken, expected = section.config, set(), set()
        for _, q_len, length, seq, first_row, begin, end, slot in items:
            if slot == IDLE:
                continue
            assert begin % config.unit == 0
            if slot == WHOLE:
                assert (seq, first_row) not in covered
            else:
                assert slot not in taken
                taken.add(slot)
                assert 0 <= slot < section.max_slots
            for row in range(first_row, min(first_row + config.block_m, q_len * problem.group)):
                covered[seq, row].append((begin, max(begin, end)))
            assert length == ([*lengths, 0])[seq]
        for _, _, _, first, parts, *_ in merges:
            assert parts >= 1
            expected |= set(range(first, first + parts))
        assert taken == expected
        merged += len(merges)
    padding = problem.tokens - sum(queries)
    for seq, (q_len, length) in enumerate(zip([*queries, padding], [*lengths, 0])):
        prefix = prefixes[seq] if prefixes and seq < len(prefixes) else 0
        for row in range(q_len * problem.group):
            ranges = sorted(covered.pop((seq, row)))
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
            low, high = _sees(problem, row // problem.group, q_len, length, prefix)
            assert low == high or (ranges[0][0] <= low and high <= ranges[-1][1] <= length)
    assert not covered
    return merged


@given(
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=9),
    group=st.sampled_from([1, 3, 4, 7, 12]),
    kv_heads=st.sampled_from([1, 2, 8]),
    slots=st.integers(1, 40),
    mask=st.sampled_from(["causal", "full", "window", "full window", "prefix", "tree", "prefix window"]),
    invariant=st.booleans(),
    bounds=st.sampled_from(["none", "queries", "all"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_key_is_attended_to_once(
    steps: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    slots: int,
    mask: str,
    invariant: bool,
    bounds: str,
) -> None:
    context, queries = [c for c, _ in steps], [q for _, q in steps]
    if not any(c + q for c, q in steps):
        context[0] = 1
    prefixes = [c * (i % 3) // 2 for i, c in enumerate(context)] if "prefix" in mask else None
    problem = _problem(
        context,
        queries,
        group=group,
        kv_heads=kv_heads,
        slots=slots,
        causal="full" not in mask,
        window=21 if "window" in mask else None,
        prefix=prefixes is not None,
        tree=mask == "tree",
        invariant=invariant,
        min_rows=min((q for q in queries if q), default=0) * group if bounds == "all" else None,
        max_rows=None if bounds == "none" else max(*queries, 3) * group,
        max_seq_len=max(c + q for c, q in zip(context, queries)) if bounds == "all" else None,
    )
    _check(problem, context, queries, prefixes)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_long_sequence_is_cut_and_short_ones_are_not(invariant: bool) -> None:
    context, queries = [20] * 6 + [4000], [1] * 7
    problem = _problem(context, queries, invariant=invariant)
    lengths = [c + q for c, q in zip(context, queries)]
    data = make_plan_on_host(problem, lengths, _starts(queries), None)
    items, merges = _parts(data, sections(problem)[0])
    slots = [item[-1] for item in items if item[3] == 6]
    assert len(slots) == (merges[0][4] if merges else 1)
    if not invariant:  # there more quanta than slots may be left leave it whole
        assert len(slots) > 4
    assert all(item[-1] == WHOLE for item in items if item[3] < 6)
    _check(problem, context, queries, None)


def test_invariant_mode_cuts_all_or_nothing_within_its_slots() -> None:
    """Sequences behind the last one that fits stay whole, and cuts lie at the quantum's multiples."""
    context, queries = [250] * 5, [1] * 5
    problem = _problem(context, queries, invariant=True, slots=12, kv_heads=1)
    section = sections(problem)[0]
    data = make_plan_on_host(problem, [251] * 5, _starts(queries), None)
    items, _ = _parts(data, section)
    assert _check(problem, context, queries, None) > 0
    for *_, begin, end, slot in items:
        assert begin % section.config.quantum == 0
        assert slot == WHOLE or end - begin <= section.config.quantum


def test_bounds_leave_out_launches() -> None:
    context, queries = [50, 60], [1, 1]
    assert len(sections(_problem(context, queries))) == 2
    few = sections(_problem(context, queries, max_rows=3, max_seq_len=20))
    assert len(few) == 1
    assert few[0].max_slots == few[0].max_merges == 0
    assert sections(_problem(context, queries, max_rows=3))[0].max_slots > 0
    assert sections(_problem(context, queries, max_rows=3, window=5))[0].max_slots == 0  # no tile sees more


def test_a_prefill_alone_has_one_class() -> None:
    """Its padding, of fewer rows than the prefill's tile, then lies in that class."""
    context, queries = [0, 30], [40, 9]
    assert len(sections(_problem(context, queries, min_rows=4))) == 2
    problem = _problem(context, queries, min_rows=16)
    (section,) = sections(problem)
    assert (section.tiles.above, section.tiles.upto) == (0, None)
    _check(problem, context, queries, None)


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("share", [0, 0.25], ids=["one", "many"])
@pytest.mark.parametrize("arch", CHIPS)
def test_few_programs_of_a_decode_are_idle(arch: str, share: float, invariant: bool) -> None:
    """Sequences of 8192 keys, as Llama's 8B has heads, under a table that holds four times as many; too few for the
    chip, so that each is split: one, or one for so many multiprocessors.
    """
    seqs = max(1, int(share * CHIPS[arch].sms))
    context, queries = [8191] * seqs, [1] * seqs
    problem = _problem(
        context,
        queries,
        arch=arch,
        slots=CHIPS[arch].sms,
        tokens=seqs,
        max_keys=4 * 8192,
        group=4,
        kv_heads=8,
        head_size=128,
        v_size=128,
        invariant=invariant,
        min_rows=4,
        max_rows=4,
        max_seq_len=8192,
    )
    (section,) = sections(problem)
    items, merges = _parts(make_plan_on_host(problem, [8192] * seqs, _starts(queries), None), section)
    assert len(merges) == seqs
    assert section.max_items <= 2 * len(items)
    assert section.max_merges <= 2 * len(merges)
    assert section.max_slots <= 2 * sum(item[-1] >= 0 for item in items)


@pytest.mark.interpret
@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": False}, {"window": 21}, {"causal": False, "window": 9}, {"prefix_lens": True}, {"tree_mask": True}],
    ids=lambda mask: "-".join(mask) or "causal",
)
def test_the_device_makes_the_plan_of_the_host(mask: dict[str, Any], invariant: bool) -> None:
    """Nine sequences, more than a block of the interpreter's plan; some without queries."""
    context = [0, 37, 90, 5, 200, 0, 3, 310, 12]
    queries = [25, 1, 1, 7, 1, 0, 5, 2, 0]
    lengths = [c + q for c, q in zip(context, queries)]
    prefixes = [c // 2 for c in context] if mask.get("prefix_lens") else None
    tokens = sum(queries) + 3
    options = dict(mask)
    if prefixes:
        options["prefix_lens"] = torch.tensor(prefixes, dtype=torch.int32, device=DEVICE)
    if mask.get("tree_mask"):
        options["tree_mask"] = torch.ones(tokens, 25, dtype=torch.bool, device=DEVICE)
    tensors = (
        torch.empty(tokens, 6, 32, dtype=torch.float16, device=DEVICE),
        *torch.empty(64, 2, 16, 64, dtype=torch.float16, device=DEVICE).chunk(2, -1),
        torch.zeros(9, 20, dtype=torch.int32, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor(_starts(queries), dtype=torch.int32, device=DEVICE),
    )
    plan = launch.make_plan(tensors, AttentionOptions(1.0, **options), invariant, Bounds())
    host = make_plan_on_host(plan.problem, lengths, _starts(queries), prefixes)
    made = plan.data.cpu()
    for section in sections(plan.problem):
        theirs, ours = _parts(host, section), _parts(made, section)
        assert ours[0] == theirs[0]
        assert [merge[:5] for merge in ours[1]] == [merge[:5] for merge in theirs[1]]


@pytest.mark.interpret
def test_a_plan_serves_only_calls_like_its_own() -> None:
    call = _call(torch.float16)
    plan = plan_attention(*call, impl="triton")
    assert plan is not None
    first = paged_attention(*call, plan=plan, impl="triton")
    assert torch.equal(first, paged_attention(*call, impl="triton"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"window=5 \(plan: None\).*plan_attention the same arguments"):
        paged_attention(*call, plan=plan, window=5, impl="triton")
    with pytest.raises(ValueError, match=r"invariant=True \(plan: False\)"):
        paged_attention(*call, plan=plan, invariant=True, impl="triton")


def test_no_plan_where_no_kernel_runs() -> None:
    assert plan_attention(*_call(torch.float16), impl="reference") is None
    assert plan_attention(*_call(torch.float64), impl="reference") is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="wants a GPU: it captures a graph")
def test_a_plan_is_replayed_with_other_lengths() -> None:
    """A graph captured for one step serves others within its bounds: nothing of a plan's size depends on lengths."""
    q, kv_cache, tables, seq_lens, starts = _call(torch.float16)
    kv_cache.nan_to_num_()
    with torch.cuda.stream(torch.cuda.Stream()):
        paged_attention(q, kv_cache, tables, seq_lens, starts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(q, kv_cache, tables, seq_lens, starts)
    for lengths, queries in (([40, 60], [1, 1]), ([64, 33], [5, 0]), ([30, 64], [0, 7])):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        starts.copy_(torch.tensor(_starts(queries), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, paged_attention(q, kv_cache, tables, seq_lens, starts))  # type: ignore[arg-type]
    with dispatch.row_invariance():
        assert paged_attention(q, kv_cache, tables, seq_lens, starts) is not None


def _call(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, kv_cache, tables, lengths, starts of two sequences."""
    generator = torch.Generator().manual_seed(0)
    q, kv_cache = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((8, 6, 32), (9, 2, 16, 64)))
    tables = torch.tensor([[4, 0, 7, 2], [1, 3, 8, 5]], dtype=torch.int32, device=DEVICE)
    lengths, starts = torch.tensor([40, 64], dtype=torch.int32), torch.tensor([0, 1, 7], dtype=torch.int32)
    return q, kv_cache, tables, lengths.to(DEVICE), starts.to(DEVICE)
