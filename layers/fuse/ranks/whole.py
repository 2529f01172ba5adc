"""The parameters of a split model that no layer splits: whole on every rank, and DTensors like those that are split.

torch's own tools (clipping, ``foreach`` and ``fused`` optimizers, gradient scalers, averages of weights) refuse plain
parameters beside DTensors, so none stays plain. A stock forward needs plain ones, because its activations are plain:
while it runs, its module and the children whose parameters it may read hold this rank's plain tensors, and gradients
flow back to the DTensors. FSDP2 does the same with the parameters that it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ....parallel.core.mesh import Group
from ....parallel.core.sharding import ShardSpec, make_parameter
from ...module import ShardedModule
from ..swap import Fused, Match, become

_PLAIN = (torch.Tensor, FakeTensor)  # the types of a parameter's data, unless a quantiser changed it


class _Whole(Match):
    def __init__(self, group: Group, stayed: Any) -> None:
        super().__init__(())
        self.ranks = group
        self.stayed = stayed  # the report's row on the module


class FusedWhole(Fused):
    """The stock forward, of a module that is not split in a model that is."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stock_forward(*args, **kwargs)

    def why_stock(self) -> str | None:
        return None


class Whole:
    """The matcher of :class:`FusedWhole`; it matches nothing by itself."""

    fused = FusedWhole

    def match(self, module: nn.Module) -> Match | None:
        return None


def refuse_computed(model: nn.Module) -> None:
    """Raise ValueError for a module whose parameters a hook of torch.nn.utils computes before its forward."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils."):
                kind = type(hook).__name__
                raise ValueError(
                    f"fuse: a hook of torch's ({kind}) computes a parameter of {path or 'the model'} from others before "
                    "each call, and would not find them split: make the result the parameter first (prune.remove, "
                    "remove_weight_norm, remove_spectral_norm), or parametrize it (torch.nn.utils.parametrizations)"
                )


@torch.no_grad()
def replicate(model: nn.Module, group: Group, stayed: Mapping[str, Any]) -> None:
    """Make every plain parameter of ``model`` a DTensor with rank 0's values, if others are DTensors already.

    ``stayed``: the report's rows on stock modules, by path. Every rank calls this function.
    """
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and type(param.data) in _PLAIN:
                if param not in made:
                    made[param] = _replicated(name, param, group)
                module._parameters[name] = made[param]
    for path, module in model.named_modules():
        if isinstance(module, (ShardedModule, torch.jit.ScriptModule)):
            continue
        reads = tuple(_reads(module))
        if not reads and module is not model and not hasattr(module, "save_pretrained"):
            continue
        if not isinstance(module, Fused):
            become(module, Whole(), _Whole(group, stayed.get(path)))
        module.__dict__["_match"].reads_whole = reads


def _replicated(name: str, param: nn.Parameter, group: Group) -> nn.Parameter:
    assert group.mesh is not None
    spec = ShardSpec(name, param.shape, None, group)
    ours = make_parameter(distribute_tensor(param.detach(), group.mesh, spec.placements).to_local(), spec)
    ours.requires_grad_(param.requires_grad)
    return ours


def _reads(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The ways from ``module`` to itself and to the modules below it whose whole parameters its forward may read."""
    if _owns(module):
        yield ()
    if not _is_container(module):
        yield from _below(module, ())


def _below(module: nn.Module, way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, child in module._modules.items():
        # Layers in a list read their own; ours read theirs without a copy.
        if child is None or isinstance(child, ShardedModule) or (_is_container(module) and child._modules):
            continue
        if _owns(child):
            yield (*way, name)
        yield from _below(child, (*way, name))


def _is_container(module: nn.Module) -> bool:
    """Whether the class has no forward of its own, or that of nn.Sequential, which reads no parameter."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _owns(module: nn.Module) -> bool:
    return any(isinstance(param, DTensor) and param._spec.is_replicated() for param in module._parameters.values())
