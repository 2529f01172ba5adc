"""Layers for ``kernels.kernelize``: each gives its ``forward`` to the modules that transformers marks with its name.

``kernels`` takes classes without a constructor and without members of their own; a forward finds its parameters in the
module that it was given to, and has that module's signature. All of them have a backward, and compile.
"""

from __future__ import annotations

import torch
from torch import nn

from ...kernels.linear.op import gated_linear
from ...kernels.norm.op import rms_norm
from ...kernels.rope.op import apply_rope

__all__ = ["RMSNorm", "RMSNormZeroCentered", "SwiGLUMLP", "rotary_pos_emb"]


class RMSNorm(nn.Module):
    """Llama's norm. Its result is rounded once, to x's dtype; the stock one is rounded before the weight, too."""

    can_torch_compile = True
    has_backward = True
    weight: torch.Tensor  # [D]
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., D] -> [..., D]."""
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """The norm of Qwen3-Next and Qwen3.5, which multiplies by 1 + weight."""

    can_torch_compile = True
    has_backward = True
    weight: torch.Tensor  # [D]
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        return rms_norm(x, self.weight, eps=self.eps, weight_offset=1.0)


class SwiGLUMLP(nn.Module):
    """Llama's feed-forward: gate, up, SiLU and their product in one launch, then the module's own ``down_proj``.

    Hooks of ``gate_proj`` and ``up_proj`` do not run. ValueError for a module with another activation than SiLU.
    """

    can_torch_compile = True
    has_backward = True
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        if type(self.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise ValueError(
                f"SwiGLUMLP: the module's activation is {type(self.act_fn).__name__}, SiLU is expected; "
                "leave SwiGLUMLP out of this model's mapping"
            )
        gate, up = self.gate_proj, self.up_proj
        return self.down_proj(gated_linear(x, gate.weight, up.weight, gate.bias, up.bias))


class rotary_pos_emb(nn.Module):
    """``apply_rotary_pos_emb`` as Llama has it: pairs are i and i + H/2, and tables hold each angle twice.

    ValueError for tables of another width, as gpt-oss has them.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, N, S, H], k [B, K, S, H] by cos, sin [B, S, H]; with ``unsqueeze_dim=2`` q is [B, S, N, H]."""
        if cos.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"rotary_pos_emb: cos has {cos.shape[-1]} columns, {q.shape[-1]} are expected, a head's size; "
                "leave rotary_pos_emb out of this model's mapping"
            )
        cos, sin = (table[..., : table.shape[-1] // 2].float() for table in (cos, sin))
        if unsqueeze_dim == 2:
            return apply_rope(q, k, cos, sin)  # type: ignore[return-value]
        q, k = apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)  # type: ignore[assignment]
        return q.transpose(1, 2), k.transpose(1, 2)
