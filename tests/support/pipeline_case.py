"""A small model trained by one process and by a pipeline: losses, gradients, and counts of products.

One process takes the whole batch at once, in fp64 and in fp32; the pipeline runs in fp32 and may make twice the error
of the one process in fp32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.layers import transformer
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.random import manual_seed
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import gather
from shardfuse.parallel.pipeline.pipeline import SCHEDULES, Pipeline, split
from shardfuse.parallel.zero import zero

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, max_positions=64
)
TERMS = 1024  # the chained sums of four layers, forward and backward
ROWS, LENGTH, MICROBATCHES, SEED = 7, 8, 4, 3  # one row short of four micro-batches of two


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline's run: model, schedule and mesh."""

    schedule: str
    dp: int = 1
    tp: int = 1
    zero: int | None = None
    microbatches: int = MICROBATCHES
    steps: int = 1
    fused_loss: bool = False  # never stores logits
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        sizes = [f"{name}{value}" for name, value in (("dp", self.dp), ("tp", self.tp)) if value > 1]
        stage = [] if self.zero is None else [f"zero{self.zero}"]
        options = [name if value is True else f"{name}={value}" for name, value in (self.config | self.model).items()]
        return "-".join([self.schedule, *sizes, *stage, *options, *(["fused_loss"] if self.fused_loss else [])])

    @property
    def splits_backward(self) -> bool:
        return SCHEDULES[self.schedule].splits_backward

    def build(self, mesh: Any, dtype: torch.dtype, device: str | None = None, **options: Any) -> ParallelTransformer:
        config = dataclasses.replace(CONFIG, **{"bias": None, **self.config})
        return ParallelTransformer(config, mesh=mesh, dtype=dtype, device=device, **options)


class Products(TorchDispatchMode):
    """Counts matrix products, except attention's, by shape, which distinguishes forward, dx and dW."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen[tuple(tuple(each.shape) for each in args[-2:])] += 1
        return func(*args, **(kwargs or {}))


Counts = dict[str, Counter[Any]]


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count the block's products and the layers' collectives."""
    collectives.reset_counts()
    found: Counts = {}
    with Products() as products:
        yield found
    found["products"] = products.seen
    others = ("pipeline.", "random.")  # the pipeline's own, and one-time agreements of the ranks
    found["collectives"] = Counter({key: n for key, n in collectives.calls.items() if not key[1].startswith(others)})


def batch(dp: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [dp * ROWS, LENGTH], some of which do not count."""
    rows = dp * ROWS
    tokens = torch.arange(rows * LENGTH).view(rows, LENGTH) * 7 % CONFIG.vocab_size
    targets = tokens.roll(-1, 1).clone()
    targets[2, 3:] = -100
    return tokens, targets


def build(case: Case, mesh: Any) -> tuple[ParallelTransformer, Pipeline]:
    """This rank's part of the model, made on meta, and the pipeline over it."""
    model = case.build(mesh, torch.float32, "meta", **case.model)
    mine = split(model, mesh, case.schedule)
    model.to_empty(device="cpu")
    model.init_weights(SEED)
    stages = [(index, model.stage(parts)) for index, parts in mine]
    if case.zero is not None:
        for _, stage in stages:
            zero.shard(stage, mesh, zero=case.zero, splits_backward=case.splits_backward, schedule=case.schedule)
    return model, Pipeline(model, stages, mesh, case.schedule, case.microbatches)


def one_process(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The training loss, the evaluation loss, and gradients of the mean over all targets, times the steps."""
    model = case.build(None, dtype)
    model.init_weights(SEED)
    found = {}
    for step in range(case.steps):
        manual_seed(5, step=step)
        found["loss"] = model(*batch(case.dp))
        found["loss"].backward()
    model.eval()
    found["evaluation"] = model(*batch(case.dp))
    return {name: value.detach() for name, value in found.items()} | {
        name: param.grad for name, param in model.named_parameters()
    }


def run_pipeline(rank: int, world: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The body of a test: failed comparisons, this rank's parameters, and the counts of the last step.

    ``fields`` are a Case's: workers load this file under another name, so they cannot unpickle a Case.
    """
    case = Case(**fields)
    mesh = init_mesh(dp=case.dp, pp=world // case.dp // case.tp, tp=case.tp)
    oracle, low = one_process(case, torch.float64), one_process(case, torch.float32)
    limit, transformer.FUSED_LOSS_BYTES = transformer.FUSED_LOSS_BYTES, 0 if case.fused_loss else 1 << 30
    try:
        model, pipeline = build(case, mesh)
        share, _ = data_coordinate(mesh)
        whole = batch(case.dp)
        tokens, targets = (x[share * ROWS : (share + 1) * ROWS] for x in whole)
        scale = 1.0 / int((whole[1] != -100).sum())
        for step in range(case.steps):
            manual_seed(5, mesh if case.dp > 1 else None, step=step)
            with counted() as counts:
                loss = pipeline.step(tokens, targets, scale=case.dp * scale)
        evaluation = pipeline.evaluate(tokens, targets, scale=case.dp * scale)
    finally:
        transformer.FUSED_LOSS_BYTES = limit
    if case.dp > 1:  # gradients are means over dp; a loss covers only its own share
        for value in (loss, evaluation):
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
    ours = {"loss": loss, "evaluation": evaluation}
    ours |= {name: gather(param.grad) for name, param in model.named_parameters()}
    verdicts = [accuracy.judge(name, value, low[name], oracle[name], terms=TERMS) for name, value in ours.items()]
    return {
        "wrong": [str(verdict) for verdict in verdicts if not verdict.ok],
        "names": sorted(ours),
        "expected": sorted(oracle),
        "borrowed": sorted(pipeline.borrowed),
        "counts": counts,
    }


def run_micro_batches(rank: int, world: int, fields: dict[str, Any]) -> Counts:
    """The counts when tensor-parallel ranks take the same micro-batches one after another, without a pipeline."""
    case = Case(**fields)
    model = case.build(init_mesh(tp=world), torch.float32, **case.model)
    tokens, targets = (torch.cat((x, x[:1])) for x in batch())
    limit, transformer.FUSED_LOSS_BYTES = transformer.FUSED_LOSS_BYTES, 0 if case.fused_loss else 1 << 30
    try:
        manual_seed(5)
        with counted() as counts:
            for part in zip(tokens.chunk(case.microbatches), targets.chunk(case.microbatches)):
                model(*part).backward()
    finally:
        transformer.FUSED_LOSS_BYTES = limit
    return counts
