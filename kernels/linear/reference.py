"""The specification of the ops in this folder, in plain torch.

    linear_act     y_i = act(x @ W_i^T + b_i) [+ residual]
    gated_linear   h = act(g) * u,  g = x @ W_g^T + b_g,  u = x @ W_u^T + b_u

x [..., D], W_i [F_i, D], b_i [F_i] or None, y_i [..., F_i]; residual, g, u, h [..., F]. With them the gradients that
backward forms by hand: what torch's own autograd computes, as functions of what forward saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F


def _squared_relu(z: torch.Tensor) -> torch.Tensor:
    return F.relu(z).square()


def _quick_gelu(z: torch.Tensor) -> torch.Tensor:
    return z * torch.sigmoid(_QUICK * z)


_QUICK = 1.702

# gelu_erf is the exact x * Phi(x); gelu_tanh and quick_gelu are Hendrycks & Gimpel's approximations of it
# (arXiv:1606.08415, section 2); squared_relu is So et al.'s (arXiv:2109.08668, section 3).
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda z: z,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
}


def apply_activation(z: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation`` applied to ``z``, any shape."""
    return ACTIVATIONS[activation](z)


def activation_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dy * act'(z), outside autograd: the functions that torch's own backward calls, where it has one."""
    if activation == "identity":
        return dy
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dy, z, 0)
    if activation == "squared_relu":
        return dy * F.relu(z).mul_(2)
    if activation == "quick_gelu":  # z * sigmoid(a z) = silu(a z) / a
        return torch.ops.aten.silu_backward(dy, z * _QUICK)
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, z)
    return torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_activation_grad(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of h = act(g) * u: dg = dh * u * act'(g), du = dh * act(g)."""
    return activation_grad(dh * u, g, activation), dh * apply_activation(g, activation)


def linear_act(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """One output [..., F_i] per weight [F_i, D]; differentiable by torch's own autograd."""
    act = ACTIVATIONS[activation]
    ys = tuple([act(F.linear(x, w, b)) for w, b in zip(weights, biases)])
    return ys if residual is None else tuple([y + residual for y in ys])


def gated_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], activation: str
) -> torch.Tensor:
    """act(g) * u [..., F] of the gate and up weights [F, D]; differentiable by torch's own autograd."""
    g, u = (F.linear(x, w, b) for w, b in zip(weights, biases))
    return ACTIVATIONS[activation](g) * u
