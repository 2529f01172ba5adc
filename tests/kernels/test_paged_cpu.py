"""The CPU's walk over the pages: every way it takes, against the reference in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardfuse.kernels.dev.accuracy import exponential, judge, rounding
from shardfuse.kernels.dev.cases import paged_attention as cases
from shardfuse.kernels.dev.cases import paged_features as features
from shardfuse.kernels.paged_attention import (
    cpu,
    cpu_invariant,
    cpu_pages,
    cpu_plan,
    paged_attention,
    plan_attention,
    reference,
)
from shardfuse.kernels.paged_attention.op import split_cache
from shardfuse.kernels.paged_attention.options import AttentionOptions
from shardfuse.kernels.runtime import dispatch

CPU = torch.device("cpu")
CASES = (*features.pairwise(), *cases.SPEC.tagged("test"))
OPTIONS = ("sinks", "alibi_slopes", "prefix_lens", "tree_mask", "k_scale", "v_scale")
Call = tuple[tuple[torch.Tensor, ...], AttentionOptions]

# What splits the work, set so that tiny batches take every way: (_SHORT, _SEGMENT, _BLOCK, _CONVERTED_BYTES).
WAYS = {"long in pieces": (0, 32, 7, 1), "short": (100, 2048, 512, 1), "as it is": (16, 2048, 512, 2 << 20)}


def _call(case: Any) -> Call:
    """What ``walk.paged_attention`` takes."""
    inputs, asked = cases.make_inputs(case, CPU, seed=0), cases.asked(case)
    k_cache, v_cache = split_cache(inputs["kv_cache"], case.sizes["H"])
    options = AttentionOptions(
        *(case.sizes["H"] ** -0.5, asked["causal"], asked["window"], asked["softcap"]),
        *(inputs.get(name) for name in OPTIONS),
    )
    return (
        inputs["q"],
        k_cache,
        v_cache,
        *(inputs[n] for n in ("block_tables", "seq_lens", "query_start_loc")),
    ), options


def _wrong(call: Call, walk: Any = cpu.paged_attention) -> list[str]:
    """Verdicts that are not good."""
    (q, *rest), options = call
    found, low = walk(q, *rest, options), reference.paged_attention(q, *rest, options)
    oracle = reference.paged_attention(q.double(), *rest, options)
    assert [x.dtype for x in found] == [x.dtype for x in low]
    terms = max(q.shape[-1], int(rest[3].max()))  # a head, or its keys
    verdicts = [judge("out", found[0], low[0], oracle[0], terms=terms)]
    lses = (x.masked_fill(x == float("-inf"), -1.0) for x in (found[1], low[1], oracle[1]))
    verdicts.append(judge("lse", *lses, terms=terms, weights=q.dtype))
    return [str(verdict) for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_exponential_of_torch_keeps_to_its_budget(dtype: torch.dtype) -> None:
    """A score of 0 and 63 scores of x: lse errs by all but a 64th of the relative error of exp(x), or little more."""
    x = torch.linspace(-1.0, 0.0, 500).to(dtype)
    k = torch.cat((torch.zeros(len(x), 1, dtype=dtype), x[:, None].expand(-1, 63)), 1)[:, None, :, None]
    _, lse = cpu_pages.flash(torch.ones_like(k[:, :, :1]), k, torch.zeros_like(k), scale=1.0)
    errors = lse.flatten().double() - torch.log1p(63 * x.double().exp())
    summed = rounding(torch.promote_types(dtype, torch.float32), terms=64)
    assert errors.abs().max() < exponential(dtype) + summed


@pytest.mark.parametrize("way", WAYS)
def test_every_way_with_every_two_features(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_SHORT", "_SEGMENT", "_BLOCK", "_CONVERTED_BYTES")
    for name, value in zip(names, WAYS[way]):
        monkeypatch.setattr(next(each for each in (cpu, cpu_plan, cpu_pages) if hasattr(each, name)), name, value)
    wrong = {case.name: verdicts for case in CASES if (verdicts := _wrong(_call(case)))}
    assert wrong == {}


def test_invariant_mode_with_every_two_features() -> None:
    wrong = {case.name: verdicts for case in CASES if (verdicts := _wrong(_call(case), cpu_invariant.paged_attention))}
    assert wrong == {}


def _decode(tables: list[list[int]], lens: list[int], *, blocks: int, page: int = 4, queries: int = 1) -> Call:
    """Sequences of fp32 with ``queries`` each over a pool whose every slot holds a number."""
    generator = torch.Generator().manual_seed(0)
    count, kv_heads, group, size = len(lens), 2, 3, 16
    q = torch.randn(count * queries, kv_heads * group, size, generator=generator)
    pool = torch.randn(blocks, kv_heads, page, 2 * size, generator=generator)
    block_tables = torch.tensor(tables, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32) * queries
    rest = (block_tables, torch.tensor(lens, dtype=torch.int32), starts)
    return (q, pool[..., :size], pool[..., size:], *rest), AttentionOptions(size**-0.5)


def _attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the number of pages of each view that is attended to."""
    views: list[int] = []
    attend = cpu.attend

    def counted(q: torch.Tensor, pages: Any, *rest: Any) -> cpu.Partial:
        views.append(len(pages.k))
        return attend(q, pages, *rest)

    monkeypatch.setattr(cpu, "attend", counted)
    return views


def test_neighbouring_pages_are_one_view_whoever_owns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _decode([[5, 2, 4], [1, 3, 0]], [11, 12], blocks=8)
    views = _attended(monkeypatch)
    assert _wrong(call) == []
    assert views == [6]


def test_small_gaps_are_bridged_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 4 * 2 * 32 * 4
    monkeypatch.setattr(cpu_plan, "_BRIDGED_BYTES", 2 * page_bytes)
    call = _decode([[0, 3], [7, 9]], [8, 7], blocks=16)  # gaps of two pages, three and one
    call[0][1][8] = call[0][2][[1, 2]] = float("nan")  # what is read along may hold anything
    views = _attended(monkeypatch)
    assert _wrong(call) == []
    assert views == [4, 3]


def test_pages_that_sequences_share_are_visited_for_each() -> None:
    assert _wrong(_decode([[6, 1], [6, 3], [6, 1]], [8, 6, 5], blocks=8)) == []
    assert _wrong(_decode([[6, 1], [6, 3], [6, 1]], [8, 6, 5], blocks=8, queries=3)) == []


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_free_slots_never_reach_an_output(part: int, poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that are owned in part are visited again where that is needed."""
    call = _decode([[2, 0], [1, 3]], [7, 5], blocks=4)
    pool = call[0][part]
    pool[0, :, 3] = pool[3, :, 1:] = poison
    views = _attended(monkeypatch)
    assert _wrong(call) == []
    assert views == ([4] if math.isfinite(poison) and part == 2 else [4, 1, 1])


def test_a_nan_that_is_owned_stays() -> None:
    call = _decode([[2, 0], [1, 3]], [7, 5], blocks=4)
    call[0][2][0, 1, 2, 5] = float("nan")
    out, _ = cpu.paged_attention(*call[0], call[1])
    expected, _ = reference.paged_attention(*call[0], call[1])
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().any()


def test_tables_and_lengths_that_change_in_place_are_read_again() -> None:
    """What was worked out for a step belongs to its contents, not to its tensors."""
    call = _decode([[0, 1], [2, 3]], [8, 6], blocks=8)
    assert _wrong(call) == []
    _, _, _, block_tables, seq_lens, _ = call[0]
    block_tables.copy_(torch.tensor([[7, 5], [4, 6]]))
    seq_lens.copy_(torch.tensor([5, 8]))
    assert _wrong(call) == []


def test_what_was_worked_out_for_old_steps_is_not_kept() -> None:
    for length in range(1, 9):
        assert _wrong(_decode([[0, 1]], [length], blocks=2)) == []
    assert cpu_plan._visits.cache_info().currsize <= 4


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("which", ["q", "keys", "values"])
def test_a_strided_last_dimension_is_read_right(which: str, queries: int) -> None:
    """FlashAttention does not look whether it is contiguous."""
    tensors, options = _decode([[5, 2, 4, 1, 0, 7]], [24], blocks=8, queries=queries)
    strided = [
        torch.stack((x, x), -1).flatten(-2)[..., ::2] if name == which else x
        for name, x in zip(("q", "keys", "values"), tensors)
    ]
    found = cpu.paged_attention(*strided, *tensors[3:], options)
    assert all(torch.equal(*pair) for pair in zip(found, cpu.paged_attention(*tensors, options)))


@pytest.mark.parametrize("queries", [1, 3, 40], ids="{} queries".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_memory_does_not_grow_with_the_pool(queries: int, dtype: torch.dtype) -> None:
    """Whatever torch allocates, inside its operators too: a copy of the pool would be among it."""

    def allocated(blocks: int) -> int:
        (q, k, v, *tables), options = _decode([list(range(14, -1, -1))], [58], blocks=blocks, queries=queries)
        call = (q, *(x.to(dtype) for x in (k, v)), *tables)
        cpu.paged_attention(*call, options)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            cpu.paged_attention(*call, options)
        return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())

    few, many = allocated(16), allocated(2048)
    assert 0 < many == few


def test_sinks_of_nothing_and_of_everything() -> None:
    """Of rows that see keys and of padding, which sees none."""
    (q, *rest), options = _decode([[0, 1], [2, 3]], [8, 6], blocks=4, queries=2)
    options = options._replace(sinks=torch.tensor([float("-inf"), float("inf"), 0.0] * 2))
    q = torch.cat((q, q[:1]))
    found, expected = (x.paged_attention(q, *rest, options) for x in (cpu, reference))
    oracle = reference.paged_attention(q.double(), *rest, options)
    assert judge("out", found[0], expected[0], oracle[0], terms=16).ok
    assert torch.equal(found[1].isinf(), expected[1].isinf())
    assert judge(
        "lse", *(x.nan_to_num(posinf=0.0, neginf=0.0) for x in (found[1], expected[1], oracle[1])), terms=16
    ).ok
    assert torch.equal(found[0][-1], torch.zeros_like(q[-1]))
    assert torch.equal(found[1][-1], options.sinks)


def test_fp64() -> None:
    (q, k, v, *tables), options = _decode([[5, 2, 4], [1, 3, 0]], [11, 12], blocks=8, queries=2)
    call = (q.double(), k.double(), v.double(), *tables), options._replace(window=6, sinks=torch.zeros(6))
    out, lse = cpu.paged_attention(*call[0], call[1])
    expected = reference.paged_attention(*call[0], call[1])
    assert judge("out", out, expected[0], expected[0], terms=16).ok
    assert judge("lse", lse, expected[1], expected[1], terms=16).ok


def test_every_code_of_fp8() -> None:
    """In bits, NaN apart: what the walk makes of them is torch's own conversion."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).view(2, 2, 4, 16)
    for some in (codes, codes[:1, :, :3]):  # with NaN and without
        found, expected = cpu_pages._values(some, torch.tensor([0.5]), torch.float32), some.float() * 0.5
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_no_sequences_and_no_queries() -> None:
    (q, k, v, *_), options = _decode([[0]], [1], blocks=2)
    none = torch.empty(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    out, lse = cpu.paged_attention(q, k, v, none.view(0, 0), none, zero, options)  # all of q is padding
    assert torch.equal(out, torch.zeros_like(q))
    assert lse.eq(float("-inf")).all()
    empty = cpu.paged_attention(q[:0], k, v, none.view(0, 0), none, zero, options)
    assert [x.shape for x in empty] == [(0, 6, 16), (0, 6)]


def test_another_default_device_changes_nothing() -> None:
    call = _decode([[5, 2, 4], [1, 3, 0]], [11, 12], blocks=8)
    with torch.device("meta"):
        out, _ = cpu.paged_attention(*call[0], call[1])
    assert torch.equal(out, cpu.paged_attention(*call[0], call[1])[0])


def test_auto_walks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    call, options = _decode([[0, 1], [2, 3]], [8, 6], blocks=4)
    q, k, v, *tables = call
    views = _attended(monkeypatch)
    paged_attention(q, (k, v), *tables, scale=options.scale, impl="reference")
    assert views == []
    before = dispatch.counts["paged_attention", "reference"]
    found = paged_attention(q, (k, v), *tables, scale=options.scale)
    assert views == [4]
    assert dispatch.counts["paged_attention", "reference"] == before + 1
    assert torch.equal(found, cpu.paged_attention(*call, options)[0])


def _ops(call: Call, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (q, k, v, *tables), asked = call
    return paged_attention(q, (k, v), *tables, scale=asked.scale, return_lse=True, check=False, **options)  # type: ignore[return-value]


@torch.no_grad()
def test_a_plan_saves_reading_the_tables_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [_decode([[5, 2, 4], [1, 3, 0]], [11, 12], blocks=8, queries=queries) for queries in (1, 3)]
    calls.append(_decode([[5, 2, 4, 1, 0, 7]], [24], blocks=8, queries=20))
    for call in calls:
        (q, k, v, *tables), _ = call
        plan = plan_attention(q, (k, v), *tables)
        expected = _ops(call)
        assert all(torch.equal(*pair) for pair in zip(_ops(call, plan=plan), expected))
        monkeypatch.setattr(cpu_plan, "_together", None)  # reads the tables
        for layer in (call, ((q, k.clone(), v.clone(), *tables), call[1])):
            assert all(torch.equal(*pair) for pair in zip(_ops(layer, plan=plan), expected))
        monkeypatch.undo()


@torch.no_grad()
def test_a_plan_of_other_tables_is_not_used() -> None:
    call = _decode([[0, 1], [2, 3]], [8, 6], blocks=8)
    (q, k, v, block_tables, seq_lens, starts), _ = call
    plan = plan_attention(q, (k, v), block_tables, seq_lens, starts)
    _ops(call, plan=plan)
    seq_lens.copy_(torch.tensor([5, 8]))
    assert torch.equal(_ops(call, plan=plan)[0], _ops(call)[0])  # changed in place
    other = _decode([[7, 5], [4, 6]], [8, 6], blocks=8)
    assert torch.equal(_ops(other, plan=plan)[0], _ops(other)[0])  # other tables
    window = {"window": 3}
    assert torch.equal(_ops(call, plan=plan, **window)[0], _ops(call, **window)[0])  # another mask


@torch.no_grad()
def test_no_plan_is_made_for_the_reference() -> None:
    (q, k, v, *tables), _ = _decode([[0, 1], [2, 3]], [8, 6], blocks=4)
    assert plan_attention(q, (k, v), *tables, impl="reference") is None


@torch.no_grad()
def test_a_process_that_asks_for_the_reference_does_not_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    call = _decode([[0, 1], [2, 3]], [8, 6], blocks=4)
    (q, k, v, *tables), _ = call
    plan, views = plan_attention(q, (k, v), *tables), _attended(monkeypatch)
    monkeypatch.setattr(dispatch, "_AUTO", "reference")  # SHARDFUSE_IMPL
    assert plan_attention(q, (k, v), *tables) is None
    for given in (None, plan):
        _ops(call, plan=given)
    assert views == []


@torch.no_grad()
def test_a_plan_does_not_replace_the_kernel_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setattr(dispatch, "_why_not_triton", lambda device: "it cannot run here")
    call = _decode([[0, 1], [2, 3]], [8, 6], blocks=4)
    (q, k, v, *tables), _ = call
    plan = plan_attention(q, (k, v), *tables)
    with pytest.raises(RuntimeError, match="impl='triton' was asked for, but it cannot run here"):
        _ops(call, plan=plan, impl="triton")


@pytest.mark.parametrize(
    ("lens", "slots", "expected"),
    [
        ([8, 8, 1, 1], 6, [2, 2]),
        ([8, 8, 1, 1], 14, [4]),  # 14 slots are read in vain
        ([1, 8, 2, 8], 5, [1, 3]),
        ([8], 0, [1]),
    ],
)
def test_neighbours_of_unlike_length_are_cut_apart(
    lens: list[int], slots: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that saves more slots than a call costs."""
    monkeypatch.setattr(cpu_plan, "_CALL_BYTES", slots * 2 * 32 * 4)
    call = _decode([[i] for i in range(len(lens))], lens, blocks=4, page=8)
    views = _attended(monkeypatch)
    assert _wrong(call) == []
    assert views == expected
