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
from torch.nn.parameter import is_lazy

from ....parallel.core.mesh import Group
from ....parallel.core.sharding import ShardSpec, as_dtensor
from ...module import ShardedModule
from ..matchers.norms import FusedNorm
from ..saving import takes_state
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
    """Raise ValueError for a module whose parameters its first call or a hook of torch.nn.utils makes."""
    for path, module in model.named_modules():
        if any(is_lazy(param) for param in module._parameters.values() if param is not None):
            raise ValueError(
                f"fuse: {path or 'the model'} ({type(module).__name__}) has no shapes before its first call: run the "
                "model once, then split it"
            )
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
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, param in module._parameters.items():
            if param is not None and (param in made or type(param.data) in _PLAIN):
                if param not in made:
                    made[param] = _replicated(name, param, group)
                module._parameters[name] = made[param]
    for before, param in made.items():
        _carry_over(before, param)
    for path, module in model.named_modules():
        if isinstance(module, (ShardedModule, torch.jit.ScriptModule)):
            continue
        reads = tuple(_reads(module))
        if not (reads or module is model or isinstance(module, Fused) or takes_state(type(module))):
            continue
        if not isinstance(module, Fused):
            become(module, Whole(), _Whole(group, stayed.get(path)))
        module.__dict__["_match"].ranks = group
        if reads or module is model:  # which also explains errors of torch's
            read_whole(module, reads)


def _replicated(name: str, param: nn.Parameter, group: Group) -> nn.Parameter:
    assert group.mesh is not None
    spec = ShardSpec(name, param.shape, None, group)
    local = distribute_tensor(param.detach(), group.mesh, spec.placements).to_local()
    return nn.Parameter(as_dtensor(local, spec), requires_grad=param.requires_grad)


def _carry_over(before: nn.Parameter, now: nn.Parameter) -> None:
    """Attach to the DTensor ``now`` what the user attached to the plain parameter ``before``: attributes and hooks."""
    vars(now).update(vars(before))
    for hook in (before._backward_hooks or {}).values():
        now.register_hook(hook)
    for hook in (before._post_accumulate_grad_hooks or {}).values():
        now.register_post_accumulate_grad_hook(hook)


def _reads(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The ways from ``module`` to itself and to the modules below it whose whole parameters its forward reads."""
    kind: Any = module._stock if isinstance(module, Fused) else type(module)
    ours: Any = module._match.kinds if isinstance(module, Fused) else ()
    if _owned(module) and not isinstance(module, FusedNorm):  # which reads its own, in fewer steps
        yield ()
    yield from _below(module, (), code_names(kind) if kind.__module__.startswith(_KNOWN) else None, ours)


def _below(
    module: nn.Module, way: tuple[str, ...], named: frozenset[str] | None, ours: Collection[str]
) -> Iterator[tuple[str, ...]]:
    for name, child in module._modules.items():
        # Layers of a list read their own parameters; ours read theirs as they are.
        if child is None or isinstance(child, ShardedModule) or (_runs_nothing(module) and child._modules):
            continue
        if (owned := _owned(child)) and (
            named is None
            or name in ours
            or "forward" in child.__dict__  # which calls the stock class's
            or owned & (named | _named_by(child, named))
        ):
            yield (*way, name)
        yield from _below(child, (*way, name), named, ())


# Whose code was looked through; others' may read what is below a module in ways that its names do not tell.
_KNOWN = ("transformers.", "torch.nn.")


def _runs_nothing(module: nn.Module) -> bool:
    """Whether the class has no forward of its own, or that of nn.Sequential."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _owned(module: nn.Module) -> set[str]:
    """The names of the module's own parameters that are whole; those in lists are read by number."""
    whole = {n for n, p in module._parameters.items() if isinstance(p, DTensor) and p._spec.is_replicated()}
    return whole | {"parameter of a list"} if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else whole


def _named_by(child: nn.Module, named: frozenset[str]) -> frozenset[str]:
    """The names in the methods of ``child`` that are named in its parent's code."""
    kind: Any = child._stock if isinstance(child, Fused) else type(child)
    own = {name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base)} & named
    methods = [name for name in own - {"forward"} if isinstance(getattr(kind, name), types.FunctionType)]
    return frozenset().union(*(code_names(kind, name) for name in methods))


@functools.cache
def code_names(kind: type[nn.Module], method: str = "forward") -> frozenset[str]:
    """The names in the code that a module of class ``kind`` may run for a call of ``method``.

    That is the method itself, others and the functions of its file that are named there, and so on.
    """
    found, seen, wanted = {"parameter of a list"}, set[Any](), [inspect.unwrap(getattr(kind, method))]
    while wanted:
        function = wanted.pop()
        codes = [getattr(function, "__code__", None)]
        if codes[0] is None or codes[0] in seen:
            continue
        seen.add(codes[0])
        if "__class__" in codes[0].co_freevars:  # super()
            inherited = [vars(base).get(function.__name__) for base in kind.__mro__]
            wanted += [inspect.unwrap(each) for each in inherited if callable(each)]
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
