"""A step's communication: counts from torch's dispatcher and the layers' own counters, against closed forms."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard
from typer.testing import CliRunner
from wire import omit

from shardfuse import planning
from shardfuse.cli import app
from shardfuse.commands import audit as command
from shardfuse.commands.audit import Options, Outcome, count_step
from shardfuse.parallel.audit import links
from shardfuse.parallel.audit.audit import Audit, group_name
from shardfuse.parallel.audit.entries import TORCH, Entry, one_way, sent
from shardfuse.parallel.audit.forms import Form, Plan, compare, expected, hops
from shardfuse.parallel.audit.unsharded import unsharded_bytes
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import everyone, tp_group
from shardfuse.parallel.core.pieces import GatherPieces
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.pipeline.partition import owners
from shardfuse.parallel.pipeline.schedules import SCHEDULES, find
from shardfuse.parallel.plan.hardware import cluster
from shardfuse.parallel.plan.layout import Layout
from shardfuse.parallel.plan.software import OURS
from shardfuse.parallel.plan.traffic import traffic

ENTRY = Entry(step=0, group="dp", ranks=4, kind="all_reduce", site=TORCH, calls=2, payload=1000)


# ------------------------------------------------------------------------------------------------------------ counting


def _calls_body(rank: int, world: int) -> list[tuple[Any, ...]]:
    """Call each communicating function once, in a separate step; returns the counts."""
    mesh = init_mesh(tp=world)
    group = tp_group(mesh)
    small, large = torch.ones(8, 4), torch.ones(collectives.EXCHANGE_BYTES)
    other = 1 - rank

    def pieces() -> None:
        gathering = GatherPieces(small, group, 3, site="pieces")
        assert len(list(gathering.arriving())) == 4

    def send() -> None:
        buffer = torch.empty(8, 4)
        ops = [dist.P2POp(dist.isend, small, other), dist.P2POp(dist.irecv, buffer, other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    calls = [
        lambda: collectives.all_reduce(small, group, site="small"),
        lambda: collectives.all_reduce(large, group, site="large"),
        lambda: collectives.reduce_scatter(small, group, site="scatter"),
        lambda: collectives.all_gather(small, group, dim=1, site="gather"),
        pieces,
        lambda: collectives.gather_objects({"a": 1}, group, site="objects"),
        lambda: dist.all_reduce(small),
        lambda: functional.all_reduce(small, "sum", group.pg).sum(),
        lambda: functional.all_gather_tensor(small, 0, group.pg).sum(),
        lambda: DTensor.from_local(small, group.mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local(),
        send,
        lambda: dist.all_reduce(small, group=dist.new_group([rank], use_local_synchronization=True)),
        lambda: dist.reduce(small, 0),
        dist.barrier,
    ]
    with Audit(mesh) as audit:
        for index, call in enumerate(calls):
            if index:
                audit.next_step()
            call()
    parts = [small.clone() for _ in range(world)] if rank == 0 else None
    with Audit(mesh), pytest.raises(RuntimeError, match=r"^c10d::gather_: a step sends with it"):
        dist.gather(small, parts)
    return [(e.step, e.group, e.ranks, e.kind, e.site, e.calls, e.payload) for e in audit.entries]


def test_every_call_is_counted_once_whatever_it_is_made_of(ranks: Any):
    size = 8 * 4 * 4
    counted = [
        ("all_reduce", "small", size),  # a send and a receive in gloo
        ("all_reduce", "large", collectives.EXCHANGE_BYTES * 4),
        ("reduce_scatter", "scatter", size),  # an all-to-all
        ("all_gather", "gather", 2 * size),
        ("all_gather", "pieces", 2 * size),  # three sends
        None,  # pickled objects are not counted: agreement is not part of the computation
        ("all_reduce", TORCH, size),
        ("all_reduce", TORCH, size),
        ("all_gather", TORCH, 2 * size),
        ("all_gather", TORCH, 2 * size),
        ("send", TORCH, size),
        None,  # in a group of one
        ("reduce", TORCH, size),
        None,  # a barrier
    ]
    rows = [(step, "tp", 2, row[0], row[1], 1, row[2]) for step, row in enumerate(counted) if row is not None]
    assert ranks(2, _calls_body) == [rows, rows]


def _names_body(rank: int, world: int) -> list[str]:
    mesh = init_mesh(dp=2, tp=2)
    with Audit(mesh) as audit:
        collectives.all_reduce(torch.ones(1), everyone(), site="all")
        collectives.all_reduce(torch.ones(1), tp_group(mesh, "dp"), site="all")
    assert {(entry.group, entry.payload) for entry in audit.entries} == {("dp x tp", 4), ("dp", 4)}
    heading, *rows = audit.report().splitlines()
    assert heading.split() == ["step", "over", "ranks", "collective", "site", "calls", "payload"]
    assert [row.split() for row in rows] == [
        ["0", "dp", "2", "all_reduce", "all", "1", "4"],
        ["0", "dp", "x", "tp", "4", "all_reduce", "all", "1", "4"],
    ]
    return [group_name(mesh, some) for some in ([0, 2], [0, 1], [0, 1, 2, 3], [0, 3], [1])]


def test_what_another_thread_posts_is_not_taken_for_ones_own():
    posting, asked = threading.Event(), threading.Event()

    def post() -> None:
        seen.append(collectives.posting())
        posting.set()
        assert asked.wait(60)

    seen: list[Any] = []
    saver = threading.Thread(target=collectives.Flight, args=("all_gather", "checkpoint", post))
    saver.start()
    assert posting.wait(60)
    seen.append(collectives.posting())
    asked.set()
    saver.join()
    assert seen == [("all_gather", "checkpoint"), None]


def test_groups_are_called_by_the_dimensions_they_span(ranks: Any):
    assert ranks(4, _names_body) == [["dp", "tp", "dp x tp", "dp x tp", ""]] * 4


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    whole = sent("all_reduce", 1000, 4)
    assert whole == sent("reduce_scatter", 1000, 4) + sent("all_gather", 1000, 4) == 1500
    assert one_way([ENTRY]) == one_way([replace(ENTRY, kind="reduce_scatter"), replace(ENTRY, kind="all_gather")])
    assert sent("send", 10, 2) == sent("broadcast", 10, 4) == 10


# ---------------------------------------------------------------------------------------------------------- whole steps


def _step_body(rank: int, world: int, *many: Options) -> list[Outcome]:
    outcomes = []
    for options in many:
        mesh = init_mesh(dp_replicate=options.dp_replicate, dp=options.dp, pp=options.pp, tp=options.tp)
        assert mesh is not None
        outcomes.append(count_step(options, mesh))
    return outcomes


STEPS = {
    "zero0-hybrid": Options(dp_replicate=2, dp=2, zero=0, microbatches=2),
    "zero1-hybrid": Options(dp_replicate=2, dp=2, zero=1),
    "zero2-accumulated": Options(dp=2, tp=2, zero=2, microbatches=3),
    "zero3-sequence-recompute": Options(
        dp=2, tp=2, zero=3, microbatches=2, sequence_parallel=True, recompute=True, style="gelu"
    ),
    "zero3-bf16": Options(dp=2, tp=2, zero=3, precision="bf16"),
    "1f1b-zero3": Options(pp=2, dp=2, zero=3, schedule="1f1b", microbatches=2),
    "1f1b-tied-overlap": Options(pp=2, tp=2, schedule="1f1b", microbatches=2, tie_embeddings=True, overlap="chunked"),
    "zbv-tied-zero2": Options(pp=2, dp=2, zero=2, schedule="zbv", microbatches=4, tie_embeddings=True),
    "1f1b-tied-zero1-offload": Options(
        pp=2, dp=2, zero=1, schedule="1f1b", microbatches=2, tie_embeddings=True, offload=True
    ),
    "zbv-tp": Options(pp=2, tp=2, schedule="zbv", microbatches=4, sequence_parallel=True, mlp_recompute=2),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_sends_what_the_closed_form_says(ranks: Any, name: str):
    found = ranks(4, _step_body, STEPS[name])
    for (outcome,) in found:
        assert outcome.wrong == []
        assert all(line.counted for line in outcome.lines)
        assert {entry.group for entry in outcome.entries} >= {line.form.group for line in outcome.lines}
    assert _planned(STEPS[name]) == {
        (line.form.what, line.form.kind): line.form.payload
        for (outcome,) in found
        if not outcome.rank
        for line in outcome.lines
    }


def _planned(options: Options) -> dict[tuple[str, str], float]:
    """The payloads that the planner predicts of the first rank."""
    layout = Layout(
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        replicas=options.dp_replicate,
        interleave=options.stages // options.pp,
        zero=options.zero,
        micro=command.ROWS,
        batch=command.ROWS * options.passes * options.dp * options.dp_replicate,
        length=command.LENGTH,
        sequence_parallel=options.sequence_parallel,
        recompute="full" if options.recompute else "none",
        mlp_recompute=options.mlp_recompute,
        precision=options.precision or "fp32",
        offload=options.offload,
        schedule=options.schedule or "",
    )
    sizes = {"dp": options.dp, "dp_replicate": options.dp_replicate, "tp": options.tp, "pp": options.pp}
    sizes |= {"dp_replicate x dp": options.dp * options.dp_replicate, "tied embedding": 2}
    flows = traffic(planning._shape(options.config(), "tiny"), layout, cluster("h100", options.processes), OURS)
    # sent() is linear in the payload.
    return {
        (flow.what, flow.kind): round(flow.bytes / sent(flow.kind, 1, sizes.get(flow.what) or sizes[flow.group]))
        for flow in flows
    }


def _product() -> list[Any]:
    degrees = [(dp, tp, zero) for dp, tp in ((1, 2), (2, 1), (2, 2)) for zero in (range(4) if dp > 1 else (0,))]
    cases = []
    for schedule, (dp, tp, zero) in itertools.product(SCHEDULES, degrees):
        if find(schedule).splits_backward and zero == 3:
            continue  # compatibility.py refuses it
        for more in (False, True) if tp > 1 else (False,):
            options = Options(dp=dp, pp=2, tp=tp, zero=zero, schedule=schedule, sequence_parallel=more, recompute=more)
            cases.append(pytest.param(options, id=options.said().replace(", ", "-").replace(" ", "").replace("=", "")))
    return cases


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [*_product(), Options(dp=3, pp=2, zero=1, schedule="interleaved_zb", tie_embeddings=True)],  # unequal shards
)
def test_every_schedule_sends_what_the_closed_form_says(ranks: Any, options: Options):
    for (outcome,) in ranks(options.processes, _step_body, options, timeout=300):
        assert outcome.wrong == []


def _halves_body(rank: int, world: int) -> tuple[list[str], int, int]:
    """A step without one all-reduce; then the blocks' forward traffic without and with sequence parallelism."""
    (plain, sequence) = _step_body(rank, world, Options(tp=2), Options(tp=2, sequence_parallel=True))
    with omit("mlp.out"):
        (omitted,) = _step_body(rank, world, Options(tp=2))
    blocks = [
        one_way(entry for entry in outcome.entries if entry.site.startswith(("attention.", "mlp.")))
        for outcome in (plain, sequence)
    ]
    return omitted.wrong, *blocks


def test_what_is_missing_is_noticed_and_sequence_parallelism_moves_as_much(ranks: Any):
    for rank, (wrong, plain, sequence) in enumerate(ranks(2, _halves_body)):
        activation = command.ROWS * command.LENGTH * 64 * 4
        assert plain == sequence == 2 * 4 * command.BLOCKS * activation
        assert wrong == [
            f"rank {rank}: blocks, all_reduce over tp: counted {3 * command.BLOCKS * activation} bytes in "
            f"{3 * command.BLOCKS} calls, the closed form has {4 * command.BLOCKS * activation}"
        ]


# --------------------------------------------------------------------------------------------------------- closed forms


def _payloads(plan: Plan) -> dict[tuple[str, str], int]:
    return {(form.group, form.kind): form.payload for form in expected(plan)}


@pytest.mark.parametrize(
    ("zero", "microbatches", "one_way_psi"),
    [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 4, 2), (1, 4, 2), (2, 4, 2), (3, 4, 9)],
)
def test_zero_moves_two_psi_or_three(zero: int, microbatches: int, one_way_psi: int):
    forms = expected(Plan(dp=4, zero=zero, microbatches=microbatches, parameters=100, gradients=100))
    entries = [Entry(0, form.group, 4, form.kind, TORCH, 1, form.payload) for form in forms]
    assert one_way(entries) == one_way_psi * 100


def test_hybrid_sharding_and_pipelines():
    hybrid = Plan(dp_replicate=2, dp=4, zero=3, parameters=100, gradients=200)
    assert _payloads(hybrid) == {
        ("dp", "reduce_scatter"): 200,
        ("dp", "all_gather"): 200,
        ("dp_replicate", "all_reduce"): 50,
    }
    assert _payloads(replace(hybrid, zero=0)) == {("dp_replicate x dp", "all_reduce"): 200}
    piped = replace(hybrid, dp_replicate=1, microbatches=4, pipelined=True, activation=16, hops=3)
    assert _payloads(piped)["dp", "all_gather"] == 500
    assert _payloads(piped)["pp", "send"] == 4 * 3 * 16
    assert _payloads(replace(piped, tp=2, sequence_parallel=True))["pp", "send"] == 4 * 3 * 8
    assert expected(Plan()) == []
    with pytest.raises(ValueError, match="zero=4"):
        expected(Plan(zero=4))


def test_hops_follow_the_layout():
    assert [hops(owners(3, 3), rank) for rank in range(3)] == [1, 2, 1]
    assert [hops(owners(4, 2), rank) for rank in range(2)] == [3, 3]
    assert [hops(owners(4, 2, "v"), rank) for rank in range(2)] == [2, 2]  # the turn stays on its rank


def test_shards_are_filled_up():
    parameters = [torch.empty(5, 3), torch.empty(4), torch.empty(())]
    assert unsharded_bytes(parameters, 1) == 4 * (15 + 4 + 1)
    assert unsharded_bytes(parameters, 4) == 4 * (24 + 4 + 4)
    assert unsharded_bytes(parameters, 1, itemsize=2) == 40


def test_differences_are_told_and_small_talk_is_not():
    form = Form("gradients", "dp", "all_reduce", 1000, (TORCH,))
    lines, left = compare([form], [ENTRY, replace(ENTRY, site="torches"), replace(ENTRY, group="tp")])
    assert [line.ok for line in lines] == [True]
    assert len(left) == 2
    (line,), _ = compare([form], [replace(ENTRY, payload=999)])
    talk = replace(ENTRY, site="step.loss", calls=3, payload=12)
    outcome = Outcome(7, 0, True, [line], [talk, replace(talk, site="extra", payload=4096)], [])
    assert outcome.wrong == [
        "rank 7: gradients, all_reduce over dp: counted 999 bytes in 2 calls, the closed form has 1000",
        "rank 7: all_reduce over dp at 'extra': 4096 bytes in 3 calls that the closed form does not have",
    ]


def test_links_take_their_time():
    times = {name: links.seconds(ENTRY, wire.link) for name, wire in links.WIRES.items()}
    link = links.WIRES["pcie"].link
    assert times["pcie"] == pytest.approx(2 * (link.start_s + 6 * link.alpha_s) + 1500 / link.bytes_per_s)
    assert times["nvlink"] < times["pcie"] < times["infiniband"] < times["roce"] < times["ethernet"]
    assert links.seconds(replace(ENTRY, kind="send"), link) == pytest.approx(
        2 * (link.start_s + link.alpha_s) + 1000 / link.bytes_per_s
    )
    assert all(wire.source for wire in links.WIRES.values())


# ---------------------------------------------------------------------------------------------------------- the command


def _run_body(rank: int, world: int, options: Options) -> Outcome:
    return _step_body(rank, world, options)[0]


def test_the_command_prints_counts_and_projections(ranks: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "launch", lambda _, options, processes: ranks(processes, _run_body, options))
    result = CliRunner().invoke(app, ["audit", "--dp", "2", "--zero", "3", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ok"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    (gradients, parameters) = report["ranks"][0]["lines"]
    assert 2 * gradients["counted"] == parameters["counted"] == parameters["payload"] > 0
    assert "projected from published rates" in result.output
    assert "one step, dp=2, zero=3, 1 micro-batch" in result.output


def test_the_command_fails_where_counts_differ(monkeypatch: pytest.MonkeyPatch):
    lines, _ = compare([Form("gradients", "dp", "all_reduce", 1000, (TORCH,))], [])
    monkeypatch.setattr(command, "launch", lambda *args, **options: [Outcome(0, 0, True, lines, [], [])])
    result = CliRunner().invoke(app, ["audit", "--dp", "2"])
    assert result.exit_code == 1
    assert "differs" in result.output
    assert "counted 0 bytes in 0 calls, the closed form has 1000" in result.output


@pytest.mark.parametrize(("arguments", "dp", "tp"), [((), 2, 1), (("--tp", "2"), 1, 2), (("--dp", "3"), 3, 1)])
def test_the_command_works_without_degrees(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], dp: int, tp: int
):
    asked = []
    monkeypatch.setattr(command, "launch", lambda _, options, processes: asked.append(options) or [])
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert result.exit_code == 0, result.output
    assert [(options.dp, options.tp) for options in asked] == [(dp, tp)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--dp", "1"), "one process sends nothing"), (("--pp", "2", "--schedule", "zbx"), "schedule='zbx'")],
)
def test_the_command_refuses_what_makes_no_sense(arguments: tuple[str, ...], says: str):
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
