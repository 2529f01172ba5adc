"""One call that spreads a model over a mesh: pipeline stages first, then ZeRO inside each stage, which knows the
schedule.

The parts stand by themselves as well: ``pipeline.split`` and ``pipeline.Pipeline``, ``zero.shard``, ``clip``. Tensor
parallelism is the layers' own: a model is built with the same mesh.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import collectives, compose
from . import zero as zeros
from .clip import GradientClipper
from .loss_scale import LossScale
from .mesh import Group, MeshLike, data_coordinate, data_group, degree, tp_group, whole_group
from .zero import PRECISIONS

if TYPE_CHECKING:
    from .pipeline import Pipeline

__all__ = ["ParallelModel", "parallelize"]

PADDING = -100  # the target of what counts for nothing


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    zero: int = 0,
    schedule: str | None = None,
    microbatches: int | None = None,
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
        offload: parameters, gradients and optimizer state stay in the host's memory.
        precision: "bf16" or "fp16" for forward and backward; what the optimizer sees stays fp32. With fp16 the loss is
            scaled, and a step whose gradients overflow leaves none.
        recompute: keep only each block's input for backward; None leaves it as the model was built, as does
        overlap: "auto", "kernel", "chunked" or "none" (``ParallelTransformer``).
        device: where parameters on meta are materialised; None: where the mesh is, and without one the GPU if there is
            one.

    Raises ValueError for combinations that train wrongly (``compose.py`` says which, and what to use instead), and for
    arguments that do not fit the mesh or the model. Every rank comes to the same answer by itself.
    """
    stages = degree(mesh, "pp")
    if stages > 1 and schedule is None:
        raise ValueError(f"the mesh has pp={stages} pipeline stages and schedule=None: pass one, schedule='1f1b' say")
    splits_backward = False
    if schedule is not None:
        from .pipeline import Pipeline, find, split  # torch's take seconds to import

        found = find(schedule)
        splits_backward = stages > 1 and found.splits_backward
    if microbatches is not None and microbatches < 1:
        raise ValueError(f"microbatches={microbatches}: expected at least 1")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected None or one of {', '.join(PRECISIONS)}")
    _check_built_for(model, mesh)
    if stages == 1:
        schedule = None
    engines: dict[str, Any] = {"zero": zero, "schedule": schedule, "splits_backward": splits_backward}
    sharding: dict[str, Any] = {"offload": offload, "precision": precision if mesh is not None else None}
    compose.check(model, mesh, **engines, **sharding)
    _configure(model, recompute=recompute, overlap=overlap)

    divisible = hasattr(model, "pipeline_parts")
    if stages > 1 and not divisible:
        raise ValueError(
            f"a pipeline wants a model that can be cut in stages, which {type(model).__name__} does not say how to: it "
            "lacks pipeline_parts() and what else shardfuse.parallel.pipeline.Divisible lists"
        )
    if schedule is not None:
        assert mesh is not None
        cut = split(model, mesh, schedule)  # type: ignore[arg-type]
    host = offload or (zero > 0 and data_coordinate(mesh)[1] > 1)  # where sharding takes it from, block by block
    _materialise(model, torch.device("cpu") if host else _device(mesh, device), seed)
    if schedule is not None:
        modules = [(stage.index, model.stage(stage.parts)) for stage in cut]  # type: ignore[operator]
    elif divisible:
        modules = [(0, model.stage(range(len(model.pipeline_parts()))))]  # type: ignore[operator]
    else:
        modules = [(0, model)]
    for _, module in modules:
        zeros.shard(module, mesh, splits_backward=splits_backward, zero=zero, schedule=schedule, **sharding)

    count = microbatches
    if count is None:
        count = 1 if schedule is None else 2 * stages * found.stages_per_rank
    pipeline = None
    if schedule is not None:
        assert mesh is not None
        dtype = None if precision is None else PRECISIONS[precision]
        pipeline = Pipeline(model, modules, mesh, schedule, count, dtype=dtype)  # type: ignore[arg-type]
    return ParallelModel(model, [module for _, module in modules], mesh, pipeline, count, precision)


class ParallelModel(nn.Module):
    """This rank's part of a model, as :func:`parallelize` spread it.

    ``module`` is the model with the parts that are this rank's, under the names that they have in the whole: what
    ``save_checkpoint`` and ``explain`` take. ``pipeline`` is the Pipeline, None without one.
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
        self._stages = tuple(stages)  # not children: they share the module's
        self._divisible = hasattr(module, "pipeline_parts")
        self._readers = data_coordinate(mesh)[1]
        self._data: Group = data_group(mesh)
        everyone: MeshLike = getattr(module, "group", None) if mesh is None else mesh
        self._group = whole_group(everyone)
        self._clippers: dict[float, GradientClipper] = {}
        self.loss_scale = LossScale(self._group) if precision == "fp16" else None

    # ------------------------------------------------------------------------------------------------------ training

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        """Forward and backward of ``tokens`` [B, S] and ``targets`` [B, S] (int64; -100 counts for nothing).

        This rank's share of the step's batch: ranks that differ along dp (and rep) alone pass different ones, of any
        sizes; all others the same. Returns the mean loss over all valid targets of all of them, an fp32 scalar (fp64
        for fp64), the same on every rank. Adds to ``.grad`` the gradients of that mean, summed over the ranks, however
        the batch was divided among ranks and micro-batches. A collective.

        A batch with fewer sequences than micro-batches is filled up with some that count for nothing.

        Raises ValueError, on every rank, where no target is valid, and where a module that cannot leave sequences out
        of its mean is given fewer of them than micro-batches.
        """
        *inputs, targets = batch
        scale = self._scale(targets)
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor
        if self.pipeline is not None:
            (tokens,) = inputs
            loss = self.pipeline.step(tokens, targets, scale=scale * factor)
        else:
            loss = self._accumulate(inputs, targets, scale * factor)
        loss = self._mean(loss) / factor
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.parameters())
        return loss

    @torch.no_grad()
    def evaluate(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss that :meth:`step` returns, without gradients and dropout. A collective."""
        *inputs, targets = batch
        scale = self._scale(targets)
        training = self.training
        self.eval()
        try:
            if self.pipeline is not None:
                (tokens,) = inputs
                loss = self.pipeline.evaluate(tokens, targets, scale=scale)
            else:
                parts = self._parts(inputs, targets)
                loss = torch.stack([self._loss(given, wanted, scale) for given, wanted in parts]).sum()
        finally:
            self.train(training)
        return self._mean(loss)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm`` (infinity: measure only);
        the norm before, a scalar that is the same on every rank. A collective.

        Raises ValueError for a ``max_norm`` of 0 or less.
        """
        if max_norm not in self._clippers:
            copies = {} if self.pipeline is None else self.pipeline.copies()
            self._clippers[max_norm] = GradientClipper(
                self.parameters(), max_norm, self._group if self.mesh is None else self.mesh, copies=copies
            )
        return self._clippers[max_norm].clip()

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The model's own forward, in the precision of :meth:`step`. Without a pipeline only: RuntimeError with one."""
        if self.pipeline is not None:
            raise RuntimeError(
                "a pipeline has no forward of its own, since no rank has the whole model: step() trains, evaluate() "
                "gives the loss"
            )
        with self._autocast():
            (stage,) = self._stages
            if not self._divisible:
                return stage(*batch)
            tokens, *targets = batch
            out = stage(tokens, *targets)
            return out.view(*tokens.shape, -1) if not targets else (out / _valid(*targets)).squeeze(0)

    def train(self, mode: bool = True) -> ParallelModel:
        super().train(mode)
        for stage in self._stages:
            stage.train(mode)
        return self

    # --------------------------------------------------------------------------------------------------------- parts

    def _scale(self, targets: torch.Tensor) -> float:
        """What turns sums over this rank's targets into its addend of the mean that engines form over readers."""
        short = not self._divisible and targets.shape[0] < self.microbatches
        said = torch.stack([_valid(targets), torch.full((), float(short), dtype=torch.float64, device=targets.device)])
        valid, too_short = collectives.all_reduce(said, self._data, site="step.targets").tolist()
        if too_short:
            raise ValueError(
                f"microbatches={self.microbatches}, and {too_short:.0f} of {self._readers} ranks that read data were "
                f"given fewer sequences (this one {targets.shape[0]}): pass larger batches, or fewer micro-batches"
            )
        if not valid:
            raise ValueError("no target of this step is valid: all of them are -100")
        return self._readers / valid

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_reduce(loss.detach().sum(), self._data, site="step.loss")
        return whole.to(torch.promote_types(loss.dtype, torch.float32)) / self._readers

    def _accumulate(self, inputs: list[torch.Tensor], targets: torch.Tensor, scale: float) -> torch.Tensor:
        (stage,) = self._stages
        parts, losses = self._parts(inputs, targets), []
        draws = self.module.draws(targets.device) if self._divisible else None  # type: ignore[operator]
        for i, (given, wanted) in enumerate(parts):
            zeros.accumulate(stage, last=i == len(parts) - 1)
            loss = self._loss(given, wanted, scale, draws)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _loss(self, inputs: list[torch.Tensor], targets: torch.Tensor, scale: float, draws: Any = None) -> torch.Tensor:
        """The sum of one micro-batch's losses times ``scale``."""
        (stage,) = self._stages
        with self._autocast():
            if not self._divisible:
                return stage(*inputs, targets) * (_valid(targets) * scale)
            return stage(*inputs, targets, scale=scale, draws=draws).sum()

    def _parts(
        self, inputs: list[torch.Tensor], targets: torch.Tensor
    ) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        count = self.microbatches
        missing = count - targets.shape[0]
        if missing > 0:
            (tokens,) = inputs
            inputs, targets = [F.pad(tokens, (0, 0, 0, missing))], F.pad(targets, (0, 0, 0, missing), value=PADDING)
        pieces = [tensor.tensor_split(count) for tensor in (*inputs, targets)]
        return [(list(given), wanted) for *given, wanted in zip(*pieces)]

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


def _valid(targets: torch.Tensor) -> torch.Tensor:
    """How many targets count, fp64."""
    return (targets != PADDING).sum(dtype=torch.float64)


def _device(mesh: DeviceMesh | None, wanted: torch.device | str | None) -> torch.device:
    if wanted is not None:
        return torch.device(wanted)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if mesh is None else mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _check_built_for(model: nn.Module, mesh: DeviceMesh | None) -> None:
    group = getattr(model, "group", None)
    if mesh is None or not isinstance(group, Group):
        return
    wanted = tp_group(mesh).size if degree(mesh, "tp") > 1 else 1
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


def _materialise(model: nn.Module, device: torch.device, seed: int | None) -> None:
    """Give parameters on meta memory on ``device`` and their first values."""
    if not any(param.is_meta for param in model.parameters()):
        return
    if not hasattr(model, "init_weights"):
        raise ValueError(
            f"{type(model).__name__} has parameters on the meta device and no init_weights(seed) to draw them: "
            "materialise it first (to_empty), or build it on a device"
        )
    model.to_empty(device=device)
    model.init_weights(seed)  # type: ignore[operator]
