"""Shared by tests of the cross-entropy: operands, and a model's own loss, both with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from products import around

T, D, V = 19, 8, 45
EVERY: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 3.0}
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]


def leaves(dtype: torch.dtype = torch.float32, *, bias: bool = True, rows: int = T) -> list[Any]:
    found = [torch.randn(rows, D), torch.randn(V, D), torch.randn(V)]
    return [t.to(dtype).requires_grad_() for t in found[: 2 + bias]] + [None] * (not bias)


def draw_targets(rows: int = T) -> torch.Tensor:
    targets = torch.randint(V, (rows,))
    targets[::5] = -100
    return targets


def eager(hidden, weight, targets, bias=None, **options):
    """A model's own loss: F.linear, F.cross_entropy, and the extra terms by hand."""
    return eager_loss(F.linear(hidden, weight, bias), targets, **options)


def eager_loss(z, targets, *, reduction="mean", softcap=None, z_loss=0.0, ignore_index=-100, **smoothing):
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, targets, reduction=reduction, ignore_index=ignore_index, **smoothing)
    if z_loss:
        counts = targets != ignore_index
        extra = z_loss * z.logsumexp(1).square() * counts
        loss = loss + {"none": extra, "sum": extra.sum(), "mean": extra.sum() / counts.sum()}[reduction]
    return loss


def with_grads(call, tensors, targets, gain, **options) -> dict[str, torch.Tensor]:
    hidden, weight, bias = tensors
    loss = call(hidden, weight, targets, bias, **options)
    named = {name: t for name, t in zip(("dhidden", "dweight", "dbias"), tensors) if t is not None and t.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), gain.to(loss.dtype))
    return {"loss": loss.detach()} | dict(zip(named, grads))


def gain_for(reduction: str, rows: int = T) -> torch.Tensor:
    """The incoming gradient; its rows differ where possible."""
    return torch.rand(rows) if reduction == "none" else torch.tensor(2.5)


def double(tensors):
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def count_products(request) -> dict[str, int]:
    """Count the runs of each step of a linear layer."""
    counts = dict.fromkeys(("forward", "input_grad", "param_grads"), 0)

    def counted(name, run, of):
        counts[name] += 1
        return run()

    watched = around(counted)
    watched.__enter__()
    request.addfinalizer(lambda: watched.__exit__(None, None, None))
    return counts
