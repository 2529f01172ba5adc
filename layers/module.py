"""What the layers that own sharded parameters have in common."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from ..kernels.runtime import autograd
from ..kernels.runtime.checks import expect_tensor, whole_number
from ..kernels.runtime.dispatch import Choice
from ..parallel.core import mappings
from ..parallel.core.mesh import Group
from ..parallel.core.options import TPOptions
from ..parallel.core.sharding import (
    ShardSpec,
    draw_part,
    local_tensors,
    make_parameter,
    named_seed,
    parameter_seed,
    part_of,
    placed_by,
    tag,
)
from ..parallel.overlap.plan import OverlapPlan
from .options import LayerOptions

__all__ = [
    "Absent",
    "CollectiveInfo",
    "CollectiveInfos",
    "FusedGroup",
    "Init",
    "Layer",
    "Runs",
    "ShardedModule",
    "TensorParallel",
    "check_divides",
    "is_plain_module",
]

# The ops a module runs, each with its choice of implementation.
Runs = list[tuple[str, Choice]]


class CollectiveInfo(NamedTuple):
    """A module's collective, and how it overlaps the product beside it."""

    when: str  # "forward", "backward", or "decoding": forward without gradients and with few tokens
    op: str
    plan: OverlapPlan | None  # None: it depends on the number of tokens, which is unknown


CollectiveInfos = list[CollectiveInfo]


class FusedGroup(NamedTuple):
    """Column-parallel layers that their parent runs as one: one product, and one collective each way."""

    layers: tuple[Any, ...]
    runs_again: bool = False  # whether backward computes the product once more


@dataclass(frozen=True)
class Init:
    """A parameter's initial values: a constant, normal with ``std``, or uniform in [-bound, bound)."""

    constant: float | None = None
    std: float | None = None
    bound: float | None = None


def is_plain_module(module: nn.Module) -> bool:
    """Whether ``module`` is of one of this package's classes, has no hooks, and the forward of its class.

    Only then may its parent read its parameters instead of calling it, or pass it arguments that the stock module does
    not take. An adapter that replaced the module is not plain, and neither is a wrapped module: FSDP gives it a class
    of its own.
    """
    own = module.__dict__  # nn.Module's own search for an attribute takes three times as long
    return type(module).__module__.startswith(_PACKAGE) and not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own
    )


def hooked_everywhere() -> bool:
    """Whether there are hooks for the calls of all modules."""
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


_PACKAGE = __name__.rpartition(".")[0] + "."


def held(module: nn.Module, *names: str) -> Any:
    """``getattr`` of each of the ``names``, None for an absent one; for parameters without nn.Module's slow search."""
    if torch.compiler.is_compiling():  # it warns of a function that remembers
        return [getattr(module, name, None) for name in names]
    return held_outside_compile(module, *names)


def held_outside_compile(module: nn.Module, *names: str) -> Any:
    """:func:`held` for a caller that knows that torch.compile does not trace it."""
    params: Any = module.__dict__["_parameters"]
    kind: Any = type(module)
    return [
        params[name] if name in params and not shadowed(kind, name) else getattr(module, name, None) for name in names
    ]


@functools.cache
def shadowed(kind: Any, name: str) -> bool:
    """Whether the class has an attribute of this name, which comes before a parameter or child of its instances."""
    return hasattr(kind, name)


class Layer(nn.Module):
    """A module whose errors name an input that is not a tensor. A call that succeeds costs no more than torch's own."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # __call__ would not do: torch's tracers replace it
        try:
            return super()._call_impl(*args, **kwargs)
        except Exception as error:
            autograd.refuse_transform(error)
            name = next(iter(inspect.signature(self.forward).parameters), "")
            given = args[0] if args else kwargs.get(name, ())
            if not isinstance(given, tuple):  # between blocks x is a tuple, with a branch not added to it yet
                expect_tensor(type(self).__name__, name, given)
            raise


class TensorParallel:
    """The options that a layer passes to the functions of ``parallel/linear.py`` and ``parallel/mlp.py``."""

    group: Group
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool
    impl: str
    overlap: str
    strict: bool
    training: bool

    def keep(self, shared: LayerOptions) -> None:
        self.group = shared.group
        self.sequence_parallel = shared.sequence_parallel
        self.fuse_wgrad_accumulation = shared.fuse_wgrad_accumulation
        self.impl, self.overlap, self.strict = shared.impl, shared.overlap, shared.strict

    def tp_options(self, site: str) -> TPOptions:
        """The options of a call; ``site`` names its collectives."""
        return TPOptions(
            self.group,
            sequence_parallel=self.sequence_parallel,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            impl=self.impl,
            overlap=self.overlap,
            strict=self.strict,
            site=site,
            pack_weight=not self.training,
        )


class ShardedModule(Layer):
    """A layer whose parameters are split over, or repeated on, the ranks of a group.

    A subclass declares its parameters with :meth:`add_parameter`, calls :meth:`reset_parameters`, and reads this rank's
    plain tensors with :meth:`local`.
    """

    group: Group
    sequence_parallel: bool

    def __init__(self, shared: LayerOptions, /) -> None:
        super().__init__()
        self.group = shared.group
        self.sequence_parallel = shared.sequence_parallel
        self._params, self._dtype, self._device = shared.params, shared.dtype, shared.device
        self._declared: dict[str, tuple[ShardSpec, Init]] = {}

    def add_parameter(self, name: str, shape: tuple[int, ...] | None, shard_dim: int | None, init: Init) -> None:
        """Register the parameter of logical ``shape``, split along ``shard_dim`` (None: whole on every rank).

        ``shape=None`` registers the name without a parameter, as nn.Linear does with ``bias=False``.
        """
        if shape is None:
            self.register_parameter(name, None)
            return
        spec = self.spec(name, torch.Size(shape), shard_dim)
        local = torch.empty(spec.local_shape, dtype=self._dtype, device=self._device)
        self.register_parameter(name, make_parameter(local, spec, self._params))
        self._declared[name] = (spec, init)

    def spec(self, name: str, shape: torch.Size, shard_dim: int | None) -> ShardSpec:
        """How the ranks split a parameter."""
        return ShardSpec(name, shape, shard_dim, self.group)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the parameters again from ``seed``; None takes a seed from torch's global CPU generator.

        The draws are fp32 on the CPU, so the logical tensors are the same on every device and at every group size.
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
                draw_part(
                    spec.logical_shape,
                    spec.index,
                    seed=named_seed(seed, name),
                    std=init.std,
                    bound=init.bound,
                )
            )

    def local(self, *names: str) -> tuple[Any, ...]:
        """This rank's plain tensors of the parameters ``names``, None for an absent one."""
        return local_tensors(*held(self, *names))

    def local_repeated(self, *names: str, site: str) -> tuple[Any, ...]:
        """:meth:`local` for parameters that are whole on every rank.

        With sequence parallelism a rank sees only its own tokens, so backward sums their gradients over the group.
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
        """The layer's collectives for ``tokens`` on ``device`` in a group of several ranks, as the policy chooses them.

        ``fused_group`` is the group that this layer is the first of. One rank may call this method alone: it sends
        nothing. It raises what forward would raise.
        """
        return []

    def sharding_repr(self) -> str:
        mode = ", sequence_parallel" if self.sequence_parallel else ""
        return f"ranks={self.group.size}{mode}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load whole plain tensors, such as a stock module's, as well as what this module's ``state_dict`` returns.

        With ``assign=True`` parameters take the given dtype and stay sharded; a slice gets memory of its own. Torch
        alone handles a parameter that FSDP2 shards as well.
        """
        assign = local_metadata.get("assign_to_params_buffers", False)
        kind = " as a DTensor" if self._params == "dtensor" else ""
        shapes = {}
        for name, (spec, _) in self._declared.items() if self.group.size > 1 else ():
            key, param = prefix + name, self._parameters.get(name)
            value = state_dict.get(key)
            if param is not None and isinstance(value, torch.Tensor) and placed_by(spec, param):
                state_dict[key] = part_of(value, param, spec, copy=assign)
                shapes[key] = f" Expected the whole {spec.logical_shape}, or this rank's {spec.local_shape}{kind}."
        errors: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors)
        for error in errors:
            key = error.removeprefix("size mismatch for ").partition(":")[0]
            error_msgs.append(error + shapes.get(key, ""))
        self._tag()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)
        self._tag()
        return self

    def _replicate_for_data_parallel(self) -> ShardedModule:
        """Refuse nn.DataParallel: its copies run in threads, so their collectives would start in any order."""
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
        """Tag plain parameters with their ShardSpec again: to_empty(), deepcopy() and assign=True make new ones."""
        if self._params == "local" or self.group.size == 1:
            for name, (spec, _) in self._declared.items():
                if (param := self._parameters.get(name)) is not None:
                    tag(param, spec)


class Absent(nn.Module):
    """Stands in for a part of a model that is on another pipeline stage, so that the other parts keep their names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "this part of the model is on another pipeline stage: call the pipeline's step() or evaluate() in its place"
        )


def check_divides(name: str, value: int, group: Group) -> None:
    """ValueError unless ``value`` is a size that splits evenly over the ranks of ``group``."""
    whole_number(name, value)
    if value % group.size:
        lower = value - value % group.size
        nearest = f"{lower} or {lower + group.size}" if lower else f"{group.size}"
        raise ValueError(
            f"{name}={value} does not divide by the {group.size} tensor-parallel ranks: "
            f"make it a multiple (such as {nearest}), or use fewer ranks"
        )
