"""The specification of ``linear_act``, in plain torch.

    y_i = act(x @ W_i^T + b_i)

x [..., D], W_i [F_i, D], b_i [F_i] or None, y_i [..., F_i].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

# gelu_erf is the exact x * Phi(x); gelu_tanh Hendrycks & Gimpel's approximation (arXiv:1606.08415, section 2).
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def apply_activation(z: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation`` applied to ``z``, any shape."""
    return ACTIVATIONS[activation](z)


def linear_act(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
) -> tuple[torch.Tensor, ...]:
    """One output [..., F_i] per weight [F_i, D]; differentiable by torch's own autograd."""
    return tuple(apply_activation(F.linear(x, w, b), activation) for w, b in zip(weights, biases))
