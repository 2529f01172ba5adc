"""The sides of ``parallel_step``: a transformer spread by ``parallelize``, and the same one spread by hand.

Both sides hold the same layers with the same weights, so that they differ in the engine's use alone: which modules are
wrapped, what is agreed on in a step, which control data travel. The hand-written sides follow the documentation of
torch's FSDP2, DistributedDataParallel and torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...layers.transformer import ParallelTransformer
from ...parallel.core.mesh import data_coordinate, degree
from ...parallel.parallelize import parallelize

LEARNING_RATE = 1e-4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """The whole step's tokens and targets, [B, S] each; every target counts."""

    tokens: torch.Tensor
    targets: torch.Tensor

    def share(self, mesh: DeviceMesh) -> Batch:
        """The part of this rank's data-parallel coordinate."""
        index, count = data_coordinate(mesh)
        return Batch(self.tokens.tensor_split(count)[index], self.targets.tensor_split(count)[index])


@dataclass
class Engine:
    """A model on this rank, spread by one of the functions below.

    ``backward`` runs forward and backward and returns this rank's loss, of which ``loss`` makes the mean over the
    step's targets: an engine by hand leaves it on the ranks that form it. ``loss`` is a collective, and no part of a
    step.
    """

    modules: Sequence[nn.Module]
    backward: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW([param for _, param in self.parameters()], lr=LEARNING_RATE)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their names in the whole model."""
        for module in self.modules:
            for name, param in module.named_parameters():
                yield name.removeprefix("module."), param

    def step(self) -> None:
        """A whole training step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The mean loss of the step, and the whole gradients of this rank's parameters. Collective."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.backward().detach().clone())
        found = {"loss": loss}
        for name, param in self.parameters():
            assert param.grad is not None, name
            found[f"d_{name}"] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()
        self.optimizer.zero_grad(set_to_none=True)
        return found


def whole(model: ParallelTransformer, batch: Batch) -> Engine:
    """One process's step over the whole batch."""
    mine = copy.deepcopy(model)
    return Engine([mine], lambda: _backward(mine, batch))


def ours(model: ParallelTransformer, batch: Batch, mesh: DeviceMesh, zero: int, schedule: str | None) -> Engine:
    """``parallelize``."""
    spread = parallelize(copy.deepcopy(model), mesh, zero=zero, schedule=schedule)
    share = batch.share(mesh)
    return Engine([spread.module], lambda: spread.step(share.tokens, share.targets))


def by_fully_shard(model: ParallelTransformer, batch: Batch, mesh: DeviceMesh, zero: int) -> Engine:
    """FSDP2: every block by itself, then the rest. ``zero`` 2 keeps parameters whole until backward, 3 does not."""
    mine, share = copy.deepcopy(model), batch.share(mesh)
    for module in (*mine.model.layers, mine):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=zero == 3)
    return Engine([mine], lambda: _backward(mine, share), _mean)


def by_ddp(model: ParallelTransformer, batch: Batch, mesh: DeviceMesh) -> Engine:
    """DistributedDataParallel."""
    mine, share = DistributedDataParallel(copy.deepcopy(model), process_group=mesh.get_group("dp")), batch.share(mesh)
    return Engine([mine], lambda: _backward(mine, share), _mean)


def by_pipelining(model: ParallelTransformer, batch: Batch, mesh: DeviceMesh, schedule: str) -> Engine:
    """torch.distributed.pipelining: the same cut into stages, and the same schedule."""
    from torch.distributed.pipelining import PipelineStage

    from ...parallel.pipeline.pipeline import split
    from ...parallel.pipeline.schedules import default_microbatches, find

    mine, kind, ranks = copy.deepcopy(model), find(schedule), degree(mesh, "pp")
    microbatches, count = default_microbatches(schedule, ranks), ranks * kind.stages_per_rank
    rows = len(batch.tokens) // microbatches
    stages = []
    for index, parts in split(mine, mesh, schedule):
        tokens, between = batch.tokens[:rows].to("meta"), mine.boundary(rows, batch.tokens.shape[1])
        last = torch.empty(1, device="meta")
        given = tokens if index == 0 else between.clone().requires_grad_()
        returned = (last if index == count - 1 else between.clone()).requires_grad_()
        group = mesh.get_group("pp")
        stages.append(
            PipelineStage(
                mine.stage(parts), index, count, CPU, input_args=given, output_args=returned, group=group
            )
        )  # fmt: skip
    run = kind.kind(
        stages if kind.stages_per_rank > 1 else stages[0],
        microbatches,
        loss_fn=lambda out, target: out.sum(),  # the last stage forms the loss
        scale_grads=False,
    )
    options = {"batch_size": rows, "scale": 1 / batch.targets.numel()}

    def backward() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        read = [batch.tokens] if any(stage.is_first for stage in stages) else []
        run.step(
            *read, target=batch.targets, targets=batch.targets, losses=losses, return_outputs=False, **options
        )  # fmt: skip
        return torch.stack(losses).sum() if losses else torch.zeros(())

    return Engine([mine], backward, _sum)


def _backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch.tokens, batch.targets)
    loss.backward()
    return loss


def _mean(loss: torch.Tensor) -> torch.Tensor:
    return _sum(loss) / dist.get_world_size()


def _sum(loss: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(loss)
    return loss
