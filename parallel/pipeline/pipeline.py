"""Pipelines: a model in stages over ranks, run by torch's schedules (torch.distributed.pipelining).

:func:`split` selects this rank's parts of a model and drops the others; the model makes modules of them
(:class:`Divisible`), which may then be sharded over data-parallel ranks; a :class:`Pipeline` runs them. Every rank of
the pipeline gets the whole batch. Stages send each other activations and their gradients, but neither targets nor
shapes: each stage computes the shapes in advance, because torch would otherwise infer them by running the model on
uninitialised tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...kernels.runtime import autograd
from ..core import collectives
from ..core.mesh import Group, share_timeout, tp_group
from ..core.random import own_draws
from ..core.sharding import local_tensor
from ..cross_entropy import IGNORE_INDEX
from ..documents import pad_rows
from . import split_backward
from .partition import Divisible, Part, balanced, owners
from .schedules import SCHEDULES, Schedule, check_microbatches, find, forward_only, stages_of
from .split_backward import SplitStage

__all__ = ["SCHEDULES", "Divisible", "Part", "Pipeline", "Schedule", "StageParts", "split"]

CPU = torch.device("cpu")


class StageParts(NamedTuple):
    """A stage and its parts of the model."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which it does not need
    parts: range


def split(
    model: Divisible, mesh: DeviceMesh, schedule: str, *, costs: Sequence[float] | None = None, pp_dim: str = "pp"
) -> list[StageParts]:
    """Cut ``model`` into the stages of ``schedule`` over the ranks of ``mesh``'s ``pp_dim``, and keep this rank's.

    ``costs`` of the parts replace the model's own estimate; all ranks pass the same. Nothing is sent, and the model may
    be on meta.

    Raises ValueError for an unknown schedule, for fewer parts than stages, and for tied parameters whose gradients the
    layers accumulate themselves.
    """
    found, group = find(schedule), tp_group(mesh, pp_dim)
    parts = model.pipeline_parts()
    costs = [part.cost for part in parts] if costs is None else costs
    if len(costs) != len(parts):
        raise ValueError(f"costs: {len(costs)} for a model of {len(parts)} parts: expected one for each")
    stages = group.size * found.stages_per_rank
    if stages > 1:
        _check_tied(model)
    ranges = balanced(costs, stages, layout=found.layout, ranks=group.size)
    mine = [StageParts(index, ranges[index]) for index in stages_of(schedule, group.rank, group.size)]
    model.keep(chain.from_iterable(stage.parts for stage in mine))
    return mine


def _check_tied(model: Divisible) -> None:
    """ValueError if gradients of tied parameters would be missed. All ranks agree: each checks the whole model."""
    names = model.tied_parameters()
    if names and any(getattr(each, "fuse_wgrad_accumulation", False) for each in cast(nn.Module, model).modules()):
        raise ValueError(
            f"fuse_wgrad_accumulation=True with {', '.join(names)} at both ends of a pipeline: the ends sum "
            "param.grad, but the head would add to param.main_grad; build the model with "
            "fuse_wgrad_accumulation=False"
        )


class _Stage(SplitStage):
    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing. Torch (2.13) drops the gradients of FSDP modules here whenever training follows evaluation or the
        reverse, because its shape inference may have left some. No inference runs here, and these gradients count."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch (2.11) opens connections before the first step, in a V also from a rank to itself, which gloo lacks.
        Later versions let connections open themselves."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class _Built(NamedTuple):
    """A schedule, its number of micro-batches, and the dtype of their losses."""

    like: tuple[Any, ...]
    schedule: Any
    loss: torch.dtype


class Pipeline:
    """This rank's ``stages`` of ``model``, (index, module) each, and a schedule that runs them with the others'.

    ``dtype`` is that of the activations between stages, by default the parameters': pass it if mixed precision changes
    it. Batches may change shape from step to step: all ranks see the same batch and rebuild the schedule.

    ``borrowed`` names the parameters that another rank of the pipeline owns and this one holds as well (a tied
    embedding's on the last stage). After a step their gradients are equal on both; a norm counts them once.

    Raises ValueError for too few micro-batches, and for stages that are not this rank's under ``schedule``.
    """

    def __init__(
        self,
        model: Divisible,
        stages: Sequence[tuple[int, nn.Module]],
        mesh: DeviceMesh,
        schedule: str,
        microbatches: int,
        *,
        dtype: torch.dtype | None = None,
        pp_dim: str = "pp",
    ) -> None:
        self.name, self.schedule, self.microbatches = schedule, find(schedule), microbatches
        self.group = tp_group(mesh, pp_dim)
        check_microbatches(schedule, microbatches, self.group.size)
        expected = stages_of(schedule, self.group.rank, self.group.size)
        if [index for index, _ in stages] != expected:
            raise ValueError(
                f"stages: {[index for index, _ in stages]}, but schedule={schedule!r} gives pipeline rank "
                f"{self.group.rank} of {self.group.size} the stages {expected}: split() with the same schedule"
            )
        modules = [each for _, stage in stages for each in stage.modules()]
        if self.schedule.splits_backward and any(each._compiled_call_impl is not None for each in modules):
            raise ValueError(
                f"schedule={schedule!r} splits backward, and a module of a stage is compiled: torch.compile makes its "
                "backward one function, which cannot run in two passes; leave compile() out, or use schedule='1f1b'"
            )
        self.model, self.stages, self.dtype = model, list(stages), dtype
        self.count = self.group.size * self.schedule.stages_per_rank
        self._owner = owners(self.count, self.group.size, self.schedule.layout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else CPU
        self._built: _Built | None = None
        self._ends, self.borrowed = self._tie()

    # ------------------------------------------------------------------------------------------------------ running

    def step(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward and backward of a batch [B, S]: the sum of its targets' losses times ``scale``, on every rank.

        Adds the gradients of that sum to ``.grad``. ``positions`` are [S] or [B, S]; where they restart, a document
        starts (``documents.py``). A batch whose size does not divide by the micro-batches is padded with sequences that
        do not count. Collective.
        """
        batch = self._batch(True, tokens, targets, positions)
        draws = self.model.draws(self.device)
        before = self._set_aside()
        with contextlib.ExitStack() as stack:
            if draws is not None:
                stack.enter_context(own_draws(f"pipeline={self.group.rank}", self.device))
            stack.enter_context(autograd.split_backward(self.schedule.splits_backward))
            loss = self._run(True, batch, scale=scale, draws=draws)
        self._add_tied(before)
        return loss

    @torch.no_grad()
    def evaluate(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum that :meth:`step` returns, without gradients and dropout. Collective."""
        batch = self._batch(False, tokens, targets, positions)
        with _evaluating(module for _, module in self.stages):
            return self._run(False, batch, scale=scale)

    def _batch(
        self, training: bool, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        """The batch, padded and checked; ValueError for an invalid one, before anything is sent."""
        self.model.check_batch(tokens, targets, positions)
        documents = self.model.documents(tokens, positions)
        batch: dict[str, Any] = {"tokens": self._padded(tokens, 0), "targets": self._padded(targets, IGNORE_INDEX)}
        if positions is not None:
            batch["positions"] = pad_rows(positions.expand(tokens.shape), self._missing(len(tokens)))
        if documents is not None:
            batch["documents"] = documents  # no tensor: every micro-batch gets it whole
        self._prepare(training, batch["tokens"])
        return batch

    def _padded(self, x: torch.Tensor, value: int) -> torch.Tensor:
        """``x`` [B, S] with rows of ``value`` added, so that the micro-batches are equal and not empty."""
        missing = self._missing(len(x))
        return F.pad(x, (0, 0, 0, missing), value=value) if missing else x

    def _missing(self, rows: int) -> int:
        return max(self.microbatches - rows, -rows % self.microbatches)

    def _run(self, training: bool, batch: dict[str, Any], **options: Any) -> torch.Tensor:
        assert self._built is not None
        schedule, dtype = self._built.schedule, self._built.loss
        tokens = batch.pop("tokens")
        losses: list[torch.Tensor] = []
        options |= batch | {"batch_size": tokens.shape[0] // self.microbatches}
        options |= {"target": batch["targets"], "losses": losses, "return_outputs": False}
        read = [tokens] if self.group.rank == self._owner[0] else []
        self._equalise_local()
        try:
            if training:
                schedule.step(*read, **options)
            else:
                with forward_only(schedule):
                    schedule.eval(*read, **options)
        except Exception as error:
            self._built = None  # the step under way is lost, and with it the stages' state
            raise RuntimeError(self._said_of(error)) from error
        return self._shared_loss(losses, dtype)

    def _said_of(self, error: BaseException) -> str:
        while error.__cause__ is not None:  # torch wraps errors of a stage
            error = error.__cause__
        return (
            f"pipeline rank {self.group.rank} of {self.group.size}, schedule={self.name!r}: a step ended early "
            f"({type(error).__name__}: {error}). If a connection was closed or a wait timed out, another rank failed "
            "first: see its error"
        )

    def _shared_loss(self, losses: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=dtype, device=self.device)
        return collectives.broadcast(loss, self.group, src=self._owner[-1], site="pipeline.loss")

    # ----------------------------------------------------------------------------------------------------- building

    def _prepare(self, training: bool, tokens: torch.Tensor) -> None:
        """Build the schedule for batches like ``tokens`` if needed.

        Training and evaluation cannot share one before torch 2.12: after an evaluation its receive buffers would take
        no gradients.
        """
        rows, length = tokens.shape[0] // self.microbatches, tokens.shape[1]
        handed = self.model.boundary(rows, length, self.dtype)
        like = rows, length, tokens.dtype, handed.dtype, training or split_backward.torch_can()
        if self._built is None or self._built.like != like:
            loss = torch.float64 if handed.dtype == torch.float64 else torch.float32
            read = torch.empty(rows, length, dtype=tokens.dtype, device="meta")
            self._built = _Built(like, self._build(read, handed, torch.empty(1, dtype=loss, device="meta")), loss)

    def _build(self, read: torch.Tensor, handed: torch.Tensor, loss: torch.Tensor) -> Any:
        """Torch's schedule over stages: the first reads ``read``, the last returns ``loss`` and every other sends
        ``handed``, all on meta."""
        stages = [
            _Stage(
                module,
                index,
                self.count,
                self.device,
                input_args=read if index == 0 else handed.clone().requires_grad_(),
                output_args=(loss if index == self.count - 1 else handed.clone()).requires_grad_(),
                group=self.group.pg,
            )
            for index, module in self.stages
        ]
        given = stages[0] if self.schedule.stages_per_rank == 1 else stages
        return self.schedule.kind(given, self.microbatches, loss_fn=_loss_of, scale_grads=False)

    # -------------------------------------------------------------------------------------------- tied parameters

    def _tie(self) -> tuple[Group | None, frozenset[str]]:
        """The two ranks that share parameters (None: one has both ends), and this rank's names that the other owns."""
        names = self.model.tied_parameters()
        first, last = self._owner[0], self._owner[-1]
        if not names or first == last or self.group.rank not in (first, last):
            return None, frozenset()
        if self.group.size == 2:
            pair = self.group
        else:
            ranks = [dist.get_global_rank(self.group.pg, rank) for rank in (first, last)]
            pg = dist.new_group(ranks, use_local_synchronization=True)
            share_timeout(pg)
            pair = Group(pg, int(self.group.rank == last), 2, None)
        return pair, frozenset(names if self.group.rank == last else ())

    def _tied_here(self) -> list[list[nn.Parameter]]:
        """For each tied name the parameters under it on this rank's end stages: two, one or none."""
        ends = [module for index, module in self.stages if index in (0, self.count - 1)]
        found = [[module.get_parameter(name) for module in ends] for name in self.model.tied_parameters()]
        return [params[:1] if params and all(p is params[0] for p in params) else params for params in found]

    @torch.no_grad()
    def _equalise_local(self) -> None:
        """If both ends are on this rank, copy the first one's parameter to the last one's."""
        for params in self._tied_here():
            if len(params) == 2:
                local_tensor(params[1]).copy_(local_tensor(params[0]))

    def copies(self) -> dict[nn.Parameter, int]:
        """This rank's parameters that other ranks of the pipeline hold as well, and the number of ranks that do."""
        return {} if self._ends is None else {params[0]: 2 for params in self._tied_here()}

    def _set_aside(self) -> list[torch.Tensor | None]:
        """Set aside the gradients that an earlier step summed over both ends, so that they are not summed again."""
        if self._ends is None:
            return []
        params = [params[0] for params in self._tied_here()]
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        return before

    @torch.no_grad()
    def _add_tied(self, before: list[torch.Tensor | None]) -> None:
        """Sum the gradients of a parameter at both ends; a frozen one is frozen at both and has none."""
        for params in self._tied_here():
            if len(params) == 2:
                _add_grad(params[0], params[1].grad)
                params[1].grad = None
        if self._ends is None:
            return
        for (param, *_), earlier in zip(self._tied_here(), before):
            if not param.requires_grad:
                continue
            assert param.grad is not None
            collectives.all_reduce(local_tensor(param.grad), self._ends, site="pipeline.tied", inplace=True)
            _add_grad(param, earlier)


def _add_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is None:
        return
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)


def _loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss, which the last stage has already computed."""
    return output.sum()


@contextlib.contextmanager
def _evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block all ``modules`` are in evaluation mode."""
    flags = {module: module.training for top in modules for module in top.modules()}
    for module in flags:
        module.training = False
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training
