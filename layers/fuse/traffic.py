"""The memory that a training forward saves for backward and moves, module by module: fused and stock.

Nothing is computed: the whole model runs twice on fake tensors, once with the stock classes. Each op, and each tensor
that autograd saves, counts for the innermost fused module that runs; a tensor saved by several modules counts for the
first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...kernels.runtime import dispatch
from ..trial import trial
from .report import readers
from .swap import Fused


@dataclass(frozen=True)
class Traffic:
    """The traffic of one training forward. Each of our ops counts as one, even the loss, which works in chunks."""

    kept: int = 0  # bytes saved for backward, without parameters and the input
    ops: int = 0  # the number of ops that touch memory
    moved: int = 0  # bytes of the ops' arguments and results

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.kept + other.kept, self.ops + other.ops, self.moved + other.moved)


@dataclass(frozen=True)
class Both:
    """The traffic of a module, stock and fused."""

    stock: Traffic
    fused: Traffic


def traffic(model: nn.Module, device: torch.device, given: torch.Tensor) -> dict[str, Both]:
    """The traffic by path of each fused module of ``model``; "" also counts everything outside of them.

    ``given`` is the model's argument, of which only shape and dtype matter; from token ids, a language model also
    computes its loss. Ops choose as on ``device``. Raises TypeError for parameters that are not plain tensors, and
    passes on the model's error if it needs the values of fake tensors.
    """
    for name, param in model.named_parameters():
        if type(param.data) is not torch.Tensor:  # its forward would communicate
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

    seen: dict[int, Any] = {}  # storages by address, kept alive so that no address is reused
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
        with trial(model), torch.enable_grad(), fake, _Counter(add), saved, as_on, _one_sequence():
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


@contextlib.contextmanager
def _one_sequence() -> Iterator[None]:
    """Within the block transformers takes fake positions to be those of one sequence each.

    Of real ones it reads whether they begin anew. It does not read fake ones and makes a mask of [S, S], with which
    attention keeps and moves what it does not in a run.
    """
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    masks.find_packed_sequence_indices = found  # type: ignore[union-attr]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find  # type: ignore[union-attr]


def _off_meta(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace tensors on the meta device, which has no autocast, by fake CPU tensors."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay tied
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
    """Restore all that a forward may change in the model: classes, attributes, buffers, modes, counts."""
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
