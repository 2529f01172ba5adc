"""``linear_act``: validation, schemas, shape functions and autograd around the kernels and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from .. import dispatch, library
from . import reference
from .reference import ACTIVATIONS

MAX_WEIGHTS = 3
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    _validate(x, weights, biases, activation)

    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    else:
        dtype = x.dtype
        if any(t is not None and t.dtype != dtype for t in (*weights, *biases)):
            given = ", ".join(str(t.dtype) for t in (*weights, *biases) if t is not None)
            raise ValueError(f"linear_act: x is {x.dtype} but weights and biases are {given}; cast them to one dtype")
    choice = linear_act_choice(dtype, x.device, impl)
    dispatch.count("linear_act", choice.impl)
    if choice.triton:
        outputs = _run_kernels(x, weights, biases, activation, dtype)
    else:
        outputs = reference.linear_act(x, weights, biases, activation)
    return outputs if many else outputs[0]


def linear_act_choice(dtype: torch.dtype, device: torch.device, impl: str = "auto") -> dispatch.Choice:
    """Which implementation ``linear_act`` takes for operands of ``dtype`` on ``device``, and why."""
    unsupported = None if dtype in _KERNEL_DTYPES else f"{dtype} has no kernel (bf16, fp16 and fp32 have)"
    return dispatch.choose("linear_act", device, impl, unsupported=unsupported)


def _validate(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor | None, ...], activation: str
) -> None:
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


def _run_kernels(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    activation: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    # Under autocast these are casts (differentiable); otherwise they return their inputs.
    x = x.to(dtype)
    weights = tuple(w.to(dtype) for w in weights)
    biases = tuple(None if b is None else b.to(dtype) for b in biases)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights, *biases)):
        ys = _LinearAct.apply(activation, len(weights), rows, *weights, *biases)
    else:
        ys = linear_act_fwd(rows, weights, biases, activation, False)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys)


class _LinearAct(torch.autograd.Function):
    """y_i = act(x @ W_i^T + b_i) on rows: x [T, D], W_i [F_i, D], b_i [F_i] or None, y_i [T, F_i]."""

    @staticmethod
    def forward(ctx: Any, activation: str, n: int, x: torch.Tensor, *params: torch.Tensor | None) -> Any:
        weights, biases = params[:n], params[n:]
        save_preact = activation != "identity"
        out = linear_act_fwd(x, weights, biases, activation, save_preact)
        ctx.save_for_backward(x, *weights, *out[n:])
        ctx.activation, ctx.n = activation, n
        return tuple(out[:n])

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        n = ctx.n
        x, *rest = ctx.saved_tensors
        weights, preacts = rest[:n], rest[n:]
        want_x, want_w, want_b = ctx.needs_input_grad[2], ctx.needs_input_grad[3 : 3 + n], ctx.needs_input_grad[3 + n :]

        dzs = [act_grad(dy, z, ctx.activation) for dy, z in zip(dys, preacts)] if preacts else list(dys)
        dx = linear_dgrad(dzs, weights) if want_x else None
        dws: list[torch.Tensor | None] = [None] * n
        dbs: list[torch.Tensor | None] = [None] * n
        # Weights that want a gradient share one launch; a bias rides along with its weight, or is a plain sum.
        chosen = [i for i in range(n) if want_w[i]]
        if chosen:
            grads = linear_wgrad([dzs[i] for i in chosen], x, [want_b[i] for i in chosen])
            extra = iter(grads[len(chosen) :])
            for i, dw in zip(chosen, grads):
                dws[i] = dw
                dbs[i] = next(extra) if want_b[i] else None
        for i in range(n):
            if want_b[i] and not want_w[i]:
                dbs[i] = dzs[i].sum(0)
        return None, None, dx, *dws, *dbs


# ------------------------------------------------------------------------------------------------------- schemas


def _fwd_kernel(x: Any, weights: Any, biases: Any, activation: str, save_preact: bool) -> list[torch.Tensor]:
    from . import launch

    ys, zs = launch.linear_act_fwd(x, tuple(weights), tuple(biases), activation, save_preact)
    return ys + zs


def _fwd_fake(x: Any, weights: Any, biases: Any, activation: str, save_preact: bool) -> list[torch.Tensor]:
    return [x.new_empty((x.shape[0], w.shape[0])) for _ in range(2 if save_preact else 1) for w in weights]


def _dgrad_kernel(dzs: Any, weights: Any) -> torch.Tensor:
    from . import launch

    return launch.linear_dgrad(tuple(dzs), tuple(weights))


def _dgrad_fake(dzs: Any, weights: Any) -> torch.Tensor:
    return dzs[0].new_empty((dzs[0].shape[0], weights[0].shape[1]))


def _wgrad_kernel(dzs: Any, x: Any, want_bias: Any) -> list[torch.Tensor]:
    from . import launch

    dws, dbs = launch.linear_wgrad(tuple(dzs), x, want_bias)
    return dws + [db for db in dbs if db is not None]


def _wgrad_fake(dzs: Any, x: Any, want_bias: Any) -> list[torch.Tensor]:
    dws = [x.new_empty((dz.shape[1], x.shape[1])) for dz in dzs]
    return dws + [x.new_empty((dz.shape[1],)) for dz, want in zip(dzs, want_bias) if want]


def _act_grad_kernel(dy: Any, z: Any, activation: str) -> torch.Tensor:
    from . import launch

    return launch.act_grad(dy, z, activation)


def _act_grad_fake(dy: Any, z: Any, activation: str) -> torch.Tensor:
    return torch.empty_like(z)


linear_act_fwd = library.register(
    "linear_act_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, bool save_preact) -> Tensor[]",
    _fwd_kernel,
    _fwd_fake,
)
linear_dgrad = library.register("linear_dgrad(Tensor[] dzs, Tensor[] weights) -> Tensor", _dgrad_kernel, _dgrad_fake)
linear_wgrad = library.register(
    "linear_wgrad(Tensor[] dzs, Tensor x, bool[] want_bias) -> Tensor[]", _wgrad_kernel, _wgrad_fake
)
act_grad = library.register("act_grad(Tensor dy, Tensor z, str activation) -> Tensor", _act_grad_kernel, _act_grad_fake)
