"""The cost of a pipeline stage's passes, for :mod:`timeline`, measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from ...kernels.runtime import autograd
from .partition import Divisible
from .timeline import Costs


def measured(stage: nn.Module, x: torch.Tensor, *, split: bool = True, rounds: int = 5, **options: Any) -> Costs:
    """Seconds of ``stage``'s passes over ``x``: medians of ``rounds``.

    ``stage`` maps a tensor, and ``options``, to a floating-point one. With ``split`` backward is split as torch's
    pipelines split it; otherwise it runs in one pass and counts as the gradient of the input. With tokens as ``x``,
    ``stage`` is a pipeline's first stage, which sends no gradient: torch runs its whole backward as the weights' pass.
    The parameters' gradients do not change. If parameters are sharded over ranks, all of them call this together.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected at least 1")
    grads = [(each, each.grad) for each in stage.parameters()]
    try:
        with autograd.split_backward(split):
            times = [_passes(stage, x, split, options) for _ in range(rounds + 1)][1:]  # the first compiles
    finally:
        for param, grad in grads:
            param.grad = grad
    return Costs(*(median(each) for each in zip(*times)))


def measured_parts(
    model: Divisible, tokens: torch.Tensor, targets: torch.Tensor, *, split: bool = True, rounds: int = 5
) -> list[Costs]:
    """:func:`measured` of each part of a whole ``model``, for a micro-batch [B, S] of ``tokens`` and ``targets``.

    Activations are in the dtype of the parameters.
    """
    device = next(cast(nn.Module, model).parameters()).device
    between = model.boundary(*tokens.shape)
    found = []
    for index in range(len(model.pipeline_parts())):
        stage = model.stage(range(index, index + 1))
        x = tokens if index == 0 else torch.randn_like(between, device=device)
        found.append(measured(stage, x, split=split, rounds=rounds, targets=targets, batch_size=len(tokens)))
    return found


def joined(parts: Sequence[Costs], *, first: bool) -> Costs:
    """The cost of a stage of these ``parts``; ``first`` for the first stage of a model (see :func:`measured`)."""
    forward = sum(part.forward for part in parts)
    backward, weight = sum(part.backward for part in parts), sum(part.weight for part in parts)
    return Costs(forward, 0.0, backward + weight) if first else Costs(forward, backward, weight)


def slowest(ranks: Sequence[Costs]) -> Costs:
    """The cost of each pass on the rank where that pass is slowest."""
    return Costs(*(max(getattr(each, name) for each in ranks) for name in ("forward", "backward", "weight")))


def _passes(stage: nn.Module, x: torch.Tensor, split: bool, options: Mapping[str, Any]) -> Sequence[float]:
    stage.zero_grad(set_to_none=True)
    if not x.is_floating_point():
        forward, y = _seconds(x, lambda: stage(x, **options))
        weight, _ = _seconds(x, lambda: torch.autograd.backward(y, torch.ones_like(y)))
        return forward, 0.0, weight
    x = x.detach().requires_grad_()
    forward, y = _seconds(x, lambda: stage(x, **options))
    dy = torch.ones_like(y)
    if not split:
        backward, _ = _seconds(x, lambda: torch.autograd.backward(y, dy))
        return forward, backward, 0.0
    from .split_backward import stage_backward_input, stage_backward_weight

    backward, (_, groups) = _seconds(x, lambda: stage_backward_input([y], [dy], [x], stage.parameters()))
    weight, _ = _seconds(x, lambda: stage_backward_weight(stage.parameters(), groups))
    return forward, backward, weight


def _seconds(x: torch.Tensor, work: Callable[[], Any]) -> tuple[float, Any]:
    """The time that ``work`` takes on x's device, and its result."""
    _finish(x.device)
    start = time.perf_counter()
    result = work()
    _finish(x.device)
    return time.perf_counter() - start, result


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
