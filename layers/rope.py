"""Rotary position embedding, half-rotation form.

Su et al., "RoFormer" (arXiv:2104.09864), section 3.4, with the pairing of GPT-NeoX, Llama and Starcoder2: element i
of a head is rotated together with element i + H/2, by the angle position * theta^(-2i/H).

The tables are computed from the positions in every forward, once for all layers, and kept nowhere: there is no buffer
that ``model.bfloat16()`` could round, that ``to_empty`` could leave unset, or that a longer prompt could outgrow.
"""

from __future__ import annotations

import torch

Rope = tuple[torch.Tensor, torch.Tensor]


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> Rope:
    """(cos, sin), each [..., 1, H] fp32, for integer ``positions`` [...].

    fp32 whatever the model's precision: it is what the models that we exchange weights with compute. The sine of the
    first half is negated, so that the rotation is ``x * cos + roll(x, H/2) * sin``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32)[..., None] * (1.0 / theta**exponents)  # [..., H/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).unsqueeze(-2), torch.cat((-sin, sin), dim=-1).unsqueeze(-2)


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``x`` [T, heads, H] with every head rotated, in x's dtype; the arithmetic is fp32 or x's, whichever is wider."""
    cos, sin = rope
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
