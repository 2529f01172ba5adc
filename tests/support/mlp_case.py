"""The feed-forward layer and a stock one with the same parameters and arithmetic, and the results of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from products import PARAM_GRADS, around
from torch import nn

from shardfuse import ParallelMLP
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import apply_activation
from shardfuse.parallel.core.sharding import local_tensors, spec_of

T, D, FFN = 12, 16, 24
LEVELS = (0, 1, 2)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
LEVEL = pytest.mark.parametrize("level", LEVELS)


class Stock(nn.Module):
    """ParallelMLP's parameters and arithmetic, in torch's own ops."""

    def __init__(self, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        names = ("gate_proj", "up_proj", "down_proj") if gated else ("c_fc", "c_proj")
        for name in names:
            sizes = (FFN, D) if name == names[-1] else (D, FFN)
            setattr(self, name, nn.Linear(*sizes, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down_proj(apply_activation(self.gate_proj(x), self.activation) * self.up_proj(x))
        return self.c_proj(apply_activation(self.c_fc(x), self.activation))


def pair(gated: bool, *, bias: bool = True, activation: str | None = None, **options: Any) -> tuple[ParallelMLP, Stock]:
    """Both layers, with the same parameters."""
    torch.manual_seed(5)
    activation = activation or ("silu" if gated else "gelu_tanh")
    stock = Stock(gated, bias, activation)
    ours = ParallelMLP(D, FFN, gated=gated, bias=bias, activation=activation, **options)
    state = stock.state_dict()
    with torch.no_grad():
        for name, param in ours.named_parameters():
            local_tensors(param)[0].copy_(state[name][spec_of(param).index])
    return ours, stock


def run_with_grads(
    module: nn.Module, x: torch.Tensor, dy: torch.Tensor, context: Any = None
) -> dict[str, torch.Tensor]:
    """The output and all gradients, as plain tensors."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad()
    with context or nullcontext():
        y = module(x)
    if y.requires_grad:
        y.backward(dy.to(y.dtype))
    grads = {"x": x.grad} | {name: param.grad for name, param in module.named_parameters()}
    return {"y": y.detach()} | {
        name.removeprefix("_orig_mod."): local_tensors(grad)[0] for name, grad in grads.items() if grad is not None
    }


def verdicts(
    ours: dict[str, Any], low: dict[str, Any], oracle: dict[str, Any], cut: dict[str, Any] | None = None
) -> list[str]:
    """The failed comparisons. ``cut`` takes this rank's part of a whole tensor."""
    assert ours.keys() == low.keys() == oracle.keys(), (ours.keys(), low.keys())
    cut = cut or {}
    # Under autocast y has the precision of the computation.
    options: dict[str, Any] = {
        "terms": 2 * (D + FFN),
        "roundings": 4,
        "computed": ours["y"].dtype if "y" in ours else None,
    }
    found = [
        accuracy.judge(name, out, low[name][cut.get(name, ())], oracle[name][cut.get(name, ())], **options)
        for name, out in ours.items()
    ]
    return [str(verdict) for verdict in found if not verdict.ok]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the runs of each product in the block."""
    counts: Counter[str] = Counter()

    def noted(name: str, run: Any, of: Any) -> Any:
        if name == PARAM_GRADS:
            counts["weight gradient"] += sum(of[2])
            counts["bias gradient"] += sum(of[3])
        else:
            counts[name] += 1
        return run()

    with around(noted):
        yield counts
