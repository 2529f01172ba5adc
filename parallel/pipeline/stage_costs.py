"""The cost of a pipeline stage's passes, for :mod:`timeline`: modelled for a chip, or measured on this machine.

The model covers a decoder block's products (``kernels/runtime/cost.py``, in the configurations that would run) and its
causal attention, 2 T S N H FLOPs at the chip's dense peak: half of the full 4. Attention's backward takes 2.5 times its
forward, with five products instead of two (Dao, "FlashAttention-2", arXiv:2307.08691), none of them for weights: so the
gradient of the input costs more than those of the weights, and zero-bubble schedules keep some bubbles. The model
ignores norms, communication and overlap.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from ...kernels.dev import shapes
from ...kernels.linear.config import pick_config
from ...kernels.linear.gemm import Gemm
from ...kernels.runtime import autograd, cost
from ...kernels.runtime.chips import CHIPS
from ...kernels.runtime.names import expected
from .partition import Divisible
from .timeline import Costs

ATTENTION_BACKWARD = 2.5


def modelled(model: str, tokens: int, *, length: int, tp: int = 1, arch: str = "sm_90") -> Costs:
    """Microseconds of one block of ``model`` for a micro-batch of ``tokens`` in sequences of ``length``, in bf16.

    ``model`` is one of ``kernels/dev/shapes.py``, over ``tp`` ranks; ``arch`` a chip of ``kernels/runtime/chips.py``.
    Raises ValueError for an unknown model or chip, and for sizes that do not divide.
    """
    if model not in shapes.MODELS:
        raise ValueError(f"model={model!r}: {expected(model, shapes.MODELS)}")
    if arch not in CHIPS:
        raise ValueError(f"target={arch!r}: {expected(arch, CHIPS)}")
    if tokens < 1 or length < 1 or tokens % length:
        raise ValueError(f"tokens={tokens} are not a whole number of sequences of length={length}")
    sizes = shapes.MODELS[model]
    if tp < 1 or sizes.N % tp or sizes.K % tp or sizes.F % tp:
        raise ValueError(f"tp={tp}: {model} has {sizes.N} heads and {sizes.K} KV heads, which do not divide by it")
    kinds = ("qkv", "o", shapes.GATE_UP if sizes.gated else "up", "down")
    products = [shapes.projection(model, kind, tp, tokens) for kind in kinds]

    def total(layout: str) -> float:
        return sum(product_us(arch, layout, tokens, each.F, each.D) for each in products)

    flops = 2 * tokens * length * (sizes.N // tp) * sizes.H
    attention = flops / CHIPS[arch].flops["bf16"] * 1e6
    return Costs(total("nt") + attention, total("nn") + ATTENTION_BACKWARD * attention, total("tn"))


@functools.lru_cache(16384)
def product_us(arch: str, layout: str, T: int, F: int, D: int) -> float:
    """The chip model's time in bf16 of x @ W^T ("nt"), dz @ W ("nn") or dz^T @ x ("tn") of x [T, D] and W [F, D]."""
    M, N, K = {"nt": (T, F, D), "nn": (T, D, F), "tn": (F, D, T)}[layout]
    gemm = Gemm(layout, M, N, K, torch.bfloat16, torch.bfloat16)
    return cost.predict(CHIPS[arch], gemm, pick_config(arch, gemm)).time_us


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
