"""Pipelines: the losses and gradients of one process under every schedule, every product and collective once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pipeline_case import CONFIG, Case, batch, build, run_micro_batches, run_pipeline
from torch import nn

from shardfuse.layers.stage_costs import measured_costs
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core.random import manual_seed
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize
from shardfuse.parallel.pipeline.pipeline import SCHEDULES, Pipeline, split
from shardfuse.parallel.pipeline.schedules import check_microbatches, stages_of

DROPOUT = {"embedding_dropout": 0.2, "residual_dropout": 0.3}
GATED, TIED = {"style": "gated"}, {"tie_embeddings": True}
RECOMPUTE, SEQUENCE = {"recompute": True}, {"sequence_parallel": True}

# Each schedule with one or two stages a rank, combined in turn with other features that change the execution.
TWO_RANKS = [
    Case("naive", config=GATED),
    Case("gpipe", config=DROPOUT, model=RECOMPUTE),
    Case("1f1b", config=TIED, steps=2),
    Case("interleaved_1f1b", config=GATED | DROPOUT),
    Case("interleaved_zb", config=DROPOUT, model=RECOMPUTE, fused_loss=True),
    Case("zbv", config=TIED, model=RECOMPUTE, steps=2),
    Case("dualpipev", config=GATED),
]
FOUR_RANKS = [
    Case("1f1b", tp=2, model=SEQUENCE),
    Case("interleaved_zb", tp=2, config=GATED, model=SEQUENCE | RECOMPUTE),
    Case("zbv", tp=2, config=DROPOUT, model={"mlp_recompute": 2}),
    Case("interleaved_zb", dp=2, zero=2, model=RECOMPUTE),
    Case("dualpipev", dp=2, zero=0, config=TIED),
    Case("1f1b", config=TIED),
]


def _check(found: list[dict[str, Any]], case: Case) -> None:
    for rank, result in enumerate(found):
        assert not result["wrong"], f"rank {rank}: {result['wrong']}"
        assert len(result["names"]) > 8
    assert set().union(*(result["names"] for result in found)) == set(found[0]["expected"])
    apart = case.config.get("tie_embeddings", False) and SCHEDULES[case.schedule].layout == "loop"
    assert any(result["borrowed"] for result in found) == apart


def _once(ranks: Any, found: list[dict[str, Any]], case: Case) -> None:
    """Assert that the stages of each data-parallel share together ran exactly the work of a run without a pipeline."""
    alone = ranks(case.tp, run_micro_batches, vars(case))
    assert alone[0]["products"].total() >= 3 * 4 * CONFIG.num_layers * case.microbatches
    share = len(found) // case.dp
    for first, rank, name in itertools.product(range(0, len(found), share), range(case.tp), alone[0]):
        stages = found[first + rank : first + share : case.tp]
        together = sum((result["counts"][name] for result in stages), Counter())
        assert together == alone[rank][name], name
    assert bool(alone[0]["collectives"]) == (case.tp > 1)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_ranks_do_what_one_process_does(ranks: Any, case: Case):
    found = ranks(2, run_pipeline, vars(case))
    _check(found, case)
    _once(ranks, found, case)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_four_ranks_do_what_one_process_does(ranks: Any, case: Case):
    found = ranks(4, run_pipeline, vars(case))
    _check(found, case)
    _once(ranks, found, case)


FEATURES = [
    {"config": config, "model": model, "fused_loss": (i + j) % 2 == 1}
    for i, config in enumerate(({}, GATED, TIED, DROPOUT))
    for j, model in enumerate(({}, RECOMPUTE, SEQUENCE, {"mlp_recompute": 1}))
]


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_schedule_with_everything(ranks: Any, schedule: str, tp: int):
    for features in FEATURES:
        case = Case(schedule, tp=tp, **features)
        found = ranks(2 * tp, run_pipeline, vars(case))
        _check(found, case)
        _once(ranks, found, case)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_stage_of_zero(ranks: Any, schedule: str):
    stages = (0, 1, 2) if SCHEDULES[schedule].splits_backward else (0, 1, 2, 3)
    for stage, config, model in itertools.product(stages, ({}, TIED | GATED), ({}, RECOMPUTE)):
        case = Case(schedule, dp=2, zero=stage, config=config, model=model)
        found = ranks(4, run_pipeline, vars(case))
        _check(found, case)
        _once(ranks, found, case)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("zero", "config", "model"), [(0, GATED, {}), (2, TIED, SEQUENCE | RECOMPUTE)], ids=["zero0", "zero2"]
)
def test_every_schedule_in_three_dimensions(
    ranks: Any, schedule: str, zero: int, config: dict[str, Any], model: dict[str, Any]
):
    case = Case(schedule, dp=2, tp=2, zero=zero, config=config, model=model)
    found = ranks(8, run_pipeline, vars(case))
    _check(found, case)
    _once(ranks, found, case)


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_other_numbers_of_micro_batches(ranks: Any, schedule: str, microbatches: int):
    try:
        check_microbatches(schedule, microbatches, 4)
    except ValueError:
        pytest.skip("the schedule cannot run with so few, and says so")
    case = Case(schedule, microbatches=microbatches, config={"num_layers": 8, **TIED})
    _check(ranks(4, run_pipeline, vars(case)), case)


# --- other features ---------------------------------------------------------------------------------------------------


def _shapes_body(rank: int, world: int) -> list[Any]:
    """Batches with different shapes and positions, evaluations between steps, and a pipeline that never trains."""
    mesh = init_mesh(pp=world)
    case = Case("zbv", config=DROPOUT)
    tokens, targets = batch()
    found = []
    _, pipeline = build(case, mesh)
    for rows, length in ((7, 8), (3, 8), (4, 5), (7, 8)):
        found.append(pipeline.evaluate(tokens[:rows, :length], targets[:rows, :length]).item())
        pipeline.step(tokens[:rows, :length], targets[:rows, :length])
    shifted = torch.arange(8) + 3
    found.append(pipeline.evaluate(tokens, targets, positions=shifted).item())
    found.append(pipeline.step(tokens[:0], targets[:0], positions=shifted).item())
    model = case.build(None, torch.float32).eval()
    model.init_weights(3)
    expected = []
    for rows, length in ((7, 8), (3, 8), (4, 5), (7, 8)):
        part = targets[:rows, :length]
        expected.append(model(tokens[:rows, :length], part).item() * int((part != -100).sum()))
    expected.append(model(tokens, targets, positions=shifted).item() * int((targets != -100).sum()))
    expected.append(0.0)
    return [found, expected, all(stage.training for _, stage in pipeline.stages)]


def test_batches_may_change_their_shape_and_evaluations_come_between(ranks: Any):
    for found, expected, trains in ranks(2, _shapes_body):
        assert found == pytest.approx(expected, rel=1e-5)
        assert found[0] == found[3]  # no dropout in evaluation
        assert trains


def _frozen_body(rank: int, world: int) -> tuple[float, float, set[str], set[str]]:
    """Loss of a step and of an evaluation; the names of all parameters, and of those without a gradient."""
    model, pipeline = build(Case("1f1b", config=TIED), init_mesh(pp=world))
    model.model.embed_tokens.weight.requires_grad_(False)
    losses = pipeline.step(*batch()).item(), pipeline.evaluate(*batch()).item()
    params = dict(model.named_parameters())
    return *losses, set(params), {name for name, param in params.items() if param.grad is None}


def test_tied_embeddings_may_be_frozen(ranks: Any):
    for loss, evaluation, names, without in ranks(2, _frozen_body):
        assert loss == pytest.approx(evaluation, rel=1e-5)
        assert len(names) > 8
        assert without == {"model.embed_tokens.weight"}


def _measured_body(rank: int, world: int) -> tuple[list[float], list[int]]:
    mesh = init_mesh(pp=world)
    config = {"vocab_size": 20_000, "num_layers": 6}
    model = Case("1f1b", config=config).build(None, torch.float32)
    costs = measured_costs(model.config, *batch()[0].shape, split=False, mesh=mesh)
    times = [each.step for each in costs]
    given = parallelize(Case("1f1b", config=config).build(None, torch.float32), mesh, schedule="1f1b", costs=costs)
    kept = len(cast(ParallelTransformer, given.module).kept)
    assert kept == sum(len(stage.parts) for stage in split(model, mesh, "1f1b", costs=times))
    return times, [kept]


def test_costs_may_be_measured(ranks: Any):
    (times, parts), (others, rest) = ranks(2, _measured_body)
    assert times == others  # ranks have to agree
    assert len(times) == 8
    assert min(times) > 0
    assert times[-1] > 3 * times[0]  # a head of this size beside an embedding
    assert sum(parts + rest) == 8


def _attention_dropout_body(rank: int, world: int) -> tuple[list[float], int]:
    """The losses of two steps with one seed and of a third; and the generator's next draw."""
    mesh = init_mesh(pp=world)
    _, pipeline = build(Case("gpipe", config={"attention_dropout": 0.5}), mesh)
    losses = []
    for seed in (1, 1, None):
        if seed is not None:
            manual_seed(seed, mesh)
        losses.append(pipeline.step(*batch()).item())
    return losses, int(torch.randint(2**62, ()))


def test_dropped_attention_weights_are_other_ones_in_every_step(ranks: Any):
    (losses, after), (others, theirs) = ranks(2, _attention_dropout_body)
    assert losses[0] == losses[1] != losses[2]
    assert losses == others
    assert after == theirs  # stages draw different masks, then continue equally


def _errors_body(rank: int, world: int) -> list[str]:
    """Every rank raises each error before any message is sent, so the next collective works."""
    mesh = init_mesh(pp=world)
    case = Case("1f1b")
    tokens, targets = batch()
    model, pipeline = build(case, mesh)
    stages = [(index, nn.Identity()) for index in stages_of("1f1b", rank, world)]
    compiled = [(index, nn.Linear(1, 1)) for index in stages_of("zbv", rank, world)]
    compiled[1][1].compile(backend="eager")
    wrong = tokens.clone()
    wrong[0, 0] = 40
    calls = [
        lambda: split(case.build(None, torch.float32, "meta"), mesh, "2f2b"),
        lambda: split(case.build(None, torch.float32, "meta"), mesh, "1f1b", costs=[1.0, 2.0]),
        lambda: Pipeline(model, stages, mesh, "1f1b", 1),
        lambda: Pipeline(model, stages, mesh, "interleaved_zb", 5),
        lambda: Pipeline(model, stages, mesh, "dualpipev", 3),
        lambda: Pipeline(model, stages, mesh, "gpipe", 0),
        lambda: Pipeline(model, stages, mesh, "zbv", 4),
        lambda: Pipeline(model, compiled, mesh, "zbv", 4),
        lambda: build(Case("1f1b", config=TIED, model={"fuse_wgrad_accumulation": True}), mesh),
        lambda: pipeline.step(wrong, targets),
        lambda: pipeline.step(tokens, targets[:, :4]),
        lambda: pipeline.step(tokens, targets, positions=torch.arange(7)),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    with pytest.raises(RuntimeError, match="on another pipeline stage"):
        model(tokens)
    assert pipeline.evaluate(tokens, targets) > 0
    return messages


def test_what_cannot_run_is_refused_on_every_rank(ranks: Any):
    expected = [
        "schedule='2f2b': expected one of naive, gpipe",
        "costs: 2 for a model of 6 parts",
        "needs at least 2 micro-batches, not 1: raise microbatches, or use schedule='gpipe'",
        "runs in 2 rounds, and 5 micro-batches do not divide by that: use 4 or 6",
        "needs at least 4 micro-batches, not 3",
        "microbatches=0: expected at least 1",
        "but schedule='zbv' gives pipeline rank",
        "schedule='zbv' splits backward, and a module of a stage is compiled",
        "fuse_wgrad_accumulation=True with model.embed_tokens.weight at both ends of a pipeline",
        "token 40 is outside the vocabulary of 40",
        "expected tokens [B, S] and targets of the same shape",
        "positions [7]: expected [8] or [7, 8]",
    ]
    for messages in ranks(2, _errors_body):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def _tied_body(rank: int, world: int) -> tuple[str, float | None]:
    """This rank's error, and the timeout in seconds of the group of both ends."""
    mesh = init_mesh(pp=world, timeout=timedelta(seconds=77))
    case = Case("1f1b", config=TIED | {"num_layers": 2})  # one part per stage: the first stage has no linear layer
    with pytest.raises(ValueError) as caught:
        split(case.build(None, torch.float32, "meta", fuse_wgrad_accumulation=True), mesh, "1f1b")
    model = case.build(None, torch.float32, "meta")
    stages = [(index, model.stage(parts)) for index, parts in split(model, mesh, "1f1b")]
    ends = Pipeline(model, stages, mesh, "1f1b", 4)._ends
    waits = None if ends is None else ends.pg._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return str(caught.value), waits


def test_all_ranks_agree_on_tied_embeddings(ranks: Any):
    for rank, (message, waits) in enumerate(ranks(4, _tied_body)):
        assert "fuse_wgrad_accumulation=True with model.embed_tokens.weight at both ends" in message
        assert waits == (77.0 if rank in (0, 3) else None)


def _compiled_body(rank: int, world: int) -> list[bool]:
    """Whether a pipeline of compiled blocks gives the gradients of an eager one."""
    mesh, found = init_mesh(pp=world), []
    for compiles in (False, True):
        model, pipeline = build(Case("1f1b"), mesh)
        if compiles:
            for block in model.model.layers:
                block.compile(backend="aot_eager")
        pipeline.step(*batch())
        found.append({name: param.grad for name, param in model.named_parameters()})
    eager, compiled = found
    return [torch.allclose(eager[name], compiled[name], rtol=1e-4, atol=1e-6) for name in eager]


@pytest.mark.nightly
def test_blocks_may_be_compiled_where_backward_is_whole(ranks: Any):
    for equal in ranks(2, _compiled_body):
        assert len(equal) > 8
        assert all(equal)


DYING = """
import os, sys, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from pipeline_case import Case, batch, build
from shardfuse.parallel.core.rendezvous import init_mesh

rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
_, pipeline = build(Case("interleaved_1f1b"), init_mesh(pp=2, device_type="cpu"))
pipeline.step(*batch())
if rank == 1:
    pipeline.stages[-1][1].register_forward_pre_hook(lambda *args: os._exit(9))
pipeline.step(*batch())
"""


def test_when_a_rank_dies_the_others_say_so(tmp_path: Path):
    folder = str(Path(__file__).parents[1] / "support")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, folder, str(tmp_path / "store"), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == 9
    assert started[0].returncode == 1
    assert "pipeline rank 0 of 2, schedule='interleaved_1f1b': a step ended early" in errors[0]
    assert "another rank failed first: see its error" in errors[0]


def test_a_model_too_small_for_its_stages_is_refused(ranks: Any):
    def fits(schedule: str, layers: int) -> bool:
        return layers + 2 >= 4 * SCHEDULES[schedule].stages_per_rank

    assert [ranks(4, _deep_body, name, 5) for name in ("1f1b", "zbv")] == [
        [fits("1f1b", 5) or "a model of 7 parts cannot be cut into 4 pipeline stages"] * 4,
        [fits("zbv", 5) or "a model of 7 parts cannot be cut into 8 pipeline stages"] * 4,
    ]


def _deep_body(rank: int, world: int, schedule: str, layers: int) -> bool | str:
    model = Case(schedule, config={"num_layers": layers}).build(None, torch.float32, "meta")
    try:
        return len(split(model, init_mesh(pp=world), schedule)) == SCHEDULES[schedule].stages_per_rank
    except ValueError as error:
        return str(error).partition(":")[0]
