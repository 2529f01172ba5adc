"""A training step over several processes: ``parallelize`` against the same engines of torch used by hand.

Gloo over the loopback interface, a small decoder in fp32, forward, backward and AdamW. ZeRO against FSDP2's
``fully_shard`` and against DistributedDataParallel; pipelines against torch.distributed.pipelining with the same cut
and schedule (``parallel_engines.py``). ``parallelize`` wraps the engine that it is compared with, so the target is what
this may cost; DistributedDataParallel is another engine, and a row against it has no target. Each layout also has rows
of the bytes that all ranks send in a step, counted by the ``Audit`` of both sides, and tensor parallelism has them
against DTensor, whose times are in ``tp_dtensor``.

Loss and gradients of both sides agree with one process in fp64 before anything is timed or counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...kernels.dev.accuracy import Verdict
from ...layers.config import TransformerConfig
from ...layers.transformer import ParallelTransformer
from ...parallel.audit.audit import Audit
from ...parallel.core.rendezvous import init_mesh, shutdown
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.gate import Outputs, check_outputs
from ..harness.ranks import compare_on_ranks, on_ranks
from ..harness.timing import Timing, compare_rounds, keep_freed_memory
from . import parallel_engines as engines
from . import tp_dtensor
from .parallel_engines import Batch, Engine

SHARDED, DDP = "torch fully_shard, by hand", "torch DistributedDataParallel"
PIPELINING, DTENSOR = "torch pipelining, by hand", "torch parallelize_module (DTensor)"
TIME, SENT = "forward + backward + AdamW, us", "bytes that all ranks send in a step"
TARGETS = {"time and bytes, against the same engine by hand": 1 / 1.05}
(BY_HAND,) = TARGETS.values()
SECONDS_PER_PEER = 10.0
WARM = 2  # steps behind the check, before the counted one: in the first, engines agree on what they need


@dataclass(frozen=True)
class Layout:
    """What is spread, over how many processes, and with what."""

    what: str  # "zero", "pipeline" or "tensor"
    how: str  # the stage of ZeRO, the schedule or the layer
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.what}-{self.how}-{self.ranks}-ranks"

    @property
    def peers(self) -> tuple[str, ...]:
        return {"zero": (SHARDED, DDP), "pipeline": (PIPELINING,), "tensor": (DTENSOR,)}[self.what]

    def mesh(self) -> DeviceMesh:
        """The mesh of ZeRO's data-parallel ranks or of the pipeline's. Collective."""
        dp, pp = (self.ranks, 1) if self.what == "zero" else (1, self.ranks)
        mesh = init_mesh(dp=dp, pp=pp, device_type="cpu")
        assert mesh is not None
        return mesh

    @property
    def skip(self) -> str:
        """Why this machine cannot measure it, or empty."""
        cores = os.cpu_count() or 1
        if self.ranks > max(2, cores):
            return f"{self.ranks} processes would share {cores} cores: measure it on a machine that has a core for each"
        if self.how == "zbv" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
            return f"torch {torch.__version__} cannot split backward of these layers by hand: install torch 2.13"
        return ""


LAYOUTS = tuple(
    Layout(what, how, ranks)
    for ranks in (2, 4)
    for what, how in (("zero", "2"), ("zero", "3"), ("pipeline", "1f1b"), ("pipeline", "zbv"))
)
TENSOR = tuple(Layout("tensor", layer, tp_dtensor.RANKS) for layer in ("mlp", "block"))
SIZES: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4}
DRY_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
# Sequences of a step, and their tokens; the zbv schedule of four ranks has 16 micro-batches.
SHAPE, DRY_SHAPE = (16, 64), (16, 2)


def layouts(settings: Settings) -> tuple[Layout, ...]:
    """A dry run and a short one leave four processes out."""
    few = settings.dry or settings.short
    return (*(each for each in LAYOUTS if not few or each.ranks == 2), *TENSOR)


def plan(settings: Settings) -> list[Measurement]:
    return [
        _row(layout, peer, metric, settings)
        for layout in layouts(settings)
        for peer in layout.peers
        for metric in ((SENT,) if layout.what == "tensor" else (TIME, SENT))
    ]


def _row(layout: Layout, peer: str, metric: str, settings: Settings) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        return _results(settings, layout.ranks)[layout.name].figures[peer, metric]

    target = BY_HAND if peer in (SHARDED, PIPELINING) and not settings.dry else None
    return Measurement(layout.name, metric, peer, target, run, bf16=False, skip=layout.skip)


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for layout in layouts(settings):
        if layout.name in names:
            found = _results(settings, layout.ranks)[layout.name].verdicts
            yield from ((layout.name, verdict) for verdict in found)


# --- in the processes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Of one layout: what its check found, and by peer and metric both sides' figures, none if it was red."""

    verdicts: list[Verdict]
    figures: dict[tuple[str, str], tuple[Timing, Timing]] = field(default_factory=dict)


@cache
def _results(settings: Settings, ranks: int) -> dict[str, Result]:
    """Check and measure every layout of that many ranks in one start of the processes."""
    chosen = [layout for layout in layouts(settings) if layout.ranks == ranks and not layout.skip]
    found: dict[str, Result] = on_ranks(worker, chosen, settings.dry, processes=ranks)
    return found


def worker(chosen: Sequence[Layout], dry: bool) -> dict[str, Result]:
    """What each rank runs: every layout of ``chosen``."""
    keep_freed_memory()
    try:
        return {layout.name: measure(layout, dry) for layout in chosen}
    finally:
        shutdown()


def measure(layout: Layout, dry: bool) -> Result:
    """Check one layout, count its bytes and time it. Collective."""
    if layout.what == "tensor":
        return _tensor(layout, dry)
    mesh = layout.mesh()
    model, batch = workload(layout, dry)
    sides = spread(layout, model, batch, mesh)
    verdicts = judge(sides, model, batch)
    result = Result(verdicts)
    if not all(verdict.ok for verdict in verdicts):
        return result
    mine = sides.pop("ours")
    sent = _sent(mine.step, mesh)
    for peer, engine in sides.items():
        result.figures[peer, SENT] = sent, _sent(engine.step, mesh)
        if dry:
            result.figures[peer, TIME] = compare_rounds(mine.step, engine.step, rounds=1)
        else:
            result.figures[peer, TIME] = compare_on_ranks(mine.step, engine.step, seconds=SECONDS_PER_PEER)
    return result


def workload(layout: Layout, dry: bool) -> tuple[ParallelTransformer, Batch]:
    """The model, the same on every rank, and the step's batch; as many blocks as give each stage one."""
    config = TransformerConfig(style="gated", num_layers=2 * layout.ranks, **(DRY_SIZES if dry else SIZES))
    model = ParallelTransformer(config)
    model.init_weights(0)
    drawn = torch.Generator().manual_seed(0)
    shape = DRY_SHAPE if dry else SHAPE
    tokens, targets = (torch.randint(config.vocab_size, shape, generator=drawn) for _ in range(2))
    return model, Batch(tokens, targets)


def spread(layout: Layout, model: ParallelTransformer, batch: Batch, mesh: DeviceMesh) -> dict[str, Engine]:
    """ "ours" and every peer, by name. Collective."""
    if layout.what == "zero":
        stage = int(layout.how)
        return {
            "ours": engines.ours(model, batch, mesh, stage, None),
            SHARDED: engines.by_fully_shard(model, batch, mesh, stage),
            DDP: engines.by_ddp(model, batch, mesh),
        }
    return {
        "ours": engines.ours(model, batch, mesh, 0, layout.how),
        PIPELINING: engines.by_pipelining(model, batch, mesh, layout.how),
    }


def judge(sides: dict[str, Engine], model: ParallelTransformer, batch: Batch) -> list[Verdict]:
    """Loss and gradients of each side against one process in fp64, the worst over all ranks. Collective."""
    low, exact = engines.whole(model, batch).outputs(), engines.whole(model.double(), batch).outputs()
    model.float()
    terms = batch.tokens.numel() + sum(sum(param.shape) for param in model.parameters())
    found: dict[str, Verdict] = {}
    for side, engine in sides.items():
        outputs = engine.outputs()  # on a stage, its own parameters' gradients
        expected = (partial(_pick, each, outputs) for each in (low, exact))
        for verdict in check_outputs(outputs, low=next(expected), oracle=next(expected), terms=terms):
            name = f"{side}.{verdict.name}"
            found[name] = Verdict(name, verdict.error, verdict.budget)
    return _everywhere(found, [f"{side}.{name}" for side in sides for name in exact])


def _pick(outputs: Outputs, names: Iterable[str]) -> Outputs:
    return {name: outputs[name] for name in names}


def _everywhere(found: dict[str, Verdict], names: Sequence[str]) -> list[Verdict]:
    """The verdicts by ``names``, each of the ranks that have it; red where no rank has it. Collective."""
    everyone: list[dict[str, Verdict]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    result = []
    for name in names:
        seen = [each[name] for each in everyone if name in each] or [Verdict(name, float("inf"), 0.0)]
        result.append(max(seen, key=lambda verdict: (not verdict.ok, verdict.error)))
    return result


def _sent(step: Callable[[], object], mesh: DeviceMesh | None) -> Timing:
    """The bytes that all ranks together send in one step. Collective."""
    for _ in range(WARM):
        step()
    with Audit(mesh) as audit:
        step()
    total = torch.tensor(sum(entry.sent for entry in audit.entries), dtype=torch.float64)
    dist.all_reduce(total)
    return Timing(float(total))


def _tensor(layout: Layout, dry: bool) -> Result:
    """The bytes of a layer's forward and backward, in the size that ``tp_dtensor`` times first."""
    mesh = init_device_mesh("cpu", (layout.ranks,), mesh_dim_names=("tp",))
    size = next(each for each in (tp_dtensor.DRY_SIZES if dry else tp_dtensor.SIZES) if each.layer == layout.how)
    rig = tp_dtensor.Rig.of(size, mesh)
    result = Result(rig.check())
    if all(verdict.ok for verdict in result.verdicts):
        ours, peer = (_sent(partial(rig.step, module), mesh) for module in (rig.ours, rig.peer))
        result.figures[DTENSOR, SENT] = ours, peer
    return result


BENCHMARK = Benchmark(
    name="parallel_step",
    summary="ZeRO and pipelines of parallelize over gloo against torch's engines by hand: time and bytes of a step",
    targets=TARGETS,
    plan=plan,
    check=check,
    sources=(
        *("bench/harness/ranks.py", "bench/suites/parallel_engines.py", "bench/suites/tp_dtensor.py"),
        *("layers/transformer.py", "layers/block.py", "parallel/parallelize.py", "parallel/parallel_model.py"),
        *("parallel/zero", "parallel/pipeline", "parallel/core", "parallel/audit"),
    ),
    devices=("cpu",),
)
