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


def activation_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dy * act'(z), outside autograd: the functions that torch's own backward calls."""
    if activation == "identity":
        return dy
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    return torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if activation == "gelu_tanh" else "none")


def linear_act(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
) -> tuple[torch.Tensor, ...]:
    """One output [..., F_i] per weight [F_i, D]; differentiable by torch's own autograd."""
    act = ACTIVATIONS[activation]
    return tuple([act(F.linear(x, w, b)) for w, b in zip(weights, biases)])
