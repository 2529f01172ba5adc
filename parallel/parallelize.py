"""One call that spreads a model over a mesh: pipeline stages first, then ZeRO inside each stage, which knows the
schedule.

The parts stand by themselves as well: ``pipeline.split`` and ``pipeline.Pipeline``, ``zero.shard``, ``clip``. Tensor
parallelism is the layers' own: a model is built with the same mesh.
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
from .core.mesh import SINGLE, Group, check_dims, data_coordinate, data_group, degree, everyone, init_mesh, whole_group
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
        model: a ParallelTransformer built with the same mesh, best with ``device="meta"``: a rank then holds memory
            for its own part only. Or any module that returns the mean loss of its valid targets (those other than
            -100) when it is called as ``model(*inputs, targets)``; a pipeline wants what :class:`pipeline.Divisible`
            lists. Parameters on meta are materialised, and ``model.init_weights(seed)`` draws them.
        zero: 0 replicas, 1 and 2 shards of optimizer state and gradients, 3 of parameters as well (``zero.py``).
        schedule: of the pipeline, where the mesh has ``pp`` > 1: one of ``pipeline.SCHEDULES``.
        microbatches: in how many parts a rank's batch goes through; gradients travel once. None: 1, with a pipeline
            twice its stages.
        costs: of the model's parts, in any unit, by which a pipeline is cut evenly; all ranks pass the same. Those that
            ``layers.stage_costs.measured_costs(..., mesh=mesh)`` or ``pipeline.measured`` measures, say. None: those
            that the model knows of itself.
        offload: parameters, gradients and optimizer state stay in the host's memory. For a process alone this makes a
            mesh of one, for which it initialises torch.distributed.
        precision: "bf16" or "fp16" for forward and backward; what the optimizer sees stays fp32. With fp16 the loss is
            scaled, and a step whose gradients overflow leaves none.
        recompute: keep only each block's input for backward; None leaves it as the model was built, as does
        overlap: "auto", "kernel", "chunked" or "none" (``ParallelTransformer``).
        seed: of the first weights of a model on meta; None: rank 0 draws one from torch's global generator. A model
            that has its weights starts everywhere from those of the first data-parallel rank.
        device: where parameters on meta are materialised; None: where the mesh is, and without one the GPU if there is
            one.

    Raises ValueError for combinations that train wrongly (``compatibility.py`` says which, and what to use instead),
    and for arguments that do not fit the mesh or the model. Every rank comes to the same answer by itself.
    """
    check_dims(mesh)
    stages = degree(mesh, "pp")
    if stages > 1 and schedule is None:
        raise ValueError(f"the mesh has pp={stages} pipeline stages and schedule=None: pass one, schedule='1f1b' say")
    splits_backward = False
    if schedule is not None:
        from .pipeline.pipeline import Pipeline, split  # torch's take seconds to import
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
            f"a pipeline wants a model that can be cut in stages, which {type(model).__name__} does not say how to: it "
            "lacks pipeline_parts() and what else shardfuse.parallel.pipeline.partition.Divisible lists"
        )
    if schedule is not None:
        assert mesh is not None
        cut = split(model, mesh, schedule, costs=None if costs is None else _agreed(costs, mesh))  # type: ignore[arg-type]
    host = offload or (zero > 0 and data_coordinate(mesh)[1] > 1)  # where sharding takes it from, block by block
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

    ``module`` is the model with the parts that are this rank's, under the names that they have in the whole: what
    ``explain`` and ``export_hf`` take. ``stages`` are the modules that run, made of its submodules. ``pipeline``
    is the Pipeline, None without one.
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
        self.stages = tuple(stages)  # not children: they share the module's
        self._divisible = hasattr(module, "pipeline_parts")
        self._data_parallel_size = data_coordinate(mesh)[1]
        self._data: Group = data_group(mesh)
        self._group = whole_group(_group_of(module) if mesh is None else mesh)
        self._parameters_here = tuple(module.parameters())  # as the optimizer has them
        self._clipper: tuple[float, GradientClipper] | None = None
        self.loss_scale = LossScale(self._group) if precision == "fp16" else None

    # ------------------------------------------------------------------------------------------------------ training

    def step(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of ``tokens`` [B, S] and ``targets`` [B, S] (int64; -100 counts for nothing).

        This rank's share of the step's batch: ranks that differ along dp (and dp_replicate) alone pass different ones,
        of any sizes; all others the same. Returns the mean loss over all valid targets of all of them, an fp32 scalar
        (fp64 for fp64), the same on every rank. Adds to ``.grad`` the gradients of that mean, summed over the ranks,
        however the batch was divided among ranks and micro-batches. ``positions`` [S] or [B, S] are by default 0 to S -
        1. A collective.

        A batch with fewer sequences than micro-batches is filled up with some that count for nothing. A step that fails
        midway leaves nothing behind for the next one, but perhaps a part of its gradients: call ``zero_grad``.

        Raises ValueError, on every rank that reads data, where one of them was given a batch that the model cannot
        take, where no target is valid, and where a module that cannot leave sequences out of its mean is given fewer of
        them than micro-batches.
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
        """The loss that :meth:`step` returns, without gradients and dropout. A collective."""
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
        """Scale the gradients so that their norm over the whole model is at most ``max_norm`` (infinity: measure only);
        the norm before, a scalar that is the same on every rank. A collective.

        Raises ValueError for a ``max_norm`` of 0 or less.
        """
        if self._clipper is None or self._clipper[0] != max_norm:
            copies = {} if self.pipeline is None else self.pipeline.copies()
            ranks = self._group if self.mesh is None else self.mesh
            self._clipper = max_norm, GradientClipper(self._parameters_here, max_norm, ranks, copies=copies)
        return self._clipper[1].clip()

    def forward(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The model's own forward, in the precision of :meth:`step`. Without a pipeline only: RuntimeError with one."""
        if self.pipeline is not None:
            raise RuntimeError(
                "a pipeline has no forward of its own, since no rank has the whole model: step() trains, evaluate() "
                "gives the loss"
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

    # --------------------------------------------------------------------------------------------------------- parts

    def _inputs(
        self, batch: tuple[torch.Tensor, ...], positions: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What the model takes, and its targets. ValueError for a call that no batch would make right."""
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
                f"{refused:.0f} of {self._data_parallel_size} ranks that read data refused their batch, and say why"
            )
        if not valid:
            raise ValueError("no target of this step is valid: all of them are -100")
        return self._data_parallel_size / valid

    def _problem(
        self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None
    ) -> ValueError | None:
        """Why this rank's batch cannot be taken: said by all data-parallel ranks before any of them begins."""
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
        """Gradients of earlier steps, which this one's factor has no part in."""
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
                # A mean over nothing is no number: a target that weighs nothing takes the place of none.
                loss = stage(*inputs, targets.masked_fill((targets == IGNORE_INDEX) & (valid == 0), 0))
                return loss * (valid * scale).to(loss.dtype)
            return stage(*inputs, targets, positions=positions, scale=scale, draws=draws).sum()

    def _parts(self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None) -> list[_Part]:
        """The micro-batches."""
        count = self.microbatches
        missing = max(0, count - targets.shape[0])  # only a model that knows of sequences which count for nothing
        if positions is not None:
            positions = positions.expand(targets.shape)

        def pieces(tensor: torch.Tensor, filling: int = 0) -> tuple[torch.Tensor, ...]:
            filled = F.pad(tensor, (0, 0, 0, missing), value=filling) if missing else tensor
            return filled.tensor_split(count)

        given, wanted = zip(*map(pieces, inputs)), pieces(targets, IGNORE_INDEX)
        placed = [None] * count if positions is None else pieces(positions)
        return [_Part(list(one), target, place) for one, target, place in zip(given, wanted, placed)]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Where FSDP2 does not cast, since there is no mesh."""
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
    """How many targets count, fp64."""
    return (targets != IGNORE_INDEX).sum(dtype=torch.float64)


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_mesh(device_type=device.type, alone=True)
    assert mesh is not None
    return mesh


def _agreed(costs: Sequence[float | Costs], mesh: DeviceMesh) -> list[float]:
    """``costs`` as numbers. ValueError on every rank where they differ: parts would run twice, or not at all."""
    mine = [float(getattr(each, "step", each)) for each in costs]  # type: ignore[arg-type]
    if any(theirs != mine for theirs in collectives.gather_objects(mine, whole_group(mesh), site="parallelize.costs")):
        raise ValueError(
            "costs differ between ranks, which would cut the model differently: measure them together "
            "(measured_costs(..., mesh=mesh)), or pass what one rank has found"
        )
    return mine


def _group_of(model: nn.Module) -> Group:
    """The tensor-parallel group that ``model`` was built for; SINGLE for one that knows of none."""
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
