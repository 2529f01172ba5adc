"""The benchmark of steps over several processes: its rows, its gate, and the bytes that it counts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import runner
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.suites import parallel_step
from shardfuse.bench.suites.parallel_step import DDP, DTENSOR, PIPELINING, SENT, SHARDED, TIME, Layout
from shardfuse.parallel.core.rendezvous import init_mesh

DRY = Settings(torch.device("cpu"), dry=True)
TWO = [layout for layout in parallel_step.layouts(DRY) if layout.what != "tensor"]
NIGHTLY = {"3": [pytest.mark.nightly], "zbv": [pytest.mark.nightly]}


def _measured(rank: int, world: int, chosen: list[Layout]) -> dict[str, parallel_step.Result]:
    return {layout.name: parallel_step.measure(layout, dry=True) for layout in chosen}


@pytest.mark.ranks
def test_every_row_is_measured(ranks: Any, monkeypatch: pytest.MonkeyPatch):
    found, _ = ranks(2, _measured, [layout for layout in parallel_step.layouts(DRY) if not layout.skip])
    monkeypatch.setattr(parallel_step, "_results", lambda settings, count: found)
    outcome = runner.run(parallel_step.BENCHMARK, DRY)
    assert outcome.green
    assert [row.key for row in outcome.rows] == [planned.key for planned in parallel_step.plan(DRY) if not planned.skip]
    sent = {(row.case, row.peer_name): (row.ours, row.peer) for row in outcome.rows if row.metric == SENT}
    parameters = sum(param.nbytes for param in parallel_step.workload(TWO[0], dry=True)[0].parameters())
    # Two ranks send half of what a ring carries: reduce-scatter and all-gather, with ZeRO 3 one more all-gather.
    for layout, passes in zip(TWO[:2], (2, 3)):
        ours, by_hand = sent[layout.name, SHARDED]
        assert by_hand == passes * parameters
        assert 0 < ours - by_hand < 1000  # the sums of losses and targets
        assert sent[layout.name, DDP][1] == 2 * parameters


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [pytest.param(each, marks=NIGHTLY.get(each.how, ()), id=each.name) for each in TWO])
def test_gate_notices_a_side_that_computes_something_else(ranks: Any, layout: Layout):
    for verdicts in ranks(2, _judged, layout):
        assert {verdict.ok for verdict in verdicts if verdict.name.startswith("ours.")} == {False}
        assert {verdict.ok for verdict in verdicts if not verdict.name.startswith("ours.")} == {True}
        assert any(verdict.name == "ours.d_lm_head.weight" for verdict in verdicts)


def _judged(rank: int, world: int, layout: Layout) -> Any:
    """The verdicts where ours trains on a batch of its own."""
    mesh = layout.mesh()
    model, batch = parallel_step.workload(layout, dry=True)
    sides = parallel_step.spread(layout, model, batch, mesh)
    other = parallel_step.Batch(batch.tokens.flip(1), batch.targets)
    sides["ours"] = parallel_step.spread(layout, model, other, mesh)["ours"]
    return parallel_step.judge(sides, model, batch)


@pytest.mark.ranks
def test_a_parameter_that_no_rank_has_is_red(ranks: Any):
    for (verdict,) in ranks(2, _unseen):
        assert not verdict.ok


def _unseen(rank: int, world: int) -> Any:
    init_mesh(dp=world, device_type="cpu")
    return parallel_step._everywhere({}, ["ours.d_lm_head.weight"])


def test_more_processes_than_cores_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    plan = parallel_step.plan(Settings(torch.device("cpu")))
    assert {row.case for row in plan if "4 processes would share 2 cores" in row.skip} == {
        layout.name for layout in parallel_step.LAYOUTS if layout.ranks == 4
    }
    targets = {(row.peer_name, row.target) for row in plan}
    assert targets == {
        (SHARDED, parallel_step.BY_HAND),
        (PIPELINING, parallel_step.BY_HAND),
        (DDP, None),
        (DTENSOR, None),
    }
    assert {row.metric for row in plan} == {TIME, SENT}


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_the_suite_starts_its_own_processes(count: int):
    chosen = [layout for layout in parallel_step.LAYOUTS if layout.ranks == count]
    found = parallel_step.on_ranks(parallel_step.worker, chosen, True, processes=count)
    for layout in chosen:
        assert all(verdict.ok for verdict in found[layout.name].verdicts), layout.name
        assert {peer for peer, _ in found[layout.name].figures} == set(layout.peers)
