"""Plain torch modules that the benchmarks compare with, named as ours so that state dicts fit both ways, and their
compilation.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.linear import apply_activation

Rope = tuple[torch.Tensor, torch.Tensor]


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> Rope:
    """(cos, sin) of ``positions`` [S], each [S, 1, H] fp32; the sine of the first half is negated."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[:, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(-2), torch.cat((-sin, sin), dim=-1).unsqueeze(-2)


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [B, S, heads, H] with element i of each head rotated together with element i + H/2: two passes of torch's."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


class StockMLP(nn.Module):
    """``c_proj(gelu(c_fc(x)))``, tanh form, [..., D] to [..., D]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, ffn)
        self.c_proj = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class StockGatedMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))`` without biases, [..., D] to [..., D].

    ``multiply`` replaces activation and product by a third-party kernel that does both.
    """

    def __init__(
        self, hidden: int, ffn: int, activation: str, multiply: Callable[..., torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.multiply = multiply
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.multiply is not None:
            return self.down_proj(self.multiply(gate, up))
        return self.down_proj(apply_activation(gate, self.activation) * up)


class StockAttention(nn.Module):
    """Causal attention with as many KV heads as query heads, x [B, S, D]; a parallel plan may split the heads."""

    def __init__(self, hidden: int, head_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, S, N/R, H]
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class StockBlock(nn.Module):
    """A pre-norm decoder block in Starcoder2's form, or ``gated`` in Llama's, x [B, S, D]."""

    def __init__(self, hidden: int, ffn: int, head_dim: int, *, gated: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.input_layernorm = norm(hidden, eps=1e-5)
        self.self_attn = StockAttention(hidden, head_dim, bias=not gated)
        self.post_attention_layernorm = norm(hidden, eps=1e-5)
        self.mlp = StockGatedMLP(hidden, ffn, "silu") if gated else StockMLP(hidden, ffn)

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
    """Forward and backward of ``module(x, **options)`` under the cotangent ``grad``; returns the output.

    Gradients are overwritten, not added. ``call`` replaces ``module`` in the forward pass, for example by its compiled
    form.
    """
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    y = (module if call is None else call)(x, **options)  # torch 2.11: a compiled module has no truth value
    y.backward(grad)
    return y.detach()


def liger_multiply(activation: str) -> Callable[..., torch.Tensor] | None:
    """Liger's kernel for activation(gate) * up; None if Liger is not installed or has no such kernel."""
    names = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
    if activation not in names or importlib.util.find_spec("liger_kernel") is None:
        return None
    module, function = names[activation]
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` for one row, as if the process had compiled nothing before.

    torch keeps a few compilations of a function and then silently runs it eagerly; here that raises an error.
    """
    torch._dynamo.reset()
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(call, dynamic=False, **options)
