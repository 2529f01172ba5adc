"""The tensors of a module that a checkpoint or a folder of weights holds, by their names there."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.sharding import gather, on_first_rank


class Wrapper(nn.Module):
    """The base class of our modules that spread ``module`` and add no tensor to it."""

    module: nn.Module


def bare(model: nn.Module) -> nn.Module:
    """``model`` without its wrappers: ``parallelize``, DistributedDataParallel, torch.compile."""
    while True:
        if isinstance(model, Wrapper | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def named_entries(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and persistent buffers by name; tied ones appear under their first name only.

    Names are the bare model's.
    """
    model = bare(model)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, entry in model.state_dict(keep_vars=True).items():
        if not isinstance(entry, torch.Tensor):
            raise ValueError(f"{name}: a checkpoint holds tensors, not {type(entry).__name__}; keep it in extra")
        if entry.is_meta:
            raise ValueError(f"{name} is on the meta device: call model.to_empty(device=...) first")
        if id(entry) not in seen:
            found[name] = entry
            seen.add(id(entry))
    return found


def full_state_dict(model: nn.Module, *, first_rank_only: bool = False) -> dict[str, torch.Tensor]:
    """The model's whole logical tensors, as copies on the CPU. Collective over the model's ranks.

    A pipeline's rank gets the tensors of its own stages. With ``first_rank_only`` only the first of the ranks that
    share these tensors gets them; the others get {} and need no memory for them.
    """
    entries = bare(model).state_dict(keep_vars=True)
    keep = not first_rank_only or all(on_first_rank(entry) for entry in entries.values())
    state: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, entry in entries.items():
            whole = gather(entry)
            if keep:
                state[name] = whole.to("cpu", copy=True)
    return state
