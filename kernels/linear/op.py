"""``linear_act``: the public function and its autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch.autograd.function import once_differentiable

from ..dispatch import Choice
from . import parts, schemas


@overload
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def linear_act(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor | None] | None = None,
    *,
    activation: str = "identity",
    impl: str = "auto",
) -> tuple[torch.Tensor, ...]: ...
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    activation: str = "identity",
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """act(x @ W^T + b), for one weight or for up to three weights on the same x in one launch.

    Args:
        x: [..., D] in bf16, fp16 or fp32, any strides. Other dtypes run the reference.
        weight: [F, D], or a sequence of [F_i, D] (q, k, v; gate, up). Same dtype as x, except under autocast.
        bias: [F] or None; with several weights a sequence of these, or None.
        activation: "identity", "relu", "gelu_erf", "gelu_tanh" or "silu".
        impl: "auto", "triton" or "reference"; see ``kernels/dispatch.py``.

    Returns:
        [..., F] in x's dtype, or a tuple of [..., F_i]. Products accumulate in fp32.

    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit.
        RuntimeError: impl="triton" where Triton cannot run.

    GeLU is Hendrycks & Gimpel's (arXiv:1606.08415). The backward saves x and, unless the activation is the identity,
    the pre-activation z; it forms dz = dy * act'(z) once, then dx = dz @ W and dW = dz^T @ x with db = sum_T dz in the
    same pass.
    """
    many = not isinstance(weight, torch.Tensor)
    weights = (weight,) if isinstance(weight, torch.Tensor) else tuple(weight)
    if isinstance(bias, torch.Tensor) or bias is None:
        biases: tuple[torch.Tensor | None, ...] = (bias,) * len(weights)
        if many and bias is not None:
            raise ValueError("linear_act: bias is one tensor but weight is a sequence; pass a bias or None for each")
    else:
        biases = tuple(bias)
    dtype, choice = parts.prepare(x, weights, biases, activation, impl)
    if choice.triton:
        outputs = _run_kernels(x, weights, biases, activation, dtype, choice)
    else:
        outputs = parts.reference_forward(x, weights, biases, activation)
    return outputs if many else outputs[0]


def _run_kernels(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    activation: str,
    dtype: torch.dtype,
    choice: Choice,
) -> tuple[torch.Tensor, ...]:
    # Under autocast these are casts (differentiable); otherwise they return their inputs.
    x = x.to(dtype)
    weights = tuple(w.to(dtype) for w in weights)
    biases = tuple(None if b is None else b.to(dtype) for b in biases)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights, *biases)):
        ys = _LinearAct.apply(activation, choice, len(weights), rows, *weights, *biases)
    else:
        ys = schemas.linear_act_fwd(rows, weights, biases, activation, False)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


class _LinearAct(torch.autograd.Function):
    """y_i = act(x @ W_i^T + b_i) on rows: x [T, D], W_i [F_i, D], b_i [F_i] or None, y_i [T, F_i]."""

    @staticmethod
    def forward(ctx: Any, activation: str, choice: Choice, n: int, x: torch.Tensor, *params: Any) -> Any:
        ys, zs = parts.forward(x, params[:n], params[n:], activation, choice)
        ctx.save_for_backward(x, *params[:n], *zs)
        ctx.activation, ctx.choice, ctx.n = activation, choice, n
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        n, choice = ctx.n, ctx.choice
        x, *rest = ctx.saved_tensors
        weights, zs = rest[:n], rest[n:]
        _, _, _, want_x, *want = ctx.needs_input_grad
        dzs = [parts.activation_grad(dy, z, ctx.activation, choice) for dy, z in zip(dys, zs)] if zs else list(dys)
        dx = parts.input_grad(dzs, weights, choice) if want_x else None
        dws, dbs = parts.param_grads(dzs, x, want[:n], want[n:], choice)
        return None, None, None, dx, *dws, *dbs
