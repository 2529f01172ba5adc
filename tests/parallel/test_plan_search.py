"""The planner's search: what it leaves out cannot be better, and what it accepts fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from shardfuse.parallel.pipeline.orders import order
from shardfuse.parallel.pipeline.timeline import Costs, simulate
from shardfuse.parallel.plan import check, efficiency, memory, published, shapes, stages, step_time
from shardfuse.parallel.plan.hardware import cluster
from shardfuse.parallel.plan.layout import Layout
from shardfuse.parallel.plan.search import SCHEDULES, Search, Space, smallest, splits
from shardfuse.parallel.plan.shapes import ModelShape
from shardfuse.parallel.plan.software import MEGATRON, OURS
from shardfuse.parallel.plan.traffic import traffic
from shardfuse.planning import plan

SMALL = ModelShape("small", 2048, 8, 16, 8, 5632, 32000, gated=True)


def _search(shape: ModelShape, gpu: str, gpus: int, batch: int, **fields: Any) -> Search:
    return Search(shape, cluster(gpu, gpus), OURS, efficiency.of(gpu), batch, **{"length": 2048, **fields})


@pytest.mark.parametrize("gib", [79.3, 3.0, 1.2])
def test_the_search_finds_the_best_of_all_layouts(gib: float) -> None:
    """At three capacities: all fits, recomputation and sharding are needed, offloading is."""
    search = _search(SMALL, "a100", 8, 32)
    gpu = replace(search.cluster.gpu, memory=gib * 2**30)
    search = replace(search, cluster=replace(search.cluster, gpu=gpu))
    best = min(_all(search), default=None)
    found = search.best(3).found
    assert best is not None
    assert found
    assert found[0].time.total == pytest.approx(best, rel=1e-12)
    assert [each.time.total for each in found] == sorted(each.time.total for each in found)
    assert len({(each.layout.tp, each.layout.pp, each.layout.shares) for each in found}) == len(found)


def _all(search: Search) -> list[float]:
    """The times of all layouts that fit, by trying every combination of every field."""
    times = []
    powers = (1, 2, 4, 8, 16, 32)
    choices = itertools.product(
        powers,
        powers,
        powers,
        powers,
        (0, 1, 3),
        powers,
        ("", *SCHEDULES),
        (("none", 0), ("none", 1), ("none", 2), ("full", 0)),
        (True, False),
        (True, False),
    )
    for tp, pp, dp, replicas, zero, micro, schedule, (recompute, mlp), parallel, offload in choices:
        if tp * pp * dp * replicas != 8 or bool(schedule) != (pp > 1) or (parallel and tp == 1):
            continue
        if (zero == 3 and splits(schedule)) or (zero == 0 and replicas > 1) or (offload and not zero):
            continue
        if replicas > 1 and dp < 8:  # shards within a node are not replicated within it
            continue
        if zero and dp == 1 and not (offload and zero == 3):
            continue
        try:
            layout = Layout(
                tp, pp, 1, dp, replicas, 1 if schedule in ("", "1f1b") else 2, zero, micro, search.batch,
                search.length, parallel, recompute, offload=offload, schedule=schedule,
                mlp_recompute=mlp,
            )  # fmt: skip
        except ValueError:
            continue
        few = layout.microbatches < pp or (schedule.startswith("interleaved") and layout.microbatches % pp)
        if few or layout.why_not(search.shape):
            continue
        if memory.predict(search.shape, layout, search.software).total > search.cluster.gpu.memory:
            continue
        took = step_time.predict(search.shape, layout, search.cluster, search.software, search.efficiency)
        times.append(took.total)
    return times


def test_long_sequences_are_offloaded_rather_than_recomputed() -> None:
    search = _search(
        shapes.find("llama3-8b"), "h100", 8, 8, length=1 << 17, space=Space(micro=(1,), pp=(1,), mlp_recompute=(0,))
    )
    gpu = replace(search.cluster.gpu, memory=160 * 2**30)
    search = replace(search, cluster=replace(search.cluster, gpu=gpu))
    (best,) = search.best(1).found
    assert (best.layout.offload, best.layout.recompute) == (True, "none")
    (recomputed,) = replace(search, space=replace(search.space, offload=(False,))).best(1).found
    assert recomputed.layout.recompute == "full"
    assert best.time.total < recomputed.time.total


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"), [("llama3-8b", "h100", 8), ("llama3-70b", "mi300x", 16), ("gpt3-175b", "a100", 64)]
)
def test_no_accepted_layout_is_above_the_capacity(model: str, gpu: str, gpus: int) -> None:
    search = _search(shapes.find(model), gpu, gpus, 128)
    result = search.best(20)
    assert len(result.found) >= 3
    for each in result.found:
        whole = [memory.of_rank(search.shape, each.layout, OURS, rank).total for rank in range(each.layout.pp)]
        assert max(whole) == each.memory.total <= search.cluster.gpu.memory
        assert each.layout.gpus == gpus


def test_layouts_whose_states_are_too_large_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trillion parameters' 16 bytes each are more than 8 GPUs or their hosts hold: refusing them is quick."""
    monkeypatch.setattr(memory, "predict", lambda *_: pytest.fail("a layout was examined"))
    search = _search(shapes.find("gpt-1t"), "h100", 8, 64)
    assert search.divides()
    assert not _search(SMALL, "a100", 6, 6, space=Space(tp=(3,))).divides()  # 16 heads
    assert not search.fits()


def test_processes_of_one_machine_share_its_memory() -> None:
    """Eight copies of the weights do not fit where fewer do."""
    search = _search(SMALL, "h100", 8, 64, space=Space(zero=(0,), tp=(1,), pp=(1,), offload=(False,)))
    gpu = replace(search.cluster.gpu, memory=5 * 2**30)
    search = replace(search, cluster=replace(search.cluster, gpu=gpu, one_machine=True))
    assert not search.fits()
    found = smallest(search)
    assert found is not None
    assert found.layout.gpus in (1, 2, 4)
    assert search.cluster.of(2).gpu.memory == 20 * 2**30


def test_shards_and_replicas_are_both_kept_to() -> None:
    space = Space(dp=(4, 8), replicas=(2,), tp=(1,), pp=(1,), zero=(1,))
    result = _search(SMALL, "h100", 8, 64, space=space).best(5)
    assert [(each.layout.dp, each.layout.replicas) for each in result.found] == [(4, 2)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bound_on_memory_is_below_what_is_held(tied: bool, offload: bool) -> None:
    shape = replace(SMALL, tied=tied)
    for pp, zero, dp in itertools.product((1, 2, 8), (0, 1, 3), (1, 4)):
        layout = Layout(tp=2, pp=pp, dp=dp, zero=zero, batch=32, offload=offload)
        gpu, host = memory.least(shape, layout, OURS)
        assert gpu <= memory.predict(shape, layout, OURS).total
        assert host <= memory.on_host(shape, layout, OURS)
        assert max(gpu, host) >= 16 * shape.parameters / layout.gpus


def test_the_smallest_number_of_gpus_is_named() -> None:
    search = _search(shapes.find("llama3-70b"), "h100", 1, 64, space=Space(offload=(False,)))
    assert not search.fits()
    found = smallest(search)
    assert found is not None
    assert 8 < found.layout.gpus <= 32
    fewer = replace(search, cluster=replace(search.cluster, gpus=found.layout.gpus - 8))
    assert not fewer.fits()
    assert smallest(search, most=8) is None


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zb"])
@pytest.mark.parametrize("microbatches", [8, 16, 40])
def test_a_schedules_bubble_is_that_of_its_simulation(schedule: str, microbatches: int) -> None:
    layout = Layout(pp=4, interleave=2, batch=microbatches, schedule=schedule)
    for costs in (Costs(0.3, 0.4, 0.3), Costs(0.2, 0.6, 0.2)):
        step = simulate(schedule, 4, microbatches, costs)
        bubble = step_time._bubble(layout, costs)
        assert bubble == pytest.approx(step.end / 2 - microbatches, rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 3, 4, 5, 8])
def test_the_bubble_of_few_micro_batches_is_the_simulated_one(microbatches: int) -> None:
    layout = Layout(pp=4, interleave=2, batch=microbatches, schedule="interleaved_1f1b")
    costs = Costs(0.3, 0.4, 0.3)
    step = simulate("interleaved_1f1b", 4, microbatches, costs)
    assert step_time._bubble(layout, costs) == pytest.approx(step.end / 2 - microbatches, abs=1e-9)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zb"])
def test_a_filled_pipeline_keeps_no_more(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(pp=4, interleave=2, batch=32, schedule=schedule)

    def kept() -> list[float]:
        return [stages.fullest(sizes, [0.0, 0.5], layout, rank)[0] for sizes in ([3, 2], [1, 4]) for rank in range(4)]

    counted = kept()
    monkeypatch.setattr(stages, "FILLED", 8)
    assert kept() == counted


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_moment_is_that_of_the_order(schedule: str) -> None:
    """Stepping through the passes of a rank, with stages that keep different amounts."""
    kept_by = [((7.0, 5.0), (2.0, 0.5)), ((7.0, 5.0), (7.0, 5.0)), ((1.0, 9.0), (0.0, 9.0)), ((9.0, 1.0), (9.0, 0.0))]
    for pp, microbatches, (sizes, early) in itertools.product((2, 3, 5), (1, 2, 5, 10, 15), kept_by):
        layout = Layout(pp=pp, batch=microbatches, schedule=schedule, interleave=1 if schedule == "1f1b" else 2)
        try:
            ranks = order(schedule, pp, microbatches)
        except ValueError:  # too few, or not a multiple
            continue
        for rank, passes in enumerate(ranks):
            own = sorted({todo.stage for (todo,) in passes})
            kept, most = 0.0, 0.0
            for (todo,) in passes:
                whole, part = sizes[own.index(todo.stage)], early[own.index(todo.stage)]
                kept += {"F": whole, "B": -whole, "I": -part, "W": part - whole}[todo.kind]
                most = max(most, kept)
            assert stages.fullest(sizes[: len(own)], early[: len(own)], layout, rank)[0] == most, (pp, rank)


@pytest.mark.parametrize("length", [2048, 2047])
def test_the_search_times_each_layout_as_it_is(length: int) -> None:
    """Also where sequence parallelism, which the bound supposes, does not divide the tokens."""
    search = _search(SMALL, "a100", 8, 32, length=length, space=Space(tp=(1, 2, 4), micro=(1,)))
    found = search.best(20).found
    assert {each.layout.sequence_parallel for each in found if each.layout.tp > 1} == {length == 2048}
    for each in found:
        took = step_time.predict(SMALL, each.layout, search.cluster, search.software, search.efficiency)
        assert each.time == took


def test_no_layout_is_quicker_than_its_bound() -> None:
    search = _search(SMALL, "a100", 8, 32)
    compared = 0
    for mesh, micro in search._meshes():
        layouts: list[Layout] = []
        list(search._tried(mesh, micro, layouts.append))
        for layout in layouts:
            took = step_time.predict(SMALL, layout, search.cluster, search.software, search.efficiency)
            assert took.total >= search._least(mesh, micro).seconds * (1 - 1e-12)
        compared += len(layouts)
    assert compared > 100


def test_a_choice_that_allows_the_best_layout_finds_it() -> None:
    """Offloaded, because the network is slow: what else was found, and when, must not matter."""
    choices: dict[str, Any] = {"batch": 256, "seq": 1000, "network": "pcie-5,ethernet-100", "tp": 32, "pp": 1}
    best = plan("gpt-310b", gpus=256, mlp_recompute=0, **choices).best
    assert best.layout.offload
    narrow = plan("gpt-310b", gpus=256, mlp_recompute=0, micro=best.layout.micro, **choices).best
    assert narrow == best


def test_what_a_rank_sends_is_the_closed_form() -> None:
    layout = Layout(tp=2, pp=2, dp=2, zero=1, micro=1, batch=8, length=1024, sequence_parallel=True)
    flows = {(each.what, each.kind): each for each in traffic(SMALL, layout, cluster("h100", 8), OURS)}
    blocks = 5  # of 8: the head takes longer than a block
    divided = blocks * (SMALL.layer_parameters - SMALL.layer_repeated) + SMALL.embedding_parameters
    owned = divided // 2 + blocks * SMALL.layer_repeated
    assert flows["gradients", "reduce_scatter"].bytes == owned * 4 / 2
    assert flows["parameters", "all_gather"].bytes == owned * 2 / 2
    activation = 1024 * 2048 * 2
    assert flows["blocks", "all_gather"].bytes == 4 * blocks * 4 * activation / 2
    assert flows["between stages", "send"].bytes == 4 * activation / 2
    assert {each.link for each in flows.values()} == {"node"}
    apart = traffic(SMALL, replace(layout, dp=16, batch=64), cluster("h100", 64), OURS)
    assert {each.group: each.link for each in apart} == {"dp": "network", "tp": "node", "pp": "node"}


def test_groups_that_do_not_divide_a_node_leave_it() -> None:
    """Of 12 ranks on nodes of 8 the second six lie on both."""
    layout = Layout(tp=2, dp=6, zero=1, batch=12, length=1024, sequence_parallel=True)
    assert {each.group: each.link for each in traffic(SMALL, layout, cluster("h100", 12), OURS)}["dp"] == "network"
    where = cluster("h100", 12)
    assert [span for span in range(1, 13) if where.within_node(span)] == [1, 2, 4, 8]
    assert cluster("h100", 6).within_node(6)
    assert step_time.link_rate(where, 6, 1) < step_time.link_rate(cluster("h100", 6), 6, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_slowest_rank_is_that_of_the_cut(schedule: str) -> None:
    """No part of a step is negative, and all products are those of a whole number of blocks."""
    shape = replace(SMALL, layers=20)
    layout = Layout(pp=8, interleave=1 if schedule == "1f1b" else 2, batch=16, schedule=schedule)
    where, rates = cluster("h100", 8), efficiency.of("h100")
    step = step_time.predict(shape, layout, where, OURS, rates)
    assert min(vars(step).values()) >= 0
    cut = [stages.of_rank(shape, layout, OURS, rank) for rank in range(8)]
    blocks = step.products / 16 / sum(step_time._products(shape, layout, where, rates))
    assert blocks == pytest.approx(max(sum(each.blocks for each in rank) for rank in cut))


def test_zero_3_in_a_pipeline_gathers_for_every_micro_batch() -> None:
    where, rates = cluster("h100", 32), efficiency.of("h100")

    def took(zero: int) -> float:
        layout = Layout(pp=2, dp=16, zero=zero, batch=16 * 7)
        return step_time.predict(SMALL, layout, where, OURS, rates).gradients

    assert took(3) / took(1) == pytest.approx((4 + 8 * 2) / (4 + 2))


def test_replicas_and_the_host_cost_time() -> None:
    where, rates = cluster("h100", 32), efficiency.of("h100")

    def took(**fields: object) -> step_time.StepTime:
        layout = Layout(**{"dp": 32, "zero": 3, "batch": 64, **fields})  # type: ignore[arg-type]
        return step_time.predict(SMALL, layout, where, OURS, rates)

    assert took(dp=8, replicas=4).gradients > took().gradients == 0
    assert took(offload=True).optimizer > 10 * took().optimizer


@pytest.mark.parametrize("source", ["megatron2021-T2", "2205.05198-T5", "bridge25.11"])
def test_published_layouts_are_near_the_best_or_it_is_said_why(source: str) -> None:
    runs = [run for run in published.runs() if run.source == source and run.cluster.gpus <= 1024]
    chosen = check.layouts(runs, free=False)
    assert len(chosen) >= 2
    assert all(each.passed for each in chosen)


@pytest.mark.nightly
def test_every_published_layout_is_near_the_best_or_it_is_said_why() -> None:
    chosen = check.layouts(free=False)
    assert len(chosen) >= 280
    assert [each.run.name for each in chosen if not each.passed] == []
    assert {(each.run.source, each.run.shape.name) for each in chosen if not each.near} == check.FAR.keys()


def test_a_published_layout_far_from_the_best_is_found() -> None:
    """Without its reason: the search is no comparison of a layout with itself."""
    run = next(run for run in published.runs() if run.source == "mcore0.8" and run.cluster.gpus == 96)
    poor = replace(run, layout=replace(run.layout, tp=8, dp=12, batch=192), software=MEGATRON)
    (chosen,) = check.layouts([poor], free=False)
    assert chosen.over > check.LAYOUT_WITHIN
    assert not chosen.passed


def test_mlps_are_recomputed_before_whole_blocks() -> None:
    """Level by level, as memory shrinks: each keeps less than the one before it and takes longer."""
    search = _search(
        SMALL, "a100", 8, 32, space=Space(tp=(2,), pp=(1,), dp=(4,), zero=(3,), micro=(4,), offload=(False,))
    )
    ladder = []
    for gib in range(40, 0, -1):
        gpu = replace(search.cluster.gpu, memory=gib / 4 * 2**30)
        found = replace(search, cluster=replace(search.cluster, gpu=gpu)).best(1).found
        ladder += [found[0]] if found and found[0].layout not in [each.layout for each in ladder] else []
    assert [(each.layout.recompute, each.layout.mlp_recompute) for each in ladder] == [
        ("none", 0), ("none", 1), ("none", 2), ("full", 0),
    ]  # fmt: skip
    for one, other in itertools.pairwise(ladder):
        assert one.memory.total > other.memory.total
        assert one.time.total < other.time.total


def test_recomputed_blocks_leave_no_mlp_to_recompute() -> None:
    with pytest.raises(ValueError, match="allow mlp_recompute=0, or recompute='none'"):
        Space(recompute=("full",), mlp_recompute=(1, 2))
