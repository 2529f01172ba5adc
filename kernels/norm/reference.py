"""The specification of the ops in this folder, in plain torch; differentiable by torch's own autograd.

    s            residual + dropout(x), rounded once; x itself without a residual
    rms_norm     y = s / sqrt(mean(s^2) + eps) * (weight_offset + weight)
    layer_norm   y = (s - mean(s)) / sqrt(var(s) + eps) * (weight_offset + weight) + bias

Means and the variance (over D, not D - 1) are those of the rounded s. x, residual, s and y [..., D]; weight and bias
[D] or None. Everything between s and y is fp32 (fp64 for fp64) and y is rounded once, whatever the weight's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..dropout import reference as dropout


def residual_sum(
    x: torch.Tensor, residual: torch.Tensor, keep: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """residual + dropout(x), in the dtype to which the two promote; ``keep`` [T, D] bool (None: nothing is dropped)."""
    if keep is None:
        return x + residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return dropout.dropout(x.to(dtype), keep.view(x.shape), p, residual)


def rms_norm(
    s: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of s [..., D], in ``dtype``."""
    if plain(s, weight, None, weight_offset):
        return F.rms_norm(s, s.shape[-1:], weight, eps).to(dtype)
    wide = _wide(s, weight)
    assert weight is not None
    return F.rms_norm(s.to(wide), s.shape[-1:], weight.to(wide) + weight_offset, eps).to(dtype)


def layer_norm(
    s: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """LayerNorm (Ba et al., arXiv:1607.06450) of s [..., D], in ``dtype``."""
    if plain(s, weight, bias, weight_offset):
        return F.layer_norm(s, s.shape[-1:], weight, bias, eps).to(dtype)
    wide = _wide(s, weight, bias)
    scale = None if weight is None else weight.to(wide) + weight_offset
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(s.to(wide), s.shape[-1:], scale, shift, eps).to(dtype)


def plain(s: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, weight_offset: float) -> bool:
    """Whether torch's function takes these as they are. It refuses some mixed dtypes and warns of the others."""
    return (weight is None or (weight_offset == 0 and weight.dtype is s.dtype)) and (
        bias is None or bias.dtype is s.dtype
    )


def _wide(*tensors: torch.Tensor | None) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
