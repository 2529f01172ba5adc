"""A model that is spread over a mesh, as :func:`~shardfuse.parallel.parallelize.parallelize` returns it."""

from __future__ import annotations

import contextlib
import zlib
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.checks import expect_tensor
from .checkpoint.entries import Wrapper
from .core import collectives
from .core.agreement import checksum, global_rank
from .core.first_calls import compare_call
from .core.mesh import GRID_DIMS, SINGLE, Group, data_coordinate, data_group, degree, whole_group
from .cross_entropy import IGNORE_INDEX
from .documents import Documents, pad_rows
from .grid.grid import sharing_group
from .materialize import device_of
from .whole_grads import check_whole_grads
from .zero import zero as zeros
from .zero.clip import GradientClipper
from .zero.loss_scale import LossScale
from .zero.zero import PRECISIONS

if TYPE_CHECKING:
    from .pipeline.pipeline import Pipeline

CHECKED_CALLS = 3  # the number of first calls that compare ranks' data and, for plain modules, gradients


class ParallelModel(Wrapper):
    """This rank's part of a model, as :func:`parallelize` spread it.

    ``module`` is the model with only this rank's parts, under their names in the whole: pass it to ``explain`` and
    ``export_hf``. ``stages`` are the modules that run, made of its submodules. ``pipeline`` is the Pipeline, or None.
    ``check_data``, equal on all ranks, controls what later steps than the first three compare between ranks that share
    their data: None the shapes of their batches, True also their elements, False nothing if that takes an extra
    message, which only data parallelism avoids. Without a comparison, a rank refuses its batch alone.
    """

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
        self._share, self._data_parallel_size = data_coordinate(mesh)
        self._data: Group = data_group(mesh)
        self._sharing = sharing_group(mesh)
        self._group = whole_group(group_of(module) if mesh is None else mesh)
        self._copies = self._group.size // self._data_parallel_size  # ranks with one share of the data
        self._weight = _weight(self._share, self._group.rank if mesh is None else _place(mesh), self._copies)
        self._parameters_here = tuple(module.parameters())  # as the optimizer holds them
        self._clipper: tuple[float, GradientClipper] | None = None
        self.loss_scale = LossScale(self._group) if precision == "fp16" else None
        self._device = device_of(mesh, None if mesh is not None else next(module.parameters()).device)
        self.check_data: bool | None = None
        self._calls = 0

    # ------------------------------------------------------------------------------------------------------ training

    def step(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of ``tokens`` [B, S] and ``targets`` [B, S] (int64; -100 does not count).

        They are this rank's share of the step's batch: ranks that differ along dp (or dp_replicate) pass different
        shares, of any sizes; ranks that differ only along pp, tp or a grid pass the same. Returns the mean loss over
        the valid targets of all shares, an fp32 scalar (fp64 for fp64), the same on every rank. Adds to ``.grad`` the
        gradients of that mean, summed over the ranks, independent of how the batch was divided among ranks and
        micro-batches.
        ``positions`` [S] or [B, S] default to 0 to S - 1. Collective.

        A row may hold several documents, which ``positions`` tell apart: a token starts a document at the beginning of
        a row, and wherever its position is not above its predecessor's. Attention never crosses documents, so loss and
        gradients are those of one document per row. To find documents, the host waits for a GPU's positions.

        A batch with fewer sequences than micro-batches is padded with sequences that do not count. A failing step may
        leave some of its gradients, so call ``zero_grad``; it does not affect the next step otherwise.

        Raises ValueError, on every rank, if one rank's batch does not suit the model, if its positions restart and the
        model cannot keep documents apart (grids, some foreign models), if no target is valid, if a module that cannot
        exclude sequences from its mean gets fewer sequences than micro-batches, or if ranks that share their data pass
        different shapes; in the first calls of this method and :meth:`evaluate`, and with ``check_data`` in all calls,
        also if they pass different elements. In the first calls with a plain module over
        tensor-parallel ranks, also if these form different gradients of a parameter that each holds whole
        (``whole_grads.py``). Raises TypeError for arguments that are not tensors.
        """
        inputs, targets, documents, scale = self._agreed(batch, positions)
        factor = 1.0 if self.loss_scale is None else self.loss_scale.factor
        earlier = {} if self.loss_scale is None else self._set_aside()
        try:
            if self.pipeline is not None:
                (tokens,) = inputs
                loss = self.pipeline.step(tokens, targets, scale=scale * factor, positions=positions)
            else:
                loss = self._accumulate(self._parts(inputs, targets, positions, documents), scale * factor)
        except BaseException:
            for stage in self.stages:
                zeros.abandon(stage)
            raise
        loss = self._mean(loss) / factor
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters_here)
            for param, grad in earlier.items():
                param.grad = grad if param.grad is None else grad.add_(param.grad)
        if self._calls <= CHECKED_CALLS and not self._divisible:
            check_whole_grads(self.module.named_parameters(), self._sharing, self._group)
        return loss

    @torch.no_grad()
    def evaluate(self, *batch: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The loss that :meth:`step` returns, without gradients and dropout. Collective."""
        inputs, targets, documents, scale = self._agreed(batch, positions)
        modules = {module for top in (self, *self.stages) for module in top.modules()}
        training = [module for module in modules if module.training]
        for module in training:
            module.training = False
        try:
            if self.pipeline is not None:
                (tokens,) = inputs
                loss = self.pipeline.evaluate(tokens, targets, scale=scale, positions=positions)
            else:
                parts = self._parts(inputs, targets, positions, documents)
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
        """The model's own forward, in the precision of :meth:`step`; see there for ``positions``.

        While torch.compile traces or a CUDA graph is captured, the host cannot wait for positions to find documents, so
        the bound is S documents a row: correct, but slow.

        Raises RuntimeError with a pipeline, ValueError for positions that the model cannot take, and in its first calls
        ValueError if tensor-parallel ranks pass different inputs.
        """
        if self.pipeline is not None:
            raise RuntimeError(
                "a pipeline has no forward of its own, since no rank has the whole model: use step() to train, or "
                "evaluate() for the loss"
            )
        compare_call(
            self,
            group_of(self.module),
            values=True,
            positions=positions,
            **{f"input {i}": x for i, x in enumerate(batch)},
        )
        (stage,) = self.stages
        placed = {} if positions is None else self._placed(positions, self._documents(batch[0], positions))
        try:
            with self._autocast():
                out = stage(*batch, **placed)
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
        """Split the arguments into inputs and targets. ValueError for arguments that cannot be a batch."""
        *inputs, targets = batch or (None,)
        if targets is None or not inputs or (self._divisible and len(inputs) > 1):
            raise ValueError(
                f"{len(batch)} tensor{'s' * (len(batch) != 1)} in a row: expected tokens and targets; positions go by "
                "name, and tell apart documents that are packed in rows (cu_seqlens are the bare model's to take)"
            )
        if positions is not None and not self._divisible:
            raise ValueError(f"positions: {type(self.module).__name__} takes its inputs in a row, before the targets")
        for name, given in (*((f"input {i}", each) for i, each in enumerate(inputs)), ("targets", targets)):
            expect_tensor("step", name, given)
        if positions is not None:
            expect_tensor("step", "positions", positions)
        return inputs, targets

    def _agreed(
        self, batch: tuple[torch.Tensor, ...], positions: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor, Documents | None, float]:
        """The model's inputs and targets, the documents where rows hold several, and the factor from sums over this
        rank's targets to its share of the mean.

        One sum over all ranks gives the number of valid targets, whether a rank refuses its batch, and whether ranks
        that share their data got equal shapes (in checked calls also equal elements). Data parallelism needs this sum
        for the targets; otherwise ``check_data=False`` omits it. Raises the errors of :meth:`step`.
        """
        problem, documents, number, given = None, None, 0, []
        check = self.check_data or self._calls < CHECKED_CALLS
        group = self._data if self.check_data is False and not check and self._data_parallel_size == 1 else self._group
        self._calls += 1
        try:
            inputs, targets = self._inputs(batch, positions)
            shared = [*inputs, targets, *([] if positions is None else [positions])] if self._copies > 1 else []
            given = [(list(each.shape), str(each.dtype), checksum(each) if check else 0) for each in shared]
            number = zlib.crc32(repr(given).encode()) % _NUMBERS
            self._check_batch(inputs, targets, positions)
            if positions is not None:
                documents = self._documents(inputs[0], positions)
            valid = _valid(targets)
        except (ValueError, TypeError) as error:
            problem, valid = error, torch.zeros((), dtype=torch.float64, device=self._device)
        mine = torch.tensor([problem is not None, self._weight * number], dtype=torch.float64).to(valid.device)
        said = torch.cat((valid[None], mine))
        total, refused, unequal = collectives.all_reduce(said, group, site="step.targets").tolist()
        difference = self._difference(given) if unequal and group is self._group else None
        if problem is not None:
            raise problem
        if difference is not None:
            raise ValueError(difference)
        if refused:
            raise ValueError(
                f"{refused:.0f} of {self._group.size} ranks that read data refused their batch; their errors say why"
            )
        if not total:
            raise ValueError("no target of this step is valid: all of them are -100")
        return inputs, targets, documents, group.size / total

    def _difference(self, given: list[tuple[Any, ...]]) -> str | None:
        """The differences between the batches ``given`` to ranks with the same share of the data. Collective."""
        firsts: dict[int, tuple[int, Any]] = {}
        everything = collectives.gather_objects((self._share, given), self._group, site="step.data")
        for rank, (share, theirs) in enumerate(everything):
            first, expected = firsts.setdefault(share, (rank, theirs))
            if theirs != expected:
                shapes = [" and ".join(f"{kind} {shape}" for shape, kind, _ in each) for each in (expected, theirs)]
                names = [global_rank(self._group, each) for each in (first, rank)]
                dims = "a grid or pp" if any(degree(self.mesh, dim) > 1 for dim in GRID_DIMS) else "tp or pp"
                return (
                    f"ranks {names[0]} and {names[1]} differ along {dims} alone, so they share their data, and were "
                    f"given different batches ({shapes[0]}; {shapes[1]}): draw them after manual_seed(seed, mesh), or "
                    "read them with data_loader(dataset, mesh)"
                )
        return None

    def _check_batch(self, inputs: list[torch.Tensor], targets: torch.Tensor, positions: torch.Tensor | None) -> None:
        """ValueError where this rank's batch is invalid; the ranks exchange this before any of them begins."""
        count, rows = self.microbatches, targets.shape[0] if targets.dim() else 0
        if not self._divisible:
            if rows < count:
                raise ValueError(
                    f"a batch of {rows} for microbatches={count}: pass more at a time, or fewer micro-batches"
                )
            return
        (tokens,) = inputs
        self.module.check_batch(tokens, targets, positions)  # type: ignore[operator]
        smallest = max(1, rows // count)
        for part in {smallest, max(1, -(-rows // count))} if self.pipeline is None else {max(1, -(-rows // count))}:
            self.module.boundary(part, tokens.shape[1])  # type: ignore[operator]

    def _documents(self, tokens: torch.Tensor, positions: torch.Tensor) -> Documents | None:
        return self.module.documents(tokens, positions)  # type: ignore[operator]

    @staticmethod
    def _placed(positions: torch.Tensor | None, documents: Documents | None) -> dict[str, Any]:
        """The keywords of a stage."""
        given = {"positions": positions, "documents": documents}
        return {name: value for name, value in given.items() if value is not None}

    def _set_aside(self) -> dict[nn.Parameter, torch.Tensor]:
        """Set aside the gradients of earlier steps, to which this step's factor does not apply."""
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
        documents: Documents | None,
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
            return stage(*inputs, targets, scale=scale, draws=draws, **self._placed(positions, documents)).sum()

    def _parts(
        self,
        inputs: list[torch.Tensor],
        targets: torch.Tensor,
        positions: torch.Tensor | None,
        documents: Documents | None,
    ) -> list[_Part]:
        """The micro-batches."""
        count = self.microbatches
        missing = max(0, count - targets.shape[0])  # only a model that can exclude sequences reaches this

        def pieces(tensor: torch.Tensor, filling: int = 0) -> tuple[torch.Tensor, ...]:
            filled = F.pad(tensor, (0, 0, 0, missing), value=filling) if missing else tensor
            return filled.tensor_split(count)

        given, wanted = zip(*map(pieces, inputs)), pieces(targets, IGNORE_INDEX)
        placed: Any = [None] * count
        if positions is not None:
            placed = pad_rows(positions.expand(targets.shape), missing).tensor_split(count)
        return [_Part(list(one), target, place, documents) for one, target, place in zip(given, wanted, placed)]

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
    documents: Documents | None  # of all the batch: bounds for each micro-batch


_NUMBERS = 1 << 20  # hashes of a batch's shapes and elements


def _place(mesh: DeviceMesh) -> int:
    """This rank's place among those with the same share of the data."""
    place = 0
    for dim in ("pp", "tp", *GRID_DIMS):
        if degree(mesh, dim) > 1:
            place = place * degree(mesh, dim) + mesh.get_local_rank(dim)
    return place


def _weight(share: int, place: int, copies: int) -> float:
    """This rank's factor: those of the ``copies`` ranks with one ``share`` of the data are whole numbers with sum 0.

    Values that are equal on all of these ranks, times the factors, therefore add up to 0, and other values almost never
    do. The sum over all ranks is exact in fp64: each product has at most 20 + 12 + log2(copies) bits.
    """
    numbers = [Random(f"{share}/{each}").getrandbits(12) for each in range(copies)]  # noqa: S311 - no secret
    return float(copies * numbers[place] - sum(numbers))


def _valid(targets: torch.Tensor) -> torch.Tensor:
    """The number of targets that count, fp64."""
    return (targets != IGNORE_INDEX).sum(dtype=torch.float64)


def group_of(model: nn.Module) -> Group:
    """The tensor-parallel group that ``model`` was built for; SINGLE for a model without one."""
    group = getattr(model, "group", None)
    return group if isinstance(group, Group) else SINGLE
