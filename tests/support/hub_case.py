"""A build for the kernel hub: loading one without the package ``kernels``, and calls of all that it computes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def load(folder: Path) -> ModuleType:
    """Import a build as ``kernels`` does: under its id, from wherever it lies."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def rms_norm(api: Any, impl: str) -> list[torch.Tensor]:
    x, residual, weight = _leaves((5, 48), (5, 48), (48,))
    return _with_grads(api.rms_norm(x, weight, residual=residual, impl=impl), x, residual, weight)


def layer_norm(api: Any, impl: str) -> list[torch.Tensor]:
    x, weight, bias = _leaves((5, 48), (48,), (48,))
    return _with_grads([api.layer_norm(x, weight, bias, impl=impl)], x, weight, bias)


def apply_rope(api: Any, impl: str) -> list[torch.Tensor]:
    q, k, angles = _leaves((2, 7, 4, 16), (2, 7, 2, 16), (7, 8))
    angles = angles.detach()
    return _with_grads(api.apply_rope(q, k, angles.cos(), angles.sin(), impl=impl), q, k)


def gated_linear(api: Any, impl: str) -> list[torch.Tensor]:
    x, gate, up = _leaves((5, 48), (32, 48), (32, 48))
    return _with_grads([api.gated_linear(x, gate, up, impl=impl)], x, gate, up)


def linear_act(api: Any, impl: str) -> list[torch.Tensor]:
    x, weight, bias = _leaves((5, 48), (32, 48), (32,))
    return _with_grads([api.linear_act(x, weight, bias, activation="gelu_tanh", impl=impl)], x, weight, bias)


def attention(api: Any, impl: str) -> list[torch.Tensor]:
    """Two sequences of 5 and 3 tokens: both writes, and attention over their pages, with and without a plan."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, heads, 16, generator=draw) for heads in (4, 2, 2))
    cache = torch.zeros(4, 2, 4, 32)
    tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    lens, starts = torch.tensor([5, 3], dtype=torch.int32), torch.tensor([0, 5, 8], dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 0, 4, 5, 6])
    api.write_kv_(cache, k, v, slots, impl=impl)
    first = api.paged_attention(q, cache, tables, lens, starts, window=3, impl=impl)
    angles = torch.rand(8, 8, generator=draw)
    turned = api.norm_rope_write_kv_(q, k, v, cache, slots, cos=angles.cos(), sin=angles.sin(), impl=impl)
    plan = api.plan_attention(turned, cache, tables, lens, starts, impl=impl)
    return [first, turned, cache, api.paged_attention(turned, cache, tables, lens, starts, plan=plan, impl=impl)]


CALLS: dict[str, Callable[[Any, str], list[torch.Tensor]]] = {
    each.__name__: each for each in (rms_norm, layer_norm, apply_rope, gated_linear, linear_act, attention)
}


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def _with_grads(results: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    total = sum((result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum() for result in results)
    return [*(result.detach() for result in results), *torch.autograd.grad(total, leaves)]
