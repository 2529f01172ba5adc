"""Liger's norms, rotation, gated activation and Llama, of liger-kernel 0.8.5. No GPU has run this adapter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.dev.registry import Case
from ..harness import forms
from ..harness.rivals import Rival
from .eager import refuses_norm

Tensor = torch.Tensor
OFFSET, CASTING, IN_PLACE = 0.0, "gemma", False  # "gemma" computes in fp32, like our reference


def _op(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    if residual is None:
        return _op("rms_norm", "LigerRMSNormFunction").apply(x, weight, eps, OFFSET, CASTING, IN_PLACE)
    fused = _op("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return fused.apply(x, residual, weight, eps, OFFSET, CASTING, IN_PLACE)


def layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    return _op("layer_norm", "LigerLayerNormFunction").apply(x, weight, bias, eps)


def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Of q [B, S, N, H] and k, in place; Liger wants heads before tokens, and tables [1, S, P] of both halves.

    Its backward rotates the incoming gradients in place, too: it gets copies, because they are the op's inputs here.
    """
    assert k is not None
    tables = (torch.cat((table, table), dim=-1).unsqueeze(0) for table in (cos, sin))
    rotated = _op("rope", "LigerRopeFunction").apply(q.transpose(1, 2), k.transpose(1, 2), *tables)
    for out in rotated:
        if out.requires_grad:
            out.register_hook(torch.clone)
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


def gated(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str) -> Tensor:
    """Two products of torch's, then Liger's activation and product."""
    gate, up = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
    module, name = _MULTIPLY[activation]
    return _op(module, name).apply(gate, up)


_MULTIPLY = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}


def llama(model: torch.nn.Module) -> Callable[..., Any]:
    """Puts Liger's kernels into a Llama of transformers, and returns its call.

    Liger replaces names in the module of Llama's code, too, its rotation only there: this call alone sees them.
    """
    code = vars(importlib.import_module("transformers.models.llama.modeling_llama"))
    stock = dict(code)
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    patched = {name: value for name, value in code.items() if stock.get(name) is not value}
    code.update(stock)

    def call(*args: Any, **kwargs: Any) -> Any:
        code.update(patched)
        try:
            return model(*args, **kwargs)
        finally:
            code.update(stock)

    return call


def _refuses_rms_norm(case: Case) -> str:
    if case.options["residual"] is not None and case.options["weight"] is None:
        return "its norm after a sum needs a weight"
    return refuses_norm(case)


def _refuses_layer_norm(case: Case) -> str:
    if case.options["residual"] is not None:
        return "its layer norm adds no residual"
    if case.options["weight"] is None or not case.options["bias"]:
        return "its layer norm needs weight and bias"
    return refuses_norm(case)


def _refuses_rope(case: Case) -> str:
    if case.options["interleaved"]:
        return "it rotates halves, not neighbours"
    if not case.options["inplace"]:
        return "it rotates in place"
    return "" if case.sizes["B"] and case.sizes["K"] else "it takes a batch [B, S] of q and k"


def _refuses_gated(case: Case) -> str:
    known = case.options["activation"] in _MULTIPLY
    return "" if known else f"its products are with {' and '.join(_MULTIPLY)} only"


def _rival(op: str, run: Any, refuses: Any) -> Rival:
    return Rival("liger", op, run, None, "liger_kernel", "liger-kernel", "0.8", ("cuda",), refuses=refuses)


RIVALS = (
    _rival("rms_norm", forms.norm(rms_norm, bias=False), _refuses_rms_norm),
    _rival("layer_norm", forms.norm(layer_norm, bias=True), _refuses_layer_norm),
    _rival("rope", forms.rope(rope), _refuses_rope),
    _rival("gated_linear", forms.gated(gated), _refuses_gated),
)
