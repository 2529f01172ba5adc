"""The specification of the ops in this folder, in plain torch.

    linear_act     y_i = act(x @ W_i^T + b_i) [+ residual]
    gated_linear   h = act(g) * u,  g = x @ W_g^T + b_g,  u = x @ W_u^T + b_u

x [..., D], W_i [F_i, D], b_i [F_i] or None, y_i [..., F_i]; residual, g, u, h [..., F]. Below them stands a twin, of
the same name and signature, of each launch in ``launch.py``: what torch's own autograd computes, as functions of what
forward saved.
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


def act_grad(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
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


def gated_act_grad(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of h = act(g) * u: dg = dh * u * act'(g), du = dh * act(g)."""
    return act_grad(dh * u, g, activation), dh * apply_activation(g, activation)


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


def linear_act_fwd(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
    activation: str,
    save_preact: bool,
) -> list[torch.Tensor]:
    """y_i = act(z_i) [+ residual], then with ``save_preact`` the z_i = x @ W_i^T + b_i."""
    zs = [F.linear(x, w, b) for w, b in zip(weights, biases)]
    ys = [apply_activation(z, activation) for z in zs]
    if residual is not None:
        ys = [y + residual for y in ys]
    return ys + zs if save_preact else ys


def gated_linear_fwd(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    save_preact: bool,
) -> list[torch.Tensor]:
    """h = act(g) * u, then with ``save_preact`` g and u."""
    g, u = (F.linear(x, w, b) for w, b in zip(weights, biases))
    h = apply_activation(g, activation) * u
    return [h, g, u] if save_preact else [h]


def linear_dgrad(dzs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i."""
    dx = dzs[0] @ weights[0]
    for dz, w in zip(dzs[1:], weights[1:]):
        dx.addmm_(dz, w)
    return dx


def linear_dgrad_act(
    dy: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, activation: str, recompute_act: bool
) -> list[torch.Tensor]:
    """dz = (dy @ W) * act'(z), then with ``recompute_act`` h = act(z)."""
    dz = act_grad(dy @ weight, z, activation)
    return [dz, apply_activation(z, activation)] if recompute_act else [dz]


def linear_dgrad_gated(
    dy: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str, recompute_act: bool
) -> list[torch.Tensor]:
    """With dh = dy @ W: dg = dh * u * act'(g), du = dh * act(g), then with ``recompute_act`` h = act(g) * u."""
    dg, du = gated_act_grad(dy @ weight, g, u, activation)
    return [dg, du, apply_activation(g, activation) * u] if recompute_act else [dg, du]


def linear_wgrad(dzs: Sequence[torch.Tensor], x: torch.Tensor, want_bias: Sequence[bool]) -> list[torch.Tensor]:
    """dW_i = dz_i^T @ x and then, where wanted, db_i = sum_T dz_i."""
    dws = [dz.t() @ x for dz in dzs]
    return dws + [dz.sum(0) for dz, want in zip(dzs, want_bias) if want]
