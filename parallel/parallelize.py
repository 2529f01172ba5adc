"""One call that spreads a model over a mesh: pipeline stages first, then ZeRO inside each stage.

ZeRO comes second because it must know the schedule. Each part also works alone: ``pipeline.split`` and
``pipeline.Pipeline``, ``zero.shard``, ``clip``. Tensor parallelism belongs to the layers: build the model with the same
mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import compatibility
from .core import collectives
from .core.mesh import SINGLE, Group, check_dims, data_coordinate, data_group, degree, everyone, whole_group
from .core.rendezvous import init_mesh
from .cross_entropy import IGNORE_INDEX
from .materialize import device_of, place
from .zero import zero as zeros
from .zero.clip import GradientClipper
from .zero.loss_scale import LossScale
from .zero.zero import PRECISIONS

if TYPE_CHECKING:
    from .pipeline.pipeline import Pipeline
    from .pipeline.timeline import Costs

__all__ = ["ParallelModel", "parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    zero: int = 0,
    schedule: str | None = None,
    microbatches: int | None = None,
    costs: Sequence[float | Costs] | None = None,
    offload: bool = False,
    precision: str | None = None,
    recompute: bool | None = None,
    overlap: str | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> ParallelModel:
    """Spread ``model`` over ``mesh`` (``init_mesh``; None: one process, or the model's tensor-parallel group alone).

    The result trains by ``step(tokens, targets)``; make the optimizer from its ``parameters()``.

    Args:
        model: a ParallelTransformer built with the same mesh, best with ``device="meta"``, so that a rank allocates
            memory for its own part only. Or any module that returns the mean loss of its valid targets (all but -100)
            when called as ``model(*inputs, targets)``; a pipeline requires the methods that
            :class:`pipeline.Divisible` lists. Parameters on meta are materialised, and ``model.init_weights(seed)``
            draws them.
        zero: 0 replicas, 1 and 2 shards of optimizer state and gradients, 3 of parameters as well (``zero.py``).
        schedule: of the pipeline, where the mesh has ``pp`` > 1: one of ``pipeline.SCHEDULES``.
        microbatches: the number of parts in which a rank's batch is processed; gradients travel once. None: 1, with a
            pipeline twice its stages.
        costs: of the model's parts, in any unit, for an even cut of the pipeline; the same on all ranks, for example
            from ``layers.stage_costs.measured_costs(..., mesh=mesh)``. None: the model's own estimate.
        offload: parameters, gradients and optimizer state stay in the host's memory. For a single process this makes a
            mesh of one, for which it initialises torch.distributed.
        precision: "bf16" or "fp16" for forward and backward; the optimizer's tensors stay fp32. With fp16 the loss is
            scaled, and a step whose gradients overflow leaves none.
        recompute: keep only each block's input for backward; None leaves the model's setting.
        overlap: "auto", "kernel", "chunked" or "none" (``ParallelTransformer``); None leaves the model's setting.
        seed: of the initial weights of a model on meta; None: rank 0 draws one from torch's global generator. A model
            that already has weights takes those of the first data-parallel rank on all ranks.
        device: where parameters on meta are materialised; None: the mesh's device, without a mesh the GPU if there is
            one.

    Raises ValueError for combinations that train incorrectly (``compatibility.py`` lists them with alternatives) and
    for arguments that do not fit the mesh or the model. Every rank reaches the same answer by itself.
    """
    check_dims(mesh)
    stages = degree(mesh, "pp")
    if stages > 1 and schedule is None:
        raise ValueError(
            f"the mesh has pp={stages} pipeline stages and schedule=None: pass one, such as schedule='1f1b'"
        )
    splits_backward = False
    if schedule is not None:
        from .pipeline.pipeline import Pipeline, split  # torch's pipelining takes seconds to import
        from .pipeline.schedules import check_microbatches, default_microbatches, find

        found = find(schedule)
        splits_backward = stages > 1 and found.splits_backward
    if microbatches is not None and microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: expected at least 1")
    if schedule is not None and stages > 1:
        microbatches = microbatches or default_microbatches(schedule, stages)
        check_microbatches(schedule, microbatches, stages)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected None or one of {', '.join(PRECISIONS)}")
    if precision == "fp16" and any(getattr(each, "fuse_wgrad_accumulation", False) for each in model.modules()):
        raise ValueError(
            "precision='fp16' with fuse_wgrad_accumulation=True: main_grad would keep the factor that the loss is "
            "scaled by; build the model without it, or use precision='bf16'"
        )
    _check_built_for(model, mesh)
    if stages == 1:
        schedule = None
    if mesh is None and offload and _group_of(model).size == 1 and everyone().size == 1:
        mesh = _mesh_of_one(device_of(None, device))
    engines: dict[str, Any] = {"zero": zero, "schedule": schedule, "splits_backward": splits_backward}
    sharding: dict[str, Any] = {"offload": offload, "precision": precision if mesh is not None else None}
    compatibility.check(model, mesh, **engines, **sharding)
    zeros.check_whole(model)
    _configure(model, recompute=recompute, overlap=overlap)

    divisible = hasattr(model, "pipeline_parts")
    if stages > 1 and not divisible:
        raise ValueError(
            f"a pipeline needs a model that can be cut into stages: {type(model).__name__} lacks pipeline_parts() and "
            "the other methods that shardfuse.parallel.pipeline.partition.Divisible lists"
        )
    if schedule is not None:
        assert mesh is not None
        cut = split(model, mesh, schedule, costs=None if costs is None else _agreed(costs, mesh))  # type: ignore[arg-type]
    host = offload or (zero > 0 and data_coordinate(mesh)[1] > 1)  # sharding then moves it to the GPU block by block
    place(model, mesh, torch.device("cpu") if host else device_of(mesh, device), seed)
    if schedule is not None:
        modules = [(stage.index, model.stage(stage.parts)) for stage in cut]  # type: ignore[operator]
    elif divisible:
        modules = [(0, model.stage(range(len(model.pipeline_parts()))))]  # type: ignore[operator]
    else:
        modules = [(0, model)]
    for _, module in modules:
        zeros.shard(module, mesh, splits_backward=splits_backward, zero=zero, schedule=schedule, **sharding)

    count = microbatches or 1
    pipeline = None
    if schedule is not None:
        assert mesh is not None
        dtype = None if precision is None else PRECISIONS[precision]
        pipeline = Pipeline(model, modules, mesh, schedule, count, dtype=dtype)  # type: ignore[arg-type]
    return ParallelModel(model, [module for _, module in modules], mesh, pipeline, count, precision)


class ParallelModel(nn.Module):
    """This rank's part of a model, as :func:`parallelize` spread it.

    ``module`` is the model with only this rank's parts, under their names in the whole: pass it to ``explain`` and
    ``export_hf``. ``stages`` are the modules that run, made of its submodules. ``pipeline`` is the Pipeline, or None.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        stages: list[nn.Module],
        mesh: DeviceMesh | None,
        pipeline: Pipeline | None,
        microbatches: int,
        precision: str | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.mesh, self.pipeline, self.microbatches, self.precision = mesh, pipeline, microbatches, precision
        self.stages = tuple(stages)  # not child modules: they share the module's
        self._divisible = hasattr(module, "pipeline_parts")
        self._data_parallel_size = data_coordinate(mesh)[1]
        self._data: Group = data_group(mesh)
        self._group = whole_group(_group_of(module) if mesh is None else mesh)
        self._parameters_here = tuple(module.parameters())  # as the optimizer holds them
        self._clipper: tuple[float, GradientClipper] | None = None
        self.loss_scale = LossScale(self._group) if precision == "fp16" else None

    # ------------------------------------------------------------------------------------------------------ training

    def step(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of ``tokens`` [B, S] and ``targets`` [B, S] (int64; -100 does not count).

        They are this rank's share of the step's batch: ranks that differ only along dp (and dp_replicate) pass
        different shares, of any sizes; all other ranks pass the same. Returns the mean loss over the valid targets of
        all shares, an fp32 scalar (fp64 for fp64), the same on every rank. Adds to ``.grad`` the gradients of that
        mean, summed over the ranks, independent of how the batch was divided among ranks and micro-batches.
        ``positions`` [S] or [B, S] default to 0 to S - 1. Collective.

        A batch with fewer sequences than micro-batches is padded with sequences that do not count. A failing step does
        not affect the next one, except that it may leave some of its gradients: call ``zero_grad``.

        Raises ValueError, on every rank that reads data, where one rank's batch does not suit the model, where no
        target is valid, and where a module that cannot exclude sequences from its mean gets fewer sequences than
        micro-batches.
        """
        inputs, targets = self._inputs(batch, positions)
        scale = self._scale(inputs, targets, positions)
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor
        earlier = {} if self.loss_scale is None else self._set_aside()
        try:
            if self.pipeline is not None:
                (tokens,) = inputs
                loss = self.pipeline.step(tokens, targets, scale=scale * factor, positions=positions)
            else:
                loss = self._accumulate(self._parts(inputs, targets, positions), scale * factor)
        except BaseException:
            for stage in self.stages:
                zeros.abandon(stage)
            raise
        loss = self._mean(loss) / factor
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters_here)
            for param, grad in earlier.items():
                param.grad = grad if param.grad is None else grad.add_(param.grad)
        return loss

    @torch.no_grad()
    def evaluate(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The loss that :meth:`step` returns, without gradients and dropout. Collective."""
        inputs, targets = self._inputs(batch, positions)
        scale = self._scale(inputs, targets, positions)
        modules = {module for top in (self, *self.stages) for module in top.modules()}
        training = [module for module in modules if module.training]
        for module in training:
            module.training = False
        try:
            if self.pipeline is not None:
                (tokens,) = inputs
                loss = self.pipeline.evaluate(tokens, targets, scale=scale, positions=positions)
            else:
                parts = self._parts(inputs, targets, positions)
                loss = torch.stack([self._loss(*part, scale) for part in parts]).sum()
        finally:
            for module in training:
                module.training = True
            for stage in self.stages:
                zeros.settle(stage)
        return self._mean(loss)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients to a norm over the whole model of at most ``max_norm`` (infinity: measure only).

        Returns the norm before, a scalar that is the same on every rank. Collective. Raises ValueError for a
        ``max_norm`` of 0 or less.
        """
        if self._clipper is None or self._clipper[0] != max_norm:
            copies = {} if self.pipeline is None else self.pipeline.copies()
            ranks = self._group if self.mesh is None else self.mesh
            self._clipper = max_norm, GradientClipper(self._parameters_here, max_norm, ranks, copies=copies)
        return self._clipper[1].clip()

    def forward(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The model's own forward, in the precision of :meth:`step`. RuntimeError with a pipeline."""
        if self.pipeline is not None:
            raise RuntimeError(
                "a pipeline has no forward of its own, since no rank has the whole model: use step() to train, or "
                "evaluate() for the loss"
            )
        (stage,) = self.stages
        try:
            with self._autocast():
                out = stage(*batch) if positions is None else stage(*batch, positions=positions)
        finally:
            if not torch.is_grad_enabled():
                zeros.settle(stage)
        if not self._divisible:
            return out
        tokens, *targets = batch
        return out.view(*tokens.shape, -1) if not targets else (out / _valid(*targets).to(out.dtype)).squeeze(0)

    def train(self, mode: bool = True) -> ParallelModel:
        super().train(mode)
        for stage in self.stages:
            stage.train(mode)
        return self

    # ------------------------------------------------------------------------------------------------------- helpers

    def _inputs(
        self, batch: tuple[torch.Tensor, ...], positions: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The model's inputs, and its targets. ValueError for a call that no batch could make valid."""
        *inputs, targets = batch or (None,)
        if targets is None or not inputs or (self._divisible and len(inputs) > 1):
            raise ValueError(
                f"{len(batch)} tensor{'s' * (len(batch) != 1)} in a row: expected tokens and targets; positions go by "
                "name, and packed batches (cu_seqlens) are the bare model's to take"
            )
        if positions is not None and not self._divisible:
            raise ValueError(f"positions: {type(self.module).__name__} takes its inputs in a row, before the targets")
        return inputs, targets

    def _scale(self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None) -> float:
        """The factor from sums over this rank's targets to its share of the mean over all data-parallel ranks."""
        problem = self._problem(inputs, targets, positions)
        said = torch.stack([_valid(targets), torch.tensor(float(problem is not None), device=targets.device).double()])
        valid, refused = collectives.all_reduce(said, self._data, site="step.targets").tolist()
        if problem is not None:
            raise problem
        if refused:
            raise ValueError(
                f"{refused:.0f} of {self._data_parallel_size} ranks that read data refused their batch; their errors "
                "say why"
            )
        if not valid:
            raise ValueError("no target of this step is valid: all of them are -100")
        return self._data_parallel_size / valid

    def _problem(
        self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None
    ) -> ValueError | None:
        """Why this rank's batch is invalid, or None; data-parallel ranks exchange this before any of them begins."""
        count, rows = self.microbatches, targets.shape[0]
        if not self._divisible:
            if rows >= count:
                return None
            return ValueError(
                f"a batch of {rows} for microbatches={count}: pass more at a time, or fewer micro-batches"
            )
        try:
            (tokens,) = inputs
            self.module.check_batch(tokens, targets, positions)  # type: ignore[operator]
            smallest = max(1, rows // count)
            for part in {smallest, max(1, -(-rows // count))} if self.pipeline is None else {max(1, -(-rows // count))}:
                self.module.boundary(part, tokens.shape[1])  # type: ignore[operator]
        except ValueError as error:
            return error
        return None

    def _set_aside(self) -> dict[nn.Parameter, torch.Tensor]:
        """Take out the gradients of earlier steps, to which this step's factor does not apply."""
        earlier = {param: param.grad for param in self._parameters_here if param.grad is not None}
        for param in earlier:
            param.grad = None
        return earlier

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_reduce(loss.detach().sum(), self._data, site="step.loss")
        return whole.to(torch.promote_types(loss.dtype, torch.float32)) / self._data_parallel_size

    def _accumulate(self, parts: list[_Part], scale: float) -> torch.Tensor:
        (stage,) = self.stages
        losses = []
        draws = self.module.draws(parts[0].targets.device) if self._divisible else None  # type: ignore[operator]
        for i, part in enumerate(parts):
            zeros.accumulate(stage, last=i == len(parts) - 1)
            loss = self._loss(*part, scale, draws)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _loss(
        self,
        inputs: list[torch.Tensor],
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        scale: float,
        draws: Any = None,
    ) -> torch.Tensor:
        """The sum of one micro-batch's losses times ``scale``."""
        (stage,) = self.stages
        with self._autocast():
            if not self._divisible:
                valid = _valid(targets)
                # The mean over no targets is NaN: replace it by a target with weight 0.
                loss = stage(*inputs, targets.masked_fill((targets == IGNORE_INDEX) & (valid == 0), 0))
                return loss * (valid * scale).to(loss.dtype)
            return stage(*inputs, targets, positions=positions, scale=scale, draws=draws).sum()

    def _parts(self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None) -> list[_Part]:
        """The micro-batches."""
        count = self.microbatches
        missing = max(0, count - targets.shape[0])  # only for a model that can exclude sequences
        if positions is not None:
            positions = positions.expand(targets.shape)

        def pieces(tensor: torch.Tensor, filling: int = 0) -> tuple[torch.Tensor, ...]:
            filled = F.pad(tensor, (0, 0, 0, missing), value=filling) if missing else tensor
            return filled.tensor_split(count)

        given, wanted = zip(*map(pieces, inputs)), pieces(targets, IGNORE_INDEX)
        placed = [None] * count if positions is None else pieces(positions)
        return [_Part(list(one), target, place) for one, target, place in zip(given, wanted, placed)]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast for a model without a mesh, where FSDP2 does not cast."""
        if self.precision is None or self.mesh is not None:
            return contextlib.nullcontext()
        device = next(self.parameters()).device.type
        return torch.autocast(device, PRECISIONS[self.precision])

    def extra_repr(self) -> str:
        mesh = self.mesh
        said = [] if mesh is None else [f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape)]
        if self.pipeline is not None:
            said.append(f"stages {', '.join(str(index) for index, _ in self.pipeline.stages)} of {self.pipeline.count}")
        return ", ".join([*said, f"microbatches={self.microbatches}", f"precision={self.precision}"])


class _Part(NamedTuple):
    """One micro-batch."""

    inputs: list[torch.Tensor]
    targets: torch.Tensor
    positions: torch.Tensor | None


def _valid(targets: torch.Tensor) -> torch.Tensor:
    """The number of targets that count, fp64."""
    return (targets != IGNORE_INDEX).sum(dtype=torch.float64)


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_mesh(device_type=device.type, alone=True)
    assert mesh is not None
    return mesh


def _agreed(costs: Sequence[float | Costs], mesh: DeviceMesh) -> list[float]:
    """``costs`` as numbers. ValueError on every rank if they differ: parts would run twice, or not at all."""
    mine = [float(getattr(each, "step", each)) for each in costs]  # type: ignore[arg-type]
    if any(theirs != mine for theirs in collectives.gather_objects(mine, whole_group(mesh), site="parallelize.costs")):
        raise ValueError(
            "costs differ between ranks, which would cut the model differently: measure them together "
            "(measured_costs(..., mesh=mesh)), or pass what one rank has found"
        )
    return mine


def _group_of(model: nn.Module) -> Group:
    """The tensor-parallel group that ``model`` was built for; SINGLE for a model without one."""
    group = getattr(model, "group", None)
    return group if isinstance(group, Group) else SINGLE


def _check_built_for(model: nn.Module, mesh: DeviceMesh | None) -> None:
    group = getattr(model, "group", None)
    if mesh is None or not isinstance(group, Group):
        return
    wanted = degree(mesh, "tp")
    if group.size != wanted:
        raise ValueError(
            f"the model was built for {group.size} tensor-parallel rank(s) and the mesh has tp={wanted}: build it with "
            "mesh=mesh"
        )


def _configure(model: nn.Module, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return
    if not hasattr(model, "configure"):
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{said}: {type(model).__name__} has no configure() to set this; build it so, and leave it out"
        )
    model.configure(**given)  # type: ignore[operator]
