"""Calls of Llama's modules on one token, fused and stock, and of our own: so small that only the host's part of a GPU's
work counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from foreign import foreign
from torch import nn

from shardfuse import ParallelMLP
from shardfuse.kernels.linear import linear_act
from shardfuse.layers.fuse import fuse
from shardfuse.layers.fuse.matchers import rotary

Call = Callable[[], Any]
WIDTH, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8  # foreign.py's


def calls() -> Iterator[tuple[str, Call, Call]]:
    """("mlp, forward + backward", the fused module's call, the stock module's)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    stock: Any = foreign("llama").train()
    fused: Any = fuse(copy.deepcopy(stock))
    x = torch.randn(1, 1, WIDTH)
    tables = stock.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long))
    options = {"position_embeddings": tables, "attention_mask": None}
    parts: dict[str, Callable[[Any], nn.Module]] = {
        "norm": lambda model: model.model.norm,
        "mlp": lambda model: model.model.layers[0].mlp,
        "attention": lambda model: model.model.layers[0].self_attn,
        "decoder layer": lambda model: model.model.layers[0],
    }
    for name, part in parts.items():
        given = options if name in ("attention", "decoder layer") else {}
        sides = [_ways(part(model), list(part(model).parameters()), x, given) for model in (fused, stock)]
        yield from ((f"{name}, {way}", sides[0][way], sides[1][way]) for way in sides[0])
    q, k = torch.randn(1, HEADS, 1, HEAD), torch.randn(1, KV_HEADS, 1, HEAD)
    rotate = rotary.ours(apply_rotary_pos_emb)
    assert rotate is not None
    rotations = [_ways(lambda q, f=f: f(q, k, *tables), [], q, {}) for f in (rotate, apply_rotary_pos_emb)]
    yield from ((f"rotary positions, {way}", rotations[0][way], rotations[1][way]) for way in rotations[0])
    yield from _own(x)


def _own(x: torch.Tensor) -> Iterator[tuple[str, Call, Call]]:
    """The op, and the module in one process, against torch's functions and modules."""
    weight, bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
    sides: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: linear_act(x, weight, bias, activation="gelu_tanh"),
        lambda x: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
    ]
    ours, stock = (_ways(side, [weight, bias], x, {}) for side in sides)
    yield from ((f"linear_act, {way}", ours[way], stock[way]) for way in ("without gradients", "forward"))
    mlp = ParallelMLP(WIDTH, 2 * WIDTH)
    plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU("tanh"), nn.Linear(2 * WIDTH, WIDTH))
    ours, stock = (_ways(module, list(module.parameters()), x, {}) for module in (mlp, plain))
    yield "ParallelMLP, forward", ours["forward"], stock["forward"]


def _ways(
    run: Callable[..., Any], params: list[torch.Tensor], x: torch.Tensor, given: dict[str, Any]
) -> dict[str, Call]:
    leaf = x.clone().requires_grad_()

    def result(x: torch.Tensor) -> torch.Tensor:
        y = run(x, **given)
        return y[0] if isinstance(y, tuple) else y

    def step() -> None:
        y = result(leaf)
        y.backward(torch.ones_like(y))
        for each in (leaf, *params):
            each.grad = None

    return {
        "without gradients": torch.no_grad()(lambda: result(x)),
        "forward": lambda: result(leaf),
        "forward + backward": step,
    }
