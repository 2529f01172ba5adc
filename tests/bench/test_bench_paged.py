"""The benchmarks of the paged ops: what they plan, what a row says was moved, and their gate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from bench_paged_case import CPU, FP8, FP32, GPU, INT8, QUANTISED, TINY, written

from shardfuse.bench.harness import runner
from shardfuse.bench.harness.benchmark import Benchmark, Settings
from shardfuse.bench.harness.timing import Timing
from shardfuse.bench.suites import cache_write, paged, paged_decode, paged_mixed, paged_peers, paged_prefill
from shardfuse.bench.suites.cache_write import Problem
from shardfuse.bench.suites.paged import Operands, Step, decodes
from shardfuse.bench.suites.paged_mixed import chunk_beside
from shardfuse.bench.suites.paged_prefill import prompts
from shardfuse.kernels.dev.cases import kv_cache as kv_cases
from shardfuse.kernels.paged_attention import paged_attention

ATTENTION = (paged_decode, paged_prefill, paged_mixed)
MODULES = (*ATTENTION, cache_write)
NAMES = [module.BENCHMARK.name for module in MODULES]


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch):
    """``carried(True)``: as if vLLM's files were there; ``carried(False)``: as if they were not."""

    def carried(there: bool) -> None:
        def never(*_: object, **__: object) -> None:
            raise AssertionError("a plan runs nothing")

        monkeypatch.setattr(paged_peers, "load_vllm", lambda: never if there else None)
        monkeypatch.setattr(paged_peers, "load_vllm_writes", lambda: (never, never) if there else None)

    return carried


@pytest.fixture
def planned_for_a_gpu(carried) -> Callable[..., list[Any]]:
    def planned(benchmark: Benchmark, **how: Any) -> list[Any]:
        return list(benchmark.plan(Settings(GPU, **how)))

    carried(True)
    return planned


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_is_found_and_checks_every_case_that_it_plans(module, planned_for_a_gpu):
    benchmark = module.BENCHMARK
    assert runner.find(benchmark.name) is benchmark
    for short in (False, True):
        rows = planned_for_a_gpu(benchmark, short=short)
        assert len({row.key for row in rows}) == len(rows)
        settings = Settings(GPU, short=short)
        known = module.problems(settings) if module is cache_write else module.steps(settings)
        assert {row.case for row in rows} <= {each.name for each in known}


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_short_plan_is_short_and_part_of_the_whole_one(module, planned_for_a_gpu):
    short, whole = (planned_for_a_gpu(module.BENCHMARK, short=short) for short in (True, False))
    quick = [row for row in short if not row.slow]
    assert 6 <= len(quick) <= 12
    assert {row.key for row in short} < {row.key for row in whole}


def test_targets_are_those_of_the_project(planned_for_a_gpu):
    decode, prefill, mixed = ({row.key: row for row in planned_for_a_gpu(module.BENCHMARK)} for module in ATTENTION)
    assert list(paged_decode.TARGETS.values()) == [0.88, 1.0, pytest.approx(1 / 1.5)]
    assert list(paged_prefill.TARGETS.values()) == [2.0, 0.9]
    own = set(paged.MODES)
    for step in paged_decode.steps(Settings(GPU)):
        copied = decode[step.name, paged_decode.TIME, paged.COPY.name]
        per_token = 2 * step.kv_heads * step.head_size * step.kv_dtype.itemsize
        if step.scales is None:
            assert copied.target == (0.88 if sum(step.seq_lens) * per_token >= 2**28 else None)
    for key, row in decode.items():
        if row.metric == paged_decode.TIME and key[2] not in {*own, paged.COPY.name}:
            assert row.target == 1.0
        elif key[2] in own:
            assert row.target is None
    eight = prompts(1, 8192).name
    assert prefill[eight, paged_prefill.TIME, "vLLM"].target == 2.0
    assert prefill[prompts(1, 2048).name, paged_prefill.TIME, "vLLM"].target is None
    assert prefill[eight, paged_prefill.TIME, paged_peers.SDPA_FLASH].target == 0.9
    assert prefill[eight, paged_prefill.TIME, paged_peers.SDPA_CUDNN].target is None
    assert mixed[chunk_beside(8192, 64, 4096).name, paged_mixed.TIME, "vLLM"].target == 2.0
    assert mixed[chunk_beside(512, 128, 8192).name, paged_mixed.TIME, "vLLM"].target is None
    guesses = decodes(64, 8192, queries=5).name
    assert mixed[guesses, paged_mixed.TIME, paged.COPY.name].target == 0.88
    assert mixed[guesses, paged_mixed.TIME, "vLLM"].target == 1.0


def test_decodes_cover_what_they_promise_and_fit_a_gpu():
    steps = paged_decode.steps(Settings(GPU))
    assert {len(step.queries) for step in steps} >= {1, 256}
    assert {max(step.seq_lens) for step in steps} >= {128, 131072}
    assert {step.heads // step.kv_heads for step in steps} == {1, 4, 8, 16}
    assert {step.page for step in steps} == {1, 16, 256}
    assert {(step.kv_dtype, step.scales) for step in steps} == {
        (torch.bfloat16, None), (FP8, "tensor"), (FP8, "token_head"), (INT8, "token_head"),
    }  # fmt: skip
    assert max(step.kv_bytes for step in steps) <= 8 * 2**30
    (outlier,) = (step for step in steps if not step.uniform)
    assert sorted(outlier.seq_lens)[-2:] == [1024, 131072]


def test_every_mode_is_a_row_and_only_contiguous_steps_have_dense_peers(planned_for_a_gpu):
    for module in ATTENTION:
        settings = Settings(GPU)
        rows = {row.key for row in planned_for_a_gpu(module.BENCHMARK)}
        for step in module.steps(settings):
            peers = {name for case, metric, name in rows if (case, metric) == (step.name, module.TIME)}
            assert paged.INVARIANT in peers
            assert "vLLM" in peers
            assert (paged_peers.VARLEN in peers) == (not step.quantised)
            if module is paged_decode:
                assert paged.UNPLANNED in peers
                assert (paged_peers.SDPA in peers) == (step.uniform and not step.quantised)


def test_launch_gap_is_a_row_of_the_smallest_decode(planned_for_a_gpu):
    for short in (False, True):
        rows = planned_for_a_gpu(paged_decode.BENCHMARK, short=short)
        assert [row.key for row in rows if "gap" in row.metric] == [(decodes(1, 128).name, "launch gap, us", "vLLM")]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_who_is_absent_has_no_row(module, there, carried, monkeypatch):
    carried(there)
    monkeypatch.setattr(paged_peers.importlib.util, "find_spec", lambda name: there or None)
    peers = {row.peer_name for row in module.BENCHMARK.plan(Settings(GPU))}
    assert (paged_peers.VLLM in peers) == there
    assert (paged_peers.FLASHINFER in peers) == (there and module is not cache_write)


def test_on_a_cpu_decode_is_held_against_contiguous_keys():
    rows = paged_decode.BENCHMARK.plan(Settings(CPU))
    assert {row.peer_name for row in rows} == {paged_peers.SDPA, paged_peers.SDPA_PACKED}
    targets = {row.case: row.target for row in rows if row.peer_name == paged_peers.SDPA}
    assert targets == {
        "s32-l1024-n8k2h64-page256-fp32": pytest.approx(1 / 1.5),
        "s32-l1024-n8k2h64-page16-fp32": None,
    }


# --- what a step moves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        decodes(3, 12, **FP32),  # whole pages: the pool holds nothing that is not read
        prompts(2, 8, context=4, **FP32),
        chunk_beside(8, 2, 4, **FP32),
        *(decodes(2, 16, **TINY, **how) for how in QUANTISED.values()),
    ],
    ids=lambda step: step.name,
)
def test_work_is_what_the_tensors_hold_and_the_mask_shows(step):
    operands = Operands.of(step, CPU, 0)
    scales = [x for x in (operands.k_scale, operands.v_scale) if x is not None and x.numel() > 1]
    pages = operands.kv_cache.shape[0]
    touched = [operands.kv_cache, operands.q, operands.q, *scales]  # q, and a result like it
    assert step.bytes == sum(x.nbytes for x in touched) + 4 * pages
    seen = sum(
        1
        for context, n in zip(step.context, step.queries)
        for i in range(n)
        for j in range(context + n)
        if j <= context + i
    )
    assert step.flops == 2 * 2 * seen * step.heads * step.head_size
    assert (step.work.bytes, step.work.flops) == (step.bytes, step.flops)


@pytest.mark.parametrize("how", [{}, *QUANTISED.values()], ids=["plain", *QUANTISED])
def test_operands_are_scattered_finite_and_of_one_seed(how):
    step = Step((9, 0, 30), (1, 3, 2), **{**TINY, **how})
    one, same, other = (Operands.of(step, CPU, seed) for seed in (1, 1, 2))
    used = [row[: -(-length // 4)].tolist() for row, length in zip(one.block_tables, step.seq_lens)]
    assert sorted(chain(*used)) == list(range(one.kv_cache.shape[0]))
    assert used != sorted(used) or any(a + 1 != b for row in used for a, b in pairwise(row))
    assert one.kv_cache.float().isfinite().all()
    assert one.kv_cache.float().abs().max() > 0
    assert (one.seq_lens.tolist(), one.query_start_loc.tolist()) == ([10, 3, 32], [0, 1, 4, 6])
    for name in ("q", "kv_cache", "block_tables"):
        mine, theirs, others = (getattr(x, name).float() for x in (one, same, other))
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, others)


def test_gathered_keys_are_those_of_the_pages():
    step = Step((9, 0), (2, 3), **FP32)
    operands = Operands.of(step, CPU, 0)
    k, v = operands.gathered()
    tokens = [(s, j) for s, length in enumerate(step.seq_lens) for j in range(length)]
    for row, (s, j) in enumerate(tokens):
        slot = operands.kv_cache[operands.block_tables[s, j // 4], :, j % 4]
        assert torch.equal(torch.cat((k[row], v[row]), -1), slot)
    assert len(k) == len(tokens)


def test_twin_is_small_and_keeps_what_makes_the_step():
    large = Step((10, 20, 40000, 30, 5), (1, 1, 1, 9000, 1), page=256, kv_dtype=FP8, scales="tensor", note="x")
    twin = large.twin()
    assert twin.name == large.name
    assert (twin.context, twin.queries) == ((10, 20, paged.TWIN_CONTEXT), (1, 1, 1))
    chunk = chunk_beside(8192, 64, 4096)
    assert max(chunk.twin().queries) == paged.TWIN_QUERIES
    assert min(chunk.twin().queries) == 1
    small = Step((3, 4), (1, 1), **FP32)
    assert sorted(zip(small.twin().context, small.twin().queries)) == [(3, 1), (4, 1)]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("write_kv", "t7-k2-h16-p4-fp32"),
        ("write_kv", "t6-k2-h16-p4-fp16-e4m3-pair"),
        ("norm_rope_write_kv", "t6-n4-k2-h24-p4-fp32-e4m3-written-r8"),
        ("norm_rope_write_kv", "t6-n2-k1-h16-v8-p4-bf16-int8-written-pair-interleaved"),
    ],
)
def test_bytes_of_a_write_are_what_the_tensors_hold(op, name):
    problem = written(op, name)
    inputs = problem.spec.make_inputs(problem.case, CPU, 0)
    read = [inputs[part] for part in ("k", "v", "slot_mapping", "q", "q", "cos", "sin") if part in inputs]
    stored = (inputs["k"].numel() + inputs["v"].numel()) * (
        problem.case.options["cache"] or problem.case.dtype
    ).itemsize
    heads = inputs["k"].shape[0] * inputs["k"].shape[1]
    scales = 2 * 4 * heads if problem.case.options["scales"] == "written" else 0
    assert problem.bytes == sum(x.nbytes for x in read) + stored + scales


def test_bytes_of_a_copy_are_those_of_its_blocks_twice():
    problem = written("copy_blocks", "2x6x2x4x8-bf16-n5-dim1")
    cache = problem.spec.make_inputs(problem.case, CPU, 0)["cache"]
    assert problem.bytes == 2 * 5 * cache[:, 0].numel() * 2


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoiled", ["out", *paged.MODES])
def test_gate_sees_every_mode(monkeypatch, spoiled):
    """Every mode runs, and one that is wrong makes the gate red."""

    def ours(operands: Operands, impl: str, *, invariant: bool = False, planned: bool = True) -> Callable[[], Any]:
        name = paged.INVARIANT if invariant else "out" if planned else paged.UNPLANNED
        right = paged_attention(*operands.paged, impl="reference", k_scale=operands.k_scale, v_scale=operands.v_scale)
        return lambda: right * (1.02 if name == spoiled else 1)

    monkeypatch.setattr(paged, "ours", ours)
    step = decodes(2, 9, **TINY, **QUANTISED["fp8_per_token_head"])
    verdicts = dict.fromkeys(("out", *(f"out, {name}" for name in paged.MODES)))
    for case, verdict in paged.check([step], Settings(CPU), [step.name, "another"]):
        assert case == step.name
        verdicts[verdict.name] = verdict.ok
    assert verdicts == {name: name not in (spoiled, f"out, {spoiled}") for name in verdicts}


def test_gate_of_a_copy_has_fewer_layers_and_as_many_pairs():
    large = next(case for case in kv_cases.COPY_BLOCKS.tagged("bench") if case.name in cache_write.SHORT)
    twin = cache_write._twin(Problem(kv_cases.COPY_BLOCKS, large))
    assert twin.options["shape"] == (cache_write.GATE_LAYERS, *large.options["shape"][1:])
    assert (twin.sizes, twin.name, twin.options["block_dim"]) == (large.sizes, large.name, 1)


def test_copies_rotate_over_the_blocks_of_one_cache():
    problem = written("copy_blocks", "6x2x3x10-fp32-n4")
    first, second = cache_write._input_sets(problem, CPU, 2)
    assert first["cache"] is second["cache"]
    assert not torch.equal(first["pairs"], second["pairs"])
    for each in (first, second):
        sources, targets = each["pairs"].unbind(1)
        assert len(set(targets.tolist())) == 4
        assert not set(sources.tolist()) & set(targets.tolist())


@pytest.mark.interpret
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_dry_run(module, carried):
    carried(False)
    benchmark = module.BENCHMARK
    settings = Settings(CPU, dry=True)
    outcome = runner.run(benchmark, settings)
    assert outcome.green
    assert outcome.verdicts
    assert [row.key for row in outcome.rows] == [row.key for row in benchmark.plan(settings)]
    ran = {each for row in outcome.rows for each in row.ran.split()}
    assert ran
    assert all(each.endswith("=triton") for each in ran)


# --- the launch gap ---------------------------------------------------------------------------------------------------


def test_launch_gap_is_what_a_graph_takes_away(monkeypatch):
    """Of 50 calls: 1000 us back to back and 400 in a graph are a gap of 12 us each; a faster loop is no gap."""
    found = iter([(Timing(1000.0, 0.1), Timing(300.0, 0.2)), (Timing(400.0, 0.5), Timing(310.0, 0.6))])
    monkeypatch.setattr(paged, "_back_to_back", lambda call: call)
    monkeypatch.setattr(paged, "_replayed", lambda call: call)
    monkeypatch.setattr(paged, "compare_fixed", lambda *sides, rounds, calls: next(found))
    ours, peer = paged.launch_gaps(lambda: None, lambda: None, seconds=0.0)
    assert (ours.value, ours.noise) == (12.0, 0.1)
    assert (peer.value, peer.noise) == (paged.GAP_FLOOR_US, 0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launch_gap_of_a_decode():
    row = paged.gap_row(Settings(GPU, seconds=0.2), decodes(1, 128), paged.own(Settings(GPU), paged.UNPLANNED))
    ours, peer = row.run()
    assert 0 < ours.value < 1000
    assert 0 < peer.value < 1000
