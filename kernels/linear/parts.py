"""``linear_act`` taken apart, for callers that put a collective between its steps.

Plain functions on rows, outside autograd: x [T, D], W_i [F_i, D], b_i [F_i] or None, z_i and dz_i [T, F_i]. ``choice``
comes from :func:`linear_act_choice`, once for all steps of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dispatch
from ..dispatch import Choice
from . import reference, schemas
from .reference import ACTIVATIONS

Tensors = Sequence[torch.Tensor]

MAX_WEIGHTS = 3
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear_act_choice(dtype: torch.dtype, device: torch.device, impl: str = "auto") -> Choice:
    """Which implementation ``linear_act`` takes for operands of ``dtype`` on ``device``, and why."""
    unsupported = None if dtype in _KERNEL_DTYPES else f"{dtype} has no kernel (bf16, fp16 and fp32 have)"
    return dispatch.choose("linear_act", device, impl, unsupported=unsupported)


def check(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], activation: str
) -> torch.dtype:
    """The dtype to compute in: autocast's, or the one that all operands have; ValueError for what does not fit."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear_act: activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"linear_act: {len(weights)} weights given: expected 1 to {MAX_WEIGHTS} in one call")
    if len(biases) != len(weights):
        raise ValueError(f"linear_act: {len(biases)} biases for {len(weights)} weights: pass a bias or None for each")
    if x.dim() == 0:
        raise ValueError("linear_act: x is a scalar: expected [..., D]")
    for i, (w, b) in enumerate(zip(weights, biases)):
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(
                f"linear_act: weight {i} has shape {tuple(w.shape)} but x has {tuple(x.shape)}: "
                f"expected [F, {x.shape[-1]}] (as nn.Linear stores it)"
            )
        if b is not None and b.shape != w.shape[:1]:
            raise ValueError(f"linear_act: bias {i} has shape {tuple(b.shape)}: expected [{w.shape[0]}]")
        if w.device != x.device or (b is not None and b.device != x.device):
            raise ValueError(f"linear_act: x is on {x.device} but weight or bias {i} is elsewhere; move them together")
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    if any(t is not None and t.dtype != x.dtype for t in (*weights, *biases)):
        given = ", ".join(str(t.dtype) for t in (*weights, *biases) if t is not None)
        raise ValueError(f"linear_act: x is {x.dtype} but weights and biases are {given}; cast them to one dtype")
    return x.dtype


def prepare(
    x: torch.Tensor, weights: Tensors, biases: Sequence[torch.Tensor | None], activation: str, impl: str
) -> tuple[torch.dtype, Choice]:
    """Check and count one call as ``linear_act`` does: the dtype to cast its operands to, and what runs.

    Kernels trust their operands, so all is checked for them. Torch checks its own: for the reference, only what it
    would let pass is looked at here, and :func:`check` explains afterwards what it refused.
    """
    device = x.device
    dtype = x.dtype
    autocast = torch.is_autocast_enabled(device.type)
    if autocast:
        dtype = torch.get_autocast_dtype(device.type)
    choice = linear_act_choice(dtype, device, impl)
    trusted = not autocast and not choice.triton and not torch.compiler.is_compiling() and activation in ACTIVATIONS
    if not trusted or not _torch_would_notice(x, weights, biases):
        check(x, weights, biases, activation)
    dispatch.count("linear_act", choice.impl)
    return dtype, choice


def _torch_would_notice(x: torch.Tensor, weights: Tensors, biases: Sequence[torch.Tensor | None]) -> bool:
    """False for what F.linear takes and :func:`check` does not: vectors for weights, biases to broadcast, devices."""
    if not 0 < len(weights) == len(biases) <= MAX_WEIGHTS:
        return False
    for w, b in zip(weights, biases):
        if w.dim() != 2 or w.device != x.device or (b is not None and b.shape != w.shape[:1]):
            return False
    return True


def reference_forward(
    x: torch.Tensor, weights: Tensors, biases: Sequence[torch.Tensor | None], activation: str
) -> tuple[torch.Tensor, ...]:
    """``reference.linear_act``, whose errors speak of the caller's arguments."""
    try:
        return reference.linear_act(x, weights, biases, activation)
    except (RuntimeError, KeyError):
        check(x, weights, biases, activation)
        raise


def forward(
    x: torch.Tensor, weights: Tensors, biases: Sequence[torch.Tensor | None], activation: str, choice: Choice
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """y_i = act(z_i), z_i = x @ W_i^T + b_i: (ys, zs); no zs for the identity, whose backward needs none."""
    n = len(weights)
    if choice.triton:
        out = schemas.linear_act_fwd(x, weights, biases, activation, activation != "identity")
        return list(out[:n]), list(out[n:])
    zs = list(reference_forward(x, weights, biases, "identity"))
    if activation == "identity":
        return zs, []
    return [reference.apply_activation(z, activation) for z in zs], zs


def activation_grad(dy: torch.Tensor, z: torch.Tensor, activation: str, choice: Choice) -> torch.Tensor:
    """dz = dy * act'(z)."""
    if choice.triton:
        return schemas.act_grad(dy, z, activation)
    return reference.activation_grad(dy, z, activation)


def input_grad(dzs: Tensors, weights: Tensors, choice: Choice) -> torch.Tensor:
    """dx = sum_i dz_i @ W_i, [T, D]."""
    if choice.triton:
        return schemas.linear_dgrad(dzs, weights)
    dx = dzs[0] @ weights[0]
    for dz, w in zip(dzs[1:], weights[1:]):
        dx.addmm_(dz, w)
    return dx


def param_grads(
    dzs: Tensors, x: torch.Tensor, want_weight: Sequence[bool], want_bias: Sequence[bool], choice: Choice
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """dW_i = dz_i^T @ x and db_i = sum_T dz_i, None where not wanted."""
    n = len(dzs)
    dws: list[torch.Tensor | None] = [None] * n
    dbs: list[torch.Tensor | None] = [None] * n
    chosen = [i for i in range(n) if want_weight[i]]
    if choice.triton and chosen:  # one launch, in which a bias rides along with its weight
        grads = schemas.linear_wgrad([dzs[i] for i in chosen], x, [want_bias[i] for i in chosen])
        sums = iter(grads[len(chosen) :])
        for i, dw in zip(chosen, grads):
            dws[i], dbs[i] = dw, next(sums) if want_bias[i] else None
    else:
        for i in chosen:
            dws[i] = dzs[i].t() @ x
    for i in range(n):
        if want_bias[i] and dbs[i] is None:
            dbs[i] = dzs[i].sum(0)
    return dws, dbs
