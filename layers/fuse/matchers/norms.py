"""The matcher of RMSNorms and LayerNorms over the last dimension, by the values that they compute."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from ....kernels.norm import layer_norm, rms_norm
from ....parallel.core import mappings
from ....parallel.core.mesh import SINGLE, Group
from ....parallel.core.sharding import local_tensors
from ...module import held
from ..probing import Foreign, foreign
from ..swap import Fused, Match, again, changed, settings_of
from ..view import View

_Candidate = tuple[str, float, float]


class _Norm(Match):
    def __init__(self, module: nn.Module, op: str, eps: float, offset: float) -> None:
        super().__init__((op,))
        self.op, self.eps, self.offset = op, eps, offset
        self.settings = settings_of(module)
        self.reads = (
            ("weight", "bias") if "bias" in module._parameters else ("weight",)
        )  # a search in vain takes longest
        self.across: Group = SINGLE  # the ranks over which the features are split

    def of_copy(self, module: nn.Module, original: nn.Module, memo: dict[int, Any]) -> Match:
        match: Any = super().of_copy(module, original, memo)
        match.settings = again(self.settings, module, original)
        return match


class FusedNorm(Fused):
    """The norm as one kernel, forward and backward."""

    def fused_forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        (x,) = args or kwargs.values()
        match, (weight, bias) = self._match, self._parameters_here()
        if match.across.size > 1:
            return self._across(x, weight)
        if weight is not None and weight.dtype != x.dtype:  # classes differ in the dtype of the result
            return self.stock_forward(x)
        if match.op == "rms_norm":
            return rms_norm(x, weight, eps=match.eps, weight_offset=match.offset)
        return layer_norm(x, weight, bias, eps=match.eps, weight_offset=match.offset)

    def _across(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of x [..., D/R], with the squares summed over the ranks; in fp32 (fp64 for fp64), as the kernel."""
        match, dtype = self._match, x.dtype
        if weight.dtype != dtype:
            dtype = self._stock.forward(View(self, {"weight": weight[:1].detach()}), x.new_zeros(1, 1)).dtype
        wide = x if x.dtype == torch.float64 else x.float()
        squares = mappings.reduce_from(wide.square().sum(-1, keepdim=True), match.across, site="norm.squares")
        squares = mappings.copy_to(squares, match.across, site="norm.squares")
        y = wide * torch.rsqrt(squares / (x.shape[-1] * match.across.size) + match.eps)
        return (y * (match.offset + weight.to(y.dtype))).to(dtype)

    def stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._match is None or (self._group() is SINGLE and not self._match.ranks.size > 1):
            return super().stock_forward(*args, **kwargs)
        weight, bias = self._parameters_here()
        return self._stock.forward(View(self, {"weight": weight, "bias": bias}), *args, **kwargs)

    def _parameters_here(self) -> tuple[Any, ...]:
        """Weight and bias, plain. If ranks have different tokens or heads, backward sums their gradients over them."""
        match = self._match
        both = (*held(self, *match.reads), None)[:2]
        if match.ranks is SINGLE:
            return both
        both, group = local_tensors(*both), self._group()
        return both if group is SINGLE else mappings.copy_all_to(both, group, site="norm")

    def _group(self) -> Group:
        match = self._match
        if match.sequence is not None:
            return match.sequence.group if match.sequence.active else SINGLE
        return match.group

    def why_stock(self) -> str | None:
        return changed(self, self._match.settings)


class Norm:
    """Matches a module with at most a weight and a bias that computes a norm of x, as a trial in fp64 shows."""

    fused = FusedNorm

    def match(self, module: nn.Module) -> Match | None:
        width = _width(module)
        if width is None:
            return None
        drawn = torch.Generator().manual_seed(0)
        params = {
            name: None if param is None else torch.rand(width, generator=drawn, dtype=torch.float64) + 0.5
            for name, param in module._parameters.items()
        }
        xs = [torch.randn(*sizes, width, generator=drawn, dtype=torch.float64) for sizes in ((3,), (2, 3), (2, 3, 5))]
        for x in xs:
            x[0] *= 1e-3  # here eps matters
            x[1] += 3  # a mean other than 0
        stand_in = copy.copy(module)
        stand_in.__dict__["_parameters"] = {name: p if p is None else nn.Parameter(p) for name, p in params.items()}
        try:
            theirs = [_with_grads(stand_in.forward, x, foreign) for x in xs]
        except Foreign:
            return None
        if not all(theirs):
            return None
        for op, eps, offset in _candidates(module):
            norm = partial(_norm, op=op, params=params, eps=eps, offset=offset)
            ours = [_with_grads(norm, x, contextlib.nullcontext) for x in xs]
            if all(_close(mine, yours) for mine, yours in zip(ours, theirs)):
                return _Norm(module, op, eps, offset)
        return None


@torch.enable_grad()
def _with_grads(
    function: Any, x: torch.Tensor, whose: Callable[[str], AbstractContextManager[Any]]
) -> list[torch.Tensor]:
    """The result and the gradient of x, which shows whether statistics are computed or constant; [] without these."""
    x = x.clone().requires_grad_()
    with whose("its forward"):
        y = function(x)
    if not isinstance(y, torch.Tensor) or not y.requires_grad or y.is_complex() or y.layout is not torch.strided:
        return []
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    with whose("its backward"):
        (grad,) = torch.autograd.grad((y.double() * weights).sum(), x, allow_unused=True)
    return [] if grad is None else [y.detach(), grad]


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether results agree to fp32: many norms compute in fp32 for any input."""
    return all(
        a.shape == b.shape and torch.allclose(a, b.double(), 1e-4, 1e-5 * float(a.abs().max()))
        for a, b in zip(ours, theirs)
    )


def _width(module: nn.Module) -> int | None:
    """The width of a module that might be a norm: with vectors as parameters, one argument and no children."""
    if module._modules or module._buffers or not set(module._parameters) <= {"weight", "bias"}:
        return None
    takes = list(inspect.signature(module.forward).parameters.values())
    if len(takes) != 1 or takes[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    shapes = {tuple(param.shape) for param in module._parameters.values() if param is not None}
    shapes |= {tuple(getattr(module, "normalized_shape", ()))} - {()}
    if len(shapes) > 1:
        return None
    if not shapes:  # without parameters any width will do
        return 16 if any(_is_eps(value) for value in vars(module).values()) else None
    shape = shapes.pop()
    return shape[0] if len(shape) == 1 and shape[0] else None


def _candidates(module: nn.Module) -> list[_Candidate]:
    """The norms that ``module`` might compute: (op, eps, the weight's offset) each."""
    epsilons = dict.fromkeys([*filter(_is_eps, vars(module).values()), 1e-5, 1e-6])
    offsets = (0.0, 1.0) if module._parameters.get("weight") is not None else (0.0,)
    ops = ("layer_norm", "rms_norm") if module._parameters.get("bias") is None else ("layer_norm",)
    return [(op, eps, offset) for op in ops for eps in epsilons for offset in offsets]


def _is_eps(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 0.1


def _norm(x: torch.Tensor, op: str, params: dict[str, torch.Tensor | None], eps: float, offset: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True) if op == "layer_norm" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    weight, bias = params.get("weight"), params.get("bias")
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias
