"""The steps of a linear layer by oneDNN, on CPUs: of each launch in ``launch.py`` a twin of its name and signature.

A residual leaves with the matrix product's result, and in inference so does an activation that oneDNN has, or the
product with the gate. It cannot store the pre-activation as well: in training the activation is a step of its own, also
where a forward that will be recomputed wants no gradients, so that both have the same bits. Backward's products read
transposed operands as they lie. Products without terms, which oneDNN refuses, are the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..runtime import onednn
from . import reference
from .reference import act_grad, apply_activation, gated_act_grad

__all__ = ["act_grad", "gated_act_grad"]  # no product in them

Tensors = Sequence[torch.Tensor]
Biases = Sequence["torch.Tensor | None"]


def linear_act_fwd(
    x: torch.Tensor,
    weights: Tensors,
    biases: Biases,
    residual: torch.Tensor | None,
    activation: str,
    save_preact: bool,
) -> list[torch.Tensor]:
    """y_i = act(z_i) [+ residual], then with ``save_preact`` the z_i = x @ W_i^T + b_i. Packed weights are used."""
    if not x.shape[1] or not all(map(len, weights)):
        return reference.linear_act_fwd(x, weights, biases, residual, activation, save_preact)
    fused = activation in onednn.POST_OPS and not save_preact and onednn.serves(weights[0])
    weights = [onednn.packed(w) for w in weights]
    if residual is not None and activation == "identity" and not save_preact:
        return [onednn.product_with(x, residual.contiguous(), weights[0], biases[0], "add")]
    zs = [onednn.product(x, w, b, activation if fused else "identity") for w, b in zip(weights, biases)]
    ys = zs if fused else [apply_activation(z, activation) for z in zs]
    if residual is not None:
        ys = [y + residual for y in ys]
    return ys + zs if save_preact else ys


def columns(x: torch.Tensor, weights: Tensors, biases: Biases, activation: str) -> list[torch.Tensor] | None:
    """y_i = act(x @ W_i^T + b_i) by one product, as columns of its result; None unless the W_i are packed together."""
    packed = onednn.packed_together(weights)
    if packed is None:
        return None
    sizes = [weight.shape[0] for weight in weights]
    fused = activation in onednn.POST_OPS
    y = onednn.product(x, packed, _side_by_side(biases, sizes, x), activation if fused else "identity")
    return list((y if fused else apply_activation(y, activation)).split(sizes, 1))


def _side_by_side(biases: Biases, sizes: Sequence[int], x: torch.Tensor) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([x.new_zeros(size) if bias is None else bias for bias, size in zip(biases, sizes)])


def gated_linear_fwd(
    x: torch.Tensor, weights: Tensors, biases: Biases, activation: str, save_preact: bool
) -> list[torch.Tensor]:
    """h = act(g) * u, then with ``save_preact`` g and u. Packed weights are used."""
    if not x.shape[1]:
        return reference.gated_linear_fwd(x, weights, biases, activation, save_preact)
    serves = onednn.serves(weights[0])
    gate, up = [onednn.packed(w) for w in weights]
    if save_preact or not serves:
        g, u = onednn.product(x, gate, biases[0]), onednn.product(x, up, biases[1])
        h = g * u if activation == "identity" else apply_activation(g, activation).mul_(u)
        return [h, g, u] if save_preact else [h]
    fused = activation in onednn.POST_OPS
    a = onednn.product(x, gate, biases[0], activation if fused else "identity")
    a = a if fused else apply_activation(a, activation)
    return [onednn.product_with(x, a, up, biases[1], "mul")]


def linear_dgrad(dzs: Tensors, weights: Tensors) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i."""
    dx = _dgrad(dzs[0], weights[0])
    for dz, w in zip(dzs[1:], weights[1:]):
        if dz.shape[1]:
            dx = onednn.product_with(dz.contiguous(), dx, w.t(), None, "add")
    return dx


def linear_dgrad_act(
    dy: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, activation: str, recompute_act: bool
) -> list[torch.Tensor]:
    """dz = (dy @ W) * act'(z), then with ``recompute_act`` h = act(z)."""
    dz = act_grad(_dgrad(dy, weight), z, activation)
    return [dz, apply_activation(z, activation)] if recompute_act else [dz]


def linear_dgrad_gated(
    dy: torch.Tensor, weight: torch.Tensor, g: torch.Tensor, u: torch.Tensor, activation: str, recompute_act: bool
) -> list[torch.Tensor]:
    """With dh = dy @ W: dg = dh * u * act'(g), du = dh * act(g), then with ``recompute_act`` h = act(g) * u."""
    dg, du = gated_act_grad(_dgrad(dy, weight), g, u, activation)
    return [dg, du, apply_activation(g, activation) * u] if recompute_act else [dg, du]


def linear_wgrad(dzs: Tensors, x: torch.Tensor, want_bias: Sequence[bool]) -> list[torch.Tensor]:
    """dW_i = dz_i^T @ x and then, where wanted, db_i = sum_T dz_i."""
    if not len(x) or not all(dz.shape[1] for dz in dzs):
        return reference.linear_wgrad(dzs, x, want_bias)
    dws = [onednn.product(dz.t(), x.t()) for dz in dzs]
    return dws + [dz.sum(0) for dz, want in zip(dzs, want_bias) if want]


def linear_wgrad_(dzs: Tensors, x: torch.Tensor, dws: Tensors, dbs: Biases) -> None:
    """The same, added to what the buffers ``dws`` and ``dbs`` hold, in their own precision."""
    for dz, dw, db in zip(dzs, dws, dbs):
        dw.add_(*linear_wgrad([dz], x, [False]))
        if db is not None:
            db.add_(dz.sum(0, dtype=db.dtype))


def _dgrad(dz: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return onednn.product(dz, weight.t()) if dz.shape[1] else dz @ weight
