"""What the layers that own sharded parameters have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.runtime.dispatch import Choice
from ..parallel.core import mappings
from ..parallel.core.mesh import Group, MeshLike, tp_group
from ..parallel.core.sharding import (
    PARAM_MODES,
    ShardSpec,
    draw_shard,
    local_tensors,
    make_parameter,
    named_seed,
    parameter_seed,
    tag,
)
from ..parallel.overlap.policy import OverlapPlan

__all__ = [
    "Absent",
    "CollectiveInfo",
    "CollectiveInfos",
    "FusedGroup",
    "Init",
    "Runs",
    "ShardedModule",
    "check_divides",
    "is_plain_module",
]

# The ops a module runs, each with its choice of implementation.
Runs = list[tuple[str, Choice]]


class CollectiveInfo(NamedTuple):
    """A collective of a module's, and how it will meet the product beside it."""

    when: str  # "forward" or "backward", or "decoding": forward without gradients and with few tokens
    op: str
    path: OverlapPlan | None  # None: it depends on how many tokens come


CollectiveInfos = list[CollectiveInfo]


class FusedGroup(NamedTuple):
    """Column-parallel layers that the module around them runs as one: one product, and one collective each way."""

    layers: tuple[Any, ...]
    runs_again: bool = False  # whether backward forms the product once more


@dataclass(frozen=True)
class Init:
    """How a parameter starts: a constant, normal with ``std``, or uniform in [-bound, bound)."""

    constant: float | None = None
    std: float | None = None
    bound: float | None = None


def is_plain_module(module: nn.Module) -> bool:
    """Whether ``module`` is one of this package's own and nobody wants to hear of its calls.

    Only then may a module around it read its parameters in place of calling it, or ask it to do more than its stock
    twin would: not with hooks, of an adapter that took its place, or wrapped (FSDP makes a class of its own).
    """
    return type(module).__module__.startswith(_PACKAGE) and not (
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


_PACKAGE = __name__.rpartition(".")[0] + "."


class ShardedModule(nn.Module):
    """A layer whose parameters are split over, or repeated on, the ranks of a group.

    A subclass declares its parameters with :meth:`add_parameter`, calls :meth:`reset_parameters`, and reads this rank's
    plain tensors with :meth:`local`. ``dtype`` and ``device`` default to torch's, so ``torch.device("meta")`` works.
    """

    def __init__(
        self,
        mesh: MeshLike,
        *,
        sequence_parallel: bool,
        params: str,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        if params not in PARAM_MODES:
            raise ValueError(f"params={params!r}: expected one of {', '.join(PARAM_MODES)}")
        self.group: Group = tp_group(mesh)
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self._params = params
        self._dtype = dtype
        self._device = device
        self._declared: dict[str, tuple[ShardSpec, Init]] = {}

    def add_parameter(self, name: str, shape: tuple[int, ...] | None, shard_dim: int | None, init: Init) -> None:
        """Register the parameter of logical ``shape``, split along ``shard_dim`` (None: whole on every rank).

        ``shape=None`` registers the name without a parameter, as nn.Linear does with ``bias=False``.
        """
        if shape is None:
            self.register_parameter(name, None)
            return
        spec = ShardSpec(name, torch.Size(shape), shard_dim, self.group)
        local = torch.empty(spec.local_shape, dtype=self._dtype, device=self._device)
        self.register_parameter(name, make_parameter(local, spec, self._params))
        self._declared[name] = (spec, init)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the parameters again from ``seed``; None takes a seed from torch's global CPU generator.

        Drawn in fp32 on the CPU: the same logical tensors on every device and at every size of the group.
        """
        drawn = [init for _, init in self._declared.values() if init.constant is None]
        if seed is None and drawn:
            seed = parameter_seed()
        for name, (spec, init) in self._declared.items():
            (local,) = local_tensors(getattr(self, name))
            if local.is_meta:
                continue
            if init.constant is not None:
                local.fill_(init.constant)
                continue
            assert seed is not None
            local.copy_(
                draw_shard(
                    spec.logical_shape,
                    spec.shard_dim,
                    self.group.rank,
                    self.group.size,
                    seed=named_seed(seed, name),
                    std=init.std,
                    bound=init.bound,
                )
            )

    def local(self, *names: str) -> tuple[Any, ...]:
        """This rank's plain tensors of the parameters ``names``, None for those that are absent."""
        return local_tensors(*(getattr(self, name) for name in names))

    def local_repeated(self, *names: str, site: str) -> tuple[Any, ...]:
        """The same for parameters that are whole on every rank.

        With sequence parallelism a rank sees only its own tokens, so their gradients are summed over the group.
        """
        tensors = self.local(*names)
        if not self.sequence_parallel:
            return tensors
        return mappings.copy_all_to(tensors, self.group, site=site)

    def runs(self, device: torch.device) -> Runs:
        """The ops that forward runs on ``device``, each with its choice of implementation."""
        return []

    def collectives(
        self, device: torch.device, tokens: int | None, fused_group: FusedGroup | None = None
    ) -> CollectiveInfos:
        """What crosses ranks for ``tokens`` on ``device`` under a choice of ways, in a group of several.

        ``fused_group`` is what the layer is the first of. Asks nobody: one rank may call it alone. Raises what a call
        would.
        """
        return []

    def sharding_repr(self) -> str:
        mode = ", sequence_parallel" if self.sequence_parallel else ""
        return f"ranks={self.group.size}{mode}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)
        self._tag()
        return self

    def _replicate_for_data_parallel(self) -> ShardedModule:
        """nn.DataParallel's copies run side by side in threads; their collectives would come in any order."""
        if self.group.size > 1:
            raise ValueError(
                f"nn.DataParallel around a {type(self).__name__} that is split over {self.group.size} ranks: its "
                "threads would run one rank's collectives in no order that the other ranks share; start one process "
                "per GPU (torchrun) and train with parallelize(model, mesh, zero=0), or use one tensor-parallel rank"
            )
        return super()._replicate_for_data_parallel()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tag()

    def _tag(self) -> None:
        """Plain parameters know what they are a part of, but to_empty() and copy.deepcopy() make new ones."""
        if self._params == "local" or self.group.size == 1:
            for name, (spec, _) in self._declared.items():
                tag(getattr(self, name), spec)


class Absent(nn.Module):
    """In place of a part of a model that is on another pipeline stage: the names of the parts behind it stay."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "this part of the model is on another pipeline stage: call the pipeline's step() or evaluate() in its place"
        )


def check_divides(name: str, value: int, group: Group) -> None:
    """ValueError unless ``value`` splits evenly over the ranks of ``group``."""
    if value < 1 or value % group.size:
        lower = value - value % group.size
        nearest = f"{lower} or {lower + group.size}" if lower else f"{group.size}"
        raise ValueError(
            f"{name}={value} does not divide by the {group.size} tensor-parallel ranks: "
            f"make it a multiple (such as {nearest}), or use fewer ranks"
        )
