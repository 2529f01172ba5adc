"""The parameters of a split model that no layer splits: whole on every rank, and DTensors like those that are split.

torch's own tools (clipping, ``foreach`` and ``fused`` optimizers, gradient scalers, averages of weights) refuse plain
parameters beside DTensors, so none stays plain. A stock forward needs plain ones, because its activations are plain:
while it runs, its module and the children whose parameters it may read hold this rank's plain tensors, and gradients
flow back to the DTensors. FSDP2 does the same with the parameters that it gathers.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ....parallel.core.mesh import Group
from ....parallel.core.sharding import ShardSpec, make_parameter
from ...module import ShardedModule
from ..matchers.norms import FusedNorm
from ..swap import Fused, Match, become, read_whole

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
                    f"fuse: a hook of torch's ({kind}) computes a parameter of {path or 'the model'} before each "
                    "call, and would not find what it reads: make the result the parameter first (prune.remove, "
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
        if not (reads or module is model or isinstance(module, Fused) or hasattr(module, "save_pretrained")):
            continue
        if not isinstance(module, Fused):
            become(module, Whole(), _Whole(group, stayed.get(path)))
        module.__dict__["_match"].ranks = group
        if reads or module is model:  # which also explains errors of torch's
            read_whole(module, reads)


def _replicated(name: str, param: nn.Parameter, group: Group) -> nn.Parameter:
    assert group.mesh is not None
    spec = ShardSpec(name, param.shape, None, group)
    ours = make_parameter(distribute_tensor(param.detach(), group.mesh, spec.placements).to_local(), spec)
    ours.requires_grad_(param.requires_grad)
    return ours


def _reads(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The ways from ``module`` to itself and to the modules below it whose whole parameters its forward reads."""
    kind: Any = module._stock if isinstance(module, Fused) else type(module)
    ours: Any = module._match.kinds if isinstance(module, Fused) else ()
    if _owned(module) and not isinstance(module, FusedNorm):  # which reads its own, in fewer steps
        yield ()
    yield from _below(module, (), code_names(kind), ours)


def _below(
    module: nn.Module, way: tuple[str, ...], named: frozenset[str], ours: Collection[str]
) -> Iterator[tuple[str, ...]]:
    for name, child in module._modules.items():
        # Layers of a list read their own parameters; ours read theirs as they are.
        if child is None or isinstance(child, ShardedModule) or (_runs_nothing(module) and child._modules):
            continue
        owned = _owned(child)
        if owned and (name in ours or owned & named):
            yield (*way, name)
        yield from _below(child, (*way, name), named, ())


def _runs_nothing(module: nn.Module) -> bool:
    """Whether the class has no forward of its own, or that of nn.Sequential."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _owned(module: nn.Module) -> set[str]:
    """The names of the module's own parameters that are whole; those in lists are read by number."""
    whole = {n for n, p in module._parameters.items() if isinstance(p, DTensor) and p._spec.is_replicated()}
    return whole | {"parameter of a list"} if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else whole


@functools.cache
def code_names(kind: type[nn.Module]) -> frozenset[str]:
    """The names in the code that a module of class ``kind`` may run for a call.

    That is its forward, its methods and the functions of its file that are named there, and so on.
    """
    found, seen, wanted = {"parameter of a list"}, set[Any](), [inspect.unwrap(kind.forward)]
    while wanted:
        function = wanted.pop()
        codes = [getattr(function, "__code__", None)]
        if codes[0] is None or codes[0] in seen:
            continue
        seen.add(codes[0])
        names: set[str] = set()
        while codes:
            code: Any = codes.pop()
            names.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        found |= names
        scope = function.__globals__
        for name in names:
            for each in (getattr(kind, name, None), scope.get(name)):
                each = each.fget if isinstance(each, property) else each
                if isinstance(each, types.FunctionType):
                    wanted.append(inspect.unwrap(each))
    return frozenset(found)
