"""What a training forward keeps for backward and moves through memory, module by module: fused, and as it was.

Nothing is computed. The whole model runs twice on fake tensors, once with the stock classes. Each tensor that autograd
keeps, and each op, counts for the innermost fused module that runs; a tensor that several of them keep, for the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...kernels.runtime import dispatch
from .report import readers
from .swap import Fused


@dataclass(frozen=True)
class Traffic:
    """Of one training forward. An op of ours counts as one, also the loss, which works chunk by chunk inside."""

    kept: int = 0  # bytes, for backward, beside parameters and the input
    ops: int = 0  # that touch memory
    moved: int = 0  # bytes that these take and return

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.kept + other.kept, self.ops + other.ops, self.moved + other.moved)


@dataclass(frozen=True)
class Both:
    """A module as it was, and fused."""

    stock: Traffic
    fused: Traffic


def traffic(model: nn.Module, device: torch.device, given: torch.Tensor) -> dict[str, Both]:
    """By the path of each fused module of ``model``; "" is also what runs outside of them.

    ``given`` is the model's argument, of which only shape and dtype count; given token ids, a language model computes
    its loss, too. Ops choose as on ``device``. Raises TypeError for parameters that are no plain tensors, and what the
    model raises where it asks fake tensors for values.
    """
    for name, param in model.named_parameters():
        if type(param.data) is not torch.Tensor:  # a forward would talk to other ranks
            raise TypeError(f"{name} is a {type(param.data).__name__}: ask before the model is sharded or quantised")
    read = readers(model)
    paths = {
        module: path
        for path, module in model.named_modules()
        if path == "" or (isinstance(module, Fused) and module not in read)
    }
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _restored(model):
        model.train()
        _off_meta(model, fake)
        fused = _run(model, paths, device, given, fake)
        for module in model.modules():
            if isinstance(module, Fused):
                module.__class__ = module._stock  # type: ignore[assignment]
        stock = _run(model, paths, device, given, fake)
    return {path: Both(stock[path], fused[path]) for path in paths.values()}


def _run(
    model: nn.Module, paths: dict[nn.Module, str], device: torch.device, given: torch.Tensor, fake: FakeTensorMode
) -> dict[str, Traffic]:
    found = {path: Traffic() for path in paths.values()}
    within = [""]

    def add(**what: int) -> None:
        found[within[-1]] += Traffic(**what)

    seen: dict[int, Any] = {}  # storages by their address, kept alive: an address may serve twice
    with fake:
        own = [
            each for tensor in (*model.parameters(), *model.buffers()) for each in (tensor, fake.from_tensor(tensor))
        ]
        on = next((tensor.device for tensor in model.parameters()), given.device)
        x = torch.empty(given.shape, dtype=given.dtype, device=on)
    for tensor in (*own, x):
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            add(kept=storage.nbytes())
        return tensor

    def leave(*_: Any) -> None:
        within.pop()

    handles = []
    for module, path in paths.items():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: within.append(path)))
        handles.append(module.register_forward_hook(leave))
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    as_on: AbstractContextManager[None] = contextlib.nullcontext()
    if device.type != on.type:
        as_on = dispatch.choosing_for(device)
    try:
        with torch.enable_grad(), fake, _Counter(add), saved, as_on:
            if given.is_floating_point():
                model(x)
            elif hasattr(model, "get_output_embeddings"):
                model(x, labels=x, use_cache=False)
            else:
                model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _off_meta(model: nn.Module, fake: FakeTensorMode) -> None:
    """Put fake tensors of a CPU in the place of those on the meta device, for which there is no autocast."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied ones stay tied
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        with fake:
                            made[tensor] = torch.empty_like(tensor, device="cpu")
                        if isinstance(tensor, nn.Parameter):
                            made[tensor] = nn.Parameter(made[tensor], tensor.requires_grad)
                    held[name] = made[tensor]  # type: ignore[assignment]


_FREE = {"aten._unsafe_view", "aten.detach", "aten.empty", "aten.empty_like", "aten.lift_fresh", "prim.device"}


class _Counter(TorchDispatchMode):
    """Adds up the ops that touch memory."""

    def __init__(self, add: Callable[..., None]) -> None:
        super().__init__()
        self.add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and str(func).rpartition(".")[0] not in _FREE:
            tensors = {id(x): x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
            self.add(ops=1, moved=sum(x.numel() * x.element_size() for x in tensors.values()))
        return out


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was, whatever a forward writes to it: classes, attributes, buffers, modes, counts."""
    before = [
        (module, type(module), dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    counts = dispatch.counts.copy()
    try:
        yield
    finally:
        for module, kind, held, params, buffers in before:
            module.__class__ = kind
            now: Any
            for now, then in ((vars(module), held), (module._parameters, params), (module._buffers, buffers)):
                now.clear()
                now.update(then)
        dispatch.counts.clear()
        dispatch.counts.update(counts)
