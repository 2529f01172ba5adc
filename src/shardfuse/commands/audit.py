"""``shardfuse audit``: compares what a training step sends with what it should send, on a small model.

Every rank of a few processes on this machine counts one step (``parallel/audit/audit.py``) and compares it with the
closed form (``parallel/audit/forms.py``). The tables show one rank of each pipeline stage; the verdict covers all
ranks. The time on other machines' links is projected from published figures (``parallel/audit/links.py``).
"""

from __future__ import annotations

import dataclasses
import json as jsonlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.text import Text
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.printing import Sheet, console, figure, prose, unbroken
from ..layers.config import TransformerConfig
from ..layers.transformer import ParallelTransformer
from ..parallel.audit import forms, links
from ..parallel.audit.audit import Audit
from ..parallel.audit.entries import Entry, one_way
from ..parallel.audit.forms import Line, Plan
from ..parallel.audit.unsharded import unsharded_bytes
from ..parallel.core import mesh as meshes
from ..parallel.core.rendezvous import init_mesh, shutdown
from ..parallel.core.sharding import local_tensor
from ..parallel.overlap.policy import check_overlap
from ..parallel.parallel_model import ParallelModel
from ..parallel.parallelize import parallelize
from ..parallel.pipeline.partition import owners
from ..parallel.pipeline.schedules import default_microbatches, find
from ..training.launch import Stopped, launch, stop_signals

ROWS, LENGTH = 2, 8  # sequences of a micro-batch, and their tokens
BLOCKS = 4  # or one for each stage
WARM = 2  # steps before the counted one: in the first, engines agree on what they need
# Ranks also send control data of a few bytes: sums of losses and of targets, norms, clocks.
CONTROL_BYTES = 64


@dataclass(frozen=True)
class Options:
    """The options of one call: degrees, and the arguments of ``parallelize``."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    dp_replicate: int = 1
    zero: int = 0
    schedule: str | None = None
    microbatches: int | None = None
    style: str = "gated"
    sequence_parallel: bool = False
    recompute: bool = False
    mlp_recompute: int = 0
    precision: str | None = None
    overlap: str | None = None
    offload: bool = False
    tie_embeddings: bool = False

    @property
    def processes(self) -> int:
        return self.dp_replicate * self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        """The pipeline stages of all ranks."""
        return self.pp * find(self.schedule).stages_per_rank if self.schedule else 1

    @property
    def passes(self) -> int:
        """M: the micro-batches, by default those of ``parallelize``."""
        if self.schedule is None or self.pp == 1:
            return self.microbatches or 1
        return self.microbatches or default_microbatches(self.schedule, self.pp)

    def config(self) -> TransformerConfig:
        """The model: small, and divisible by all degrees."""
        return TransformerConfig(
            style=self.style,
            vocab_size=64 * self.tp,
            hidden_size=32 * self.tp,
            intermediate_size=64 * self.tp,
            num_layers=max(BLOCKS, self.stages),
            num_heads=4 * self.tp,
            num_kv_heads=2 * self.tp,
            tie_embeddings=self.tie_embeddings,
        )

    def said(self) -> str:
        """The options as text for a heading."""
        degrees = [
            f"{name}={getattr(self, name)}" for name in ("dp_replicate", "dp", "pp", "tp") if getattr(self, name) > 1
        ]
        how = [f"zero={self.zero}", f"{self.passes} micro-batch{'es' * (self.passes > 1)}"]
        how += [self.schedule] if self.schedule else []
        how += ["sequence parallelism"] * self.sequence_parallel + ["recompute"] * self.recompute
        how += [f"MLP recompute {self.mlp_recompute}"] if self.mlp_recompute else []
        how += ["tied embeddings"] * self.tie_embeddings + ["offload"] * self.offload
        how += [f"overlap {self.overlap}"] if self.overlap else []
        return ", ".join([*degrees, *how, *([self.precision] if self.precision else [])])


@dataclass(frozen=True)
class Outcome:
    """The result of one rank's step."""

    rank: int
    stage: int  # the pipeline rank
    shown: bool  # whether the tables show this rank for its pipeline rank
    lines: list[Line]
    other: list[Entry]  # entries that belong to no line
    entries: list[Entry]

    @property
    def wrong(self) -> list[str]:
        """Descriptions of all differences from the closed form."""
        wrong = [
            f"rank {self.rank}: {line.form.what}, {line.form.kind} over {line.form.group}: counted {line.counted} "
            f"bytes in {line.calls} calls, the closed form has {line.form.payload}"
            for line in self.lines
            if not line.ok
        ]
        return wrong + [
            f"rank {self.rank}: {entry.kind} over {entry.group} at {entry.site!r}: {entry.payload} bytes in "
            f"{entry.calls} calls that the closed form does not have"
            for entry in self.other
            if entry.payload > CONTROL_BYTES * entry.calls
        ]


def audit(options: Options, *, json: bool = False) -> int:
    """Run, compare and print; return the exit code, 1 if a count differs from the closed form.

    Raises ValueError for options that do not fit together.
    """
    if options.processes < 2:
        raise ValueError(
            "one process sends nothing: give at least one of --dp, --pp, --tp, --dp-replicate as 2 or more"
        )
    if options.schedule is not None:
        find(options.schedule)
    if options.overlap is not None:
        check_overlap(options.overlap)
    try:
        with stop_signals():
            outcomes: list[Outcome] = launch(run, options, processes=options.processes)
    except Stopped as stop:
        sys.exit(128 + stop.signum)
    wrong = [line for outcome in outcomes for line in outcome.wrong]
    people = console(stderr=json)
    show(people, options, outcomes, wrong)
    if json:
        print(jsonlib.dumps(record(options, outcomes, wrong)))
    return 1 if wrong else 0


def run(options: Options) -> Outcome:
    """Run one rank's part: steps to warm up, then the counted one."""
    mesh = init_mesh(dp_replicate=options.dp_replicate, dp=options.dp, pp=options.pp, tp=options.tp, device_type="cpu")
    assert mesh is not None
    try:
        return count_step(options, mesh)
    finally:
        shutdown()


def count_step(options: Options, mesh: DeviceMesh) -> Outcome:
    """Build the model over ``mesh``, run its steps, and compare what the last one sent with the closed form."""
    config = options.config()
    whole = ParallelTransformer(
        config,
        mesh=mesh,
        sequence_parallel=options.sequence_parallel,
        mlp_recompute=options.mlp_recompute,
        device="meta",
    )
    model = parallelize(
        whole,
        mesh,
        zero=options.zero,
        schedule=options.schedule,
        microbatches=options.microbatches,
        precision=options.precision,
        offload=options.offload,
        recompute=options.recompute,
        overlap=options.overlap,
        seed=0,
    )
    share, _ = meshes.data_coordinate(mesh)
    draws = torch.Generator().manual_seed(share)
    tokens = torch.randint(config.vocab_size, (options.passes * ROWS, LENGTH + 1), generator=draws)
    for _ in range(WARM):
        model.step(tokens[:, :-1], tokens[:, 1:])
    with Audit(mesh) as counted:
        model.step(tokens[:, :-1], tokens[:, 1:])
    lines, other = forms.compare(forms.expected(plan(options, mesh, model)), counted.entries)
    places = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or ()))
    stage = places.pop("pp", 0)
    return Outcome(torch.distributed.get_rank(), stage, not any(places.values()), lines, other, counted.entries)


def plan(options: Options, mesh: DeviceMesh, model: ParallelModel) -> Plan:
    """The input of the closed form: this rank's degrees and its part of the model."""
    parameters = {(index, name): p for index, stage in enumerate(model.stages) for name, p in stage.named_parameters()}
    shards = options.dp if options.zero else 1
    travels = 2 if options.precision else None
    tokens = ROWS * LENGTH
    pipelined = options.schedule is not None and options.pp > 1
    norms = [param for (_, name), param in parameters.items() if "norm" in name]
    kept, blocks = cast(ParallelTransformer, model.module).kept, options.config().num_layers
    ends = model.pipeline.copies() if model.pipeline is not None else ()
    return Plan(
        dp=options.dp,
        dp_replicate=options.dp_replicate,
        tp=options.tp,
        zero=options.zero,
        microbatches=options.passes,
        pipelined=pipelined,
        parameters=unsharded_bytes(parameters.values(), shards, travels),
        gradients=unsharded_bytes(parameters.values(), shards),
        activation=tokens * options.config().hidden_size * (travels or 4),
        tokens=tokens,
        blocks=len(kept - {0, blocks + 1}),
        first=0 in kept,
        last=blocks + 1 in kept,
        norms=unsharded_bytes(norms, 1, travels),
        tied=sum(local_tensor(param).nbytes for param in ends),
        hops=_hops(options, mesh.get_local_rank("pp")) if pipelined else 0,
        sequence_parallel=options.sequence_parallel,
        recompute=options.recompute,
        mlp_recompute=options.mlp_recompute,
    )


def _hops(options: Options, rank: int) -> int:
    assert options.schedule is not None
    return forms.hops(owners(options.stages, options.pp, find(options.schedule).layout), rank)


def show(people: Console, options: Options, outcomes: Sequence[Outcome], wrong: Sequence[str]) -> None:
    """Print the tables and the differences."""
    people.print(f"one step, {options.said()}; bytes of one rank")
    for outcome in outcomes:
        if outcome.shown:
            if options.pp > 1:
                people.print(f"pipeline rank {outcome.stage}")
            people.print(_counts(outcome))
            people.print(_links(outcome))
    for line in wrong:
        people.print(line, style="red", markup=False, soft_wrap=True)


def _counts(outcome: Outcome) -> Sheet:
    table = Sheet(
        *(prose("what"), unbroken("over"), unbroken("collective")),
        *(figure("calls"), figure("payload"), figure("closed form"), unbroken("verdict")),
    )
    for line in outcome.lines:
        form, verdict = line.form, Text("ok") if line.ok else Text("differs", "red")
        counts = f"{line.calls:,}", f"{line.counted:,}", f"{form.payload:,}"
        table.add(form.what, form.group, form.kind, *counts, verdict)
    for entry in outcome.other:
        table.add(entry.site, entry.group, entry.kind, f"{entry.calls:,}", f"{entry.payload:,}", "-", "")
    return table


def _links(outcome: Outcome) -> Sheet:
    """The time of each group's traffic over each kind of link."""
    wires = links.WIRES.values()
    headings = ("bytes one way", *(wire.name for wire in wires))
    table = Sheet(unbroken("over"), *map(figure, headings), title="projected from published rates, us")
    for group in dict.fromkeys(entry.group for entry in outcome.entries):
        mine = [entry for entry in outcome.entries if entry.group == group]
        times = [sum(links.seconds(entry, wire.link) for entry in mine) for wire in wires]
        table.add(group, f"{one_way(mine):,}", *(f"{time * 1e6:,.0f}" for time in times))
    return table


def record(options: Options, outcomes: Iterable[Outcome], wrong: Sequence[str]) -> dict[str, Any]:
    """The outcomes as values that JSON can hold: the bytes and seconds of every rank."""
    ranks = [
        {
            "rank": outcome.rank,
            "stage": outcome.stage,
            "lines": [line.form._asdict() | {"calls": line.calls, "counted": line.counted} for line in outcome.lines],
            "other": [dataclasses.asdict(entry) for entry in outcome.other],
            "projected_s": {
                name: sum(links.seconds(entry, wire.link) for entry in outcome.entries)
                for name, wire in links.WIRES.items()
            },
        }
        for outcome in outcomes
    ]
    sources = {name: wire.source for name, wire in links.WIRES.items()}
    return {"options": dataclasses.asdict(options), "ok": not wrong, "wrong": wrong, "ranks": ranks, "links": sources}
