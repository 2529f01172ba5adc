"""What the benchmarks compare with: plain torch modules, named as ours so that state dicts pass both ways; their
compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.rope import Rope, apply_rope


class StockMLP(nn.Module):
    """``c_proj(gelu(c_fc(x)))``, tanh form, [..., D] to [..., D]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, ffn)
        self.c_proj = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class StockAttention(nn.Module):
    """Causal attention with as many KV heads as query heads, x [B, S, D]; heads may be split by a parallel plan."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, S, N/R, H]
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class StockBlock(nn.Module):
    """A pre-norm decoder block in Starcoder2's form, x [B, S, D]."""

    def __init__(self, hidden: int, ffn: int, head_dim: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attn = StockAttention(hidden, head_dim)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.mlp = StockMLP(hidden, ffn)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


def training_step(
    module: nn.Module,
    x: torch.Tensor,
    grad: torch.Tensor,
    *,
    call: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Forward and backward of ``module(x, **options)`` under the cotangent ``grad``; the output.

    Gradients are written afresh, not added. ``call`` replaces ``module`` in the forward pass: its compiled form, say.
    """
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    y = (call or module)(x, **options)
    y.backward(grad)
    return y.detach()


def compiled(call: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    """``torch.compile`` for one row, as if the process had compiled nothing before.

    torch keeps a few compilations of a function and then silently runs it eagerly; here that is an error.
    """
    torch._dynamo.reset()
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(call, dynamic=False, **options)
