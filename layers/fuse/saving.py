"""transformers' own ``save_pretrained`` of a model whose parameters are DTensors: it writes the whole model, once."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from ...parallel.core.agreement import agree
from ...parallel.core.mesh import everyone

PATIENCE = 20.0  # seconds until a rank says for which others it waits
_log = logging.getLogger("shardfuse.fuse")
_calls = [0]


def takes_state(kind: type) -> bool:
    """Whether a class has a ``save_pretrained`` that takes a ``state_dict``: transformers' and peft's models."""
    method = getattr(kind, "save_pretrained", None)
    if method is None:
        return False
    return "state_dict" in inspect.signature(method).parameters or method.__module__.startswith("peft.")


def saving(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, a class's ``save_pretrained``, for a model that may be spread over ranks."""

    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(signature.bind(self, *args, **kwargs).arguments)  # peft's has another order
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        given = named.get("state_dict")
        state = self.state_dict() if given is None else given
        if named.get("distributed_checkpoint") or not any(isinstance(each, DTensor) for each in state.values()):
            return stock(self, *args, **kwargs)
        ranks = everyone()
        _tell_who_is_missing(ranks.rank, ranks.size)
        agree(ranks, lambda: _check(state))
        params = dict(self.named_parameters(remove_duplicate=False))
        whole = _gathered(state, params, ranks.rank == 0)
        named |= {"is_main_process": True, "state_dict": whole}
        return agree(ranks, lambda: stock(**named) if ranks.rank == 0 else None)

    return save_pretrained


def _check(state: dict[str, Any]) -> None:
    absent = [name for name, each in state.items() if each.is_meta]
    if absent:
        raise ValueError(
            f"save_pretrained: {len(absent)} parameters, {absent[0]} the first, have no values on this rank, as in a "
            "pipeline stage or before weights are loaded; shardfuse.save_pretrained(model, folder) writes stages"
        )


@torch.no_grad()
def _gathered(state: dict[str, Any], params: dict[str, Any], keep: bool) -> dict[str, torch.Tensor]:
    """The whole tensors, in host memory of the rank that may ``keep`` them; a parameter of two names is one tensor."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[Any, torch.Tensor] = {}  # by parameter: alike on all ranks, as what they hold of it may not be
    for name, each in state.items():
        param = params.get(name, each)
        if param not in seen:
            full = each.full_tensor() if isinstance(each, DTensor) else each
            seen[param] = full.detach().cpu() if keep else full.new_empty(0)
        whole[name] = seen[param]
    return whole if keep else {}


def _tell_who_is_missing(rank: int, size: int) -> None:
    """Log a warning if some rank has not called after PATIENCE: what follows would wait for it without a word."""
    _calls[0] += 1
    store = dist.PrefixStore(f"shardfuse.save_pretrained.{_calls[0]}", _get_default_store())
    store.set(str(rank), "here")
    until = time.monotonic() + PATIENCE
    missing = [each for each in range(size) if each != rank]
    while missing and time.monotonic() < until:
        missing = [each for each in missing if not store.check([str(each)])]
        if missing:
            time.sleep(0.01)
    if missing:
        _log.warning(
            "save_pretrained on rank %d has waited %.0f s for rank %s: every rank holds a part of the model, so every "
            "rank has to call it (rank 0 writes)",
            rank,
            PATIENCE,
            ", ".join(map(str, missing)),
        )
