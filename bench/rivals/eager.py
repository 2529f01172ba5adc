"""Torch's own functions, one after the other (``eager``), and through torch.compile (``compile``).

``cublas`` is the plain product alone, which torch passes to cuBLAS.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.dev.registry import Case
from ...kernels.linear import apply_activation
from ..harness import forms
from ..harness.rivals import Outputs, Rival, Run
from ..harness.stock import compiled

Tensor = torch.Tensor


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    s = x if residual is None else x + residual
    y = F.rms_norm(s, s.shape[-1:], weight, eps)
    return y if residual is None else (y, s)


def layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    s = x if residual is None else x + residual
    y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, s)


def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor | None]:
    return _rotated(q, cos, sin, interleaved), None if k is None else _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., heads, H] with its first 2 * cos.shape[-1] elements rotated, in fp32, and rounded once."""
    cos, sin, rotary = cos.unsqueeze(-2), sin.unsqueeze(-2), 2 * cos.shape[-1]
    head = x[..., :rotary]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary:]), dim=-1)


def linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, residual: Tensor | None
) -> list[Tensor]:
    ys = [apply_activation(F.linear(x, weight, bias), activation) for weight, bias in zip(weights, biases)]
    return ys if residual is None else [y + residual for y in ys]


def gated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str) -> Tensor:
    gate, up = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
    return apply_activation(gate, activation) * up


def refuses_norm(case: Case) -> str:
    """What the norms of other libraries have no argument for."""
    options = case.options
    if options["p"]:
        return "it has no dropout before the norm"
    if options["weight_offset"]:
        return "it adds no offset to the weight"
    if options["weight"] == "fp32" and case.dtype != torch.float32:
        return f"it takes no fp32 weight beside {case.dtype}"
    if options["residual"] == "fp32" and case.dtype != torch.float32:
        return f"it takes no fp32 residual beside {case.dtype}"
    return ""


def _refuses_epilogue(case: Case) -> str:
    plain = case.options["activation"] == "identity" and not case.options["residual"]
    return "" if plain else "it is the product alone, without activation and residual"


def no_compiler(device: torch.device) -> str:
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return "" if shutil.which(compiler) else f"torch.compile needs a C++ compiler, and there is no {compiler}"
    return ""


def _compiled(form: Callable[..., Run], forward: Callable[..., Any], **options: Any) -> Run:
    """``forward`` through torch.compile, compiled anew for each case."""
    of_case: dict[str, Run] = {}

    def run(inputs: dict[str, Any], case: Case) -> Outputs:
        if case.name not in of_case:
            of_case.clear()
            of_case[case.name] = form(compiled(forward), **options)
        return of_case[case.name](inputs, case)

    return run


_FORMS: tuple[tuple[str, Callable[..., Run], Callable[..., Any], dict[str, Any]], ...] = (
    ("rms_norm", forms.norm, rms_norm, {"bias": False}),
    ("layer_norm", forms.norm, layer_norm, {"bias": True}),
    ("rope", forms.rope, rope, {}),
    ("linear_act", forms.linear, linear, {}),
    ("gated_linear", forms.gated, gated, {}),
)


def _takes(op: str) -> Callable[[Case], str]:
    return refuses_norm if op.endswith("_norm") else lambda case: ""


RIVALS = (
    *(Rival("eager", op, form(forward, **more), refuses=_takes(op)) for op, form, forward, more in _FORMS),
    *(
        Rival("compile", op, _compiled(form, forward, **more), lacks=no_compiler, refuses=_takes(op))
        for op, form, forward, more in _FORMS
    ),
    Rival("cublas", "linear_act", forms.linear(linear), devices=("cuda",), refuses=_refuses_epilogue),
)
