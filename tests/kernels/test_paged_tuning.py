"""Tiles of paged attention and the tables of measured ones: what a table may decide, and what it may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_case import BF16, FP32, entry_of, shipped_tables, table_of

from shardfuse.bench import attention_workload
from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.cases import paged_builds
from shardfuse.kernels.paged_attention import config as tiles
from shardfuse.kernels.paged_attention import tuned
from shardfuse.kernels.paged_attention.config import AttentionConfig, Problem
from shardfuse.kernels.paged_attention.options import Bounds
from shardfuse.kernels.runtime import device, dispatch, tuning

TABLED = AttentionConfig(64, 128, 4, 4, per_sm=2)
DECODE = Problem(
    arch="sm_90", slots=132, tokens=32, seqs=32, max_keys=4096, group=4, kv_heads=8, head_size=128, v_size=128,
    q_dtype=BF16, kv_dtype=BF16, causal=True, window=None, prefix=False, tree=False, invariant=False,
    min_rows=4, max_rows=4, max_seq_len=4096,
)  # fmt: skip
KEY = "r16-h128-bf16"

launches = pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with shipped_tables(tmp_path / "shipped") as write:
        yield write


def _table(config: AttentionConfig = TABLED, bucket: str = KEY, **changes: Any) -> dict[str, Any]:
    fields = dataclasses.asdict(config) | changes
    return table_of(entry_of(op=tuned.OP, bucket=bucket, config=fields), sources={tuned.OP: list(tuned.SOURCES)})


def _configs(problem: Problem) -> list[AttentionConfig]:
    return [each.config for each in tiles.tile_classes(problem)]


def test_a_measured_tile_is_taken(shipped):
    rule = _configs(DECODE)
    assert rule != [TABLED]
    shipped(_table())
    assert _configs(DECODE) == [TABLED]
    assert _configs(DECODE._replace(arch="sm_100")) != [TABLED]  # measured on sm_90
    # It is for few rows; the other launch of a mixed step goes by its rule.
    mixed = _configs(DECODE._replace(max_rows=None, min_rows=None))
    assert mixed[0] == TABLED
    assert mixed[1] == tiles._tile(DECODE, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"block_m": 48},
        {"block_n": 8},
        {"num_stages": 9},  # shared memory
        {"block_m": 128, "block_n": 256, "num_stages": 3},  # registers
        {"quantum": 1024},
    ],
    ids=str,
)
def test_a_tile_that_cannot_run_is_not_taken(shipped, change):
    rule = _configs(DECODE)
    shipped(_table(**change))
    assert _configs(DECODE) == rule


def test_a_broken_entry_is_named(shipped):
    shipped(_table(num_warps=0))
    with pytest.raises(ValueError, match=r"sm_90\.json, entry 0 \(r16-h128-bf16\), config: num_warps is 0"):
        _configs(DECODE)


def test_neither_invariant_mode_nor_fp32_asks(shipped, monkeypatch):
    monkeypatch.setattr(tuning, "lookup", lambda *args: pytest.fail("a table was asked"))
    for change in ({"invariant": True}, {"q_dtype": FP32}, {"q_dtype": FP32, "kv_dtype": FP32}):
        problem = DECODE._replace(**change)
        assert tuned.bucket(problem, 16) is None
        before = _configs(problem)
        with tiles.forced(TABLED):
            assert _configs(problem._replace(forced=tiles.forced.config)) == before


@pytest.mark.parametrize(
    "change",
    [
        {"head_size": 64},
        {"v_size": 64},
        {"q_dtype": torch.float16},
        {"kv_dtype": torch.int8},
        {"window": 128},
        {"tree": True},
        {"causal": False},
    ],
    ids=str,
)
def test_buckets_tell_apart_what_runs_differently(change):
    assert tuned.bucket(DECODE, 16) == KEY
    assert tuned.bucket(DECODE._replace(**change), 16) != KEY
    assert tuned.bucket(DECODE, 32) != KEY


def test_buckets_do_not_follow_a_servers_steps():
    for change in ({"tokens": 7, "seqs": 9}, {"max_keys": 1 << 17}, {"max_seq_len": None, "min_rows": None}):
        assert tuned.bucket(DECODE._replace(**change), 16) == KEY


@launches
def test_todays_tiles_fit_the_chips_they_are_for():
    """The estimate refuses nothing that the rules choose for what is compiled ahead of time."""
    from shardfuse.kernels.paged_attention import launch

    for arch in registry.TARGETS:
        for case in registry.op("paged_attention").tagged("codegen"):
            with device.capture(arch):
                problem = launch.problem_of(*paged_builds.call(case), invariant=False, bounds=Bounds())
            for config in _configs(problem):
                assert tuned.fits(problem, config), (arch, case.name, str(config))


@launches
@pytest.mark.parametrize("arch", registry.TARGETS)
def test_candidates_fit_and_begin_with_todays_tile(arch):
    names = {"decode-llama8b-bf16": "r16", "prefill-llama8b-bf16": "r128", "speculate-llama8b-bf16": "r32"}
    for case in registry.op("paged_attention").cases:
        found = list(attention_workload.calls(case, arch))
        if case.name in names:
            [call] = found
            assert call.bucket == f"{names[case.name]}-h128-bf16"
            candidates = call.candidates(arch)
            assert candidates[0] == call.now(arch)
            assert len(candidates) == len(set(candidates)) > 12
            assert all(tuned.fits(call.problem, config) for config in candidates)
            assert len({(each.block_m, each.block_n, each.num_warps) for each in candidates[:12]}) > 2
        if case.name.startswith("mixed-llama8b") or case.dtype == FP32 or case.options.get("invariant"):
            assert not found


@launches
def test_a_table_that_is_written_counts_for_calls_that_ran_before(shipped):
    from shardfuse.kernels.paged_attention import launch

    case = next(case for case in registry.op("paged_attention").cases if case.name == "llama8b-decode-bf16")

    def launched() -> set[int]:
        with device.capture("sm_90") as seen:
            tensors, options = paged_builds.call(case)
            launch.paged_attention_fwd(tensors, options, False, Bounds(1, 1), plan=None, plan_key=0)
        return {each.args["BLOCK_M"] for each in seen if "q_ptr" in each.args}

    assert launched() == {16}
    shipped(_table())
    assert launched() == {64}
